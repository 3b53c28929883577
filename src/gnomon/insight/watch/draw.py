"""Curves and bars out of characters."""

from collections.abc import Sequence
from itertools import pairwise

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
        left = min(int(place), len(found) - 2)
        stretched.append(found[left] + (found[left + 1] - found[left]) * (place - left))
    return stretched
