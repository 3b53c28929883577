"""Whether an answer is the expected one. Only plain values get here: nothing brings its own ``==``."""

import math
from typing import Any

_EXACT = 2.0**53  # whole numbers below it have a float of their own


def same(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values are equal: numbers up to the tolerance, lists and tuples alike, dicts by JSON's keys.

    >>> same((1, 2.0000000001), [1, 2], 1e-9), same("1", 1, 0), same({1: 2}, {"1": 2}, 0)
    (True, False, True)
    """
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(lambda v, e: same(v, e, tolerance), value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        ours, theirs = ({str(k): v for k, v in d.items()} for d in (value, expected))
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k], tolerance) for k in ours)
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and near(value, expected, tolerance)
    return isinstance(value, type(expected) | int) and bool(value == expected)


def near(value: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most ``tolerance``, absolutely or relative to the expected one."""
    try:
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
    is_whole = not {".", "e", "E"} & {*expected}
    if is_whole and "." not in word:
        return False
    try:
        ours, theirs = float(word), float(expected)
    except ValueError:
        return False
    return ours == theirs and abs(ours) < _EXACT if is_whole else near(ours, theirs, tolerance)
