"""The verdicts of tests/rewards/verdicts.jsonl: decided by mathematics, by hand, in the forms of five data sets."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.rewards.answers import last_boxed
from gnomon.rewards.base import Sample, Verifier, VerifierError
from gnomon.rewards.exact import Boxed, Numeric
from gnomon.rewards.math import Mathematics
from gnomon.rewards.numbers import find_numbers

PAIRS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "verdicts.jsonl").read_text("utf-8").splitlines()
]
JUDGES: dict[str, Verifier] = {"numeric": Numeric(), "boxed": Boxed(), "mathematics": Mathematics()}


def verdict(kind: str, gold: str, answer: str) -> float:
    said = f"The answer is {answer}" if kind == "numeric" else f"So it is \\boxed{{{answer}}}."
    return JUDGES[kind](Sample("", said, columns={"answer": gold}))


def wrong_verdicts(kind: str) -> list[str]:
    return [
        f"{pair['gold']} <- {pair['answer']} should be {pair['right']}"
        for pair in PAIRS
        if kind in pair["kinds"] and verdict(kind, pair["gold"], pair["answer"]) != float(pair["right"])
    ]


def test_the_table_holds_the_forms_of_five_sets():
    """At least 400 pairs, right and wrong, in the forms of GSM8K, MATH, DAPO, AIME and DeepScaleR."""
    forms = Counter(pair["form"] for pair in PAIRS)
    verdicts = Counter(pair["right"] for pair in PAIRS)

    assert set(forms) == {"GSM8K", "MATH", "DAPO", "AIME", "DeepScaleR"}
    assert len(PAIRS) >= 400
    assert min(verdicts.values()) >= 200


@pytest.mark.parametrize("kind", ["numeric", "boxed"])
def test_every_pair_gets_its_verdict(kind: str):
    """Right answers in every spelling earn 1; wrong ones and fragments of right ones earn 0."""
    assert wrong_verdicts(kind) == []


def test_math_verify_gives_the_same_verdicts():
    """Where the kinds overlap they agree, since each agrees with the table."""
    pytest.importorskip("math_verify")

    assert wrong_verdicts("mathematics") == []


def renderings(value: Fraction, with_units: bool = True) -> st.SearchStrategy[str]:
    """Ways in which people and TeX write one number."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    top, bottom = size.numerator, size.denominator
    if bottom == 1:
        grouped = f"{top:,}"
        texts = [f"{sign}{top}", f"{sign}{grouped}", f"{sign}{top}.0"]
        if with_units:
            texts += [f"{sign}\\${grouped}", f"{sign}{top} apples", f"{sign}{top} \\text{{ km}}"]
        texts += [sign + grouped.replace(",", mark) for mark in ("{,}", ",\\!", "\\,", "\u00a0")]
        texts += [f"${sign}{top}$", f"\u2212{top}" if sign else f"+{top}"]
        return st.sampled_from(texts)
    texts = [f"{sign}{top}/{bottom}", f"{sign}{top} / {bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}"]
    texts += [f"{sign}\\dfrac{{{top}}}{{{bottom}}}", f"\\frac{{{sign}{top}}}{{{bottom}}}"]
    texts += [f"{sign}\\tfrac{{{2 * top}}}{{{2 * bottom}}}"]
    if max(top, bottom) < 10:
        texts += [f"{sign}\\frac{top}{bottom}", f"{sign}\\frac{top} {bottom}"]
    if top > bottom:
        whole, rest = divmod(top, bottom)
        texts += [f"{sign}{whole} {rest}/{bottom}", f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}"]
    return st.sampled_from(texts)


values = st.one_of(
    st.integers(-(10**7), 10**7).map(Fraction),
    st.builds(Fraction, st.integers(-60, 60), st.integers(1, 40)),
)


@given(values, values, st.data())
@settings(max_examples=300)
def test_a_number_is_its_value_in_every_spelling(value: Fraction, other: Fraction, drawn: st.DataObject):
    """The same value earns 1, another 0, whatever the two spellings; all three kinds say the same."""
    gold, right = drawn.draw(renderings(value, with_units=False)), drawn.draw(renderings(value))
    wrong = drawn.draw(renderings(other))
    for kind in JUDGES:
        assert verdict(kind, gold, right) == 1.0, (kind, gold, right)
        assert verdict(kind, gold, wrong) == float(value == other), (kind, gold, wrong)


@given(values, st.data())
@settings(max_examples=300)
def test_no_fragment_of_a_number_is_paid(value: Fraction, drawn: st.DataObject):
    """Each run of digits within a spelling, alone, earns 1 only where it is the value."""
    spelled = drawn.draw(renderings(value))
    digits = "".join(c if c.isascii() and c.isdigit() else " " for c in spelled).split()
    for fragment in {*digits, *(d[:-1] for d in digits if len(d) > 1), *(d[1:] for d in digits if len(d) > 1)}:
        for kind in JUDGES:
            assert verdict(kind, spelled, fragment) == float(Fraction(fragment) == value), (kind, spelled, fragment)


@pytest.mark.parametrize(
    "wrapped", ["\\sqrt{{{}}}", "x^{{{}}}", "({}, 1]", "1, {}", "{}\\pi", "3+{}", "2x{}", "\\frac{{x}}{{{}}}"]
)
@given(number=st.integers(2, 10**4))
@settings(max_examples=30)
def test_a_number_within_a_larger_answer_is_not_paid(wrapped: str, number: int):
    """The 7 of the square root of 7 is no answer 7, for any of the kinds."""
    answer = wrapped.format(number)
    for kind in ("numeric", "boxed"):
        assert verdict(kind, str(number), answer) == 0.0, (kind, answer)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{",
        "(",
        "{",
        "\\frac{1}{",
        "$",
        "1,",
        "1",
        "9^",
        "\\text{",
        "1 ",
        "\\sqrt{",
        "-",
        "1/",
        ",\\!123",
        "\\{1,",
        "x=",
        "\\left(",
        "1 1/2 ",
    ],
)
def test_a_hundred_thousand_of_anything_are_read_at_once(text: str):
    """Long answers made to be slow are judged 0 in one pass; a quadratic reader would take minutes here."""
    answer = text * 100_000
    for kind in ("numeric", "boxed"):
        assert verdict(kind, "72", "\\boxed{" + answer) == 0.0


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "9^9^9", "1e999999999", "10^{999999999}", "99999999!", "2^{9999999}"])
def test_what_no_memory_holds_costs_nothing(answer: str):
    """A tower of powers is no answer to a number, and is equal to itself."""
    for kind in ("boxed", "mathematics"):
        assert verdict(kind, "72", answer) == 0.0
        assert verdict(kind, answer, answer) == 1.0


@pytest.mark.parametrize(
    "gold",
    ["1/2 + x", "(1, 2]", "\\sqrt{2}", "3 or 4", "3,14", "1.234,56", "2\\pi", "5 dozen", "x^2", "3 and 4", "1, 2"],
)
def test_what_is_more_than_a_number_is_no_answer_of_numeric(gold: str):
    """It is refused with its value, and its last digits are not taken for it."""
    with pytest.raises(ValueError, match=r"column 'answer' holds (more than a|no) number"):
        verdict("numeric", gold, "2")


@pytest.mark.parametrize("pair", PAIRS[::7], ids=lambda pair: pair["gold"][:20])
def test_every_answer_is_its_own_answer(pair: dict[str, Any]):
    """What the data check gives each reward as an answer earns 1."""
    for kind in pair["kinds"]:
        if kind == "mathematics":
            pytest.importorskip("math_verify")
        sample = Sample("", "", columns={"answer": pair["gold"]})
        said = JUDGES[kind].stated(sample)
        assert JUDGES[kind](Sample("", said or "", columns={"answer": pair["gold"]})) == 1.0


@given(st.text(alphabet="0123456789\\{}frac boxdsqt,./-+$%^_!()[]xmk\u00a0\u00bd", max_size=80))
@settings(max_examples=400)
def test_any_answer_is_judged(text: str):
    """No text makes a verdict fail, and whatever is boxed earns 1 as its own answer."""
    assert verdict("numeric", "72", text) in (0.0, 1.0)
    assert verdict("boxed", "72", text) in (0.0, 1.0)
    content = last_boxed(f"\\boxed{{{text}}}")
    if content is not None and content.strip(" .$"):
        assert verdict("boxed", content, content) == 1.0
    assert all(number.text for number in find_numbers(text))


@pytest.mark.parametrize(
    ("said", "content"),
    [
        (r"so $\boxed 7$.", "7"), (r"\boxed 7", "7"), (r"\fbox 12.5 cm", "12.5"), (r"\boxed{3}, no, \boxed 4", "4"),
        (r"\boxed 4, no, \boxed{3}", "3"), (r"\boxed -1/2", "-1/2"), (r"\boxed7", "7"), (r"\boxed notation", None),
        (r"\boxed{5} in \boxed form", "5"), (r"\boxed{\boxed 7}", "7"),
    ],
)  # fmt: skip
def test_a_box_of_a_number_needs_no_braces(said: str, content: str | None):
    """TeX takes the next sign, and people write so; words after the command are no box."""
    assert last_boxed(said) == content


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (r"-\boxed{7}", "-7"), (r"so $x = -\boxed{7}$", "-7"), ("it is \u2212\\fbox{7}.", "-7"), (r"-\boxed 7", "-7"),
        (r"**-\boxed{\frac{1}{2}}**", r"-\frac{1}{2}"), (r"-\left(\boxed{7}\right)", "-7"), (r"-\$\boxed{7}", "-7"),
        (r"-\boxed{x+1}", "-(x+1)"), (r"-\boxed{-7}", "-(-7)"), (r"\boxed{7}^2", "7^2"), (r"\boxed{7}^{-1}", "7^{-1}"),
        (r"(\boxed{7})^2", "(7)^2"), (r"\sqrt{\boxed{7}}", r"\sqrt{7}"), (r"\sqrt[3]{\boxed{7}}", r"\sqrt[3]{7}"),
        (r"\frac{\boxed{7}}{2}", r"\frac{7}{2}"), (r"\frac{1}{\boxed{7}}", r"\frac{1}{7}"), (r"\boxed{7}/2", "7/2"),
        (r"3\boxed{7}", "3(7)"), (r"\boxed{7}\pi", r"7\pi"), (r"\boxed{7}x", "7x"),
        (r"\boxed{7}\sqrt{2}", r"7\sqrt{2}"),
        (r"2^{\boxed{7}}", "2^{7}"), (r"\boxed{7}_8", "7_8"), (r"\boxed{7}.5", "7.5"), (r"\boxed{7},000", "7,000"),
        (r"\boxed{7} \times 10^3", r"7 \times 10^3"), (r"\pm\boxed{7}", r"\pm{7}"), (r"\log\boxed{7}", r"\log{7}"),
    ],
)  # fmt: skip
def test_a_box_that_is_a_part_of_something_is_not_the_answer(said: str, whole: str):
    """A sign, a power, a factor, a root or a fraction around the box changes what it says, for every kind."""
    assert last_boxed(said) == whole
    for judge in (JUDGES["numeric"], JUDGES["boxed"]):
        assert judge(Sample("", said, columns={"answer": "7"})) == 0.0
    assert JUDGES["boxed"](Sample("", said, columns={"answer": whole})) == 1.0


@pytest.mark.parametrize(
    "said",
    [
        r"Answer - \boxed{7}", r"- \boxed{7}", r"\boxed{7}!", r"\boxed{7}.", r"\boxed{7}\%", r"\boxed{7}^\circ",
        r"\$\boxed{7}",        r"$3+4=\boxed{7}$", r"\text{so }\boxed{7}", r"(\boxed{7})", r"\textbf{\boxed{7}}",
        r"\boxed{7} \times 3 = 21",
        r"\boxed{7}\text{ cm}", r"**\boxed{7}**", r"\boxed{7}, since", r"\end{align}\boxed{7}", r"co-\boxed{7}",
    ],
)  # fmt: skip
def test_what_stands_beside_a_box_in_a_sentence_changes_nothing(said: str):
    """A dash, a unit, marks of type and of a sentence, and a box that an equation was filled in with."""
    assert JUDGES["boxed"](Sample("", said, columns={"answer": "7"})) == 1.0


@pytest.mark.parametrize("gold", ["7!", "5 ft 7 in", "> 7", "3!!", "7 mod 5", "7\n8", "7 +/- 1", "2 h 30 min"])
def test_an_answer_whose_last_number_is_a_part_is_refused(gold: str):
    """An answer that is no number and no worked solution is not read as its last number."""
    with pytest.raises(VerifierError, match="column 'answer' holds"):
        verdict("numeric", gold, "7")


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        ("-5", "x = - 5", True), ("5", "x = - 5", False), ("-5", "It is minus 5.", True),
        ("5", "It is minus 5.", False), ("-5", "Negative 5", True), ("5", "it was negative 5", False),
        ("5", "10 minus 5", False), ("5", "10 - 5", False), ("5", "Answer - 5", True), ("5", "- 5", True),
        ("-5", "$- 5$", True), ("5", "$10$ - 5", False), ("12000", "12'000", True), ("0", "12'000", False),
        ("12000", "it is 12\u2019000", True), ("5", "between 3 and 5", False), ("6", "$5$ and $6$", False),
        ("6", "5; 6", False), ("6", "5 and 6 is 6", True), ("0.5", "5 and 1/2", False),
        ("5", "so the count is > 5", False), ("5", "> 5", True), ("5", "<b>5</b>", True),
        ("2500000", "$2.5 million", True), ("2.5", "$2.5 million", False),
        ("200000", "3 million 200 thousand", False), ("50 mph", "50 miles per hour", True),
        ("50 mph", "50 km per hour", False), ("500", "Rs. 500", True), ("\u20b9500", "500 rupees", True),
        ("500", "USD 500", True), ("5", "with 2pi it is 5", True), ("2", "2pi", False),
    ],
)  # fmt: skip
def test_signs_scales_and_money_in_a_sentence(gold: str, said: str, right: bool):
    """A sign in words or apart from its number counts; a scale multiplies; one of two numbers is no answer."""
    assert JUDGES["numeric"](Sample("", said, columns={"answer": gold})) == float(right)


@pytest.mark.parametrize("kind", ["boxed", "mathematics"])
@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"(-\infty, a) \cup (a, \infty)", r"(a, \infty) \cup (-\infty, a)", True),
        (r"(-\infty, -\sqrt{3}] \cup [\sqrt{3}, \infty)", r"[\sqrt3,+\infty)\cup(-\infty,-\sqrt3]", True),
        (r"x \in (0,1) \cup (2,3) \cup (4,a)", r"(4,a) \cup (0,1) \cup (2,3)", True),
        (r"[0,1) \cup \{b\}", r"\{b\} \cup [0,1)", True),
        (r"(-\infty, a) \cup (a, \infty)", r"(a, \infty) \cup (-\infty, a]", False),
        (r"(-\infty, a) \cup (a, \infty)", r"(a, \infty) \cup (a, \infty)", False),
        (r"(0,a) \cup (b,c)", r"(0,b) \cup (a,c)", False),
        (r"(0,1) \cup (2,a)", r"(0,1) \cup (2,a) \cup (a,5)", False),
    ],
)
def test_the_order_of_a_union_does_not_count(kind: str, gold: str, answer: str, right: bool):
    """Parts with letters or roots at their ends are matched as those of numbers are, both ways."""
    if kind == "mathematics":
        pytest.importorskip("math_verify")
    assert (verdict(kind, gold, answer), verdict(kind, answer, gold)) == (float(right), float(right))
