"""Mathematical equality of LaTeX and plain expressions, by math-verify."""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from gnomon.verifiers.base import Sample, Verifier, VerifierError, text_column
from gnomon.verifiers.numbers import parse_number
from gnomon.verifiers.optional import library

_MARKS = ("$", "\\boxed", "\\(", "\\[")


@dataclass(frozen=True)
class Mathematics(Verifier):
    r"""1.0 if math-verify finds the completion's answer mathematically equal to the column's, else 0.0.

    Its own timeouts are off: they answer "different" when time is up, which would be a zero for what nobody
    judged, and they need SIGALRM. The grading deadline ends a comparison that never returns, as an error.

    column: where the answer is. A bare answer (no $, ``\boxed``, ``\(``, ``\[``) is read as a box's content.
    Source: math-verify 0.9.0, ``parse`` and ``verify`` with their default extraction.
    """

    kind: Literal["mathematics"] = field(default="mathematics", kw_only=True)
    column: str = "answer"

    @property
    def name(self) -> str:
        """Its kind."""
        return self.kind

    def prepare(self) -> None:
        """Import math-verify and sympy (half a second).

        Raises: ConfigError that names the extra to install.
        """
        library("math_verify", "math", "the mathematics reward")

    def __call__(self, sample: Sample) -> float:
        """Parse both and compare."""
        from math_verify import parse, verify

        text = text_column(sample, self.column)
        marked = text if any(mark in text for mark in _MARKS) else f"\\boxed{{{text}}}"
        gold = parse(marked, parsing_timeout=None)
        if not gold:
            raise VerifierError(f"math-verify cannot read column '{self.column}': {text[-80:]!r}")
        found = _parsed(sample.completion)
        return float(bool(found) and verify(gold, list(found), timeout_seconds=None))

    def answer(self, sample: Sample) -> str | None:
        """Return the answer as math-verify reads it: a number as a fraction in lowest terms, else sympy's own text.

        Equal answers that sympy writes in two ways (x + 1 over y, x/y + 1/y) are two; they share no votes.
        """
        found = _parsed(sample.completion)
        if not found:
            return None
        number = parse_number(str(found[-1])) or parse_number(str(found[0]))
        return number.canonical if number else str(found[0])


@functools.lru_cache(maxsize=1)
def _parsed(completion: str) -> tuple[Any, ...]:
    """Return math-verify's readings of a completion; the sample that was just judged is not read again."""
    from math_verify import parse

    return tuple(parse(completion, parsing_timeout=None))
