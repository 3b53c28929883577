"""The dataset's own answers as rollouts: for supervised fine-tuning, and beside those of the policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnomon.core.types import GIVEN, Grade, Group, Rollout, Task
from gnomon.engines.rng import sample_key
from gnomon.rewards.base import Sample
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch


@dataclass(frozen=True)
class DatasetRollouter:
    """Takes the dataset's own answer to a task as its rollout, and one that it is compared with.

    Nobody sampled them, so their log-probabilities of the sampler are zeros, which nothing reads.

    Attributes:
        decode: An answer's token ids to its text.
        generations: One for supervised fine-tuning; two with the task's contrast.
    """

    decode: Callable[[Sequence[int]], str]
    generations: int = 1

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return a group of the one answer, or of both."""
        other = replace(task, response=task.contrast, mask=task.contrast_mask)
        given = [
            # Version 0 and not GIVEN: where all answers are given, they are what is measured.
            given_rollout(each, self.decode(each.response), Grade(reward, is_judged=reward is not None), 0)
            for each, reward in zip((task, other)[: self.generations], task.given_rewards, strict=False)
        ]
        watch.generated(sum(sum(rollout.mask) for rollout in given))
        watch.graded()
        return Group(task, tuple(given))


@dataclass(frozen=True)
class DemonstratedRollouter:
    """Puts the dataset's own answer to a task beside those of the policy, judged as they are.

    Attributes:
        source: Asks the policy, one time fewer than a group has rollouts.
    """

    source: Rollouter

    @property
    def generations(self) -> int:
        """Rollouts of a task, the given one too."""
        return self.source.generations + 1

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return the policy's group with the given rollout behind it."""
        source = self.source
        watch.generated(0)
        sample = Sample(
            prompt=task.text,
            completion=source.decode(task.response),
            completion_tokens=len(task.response),
            is_truncated=False,
            max_completion_length=source.sampling.max_completion_length,
            columns=task.columns,
            # The sample number after those of the policy, so the seeds of no two rewards are equal.
            seed=sample_key(source.seed, round_number, task.id, source.generations),
            messages=task.messages,
        )
        # With the others, since a reward may compare all answers to a question.
        sampled, (grade,) = await source.judged_with(task, round_number, watch, [sample])
        return Group(task, (*sampled, given_rollout(task, sample.completion, grade)))


def given_rollout(task: Task, text: str, grade: Grade, version: int = GIVEN) -> Rollout:
    """Return the dataset's own answer as a rollout that nobody sampled."""
    unknown = (0.0,) * len(task.response)
    return Rollout(
        task.id, task.prompt, task.response, task.mask, unknown, unknown, text, grade, version, version, stop="stop"
    )


def as_recorded(finished: RolloutBatch) -> RolloutBatch:
    """Return a step of the dataset's answers without what nobody measured of them: log-probabilities, and rewards.

    The rewards of two answers stay, for the dataset said them.
    """

    def plain(rollout: Rollout, is_alone: bool) -> Rollout:
        unknown = (math.nan,) * len(rollout.response)
        grade = Grade(None, is_judged=False) if is_alone else rollout.grade
        return replace(rollout, grade=grade, logprobs=unknown, full_logprobs=unknown)

    groups = (
        replace(group, rollouts=tuple(plain(rollout, len(group.rollouts) == 1) for rollout in group.rollouts))
        for group in finished.groups
    )
    return replace(finished, groups=tuple(groups))
