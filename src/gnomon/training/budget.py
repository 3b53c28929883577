"""What a run has spent, and whether that is all it may."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.metrics import Last, Metrics
from gnomon.core.sections import BudgetConfig
from gnomon.core.types import State

PART = "meter"
"""Its name among the parts of a checkpoint."""


@dataclass
class BudgetTracker:
    """Counts what a run has spent of its budget. A meter is `Stateful`.

    Attributes:
        tokens: Tokens that were generated for training, trained on or not: in steps, in value pre-training and for
            initial values. What had been generated of rollouts that were withdrawn unfinished is not known, and
            evaluation is no training.
        seconds: Seconds of these by the clock, without evaluation, checkpoints and loading. The step in which the
            budget is reached is the last, so a run spends up to a step's worth more than its budget.

    >>> meter = BudgetTracker(BudgetConfig(tokens=100))
    >>> meter.add(60), meter.is_spent, meter.add(60), meter.is_spent, meter.tokens
    (None, False, None, True, 120)
    """

    plan: BudgetConfig = BudgetConfig()
    tokens: int = 0
    seconds: float = 0.0
    _marks_before: int = 0

    @classmethod
    def of(cls, plan: BudgetConfig, checkpoint: Path) -> "BudgetTracker":
        """Return the meter that a checkpoint holds, which was verified."""
        meter = cls(plan)
        meter.restore(State(values=json.loads((checkpoint / "state" / f"{PART}.json").read_text(encoding="utf-8"))))
        return meter

    @property
    def share(self) -> float:
        """How much of the budget is spent, of the one that is nearer to its end; 0 without a budget."""
        plan = self.plan
        shares = [self.tokens / plan.tokens if plan.tokens else 0.0]
        shares.append(self.seconds / plan.seconds if plan.seconds else 0.0)
        return max(shares)

    @property
    def is_spent(self) -> bool:
        """Whether no further step may begin."""
        return self.share >= 1

    @property
    def is_at_mark(self) -> bool:
        """Whether what was last added crossed a mark at which the run is to be evaluated."""
        return self._marks > self._marks_before

    @property
    def _marks(self) -> int:
        # The marks lie at equal shares of the budget: 1/n, 2/n, ..., 1.
        return int(self.share * self.plan.evaluations)

    def add(self, tokens: float, seconds: float = 0.0) -> None:
        """Note that so much more was spent."""
        # Before adding: `is_at_mark` compares the marks on both sides of the last addition.
        self._marks_before = self._marks
        self.tokens += int(tokens)
        self.seconds += seconds

    def count(self, metrics: Metrics) -> Metrics:
        """Add what the metrics of a step, or of a batch of value pre-training, say, and return the tokens in all."""
        self.add(metrics["tokens/generated"], metrics["time/step_seconds"])
        return Metrics.of({"tokens/generated_total": Last(self.tokens)})

    def state(self) -> State:
        """Return what was spent; seconds only where they are counted, for they never repeat."""
        return State(values={"tokens": self.tokens} | ({"seconds": self.seconds} if self.plan.seconds else {}))

    def restore(self, state: State) -> None:
        """Go on from there."""
        tokens, seconds = state.values["tokens"], state.values.get("seconds", 0.0)
        if not (0 <= tokens < math.inf and 0 <= seconds < math.inf):
            raise ValueError(f"tokens is {tokens} and seconds {seconds}, and nobody spends that")
        self.tokens, self.seconds = int(tokens), float(seconds)
