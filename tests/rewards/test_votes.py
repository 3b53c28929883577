"""What an answer is when samples vote: equal answers have equal texts, and what is no answer has no vote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import UserError
from gnomon.rewards.base import Sample, Verifier
from gnomon.rewards.exact import Boxed, Exact, Format, Numeric, Parsable
from gnomon.rewards.grading import LONGEST_ANSWER, Grading, WeightedReward
from gnomon.rewards.math import Mathematics
from gnomon.rewards.reasoning import Reasoning


@pytest.mark.parametrize(
    ("verifier", "alike", "answer"),
    [
        (Numeric(), ("It is 1,000.", "1000", "so 1e3"), "1000"),
        (Numeric(), ("0.50", "2/4", "\\frac{1}{2}"), "1/2"),
        (Numeric(which="first"), ("7 or 8", "7.0"), "7"),
        (Boxed(), (r"\boxed{ 0.5 }", r"so \boxed{\frac{2}{4}}."), "1/2"),
        (Boxed(), (r"\boxed{x + 1}", r"\boxed{$x+1$}"), "x+1"),
        (Exact(casefold=True), ("Paris", " PARIS\n"), "paris"),
        (Reasoning(extract="last_line"), ("so\n5", "5.0"), "5"),
        (Reasoning(), ("<answer>a  b</answer>", "I say <answer> a b</answer>"), "a b"),
        (Mathematics(), (r"\boxed{\frac{1}{2}}", r"$\boxed{0.5}$"), "1/2"),
        (Parsable(extract="boxed"), (r"\boxed{7}", r"\boxed{ 7 }"), "7"),
        (Format("a+"), ("aa", " aa "), "aa"),
    ],
)
def test_equal_answers_are_one_answer(verifier: Verifier, alike: tuple[str, ...], answer: str):
    """However they are written."""
    assert {verifier.answer(Sample("", text)) for text in alike} == {answer}


@pytest.mark.parametrize(
    ("verifier", "text"),
    [(Numeric(), "no number"), (Boxed(), "7"), (Exact(), "  "), (Reasoning(), "7"), (Mathematics(), "hm"),
     (Numeric(which="only"), "7, 8")],
)  # fmt: skip
def test_what_is_no_answer_has_no_vote(verifier: Verifier, text: str):
    """Nothing was found where the answer should stand."""
    assert verifier.answer(Sample("", text)) is None


NUMERIC = Grading((WeightedReward(Numeric()), WeightedReward(Parsable(), weight=0.0)))


@given(st.one_of(st.integers(-999, 999).map(str), st.fractions(max_denominator=50).map(str), st.text(max_size=12)))
def test_answers_that_score_alike_on_every_question_are_alike(text: str):
    """Over all texts: what scores 1 against a number votes for it, and what votes for it scores 1."""
    verdict = NUMERIC(Sample("", text, columns={"answer": "7"}))

    assert (verdict.reward == 1.0) == (verdict.answer == "7")


def test_a_verdict_carries_the_first_rewards_answer():
    """An error has none; a long answer is cut and told apart by a digest."""
    whole = Grading((WeightedReward(Exact()),))
    long, other = ("x" * 5_000, "x" * 4_999 + "y")
    answers = [whole(Sample("", text, columns={"answer": "1"})).answer for text in (long, other)]

    assert NUMERIC(Sample("", "it is 4.0", columns={"answer": "4"})).answer == "4"
    assert NUMERIC(Sample("", "4")).answer is None
    assert len(set(answers)) == 2
    assert all(a is not None and len(a) < LONGEST_ANSWER + 30 for a in answers)


class Stubborn(Exact):
    """Judges, and cannot say what was answered."""

    def answer(self, sample: Sample) -> str | None:
        raise UserError("no idea")


def test_an_answer_that_cannot_be_read_costs_no_grade():
    """The score stays; the sample has no vote."""
    verdict = Grading((WeightedReward(Stubborn()),))(Sample("", "1", columns={"answer": "1"}))

    assert (verdict.reward, verdict.answer) == (1.0, None)
