"""Whether an answer is the expected one. Only plain values get here: nothing brings its own ``==``."""

import ast
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# What claims compute with, over values that a program chose: Python's own, within bounds.
#
# A program that answers 10**9 to ``10 ** f(3) == 1000``, or ``"%999999999d"`` to ``f(7) % 2 == 1``, must not choose how
# long that takes or how much memory. What is beyond a bound is a ValueError, and then the claim does not hold.

BITS = 1 << 18  # of an integer that is computed: 78,913 decimal digits
ITEMS = 1 << 20  # of a text or list that is repeated: as many as a program may write bytes
MOVED = 1 << 24  # items moved by adding up lists, each sum a new one
DIGITS = 4300  # that a number may be read from (Python's own limit, for every base) or rounded to


def times(left: Any, right: Any) -> Any:
    """Return ``left * right``.

    Raises:
        ValueError: Beyond the bounds.
    """
    if isinstance(left, int) and isinstance(right, int):
        # The bits of a product are at most the sum of its factors' bits.
        _within(left.bit_length() + right.bit_length(), BITS)
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(count, int):
            _within(len(many) * max(count, 0), ITEMS)
    return left * right


def power(left: Any, right: Any) -> Any:
    """Return ``left ** right``.

    Raises:
        ValueError: Beyond the bounds.
    """
    if isinstance(left, int) and isinstance(right, int) and right > 0 and abs(left) > 1:
        _within(left.bit_length() * right, BITS)
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """Return ``left % right`` of numbers.

    Raises:
        TypeError: For texts, whose format says how long they get.
    """
    if isinstance(left, str | bytes):
        raise TypeError("a text is no number")
    return left % right


def formatted(form: str, values: Any) -> str:
    """Return ``form % values`` for a form that the claim holds.

    Raises:
        ValueError: Where values give the width.
    """
    if "*" in form:
        raise ValueError("a width that is no constant")
    text: str = form % values
    return text


def _within(amount: int, bound: int) -> None:
    if amount > bound:
        raise ValueError(f"{amount} are more than {bound}")


def _sum(items: Any, start: Any = 0) -> Any:
    items = list(items)
    # Adding up lists copies the sum so far for each item: a quadratic cost that `len` alone does not show.
    moved = sum(len(item) for item in items if isinstance(item, list | tuple))
    _within(len(items) * moved, MOVED)
    return sum(items, start)


def _round(number: Any, ndigits: Any = None) -> Any:
    if isinstance(ndigits, int):
        _within(abs(ndigits), DIGITS)
    return round(number, ndigits)


def _int(*words: Any, **named: Any) -> int:
    if words and isinstance(words[0], str | bytes):
        # Python's own limit holds for base 10 only, and int(text, 7) takes quadratic time too.
        _within(len(words[0]), DIGITS)
    return int(*words, **named)


def _make_dict(*words: Any, **named: Any) -> dict[Any, Any]:
    pairs = [word if isinstance(word, dict) else [tuple(pair) for pair in word] for word in words]
    for word in pairs:
        quick_to_hash(word if isinstance(word, dict) else [key for key, _ in word])
    return dict(*pairs, **named)


def _counter(*words: Any, **named: Any) -> Counter[Any]:
    return Counter(*(word if isinstance(word, dict) else quick_to_hash(word) for word in words), **named)


KNOWN: dict[str, Callable[..., Any]] = {
    "len": len, "abs": abs, "round": _round, "sorted": sorted, "set": lambda *items: set(*map(quick_to_hash, items)),
    "list": list, "tuple": tuple, "sum": _sum, "min": min, "max": max, "all": all, "any": any, "int": _int,
    "float": float, "str": str, "bool": bool, "dict": _make_dict,
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


# What a program said, read out here: a plain value, or no answer.
#
# The program writes the text itself, so it can be anything. `read_value` trusts nothing of it: what it returns is as
# large as what was sent, at most `DEPTH` containers deep, and quick to hash and to compare; all else is
# `NoAnswerError`.

# One more than the far side goes down before it calls a value opaque.
DEPTH = 51
# Different values with one hash, in one set or dict. Python's integers collide by design (n and n + 2**61 - 1), and a
# set of 20,000 that all do takes ten seconds to build.
COLLISIONS = 64


class NoAnswerError(Exception):
    """What the program said is no value."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value that cannot be compared: an object of the program's own, or an exception that it raised.

    It is neither equal nor unequal to anything, neither true nor false, so no claim about it holds.
    """

    is_raised: bool = False

    def __eq__(self, other: object) -> bool:
        raise TypeError("an opaque value cannot be compared")

    def __bool__(self) -> bool:
        raise TypeError("an opaque value is neither true nor false")


class _Said(NamedTuple):
    """An object of the text, which has one key: the kind of what is inside."""

    kind: str
    inner: Any


def read_value(text: str) -> Any:
    """Return the value that a program wrote.

    Raises:
        NoAnswerError: For anything else, whatever it is.

    >>> read_value('{"tuple": [1, {"bytes": [104, 105]}]}')
    (1, b'hi')
    """
    try:
        # The hook sees pairs before a dict is made of them: a repeated key cannot hide another one.
        said = json.loads(text, object_pairs_hook=_said)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"no JSON that this would write: {error}") from error
    return _value(said, DEPTH)


def quick_to_hash(items: Iterable[Any]) -> list[Any]:
    """Return the items, which a set or the keys of a dict can be made of in time.

    Raises:
        TypeError: For one that has no hash.
        ValueError: If more than `COLLISIONS` different ones share theirs.
    """
    items = list(items)
    # Equal items share a hash rightly, so only hashes that occur
    # often are looked at, and different items among them are counted.
    shared = {hashed for hashed, count in Counter(map(hash, items)).items() if count > COLLISIONS}
    found: dict[int, list[Any]] = {hashed: [] for hashed in shared}
    for item in items if shared else ():
        among = found.get(hash(item))
        if among is not None and item not in among:
            among.append(item)
            if len(among) > COLLISIONS:
                raise ValueError("too many different values have the same hash")
    return items


def _said(pairs: list[tuple[str, Any]]) -> _Said:
    if len(pairs) != 1:
        raise ValueError("an object has one key, its kind")
    return _Said(*pairs[0])


def _value(said: Any, depth: int) -> Any:
    if not isinstance(said, _Said):
        if isinstance(said, list):
            raise NoAnswerError("a list without its kind")
        return said
    if said.kind in _LEAVES:
        return _LEAVES[said.kind](said.inner)
    if said.kind not in _CONTAINERS or not isinstance(said.inner, list) or not depth:
        raise NoAnswerError("an unknown kind, or one that holds what it cannot, or too deep")
    return _CONTAINERS[said.kind](said.inner, depth - 1)


def _items(inner: list[Any], depth: int) -> list[Any]:
    return [_value(item, depth) for item in inner]


def _set(inner: list[Any], depth: int) -> Any:
    # Members of a set that are sets were frozen, or they would not have been members.
    items = [frozenset(item) if isinstance(item, set) else item for item in _items(inner, depth)]
    return _hashed(items, set)


def _dict(inner: list[Any], depth: int) -> Any:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
        raise NoAnswerError("a dict is a list of pairs")
    keys = _items([key for key, _ in inner], depth)
    values = _items([value for _, value in inner], depth)
    return _hashed(keys, lambda sound: dict(zip(sound, values, strict=True)))


def _hashed(items: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    """Return the set or dict; what has no hash came from an object of the program's own, so the whole is opaque."""
    try:
        return make(quick_to_hash(items))
    except TypeError:
        return Opaque()
    except ValueError as error:
        raise NoAnswerError(str(error)) from error


def _bytes(inner: Any) -> bytes:
    if not isinstance(inner, list) or not all(type(item) is int and 0 <= item < 256 for item in inner):
        raise NoAnswerError("bytes are a list of numbers from 0 to 255")
    return bytes(inner)


def _complex(inner: Any) -> complex:
    if not isinstance(inner, list) or len(inner) != 2 or not all(type(part) is float for part in inner):
        raise NoAnswerError("a complex number is a list of two floats")
    return complex(*inner)


def _number(inner: Any) -> float:
    if inner not in ("inf", "-inf", "nan"):
        raise NoAnswerError("a float that JSON has no number for is inf, -inf or nan")
    return float(inner)


_CONTAINERS: dict[str, Callable[[list[Any], int], Any]] = {
    "tuple": lambda inner, depth: tuple(_items(inner, depth)),
    "list": _items,
    "set": _set,
    "dict": _dict,
}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "bytes": _bytes,
    "complex": _complex,
    "number": _number,
    "opaque": lambda inner: Opaque(),
    "array": lambda inner: Opaque(),  # one of numpy's equals nothing, as ``assert array == list`` fails in Python
    "raised": lambda inner: Opaque(is_raised=True),
}


_EXACT = 2.0**53  # whole numbers below it have a float of their own


def same(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values are equal: numbers up to the tolerance, lists and tuples alike, dicts by JSON's keys, NaN too.

    >>> same((1, 2.0000000001), [1, 2], 1e-9), same("1", 1, 0), same({1: 2}, {"1": 2}, 0)
    (True, False, True)
    """
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(lambda v, e: same(v, e, tolerance), value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        if value.keys() != expected.keys():
            value, expected = _by_text(value), _by_text(expected)
        return value.keys() == expected.keys() and all(same(value[k], expected[k], tolerance) for k in value)
    # A float on either side: 2 and 2.0 are equal, as JSON does not tell them apart.
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and (near(value, expected, tolerance) or (value != value and expected != expected))
    # Types must agree, except that integers and truth values may stand for each other, as in Python's own comparison.
    return isinstance(value, type(expected) | int) and bool(value == expected)


def _by_text(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with the keys that JSON gives it, and as it is where two of them would be one."""
    told = {k if isinstance(k, str) else json.dumps(k) if k is None or isinstance(k, bool) else str(k): v
            for k, v in values.items()}  # fmt: skip
    return told if len(told) == len(values) else values


def near(value: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most ``tolerance``, absolutely or relative to the expected one."""
    try:
        # An integer beyond 2**1024 has no float; exact equality decides then.
        ours, theirs = float(value), float(expected)
    except OverflowError:
        return value == expected
    return ours == theirs or abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)) < math.inf


def same_text(text: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs are equal line by line, spaces at line ends and empty lines at both ends aside.

    Where lines differ, their words are compared, as numbers up to ``tolerance`` when the expected one is written with
    a point, and exactly when only the other one is.

    >>> same_text("1  \\n0.50\\n", "1\\n0.5", 1e-9), same_text("1 2", "1\\n2", 1e-9), same_text("01", "1", 1)
    (True, False, False)
    """
    ours, theirs = ([line.rstrip() for line in t.strip().split("\n")] for t in (text, expected))
    return len(ours) == len(theirs) and all(map(lambda a, b: a == b or _same_words(a, b, tolerance), ours, theirs))


def _same_words(line: str, expected: str, tolerance: float) -> bool:
    ours, theirs = line.split(), expected.split()
    return len(ours) == len(theirs) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    # A whole number that is expected must be written as one or with zeros behind its point; no tolerance applies to it.
    is_whole = not {".", "e", "E"} & {*expected}
    if is_whole and "." not in word:
        return False
    try:
        ours, theirs = float(word), float(expected)
    except ValueError:
        return False
    return ours == theirs and abs(ours) < _EXACT if is_whole else near(ours, theirs, tolerance)
