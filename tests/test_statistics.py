"""Rates, intervals and differences against numbers worked by hand."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.statistics import (
    Interval,
    avg_at_k,
    bootstrap_interval,
    maj_at_k,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson_interval,
)

approx = pytest.approx


@pytest.mark.parametrize(("k", "value"), [(1, 5 / 16), (2, 13 / 24), (4, 149 / 182), (8, 77 / 78)])
def test_pass_at_k_of_five_correct_in_sixteen(k: int, value: float):
    """1 - C(11,k)/C(16,k): 1-11/16, 1-55/120, 1-330/1820, 1-165/12870."""
    assert pass_at_k(16, 5, k) == approx(value, abs=1e-15)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets_that_hold_a_correct_sample(nck: tuple[int, int, int]):
    """The formula equals counting every k-subset of n samples of which the first c are correct."""
    n, c, k = nck
    subsets = list(combinations(range(n), k))
    counted = Fraction(sum(min(s) < c for s in subsets), len(subsets))

    assert pass_at_k(n, c, k) == float(counted)


def test_pass_at_k_of_many_samples_is_exact():
    """10,000 samples with one correct: k / n, although C(10000, 5000) is far beyond a float."""
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int):
    """Fewer samples than k, or more correct ones than samples, have no unbiased estimate."""
    with pytest.raises(ConfigError, match=r"1 <= k <= samples"):
        pass_at_k(n, c, k)


def test_avg_at_k_counts_prompts_alike():
    """(1/2 + 3/4) / 2 = 0.625, while the mean over the six samples would be 4/6."""
    assert avg_at_k([[1, 0], [1, 1, 1, 0]]) == 0.625


def test_avg_at_k_refuses_a_prompt_without_samples():
    """A prompt that was never answered has no mean."""
    with pytest.raises(ConfigError, match="one sample for each prompt"):
        avg_at_k([[1.0], []])


@pytest.mark.parametrize(
    ("answers", "scores", "value"),
    [
        (["a", "b", "a"], [1, 0, 1], 1.0),
        (["b", "b", "a"], [0, 0, 1], 0.0),
        (["a", "b"], [1, 0], 0.5),
        (["a", "b", "c", "c", "b", "a"], [1, 0, 0, 0, 0, 1], 1 / 3),
        ([None, None, "a"], [0, 0, 1], 1.0),
        ([None, None], [0, 0], 0.0),
    ],
    ids=["majority right", "majority wrong", "two tie", "three tie", "no answer has no vote", "no votes"],
)
def test_the_commonest_answer_is_scored(answers: list[str | None], scores: list[float], value: float):
    """Ties share the credit, and an answer that is missing does not vote."""
    assert maj_at_k(answers, scores) == approx(value)


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
    """All prompts at 0.5 give a coin's interval; values that differ give the bootstrap's."""
    assert mean_interval([0.5] * 100) == wilson_interval(50, 100)
    assert mean_interval([0.25, 0.75] * 50) == bootstrap_interval([0.25, 0.75] * 50)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_intervals_stay_within_what_was_seen(values: list[float]):
    """A mean of resampled values is never below the least nor above the greatest."""
    interval = bootstrap_interval(values, resamples=50)

    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9


def test_three_gains_in_three_are_not_significant():
    """Of the 8 sign patterns, +++ and --- are as extreme: p = 2/8."""
    difference = paired_difference([0, 0, 0], [1, 1, 1])

    assert difference.mean == 1.0
    assert difference.p_value == 0.25


def test_no_difference_has_p_one():
    """Equal scores: every sign pattern is as extreme as the observed zero."""
    difference = paired_difference([0.2, 0.9, 0.4], [0.2, 0.9, 0.4])

    assert (difference.mean, difference.p_value, difference.is_noise) == (0.0, 1.0, True)


def test_pairing_finds_a_gain_that_is_smaller_than_the_spread():
    """Prompts spread over [0, 1], and each gains 0.05 ± 0.01: the two means' intervals overlap, the paired one not."""
    first = [i / 100 for i in range(100)]
    second = [x + 0.05 + 0.01 * (-1) ** i for i, x in enumerate(first)]
    difference = paired_difference(first, second)

    assert bootstrap_interval(first).overlaps(bootstrap_interval(second))
    assert difference.mean == approx(0.05)
    assert not difference.is_noise
    assert difference.p_value == 1 / 10_001


def test_a_difference_needs_the_same_prompts():
    """Lists of two lengths cannot be paired."""
    with pytest.raises(ConfigError, match="same prompts twice, got 2 and 3"):
        paired_difference([1, 2], [1, 2, 3])


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_intervals_refuse_what_has_no_mean(values: list[float]):
    """Without values, or with one that is not finite, there is nothing to say."""
    with pytest.raises(ConfigError, match="at least one finite number"):
        bootstrap_interval(values)


def test_confidence_is_a_fraction():
    """95 is not 0.95."""
    with pytest.raises(ConfigError, match=r"such as 0\.95, got 95"):
        wilson_interval(1, 2, confidence=95)
