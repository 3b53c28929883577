"""Lines of a screen: text with styles, side by side, of a known width."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from gnomon.insight.watch.text import cut, filled

HEAD, QUIET, CALM, FAINT, GOOD, WARN, BAD = "bold", "dim", "cyan", "dim cyan", "green", "yellow", "red"
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
    return spread(line((cut(text, width), HEAD)), line((cut(right, width - cell_len(text) - 2), QUIET)), width)


def side_by_side(left: Sequence[Text], right: Sequence[Text], width: int, gap: str = " │ ") -> list[Text]:
    """Return two columns as lines, the left one ``width`` cells wide."""
    lines = []
    for number in range(max(len(left), len(right))):
        first = left[number].copy() if number < len(left) else line()
        first.truncate(width, overflow="ellipsis", pad=True)
        second = right[number] if number < len(right) else line()
        lines.append(line().append_text(first).append(gap, QUIET).append_text(second))
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
    made = line((filled(label, name), QUIET), value.rjust(number + is_full), " " * (2 - is_full))
    shown = rest if isinstance(rest, str) else rest[0]
    left = width - cell_len(made.plain)
    made.append(cut(shown, left), None if isinstance(rest, str) else rest[1])
    return made
