"""Generated sums: learnable from nothing on a CPU in seconds; the task of tests and first examples."""

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal

from gnomon.core.errors import bounded, check_bounds
from gnomon.tasks.question import Question, digest

_OPERATORS = "+-*"


@dataclass(frozen=True)
@bounded("arithmetic", terms="at least 1", lowest="at least 0", size="at least 1")
class ArithmeticTask:
    """Expressions such as ``3+4=`` with their values.

    ``*`` binds before ``+`` and ``-``; a value may be negative when ``-`` is among the operators. The question at an
    index depends on the settings and the index alone, not on ``size``: a larger set begins with the smaller one. Few
    terms and a narrow range give few different questions (1 to 9 + 1 to 9 gives 81), so a set may ask one of them
    several times.

    Attributes:
        kind: "arithmetic".
        terms: Numbers in an expression, at least 1.
        lowest: Smallest number of an expression, at least 0.
        highest: Largest number of an expression, at least ``lowest``.
        operators: Operators from + - *, each drawn with equal probability.
        phrase: Text of the question; the expression replaces ``{}``.
        size: Number of questions.
        seed: Another seed gives other questions.

    >>> ArithmeticTask(terms=3, lowest=4, highest=4)[0].columns["answer"]
    '12'
    """

    kind: Literal["arithmetic"] = "arithmetic"
    terms: int = 2
    lowest: int = 0
    highest: int = 29
    operators: tuple[str, ...] = ("+",)
    phrase: str = "{}="
    size: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        are_known = bool(self.operators) and all(len(o) == 1 and o in _OPERATORS for o in self.operators)
        check_bounds(
            "arithmetic",
            self,
            lowest=(0 <= self.lowest <= self.highest, f"from 0 to highest = {self.highest}"),
            operators=(are_known, f"some of {' '.join(_OPERATORS)}"),
            phrase=(self.phrase.count("{}") == 1, "a text with {} in it once"),
        )

    @property
    def name(self) -> str:
        """``arithmetic``."""
        return self.kind

    def questions(self) -> "ArithmeticTask":
        """Return the questions: the settings are the set."""
        return self

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Question:
        return _question(self, range(self.size)[index])


@lru_cache(maxsize=4096)
def _question(task: ArithmeticTask, number: int) -> Question:
    # Everything but the size: a larger set must begin with the questions of a smaller one.
    settings = digest(task.terms, task.lowest, task.highest, task.operators, task.phrase)
    # A generator of its own for each question: any index can be made without those before it.
    draw = Random(f"arithmetic/{task.seed}/{number}/{settings}")
    numbers = [draw.randint(task.lowest, task.highest) for _ in range(task.terms)]
    operators = [draw.choice(task.operators) for _ in range(task.terms - 1)]
    signs = zip(operators, numbers[1:], strict=True)
    text = task.phrase.replace("{}", str(numbers[0]) + "".join(f"{o}{n}" for o, n in signs))
    columns = {"answer": str(_value(numbers, operators)), "data_source": task.name}
    return Question(f"arithmetic/{task.seed}/{number}/{settings}", text, text, columns)


def _value(numbers: list[int], operators: list[str]) -> int:
    """Return the value of ``n0 o0 n1 o1 ...``; products first, each added with the sign before it."""
    total, product = 0, numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total, product = total + product, number if operator == "+" else -number
    return total + product
