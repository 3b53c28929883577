"""Intervals against numbers worked by hand, and how often they hold the truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.core.statistics import Interval, bootstrap_interval, mean_interval, score_interval, wilson_interval

approx = pytest.approx


def test_wilson_of_one_in_ten():
    """p = 0.1, z = 1.959964: (0.1 + 0.192073 ± 1.959964 sqrt(0.009 + 0.0096037)) / 1.384146 = 0.0179, 0.4042."""
    interval = wilson_interval(1, 10)

    assert (interval.low, interval.high) == (approx(0.0178762, abs=1e-6), approx(0.4041500, abs=1e-6))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_mirrors(ratio: tuple[int, int]):
    """The interval is in [0, 1], holds the rate, has a width, and failures give the mirrored interval."""
    successes, trials = ratio
    interval, mirrored = wilson_interval(successes, trials), wilson_interval(trials - successes, trials)

    assert 0 <= interval.low < interval.high <= 1
    assert successes / trials in interval
    assert interval.low == approx(1 - mirrored.high, abs=1e-12)


def test_wilson_knows_nothing_without_trials():
    """No trials, no knowledge: the whole range."""
    assert wilson_interval(0, 0) == Interval(0.0, 1.0)


def test_the_bootstrap_finds_the_standard_error():
    """200 values, half 0 and half 1: 0.5 ± 1.96 sqrt(0.25 / 200) = 0.5 ± 0.0693."""
    interval = bootstrap_interval([0.0, 1.0] * 100)

    assert interval.low == approx(0.4307, abs=0.01)
    assert interval.high == approx(0.5693, abs=0.01)


def test_the_bootstrap_is_deterministic_and_seeded():
    """The same seed gives the same interval, and another seed another one."""
    values = [math.sin(i) for i in range(50)]

    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_many_prompts_are_resampled_in_blocks():
    """Blocks bound memory and lose no resample: 300 prompts need more than one block and give a sane interval."""
    interval = bootstrap_interval([i / 300 for i in range(300)], resamples=4_000)

    assert 0.45 < interval.low < 299 / 600 < interval.high < 0.55


def test_nothing_right_is_not_certainty():
    """0 of 200 has Wilson's upper end z^2 / (n + z^2) = 3.8415 / 203.8415 = 0.018845, where the bootstrap has 0."""
    assert bootstrap_interval([0.0] * 200) == Interval(0.0, 0.0)
    assert mean_interval([0.0] * 200).high == approx(0.018845, abs=1e-5)


def test_equal_fractions_are_not_certainty_either():
    """All prompts at 0.5 give a coin's interval; values in [0, 1] that differ Wilson's, others the bootstrap's."""
    assert mean_interval([0.5] * 100) == wilson_interval(50, 100)
    assert mean_interval([0.25, 0.75] * 50) == score_interval([0.25, 0.75] * 50)
    assert mean_interval([-0.25, 0.75] * 50) == bootstrap_interval([-0.25, 0.75] * 50)


def test_an_effective_number_worked_by_hand():
    """0, 1/2, 1/2, 1 and two more, 0 and 1: mean 1/2, squared standard error (4 / 4) / 5 / 6 = 1/30.

    So 1/4 / (1/30) = 7.5 prompts: Wilson's of 3.75 in 7.5 is (0.5 + 0.256097 ± 0.412927...) / 1.512195.
    """
    n, z = 7.5, 1.959964
    half = z * math.sqrt(0.25 / n + z * z / (4 * n * n)) / (1 + z * z / n)
    interval = score_interval([0.0, 0.5, 0.5, 1.0])

    assert (interval.low, interval.high) == (approx(0.5 - half, abs=1e-6), approx(0.5 + half, abs=1e-6))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_a_score_interval_is_in_range_and_mirrors(values: list[float]):
    """In [0, 1], with a width, around the mean, never wider than a coin's of as many prompts; 1 - x mirrors it."""
    interval, mirrored = score_interval(values), score_interval([1 - v for v in values])
    mean = sum(values) / len(values)
    coin = wilson_interval(min(mean, 1.0) * len(values), len(values))

    assert 0 <= interval.low < interval.high <= 1
    assert interval.low - 1e-9 <= mean <= interval.high + 1e-9
    assert interval.high - interval.low <= coin.high - coin.low + 1e-9
    assert interval.low == approx(1 - mirrored.high, abs=1e-9)


def test_a_score_interval_refuses_other_scores():
    """A reward of -0.5 is no rate."""
    with pytest.raises(ConfigError, match=r"values in \[0, 1\], got -0.5 to 1.0"):
        score_interval([-0.5, 1.0])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_intervals_stay_within_what_was_seen(values: list[float]):
    """A mean of resampled values is never below the least nor above the greatest."""
    interval = bootstrap_interval(values, resamples=50)

    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_intervals_refuse_what_has_no_mean(values: list[float]):
    """Without values, or with one that is not finite, there is nothing to say."""
    with pytest.raises(ConfigError, match="at least one finite number"):
        bootstrap_interval(values)


def test_confidence_is_a_fraction():
    """95 is not 0.95."""
    with pytest.raises(ConfigError, match=r"such as 0\.95, got 95"):
        wilson_interval(1, 2, confidence=95)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "least"), [(20, 0.915), (50, 0.92), (200, 0.93)])
@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_holds_the_truth_as_often_as_it_says(prompts: int, samples: int, least: float):
    """1,000 test sets whose prompts' success rates are uniform: their mean is 0.5, and 95% intervals hold it.

    The limits are what docs/evaluation.md says, less three standard errors of 0.7 points: 20 prompts of 8 samples have
    intervals that hold it in 94%.
    """
    random = np.random.default_rng(prompts + samples)
    held = 0
    for _ in range(1_000):
        right = random.binomial(samples, random.random(prompts))
        held += 0.5 in mean_interval((right / samples).tolist())

    assert least <= held / 1_000 <= 0.975


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "samples", "rates"),
    [(100, 8, (0.02, 0.98)), (100, 8, (0.98, 0.02)), (20, 4, (0.05, 0.95)), (20, 8, (1.9, 0.1)), (20, 8, (0.1, 1.9)),
     (100, 8, (0.01, 0.99)), (10, 8, (0.5, 0.5)), (6, 4, (1, 1)), (20, 8, (5, 5)), (500, 8, (0.02, 0.98))],
)  # fmt: skip
def test_rare_success_and_near_certainty_are_held_too(prompts: int, samples: int, rates: tuple[float, float]):
    """2,000 test sets whose success rates are Beta: at least 94% less three standard errors of 0.5 points."""
    random = np.random.default_rng(prompts)
    truth, held = rates[0] / sum(rates), 0
    for right in random.binomial(samples, random.beta(*rates, (2_000, prompts))):
        held += truth in mean_interval((right / samples).tolist())

    assert held / 2_000 >= 0.925
