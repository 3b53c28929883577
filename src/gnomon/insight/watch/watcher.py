"""A run as a live view knows it: each look reads what was added since the one before."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from gnomon.core.atomic_files import numbered, open_plain, read_plain
from gnomon.core.tables import parse_toml
from gnomon.diagnosis import Finding, FindingSample
from gnomon.diagnosis.current_findings import read_current_findings
from gnomon.diagnosis.finding import newest
from gnomon.records.corruption import ROLLOUTS, chosen_rollouts, damaged_rollouts
from gnomon.records.directory import LockOwner, RunDirectory, lock_owner
from gnomon.records.jsonl import budget_of, ended, is_number, is_step, parsed
from gnomon.records.run_card import end_of

# Files of a run that grows, read so that a look costs what was added since the one before.

T = TypeVar("T")
Row = dict[str, Any]

_MARK_BYTES = 64


@dataclass
class Growing(Generic[T]):
    """A file of JSON objects, one a line, to which a run appends.

    A file that was replaced, cut or changed before its end (a run that resumes cuts it back to its checkpoint) is read
    again from its beginning; one that is gone has no rows. A last line without line feed is not whole yet, and damaged
    lines are passed over and counted, as `records.corruption` counts them.

    Attributes:
        keep: What becomes of a row; None passes it over, so that memory holds what is shown alone.
    """

    path: Path
    keep: Callable[[Row], T | None]
    rows: list[T] = field(default_factory=list)
    damaged: int = 0
    _identity: tuple[int, int] = (0, 0)
    _read: int = 0
    _mark: bytes = b""

    def look(self) -> None:
        """Read what is new."""
        try:
            with open_plain(self.path) as file:
                status = os.fstat(file.fileno())
                # A file that was replaced has another inode; one that was cut is shorter than what was read.
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._read:
                    self._begin(identity)
                file.seek(self._read - len(self._mark))
                # Cut and written again to at least the old length: the bytes
                # before the place where reading stopped tell.
                if file.read(len(self._mark)) != self._mark:
                    self._begin(identity)
                    file.seek(0)
                for line in file:
                    # The run is in the middle of writing this line: the next look finds it whole.
                    if not line.endswith(b"\n"):
                        return
                    self._take(line)
        except OSError:
            self._begin((0, 0))

    def _begin(self, identity: tuple[int, int]) -> None:
        self._identity, self._read, self._mark, self.rows, self.damaged = identity, 0, b"", [], 0

    def _take(self, line: bytes) -> None:
        self._read += len(line)
        self._mark = line[-_MARK_BYTES:]
        row = parsed(line)
        self.damaged += row is None or not is_step(row.get("step"))
        kept = None if row is None else self.keep(row)
        if kept is not None:
            self.rows.append(kept)


@dataclass
class DamagedRollouts:
    """Counts the damaged lines of rollout files: of those that a report would read, and then of each new one."""

    run: RunDirectory
    _counts: dict[int, int] = field(default_factory=dict)
    _last: int = -1

    def look(self, newest: int) -> int:
        """Return how many there are.

        Args:
            newest: The last step that has its rollouts on disk, 0 for none.
        """
        # A run that was cut back to a checkpoint removes rollouts: everything is counted anew.
        if newest < self._last:
            self._counts, self._last = {}, -1
        steps = range(self._last + 1, newest + 1)
        files = {step: self.run.rollouts / f"step-{step:06d}.jsonl" for step in steps}
        # At first the steps that a report would read, and from then on every new one.
        files = chosen_rollouts(self.run) if self._last < 0 else files
        self._counts |= {step: damaged_rollouts(path) for step, path in files.items()}
        self._last = newest
        return sum(self._counts.values())


@dataclass
class Unchanged(Generic[T]):
    """What a small file says, read again only when it is another one or was written to.

    Attributes:
        absent: Said without a file.
    """

    path: Path
    read: Callable[[bytes], T]
    absent: T
    _known: tuple[int, int, int] | None = None
    _said: T | None = None

    def look(self) -> T:
        """Return what it says now."""
        try:
            status = self.path.stat()
            # The time alone is too coarse on some file systems.
            known = (status.st_ino, status.st_size, status.st_mtime_ns)
            if known != self._known or self._said is None:
                self._said = self.read(read_plain(self.path))
                self._known = known
        except OSError:
            self._known = self._said = None
        return self.absent if self._said is None else self._said


# The best and the worst answers of a step, and those that could not be judged.

MOST = 4
_MOST_BYTES = 32 << 20
# Written by `records.rollouts`: what follows is as long as the answer and shown to nobody. Inside of a text its quotes
# would be escaped, so these bytes end what is wanted and are in no text.
_TOKENS = b', "prompt": ['


@dataclass(frozen=True)
class Samples:
    """What is shown of a step's rollouts.

    Attributes:
        count: Rollouts that were read.
        is_part: Whether the step has more.
        best: The rollouts of the highest reward, each of another prompt where there are enough, the most telling first.
        worst: The rollouts of the lowest reward, likewise.
        failed: Without one.
    """

    step: int = 0
    count: int = 0
    is_part: bool = False
    best: tuple[FindingSample, ...] = ()
    worst: tuple[FindingSample, ...] = ()
    failed: tuple[FindingSample, ...] = ()


def read_samples(path: Path, step: int) -> Samples:
    """Return the samples of the rollout file at ``path``, none where it cannot be read.

    Token ids and log-probabilities are passed over unparsed, and of a larger file the first 32 MiB are read.
    """
    try:
        with open_plain(path) as file:
            rows = list(_rows(file))
            is_part = bool(file.read(1))
    except OSError:
        return Samples(step)
    return choose(rows, step, is_part)


def choose(rows: Sequence[tuple[int, FindingSample]], step: int, is_part: bool = False) -> Samples:
    """Return which of ``rows``, each with the number of its group, are worth a look."""
    judged = [(group, sample) for group, sample in rows if sample.reward is not None]
    ranked = sorted(judged, key=lambda row: -(row[1].reward or 0.0))
    best = _spread(ranked)
    # Of equal rewards the last ones, so that a step without a difference shows other answers below than above.
    worst = [sample for sample in _spread(list(reversed(ranked))) if sample not in best] or best[1:]
    failed = [sample for _, sample in rows if sample.error is not None]
    return Samples(step, len(rows), is_part, tuple(best), tuple(worst), tuple(failed[:MOST]))


def _spread(ranked: Iterable[tuple[int, FindingSample]]) -> list[FindingSample]:
    """Return the first of each group, then others, `MOST` in all."""
    seen: set[int] = set()
    firsts: list[FindingSample] = []
    others: list[FindingSample] = []
    for group, sample in ranked:
        (others if group in seen else firsts).append(sample)
        seen.add(group)
        if len(firsts) == MOST:
            break
    return [*firsts, *others][:MOST]


def _rows(file: Iterable[bytes]) -> Iterator[tuple[int, FindingSample]]:
    left = _MOST_BYTES
    for line in file:
        place = line.find(_TOKENS)
        # Token ids and log-probabilities are most of a line, and parsing them would take most of a look.
        row = parsed(line if place < 0 else line[:place] + b"}")
        sample = None if row is None else FindingSample.of_row({**row, "response": row.get("text")})
        if row is not None and sample is not None:
            yield row["group"] if is_step(row.get("group")) else 0, sample
        left -= len(line)
        if left <= 0:
            return


# What a live view knows of a run at one moment.

State = Literal["absent", "live", "finished", "stopped"]

_RECENT = 20
_SILENT_SECONDS, _SILENT_STEPS = 30.0, 5.0


@dataclass(frozen=True)
class Scored:
    """An evaluation in short: its first score, with its 95% interval."""

    step: int
    name: str
    mean: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class BudgetLimit:
    """Something of which a run may spend so much: steps, tokens or seconds.

    Attributes:
        rate: Spent a second lately, 0 unknown.
    """

    spent: float
    most: float
    rate: float

    @property
    def share(self) -> float:
        """How much of it is spent, from 0 to 1."""
        return min(1.0, self.spent / self.most) if self.most > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until it is spent at this rate; None where that is not known."""
        return max(0.0, self.most - self.spent) / self.rate if self.rate > 0 else None


@dataclass(frozen=True)
class RunSnapshot:
    """A run as it was at ``now``, seconds since 1970.

    Attributes:
        state: "absent" where there is no run.
        was_there: Whether there was one before.
        owner: The process that works on it.
        table: The experiment.
        rows: Metrics in the order of steps, with the numbers that are shown.
        teaching: Metrics of value pre-training.
        findings: As they stand, the gravest first.
        checkpoint: The newest one's step, None without.
        written: When the last row was written.
        damaged: Lines that were passed over, by file.
        ended: The error that ended it, if one did.
    """

    path: Path
    now: float
    state: State = "absent"
    was_there: bool = False
    owner: LockOwner | None = None
    table: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    teaching: Sequence[Row] = ()
    evaluations: Sequence[Scored] = ()
    findings: Sequence[Finding] = ()
    samples: Samples = Samples()
    checkpoint: int | None = None
    written: float = 0.0
    damaged: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""

    @property
    def step(self) -> int:
        """Steps that are done."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def steps(self) -> int:
        """Steps that the experiment asks for, 0 where it does not say."""
        asked = self.table.get("steps")
        return asked if is_step(asked) else 0

    @property
    def last(self) -> Row:
        """The latest row of metrics."""
        return self.rows[-1] if self.rows else {}

    def series(self, name: str) -> list[float]:
        """Return a metric of every step that has it."""
        return [row[name] for row in self.rows if name in row]

    def recent(self, name: str) -> float | None:
        """Return the mean of a metric over those of the last 20 steps that have it."""
        values = [row[name] for row in self.rows[-_RECENT:] if name in row]
        return sum(values) / len(values) if values else None

    @property
    def step_seconds(self) -> float | None:
        """Wall clock of a step lately, with the evaluations and checkpoints between steps."""
        rows = [row for row in self.rows[-_RECENT - 1 :] if "seconds" in row]
        made = rows[-1]["step"] - rows[0]["step"] if rows else 0
        if made < 1 or rows[-1]["seconds"] <= rows[0]["seconds"]:
            return self.recent("time/step_seconds")
        return float((rows[-1]["seconds"] - rows[0]["seconds"]) / made)

    @property
    def limits(self) -> list[BudgetLimit]:
        """What ends the run: its steps, and its budget where it has one."""
        pace = self.step_seconds or 0.0
        found = [BudgetLimit(self.step, self.steps, 1 / pace if pace else 0.0)]
        for most, spent in budget_of(self.table, self.rows):
            found.append(BudgetLimit(spent, most, spent / self.step / pace if pace and self.step else 0.0))
        return found

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return max(limit.share for limit in self.limits)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the pace of the last steps; None while that is not known, or nobody works."""
        left = [limit.seconds_left for limit in self.limits if limit.most > 0 and limit.seconds_left is not None]
        if self.state != "live" or not left:
            return None
        return max(0.0, min(left) - max(0.0, self.now - self.written))

    @property
    def silent_seconds(self) -> float:
        """How long a live run has been silent, where that is far longer than a step; otherwise 0."""
        pace = self.step_seconds
        if self.state != "live" or pace is None or self.share >= 1:
            return 0.0
        silent = self.now - self.written
        return silent if silent > max(_SILENT_SECONDS, _SILENT_STEPS * pace) else 0.0


_PREFIXES = ("rollout/", "reward/", "loss/", "learner/", "time/", "stream/", "engines/", "critic/", "tokens/", "waste/")
_NAMES = ("seconds", "memory/peak_bytes", "mismatch/logprob_abs_mean_nats")


class Watcher:
    """Looks at the run at ``path``. Nothing is written, and no lock is kept.

    A run that is not there yet, that goes or that comes back is a `RunSnapshot` like others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = files = RunDirectory(path)
        self._table: Unchanged[Mapping[str, Any]] = Unchanged(files.experiment, _table, {})
        self._metrics = Growing(files.metrics, numbers)
        self._teaching = Growing(files.pretraining, numbers)
        self._evaluations = Growing(files.evaluations, scored)
        self._findings = Growing(files.findings, Finding.of_row)
        self._ranking: Unchanged[list[Finding] | None] = Unchanged(files.diagnosis, read_current_findings, None)
        self._ended: Unchanged[str] = Unchanged(files.card, _ended, "")
        self._samples = Samples()
        self._damage = DamagedRollouts(files)
        self._was_there = False

    def look(self) -> RunSnapshot:
        """Return the run as it is now."""
        # Before any file is read, so that nothing in the snapshot is younger than it says.
        now = time.time()
        if not self._files.experiment.is_file():
            self._samples = Samples()
            return RunSnapshot(self.path, now, was_there=self._was_there)
        self._was_there = True
        # Asked before the files are read: a run that ends in between is
        # shown live once more, and never as stopped without its last rows.
        owner = lock_owner(self.path)
        for file in (self._metrics, self._teaching, self._evaluations, self._findings):
            file.look()
        table, rows = self._table.look(), in_order(self._metrics.rows)
        self._look_at_samples(rows)
        checkpoints = [step for step, _ in numbered(self._files.checkpoints, r"step-(\d+)")]
        return RunSnapshot(
            path=self.path,
            now=now,
            state="live" if owner else ended(table, rows, checkpoints),
            was_there=True,
            owner=owner,
            table=table,
            rows=rows,
            teaching=in_order(self._teaching.rows),
            evaluations=tuple(self._evaluations.rows),
            findings=tuple(self._current_findings()),
            samples=self._samples,
            checkpoint=checkpoints[-1] if checkpoints else None,
            written=_written(self._files.metrics),
            damaged=self._damaged(),
            ended=self._ended.look(),
        )

    def _current_findings(self) -> list[Finding]:
        """Return the findings in their newest words; where no such file is there, in those in which they were news."""
        ranking = self._ranking.look()
        return newest(self._findings.rows) if ranking is None else ranking

    def _damaged(self) -> dict[str, int]:
        files = (self._metrics, self._evaluations, self._findings)
        found = {file.path.name: file.damaged for file in files} | {ROLLOUTS: self._damage.look(self._samples.step)}
        return {name: count for name, count in found.items() if count}

    def _look_at_samples(self, rows: Sequence[Row]) -> None:
        """Read the samples of the newest step that has its rollouts on disk, once a step."""
        step = rows[-1]["step"] if rows else 0
        # The run was cut back to its checkpoint.
        if step < self._samples.step:
            self._samples = Samples()
        # The rollouts of a step are written after its metrics.
        for number in range(step, max(self._samples.step, step - 2), -1):
            path = self._files.rollouts / f"step-{number:06d}.jsonl"
            if path.is_file():
                self._samples = read_samples(path, number)
                break


def _ended(text: bytes) -> str:
    card = parsed(text)
    return "" if card is None else end_of(card)


def numbers(row: Row) -> Row | None:
    """Return a row's step and its numbers that are shown, None where it has no step; what is no number is left out.

    Each name is in memory once, however many rows have it.

    >>> numbers({"step": 1, "loss/policy": 0.5, "loss/ess_fraction": None, "mismatch/k3_nats": 1})
    {'step': 1, 'loss/policy': 0.5}
    """
    if not is_step(row.get("step")):
        return None
    shown = (name for name in row if name.startswith(_PREFIXES) or name in _NAMES)
    # A long run has 100,000 rows with the same names.
    return {"step": row["step"]} | {sys.intern(name): row[name] for name in shown if is_number(row[name])}


def in_order(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows in order of steps, of a step that was written twice the last."""
    # The usual case without a dict of all rows.
    if all(before["step"] < after["step"] for before, after in pairwise(rows)):
        return tuple(rows)
    by_step = {row["step"]: row for row in rows}
    return tuple(by_step[step] for step in sorted(by_step))


def scored(row: Row) -> Scored | None:
    """Return what an evaluation's row says first, None where it says nothing."""
    scores, step, prompts = row.get("scores"), row.get("step"), row.get("prompts")
    # Returns within the first round: the first sound score is the headline.
    for name, score in scores.items() if isinstance(scores, dict) else ():
        said = [score.get(key) for key in ("mean", "low", "high")] if isinstance(score, dict) else []
        values = [value for value in said if is_number(value)]
        if is_step(step) and len(values) == 3:
            mean, low, high = values
            return Scored(step, name, mean, low, high, prompts if is_step(prompts) else 0)
    return None


def _table(content: bytes) -> Mapping[str, Any]:
    try:
        return parse_toml(content.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
