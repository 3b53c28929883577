"""Tiny mixtures of experts, trained with their routing free or replayed: what claims about replay begin with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.claims.estimates import NotMeasured
from experiments.claims.families import write_family
from experiments.claims.rescoring import Shares, routers_share, won_back
from experiments.claims.warm_start import Warming, warm_model

from gnomon.core.tables import to_table
from gnomon.models.tiny import TinyConfig
from gnomon.records.reading import RunRecord
from gnomon.tasks.split import HeldOut

HELD_OUT = HeldOut(size=96, fraction=0.2)
FOUR = "algorithm.updates.minibatches=4"
GRPO = ("algorithm=grpo", FOUR, "algorithm.surrogate.trust.high=0.27")
R2, R3 = "algorithm.routing=proximal", "algorithm.routing=behavior"


@dataclass(frozen=True)
class PuzzleMixture:
    """A mixture that is taught to sort letters, and how it is trained.

    shape: of the model. rate: learning rate. steps: of 64 answers. rounded: what the engine's weights are rounded to
    before they are sent, so that it chooses other experts than the learner. taught: supervised steps at most.
    """

    shape: TinyConfig
    rate: float
    steps: int
    rounded: str = "fp8"
    taught: int = 800

    def experiment(self, folder: Path, seed: int) -> dict[str, Any]:
        """Return the table of the experiment: sorting two to five letters, right at 0.4, with weights of each seed."""
        plan = Warming(steps=self.taught, seed=seed)
        return {
            "model": str(warm_model(write_family("sorting", folder, 4000), folder, 0.4, self.shape, plan, HELD_OUT)),
            "task": to_table(write_family("sorting", folder, 640)),
            "held_out": to_table(HELD_OUT),
            "rewards": [{"kind": "exact"}],
            "rollouts_per_step": 64,
            "sampling": {"max_completion_length": 8},
            "learner": {"precision": "fp32", "optimizer": {"learning_rate": self.rate}},
            "engine": {"rounding": self.rounded},
            "evaluation": {"samples": 1, "before": False},
            "checkpoints": {"every": 0},
            "grading": {"workers": 1},
            "steps": self.steps,
        }


def watched(last: int) -> tuple[str, ...]:
    """Return what keeps the weights of the last steps, of each its own and those before it."""
    return ("checkpoints.every=1", f"checkpoints.keep_last={last + 1}")


def share(part: Callable[[Shares], float], steps: Sequence[int]) -> Callable[[RunRecord], float]:
    """Return what reads a part of `Shares`, mean over those of these steps that have it."""

    def read(record: RunRecord) -> float:
        found = [part(routers_share(record.path, step)) for step in steps]
        if not (there := [value for value in found if not math.isnan(value)]):
            raise NotMeasured("no step changed anything")
        return fmean(there)

    return read


def regained(steps: Sequence[int]) -> Callable[[RunRecord], float]:
    """Return what reads `won_back`, mean over these steps."""
    return lambda record: fmean(won_back(record.path, step) for step in steps)
