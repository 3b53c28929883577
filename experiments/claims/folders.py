"""Claims as they lie in a clone: ``experiments/NAME`` with ``claim.py``, and what came of it."""

import datetime
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.claims.definition import Claim, ClaimOutcome, ClaimVerdict, Expectation, Workplace
from experiments.claims.estimates import MeasuredValues, NotMeasured

from gnomon.algorithms.user_pieces import load_object
from gnomon.core.atomic_files import write_durably, write_json
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.user_code import on_user_code
from gnomon.records.console import Console
from gnomon.records.run_card import PACKAGES, cpu_name, installed

# Which numbers the remarks of a claim's page were written for.
#
# Remarks are written by hand, numbers are measured again: what was said of the ones need not hold of the others. So
# beside the numbers stands for which ones the remarks were written, and a page with other ones says so by itself.


@dataclass(frozen=True)
class Remarked:
    """The numbers that remarks belong to. text, shown: digests of the remarks, and of what the page showed then.

    date: ISO, of the day on which those numbers were measured.
    """

    text: str
    shown: str
    date: str


def remarked(claim: Claim, measured: MeasuredValues, date: str, known: Remarked | None) -> Remarked | None:
    """Return what the remarks belong to: as known while their text is the same, else the numbers that are there now.

    Whoever changes the text has read the numbers. None for a claim without remarks.
    """
    text = _digest(claim.remarks)
    if not claim.remarks or (known is not None and known.text == text):
        return known if claim.remarks else None
    return Remarked(text, shown(claim, measured), date)


def is_outdated(claim: Claim, measured: MeasuredValues, known: Remarked | None) -> bool:
    """Whether the remarks are the ones that were written for other numbers than these."""
    return known is not None and known.text == _digest(claim.remarks) and known.shown != shown(claim, measured)


def shown(claim: Claim, measured: MeasuredValues) -> str:
    """Return a digest of what an appendix shows: outcomes, and numbers as they stand in its table."""
    verdict = claim.judge(measured)
    outcomes = [[outcome.word, outcome.measured] for outcome in (*verdict.checks, *verdict.outcomes)]
    numbers = {
        arm: {name: _estimated(measured, arm, name) for name in found} for arm, found in measured.numbers.items()
    }
    return _digest(json.dumps([outcomes, numbers], sort_keys=True))


def read_remarked(row: Any) -> Remarked | None:
    """Return what a file says; results from before say nothing. Raises: TypeError for something else."""
    if row is None:
        return None
    texts = [row.get(name) for name in ("text", "shown", "date")] if isinstance(row, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("remarks are no digests with a date")
    return Remarked(*map(str, texts))


def _estimated(measured: MeasuredValues, arm: str, name: str) -> str:
    try:
        return str(measured.estimate(arm, name))
    except NotMeasured:
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


CODE, RESULTS, FIGURE, PAGE, APPENDIX = "claim.py", "results.json", "figure.svg", "README.md", "appendix.md"


@dataclass(frozen=True)
class Tested:
    """What a claim's folder records of the last time that it was measured.

    date: ISO, of the day. machine: processor and cores, in words. seconds: that it took this last time; runs that were
    finished before are not in it. cpu_minutes: of one core, that all runs took, and what was measured of them; None
    where that is not known. remarks: the numbers that the page's remarks belong to; None where that is not known.
    """

    measured: MeasuredValues
    date: str
    machine: str
    versions: Mapping[str, str]
    seconds: float
    cpu_minutes: float | None = None
    remarks: Remarked | None = None


@dataclass(frozen=True)
class ClaimFolder:
    """The folder of one claim."""

    path: Path

    @property
    def name(self) -> str:
        """What `gnomon reproduce` calls it."""
        return self.path.name

    def claim(self) -> Claim:
        """Run ``claim.py`` and return its CLAIM. Raises: ConfigError saying what is wrong with the file."""
        source = self.path / CODE
        try:
            # Of a claim nothing is named by an experiment of the user's: it is what the verb is about.
            with on_user_code(lambda named: None):
                found = load_object(f"{source}:CLAIM")
        except ConfigError as error:
            why = error.__cause__
            if why is None:
                raise ConfigError(f"{source} says no CLAIM = Claim(...)") from error
            raise ConfigError(f"{source} cannot be run: {type(why).__name__}: {why}") from why
        if not isinstance(found, Claim):
            raise ConfigError(f"{source} says no CLAIM = Claim(...)")
        return found

    def tested(self) -> Tested | None:
        """Return what was measured the last time; None when it never was. Raises: ConfigError for a damaged file."""
        path = self.path / RESULTS
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            return _tested(row)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); remove it and reproduce the claim again") from error

    def verdict(self) -> ClaimVerdict:
        """Return the verdict on what was measured the last time; nothing measured is "not run"."""
        tested = self.tested()
        return self.claim().judge(MeasuredValues() if tested is None else tested.measured)

    def reproduce(self, work: Path, console: Console, workers: int, is_training: bool = True) -> Tested:
        """Measure the claim as `Workplace` says, and write what came of it into ``results.json``."""
        began, spent = time.perf_counter(), time.process_time()
        earlier = self.tested()
        if earlier is not None:
            # Remarks that are there already were written for these.
            earlier = self._remarked(earlier)
        measured = self.claim().measure(Workplace(work, self.path, console, workers, is_training))
        tested = Tested(
            # Judged as it is written down, so that whoever reads the file comes to the same words.
            measured=MeasuredValues.of_row(_rounded(measured.as_row())),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=machine(),
            versions={"python": platform.python_version(), **installed(PACKAGES[:6])},
            seconds=round(time.perf_counter() - began, 1),
            cpu_minutes=_cost(measured.cpu_seconds, time.process_time() - spent, earlier),
            remarks=earlier.remarks if earlier else None,
        )
        tested = self._remarked(tested)
        write_json(self.path / RESULTS, self.row(tested))
        return tested

    def read_again(self) -> Tested | None:
        """Return `tested`, after writing it anew where the claim's rule or remarks now say something else of it."""
        tested = self.tested()
        if tested is None:
            return None
        tested = self._remarked(tested)
        row = self.row(tested)
        if row != json.loads((self.path / RESULTS).read_text(encoding="utf-8")):
            write_json(self.path / RESULTS, row)
        return tested

    def _remarked(self, tested: Tested) -> Tested:
        return replace(tested, remarks=remarked(self.claim(), tested.measured, tested.date, tested.remarks))

    def row(self, tested: Tested | None) -> dict[str, Any]:
        """Return one JSON object with verdict, outcomes and numbers."""
        claim = self.claim()
        verdict = claim.judge(MeasuredValues() if tested is None else tested.measured)
        row: dict[str, Any] = {
            "claim": self.name,
            "title": claim.title,
            "verdict": verdict.word,
            "checks": _told(claim.checks, verdict.checks),
            "expectations": _told(claim.expectations, verdict.outcomes),
        }
        if tested is None:
            return row
        facts = {"date": tested.date, "machine": tested.machine, "versions": dict(tested.versions)}
        cost = {} if tested.cpu_minutes is None else {"cpu_minutes": tested.cpu_minutes}
        told = {} if tested.remarks is None else {"remarks": asdict(tested.remarks)}
        return row | facts | {"seconds": tested.seconds} | cost | told | tested.measured.as_row()

    def write_figure(self, tested: Tested | None) -> None:
        """Draw the figure again, where the claim has one and something was measured."""
        claim = self.claim()
        if claim.figure is not None and tested is not None:
            from gnomon.core.svg import write_svg

            write_svg(self.path / FIGURE, claim.figure(tested.measured))


def _tested(row: Mapping[str, Any]) -> Tested:
    """Return what a row says. Raises: KeyError, TypeError, ConfigError where it is something else."""
    wanted: Mapping[str, tuple[type, ...]] = {
        "date": (str,), "machine": (str,), "versions": (dict,), "seconds": (int, float),
    }  # fmt: skip
    for name, kinds in wanted.items():
        if type(row[name]) not in kinds:
            raise TypeError(f"{name} is {type(row[name]).__name__}")
    minutes = row.get("cpu_minutes")
    if type(minutes) not in (int, float, type(None)) or not all(type(v) is str for v in row["versions"].values()):
        raise TypeError("cpu_minutes is no number, or a version no text")
    known = read_remarked(row.get("remarks"))
    return Tested(
        MeasuredValues.of_row(row), row["date"], row["machine"], row["versions"], row["seconds"], minutes, known
    )


def _cost(runs: float | None, own: float, earlier: Tested | None) -> float | None:
    """Return the minutes of runs and of measuring them; what was known earlier where it is not known now."""
    if runs is None:
        return earlier.cpu_minutes if earlier else None
    return round((runs + own) / 60, 1)


def _told(expectations: Sequence[Expectation], outcomes: Sequence[ClaimOutcome]) -> list[dict[str, str]]:
    pairs = zip(expectations, outcomes, strict=True)
    return [
        {"says": e.says, "outcome": o.word, "measured": o.measured}
        | ({"settled_by": o.settled_by} if o.settled_by else {})
        for e, o in pairs
    ]


def claim_folders(root: Path) -> dict[str, ClaimFolder]:
    """Return the claims below ``root`` by name, in order; a package of code, like this one, is no claim."""
    folders = [path.parent for path in sorted(root.glob(f"*/{CODE}"))]
    return {folder.name: ClaimFolder(folder) for folder in folders if not (folder / "__init__.py").exists()}


def experiments_folder(given: Path | None = None) -> Path:
    """Return the folder of experiments: the one given, or the one of the clone that gnomon runs from.

    Raises: ConfigError when there is none: an installed package brings no experiments.
    """
    found = given or Path(__file__).resolve().parents[1]
    if found.is_dir():
        return found
    why = "is no folder" if given else "is not there: this gnomon is installed without its clone"
    raise ConfigError(
        f"claims are read from a folder of experiments, and {found} {why}; clone the repository and run its gnomon, or "
        "give the folder with --experiments DIR"
    )


def chosen(name: str, root: Path) -> ClaimFolder:
    """Return the folder of the claim of this name. Raises: ConfigError naming the nearest one."""
    known = claim_folders(root)
    if name not in known:
        raise ConfigError(unknown("claim", name, known))
    return known[name]


def machine() -> str:
    """Return the processor in words."""
    return f"{cpu_name()}, {os.cpu_count() or 1} cores"


def write_text(path: Path, text: str) -> None:
    """Replace a file of text at once."""
    write_durably(path, text.encode(), is_synced=False)


def _rounded(value: Any) -> Any:
    """Return ``value`` with every number to six digits: more says nothing, and fills the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(below) for key, below in value.items()}
    return [_rounded(below) for below in value] if isinstance(value, list | tuple) else value
