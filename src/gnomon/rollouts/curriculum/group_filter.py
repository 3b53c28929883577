"""Which finished groups are worth training on."""

from typing import Protocol

from gnomon.core.types import Group


class GroupFilter(Protocol):
    """Says whether a finished group is trained on; the slot of a rejected one asks another prompt."""

    def __call__(self, group: Group, /) -> bool:
        """Return whether ``group`` is kept."""


def is_informative(group: Group, part: str = "") -> bool:
    """Whether the group's rewards differ, so that a group baseline gives a gradient.

    Only graded rollouts count: an error is no reward. With fewer than two of them nothing can differ.

    Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling), with "rewards differ" for any kind of reward where
    the paper says "neither all correct nor all wrong".

    Args:
        part: Looks at this component of the reward instead, as it was before weights and penalties; one that has no
            such component looks at the reward.
    """
    parts = [r.grade.parts.get(part) for r in group.rollouts if r.grade.reward is not None]
    if part and None not in parts:
        return len(set(parts)) > 1
    return not group.is_degenerate
