"""Self-imitation: the buffer observes every finished group, and every few steps the policy is updated on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.imitation import imitation
from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.core.metrics import Last, Mean, Measure, Metrics, Sum
from gnomon.core.types import Batch, Group
from gnomon.learner.base import Learner
from gnomon.rollouts.collate import collate
from gnomon.rollouts.self_imitation_buffer import SelfImitationReplay

# What an update measured, by its name among imitation's own; work done is counted with all other work.
_NAMES = {
    "loss/policy": "imitation/loss",
    "learner/gradient_norm": "imitation/gradient_norm",
    "learner/updates": "imitation/updates",
    "critic/loss": "imitation/value_loss",
    "tokens/computed": "tokens/computed",
    "learner/computed_per_token": "learner/computed_per_token",
}


@dataclass(frozen=True)
class NoImitation:
    """No self-imitation."""

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Keep nothing."""
        return Metrics()

    async def update(self, done: int) -> list[Metrics]:
        """Make no update."""
        return []


@dataclass(frozen=True)
class SelfImitationUpdates:
    """Updates of their own on the best responses so far, every ``plan.every`` training steps.

    All that they measure is named ``imitation/...``: their loss is no loss of the policy's own batch. Only positions
    computed are counted with all others. An update moves the policy and Adam's moments as any other does; a tracker's
    "accumulated" drift does not see it, "replayed" drift does.

    Attributes:
        critic: The run's plan, which "surplus" needs. Its values are scored before the policy is updated; then it is
            taught one-sidedly, its loss times ``plan.value_coefficient``.
    """

    plan: SelfImitationBuffer
    buffer: SelfImitationReplay
    learner: Learner
    temperature: float
    critic: CriticConfig | None = None
    algorithm: Algorithm = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", imitation(self.plan, self.critic))

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Keep the best of them, and say what is kept by now."""
        self.buffer.observe(groups)
        rewards = self.buffer.rewards
        measures: dict[str, Measure] = {
            "imitation/buffer": Last(len(rewards)),
            "imitation/buffer_reward_mean": Mean(sum(rewards), len(rewards)),
        }
        return Metrics.of(measures)

    async def update(self, done: int) -> list[Metrics]:
        """Make ``plan.updates`` updates when ``done`` is a multiple of ``plan.every`` and anything is kept."""
        if done % self.plan.every or not len(self.buffer):
            return []
        # Numbers of draws never repeat within a run, and depend on the step alone, so a resumed run draws the same.
        first = done * self.plan.updates
        return [await self._update(first + number, done) for number in range(self.plan.updates)]

    async def _update(self, number: int, done: int) -> Metrics:
        algorithm, step = self.algorithm, done - 1
        # The rollouts are old: what the advantage reads (values) is scored again with the current weights.
        batch = collate(self.buffer.draw(number), self.temperature)
        if algorithm.advantage.needs:
            batch = (await self.learner.score(batch, algorithm.advantage.needs)).into(batch)
        minibatch = algorithm.weigh(algorithm.prepare(batch))
        # ``rate`` scales the learning rate of this update alone.
        made = await self.learner.update(minibatch, algorithm, step, rate=self.plan.learning_rate_ratio)
        if algorithm.critic is not None and self.plan.value_coefficient > 0:
            made += await self._teach(minibatch, step)
        measured = Metrics.of({_NAMES[name]: made.measures[name] for name in made if name in _NAMES})
        return measured + _describe(minibatch, step)

    async def _teach(self, minibatch: Batch, step: int) -> Metrics:
        """Raise the values that are below what was reached; without any, Adam's moments would still move all."""
        assert minibatch.advantages is not None, "prepare comes first"
        assert minibatch.weights is not None, "weigh comes first"
        if not bool(minibatch.advantages.any()):
            return Metrics()
        scaled = minibatch.with_fields(weights=minibatch.weights * self.plan.value_coefficient)
        return await self.learner.fit(scaled, self.algorithm, step, one_sided=True)


ImitationUpdates = SelfImitationUpdates | NoImitation
"""What the training loop calls for self-imitation."""


def _describe(batch: Batch, step: int) -> Metrics:
    """Return how many rows were imitated, how long ago they were sampled, and how hard they push."""
    assert batch.advantages is not None, "prepare comes first"
    tokens = int(batch.mask.sum())
    return Metrics.of(
        {
            "imitation/rows": Sum(len(batch)),
            "imitation/age_steps_mean": Mean(float((step - batch.version).sum()), len(batch)),
            "imitation/weight_mean": Mean(float(batch.advantages.sum()), tokens),
        }
    )
