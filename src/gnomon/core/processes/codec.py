"""The codec between the run and its workers: one JSON object a line. No pickle.

JSON has no tuples and only text as keys, but reasoning-gym's scorers compare tuples (rearc would call every
right answer wrong) and look up numbers; both are therefore marked, and come back as they were.
"""

import json
from typing import Any

_TUPLE, _PAIRS = "()", "{}"


def encode(message: dict[str, Any]) -> bytes:
    """Return ``message`` as one line.

    Raises:
        TypeError: ``message`` holds something other than JSON values and tuples.

    >>> decode(encode({"a": (1, {2: "b"})}))
    {'a': (1, {2: 'b'})}
    """
    return json.dumps(_marked(message)).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message on ``line``.

    Raises:
        ValueError: The line holds no message.
    """
    message = json.loads(line, object_hook=_unmarked)
    if not isinstance(message, dict):
        raise ValueError(f"expected a message, got {line[:80]!r}")
    return message


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(v) for v in value]}
    if isinstance(value, list):
        return [_marked(v) for v in value]
    if isinstance(value, dict):
        # A dict that happens to have the key of a mark is written as pairs, or it would come back as a tuple.
        plain = all(isinstance(k, str) for k in value) and not ({_TUPLE, _PAIRS} & value.keys())
        if plain:
            return {k: _marked(v) for k, v in value.items()}
        return {_PAIRS: [[_marked(k), _marked(v)] for k, v in value.items()]}
    return value


def _unmarked(value: dict[str, Any]) -> Any:
    if _TUPLE in value:
        return tuple(value[_TUPLE])
    return dict(value[_PAIRS]) if _PAIRS in value else value
