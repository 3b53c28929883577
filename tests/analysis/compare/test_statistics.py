"""Whether runs were asked the same questions in the same order, from what they recorded."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.analysis.compare.records import Cost, Trained
from gnomon.analysis.compare.statistics import order_of
from gnomon.rollouts.curriculum.samplers import UniformCurriculum

NOTHING = Cost(0.0, 0.0, 0.0, 0.0, {}, {})


def asked(*steps: Sequence[object], is_filtered: bool = False) -> Trained:
    """Return a run that asked these questions."""
    rows = tuple(tuple(map(str, step)) for step in steps)
    return Trained("a", 0, Path("a"), (), {}, (), NOTHING, rows, is_filtered)


@pytest.mark.parametrize(
    ("one", "other", "verdict", "questions"),
    [
        (asked([1, 2], [3, 4]), asked([1, 2], [3, 4]), "same", 4),
        (asked([1], [2]), asked([1, 2, 3, 4]), "same", 2),
        (asked([1, 2], [3, 4]), asked([1, 3], [2, 4]), "other", 4),
        (asked([1, 2], [3, 4]), asked([5, 6], [7, 8]), "other", 4),
        (asked(), asked([1]), "unknown", 0),
        (asked([2, 1], [4, 3], is_filtered=True), asked([1, 2, 3, 4]), "same, step by step", 4),
        (asked([2, 1], [5, 3], is_filtered=True), asked([1, 2, 3, 4]), "other", 4),
        (asked([2, 1], is_filtered=True), asked([1, 2], is_filtered=True), "unknown", 2),
    ],
    ids=["equal", "prefix", "another order", "other questions", "none", "refused", "refused others", "both refused"],
)
def test_verdicts(one: Trained, other: Trained, verdict: str, questions: int):
    """Each case, from both sides."""
    for left, right in ((one, other), (other, one)):
        found = order_of(left, right, epoch=1000)

        assert (found.verdict, found.questions) == (verdict, questions)
        assert found.is_same == verdict.startswith("same")


@given(st.integers(5, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.integers(0, 9))
def test_shuffled_epochs_are_one_row_whatever_the_steps(size: int, one: int, other: int, steps: int, seed: int):
    """Two runs that ask in steps of other sizes agree, but perhaps for the ends of epochs; another seed does not.

    Within the first epoch they agree question by question.
    """
    runs = []
    for count in (one, other):
        curriculum = UniformCurriculum(size, seed)
        runs.append(asked(*(curriculum.take(count) for _ in range(steps))))
    found = order_of(runs[0], runs[1], epoch=size)

    assert found.is_same
    assert found.questions == min(one, other) * steps
    assert found.verdict == "same" or found.questions > size - max(one, other)


def test_another_seed_is_another_order():
    """Forty questions in two orders: nothing but the set is the same."""
    rows = [
        asked(*(curriculum.take(4) for _ in range(5)))
        for curriculum in (UniformCurriculum(40, 0), UniformCurriculum(40, 1))
    ]

    assert order_of(rows[0], rows[1], epoch=40).verdict == "other"
