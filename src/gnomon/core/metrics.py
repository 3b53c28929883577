"""Measured values that merge exactly, over micro-batches, minibatches, ranks and steps.

A mean of means is wrong whenever the parts differ in size; a `Mean` keeps its sum and its count, so
merging is associative and loses nothing. Names are ``station/quantity_unit``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self


class Measure(Protocol):
    """A value that merges with others of its kind."""

    def __add__(self, other: Self, /) -> Self:
        """Return the measure of both."""

    @property
    def value(self) -> float:
        """The number to write down."""


@dataclass(frozen=True)
class Mean:
    """A mean, kept as a sum and a count. Without samples its value is 0.

    >>> (Mean(3.0, 2) + Mean(1.0, 2)).value
    1.0
    """

    total: float
    count: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """Sum over count; 0 when nothing was counted."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Sum:
    """A total."""

    total: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        """The total."""
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value seen."""

    largest: float

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        """The largest value."""
        return self.largest


@dataclass(frozen=True)
class Last:
    """The latest value: a learning rate, a counter. Merging keeps the right-hand one."""

    latest: float

    def __add__(self, other: "Last") -> "Last":
        return other

    @property
    def value(self) -> float:
        """The latest value."""
        return self.latest


@dataclass(frozen=True)
class EffectiveSize:
    """Effective sample size of importance ratios, as a fraction: (sum r)^2 / (n sum r^2).

    In [1/n, 1]; 1 when all ratios are equal, and 1 of nothing. Kept as three sums, so it is the same number however the
    tokens were cut (P3O, arXiv 2605.12380, eq. 11; Kish 1965).

    Attributes:
        of_zeros: The value when every ratio is 0: not a number where that is an underflow, 0 where all were left out.

    >>> round(EffectiveSize.of([4.0, 1.0, 1.0, 1.0]).value, 8)
    0.64473684
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    of_zeros: float = math.nan

    @classmethod
    def of(cls, ratios: Iterable[float]) -> "EffectiveSize":
        """Return the size of these ratios."""
        listed = list(ratios)
        return cls(len(listed), sum(listed), sum(r * r for r in listed))

    def __add__(self, other: "EffectiveSize") -> "EffectiveSize":
        sums = (self.count + other.count, self.total + other.total, self.squares + other.squares)
        return EffectiveSize(*sums, self.of_zeros)

    @property
    def value(self) -> float:
        """The fraction; not finite when a ratio was not."""
        if self.count == 0:
            return 1.0
        # Squares may underflow to 0 where the ratios themselves do not.
        return self.total * self.total / (self.count * self.squares) if self.squares else self.of_zeros


@dataclass(frozen=True)
class Metrics:
    """Named measures. ``a + b`` merges name by name.

    >>> (Metrics.of({"x": Mean(1.0, 1)}) + Metrics.of({"x": Mean(3.0, 1), "y": Sum(2.0)})).values()
    {'x': 2.0, 'y': 2.0}
    """

    measures: Mapping[str, Measure] = field(default_factory=dict)

    @classmethod
    def of(cls, measures: Mapping[str, Measure]) -> "Metrics":
        """Return metrics holding ``measures``."""
        return cls(dict(measures))

    def __add__(self, other: "Metrics") -> "Metrics":
        merged = dict(self.measures)
        for name, measure in other.measures.items():
            # The order of the sum matters for `Last`, which keeps the right-hand one.
            merged[name] = merged[name] + measure if name in merged else measure
        return Metrics(merged)

    def __iter__(self) -> Iterator[str]:
        return iter(self.measures)

    def __getitem__(self, name: str) -> float:
        return self.measures[name].value

    def values(self) -> dict[str, float]:
        """Return name to number, sorted by name."""
        return {name: self.measures[name].value for name in sorted(self.measures)}
