"""Guard against NaN and infinity: undo the step, save the batch, end the run after three such steps in a row."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from gnomon.algorithms.algorithm import Algorithm
from gnomon.core.errors import NotFiniteError
from gnomon.core.metrics import Last, Measure, Metrics, Sum
from gnomon.core.types import Batch
from gnomon.learner.base import Learner
from gnomon.records.batches import BatchLog
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import Warn, read_rows, warn_on_stderr

REFUSED = "learner/refused_steps"
# Fields of the batch with one number a row, and with one a token (of the response).
_OF_ROWS = ("rewards", "baseline", "bootstrap")
_OF_TOKENS = (
    "behavior", "full_behavior", "proximal", "reference", "values", "advantages", "returns", "step_rewards"
)  # fmt: skip


@dataclass
class GuardedStep:
    """What one step learns from: the latest form of its batch, and whether anything was learned."""

    batch: Batch | None = None
    is_learned: bool = False

    def check_finite(self, batch: Batch) -> Batch:
        """Return ``batch``.

        Raises:
            NotFiniteError: Naming fields and rows that are not finite.
        """
        self.batch = batch
        found = unusable(batch)
        if found:
            raise NotFiniteError("; ".join(found))
        return batch

    @property
    def metrics(self) -> Metrics:
        """Whether the step was refused; then it also claims no loss."""
        counted = Metrics.of({REFUSED: Sum(int(not self.is_learned))})
        if self.is_learned:
            return counted
        # NaN, since `RunLogger.write` fills in 0 for a loss that is absent, as in a step without trained tokens.
        none: dict[str, Measure] = {"learner/updates": Sum(0), "tokens/trained": Sum(0), "loss/policy": Last(math.nan)}
        return counted + Metrics.of(none)


@dataclass
class NonFiniteGuard:
    """Watches over what a step learns.

    A step in which a reward, log-probability, value, advantage, loss or gradient is not finite is refused as a whole:
    weights, masters, moments, critic and averages are byte for byte what they were before it, also where earlier
    updates of the same step had worked; tracker, curriculum and replay buffer are not told of it. It is counted as a
    step all the same: learning rates go by the number, its prompts are used up, and nothing is tried twice.

    Attributes:
        batches: Where the batch is kept for `gnomon dissect`, whatever `records` says.
        is_undone: A step may make several updates, so each process of the learner keeps a copy of its share before it.
        limit: Refused steps in a row that end the run; none of them publishes weights that are not finite.
        streak: Refused steps that came just before.
    """

    learner: Learner
    algorithm: str
    batches: BatchLog
    warn: Warn = warn_on_stderr
    is_undone: bool = True
    limit: int = 3
    streak: int = field(default=0)

    @contextmanager
    def step(self, step: int, what: str = "step") -> Iterator[GuardedStep]:
        """Let the block learn from step number ``step`` (from 1), or undo what it did.

        Raises:
            NotFiniteError: For the last of ``limit`` refused steps in a row; whatever else the block raises.
        """
        # A lone update that is not finite is refused by the learner before it changes anything, and needs no copy.
        if self.is_undone:
            self.learner.keep()
        guarded = GuardedStep()
        try:
            yield guarded
        except NotFiniteError as error:
            if self.is_undone:
                self.learner.undo()
            self.streak += 1
            self._report(step, what, guarded, error)
        else:
            guarded.is_learned, self.streak = True, 0

    def _report(self, step: int, what: str, guarded: GuardedStep, error: NotFiniteError) -> None:
        said = f"{what} {step} changed nothing: {error}{self._kept(step, guarded)}"
        if self.streak >= self.limit:
            raise NotFiniteError(
                f"{self.streak} in a row, so the run ends, and the newest checkpoint stays what it is: {said}"
            ) from error
        self.warn(f"{said} ({self.streak} in a row; {self.limit} end the run)")

    def _kept(self, step: int, guarded: GuardedStep) -> str:
        if guarded.batch is None:
            return ""
        path = self.batches.keep(step, guarded.batch)
        return (
            ""
            if path is None
            else f". Its batch is kept: gnomon dissect {quote(str(path))} --algorithms {self.algorithm}"
        )


@dataclass(frozen=True)
class NoGuard:
    """No guard: a value that is not finite ends the run at once."""

    @contextmanager
    def step(self, step: int, what: str = "step") -> Iterator[GuardedStep]:
        """Undo nothing."""
        guarded = GuardedStep()
        yield guarded
        guarded.is_learned = True


Guard = NonFiniteGuard | NoGuard


def guard_of(learner: Learner, algorithm: Algorithm, directory: RunDirectory, warn: Warn) -> NonFiniteGuard:
    """Return the guard of a run, with the streak of refused steps that its metrics record."""
    streak, log = refused_in_a_row(list(read_rows(directory.metrics))), BatchLog(directory.batches, warn)
    return NonFiniteGuard(learner, algorithm.name, log, warn, algorithm.updates_repeatedly, streak=streak)


def refused_in_a_row(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the last rows of metrics, one a step, were refused.

    >>> refused_in_a_row([{"learner/refused_steps": 1}, {"learner/refused_steps": 0}, {"learner/refused_steps": 1}])
    1
    """
    count = 0
    while count < len(rows) and rows[-1 - count].get(REFUSED) == 1:
        count += 1
    return count


def unusable(batch: Batch) -> list[str]:
    """Return what is not finite where it counts, in words: one entry a field."""
    # Padding and ungraded rows may hold anything, since no loss reads them.
    by_token = dict.fromkeys(_OF_TOKENS, batch.mask & batch.is_graded[:, None])
    found = []
    for name, counted in (dict.fromkeys(_OF_ROWS, batch.is_graded) | by_token).items():
        tensor = getattr(batch, name)
        if tensor is None:
            continue
        wrong = ~tensor.isfinite() & counted
        # Token fields are (rows, tokens): a row counts once, however many of its tokens are not finite.
        places = (wrong.any(1) if wrong.ndim == 2 else wrong).nonzero()[:, 0].tolist()
        if places:
            listed = ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")
            found.append(f"{name} is not finite in {len(places)} of {len(batch)} rows (counted from 0: {listed})")
    return found
