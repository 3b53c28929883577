"""Lines of a screen: text made harmless, with styles, of a known width, and curves out of characters."""

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.cells import cell_len, chop_cells
from rich.text import Text

from gnomon.core.redaction import for_people, shortened, without_secrets

# Text that a model, a task or a file said, made harmless for a screen: its width is known and it obeys nothing.

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
        # Stacked marks write over the lines above; variation selectors change a character's width in some terminals.
        if marks > _MARKS or "\ufe00" <= character <= "\ufe0f":
            continue
        # Unassigned and private characters have a width that only the font knows.
        kept.append("\ufffd" if kind in ("Cn", "Co") else character)
    return "".join(kept)


def one_line(text: str, width: int) -> str:
    """Return the beginning of ``text``, made harmless, on one line of at most ``width`` cells.

    >>> one_line("a question\\nof two lines", 16)
    'a question ⏎ of…'
    """
    # Secrets first, of the whole text: a secret that is cut in two
    # would not be found. Then only what may be shown is made harmless.
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
        # A word wider than the line is cut into pieces, and the last one goes on.
        *whole, line = chop_cells(word, width) or [""]
        lines.extend(whole)
    return [*lines, line]


# Curves and bars out of characters.

_BLOCKS = "▁▂▃▄▅▆▇█"
_BLANK = 0x2800
# The dots of a braille cell, from the top: those of its left column, then those of its right one.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def spark(values: Sequence[float], width: int, least: float = 0.0) -> str:
    """Return a curve of one line, from the lowest to the highest value; more values than columns are averaged.

    Args:
        least: A range that is worth drawing; what differs by less is a line without height.

    >>> spark([0, 1, 2, 3], 4), spark([1, 1], 8)
    ('▁▃▆█', '──')
    """
    means = buckets(values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    # Stretched to full height, rounding would look like a course.
    if high - low <= max(least, 1e-6 * max(abs(high), abs(low))):
        return "─" * len(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in means)


def chart(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Return a curve of ``height`` lines of braille, ``width`` cells each, with ``low`` at the bottom.

    A cell has two by four dots. Fewer values than dots are joined by straight lines, more are averaged.

    >>> chart([0.0, 1.0], 2, 1, 0.0, 1.0)
    ['⡠⠊']
    """
    # In dots: a braille cell has two columns of four.
    rows, columns = 4 * height, 2 * width
    cells = [[_BLANK] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(_stretched(values, columns)):
        share = 0.5 if high <= low else (value - low) / (high - low)
        row = round((1 - min(1.0, max(0.0, share))) * (rows - 1))
        # A steep curve is drawn without holes.
        first = row if before is None or abs(row - before) < 2 else before + (1 if row > before else -1)
        for dot in range(min(first, row), max(first, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = row
    return ["".join(map(chr, line)) for line in cells]


def progress(share: float, width: int) -> tuple[str, str]:
    """Return what is done and what is left of a thin line of ``width`` cells.

    >>> progress(0.5, 4)
    ('━━', '──')
    """
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done, "─" * (width - done)


def buckets(values: Sequence[float], most: int) -> list[float]:
    """Return the values, or where there are more than ``most`` the means of as many stretches of equal length.

    >>> buckets([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    count = len(values)
    if count <= most:
        return list(values)
    edges = [place * count // most for place in range(most + 1)] if most > 0 else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _stretched(values: Sequence[float], columns: int) -> list[float]:
    """Return one value a column; between fewer values it is interpolated."""
    found = buckets(values, columns)
    if len(found) < 2 or len(found) == columns:
        return found * columns if len(found) == 1 else found
    stretched = []
    for column in range(columns):
        place = column * (len(found) - 1) / (columns - 1)
        # The last column falls on the last value, which has no right neighbor.
        left = min(int(place), len(found) - 2)
        stretched.append(found[left] + (found[left + 1] - found[left]) * (place - left))
    return stretched


HEAD, MUTED, CALM, FAINT, GOOD, WARN, BAD = "bold", "dim", "cyan", "dim cyan", "green", "yellow", "red"
"""The styles of every pane, in the colors that the terminal has for them."""

Part = str | tuple[str, str]


def line(*parts: Part) -> Text:
    """Return a line of texts, each with its style or without."""
    made = Text(no_wrap=True, end="")
    for part in parts:
        if isinstance(part, tuple):
            made.append(*part)
        else:
            made.append(part)
    return made


def spread(left: Text, right: Text, width: int) -> Text:
    """Return ``left`` and ``right`` at the ends of a line of ``width`` cells; the left one gives way."""
    room = width - right.cell_len - 1
    if left.cell_len > room:
        left = left.copy()
        left.truncate(max(room, 0), overflow="ellipsis")
    gap = width - left.cell_len - right.cell_len
    return line().append_text(left).append(" " * max(gap, 0)).append_text(right)


def title(text: str, width: int, right: str = "") -> Text:
    """Return the heading of a block, with a remark at its end."""
    return spread(line((cut(text, width), HEAD)), line((cut(right, width - cell_len(text) - 2), MUTED)), width)


def side_by_side(left: Sequence[Text], right: Sequence[Text], width: int, gap: str = " │ ") -> list[Text]:
    """Return two columns as lines, the left one ``width`` cells wide."""
    lines = []
    for number in range(max(len(left), len(right))):
        first = left[number].copy() if number < len(left) else line()
        first.truncate(width, overflow="ellipsis", pad=True)
        second = right[number] if number < len(right) else line()
        lines.append(line().append_text(first).append(gap, MUTED).append_text(second))
    return lines


def stacked(blocks: Iterable[Sequence[Text]], height: int) -> list[Text]:
    """Return blocks below each other with a blank line between them where there is room, ``height`` lines at most.

    A block that does not fit is cut, and those behind it are left out.
    """
    listed = [list(block) for block in blocks if block]
    spare = height - sum(map(len, listed))
    lines: list[Text] = []
    for number, block in enumerate(listed):
        if number and spare > 0:
            lines.append(line())
            spare -= 1
        lines.extend(block)
    return lines[: max(height, 0)]


def fitted(lines: Sequence[Text], width: int) -> list[Text]:
    """Return the lines, those that are too wide cut."""
    for shown in lines:
        shown.truncate(max(width, 1), overflow="ellipsis")
    return list(lines)


def joined(lines: Sequence[Text]) -> Text:
    """Return lines as one text."""
    return Text("\n", end="", no_wrap=True).join(lines)


def labeled(label: str, value: str, width: int, rest: Part = "", name: int = 11, number: int = 8) -> Text:
    """Return "label  value  rest" in columns, the label quiet; a space is between them also where both are full."""
    is_full = cell_len(label) >= name and cell_len(value) >= number
    made = line((filled(label, name), MUTED), value.rjust(number + is_full), " " * (2 - is_full))
    shown = rest if isinstance(rest, str) else rest[0]
    left = width - cell_len(made.plain)
    made.append(cut(shown, left), None if isinstance(rest, str) else rest[1])
    return made
