"""Groups as the curriculum sees them: who was asked, and what it earned."""

from collections.abc import Callable, Sequence

import pytest

from gnomon.core.types import Grade, Group, Rollout, Task

MakeGroup = Callable[..., Group]


def build_group(
    task_id: str,
    rewards: Sequence[float | None],
    response: tuple[int, ...] = (5, 6, 7),
    mask: tuple[bool, ...] | None = None,
) -> Group:
    """Return one visit; a reward of None is a rollout that could not be graded."""
    rollouts = tuple(
        Rollout(
            task_id=task_id,
            prompt=(1, 2),
            response=response,
            mask=mask or (True,) * len(response),
            logprobs=(0.0,) * len(response),
            full_logprobs=(0.0,) * len(response),
            text="",
            grade=Grade(None, error="verifier crashed") if reward is None else Grade(reward),
            oldest_version=0,
            newest_version=0,
            stop="stop",
        )
        for reward in rewards
    )
    return Group(Task(task_id, prompt=(1, 2), text=""), rollouts)


@pytest.fixture(scope="session")
def group() -> MakeGroup:
    return build_group
