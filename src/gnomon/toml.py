"""TOML that somebody else wrote, read in time and memory that grow with its length."""

import tomllib
from typing import Any

_MOST_DOTS = 1000


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises: ValueError or RecursionError for what is none, or no sound one.

    Refused beside: names of a key without end, for which the parser's time grows with their square (50,000 take it
    minutes); numbers that Python reads, in hexadecimal, and cannot write.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    """
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    table = tomllib.loads(text)
    repr(table)
    return table
