"""Text that a model, a task or a file said, made harmless for a screen: its width is known and it obeys nothing."""

import unicodedata

from rich.cells import cell_len, chop_cells

from gnomon.core.redaction import for_people, shortened, without_secrets

_MARKS = 2
_LONGEST = 6000


def tame(text: str) -> str:
    """Return ``text`` with control sequences written out, secrets left out and every character of a known width.

    At most two marks stay on one character, and what no font knows becomes a replacement character. The middle of
    more than 6,000 characters is left out: a screen shows less.

    >>> tame("red \\x1b[31m alert")
    'red \\\\x1b[31m alert'
    """
    kept: list[str] = []
    marks = 0
    for character in for_people(shortened(text, _LONGEST)).replace("\t", "    "):
        kind = unicodedata.category(character)
        marks = marks + 1 if kind.startswith("M") else 0
        if marks > _MARKS or "\ufe00" <= character <= "\ufe0f":
            continue
        kept.append("\ufffd" if kind in ("Cn", "Co") else character)
    return "".join(kept)


def one_line(text: str, width: int) -> str:
    """Return the beginning of ``text``, made harmless, on one line of at most ``width`` cells.

    >>> one_line("a question\\nof two lines", 16)
    'a question ⏎ of…'
    """
    beginning = tame(without_secrets(text)[: 4 * max(width, 1)])
    return cut(" ⏎ ".join(line.strip() for line in beginning.strip().splitlines()), width)


def cut(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` cells, an ellipsis in the place of what is left out.

    >>> cut("reinforcement", 6), cut("reward", 6)
    ('reinf…', 'reward')
    """
    if cell_len(text) <= width:
        return text
    if width < 1:
        return ""
    kept = chop_cells(text, width - 1)[0] if width > 1 else ""
    return f"{kept.rstrip()}…"


def filled(text: str, width: int) -> str:
    """Return ``text`` in exactly ``width`` cells."""
    shown = cut(text, width)
    return shown + " " * (width - cell_len(shown))


def wrapped(text: str, width: int, most: int = 1000) -> list[str]:
    """Return ``text``, made harmless, in lines of at most ``width`` cells, at most ``most`` of them.

    Breaks between words where there are any.

    >>> wrapped("measure the batch, do not guess", 18)
    ['measure the batch,', 'do not guess']
    """
    lines: list[str] = []
    for paragraph in tame(text).split("\n"):
        lines.extend(_folded(paragraph, max(width, 2)))
        if len(lines) > most:
            return [*lines[: most - 1], "…"]
    return lines


def _folded(paragraph: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in paragraph.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(word, width) or [""]
        lines.extend(whole)
    return [*lines, line]
