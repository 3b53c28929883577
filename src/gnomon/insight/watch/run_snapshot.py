"""What a live view knows of a run at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gnomon.diagnosis import Finding
from gnomon.insight.watch.files import Row
from gnomon.insight.watch.samples import Samples
from gnomon.records.directory import LockOwner
from gnomon.records.jsonl import budget_of, is_step

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


def ended(rows: Sequence[Row], table: Mapping[str, Any], checkpoints: Sequence[int]) -> State:
    """Return whether a run that nobody works on has reached its end.

    Where its checkpoints are there, the last of them must be of the last step: what comes after it is lost.
    """
    step, asked = int(rows[-1]["step"]) if rows else 0, table.get("steps")
    is_spent = any(spent >= most for most, spent in budget_of(table, rows))
    is_done = is_step(asked) and (step >= asked or (is_spent and bool(rows)))
    is_saved = not checkpoints or checkpoints[-1] >= step
    return "finished" if is_done and is_saved and (rows or checkpoints) else "stopped"
