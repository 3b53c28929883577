"""Two evaluations of the same prompts, and what may be said of their difference."""

import pytest

from gnomon.analysis.paired import EvalRecord, compare
from gnomon.core.errors import ConfigError


def row(name: str, *scores: float, question: str = "q") -> EvalRecord:
    answers = tuple("right" if s else f"wrong {n % 2}" for n, s in enumerate(scores))
    return EvalRecord(name, question, tuple(map(float, scores)), answers, tuple(range(1, len(scores) + 1)))


def test_prompts_are_paired_by_name_in_whatever_order():
    """Three prompts gain 1/2, 1/2 and 0: +1/3; the sign patterns ++0 and --0 are as large: p = 2/4."""
    before = [row("a", 0, 0), row("b", 0, 1), row("c", 1, 1)]
    after = [row("c", 1, 1), row("a", 0, 1), row("b", 1, 1)]
    found = compare(before, after)

    assert found.mean == pytest.approx(1 / 3)
    assert (found.first, found.second) == (pytest.approx(1 / 2), pytest.approx(5 / 6))
    assert (found.p_value, found.prompts, found.left_out, found.is_noise) == (0.5, 3, 0, True)


def test_what_only_one_side_has_is_left_out_and_said():
    """One prompt was asked of the first alone, one could not be graded on the second: one of three is paired."""
    before = [row("a", 1, 0), row("b", 1, 1), row("c", 0, 0)]
    after = [row("a", 1, 1), EvalRecord("b", "q", (), (), (3, 3), errors=2)]
    found = compare(before, after)

    assert (found.prompts, found.left_out, found.mean) == (1, 2, 0.5)
    assert "(2 prompts that only one of the two answered are left out)" in found.words


def test_other_measures_can_be_compared():
    """aa against ab of two prompts: pass@2 and length do not differ, maj@2 loses a half on each."""
    before, after = [row("a", 1, 1), row("b", 1, 1)], [row("a", 1, 0), row("b", 1, 0)]

    assert compare(before, after, "pass@2").mean == 0.0
    assert compare(before, after, "maj@2").mean == -0.5
    assert compare(before, after, "tokens").mean == 0.0


@pytest.mark.parametrize("tokens", [(3, 3), (200, 200), (1, 1)])
def test_lengths_that_are_all_alike_have_an_interval_in_tokens(tokens: tuple[int, int]):
    """20 prompts of L tokens on both sides: at most u = 3.8415 / 23.8415 = 16.1% differ, by L tokens at most."""
    sides = [[EvalRecord(str(n), "q", (1.0,), ("a",), (length,)) for n in range(20)] for length in tokens]
    found = compare(*sides, "tokens")

    assert found.interval.high == pytest.approx(0.161127 * tokens[0], rel=1e-4)
    assert found.interval.low == -found.interval.high


def test_one_name_for_two_questions_is_refused():
    """Row 7 of one file is not row 7 of another."""
    with pytest.raises(ConfigError, match=r"different questions under the same name \(a\)"):
        compare([row("a", 1)], [row("a", 1, question="other")])


def test_a_prompt_that_is_answered_twice_is_refused():
    """Which of the two lines is meant cannot be known."""
    with pytest.raises(ConfigError, match=r"1 of 2 prompts more than once \(a\)"):
        compare([row("a", 1), row("a", 0), row("b", 1)], [row("a", 1), row("b", 1)])


def test_other_numbers_of_answers_are_said():
    """Two answers a prompt against one, and then one to three."""
    one, two = [row("a", 1), row("b", 0)], [row("a", 1, 0), row("b", 1, 0)]

    assert "(1 and 2 answers a prompt)" in compare(one, two).words
    assert "(1 to 3 and 2 answers a prompt)" in compare([row("a", 1), row("b", 0, 0, 1)], two).words
    assert "answers a prompt" not in compare(two, two).words


def test_nothing_in_common_is_refused():
    """Other prompts, or fewer samples than the measure needs."""
    with pytest.raises(ConfigError, match=r"no prompt has 'avg' on both sides \(1 and 1 prompts, 0 of them shared\)"):
        compare([row("a", 1)], [row("b", 1)])
    with pytest.raises(ConfigError, match="no prompt has 'pass@2' on both sides"):
        compare([row("a", 1)], [row("a", 1)], "pass@2")
