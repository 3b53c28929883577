from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Group
from gnomon.records.checkpoints import read_states, write_states
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.tracker import FixedValues, optimal_value

GOLDEN = vectors()["a_star_po"]
MakeGroup = Callable[..., Group]
REWARDS = st.lists(st.floats(-5, 5), min_size=1, max_size=10)


def values(size: int = 3, beta: float = 0.5) -> FixedValues:
    return FixedValues(TaskIndex(f"t{index}" for index in range(size)), beta)


def test_optimal_values_follow_the_reference():
    """2 of 8 right: 0.4772293 at beta 0.5, and nearly their mean at beta 1000."""
    assert optimal_value(GOLDEN["rewards"], GOLDEN["beta1"]) == pytest.approx(GOLDEN["v_star"], abs=1e-14)
    assert optimal_value(GOLDEN["rewards"], 1e3) == pytest.approx(GOLDEN["v_star_limits"]["beta1_1e3"], abs=1e-12)


@given(rewards=REWARDS, beta=st.floats(1e-3, 1e6), more=st.floats(1, 100))
def test_it_lies_between_mean_and_best(rewards: list[float], beta: float, more: float):
    """A larger beta moves it from the best reward towards their mean, and never past either."""
    small, large = optimal_value(rewards, beta), optimal_value(rewards, beta * more)

    assert sum(rewards) / len(rewards) - 1e-9 <= large <= small + 1e-9
    assert small <= max(rewards)


@given(rewards=REWARDS, beta=st.floats(1e-2, 1e3), shift=st.floats(-5, 5))
def test_a_shift_of_the_rewards_shifts_it_as_much(rewards: list[float], beta: float, shift: float):
    """V*(r + c) = V*(r) + c."""
    shifted = optimal_value([reward + shift for reward in rewards], beta)

    assert shifted == pytest.approx(optimal_value(rewards, beta) + shift, abs=1e-9)


def test_its_limits_are_exact():
    """A tiny beta gives the largest reward, a huge one the mean, without overflow or lost digits."""
    assert optimal_value([0.0, 1.0, 700.0], 1e-6) == pytest.approx(700.0, abs=1e-5)
    assert optimal_value([0.0, 1.0, 0.0, 0.0], 1e12) == pytest.approx(0.25, abs=1e-12)
    assert optimal_value([0.0] * 8, 0.5) == 0.0


def test_samples_give_values_and_errors_do_not(group: MakeGroup):
    """Only graded rollouts count; a task without any has the mean of the others, for nothing better is known."""
    fixed = values()
    assert fixed.baseline([0, 1]).tolist() == [0.0, 0.0]

    fixed.initialize([group("t0", [1.0, None]), group("t1", [0.0]), group("t2", [None])])

    assert fixed.baseline([0, 1, 2]).tolist() == [1.0, 0.0, 0.5]


def test_observing_changes_nothing_and_says_how_wrong_it_was(group: MakeGroup):
    """The values are those of the initial policy; their squared error is what there is to see of its distance."""
    fixed = values()
    fixed.initialize([group("t0", [1.0]), group("t1", [0.0]), group("t2", [0.0])])
    metrics = fixed.observe([group("t0", [1.0, 0.0]), group("t1", [1.0, None])], {"t0": 5.0})

    assert fixed.baseline([0, 1, 2]).tolist() == [1.0, 0.0, 0.0]
    assert metrics["tracker/squared_error_mean"] == pytest.approx(2 / 3)
    assert metrics["tracker/value_mean"] == pytest.approx(2 / 3)


def test_a_file_gives_values(tmp_path: Path):
    """Any finite numbers, of any of the tasks; others are passed over."""
    path = tmp_path / "values.json"
    path.write_text('{"t0": 0.75, "t2": -2, "elsewhere": 9}')
    fixed = values()

    assert fixed.load(path) == 2
    assert fixed.baseline([0, 2]).tolist() == [0.75, -2.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"t0": [3, 8]}', "1 entries that are no finite number: 't0': \\[3, 8\\]"),
        ('{"t0": NaN}', "no finite number"),
        ('{"other": 0.5}', "none of the 1 ids in .*, such as 'other' is one of the 3 tasks"),
        ("[1]", "must hold one JSON object"),
    ],
)
def test_files_that_mean_something_else_are_refused(content: str, message: str, tmp_path: Path):
    """Counts have no V* without their beta, and ids of another task set are no start."""
    path = tmp_path / "values.json"
    path.write_text(content)

    with pytest.raises(DatasetError, match=message):
        values().load(path)


def test_a_reward_without_a_value_is_refused(group: MakeGroup):
    """Infinity has no V*; the task is named and nothing was believed."""
    fixed = values()
    with pytest.raises(ConfigError, match="task 't1' earned the rewards \\(inf,\\)"):
        fixed.initialize([group("t0", [1.0]), group("t1", [float("inf")])])

    assert fixed.baseline([0]).tolist() == [0.0]


def test_the_state_comes_back_bit_for_bit(group: MakeGroup, tmp_path: Path):
    """Known and unknown values alike; another task set is refused."""
    fixed, again = values(), values()
    fixed.initialize([group("t0", [1.0, 0.0, 0.0]), group("t1", [0.3])])
    write_states(tmp_path, {"tracker": fixed.state()})

    again.restore(read_states(tmp_path)["tracker"])

    assert again.baseline([0, 1, 2]).tolist() == fixed.baseline([0, 1, 2]).tolist()
    with pytest.raises(ConfigError, match="the saved table of optimal values belongs to another task set"):
        values(2).restore(fixed.state())


def test_beta_must_be_positive():
    """It divides."""
    with pytest.raises(ConfigError, match="beta must be > 0, got 0"):
        values(beta=0.0)
