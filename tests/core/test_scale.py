"""Ranges, ticks and thinning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.svg import Point, number, scale_of, thinned

FINITE = st.floats(-1e300, 1e300)


@given(st.lists(FINITE, max_size=5))
def test_ticks_are_few_and_within(values: list[float]):
    """Between one and five round numbers inside of the range, whose ends hold all values."""
    scale = scale_of(values, (0.0, 100.0))
    ticks = scale.ticks(4)
    slack = 1e-6 * (scale.high - scale.low)

    assert scale.low < scale.high
    assert all(scale.low <= v <= scale.high for v in values)
    assert 1 <= len(ticks) <= 5
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)
    assert all(number(tick, scale.step(4)) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "step", "said"),
    [(0.0, 0.1, "0"), (0.3, 0.1, "0.3"), (1e-6, 1e-6, "1e-6"), (1.5e-6, 5e-7, "1.5e-6"), (1500.0, 500.0, "1500"),
     (25000.0, 5000.0, "25k"), (2.5e6, 5e5, "2.5M"), (3e12, 1e12, "3e12"), (-0.5, 0.5, "-0.5")],
)  # fmt: skip
def test_labels_are_short(value: float, step: float, said: str):
    """A label has the digits that its distance to the next one needs, and a letter where it would be long."""
    assert number(value, step) == said


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=200), st.integers(1, 20))
def test_thinning_keeps_ends_and_extremes(ys: list[float], buckets: int):
    """At most two points a bucket and the two ends; the smallest and the largest of all stay; order stays."""
    points: list[Point] = [(float(x), y, y - 1, y + 1) for x, y in enumerate(ys)]
    kept = thinned(points, buckets)
    finite = [y for y in ys if math.isfinite(y)]
    left = [p[1] for p in kept if math.isfinite(p[1])]

    assert len(kept) <= 2 * buckets + 2
    assert [p[0] for p in kept] == sorted({p[0] for p in kept})
    assert [p[0] for p in kept[:1] + kept[-1:]] == [p[0] for p in points[:1] + points[-1:]]
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))
