"""TOML that somebody else wrote, read in time and memory that grow with its length."""

import re
import tomllib
from typing import Any

_MOST_DOTS = 1000
# What is quoted, to its end or that of the line or text, and comments: nothing in them is a dot of a key.
_QUOTED = re.compile(
    r'"{3}(?:\\.|[^\\])*?(?:"{3,5}|\Z)|' r"'{3}.*?(?:'{3,5}|\Z)|" r'"(?:\\.|[^"\\\n])*"?|' r"'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
_DOTTED = re.compile(r'(?:[\w-]|"")++(?:[ \t]*+\.[ \t]*+(?:[\w-]|"")*+)*+')


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises: ValueError or RecursionError for what is none, or no sound one.

    Refused beside: names of a key without end, for which the parser's time grows with their square (50,000 take it
    minutes); numbers that Python reads, in hexadecimal, and cannot write.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    """
    bare = _QUOTED.sub(lambda match: "" if match[0][0] == "#" else '""', text)
    if any(found[0].count(".") > _MOST_DOTS for found in _DOTTED.finditer(bare)):
        raise ValueError(f"a key has more than {_MOST_DOTS} names, joined by dots")
    table = tomllib.loads(text)
    repr(table)
    return table
