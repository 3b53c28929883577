"""Values as JSON can hold them. No torch: the processes that make questions load none."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time
from typing import Any


def json_safe(value: Any) -> Any:
    """Return ``value`` such that ``json.dumps`` accepts it, changed as little as possible.

    Tuples and integer keys stay what they are (``json.dumps`` writes both), because scorers compare with
    them. Subclasses of str become str, sets become sorted lists, dates their ISO form, bytes hexadecimal,
    the rest text.

    >>> json_safe({"when": date(2026, 1, 2), 3: (1, {2, 1})})
    {'when': '2026-01-02', 3: (1, [1, 2])}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_json_key(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(json_safe(item) for item in value)
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((json_safe(item) for item in value), key=repr)
    if isinstance(value, date | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json_key(key: Any) -> Any:
    return key if key is None or type(key) in (str, bool, int, float) else str(key)
