import pytest

from gnomon.core.errors import ConfigError, GradingError
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.budget import ErrorBudget

GOOD, BAD = Grade(1.0), Grade(None, error="score: returned None")


def test_a_fifth_of_the_window_is_allowed_and_one_more_is_not():
    """20% of 50 are 10: the eleventh error among the last 50 samples stops the run."""
    budget = ErrorBudget(0.2, 50)
    for _ in range(39):
        budget.observe(GOOD, Sample("", "fine"))
    for _ in range(10):
        budget.observe(BAD, Sample("", "bad"))

    with pytest.raises(GradingError, match=r"11 of the last 50 samples \(22%\)"):
        budget.observe(BAD, Sample("", "bad"))


def test_errors_leave_the_window_again():
    """One error in every five samples, forever, is within 20%."""
    budget = ErrorBudget(0.2, 50)

    for index in range(1000):
        budget.observe(BAD if index % 5 == 0 else GOOD, Sample("", ""))


def test_the_message_shows_three_samples_to_look_at():
    """Task, cause and the end of the completion, latest first."""
    budget = ErrorBudget(0.0, 4)
    with pytest.raises(GradingError, match=r"task t0: score: returned None; the completion ends with 'xyz0'"):
        budget.observe(BAD, Sample("", "xyz0"), "t0")
    for index in range(1, 4):
        with pytest.raises(GradingError, match=rf"task t{index}") as caught:
            budget.observe(BAD, Sample("", f"xyz{index}"), f"t{index}")

    assert str(caught.value).count("task t") == 3
    assert "task t0" not in str(caught.value)


def test_a_budget_that_means_nothing_is_refused():
    """All errors allowed, or no window."""
    with pytest.raises(ConfigError, match=r"got 1.0 and 50"):
        ErrorBudget(1.0)
    with pytest.raises(ConfigError, match=r"got 0.2 and 0"):
        ErrorBudget(0.2, 0)
