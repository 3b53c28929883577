from concurrent.futures import ThreadPoolExecutor

import pytest

from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.math import Mathematics

pytest.importorskip("math_verify")


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
