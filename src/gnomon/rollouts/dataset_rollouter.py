"""Where supervised fine-tuning gets its samples: the dataset's own answers, as rollouts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch


@dataclass(frozen=True)
class DatasetRollouter:
    """Takes the dataset's own answer to a task as its rollout, with reward 1, for supervised fine-tuning.

    Nobody sampled it, so its log-probabilities of the sampler are zeros, which nothing reads.

    Attributes:
        decode: An answer's token ids to its text.
        generations: One.
    """

    decode: Callable[[Sequence[int]], str]
    generations: int = 1

    async def run_group(self, task: Task, round_number: int, watch: RolloutTimer) -> Group:
        """Return a group of the one answer."""
        watch.generated(sum(task.mask))
        watch.graded()
        unknown = (0.0,) * len(task.response)
        text, grade = self.decode(task.response), Grade(1.0)
        rollout = Rollout(
            task.id, task.prompt, task.response, task.mask, unknown, unknown, text, grade, 0, 0, stop="stop"
        )
        return Group(task, (rollout,))


def as_recorded(finished: RolloutBatch) -> RolloutBatch:
    """Return a step of the dataset's answers without what nobody measured of them: rewards and log-probabilities."""

    def plain(rollout: Rollout) -> Rollout:
        unknown = (math.nan,) * len(rollout.response)
        return replace(rollout, grade=Grade(None, is_judged=False), logprobs=unknown, full_logprobs=unknown)

    groups = (replace(group, rollouts=tuple(map(plain, group.rollouts))) for group in finished.groups)
    return replace(finished, groups=tuple(groups))
