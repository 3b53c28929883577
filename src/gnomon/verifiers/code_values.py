"""What a program said, read out here: a plain value, or no answer.

The program writes the text itself, so it can be anything. `read_value` trusts nothing of it: what it returns is as
large as what was sent, at most `DEPTH` containers deep, and quick to hash and to compare; all else is `NoAnswerError`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Return the value that a program wrote. Raises: NoAnswerError for anything else, whatever it is.

    >>> read_value('{"tuple": [1, {"bytes": [104, 105]}]}')
    (1, b'hi')
    """
    try:
        said = json.loads(text, object_pairs_hook=_said)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"no JSON that this would write: {error}") from error
    return _value(said, DEPTH)


def quick_to_hash(items: Iterable[Any]) -> list[Any]:
    """Return the items, which a set or the keys of a dict can be made of in time.

    Raises: TypeError for one that has no hash, ValueError when more than `COLLISIONS` different ones share theirs.
    """
    items = list(items)
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
    "raised": lambda inner: Opaque(is_raised=True),
}
