"""Rates of k samples against numbers worked by hand, every subset counted, and simulation."""

import random
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.core.statistics import avg_at_k, maj_at_k, pass_at_k

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


@pytest.mark.parametrize(
    ("answers", "scores", "k", "value"),
    [
        (["a", "a", "b", "c"], [1, 1, 0, 0], 1, 1 / 2),
        (["a", "a", "b", "c"], [1, 1, 0, 0], 2, 1 / 2),
        (["a", "a", "b", "c"], [1, 1, 0, 0], 3, 2 / 3),
        (["a", "a", "b", "c"], [1, 1, 0, 0], 4, 1.0),
        (["a", None, None], [1, 0, 0], 2, 2 / 3),
        ([None, None, None], [0, 0, 0], 2, 0.0),
    ],
    ids=[
        "one votes",
        "aa 1, four ties 1/2, bc 0",
        "aab aac 1, abc abc 1/3",
        "all",
        "a is in two of three pairs",
        "none",
    ],
)
def test_the_majority_of_fewer_than_all_samples(answers: list[str | None], scores: list[float], k: int, value: float):
    """The mean over all choices of k: (1 + 4/2 + 0) / 6 for pairs of aabc, (1 + 1 + 1/3 + 1/3) / 4 for triples."""
    assert maj_at_k(answers, scores, k) == approx(value, abs=1e-12)


votes = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=8)


@given(votes.flatmap(lambda v: st.tuples(st.just(v), st.integers(1, len(v)))))
def test_the_majority_counts_the_subsets(drawn: tuple[list[tuple[str | None, bool]], int]):
    """The formula equals the mean of the majority's score over every k-subset; equal answers may be scored unlike."""
    samples, k = drawn
    subsets = list(combinations(samples, k))
    counted = sum(maj_at_k([a for a, _ in s], [float(r) for _, r in s]) for s in subsets) / len(subsets)

    assert maj_at_k([a for a, _ in samples], [float(r) for _, r in samples], k) == approx(counted, abs=1e-12)


def test_the_majority_of_many_samples_is_what_drawing_them_shows():
    """64 samples, 20 of them right and the wrong ones spread: 20,000 draws of 16 agree within 4 standard errors."""
    answers = ["right"] * 20 + [f"wrong {n % 9}" for n in range(36)] + [None] * 8
    scores = [float(a == "right") for a in answers]
    drawn = random.Random(0)
    rows = [drawn.sample(range(64), 16) for _ in range(20_000)]
    seen = [maj_at_k([answers[i] for i in row], [scores[i] for i in row]) for row in rows]
    mean = sum(seen) / len(seen)

    assert 0.5 < mean < 0.99
    assert maj_at_k(answers, scores, 16) == approx(mean, abs=4 * (mean * (1 - mean) / len(seen)) ** 0.5)


def test_the_majority_of_two_thousand_samples_is_finite():
    """C(2000, 100) times 100! is beyond a float; 80% right among 2,000 are always the majority of 100, to 1e-9."""
    answers = ["a"] * 1_600 + ["b"] * 400

    assert maj_at_k(answers, [1.0] * 1_600 + [0.0] * 400, 100) == approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("n", "wrong"), [(5, 1), (8, 1), (8, 2), (16, 3), (64, 5)])
def test_a_certain_majority_is_one_to_the_last_bit(n: int, wrong: int):
    """Few wrong ones never outvote: 1 for every k that they cannot tie, and 0 where it is they that are right."""
    answers = ["a"] * (n - wrong) + ["b"] * wrong
    for k in range(2 * wrong + 1, n):
        assert maj_at_k(answers, [1.0] * (n - wrong) + [0.0] * wrong, k) == 1.0
        assert maj_at_k(answers, [0.0] * (n - wrong) + [1.0] * wrong, k) == 0.0


@pytest.mark.parametrize("k", [0, 3])
def test_a_majority_of_more_than_there_are_is_refused(k: int):
    """Two samples have no majority of three, and none of nobody."""
    with pytest.raises(ConfigError, match="1 <= k <= samples"):
        maj_at_k(["a", "b"], [1, 0], k)
