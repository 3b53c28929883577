"""Updates of the critic: before the first step alone (value pre-training), and once a step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.critic import Pretraining
from gnomon.algorithms.metrics import measure_values
from gnomon.algorithms.protocols import parts_of
from gnomon.algorithms.returns import Gae
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.types import Batch, State
from gnomon.engines.rng import sample_key
from gnomon.learner.base import Learner
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.base import Curriculum
from gnomon.rollouts.metrics import measure_round
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.nonfinite_guard import Guard, NoGuard
from gnomon.training.run_logger import StepTimer

# Seeds of shuffles: each depends on the run's seed, the step and what is shuffled, and on nothing else.


def shuffle_seed(seed: int, step: int, shuffled: str) -> int:
    """Return the seed of one shuffle; ``shuffled`` names it, so that no two shuffles of a step share an order.

    >>> shuffle_seed(0, 1, "minibatches") == shuffle_seed(0, 1, "minibatches") != shuffle_seed(0, 1, "values")
    True
    """
    # 31 bits fit the seed of every kind of generator.
    return sample_key(seed, step, shuffled, 0) & 0x7FFF_FFFF


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

        Everything else stays as it was scored. On a shared trunk the critic's update moves the policy too, and the
        proximal policy stays that of the step's beginning: the ratios contain this change, the mismatch does not.
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
    known = measure_values(algorithm.valued(batch))
    # `known` is measured from the values in the batch, so before the first of these updates.
    fits = [await learner.fit(minibatch, algorithm, step) for minibatch in algorithm.value_minibatches(batch, seed)]
    return sum(fits, known) + Metrics.of({"time/critic_seconds": Mean(time.perf_counter() - began, 1)})


# Value pre-training: before the first step the critic alone learns, from answers of the unchanged policy.

EXPLAINED = "critic/explained_variance"


@dataclass
class ValuePretraining:
    """The phase before step 1, a batch at a time. `Stateful`.

    Rounds come from the run's own stream and curriculum, so no draw of a prompt is made again in training; no weight of
    the policy changes, so every answer is of version 0. Targets are returns themselves, whatever lambda the targets
    have later: a critic that knows nothing yet would otherwise learn from its own first guesses.

    Attributes:
        algorithm: As `monte_carlo` returns it.
        save: Publishes a checkpoint of the phase after so many batches.
        discard: Removes these, once the phase is over and step 0 is published.
    """

    plan: Pretraining
    algorithm: Algorithm
    learner: Learner
    stream: RolloutScheduler
    curriculum: Curriculum
    temperature: float
    seed: int
    save: Callable[[int], None]
    discard: Callable[[], None]
    guard: Guard = field(default=NoGuard())
    batches: int = 0
    streak: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all batches were made, or enough in a row were explained well before the critic had seen them."""
        return self.batches >= self.plan.steps or self.streak >= self.plan.patience

    async def step(self) -> Metrics:
        """Ask one round, measure how well the critic explains it, teach it, and return what was measured."""
        timer = StepTimer()
        finished = await self.stream.next_batch()
        timer.lap("generate")

        batch, metrics = finished.taught(collate(finished.groups, self.temperature)), Metrics()
        with self.guard.step(self.batches + 1, "batch of value pre-training") as guarded:
            seed = shuffle_seed(self.seed, self.batches, "pretraining")
            # The policy makes no minibatches in this phase, so one seed serves both.
            first = self.algorithm.first_rows(batch, seed, seed)
            batch = (await self.learner.score(batch, self.algorithm.advantage.needs, first)).into(batch)
            batch = guarded.check_finite(batch)
            timer.lap("score")

            batch = guarded.check_finite(self.algorithm.prepare(batch))
            metrics = await train_critic(self.learner, self.algorithm, batch, None, seed)
        timer.lap("update")

        metrics += guarded.metrics
        if guarded.is_learned:
            metrics += self.curriculum.observe(finished.generated)
        self.batches += 1
        self.streak = self.streak + 1 if self._is_explained(metrics) else 0
        return measure_round(finished, self.learner.version) + metrics + timer.metrics(finished.watch)

    def _is_explained(self, metrics: Metrics) -> bool:
        # A batch without a trained token measures nothing, and so explains nothing.
        reached = metrics[EXPLAINED] if EXPLAINED in set(metrics) else -math.inf
        return self.plan.explained_variance is not None and reached >= self.plan.explained_variance

    def state(self) -> State:
        """Return how far it is."""
        return State(values={"batches": self.batches, "streak": self.streak})

    def restore(self, state: State) -> None:
        """Go on from there."""
        self.batches, self.streak = int(state.values["batches"]), int(state.values["streak"])


def monte_carlo(algorithm: Algorithm) -> Algorithm:
    """Return the same algorithm with the critic's advantage alone, and returns as targets: a value lambda of 1."""
    found = (part for _, part in parts_of(algorithm.advantage) if isinstance(part, Gae))
    critic = next(found, None)
    return algorithm if critic is None else replace(algorithm, advantage=replace(critic, value_lambda=1.0))
