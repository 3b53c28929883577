"""Train every case with every seed, diagnose the runs, and count what was found and what was found in vain.

    python experiments/diagnosis/run.py --folder runs/diagnosis [--set reported]
    python experiments/diagnosis/run.py --folder runs/diagnosis --judge
    python experiments/diagnosis/run.py --write

Runs that are there are not made again, so it can be stopped and begun again, and several can work at once in one
folder. `--judge` reads all runs and writes results.json and the tables of docs/diagnosis.md;
`--write` writes the tables from results.json alone.
"""

import argparse
import fcntl
import io
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import (
    HEALTHY,
    HEALTHY_REPORTED_ON,
    HEALTHY_TUNED_ON,
    REPORTED_ON,
    SICK,
    STEPS,
    TUNED_ON,
    Case,
    base,
    write_tables,
)
from faults import faulty

import gnomon.training.api
from gnomon.config.experiment import from_table
from gnomon.config.reading import read
from gnomon.core.errors import RunError, Stopped
from gnomon.core.statistics import wilson_interval
from gnomon.diagnosis.catalog import RULES
from gnomon.diagnosis.doctor import Doctor
from gnomon.diagnosis.finding import Finding
from gnomon.diagnosis.recorded import groups_of, replay
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
BEGIN, END = "<!-- begin: run.py --judge -->", "<!-- end: run.py --judge -->"


@dataclass(frozen=True)
class Job:
    """One run: a case, a seed, and whether its thresholds were tuned on it."""

    case: Case
    seed: int
    is_tuned_on: bool

    def folder(self, root: Path) -> Path:
        """Return where it lies."""
        kind = "healthy" if self.case.is_healthy else "sick"
        name = self.case.name.replace(",", "").replace(" ", "-").replace("/", "by")
        return root / "runs" / kind / f"{name}-{self.seed}"


def jobs(which: str = "all") -> Iterator[Job]:
    """Yield every run of a set: "tuned", "reported" or "all"; first seeds first, so that parts of it say something."""
    for tuned, sick, healthy in ((True, TUNED_ON, HEALTHY_TUNED_ON), (False, REPORTED_ON, HEALTHY_REPORTED_ON)):
        if which not in ("all", "tuned" if tuned else "reported"):
            continue
        for place in range(max(len(sick), len(healthy))):
            yield from (Job(case, sick[place], tuned) for case in SICK if place < len(sick))
            yield from (Job(case, healthy[place], tuned) for case in HEALTHY if place < len(healthy))


def train(job: Job, root: Path) -> str:
    """Make a run unless it is there, or another process is at it; return how it ended."""
    folder = job.folder(root)
    said = folder / "ended.txt"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "under way elsewhere"
        if not said.exists():
            said.write_text(_made(job, root, folder))
        return said.read_text()


def _made(job: Job, root: Path, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    table, overrides = base(job.case, root, job.seed)
    experiment = from_table(read(table) if isinstance(table, str) else table, overrides)
    ended, kept = "finished", sys.stderr
    try:
        sys.stderr = io.StringIO()
        with faulty(job.case.fault):
            train_experiment(experiment, folder)
    except Stopped:
        raise
    except RunError as error:
        ended = f"{type(error).__name__}: {error}"
    finally:
        sys.stderr = kept
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return ended


def heard(folder: Path) -> list[Finding]:
    """Return every finding of a run when it was new or became graver, as the run itself would have said it."""
    record = RunRecord.of(folder)
    doctor = Doctor(record.experiment())
    return replay(doctor, record.metrics(), record.evaluations(), lambda step: groups_of(record.rollouts(step)))


def judge(job: Job, root: Path) -> dict[str, object]:
    """Return what the diagnosis says of a run."""
    found = heard(job.folder(root))
    first = [f for f in found if f.rule in job.case.expected and f.severity != "note"]
    gravest = {f.rule: f.severity for f in found}
    return {
        "case": job.case.name,
        "seed": job.seed,
        "is_healthy": job.case.is_healthy,
        "is_tuned_on": job.is_tuned_on,
        "ended": train(job, root).split(":")[0],
        "steps": len(RunRecord.of(job.folder(root)).metrics()),
        "found": bool(first),
        "step": first[0].step if first else None,
        "rule": first[0].rule if first else None,
        "severity": max((gravest[f.rule] for f in first), key=("warning", "severe").index) if first else None,
        "findings": gravest,
    }


def tables(rows: Sequence[dict[str, object]]) -> str:
    """Return the tables of the page, in Markdown."""
    lines = [
        "| what is wrong | runs | found | severe | median step | by | other severe findings |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in SICK:
        own = [row for row in rows if row["case"] == case.name and not row["is_healthy"]]
        if not own:
            continue
        found = [row for row in own if row["found"]]
        steps = statistics.median(row["step"] for row in found) if found else None
        by = sorted({str(row["rule"]) for row in found})
        others = _severe(own, case.expected)
        lines.append(
            f"| {case.name} | {len(own)} | {len(found)} | {sum(r['severity'] == 'severe' for r in found)} "
            f"| {'-' if steps is None else f'{steps:g}'} | {', '.join(by) or '-'} | {others} |"
        )
    sick = [row for row in rows if not row["is_healthy"]]
    found = sum(bool(row["found"]) for row in sick)
    several = {row["case"] for row in sick if len({r["seed"] for r in sick if r["case"] == row["case"]}) > 1}
    share = f"{found} of {len(sick)} runs ({found / max(len(sick), 1):.0%})"
    lines += ["", f"Found in all: {share}; {len(several)} faults have more than one seed.", ""]
    lines += ["What was found in healthy runs:", ""]
    healthy = [row for row in rows if row["is_healthy"]]
    lines += ["| rule | severe | warning | note | in |", "|---|---|---|---|---|"]
    names = sorted({rule for row in healthy for rule in row["findings"]})
    for name in names:
        by = {s: [r for r in healthy if r["findings"].get(name) == s] for s in ("severe", "warning", "note")}
        where = sorted({str(r["case"]) for kind in by.values() for r in kind})
        said = ", ".join(where[:6]) + (f" and {len(where) - 6} more" if len(where) > 6 else "")
        lines.append(f"| {name} | {len(by['severe'])} | {len(by['warning'])} | {len(by['note'])} | {said} |")
    for severity in ("severe", "warning", "note"):
        count = sum(severity in row["findings"].values() for row in healthy)
        share = f"{count} of {len(healthy)} healthy runs ({count / max(len(healthy), 1):.0%})"
        lines.append(f"\n{share} have a finding that is {severity}.")
    return "\n".join(lines)


def rates(rows: Sequence[dict[str, object]], rules: Sequence[str] = tuple(RULES)) -> str:
    """Return the rates of misses and of false alarms of every rule, with Wilson's intervals, in Markdown.

    A miss is a run with a fault that the rule was written down for and does not warn of, though another rule may; a
    false alarm is a healthy run that it warns of. Notes are neither. rules: those that looked at these runs.
    """
    lines = ["| rule | faulty runs that are its own | missed | healthy runs | false alarms |", "|---|---|---|---|---|"]
    meant = {case.name: case.expected for case in SICK}
    healthy = [row for row in rows if row["is_healthy"]]
    for name in rules:
        own = [row for row in rows if not row["is_healthy"] and name in meant[str(row["case"])]]
        missed, warned = (
            sum((row["findings"].get(name, "note") != "note") == is_said for row in among)
            for among, is_said in ((own, False), (healthy, True))
        )
        lines.append(
            f"| `{name}` | {len(own)} | {_rate(missed, len(own))} | {len(healthy)} | {_rate(warned, len(healthy))} |"
        )
    return "\n".join(lines)


def _rate(count: int, runs: int) -> str:
    if not runs:
        return "not tried"
    interval = wilson_interval(count, runs)
    return f"{count} ({count / runs:.0%}; {interval.low:.0%} to {interval.high:.0%})"


def page(rows: Sequence[dict[str, object]], rules: Sequence[str] = tuple(RULES)) -> str:
    """Return docs/diagnosis.md with the tables of these runs between its marks; rules: those that looked at them."""
    before, mark, rest = PAGE.read_text().partition(BEGIN)
    said = f"{tables(rows)}\n\nRates by rule, with Wilson's 95% intervals:\n\n{rates(rows, rules)}"
    if newer := [f"`{name}`" for name in RULES if name not in rules]:
        said += f"\n\nNewer than these runs, so without rates: {', '.join(newer)}."
    return f"{before}{mark}\n\n{said}\n\n{END}{rest.partition(END)[2]}"


def _severe(rows: Sequence[dict[str, object]], expected: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        for rule, severity in row["findings"].items():
            if severity == "severe" and rule not in expected:
                counts[rule] = counts.get(rule, 0) + 1
    return ", ".join(f"{rule} {count}" for rule, count in sorted(counts.items())) or "-"


def main() -> None:
    """Train the runs that are not there yet, or judge all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/diagnosis"))
    parser.add_argument("--set", choices=["all", "tuned", "reported"], default="all")
    parser.add_argument("--judge", action="store_true", help="diagnose the runs of the set, and write results.json")
    parser.add_argument("--write", action="store_true", help="write the tables of the page from results.json")
    given = parser.parse_args()
    if given.write:
        recorded = json.loads(RESULTS.read_text())
        PAGE.write_text(page(recorded["runs"], recorded["rules"]))
        return
    root = given.folder.resolve()
    write_tables(root)
    if given.judge:
        rows = [judge(job, root) for job in jobs(given.set) if (job.folder(root) / "ended.txt").exists()]
        if given.set != "tuned":
            RESULTS.write_text(json.dumps({"steps": STEPS, "rules": list(RULES), "runs": rows}, indent=1) + "\n")
        shown = [row for row in rows if given.set != "all" or not row["is_tuned_on"]]
        print(tables(shown))
        if given.set != "tuned":
            PAGE.write_text(page(shown))
        return
    # Every reward here is known to load, and trying each before each run takes longer than a tenth of the run.
    gnomon.training.api.check = lambda grading, limits: None
    # Nobody reads the pages of these runs.
    gnomon.training.api.leave_page = lambda directory, console: None
    for job in jobs(given.set):
        began = time.monotonic()
        ended = train(job, root)
        print(f"{job.folder(root).name}: {ended[:100]} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
