"""Means and differences over seeds and prompts, both drawn at random."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gnomon.analysis.compare.statistics import band, contrast, mean_over, stretch
from gnomon.core.errors import ConfigError
from gnomon.core.statistics import paired_difference, student_p, wilson_interval

Floats = NDArray[np.float64]


@st.composite
def tables(draw: st.DrawFn, seeds: int = 2) -> Floats:
    """Return scores of 0 or 1 for each seed and prompt."""
    shape = (draw(st.integers(seeds, 5)), draw(st.integers(2, 12)))
    cells = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(cells).reshape(shape)


def test_students_t_of_one_and_two_degrees_in_closed_form():
    """With one degree p = 1 - 2 atan(t) / pi, with two 1 - t / sqrt(2 + t^2); at 1: 0.5 and 0.42265."""
    assert student_p(1.0, 1) == pytest.approx(0.5)
    assert student_p(1.0, 2) == pytest.approx(1 - 1 / math.sqrt(3))
    assert student_p(-1.0, 2) == student_p(1.0, 2)


@given(st.floats(0.0, 20.0), st.floats(1.0, 2000.0))
def test_a_larger_t_and_more_degrees_are_rarer(t: float, df: float):
    """In [0, 1]; 1 at 0; never more for a larger t or for more degrees of freedom."""
    p = student_p(t, df)

    assert 0 <= p <= 1
    assert student_p(0.0, df) == 1
    assert student_p(t + 0.5, df) <= p + 1e-9
    assert student_p(t, df * 1.5) <= p + 1e-6


def test_a_contrast_worked_out_by_hand():
    """Differences 0.4, 0.2 (seed 1) and 0.2, 0.0 (seed 2): mean 0.2.

    Means over prompts 0.3 and 0.1 have the variance 0.02, so a = 0.01; means over seeds 0.3 and 0.1 likewise, b = 0.01.
    t = 0.2 / sqrt(0.02) = 1.41421, degrees (0.02)^2 / (0.0001 + 0.0001) = 2; p = 1 - 1.41421 / sqrt(2 + 2) = 0.29289,
    less than the 0.5 of a sign-flip test of two prompts (2 of 4 patterns). That p-value takes t = 0.816497, so an error
    of 0.2 / 0.816497 = 0.244949, and 0.2 ± 4.30265 * 0.244949 = 0.2 ± 1.053931, of which [-1, 1] is possible.
    """
    first = np.array([[0.1, 0.3], [0.3, 0.5]])
    found = contrast(first, first + np.array([[0.4, 0.2], [0.2, 0.0]]))

    assert found.mean == pytest.approx(0.2)
    assert (found.seed_variance, found.prompt_variance) == (pytest.approx(0.01), pytest.approx(0.01))
    assert found.df == pytest.approx(2.0)
    assert found.p_value == pytest.approx(0.5)
    assert (found.interval.low, found.interval.high) == (pytest.approx(0.2 - 1.053931), 1.0)
    assert found.detectable == pytest.approx((4.30265 + 0.841621) * math.sqrt(0.02), rel=1e-5)


def test_what_it_takes_to_find_a_difference():
    """Of 3 seeds and 200 prompts with a = 0.0004, b = 0.0001: 0.05 needs (0.05 / 2.80159)^2 = 0.00031851.

    Prompts leave 0.00021851 for the seeds, so 3 * 0.0004 / 0.00021851 = 5.49, 6 seeds; prompts alone 200 * 0.0001 /
    0.00031851 = 62.8, which are there. 0.02 needs 0.00005096, less than the prompts' own: no seeds, 393 prompts.
    """
    random = np.random.default_rng(0)
    found = contrast(*(random.random((3, 200)) for _ in range(2)))
    from dataclasses import replace

    found = replace(found, seed_variance=0.0004, prompt_variance=0.0001)

    assert found.seeds_needed(0.05) == 6
    assert found.prompts_needed(0.05) == 200
    assert found.seeds_needed(0.02) is None
    assert found.prompts_needed(0.02) == 393


def test_one_seed_is_about_two_models():
    """The paired test over prompts alone, and no word about how many seeds would do."""
    first, second = np.array([[0.0] * 8]), np.array([[1.0] * 7 + [0.0]])
    found = contrast(first, second)
    by_prompt = paired_difference(first[0].tolist(), second[0].tolist())

    assert found.is_about_models
    assert (found.p_value, found.interval) == (by_prompt.p_value, by_prompt.interval)
    assert found.seeds_needed(0.05) is None


@given(tables(), st.integers(0, 2**32 - 1))
def test_a_contrast_is_antisymmetric_and_never_bolder_than_prompts(first: Floats, number: int):
    """Exchanged sides exchange the sign; p is a probability, at least that over prompts; equal tables differ by 0."""
    second = np.random.default_rng(number).permutation(first.ravel()).reshape(first.shape)
    found, other = contrast(first, second), contrast(second, first)
    by_prompt = paired_difference(first.mean(axis=0).tolist(), second.mean(axis=0).tolist())

    assert found.mean == pytest.approx(-other.mean)
    assert found.p_value == pytest.approx(other.p_value)
    assert by_prompt.p_value <= found.p_value <= 1
    assert found.mean in found.interval
    assert contrast(first, first).p_value == 1


@given(st.integers(2, 4), st.integers(1, 25), st.integers(0, 2**32 - 1))
def test_the_interval_of_a_contrast_holds_0_exactly_where_the_test_finds_noise(seeds: int, prompts: int, number: int):
    """Whichever of the two tests decides; differences of scores in [0, 1] are in [-1, 1]."""
    random = np.random.default_rng(number)
    first, second = (random.binomial(4, rate, (seeds, prompts)) / 4 for rate in (0.3, random.uniform(0.3, 0.9)))
    found = contrast(first, second)

    assert -1 <= found.interval.low <= found.mean <= found.interval.high <= 1
    if found.seed_variance + found.prompt_variance > 0:
        assert (0 in found.interval) == (found.p_value > 0.05)


@given(tables())
def test_an_interval_of_a_mean_holds_it(scores: Floats):
    """It lies in [0, 1] where scores do, holds the mean, and is the same each time and in any order of the prompts."""
    found = mean_over(scores, resamples=300)

    assert 0 <= found.low <= float(scores.mean()) <= found.high <= 1
    assert mean_over(scores, resamples=300) == found


def test_seeds_that_differ_make_it_wide_and_prompts_that_do_not_leave_it_so():
    """Scores that depend on the seed alone: 0.4, 0.5, 0.6. Student's interval is 0.5 ± 0.248; ours 0.5 ± 0.27."""
    scores = np.repeat(np.array([[0.4], [0.5], [0.6]]), 50, axis=1)
    found = mean_over(scores)

    assert found.low == pytest.approx(0.5 - 0.1 * stretch(3))
    assert found.high == pytest.approx(0.5 + 0.1 * stretch(3))


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_nothing_right_in_every_seed_is_not_certainty(score: float):
    """3 seeds, 30 prompts, no answer right, or all: Wilson has 0 of 30 up to 3.8415 / 33.8415 = 0.1135."""
    found = mean_over(np.full((3, 30), score))

    assert (found.low, found.high) == (
        pytest.approx(0.0 if score == 0 else 1 - 0.113513, abs=1e-5),
        pytest.approx(0.113513 if score == 0 else 1.0, abs=1e-5),
    )


def test_intervals_hold_the_truth_near_the_ends_too():
    """Success rates of 0.3% or 99.7% and 30 prompts: of 50 draws at least 46 hold them (a bootstrap alone 5 to 11)."""
    random = np.random.default_rng(2)
    for mean in (0.003, 0.997):
        chances = random.beta(2 * mean, 2 * (1 - mean), (50, 1, 30))
        drawn = (random.random((50, 3, 30)) < chances).astype(float)
        assert sum(mean in mean_over(scores, resamples=200) for scores in drawn) >= 46


def test_one_seed_has_the_interval_of_its_prompts():
    """Wilson's for 3 of 10."""
    assert mean_over(np.array([[1.0] * 3 + [0.0] * 7])) == wilson_interval(3, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int):
    """Drawn 300 times from a known world of seeds and prompts, at least 92 of 100 intervals hold the true values."""
    random, prompts, held, apart = np.random.default_rng(1), 60, 0, 0
    for _ in range(300):
        of_seeds, of_prompts = random.normal(0, 0.05, (seeds, 1)), random.normal(0, 0.2, (1, prompts))
        chance = np.clip(0.5 + of_seeds + of_prompts, 0, 1)
        first = (random.random((seeds, prompts)) < chance).astype(float)
        other = np.clip(0.5 + random.normal(0, 0.05, (seeds, 1)) + of_prompts, 0, 1)
        second = (random.random((seeds, prompts)) < other).astype(float)
        held += 0.5 in mean_over(first, resamples=1000)
        apart += contrast(first, second).p_value <= 0.05

    assert held / 300 >= 0.92
    assert apart / 300 <= 0.05


def test_a_band_is_what_was_seen():
    """Mean, lowest, highest; of one seed all the same."""
    assert band([0.25, 0.5, 0.75]) == (0.5, 0.25, 0.75)
    assert band([0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("scores", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.full((2, 2), np.nan)])
def test_no_scores_are_no_mean(scores: Floats):
    """A table of at least one seed and one prompt, finite."""
    with pytest.raises(ConfigError, match="a finite number for each seed and prompt"):
        mean_over(scores)


def test_a_contrast_needs_the_same_prompts():
    """Other shapes are refused."""
    with pytest.raises(ConfigError, match=r"the same seeds and prompts twice, got \(2, 3\) and \(2, 4\)"):
        contrast(np.zeros((2, 3)), np.zeros((2, 4)))
