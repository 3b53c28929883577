"""Fenced blocks of an answer, as people write them, found in one pass over its lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_OPENING = re.compile(r"([ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_BEHIND_TEXT = re.compile(r"()(`{3,})[ \t]*(py(?:thon)?[\d.]*)[ \t]*", re.IGNORECASE)
_PYTHON = re.compile(r"(?:i?py(?:thon)?[\d.]*)?", re.IGNORECASE)
_TEXTS = ("markdown", "md")
_QUOTES = re.compile(r"\\.|'''|\"\"\"|'|\"|#")
_TRIED = 8


@dataclass(frozen=True)
class Block:
    """A fenced block. language: of its first line, "" for none. body: its text, the fence's own indent taken off."""

    language: str
    body: str

    @property
    def is_python(self) -> bool:
        """Whether it is Python's or nobody's."""
        return _PYTHON.fullmatch(self.language) is not None


@dataclass
class _Scan:
    """What a pass remembers so that it never looks at the rest of a text twice for one reason.

    open: by character, the shortest fence that nothing closes. trust: how often text in triple quotes may turn out
    to have no end before quotes are no longer looked at.
    """

    lines: Sequence[str]
    open: dict[str, int] = field(default_factory=dict)
    trust: int = _TRIED

    def closing(self, start: int, fence: str) -> int | None:
        """Return the line that closes the fence; a fence within a triple-quoted text closes nothing."""
        first, quote = None, ""
        for number in range(start, len(self.lines)):
            line = self.lines[number]
            if fence[0] not in line or not _is_fence(line, fence):
                opened = None if quote or line.lstrip()[:3] != fence[:3] else _opening(line)
                if opened is not None and opened[2] and first is None:
                    return None
                quote = _quoted(line, quote) if self.trust else ""
            elif not quote:
                return number
            elif first is None:
                first = number
        if first is None:
            self.open[fence[0]] = len(fence)
        else:
            self.trust -= 1
        return first


def blocks(text: str) -> list[Block]:
    r"""Return the fenced blocks that are closed, in their order.

    Fences are of backticks or tildes, at any indent, also as an item of a list or behind text that ends in its line.

    >>> [block.body for block in blocks("1. So:\n\n   ~~~py\n   x = 1\n   ~~~\n")]
    ['x = 1\n']
    """
    lines = text.replace("\r\n", "\n").split("\n")
    scan, found, number = _Scan(lines), [], 0
    while number < len(lines):
        opened = _opening(lines[number])
        number += 1
        if opened is None or opened[2].lower() in _TEXTS or len(opened[1]) >= scan.open.get(opened[1][0], 1 << 30):
            continue
        indent, fence, language = opened
        end = scan.closing(number, fence)
        if end is not None:
            body = "".join(_shifted(line, len(indent)) + "\n" for line in lines[number:end])
            found.append(Block(language.strip("{}.").lower(), body))
            number = end + 1
    return found


def has_fence(text: str) -> bool:
    """Whether a line of the text begins with a fence, closed or not."""
    return any(_opening(line) is not None for line in text.split("\n"))


def _opening(line: str) -> tuple[str, str, str] | None:
    found = _OPENING.fullmatch(line)
    if found is None and "```" in line:
        found = _BEHIND_TEXT.fullmatch(line, line.rindex("```"))
    return None if found is None else (found[1], found[2], found[3])


def _is_fence(line: str, fence: str) -> bool:
    bare = line.strip(" \t>")
    return len(bare) >= len(fence) and not bare.strip(fence[0])


def _quoted(line: str, quote: str) -> str:
    """Return the triple quote that is open behind the line, "" for none."""
    for mark in _QUOTES.findall(line):
        if not quote:
            if mark == "#":
                return ""
            quote = "" if mark[0] == "\\" else mark
        elif mark == quote or mark[0] == quote:
            quote = ""
    return quote if len(quote) == 3 else ""


def _shifted(line: str, count: int) -> str:
    indent = len(line) - len(line.lstrip(" \t"))
    return line[min(indent, count) :]
