"""Curves as SVG: one picture that looks the same in a page, in a document and on paper, and follows dark mode."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from gnomon.core.atomic_files import write_durably
from gnomon.core.redaction import visible

Point = tuple[float, float, float, float]
_SMALLEST = 1e-290


@dataclass(frozen=True)
class Scale:
    """A range of numbers, and the two places in the picture where its ends lie."""

    low: float
    high: float
    first: float
    last: float

    def place(self, value: float) -> float:
        """Return where ``value`` lies."""
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def step(self, count: int) -> float:
        """Return the least distance with at most ``count`` + 1 ticks: 1, 2 or 5 times a power of ten.

        >>> Scale(0.0, 24.0, 0.0, 1.0).step(5)
        5.0
        >>> Scale(0.08, 0.92, 0.0, 1.0).step(4)
        0.2
        """
        unit = 10.0 ** math.floor(math.log10((self.high - self.low) / (count + 2)))
        return next(step for m in (1, 2, 5, 10, 20) if len(self._multiples(step := m * unit)) <= count + 1)

    def ticks(self, count: int) -> list[float]:
        """Return the round numbers within the range, at most ``count`` + 1.

        >>> Scale(0.1, 1.0, 0.0, 1.0).ticks(2)
        [0.5, 1.0]
        """
        step = self.step(count)
        return [n * step for n in self._multiples(step)]

    def _multiples(self, step: float) -> range:
        return range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)


def scale_of(values: Sequence[float], places: tuple[float, float], is_padded: bool = True) -> Scale:
    """Return the scale that holds ``values``, finite ones, with some air around them; of none it is [0, 1].

    A single number gets the range from 0 to a bit more; a range that nearly begins at 0 begins there.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    # One number, or several that differ by rounding alone.
    if high - low <= max(_SMALLEST, 1e-9 * max(abs(low), abs(high))):
        most = max(abs(low), abs(high)) * 1.25
        if most <= _SMALLEST:
            return Scale(0.0, 1.0, *places)
        return Scale(0.0, most, *places) if high > 0 else Scale(-most, 0.0, *places)
    if is_padded:
        air = (high - low) * 0.05
        # A range that nearly reaches 0 is drawn from 0: rewards and losses are read against it.
        low, high = (0.0 if 0 <= low < 2 * air else low - air), (0.0 if -2 * air < high <= 0 else high + air)
    return Scale(low, high, *places)


def number(value: float, step: float) -> str:
    """Return a tick's label, as exact as its distance to the next one needs.

    >>> number(0.25, 0.05), number(1200.0, 200.0), number(2e-5, 1e-5), number(3e6, 1e6), number(12000.0, 2000.0)
    ('0.25', '1200', '2e-5', '3M', '12k')
    """
    if abs(value) < step * 1e-6:
        return "0"
    size = max(abs(value), step)
    if size >= 1e10 or step < 1e-4:
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9))
        mantissa, _, exponent = f"{value:.{min(digits, 6)}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * (10 if letter == "k" else 1):
            return _decimal(value / unit, step / unit) + letter
    return _decimal(value, step)


def _decimal(value: float, step: float) -> str:
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def thinned(points: Sequence[Point], buckets: int) -> list[Point]:
    """Return at most two points for each of ``buckets`` stretches of equal count: the smallest and the largest y.

    Args:
        points: (x, y, low, high) in order of x. The interval of a point that stays is that of its whole stretch: the
            smallest low and the largest high. A stretch without any finite y keeps its first point, so the gap stays.
            The first and the last point stay.
    """
    count = len(points)
    if count <= 2 * buckets:
        return list(points)
    kept: list[Point] = [points[0]]
    # Both extremes of each stretch stay, so a single outlier among 100,000 points is still drawn.
    inner = points[1:-1]
    for n in range(buckets):
        stretch = inner[n * len(inner) // buckets : (n + 1) * len(inner) // buckets]
        seen = [p for p in stretch if math.isfinite(p[1])]
        if not seen:
            kept += stretch[:1]
            continue
        low = min((p[2] for p in seen if math.isfinite(p[2])), default=math.nan)
        high = max((p[3] for p in seen if math.isfinite(p[3])), default=math.nan)
        ends = {min(seen, key=lambda p: p[1])[:2], max(seen, key=lambda p: p[1])[:2]}
        kept += [(x, y, low, high) for x, y in sorted(ends)]
    return [*kept, points[-1]]


COLORS = ("#1d63a8", "#b8541a", "#23825a", "#7a4fc0", "#b8386a", "#86700f", "#0d7f86", "#666c76")
DARK = ("#7ab8f0", "#f0a06a", "#6fcf9f", "#b79af0", "#f08ab4", "#d8c050", "#62cdd4", "#a9b0bb")
MARK = (
    '<svg viewBox="0 0 24 24" aria-hidden="true"><path d="M4 19h16M6 19V5l11 14" fill="none" stroke="currentColor" '
    'stroke-width="1.8" stroke-linejoin="round" stroke-linecap="round"/></svg>'
)
"""The sign at the head of a page."""
_TONES = {"plain": ("--muted", "#6a7079"), "warning": ("--warning", "#94650a"), "severe": ("--severe", "#b3261e")}
_LETTER = 6.1
"""Approximate width of a letter of the labels; the fonts of the reader are not known."""
_NO_CHARACTERS = {0xFFFE: None, 0xFFFF: None}
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 12.0, 12.0, 34.0
_SPREAD, _MARGIN = 4.0, 28.0
"""How far bars of several curves stand from each other; what a label of the y axis and the air around it take."""


@dataclass(frozen=True)
class Series:
    """One curve. Where ``ys`` is not finite it has a gap.

    Attributes:
        lows, highs: An interval around each point, or nothing; drawn as a band, and as bars with ``style = "points"``,
            which is for values that were measured now and then.
        color: The number of its color, from 0; -1 is the color of text. None takes the place among the curves. Curves
            of one name and color have one entry in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    style: Literal["line", "points"] = "line"
    color: int | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``: a line from top to bottom; its text is written where there is room."""

    x: float
    text: str
    tone: Literal["plain", "warning", "severe"] = "plain"


def chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    size: tuple[int, int] = (640, 260),
) -> str:
    """Return the curves as inline SVG, ``size`` wide and high; it shrinks with what it lies in and never grows.

    Curves of more points than the picture can show keep the smallest and the largest of each stretch, so no peak is
    lost. Curves that would cover each other throughout are one, under all their names. A curve of one point is a
    dot; without any point the picture says so. Colors are the CSS variables ``--series-1`` to ``--series-8``,
    ``--ink``, ``--muted``, ``--rule``, ``--warning`` and ``--severe``, or what they are by default. Any text is
    escaped. Attributes ``data-*`` say which numbers lie where.
    """
    colored = [replace(one, color=n if one.color is None else one.color) for n, one in enumerate(series)]
    drawn = _united([_clean(one, size[0]) for one in colored])
    legend, rows = _legend(drawn if len(series) > 1 else [], size[0])
    top = _TOP + 15.0 * rows + (10.0 if any(m.text for m in marks) else 0.0)
    heights = [v for one in drawn for values in (one.ys, one.lows, one.highs) for v in values if math.isfinite(v)]
    ys = scale_of(heights, (size[1] - _BOTTOM, top))
    widest = max((len(number(y, ys.step(4))) for y in ys.ticks(4)), default=0)
    # Left, top, right, bottom of the plot, in the picture's coordinates; y grows downwards.
    frame = (max(_LEFT, _MARGIN + _LETTER * widest), top, size[0] - _RIGHT, size[1] - _BOTTOM)
    # Bars at the first and last step would look like the picture's frame.
    inset = 2 * _SPREAD if any(one.style == "points" for one in drawn) else 0.0
    xs = scale_of([x for one in drawn for x in one.xs], (frame[0] + inset, frame[2] - inset), is_padded=False)
    parts = [*_grid(xs, ys, frame), *_labels(x_label, y_label, frame, size), legend]
    parts += _marks(marks, xs, frame)
    pointed = [place for place, one in enumerate(drawn) if one.style == "points"]
    for place, one in enumerate(drawn):
        # Bars that would cover each other stand side by side.
        shift = _SPREAD * (pointed.index(place) - (len(pointed) - 1) / 2) if place in pointed else 0.0
        parts += _curve(replace(one, xs=[xs.place(x) + shift for x in one.xs]), one.color or 0, ys)
    if not heights:
        middle = ((frame[0] + frame[2]) / 2, (frame[1] + frame[3]) / 2)
        parts.append(_text(*middle, "nothing was measured", "middle", "--muted"))
    bounds = " ".join(f"{v:.6g}" for v in (xs.low, xs.high, ys.low, ys.high))
    edges = " ".join(number_of(v) for v in (frame[0] + inset, frame[1], frame[2] - inset, frame[3]))
    name = _escaped(title)
    numbers = f'data-across="{_escaped(x_label)}" data-range="{bounds}" data-frame="{edges}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" class="chart" role="img" '
        f'aria-label="{name}" {numbers} font-size="11" '
        f'style="max-width:{size[0]}px;width:100%;height:auto;font-family:inherit"><title>{name}</title>'
        f"{''.join(parts)}</svg>"
    )


def page_style() -> str:
    """Return the style sheet of gnomon's pages, with the colors of curves for light and dark."""
    css = (files("gnomon.core") / "page.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f"--series-{n}:{color};" for n, color in enumerate(colors, start=1)) for colors in (COLORS, DARK)
    )
    return css.replace("/*light*/", light).replace("/*dark*/", dark)


def write_svg(path: Path, text: str) -> None:
    """Write a `chart` as a file of its own, with colors for light and dark.

    Raises:
        OSError: The file cannot be written.
    """
    light = ";".join(f"--series-{n}:{color}" for n, color in enumerate(COLORS, start=1))
    dark = ";".join(f"--series-{n}:{color}" for n, color in enumerate(DARK, start=1))
    style = (
        f"<style>:root{{{light};font-family:system-ui,sans-serif}}@media(prefers-color-scheme:dark)"
        f"{{:root{{{dark};--ink:#e6e8eb;--muted:#9aa1ab;--rule:#363b43;--warning:#e0b050;--severe:#ff8a80}}}}</style>"
    )
    write_durably(path, (text.replace("</title>", f"</title>{style}", 1) + "\n").encode(), is_synced=False)


def number_of(value: float) -> str:
    """Return a place in the picture, to a tenth.

    >>> number_of(12.34), number_of(3.0)
    ('12.3', '3')
    """
    return f"{value:.1f}".removesuffix(".0")


def _escaped(text: str) -> str:
    """Return text that is safe in an element and in an attribute, without characters that XML does not have."""
    return html.escape(visible(text).translate(_NO_CHARACTERS))


def _clean(one: Series, width: int) -> Series:
    """Return the points in order of x, those without a place left out, and no more than can be seen."""
    count = min(len(one.xs), len(one.ys))
    blank = [math.nan] * count
    has_interval = len(one.lows) >= count and len(one.highs) >= count
    lows, highs = (one.lows, one.highs) if has_interval else (blank, blank)
    quadruples = zip(one.xs, one.ys, lows, highs, strict=False)
    points = [(_bounded(x), _bounded(y), _bounded(low), _bounded(high)) for x, y, low, high in quadruples]
    placed = (point for point in points if math.isfinite(point[0]))
    kept = thinned(sorted(placed, key=lambda point: point[0]), max(20, (width - 60) // 2))
    xs, ys, less, more = ([point[place] for point in kept] for place in range(4))
    return replace(one, xs=xs, ys=ys, lows=less, highs=more)


def _united(series: Sequence[Series]) -> list[Series]:
    """Return the curves, those that would cover each other throughout as one: its name has the names of all.

    >>> [one.name for one in _united([Series("total", [1, 2], [0, 5]), Series("engine", [1, 2], [0, 5])])]
    ['total = engine']
    """
    found: list[Series] = []
    finite = [y for one in series for y in one.ys if math.isfinite(y)]
    # Less than a pixel of a picture 260 high.
    near = 0.004 * (max(finite) - min(finite)) if finite else 0.0
    for one in series:
        covering = next((n for n, other in enumerate(found) if _covers(one, other, near)), None)
        if covering is None or not any(map(math.isfinite, one.ys)):
            found.append(one)
        elif one.name != found[covering].name:
            found[covering] = replace(found[covering], name=f"{found[covering].name} = {one.name}")
    return found


def _covers(one: Series, other: Series, near: float) -> bool:
    if one.style == "points" or (one.style, list(one.xs)) != (other.style, list(other.xs)):
        return False
    has_interval = any(map(math.isfinite, (*one.lows, *other.lows)))
    return not has_interval and all(a == b or abs(a - b) <= near for a, b in zip(one.ys, other.ys, strict=False))


def _bounded(value: float) -> float:
    """Return ``value`` as far as differences of two are finite; an integer may be larger than any float."""
    return float(max(-1e300, min(1e300, value))) if value == value and abs(value) != math.inf else math.nan


def _ink(kind: str, variable: str, default: str) -> str:
    # Twice: programs that do not know variables read the attribute.
    return f'{kind}="{default}" style="{kind}:var({variable},{default})"'


def _text(x: float, y: float, said: str, anchor: str, variable: str = "--ink") -> str:
    default = "#1b1e23" if variable == "--ink" else "#6a7079"
    place = f'x="{number_of(x)}" y="{number_of(y)}"'
    return f'<text {place} text-anchor="{anchor}" {_ink("fill", variable, default)}>{_escaped(said)}</text>'


def _grid(xs: Scale, ys: Scale, frame: tuple[float, ...]) -> Iterator[str]:
    lines = "".join(f"M{number_of(frame[0])} {number_of(ys.place(y))}H{number_of(frame[2])}" for y in ys.ticks(4))
    yield f'<path d="{lines}" fill="none" {_ink("stroke", "--rule", "#e2e4e8")}/>'
    for y in ys.ticks(4):
        yield _text(frame[0] - 6, ys.place(y) + 4, number(y, ys.step(4)), "end", "--muted")
    for x in xs.ticks(5):
        yield _text(xs.place(x), frame[3] + 15, number(x, xs.step(5)), "middle", "--muted")


def _labels(x_label: str, y_label: str, frame: tuple[float, ...], size: tuple[int, int]) -> Iterator[str]:
    room = int((frame[2] - frame[0]) / _LETTER)
    yield _text((frame[0] + frame[2]) / 2, size[1] - 5, _cut(x_label, room), "middle", "--muted")
    if y_label:
        middle = number_of((frame[1] + frame[3]) / 2)
        said = _text(0, 0, _cut(y_label, int((frame[3] - frame[1]) / _LETTER)), "middle", "--muted")
        yield f'<g transform="translate(11 {middle}) rotate(-90)">{said}</g>'


def _legend(series: Sequence[Series], width: int) -> tuple[str, int]:
    """Return the legend, and how many rows it takes."""
    parts, x, row = [], _LEFT, 0
    for one in {(s.name, s.color, s.style): s for s in series}.values():
        shown = _cut(one.name, 50 if " = " in one.name else 34)
        wide = 22 + _LETTER * len(shown) + 12
        if x > _LEFT and x + wide > width - _RIGHT:
            x, row = _LEFT, row + 1
        y = 11 + 15 * row
        if one.style == "points":
            parts.append(f'<circle cx="{number_of(x + 7)}" cy="{y - 4}" r="3.5" {_color("fill", one.color or 0)}/>')
        else:
            line = f'd="M{number_of(x)} {y - 4}h14" stroke-width="2.5"'
            parts.append(f"<path {line} {_color('stroke', one.color or 0)}/>")
        parts.append(_text(x + 19, y, shown, "start"))
        x += wide
    return "".join(parts), row + 1 if series else 0


def _marks(marks: Sequence[Mark], xs: Scale, frame: tuple[float, ...]) -> Iterator[str]:
    # The x up to which the line of labels is taken: a label that would cover another one is left out, its line stays.
    free = frame[0]
    for mark in sorted((m for m in marks if xs.low <= m.x <= xs.high), key=lambda m: m.x):
        x = xs.place(mark.x)
        faint = ' stroke-opacity=".55"' if mark.tone == "plain" else ""
        line = f'<path d="M{number_of(x)} {number_of(frame[1])}V{number_of(frame[3])}" stroke-dasharray="2 3"{faint} '
        yield f"{line}{_ink('stroke', *_TONES[mark.tone])}><title>{_escaped(mark.text)}</title></path>"
        half = _LETTER * min(len(mark.text), 24) / 2
        if mark.text and x - half >= free - 2 and x + half <= frame[2] + _RIGHT:
            yield _text(x, frame[1] - 3, _cut(mark.text, 24), "middle", _TONES[mark.tone][0])
            free = x + half + 8


def _curve(one: Series, place: int, ys: Scale) -> Iterator[str]:
    """Yield one curve, whose ``xs`` are places in the picture already."""
    points = list(zip(one.xs, one.ys, one.lows, one.highs, strict=True))
    banded = [p for p in points if math.isfinite(p[2]) and math.isfinite(p[3])]
    if banded and one.style == "points":
        ends = [tuple(map(number_of, (x, ys.place(low), ys.place(high)))) for x, _, low, high in banded]
        bars = "".join(f"M{x} {low}V{high}" for x, low, high in ends)
        yield f'<path d="{bars}" fill="none" stroke-width="1.5" {_color("stroke", place)}/>'
    elif len(banded) > 1:
        out = " ".join(f"{number_of(x)},{number_of(ys.place(high))}" for x, _, _, high in banded)
        back = " ".join(f"{number_of(x)},{number_of(ys.place(low))}" for x, _, low, _ in reversed(banded))
        yield f'<polygon points="{out} {back}" fill-opacity=".16" {_color("fill", place)}/>'
    runs = list(_runs([(x, y) for x, y, _, _ in points]))
    strokes = "".join("M" + "L".join(f"{number_of(x)} {number_of(ys.place(y))}" for x, y in run) for run in runs)
    if strokes and (one.style != "points" or len(points) > 2):
        # Between points there is a hint of a line, for nothing was measured there; none between the first and the last.
        width = '1.2" stroke-opacity=".4' if one.style == "points" else "1.7"
        line = f'<path d="{strokes}" class="curve" fill="none" stroke-width="{width}" stroke-linejoin="round"'
        yield f"{line} {_color('stroke', place)}><title>{_escaped(one.name)}</title></path>"
    dots = [p for run in runs for p in run] if one.style == "points" else [run[0] for run in runs if len(run) == 1]
    for x, y in dots:
        yield f'<circle cx="{number_of(x)}" cy="{number_of(ys.place(y))}" r="3" {_color("fill", place)}/>'


def _runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches between gaps."""
    run: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _color(kind: str, place: int) -> str:
    if place < 0:
        return _ink(kind, "--ink", "#1b1e23")
    n = place % len(COLORS)
    return _ink(kind, f"--series-{n + 1}", COLORS[n])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"
