"""Verifiers that are formulas: text equality, numbers, boxed answers, formats, lengths."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from gnomon.core.errors import ConfigError, bounded, check_bounds
from gnomon.rewards.answers import Extract, extract, final_answer, last_boxed, same_answer, squeezed, with_open_box
from gnomon.rewards.base import Sample, Verifier, VerifierError, text_column
from gnomon.rewards.numbers import Number, Which, choose_number, find_numbers, parse_number

# A worked solution has words, and does not end in what makes of its last number something else.
_SOLUTION = re.compile(r"(?:[A-Za-z]{2}|[A-Za-z] ?=|[^\x00-\x7f]{2}).*[^!\s]\s*$", re.DOTALL)
_SEVERAL = re.compile(r"[0-9] (?:and|to|or) [-+$\\]{0,3}[0-9.,]+[\s.$]*$")


@dataclass(frozen=True)
class Exact(Verifier):
    """1.0 if the completion is the answer, else 0.0.

    Attributes:
        kind: "exact".
        strip: Whether whitespace around both is ignored.
        casefold: Whether case is ignored.
        column: Column with the answer.
    """

    kind: Literal["exact"] = field(default="exact", kw_only=True)
    strip: bool = True
    casefold: bool = False
    column: str = "answer"

    def __call__(self, sample: Sample) -> float:
        """Compare the two texts."""
        return float(self._plain(sample.completion) == self._plain(text_column(sample, self.column)))

    def stated(self, sample: Sample) -> str:
        """Return the answer as it is."""
        return text_column(sample, self.column)

    def answer(self, sample: Sample) -> str | None:
        """Return the text that is compared."""
        return self._plain(sample.completion) or None

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.casefold else text


@dataclass(frozen=True)
@bounded(tolerance=">= 0 and finite")
class Numeric(Verifier):
    """1.0 if a number of the completion equals the answer's, in exact rational arithmetic, else 0.0.

    `rewards/numbers.py` says what counts as a number. A part of something larger is no answer (the 2 of x^2). A unit
    counts only where the answer has one and the completion another.

    Attributes:
        kind: "numeric".
        which: Which number of the completion counts: the "last", the "first", or the "only" one (several are wrong).
        tolerance: Largest absolute difference that still counts, at least 0; 0 is equality (0.5 = 1/2 = .50).
        column: Column with the answer: a number with or without its unit, or a worked solution that ends in one ("...
            #### 72", a box). What is more than a number (1/2 + x, a pair) is an error, not its last digits.

    >>> Numeric()(Sample("", "Half of it is 0.50.", columns={"answer": "1/2"}))
    1.0
    """

    kind: Literal["numeric"] = field(default="numeric", kw_only=True)
    which: Which = "last"
    tolerance: float = 0.0
    column: str = "answer"

    def __call__(self, sample: Sample) -> float:
        """Find both numbers and compare them."""
        gold = _gold_number(text_column(sample, self.column), self.column)
        found = choose_number(with_open_box(sample.completion), self.which)
        return float(found is not None and found.equals(gold, self.tolerance))

    def stated(self, sample: Sample) -> str:
        """Return the answer in a sentence."""
        return _as_answer(text_column(sample, self.column))

    def answer(self, sample: Sample) -> str | None:
        """Return the number that is compared, as a fraction in lowest terms: 0.50 and 2/4 are "1/2"."""
        found = choose_number(with_open_box(sample.completion), self.which)
        return None if found is None else found.canonical


@dataclass(frozen=True)
@bounded(tolerance=">= 0 and finite")
class Boxed(Verifier):
    r"""1.0 if the content of the last balanced ``\boxed{...}`` or ``\fbox{...}`` is the answer, else 0.0.

    Two numbers are compared as numbers; lists, sets, pairs and intervals are compared part by part; everything else is
    compared as text without the TeX around it (`rewards/answers.py`). What is equal only by algebra (x+1 and 1+x) is
    for `rewards/math.py`; wherever both can tell, they say the same.

    Attributes:
        kind: "boxed".
        tolerance: Largest absolute difference of two numbers that still counts, at least 0.
        column: Column with the answer. Of a worked solution, what follows its last #### counts, or the content of its
            last box.
    """

    kind: Literal["boxed"] = field(default="boxed", kw_only=True)
    tolerance: float = 0.0
    column: str = "answer"

    def __call__(self, sample: Sample) -> float:
        """Find the box and compare its content."""
        whole = text_column(sample, self.column)
        marked = final_answer(whole)
        gold = whole if marked is None else marked
        found = last_boxed(sample.completion)
        if found is None:
            return 0.0
        # None means that only algebra could tell, which this verifier counts as different.
        return float(same_answer(found, gold, self.tolerance) is True)

    def stated(self, sample: Sample) -> str:
        """Return the answer in a box."""
        return boxed_answer(text_column(sample, self.column))

    def answer(self, sample: Sample) -> str | None:
        """Return the box's content: a number as a fraction in lowest terms, else as text without spaces and such."""
        found = last_boxed(sample.completion)
        if found is None:
            return None
        number = parse_number(found)
        return number.canonical if number else squeezed(found) or None


@dataclass(frozen=True)
class Format(Verifier):
    """1.0 if the completion matches a regular expression, else 0.0; a dot also matches a line break.

    A pattern that backtracks without end is ended by the grading deadline.

    Attributes:
        pattern: A regular expression in Python's syntax.
        kind: "format".
        match: "full" wants the pattern to be the whole completion (whitespace around it aside); "partial" wants it
            somewhere.

    Raises:
        ConfigError: ``pattern`` is no regular expression.
    """

    pattern: str
    kind: Literal["format"] = field(default="format", kw_only=True)
    match: Literal["full", "partial"] = "full"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"Format.pattern is no regular expression: {error} in {self.pattern!r}; "
                "TOML takes patterns best in single quotes"
            ) from error

    def __call__(self, sample: Sample) -> float:
        """Match."""
        pattern = re.compile(self.pattern, re.DOTALL)
        if self.match == "full":
            return float(pattern.fullmatch(sample.completion.strip()) is not None)
        return float(pattern.search(sample.completion) is not None)


@dataclass(frozen=True)
class Parsable(Verifier):
    """1.0 if the completion gives an answer at all and was not cut off by its budget, else 0.0.

    The share of these is the *format* of a policy; the share of right ones among them is its *accuracy*. With weight 0
    the share is measured beside a reward and changes nothing.

    Attributes:
        kind: "parsable".
        extract: Where the answer should stand.
    """

    kind: Literal["parsable"] = field(default="parsable", kw_only=True)
    extract: Extract = "last_number"

    def __call__(self, sample: Sample) -> float:
        """Look for the answer, without judging it."""
        return float(not sample.is_truncated and extract(sample.completion, self.extract) is not None)

    def answer(self, sample: Sample) -> str | None:
        """Return what it found."""
        return extract(sample.completion, self.extract)


@dataclass(frozen=True)
@bounded(buffer="above 0", factor=">= 0 and finite")
class LengthPenalty:
    """Lower the reward linearly over the last ``buffer`` tokens of the budget, by ``factor`` at its end.

    penalty(l) = -factor * clip((l - (L_max - buffer)) / buffer, 0, 1), added before any group statistic.

    Source: DAPO, arXiv 2503.14476, eq. 13 (buffer 4096 of 20480).

    Attributes:
        buffer: Tokens, 0 < buffer <= L_max.
        factor: >= 0, in rewards.
        max_length: L_max in tokens; None takes the sample's budget. Capped at -factor as in FeynRL and TRL; verl has no
            cap.

    >>> LengthPenalty(4096, 1.0, 20480)(Sample("", "", completion_tokens=18432))
    -0.5
    """

    buffer: int
    factor: float = 1.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        most = math.inf if self.max_length is None else self.max_length
        check_bounds(
            "LengthPenalty",
            self,
            buffer=(0 < self.buffer <= most, f"above 0 and at most max_length = {self.max_length} tokens"),
        )

    def __call__(self, sample: Sample) -> float:
        """Return the penalty, in [-factor, 0]."""
        budget = self.max_length or sample.max_completion_length
        if budget is None:
            raise VerifierError("the sample has no max_completion_length; set max_length")
        excess = (sample.completion_tokens - (budget - self.buffer)) / self.buffer
        # The added zero turns -0.0, which every short answer would get, into 0.0.
        return -self.factor * min(max(excess, 0.0), 1.0) + 0.0


def boxed_answer(text: str) -> str:
    """Return a completion that gives ``text``, or the content of its last box, as its answer in a box."""
    marked = final_answer(text)
    return f"So it is \\boxed{{{text if marked is None else marked}}}."


def _as_answer(text: str) -> str:
    """Return a completion that gives the answer that ``text`` is, or that its worked solution ends in."""
    if "####" in text:
        return f"#### {text.rpartition('####')[2].strip()}"
    boxed = last_boxed(text)
    return f"The answer is {text.strip().rstrip('.')}." if boxed is None else f"So it is \\boxed{{{boxed}}}."


def _gold_number(text: str, column: str) -> Number:
    """Return the number that an answer is, or that a worked solution ends in.

    Raises:
        VerifierError: If it ends in none.
    """
    marked = final_answer(text)
    number = parse_number(text if marked is None else marked)
    # A worked solution without a mark ends in its answer. A text that ends in several numbers ("3 and
    # 5") has no single one to compare with, and a wrong gold number would be worse than an error.
    if number is None and marked is None and _SOLUTION.search(text) and not _SEVERAL.search(text):
        number = choose_number(text, "last")
    if number is None or number.value is None:
        what = "more than a number" if find_numbers(text) else "no number"
        raise VerifierError(f"column '{column}' holds {what}: {text[-80:]!r}")
    return number
