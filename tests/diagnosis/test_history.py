"""Metrics as rules read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnosis.rows import history

from gnomon.diagnosis.history import FIRST, LATEST, History, error, has_risen, is_learning, mean, slope


def test_what_is_not_measured_of_late_is_not_latest():
    """Values of steps 1 to 4 are the latest 4 until step 8, and say nothing of step 9 and later."""
    made = History()
    for step in range(1, 10):
        made.add(step, {"a": 1.0} if step <= 4 else {})
        assert bool(made.latest("a", 4)) == (4 <= step <= 8)


def test_what_is_no_number_is_left_out():
    """NaN, infinity, None, truth, text and numbers beyond measure are no values."""
    made = History()
    made.add(1, {"a": math.nan, "b": math.inf, "c": None, "d": True, "e": "1", "f": 10**400, "g": 2})

    assert made.names("") == ["g"]


@given(st.integers(1, 400))
def test_memory_is_bounded(steps):
    """However long a run is, the first 40 and the latest 80 values of a metric are kept."""
    made = history(a=[float(step) for step in range(steps)])

    assert len(made.first("a", 10**6)) == min(steps, FIRST)
    assert [value for _, value in made.latest("a", min(steps, LATEST))][-1] == steps - 1
    assert made.latest("a", steps + 1) == []


def test_statistics_of_points():
    """1, 2, 3, 4 at steps 1 to 4: mean 2.5, slope 1, standard error sqrt(5/3)/2 = 0.6455."""
    points = [(step, float(step)) for step in (1, 2, 3, 4)]

    assert mean(points) == 2.5
    assert slope(points) == pytest.approx(1.0)
    assert error(points) == pytest.approx(0.645497)


def test_a_rise_is_more_than_noise():
    """0 1 0 1 and 1 2 1 2 have errors of .289 each: a rise of 1 is above 2 * .408, one of 0.5 is not."""
    before = [(step, value) for step, value in enumerate((0.0, 1.0, 0.0, 1.0))]

    assert has_risen(before, [(step, value + 1) for step, value in before])
    assert not has_risen(before, [(step, value + 0.5) for step, value in before])


def test_two_windows_are_needed_to_see_no_learning():
    """A reward that stays is taken for learning until there are two windows of it."""
    assert is_learning(history(rollout__reward_mean=[0.5] * 19), 10)
    assert not is_learning(history(rollout__reward_mean=[0.5] * 20), 10)
