"""Where supervised fine-tuning gets its samples: the dataset's own answers, as rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.rollouts.rollout import RolloutTimer


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
