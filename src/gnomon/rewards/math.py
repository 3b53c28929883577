"""Mathematical equality of LaTeX and plain expressions, by math-verify."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from zlib import crc32

from gnomon.core.optional import import_optional
from gnomon.rewards.answers import (
    final_answer,
    last_boxed,
    readable,
    same_answer,
    squeezed,
    without_unit,
    without_units,
)
from gnomon.rewards.base import Sample, Verifier, VerifierError, text_column
from gnomon.rewards.exact import boxed_answer
from gnomon.rewards.numbers import choose_number, find_numbers, parse_number

_MARKED = re.compile(r"(?<![\\$])\$[^$]+(?<!\\)\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
_WHOLE = re.compile(r"\s*(?:\$\$?[^$]+\$\$?|\\\((?:(?!\\\().)+\\\)|\\\[(?:(?!\\\[).)+\\\])\.?\s*", re.DOTALL)
# Exponents of six digits, powers of powers, factorials of factorials and digit strings of thousands:
# sympy would evaluate these exactly, and no time limit interrupts one big-integer operation.
_HUGE = re.compile(
    r"(?:\^|\*\*)\s?\{?\s?[0-9]{6}|(?:(?:\^|\*\*)[\s{(]{0,4}[0-9]+[\s})]{0,4}){2}|[0-9]{6}\s?!|[0-9]\s?!\s?!|"
    r"[0-9][eE][-+]?[0-9]{4}|[0-9]{2000}"
)


@dataclass(frozen=True)
class Mathematics(Verifier):
    r"""1.0 if math-verify finds the completion's answer mathematically equal to the column's, else 0.0.

    Numbers, lists, pairs, intervals, words and letters of choices are compared as `boxed` compares them, exactly;
    math-verify compares the rest. The last box of a completion is its answer; without one, what math-verify finds is. A
    power tower, an exponent or a factorial that no memory holds is equal only to its own text.

    The timeouts of math-verify are off: they answer "different" when time is up, which would be a zero for what nobody
    judged, and they need SIGALRM. The grading deadline ends a comparison that never returns, as an error.

    Attributes:
        kind: "mathematics".
        column: Column with the answer. A bare answer, with \$ for dollars or between dollars, is read as a box's
            content; in a worked solution the last box is the answer.

    Source: math-verify 0.9.0, ``parse`` with its default extraction, and ``verify`` with ``allow_set_relation_comp``,
    so that an inequality may be compared with an interval.
    """

    kind: Literal["mathematics"] = field(default="mathematics", kw_only=True)
    column: str = "answer"

    def prepare(self) -> None:
        """Import math-verify and sympy (half a second).

        Raises:
            ConfigError: That names the extra to install.
        """
        import_optional("math_verify", "math", "the mathematics reward")

    def __call__(self, sample: Sample) -> float:
        """Parse both and compare."""
        text = text_column(sample, self.column)
        gold = _content(text)
        found = last_boxed(sample.completion)
        if gold is not None and found is not None:
            same = same_answer(found, gold)
            # Equality of two texts is not final yet unless the answer is a number: math-verify must first show
            # that it can read the answer, or a dataset's broken answer would earn a reward for being copied.
            if same is not None and (parse_number(gold) is not None or not same):
                return float(same)
        # Only the part that sympy would evaluate is looked at: a huge number in the reasoning does no harm.
        if _HUGE.search(text) or _HUGE.search(sample.completion if found is None else found):
            return float(gold is not None and found is not None and squeezed(found) == squeezed(gold))
        read = _parsed_answer(_asked(gold, text))
        if not read:
            raise VerifierError(f"math-verify cannot read column '{self.column}': {text[-80:]!r}")
        if gold is not None and found is not None and same_answer(found, gold):
            return 1.0
        return _verified(read, gold, found, sample.completion)

    def stated(self, sample: Sample) -> str:
        """Return the answer in a box."""
        text = text_column(sample, self.column)
        return text if _content(text) is None else boxed_answer(text)

    def is_heavy(self, sample: Sample) -> bool:
        """Whether math-verify is asked."""
        return parse_number(_content(text_column(sample, self.column)) or "") is None

    def answer(self, sample: Sample) -> str | None:
        """Return the answer as math-verify reads it: a number as a fraction in lowest terms, else sympy's own text.

        Equal answers that sympy writes in two ways (x + 1 over y, x/y + 1/y) are two; they share no votes.
        """
        boxed = last_boxed(sample.completion)
        number = None if boxed is None else parse_number(boxed)
        if number is not None:
            return number.canonical
        if _HUGE.search(sample.completion if boxed is None else boxed):
            return None if boxed is None else squeezed(boxed)
        found = _parsed(_asked(boxed, sample.completion))
        if not found:
            return None
        number = parse_number(str(found[-1])) or parse_number(str(found[0]))
        return number.canonical if number else str(found[0])


def _verified(gold: tuple[Any, ...], said: str | None, boxed: str | None, completion: str) -> float:
    """Let math-verify compare; a number that it took out of something larger is none."""
    found = _parsed(_asked(boxed, completion))
    if not found:
        return 0.0
    # Without a box math-verify chose where the answer stands, and it may have cut a number out of a larger
    # expression. The last element is the text that it read; that text is compared by this package's own rules.
    if boxed is None and said is not None and parse_number(said) is not None and isinstance(found[-1], str):
        same = same_answer(found[-1], said)
        if same is not None:
            last, number = choose_number(completion, "last"), parse_number(found[-1])
            if number is not None and number.value not in [each.value for each in find_numbers(completion)]:
                # The 5 of minus 5, of 5 million.
                return float(last is not None and same_answer(last.text, said) is True)
            return float(same and (last is not None or not found[-1].strip(" .").isdigit()))
    return float(any(_is_equal(ours, theirs) for ours in gold for theirs in found))


def _is_equal(gold: Any, found: Any, is_part: bool = False) -> bool:
    """Compare two readings: sets, unions of intervals and pairs by their parts, the rest by math-verify.

    math-verify takes the symmetric difference of two sets, 6,000 comparisons for 16 squares of sums: half a minute.
    """
    from math_verify import verify
    from sympy import FiniteSet, Tuple, Union

    if isinstance(gold, Tuple) and isinstance(found, Tuple):
        return len(gold) == len(found) and all(_is_equal(*pair, True) for pair in zip(gold, found, strict=True))
    sides = (gold, found)
    if any(isinstance(side, Union) for side in sides) or all(isinstance(side, FiniteSet) for side in sides):
        ours, theirs = map(_parts_of, sides)
        if ours and theirs:
            return _same_parts(ours, theirs)
    # The order of the arguments matters: math-verify is not symmetric, and the gold answer comes first.
    return bool(verify([gold], [found], allow_set_relation_comp=not is_part, timeout_seconds=None))


def _parts_of(read: Any) -> tuple[Any, ...]:
    """Return the members of a finite set, or the intervals and points that a union is made of; () for all else."""
    from sympy import FiniteSet, Interval, Union

    if isinstance(read, FiniteSet):
        return tuple(read.args)
    parts, rest = [], [read]
    while rest:  # math-verify leaves unions nested
        each = rest.pop()
        if isinstance(each, Union):
            rest += each.args
        else:
            parts.append(each)
    if not all(isinstance(each, Interval | FiniteSet) for each in parts):
        return ()
    # Of ends that are numbers sympy joins what touches, so that equal unions have equal parts; it cannot order others.
    try:
        joined = None if read.free_symbols else Union(*parts)
    except Exception:  # sympy raises what each function raises
        joined = None
    return (
        tuple(joined.args) if isinstance(joined, Union | FiniteSet) else tuple(parts) if joined is None else (joined,)
    )


def _same_parts(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """Find an equal part for each, in any order; two whose values at a point differ are not compared further."""
    sides = [[(_at_a_point(part), part) for part in side] for side in (gold, found)]

    def agree(ours: Any, theirs: Any) -> bool:
        return _may_agree(ours[0], theirs[0]) and _is_equal(ours[1], theirs[1], True)

    matched = set()
    for ours in sides[0]:
        number = next((n for n, theirs in enumerate(sides[1]) if agree(ours, theirs)), None)
        if number is None:
            return False
        matched.add(number)
    # Two spellings of one part may be left over on one side.
    left = (theirs for n, theirs in enumerate(sides[1]) if n not in matched)
    return all(any(agree(ours, theirs) for ours in sides[0]) for theirs in left)


def _at_a_point(part: Any) -> tuple[complex | None, ...]:
    """Return the values of a part, of a pair each of its own, with a number for each symbol; None where it has none."""
    from sympy import Expr, Interval, Symbol, Tuple, UnevaluatedExpr

    if isinstance(part, Tuple | Interval):  # math-verify takes a pair for an open interval
        ends = part.args if isinstance(part, Tuple) else part.args[:2]
        return tuple(value for each in ends for value in _at_a_point(each))
    # A symbol alone may be the product of its letters, and a percentage the number before its sign.
    if not isinstance(part, Expr) or isinstance(part, Symbol) or part.has(UnevaluatedExpr):
        return (None,)
    try:
        numbers = {symbol: 1 + crc32(symbol.name.encode()) % 9973 / 9967 for symbol in part.free_symbols}
        value = complex(part.evalf(15, subs=numbers))
        return (value if abs(value) < 1e100 else None,)
    except Exception:  # sympy raises what each function raises
        return (None,)


def _may_agree(ours: Sequence[complex | None], theirs: Sequence[complex | None]) -> bool:
    return len(ours) != len(theirs) or not any(
        a is not None and b is not None and abs(a - b) > 1e-6 * (1 + abs(a) + abs(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def _asked(boxed: str | None, whole: str) -> str:
    """Return what math-verify reads: the content of a box without its unit, or the whole text where there is none."""
    return whole if boxed is None else f"\\boxed{{{readable(without_unit(boxed)[1])}}}"


def _content(text: str) -> str | None:
    """Return what a box would hold for this answer; None for a worked solution whose mathematics stands in it."""
    marked = final_answer(text)
    if marked is not None:
        return marked
    if _WHOLE.fullmatch(text):
        bare = text.strip().rstrip(".").strip("$")
        for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
            bare = bare.removeprefix(opening).removesuffix(closing)
        return bare
    return None if _MARKED.search(text) else text


def _read(text: str) -> tuple[Any, ...]:
    """Let math-verify read, and take decimals for what they say: it compares them rounded to six places."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from sympy import Basic, FiniteSet, Float, MatrixBase, Rational, Union
    from sympy.core.relational import Relational

    def exactly(found: Any) -> Any:
        if not isinstance(found, Basic | MatrixBase):
            return found
        # "x < 1 or x > 3" is parsed as a set of two inequalities.
        # Their union is what the gold answer's interval notation says.
        if " or " in text and isinstance(found, FiniteSet) and all(isinstance(each, Relational) for each in found):
            try:
                return Union(*(each.as_set() for each in found))
            except Exception:  # sympy solves no such inequality
                return found
        return found.xreplace({number: Rational(str(number)) for number in found.atoms(Float)})

    # Units come off before: math-verify would take the h of \pi r^2 h for hours.
    latex = LatexExtractionConfig()
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    text = without_units(text)
    return tuple(map(exactly, parse(text, (latex, ExprExtractionConfig()), parsing_timeout=None)))


# `answer` asks again for the completion that was just judged. Answers have a cache of their own, so that the samples of
# a group, which share one, do not push it out.
_parsed = functools.lru_cache(maxsize=1)(_read)
_parsed_answer = functools.lru_cache(maxsize=256)(_read)
