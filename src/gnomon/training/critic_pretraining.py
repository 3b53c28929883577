"""Value pre-training: before the first step the critic alone learns, from answers of the unchanged policy."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.critic import Pretraining
from gnomon.algorithms.protocols import parts_of
from gnomon.algorithms.returns import Gae
from gnomon.core.metrics import Metrics
from gnomon.core.types import State
from gnomon.learner.base import Learner
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.base import Curriculum
from gnomon.rollouts.metrics import measure_round
from gnomon.rollouts.scheduler import RolloutScheduler
from gnomon.training.critic_updates import shuffle_seed, train_critic
from gnomon.training.nonfinite_guard import Guard, NoGuard
from gnomon.training.run_logger import StepTimer

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

        batch, metrics = collate(finished.groups, self.temperature), Metrics()
        with self.guard.step(self.batches + 1, "batch of value pre-training") as guarded:
            seed = shuffle_seed(self.seed, self.batches, "pretraining")
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
