import pytest

from gnomon.rollouts.curriculum.base import is_informative


@pytest.mark.parametrize(
    ("rewards", "informative"),
    [
        ([0.0, 1.0], True),
        ([0.0, 0.5, 0.5], True),
        ([1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([1.0], False),
        ([1.0, None], False),
        ([None, None], False),
        ([], False),
        ([0.0, None, 1.0], True),
    ],
)
def test_a_group_is_informative_when_graded_rewards_differ(rewards, informative, group):
    """An error is no reward of 0, and one reward alone differs from nothing."""
    assert is_informative(group("a", rewards)) is informative
