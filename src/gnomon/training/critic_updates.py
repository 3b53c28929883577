"""Updates of the critic: once a step, before the policy reads its values or after the policy's own updates."""

import time
from dataclasses import dataclass

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.metrics import measure_values
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.types import Batch
from gnomon.engines.rng import draw_key
from gnomon.learner.base import Learner

# Seeds of shuffles: each depends on the run's seed, the step and what is shuffled, and on nothing else.


def shuffle_seed(seed: int, step: int, shuffled: str) -> int:
    """Return the seed of one shuffle; ``shuffled`` names it, so that no two shuffles of a step share an order.

    >>> shuffle_seed(0, 1, "minibatches") == shuffle_seed(0, 1, "minibatches") != shuffle_seed(0, 1, "values")
    True
    """
    return draw_key(seed, step, shuffled, 0) & 0x7FFF_FFFF


@dataclass(frozen=True)
class NoCritic:
    """No critic."""

    async def before_policy(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Learn nothing."""
        return batch, Metrics()

    async def after_policy(self, batch: Batch, step: int) -> Metrics:
        """Learn nothing."""
        return Metrics()


@dataclass(frozen=True)
class CriticTraining:
    """A critic, taught at the time that its plan's ``order`` says, on targets computed from its values until then.

    What is logged as its explained variance is always that of the critic that had not seen the batch.
    """

    algorithm: Algorithm
    learner: Learner
    seed: int

    async def before_policy(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """With order "before", prepare the batch for the critic alone, teach it, and read its values again.

        Everything else stays as it was scored. On a shared trunk the lesson moves the policy, and the proximal policy
        is that of the step's beginning: the push is part of the ratios, and no difference between engine and learner.
        """
        if not self._is_first:
            return batch, Metrics()
        taught = await self._teach(self.algorithm.prepare(batch), step)
        return (await self.learner.score(batch, {"values"})).into(batch), taught

    async def after_policy(self, batch: Batch, step: int) -> Metrics:
        """Teach it what the policy's advantages came from, with order "after"."""
        return Metrics() if self._is_first else await self._teach(batch, step)

    @property
    def _is_first(self) -> bool:
        return self.algorithm.critic is not None and self.algorithm.critic.order == "before"

    async def _teach(self, batch: Batch, step: int) -> Metrics:
        return await train_critic(self.learner, self.algorithm, batch, step, shuffle_seed(self.seed, step, "values"))


CriticUpdates = CriticTraining | NoCritic
"""What the training loop calls to update a critic."""


async def train_critic(learner: Learner, algorithm: Algorithm, batch: Batch, step: int | None, seed: int) -> Metrics:
    """Make the critic's own updates on a prepared batch, and return what it knew of it before, and what they measured.

    Args:
        step: Training step, or None in pre-training.
        seed: Seed of the shuffle into minibatches. ``time/critic_seconds`` is a part of the stage of the step in which
            it happens.
    """
    began = time.perf_counter()
    known = measure_values(batch)
    fits = [await learner.fit(minibatch, algorithm, step) for minibatch in algorithm.value_minibatches(batch, seed)]
    return sum(fits, known) + Metrics.of({"time/critic_seconds": Mean(time.perf_counter() - began, 1)})
