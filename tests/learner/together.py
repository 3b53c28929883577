"""Learners of several processes beside one of a single process, which walk the same steps."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnomon.algorithms import Algorithm
from gnomon.learner.base import Writing
from gnomon.learner.crew import Crew
from gnomon.learner.gang import Gang
from gnomon.learner.local_crew import LocalCrew
from gnomon.learner.optimizer import OptimizerPlan
from gnomon.learner.plan import LearnerPlan
from gnomon.learner.recipe import Recipe
from gnomon.learner.torch import TorchLearner
from gnomon.loop.valuing import Unvalued, Valued
from gnomon.metrics import Metrics
from gnomon.types import Batch

# Adam's step is g / (|g| + epsilon): where epsilon is far above rounding, so is what it makes of rounding.
PLAN = LearnerPlan(
    OptimizerPlan(learning_rate=1e-3, epsilon=1e-3, weight_decay=0.1), precision="fp32", max_tokens_per_micro_batch=60
)


def recipe_for(algorithm: Algorithm, processes: int = 2, model: str = "tiny", **changes: Any) -> Recipe:
    """The recipe of a learner of ``model`` in so many processes; ``changes`` of its plan, and ``lora``."""
    lora = changes.pop("lora", None)
    return Recipe(model, algorithm, replace(PLAN, processes=processes, **changes), steps=20, lora=lora)


def alone(recipe: Recipe) -> TorchLearner:
    """The same learner in this process."""
    cpu = torch.device("cpu")
    return recipe.learner(recipe.network(cpu), cpu)


@contextmanager
def together(recipe: Recipe, crew: Crew | None = None) -> Iterator[Gang]:
    """The learner in processes of its own, of this machine where no crew is given, which are gone afterwards."""
    gang = Gang(recipe, crew or LocalCrew(recipe.plan.processes, recipe.device))
    gang.open()
    try:
        yield gang
    finally:
        gang.close()


def walk(learner: Writing, algorithm: Algorithm, batches: Sequence[Batch], first: int = 0) -> list[Mapping[str, float]]:
    """Score, teach and update once for each batch, and return what was measured."""

    async def steps() -> list[Mapping[str, float]]:
        measured = []
        valuing = Unvalued() if algorithm.critic is None else Valued(algorithm, learner, 0)
        for step, batch in enumerate(batches, start=first):
            batch = (await learner.score(batch, algorithm.needs)).into(batch)
            batch, metrics = await valuing.before(batch, step)
            batch = algorithm.prepare(batch)
            for minibatch in algorithm.minibatches(batch, step):
                metrics += await learner.update(minibatch, algorithm, step)
            metrics += await valuing.after(batch, step)
            learner.advance()
            measured.append(without_clocks(metrics))
        return measured

    return asyncio.run(steps())


def without_clocks(metrics: Metrics) -> dict[str, float]:
    """What was measured, but seconds, and positions computed: those depend on how rows were parted."""
    return {n: v for n, v in metrics.values().items() if not n.startswith("time/") and "computed" not in n}


def moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """How far a weight came."""
    return apart(*({n: t for n, t in tensors.items() if n.startswith("master/")} for tensors in (after, before)))


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest difference between tensors of one name."""
    assert left.keys() == right.keys()
    return max((float((left[n].double() - t.double()).abs().max()) for n, t in right.items() if t.numel()), default=0.0)
