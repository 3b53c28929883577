"""Claims that are measured by training: arms, seeds, and what is read of each run."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.claims.definition import Workplace
from experiments.claims.estimates import MeasuredValues, NotMeasured, Points

from gnomon.analysis.compare.run import ComparisonJob, run_jobs
from gnomon.core.errors import RunDirectoryError, RunError, Stopped
from gnomon.core.svg import Series, chart
from gnomon.records.reading import RunRecord, column
from gnomon.tasks.question import digest

Number = Callable[[RunRecord], float]
Trace = Callable[[RunRecord], Points]


@dataclass(frozen=True)
class Arm:
    """One thing that is tried: an experiment as a table, and what is said over it (``key=value``)."""

    name: str
    table: Mapping[str, Any]
    overrides: tuple[str, ...] = ()


def in_processes(jobs: Sequence[ComparisonJob], place: Workplace) -> None:
    """Train each job in a `gnomon train` process of its own, those that are not finished yet."""
    try:
        run_jobs(jobs, place.workers, place.console)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f"{error}. Runs of claims are kept: --finished measures them as they are (a key that is new since then "
            "changes nothing of what was run), --work DIR trains all of them anew, and without that folder it alone"
        ) from error


@dataclass(frozen=True)
class Runs:
    """Measures by training: every arm with every seed, each a `gnomon train` process of its own.

    arms: (folder for models and tables, seed) -> arms. They should share model, task and budget, so that seeds pair.
    numbers, curves: what is measured of each run, by name; a function that raises `NotMeasured` leaves its cell out.
    is_partial: measure a run that failed, too, as far as it came; otherwise it gives no number.
    train: brings every job to its end; a claim that changes what a process does brings its own.
    """

    arms: Callable[[Path, int], Sequence[Arm]]
    numbers: Mapping[str, Number]
    curves: Mapping[str, Trace]
    seeds: tuple[int, ...] = (0, 1, 2)
    is_partial: bool = False
    train: Callable[[Sequence[ComparisonJob], Workplace], None] = in_processes

    def __call__(self, place: Workplace) -> MeasuredValues:
        """Run what has not been run, and measure."""
        plans = {(arm.name, seed): arm for seed in self.seeds for arm in self.arms(place.folder / "models", seed)}
        jobs = {key: _job(arm, key[1], place.folder) for key, arm in plans.items()}
        try:
            if place.is_training:
                self.train(list(jobs.values()), place)
        except Stopped:
            raise
        except RunError as error:
            place.console.warn(f"some runs failed; what the others gave is measured: {error}")
        numbers: dict[str, dict[str, dict[int, float]]] = {}
        curves: dict[str, dict[str, dict[int, Points]]] = {}
        failures: list[str] = []
        left_out: dict[tuple[str, str], list[str]] = {}
        for (name, seed), job in jobs.items():
            record = RunRecord(job.folder)
            is_whole = record.state() == "finished"
            failures += [] if is_whole else [f"{job.name}: {_how_far(record)}"]
            if is_whole or (self.is_partial and record.metrics()):
                for number, why in _fill(numbers.setdefault(name, {}), self.numbers, record, seed):
                    left_out.setdefault((name, number), []).append(f"{number} of {name}, seed {seed}: {why}")
                _fill(curves.setdefault(name, {}), self.curves, record, seed)
        for (name, number), reasons in left_out.items():
            # What no seed of an arm has is not meant to be there.
            for reason in reasons if numbers[name].get(number) else ():
                place.console.warn(f"a cell has fewer seeds: {reason}")
        spent = [job.cpu_seconds() for job in jobs.values()]
        seconds = None if None in spent else sum(filter(None, spent))
        cards = [RunRecord(job.folder).card() for job in jobs.values()]
        return MeasuredValues(numbers, curves, failures, seconds, _inexact(cards), _code(cards))

    def records(self, folder: Path, seed: int) -> dict[str, RunRecord]:
        """Return the runs of a seed by arm, below `Workplace.folder`: for a measure that needs several at once."""
        return {arm.name: RunRecord(_job(arm, seed, folder).folder) for arm in self.arms(folder / "models", seed)}


def _inexact(cards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what the cards of runs say that are not repeatable to the bit (R0), and how many say it."""
    levels = Counter(str(card.get("reproducibility", "R0")) for card in cards)
    return tuple(f"{count} of {len(cards)} runs: {level}" for level, count in levels.items() if level[:2] != "R0")


def _code(cards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the commits of gnomon that the sessions of these runs were made by, each once, in order."""
    sessions = [session for card in cards if card for session in (card, *card.get("resumed", ()))]
    return tuple(sorted({_commit(session) for session in sessions}))


def _commit(session: Mapping[str, Any]) -> str:
    found = (session.get("code") or {}).get("gnomon")
    if not found:
        return "no commit"
    return f"{found['commit'][:10]}{' and changes' if found.get('dirty') else ''}"


def _how_far(record: RunRecord) -> str:
    done = len(record.metrics())
    return f"ended after {done} of {record.steps()} steps" if record.files.experiment.exists() else "not run"


def _fill(
    cells: dict[str, dict[int, Any]], measures: Mapping[str, Any], record: RunRecord, seed: int
) -> list[tuple[str, str]]:
    """Measure a run into ``cells``, and return by name, with the reason, what it does not give."""
    left_out = []
    for name, measure in measures.items():
        found = cells.setdefault(name, {})
        try:
            found[seed] = measure(record)
        except NotMeasured as error:
            left_out.append((name, str(error)))
    return left_out


def _job(arm: Arm, seed: int, folder: Path) -> ComparisonJob:
    overrides = (*arm.overrides, f"seed={seed}")
    # Another table is another run, and the same one is the same run, whichever claim it is for.
    name = re.sub(r"[^a-z0-9.]+", "-", arm.name.lower()).strip("-")
    place = folder / "runs" / name / f"seed-{seed}-{digest(arm.table, overrides)}"
    return ComparisonJob(f"{arm.name}, seed {seed}", arm.table, overrides, place)


@dataclass(frozen=True)
class ArmLine:
    """One line of a picture: a curve of an arm, and what it is called; the arm's name where nothing is said."""

    arm: str
    curve: str
    name: str = ""


@dataclass(frozen=True)
class Lines:
    """A picture of curves: each the mean over seeds, in a band from the lowest seed to the highest.

    What was not run is left out.
    """

    title: str
    y_label: str
    lines: tuple[ArmLine, ...]
    x_label: str = "step"

    def __call__(self, measured: MeasuredValues) -> str:
        """Return the picture as SVG."""
        series = []
        for line in self.lines:
            points = measured.curve(line.arm, line.curve)
            xs, means = [x for x, _ in points], [sum(values) / len(values) for _, values in points]
            lows, highs = [min(values) for _, values in points], [max(values) for _, values in points]
            series += [Series(line.name or line.arm, xs, means, lows, highs)] if points else []
        return chart(series, self.title, self.x_label, self.y_label)


@dataclass(frozen=True)
class Curve:
    """A picture of one curve, an arm a line.

    name: of the curve. title, y_label, x_label: of the picture. arms: which, in order; all when none is named.
    """

    name: str
    title: str
    y_label: str
    x_label: str = "step"
    arms: tuple[str, ...] = ()

    def __call__(self, measured: MeasuredValues) -> str:
        """Return the picture as SVG."""
        lines = tuple(ArmLine(arm, self.name) for arm in self.arms or measured.arms)
        return Lines(self.title, self.y_label, lines, self.x_label)(measured)


def trace(name: str) -> Trace:
    """Return what reads a metric at every step. A run without it gives an empty curve."""
    return lambda record: column(record.metrics(), name)


def smooth(name: str, window: int) -> Trace:
    """Return what reads the mean of a metric over each ``window`` steps, at the middle of them."""

    def read(record: RunRecord) -> Points:
        points = column(record.metrics(), name)
        blocks = [points[start : start + window] for start in range(0, len(points), window)]
        return [(_mean([float(x) for x, _ in block]), _mean([y for _, y in block])) for block in blocks]

    return read


def last(name: str, steps: int) -> Number:
    """Return what reads the mean of a metric over the last ``steps`` steps. It raises NotMeasured without any."""
    return lambda record: _mean([y for _, y in column(record.metrics(), name)[-steps:]])


def first(name: str, steps: int) -> Number:
    """Return what reads the mean of a metric over the first ``steps`` steps."""
    return lambda record: _mean([y for _, y in column(record.metrics(), name)[:steps]])


def whole(name: str) -> Number:
    """Return what reads the mean of a metric over all steps."""
    return lambda record: _mean([y for _, y in column(record.metrics(), name)])


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise NotMeasured("no step has it")
    return sum(values) / len(values)
