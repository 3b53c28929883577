"""What claims compute with, over values that a program chose: Python's own, within bounds.

A program that answers 10**9 to ``10 ** f(3) == 1000``, or ``"%999999999d"`` to ``f(7) % 2 == 1``, must not choose how
long that takes or how much memory. What is beyond a bound is a ValueError, and then the claim does not hold.
"""

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

from gnomon.verifiers.code_values import quick_to_hash

BITS = 1 << 18  # of an integer that is computed: 78,913 decimal digits
ITEMS = 1 << 20  # of a text or list that is repeated: as many as a program may write bytes
MOVED = 1 << 24  # items moved by adding up lists, each sum a new one
DIGITS = 4300  # that a number may be read from (Python's own limit, for every base) or rounded to


def times(left: Any, right: Any) -> Any:
    """Return ``left * right``. Raises: ValueError beyond the bounds."""
    if isinstance(left, int) and isinstance(right, int):
        _within(left.bit_length() + right.bit_length(), BITS)
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(count, int):
            _within(len(many) * max(count, 0), ITEMS)
    return left * right


def power(left: Any, right: Any) -> Any:
    """Return ``left ** right``. Raises: ValueError beyond the bounds."""
    if isinstance(left, int) and isinstance(right, int) and right > 0 and abs(left) > 1:
        _within(left.bit_length() * right, BITS)
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """Return ``left % right`` of numbers. Raises: TypeError for texts, whose format says how long they get."""
    if isinstance(left, str | bytes):
        raise TypeError("a text is no number")
    return left % right


def formatted(form: str, values: Any) -> str:
    """Return ``form % values`` for a form that the claim holds. Raises: ValueError where values give the width."""
    if "*" in form:
        raise ValueError("a width that is no constant")
    text: str = form % values
    return text


def _within(amount: int, bound: int) -> None:
    if amount > bound:
        raise ValueError(f"{amount} are more than {bound}")


def _sum(items: Any, start: Any = 0) -> Any:
    items = list(items)
    moved = sum(len(item) for item in items if isinstance(item, list | tuple))
    _within(len(items) * moved, MOVED)
    return sum(items, start)


def _round(number: Any, ndigits: Any = None) -> Any:
    if isinstance(ndigits, int):
        _within(abs(ndigits), DIGITS)
    return round(number, ndigits)


def _int(*words: Any, **named: Any) -> int:
    if words and isinstance(words[0], str | bytes):
        _within(len(words[0]), DIGITS)
    return int(*words, **named)


def _dict(*words: Any, **named: Any) -> dict[Any, Any]:
    pairs = [word if isinstance(word, dict) else [tuple(pair) for pair in word] for word in words]
    for word in pairs:
        quick_to_hash(word if isinstance(word, dict) else [key for key, _ in word])
    return dict(*pairs, **named)


def _counter(*words: Any, **named: Any) -> Counter[Any]:
    return Counter(*(word if isinstance(word, dict) else quick_to_hash(word) for word in words), **named)


KNOWN: dict[str, Callable[..., Any]] = {
    "len": len, "abs": abs, "round": _round, "sorted": sorted, "set": lambda *items: set(*map(quick_to_hash, items)),
    "list": list, "tuple": tuple, "sum": _sum, "min": min, "max": max, "all": all, "any": any, "int": _int,
    "float": float, "str": str, "bool": bool, "dict": _dict,
    "frozenset": lambda *items: frozenset(*map(quick_to_hash, items)), "Counter": _counter, "isclose": math.isclose,
    "sqrt": math.sqrt,
}  # fmt: skip
"""Functions that a claim may call, by name."""

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: times, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: modulo, ast.Pow: power, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}  # fmt: skip
"""Operators between two values."""
