import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.math import Mathematics

pytest.importorskip("math_verify")
from math_verify.grader import sympy_expr_eq
from sympy.core.relational import is_eq


def judge(completion: str, answer: str) -> float:
    return Mathematics()(Sample("", completion, columns={"answer": answer}))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"So it is $\boxed{\frac{1}{2}}$.", "1/2", 1.0),
        (r"So it is $\boxed{0.5}$.", r"\frac{1}{2}", 1.0),
        (r"Thus \boxed{1+x}", "x+1", 1.0),
        (r"Thus \boxed{x+2}", "x+1", 0.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        ("The answer is 72.", "72", 1.0),
        (r"\boxed{72}", r"We get $24 + 48 = \boxed{72}$", 1.0),
        ("I do not know.", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_equality_is_mathematical(completion: str, answer: str, reward: float):
    """Fractions, decimals, order of terms and of sets do not matter."""
    assert judge(completion, answer) == reward


def test_its_own_timeouts_are_off():
    """They set an alarm, which raises outside of the main thread: the grading deadline is the only clock."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        assert threads.submit(judge, r"\boxed{1}", "1").result() == 1.0


def test_an_answer_that_cannot_be_read_cannot_be_judged():
    """An empty answer is the dataset's fault, not the model's."""
    with pytest.raises(VerifierError, match="cannot read column 'answer'"):
        judge(r"\boxed{1}", "")


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        ("5", "x = - 5", False), ("-5", "x = - 5", True), ("5", "It is minus 5.", False),
        ("-5", "It is minus 5.", True),
        ("5", "5 million", False), ("5000000", "5 million", True), ("12", "12'000", False), ("12000", "12'000", True),
        ("12\\pi", "It is $12\\pi\\text{ cm}^2$.", True), ("\\pi r^2 h", "It is $\\pi r^2$.", False),
        ("\\pi r^2 h", "It is $\\pi r^2 h$.", True), ("\\pi", "It is $3.141593$.", False), ("5", "$x > 5$", False),
    ],
)  # fmt: skip
def test_without_a_box_signs_scales_and_units_are_read_too(gold: str, said: str, right: bool):
    """What math-verify takes out of a sentence is no part of what the sentence says."""
    assert Mathematics()(Sample("", said, columns={"answer": gold})) == float(right)


def braced(parts: list[str]) -> str:
    return r"\{" + ", ".join(parts) + r"\}"


def comparisons(gold: str, said: str) -> tuple[float, int]:
    """Return the reward, and how often math-verify or sympy asked whether two expressions are equal."""
    asked = (sympy_expr_eq.__code__, is_eq.__code__)
    count = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code in asked

    sys.setprofile(seen)
    try:
        return judge(f"\\boxed{{{said}}}", gold), count
    finally:
        sys.setprofile(None)


SQUARES = [f"(x+{n})^2" for n in range(16)]
MULTIPLIED = [f"x^2+{2 * n}x+{n * n}" for n in range(16)]


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        (braced(SQUARES), braced(MULTIPLIED[::-1]), True),
        (braced(SQUARES), braced([*MULTIPLIED[:0:-1], "x^2+1"]), False),
        (braced([f"({each}, {n})" for n, each in enumerate(SQUARES)]),
         braced([f"({each}, {n})" for n, each in enumerate(MULTIPLIED)][::-1]), True),
        (braced([braced([each, "y"]) for each in SQUARES[:9]]),
         braced([braced(["y", each]) for each in MULTIPLIED[:9]][::-1]), True),
        (r" \cup ".join(f"({2 * n}, {2 * n + 1})" for n in range(16)),
         r" \cup ".join(f"({2 * n}, {2 * n + 1}]" for n in range(16)), False),
        (r" \cup ".join(f"(a+{2 * n}, a+{2 * n + 1})" for n in range(16)),
         r" \cup ".join(f"({2 * n}+a, {2 * n + 1}+a)" for n in reversed(range(16))), True),
        (r" \cup ".join(f"(a+{2 * n}, a+{2 * n + 1})" for n in range(9)),
         r" \cup ".join(f"(b+{2 * n}, b+{2 * n + 1})" for n in range(9)), False),
    ],
)  # fmt: skip
def test_sets_take_few_comparisons(gold: str, said: str, right: bool):
    """Sets, pairs in sets, sets of sets and unions: a part is compared with those that have its value at a point."""
    reward, count = comparisons(gold, said)

    assert reward == float(right)
    assert count < 400


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        (r"(0,\sqrt{8}) \cup [5,7]", r"[5,7] \cup (0, 2\sqrt{2})", True), (r"(0,1] \cup (1,2)", "(0,2)", True),
        (r"(0,2)", r"(0,1) \cup (1,2)", False), (r"[1,2] \cup \{5\}", r"\{5\} \cup [1,2]", True),
        (r"\{1\} \cup \{2\}", r"\{2, 1\}", True), (r"\{1, 2\} \cup [3,4]", r"[3,4] \cup \{2, 1\}", True),
        (r"(-a,0) \cup (0,a)", r"(0,a) \cup (-a,0)", True), (r"\{\sqrt{x^2}, 1\}", r"\{|x|, 1\}", True),
        (r"\{\sin 2x, 1\}", r"\{1, 2\sin x\cos x\}", True), (r"(-\infty,0) \cup (0,\infty)", r"x \neq 0", True),
        (r"\{x+1, \frac{x^2-1}{x-1}\}", r"\{x+1, x+2\}", False), (r"\{x^{999}, 1\}", r"\{1, x^{998}\}", False),
        (r"\{x^{9999}, 1\}", r"\{1, x^{9999}\cdot 1\}", True), (r"\{\frac{x}{0}, 1\}", r"\{1, x\}", False),
    ],
)  # fmt: skip
def test_sets_and_unions_are_their_parts(gold: str, said: str, right: bool):
    """In any order and spelling; what touches is one interval, and no part may be left over."""
    assert judge(f"\\boxed{{{said}}}", gold) == float(right)
