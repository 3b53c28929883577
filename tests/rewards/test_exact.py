from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.rewards.answers import Extract
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.exact import Boxed, Exact, Format, LengthPenalty, Numeric, Parsable


def answered(completion: str, answer: Any = "42", **fields: Any) -> Sample:
    return Sample("What is it?", completion, columns={"answer": answer}, **fields)


def test_exact_compares_text():
    """Whitespace around is ignored unless strip is off; case counts unless casefold is on."""
    assert Exact()(answered(" 42\n")) == 1.0
    assert Exact(strip=False)(answered(" 42\n")) == 0.0
    assert Exact()(answered("paris", "Paris")) == 0.0
    assert Exact(casefold=True)(answered("PARIS", "Paris")) == 1.0
    assert Exact()(answered("42", 42)) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("I get 40 + 2 = 42.", "42", 1.0),
        ("42, or maybe 43", "42", 0.0),
        ("it is 1,234.50", 1234.5, 1.0),
        ("it is 2/4", "1/2", 1.0),
        ("it is 0.1", 0.1, 1.0),
        ("it is 72", "She sells 48 in May.\n48 + 24 = 72\n#### 72", 1.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("1/0", "42", 0.0),
    ],
)
def test_numeric_compares_the_last_number(completion: str, answer: Any, reward: float):
    """As exact rationals; an answer that is a worked solution is its last number."""
    assert Numeric()(answered(completion, answer)) == reward


def test_numeric_can_look_at_the_first_or_the_only_number():
    """Two numbers are wrong for "only", even if one is right."""
    assert Numeric(which="first")(answered("42, not 43")) == 1.0
    assert Numeric(which="only")(answered("it is 42")) == 1.0
    assert Numeric(which="only")(answered("42, not 43")) == 0.0


@pytest.mark.parametrize(
    ("said", "gold", "right"),
    [
        ("1.1, 1.0", "1.0, 1.2", True), ("1.0, 1.1", "1.2, 1.0", True), ("1.1, 1.1, 1.3", "1.0, 1.2, 1.2", True),
        ("1.0, 1.0", "1.0, 1.2", False), ("5.05", r"\{5\}", True), (r"\{5.05\}", "5", True), ("5.3", r"\{5\}", False),
        ("x = 5.05", "5", True), ("5.05 cm", "5 cm", True), ("(A) 5.05", "5", True), ("5.05", "(C) 5", True),
        ("(5.05, 1)", "(5, 1)", True), ("[5.05, 7)", "[5, 7)", True), ("5.05; 1.1", r"\{1.2, 5\}", True),
    ],
)  # fmt: skip
def test_a_tolerance_holds_in_every_form(said: str, gold: str, right: bool):
    """Sets are matched whole, since 1.1 may stand for 1.0 or 1.2; and a set of one is its number from either side."""
    assert Boxed(tolerance=0.15)(answered(f"\\boxed{{{said}}}", gold)) == float(right)


def test_tolerance_is_absolute_and_exact():
    """|0.333 - 1/3| = 1/3000: within 0.001, outside 0.0003; |0.3 - 0.1| <= 0.2 holds without rounding."""
    assert Numeric(tolerance=0.001)(answered("0.333", "1/3")) == 1.0
    assert Numeric(tolerance=0.0003)(answered("0.333", "1/3")) == 0.0
    assert Numeric(tolerance=0.2)(answered("0.3", 0.1)) == 1.0


@pytest.mark.parametrize("columns", [{}, {"answer": None}, {"answer": "no number"}, {"answer": [4]}, {"answer": True}])
def test_without_a_usable_answer_nothing_can_be_judged(columns: dict[str, Any]):
    """A missing, null, wordy or structured answer is an error, never a zero."""
    with pytest.raises(VerifierError, match="answer"):
        Numeric()(Sample("", "42", columns=columns))


def test_a_missing_column_is_named_with_those_that_are_there():
    """The message tells a misspelt column from an empty row."""
    with pytest.raises(VerifierError, match=r"no column 'gold'; the sample has answer"):
        Exact(column="gold")(answered("42"))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so \boxed{42}", "42", 1.0),
        (r"\boxed{41} no, \boxed{42}", "42", 1.0),
        (r"\boxed{42} no, \boxed{41}", "42", 0.0),
        ("so 42", "42", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac{\pi}{2}}", r"\frac{\pi}{2}", 1.0),
        (r"\boxed{\text{Paris}}", "Paris", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{1+x}", "x+1", 0.0),
        (r"\boxed{7}", r"We find that it is \boxed{7}.", 1.0),
    ],
)
def test_boxed_compares_the_last_box(completion: str, answer: str, reward: float):
    """As numbers where both are, else as normalized LaTeX; algebra is not done here."""
    assert Boxed()(answered(completion, answer)) == reward


def test_format_matches_all_or_some():
    """A full match wants the whole completion, over line breaks; a partial one a piece of it."""
    tags = r"<think>.*</think>\s*<answer>.*</answer>"

    assert Format(tags)(answered("\n<think>a\nb</think>\n<answer>42</answer> ")) == 1.0
    assert Format(tags)(answered("So: <think>a</think><answer>42</answer>")) == 0.0
    assert Format(tags, match="partial")(answered("So: <think>a</think><answer>42</answer>")) == 1.0


def test_a_bad_pattern_is_refused_at_construction():
    """Before anything is loaded, with the pattern and where it is wrong."""
    with pytest.raises(ConfigError, match=r"no regular expression: unterminated character set.*'\[a'"):
        Format("[a")


@pytest.mark.parametrize(
    ("how", "completion", "truncated", "fraction"),
    [
        ("last_number", "it is 3", False, 1.0),
        ("last_number", "it is 3", True, 0.0),
        ("last_number", "it is three", False, 0.0),
        ("tags", "<answer>three</answer>", False, 1.0),
        ("boxed", "3", False, 0.0),
    ],
)
def test_parsable_looks_for_an_answer_without_judging_it(
    how: Extract, completion: str, truncated: bool, fraction: float
):
    """Right or wrong does not matter; being cut off does."""
    assert Parsable(extract=how)(answered(completion, "99", is_truncated=truncated)) == fraction


@pytest.mark.parametrize(
    ("length", "penalty"), [(1000, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (21000, -1.0)]
)
def test_overlong_penalty_falls_linearly_over_the_buffer(length: int, penalty: float):
    """L_max 20480, buffer 4096: none up to 16384, half at 18432, all at 20480, and no more than all beyond."""
    sample = Sample("", "", completion_tokens=length, max_completion_length=20480)

    assert LengthPenalty(4096)(sample) == pytest.approx(penalty)
    assert LengthPenalty(4096, factor=2.0, max_length=20480)(sample) == pytest.approx(2 * penalty)


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 100))
def test_overlong_penalty_is_bounded(length: int, buffer: int, more: int, factor: float):
    """It lies in [-factor, 0] and never falls when an answer gets shorter."""
    penalty = LengthPenalty(buffer, factor, buffer + more)
    here = penalty(Sample("", "", completion_tokens=length))
    longer = penalty(Sample("", "", completion_tokens=length + 1))

    assert -factor <= longer <= here <= 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: LengthPenalty(0),
        lambda: LengthPenalty(10, max_length=5),
        lambda: LengthPenalty(10, factor=-1.0),
        lambda: Numeric(tolerance=-1.0),
        lambda: Numeric(tolerance=float("nan")),
        lambda: Boxed(tolerance=float("inf")),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any):
    """At construction, with the value."""
    with pytest.raises(ConfigError, match=r"got"):
        make()


def test_a_penalty_without_budget_cannot_be_given():
    """Neither the sample nor the penalty knows L_max."""
    with pytest.raises(VerifierError, match="max_completion_length"):
        LengthPenalty(10)(Sample("", ""))
