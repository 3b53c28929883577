"""Per-prompt baselines: the tracker gives a baseline before a step and observes the rewards after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnomon.core.metrics import Metrics
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.learner.base import Learner
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.base import TaskValues
from gnomon.rollouts.curriculum.drift import Drift, ScoredAnswer


@dataclass(frozen=True)
class NoTracker:
    """No tracker: baselines come from the batch itself."""

    baseline: Callable[[Task], float] | None = None

    async def observe(self, groups: Sequence[Group], updates: Sequence[Metrics]) -> Metrics:
        """Measure nothing and change nothing."""
        return Metrics()


@dataclass(frozen=True)
class PromptBaseline:
    """A tracker that forgets as fast as the policy drifts."""

    tracker: TaskValues
    drift: Drift
    learner: Learner
    temperature: float

    @property
    def baseline(self) -> Callable[[Task], float]:
        """Task to tracked value, before this step's rewards."""
        return self.tracker.value

    async def observe(self, groups: Sequence[Group], updates: Sequence[Metrics]) -> Metrics:
        """Measure the drift of the step's updates, then fold the rewards of what was sampled in."""
        groups = [group.sampled for group in groups]
        # A step in which no token had a gradient measured no drift.
        made = [u["loss/drift_abs_nats"] for u in updates if "loss/drift_abs_nats" in set(u)]
        self.drift.record(made)
        drifts = await self.drift.measure(groups, self._score)
        return self.tracker.observe(groups, drifts)

    async def _score(self, answers: Sequence[ScoredAnswer]) -> Sequence[Sequence[float]]:
        batch = collate([_as_group(answer) for answer in answers], self.temperature)
        scored = (await self.learner.score(batch, {"proximal"})).proximal
        assert scored is not None, "proximal was asked for"
        return [row[: len(answer.response)].tolist() for row, answer in zip(scored, answers, strict=True)]


BaselineTracking = PromptBaseline | NoTracker
"""What the training loop calls to read and update per-prompt baselines."""


def _as_group(answer: ScoredAnswer) -> Group:
    # Only tokens and mask are read; the other fields of a rollout have no meaning for a bare score.
    zeros = (0.0,) * len(answer.response)
    rollout = Rollout(
        task_id="",
        prompt=answer.prompt,
        response=answer.response,
        mask=answer.mask,
        logprobs=zeros,
        full_logprobs=zeros,
        text="",
        grade=Grade(0.0),
        oldest_version=0,
        newest_version=0,
        stop="stop",
    )
    return Group(Task("", answer.prompt, ""), (rollout,))
