"""From numbers to places in a picture: ranges, round ticks, and curves with no more points than can be seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Return the distance of about ``count`` ticks: 1, 2 or 5 times a power of ten.

        >>> Scale(0.0, 24.0, 0.0, 1.0).step(5)
        5.0
        """
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        return next(float(m * unit) for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)

    def ticks(self, count: int) -> list[float]:
        """Return the round numbers within the range, at most ``count`` + 1.

        >>> Scale(0.1, 1.0, 0.0, 1.0).ticks(4)
        [0.5, 1.0]
        """
        step = self.step(count)
        start = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(start, math.floor(self.high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], places: tuple[float, float], is_padded: bool = True) -> Scale:
    """Return the scale that holds ``values``, finite ones, with some air around them; of none it is [0, 1].

    A single number gets the range from 0 to a bit more; a range that nearly begins at 0 begins there.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= max(_SMALLEST, 1e-9 * max(abs(low), abs(high))):
        most = max(abs(low), abs(high)) * 1.25
        if most <= _SMALLEST:
            return Scale(0.0, 1.0, *places)
        return Scale(0.0, most, *places) if high > 0 else Scale(-most, 0.0, *places)
    if is_padded:
        air = (high - low) * 0.05
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

    points: (x, y, low, high) in order of x. The interval of a point that stays is that of its whole stretch: the
    smallest low and the largest high. A stretch without any finite y keeps its first point, so the gap stays.
    The first and the last point stay.
    """
    count = len(points)
    if count <= 2 * buckets:
        return list(points)
    kept: list[Point] = [points[0]]
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
