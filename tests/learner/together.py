"""Learners of several processes beside one of a single process, which walk the same steps."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnomon.algorithms import Algorithm
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.learner.base import SavableLearner
from gnomon.learner.distributed import DistributedLearner
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.learner.spec import LearnerSpec
from gnomon.learner.worker_group import LocalWorkerGroup, WorkerGroup
from gnomon.training.critic_updates import CriticTraining, NoCritic

# Adam's step is g / (|g| + epsilon): where epsilon is far above rounding, so is what it makes of rounding.
PLAN = LearnerConfig(
    OptimizerConfig(learning_rate=1e-3, epsilon=1e-3, weight_decay=0.1), precision="fp32", max_tokens_per_micro_batch=60
)

# Presets that learn from the teacher alone: of a policy that is its own teacher every advantage is 0, and nothing
# moves. Their batches keep the log-probabilities of a teacher that is another.
TAUGHT = {"opd"}


def recipe_for(algorithm: Algorithm, processes: int = 2, model: str = "tiny", **changes: Any) -> LearnerSpec:
    """The recipe of a learner of ``model`` in so many processes; ``changes`` of its plan, and ``lora``."""
    lora = changes.pop("lora", None)
    return LearnerSpec(model, algorithm, replace(PLAN, processes=processes, **changes), steps=20, lora=lora)


def alone(recipe: LearnerSpec) -> TorchLearner:
    """The same learner in this process."""
    cpu = torch.device("cpu")
    return recipe.learner(recipe.network(cpu), cpu)


@contextmanager
def together(recipe: LearnerSpec, worker_group: WorkerGroup | None = None) -> Iterator[DistributedLearner]:
    """The learner in processes of its own, of this machine where no crew is given, which are gone afterwards."""
    distributed = DistributedLearner(recipe, worker_group or LocalWorkerGroup(recipe.plan.processes, recipe.device))
    distributed.open()
    try:
        yield distributed
    finally:
        distributed.close()


def walk(
    learner: SavableLearner, algorithm: Algorithm, batches: Sequence[Batch], first: int = 0
) -> list[Mapping[str, float]]:
    """Score, teach and update once for each batch, and return what was measured."""

    async def steps() -> list[Mapping[str, float]]:
        measured = []
        critic_updates = NoCritic() if algorithm.critic is None else CriticTraining(algorithm, learner, 0)
        for step, batch in enumerate(batches, start=first):
            needs = algorithm.needs - ({"reference"} if algorithm.name in TAUGHT else set())
            batch = (await learner.score(batch, needs)).into(batch)
            batch, metrics = await critic_updates.before_policy(batch, step)
            batch = algorithm.prepare(batch)
            for minibatch in algorithm.minibatches(batch, step):
                metrics += await learner.update(minibatch, algorithm, step)
            metrics += await critic_updates.after_policy(batch, step)
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
