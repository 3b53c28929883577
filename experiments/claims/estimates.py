"""What several seeds measured, and how sure one may be of it."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.statistics import student_quantile, wilson_interval

Points = Sequence[tuple[float, float]]
Cells = Mapping[str, Mapping[str, Mapping[int, Any]]]

# Student's t, two-sided 95 %, by degrees of freedom from 1.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@cache
def student_t(freedom: int) -> float:
    """Return the 97.5 % point of Student's t, which half of a two-sided 95 % interval takes.

    Up to 30 it is what stands in tables, with three decimals, so that pages are what their readers compute; beyond it
    is exact: with 60 seeds 2.001 and not 1.96.

    >>> student_t(2), round(student_t(59), 3)
    (4.303, 2.001)
    """
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return student_quantile(0.05, freedom)


class NotMeasured(LookupError):
    """A number was asked for that no run has given."""


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds and Student's 95 % interval of it; infinitely wide for one seed.

    >>> str(Estimate(0.5, 0.4, 0.6, 3))
    '0.500 [0.400, 0.600]'
    """

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{written(self.mean)} (one seed)"
        return f"{written(self.mean)} [{written(self.low)}, {written(self.high)}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean ± t s / sqrt(n), t being Student's for n - 1 degrees of freedom.

    Three seeds have t = 4.3, not 1.96: what so few runs say about the next one is little, and the interval says so. A
    bootstrap of three values would be far too narrow.
    Source: Student 1908, Biometrika 6, 1-25.

    >>> str(estimate([1.0, 2.0, 3.0]))
    '2.000 [-0.484, 4.484]'

    Raises: NotMeasured without values.
    """
    if not values:
        raise NotMeasured("no run gave it")
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    half = student_t(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def written(value: float) -> str:
    """Return a number as it stands in a table: three decimals, or three digits where those would say nothing.

    >>> written(0.12345), written(0.000123), written(1234.5), written(0.0)
    ('0.123', '0.000123', '1234.5', '0.000')
    """
    if value and (abs(value) < 0.01 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.3f}"


@dataclass(frozen=True)
class MeasuredValues:
    """Numbers and curves, by arm, by name and by seed; what was not run is not there.

    >>> found = MeasuredValues({"grpo": {"wasted": {0: 0.5, 1: 0.7}}, "spo": {"wasted": {0: 0.1, 1: 0.3}}})
    >>> found.values("grpo", "wasted"), found.gain("grpo", "spo", "wasted").mean
    ((0.5, 0.7), -0.4)

    numbers: arm -> name -> seed -> value. curves: arm -> name -> seed -> (x, y) pairs.
    failures: what did not finish, and why, one line each. cpu_seconds: what the runs behind it took of one core, those
    that were finished before included; None where that is not known of all. inexact: what the run cards say of those
    runs that another run with the same seeds would not repeat to the bit, one line a kind. code: the commits of gnomon
    whose code made those runs, each once: other code may sum in another order.
    """

    numbers: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Mapping[int, Points]]] = field(default_factory=dict)
    failures: Sequence[str] = ()
    cpu_seconds: float | None = 0.0
    inexact: Sequence[str] = ()
    code: Sequence[str] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that gave anything, in order."""
        return tuple(dict.fromkeys([*self.numbers, *self.curves]))

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that any arm has, in order."""
        return tuple(dict.fromkeys(name for found in self.numbers.values() for name in found))

    @property
    def gaps(self) -> tuple[str, ...]:
        """The cells without a number, in words, where the arm has this number of other seeds.

        >>> MeasuredValues({"a": {"x": {0: 1.0, 1: 2.0}, "y": {0: 1.0}}}).gaps
        ('y of a: seed 1',)
        """
        found = []
        for arm, numbers in self.numbers.items():
            seeds = {seed for by_seed in numbers.values() for seed in by_seed}
            for name, by_seed in numbers.items():
                absent = sorted(seeds - by_seed.keys()) if by_seed else []
                listed = ", ".join(map(str, absent))
                found += [f"{name} of {arm}: seed{'s' if len(absent) > 1 else ''} {listed}"] if absent else []
        return tuple(found)

    def values(self, arm: str, name: str) -> tuple[float, ...]:
        """Return a number of each seed that gave it, in order of seeds. Raises: NotMeasured when none did."""
        return tuple(value for _, value in sorted(self._by_seed(arm, name).items()))

    def estimate(self, arm: str, name: str) -> Estimate:
        """Return mean and interval over seeds. Raises: NotMeasured."""
        return estimate(self.values(arm, name))

    def rate(self, arm: str, name: str) -> Estimate:
        """Return the share of seeds of which a yes-or-no number is 1, with Wilson's 95 % interval.

        Student's would be [0, 0] where nobody said yes, as if no seed ever could.
        Raises: NotMeasured as `values` does; ConfigError for another number than 0 or 1.
        """
        values = self.values(arm, name)
        if not set(values) <= {0.0, 1.0}:
            raise ConfigError(f"'{name}' of '{arm}' is no yes-or-no number: {', '.join(map(written, values))}")
        found = wilson_interval(sum(values), len(values))
        return Estimate(statistics.fmean(values), found.low, found.high, len(values))

    def gain(self, first: str, second: str, name: str) -> Estimate:
        """Return ``second`` minus ``first``, paired by seed: both had the same model and the same prompts.

        Raises: NotMeasured without a seed that both have.
        """
        before, after = self._by_seed(first, name), self._by_seed(second, name)
        return estimate([after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())])

    def ratio(self, first: str, second: str, name: str) -> Estimate:
        """Return ``second`` divided by ``first``, paired by seed, as the mean of ratios.

        Raises: NotMeasured, also where a seed would divide by 0: without it the others would say too little.
        """
        before, after = self._by_seed(first, name), self._by_seed(second, name)
        shared = sorted(before.keys() & after.keys())
        if zero := [seed for seed in shared if before[seed] == 0]:
            raise NotMeasured(f"{name} of {first} is 0 for seed {zero[0]}, so there is no ratio")
        return estimate([after[seed] / before[seed] for seed in shared])

    def curve(self, arm: str, name: str) -> list[tuple[float, tuple[float, ...]]]:
        """Return the value of each seed at each x that all seeds have; nothing where none has the curve."""
        runs = [dict(points) for points in self.curves.get(arm, {}).get(name, {}).values()]
        shared = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
        return [(x, tuple(run[x] for run in runs)) for x in shared]

    def merged(self, other: "MeasuredValues") -> "MeasuredValues":
        """Return both; where both have an arm's number or curve, the other's."""
        return MeasuredValues(
            _merged(self.numbers, other.numbers),
            _merged(self.curves, other.curves),
            (*self.failures, *other.failures),
            None if self.cpu_seconds is None or other.cpu_seconds is None else self.cpu_seconds + other.cpu_seconds,
            tuple(dict.fromkeys([*self.inexact, *other.inexact])),
            tuple(dict.fromkeys([*self.code, *other.code])),
        )

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object; seeds are keys and therefore texts."""
        said = {"failures": list(self.failures), "inexact": list(self.inexact)}
        said |= {"code": list(self.code)} if self.code else {}
        return {"numbers": _spelled(self.numbers), "curves": _spelled(self.curves), **said}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "MeasuredValues":
        """Return what `as_row` was of. Raises: ConfigError where it is something else."""
        try:
            numbers = _read(row["numbers"], float)
            curves = _read(row["curves"], lambda points: [(float(x), float(y)) for x, y in points])
            # Results from before say nothing of repetition, nor of code.
            inexact, code = (tuple(map(str, row.get(name, ()))) for name in ("inexact", "code"))
            return cls(numbers, curves, tuple(map(str, row["failures"])), inexact=inexact, code=code)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"these are no measured numbers: {type(error).__name__}: {error}") from error

    def _by_seed(self, arm: str, name: str) -> Mapping[int, float]:
        found = self.numbers.get(arm, {}).get(name, {})
        if not found:
            raise NotMeasured(f"{name} of {arm}")
        return found


def _merged(first: Cells, second: Cells) -> dict[str, dict[str, Mapping[int, Any]]]:
    return {arm: {**first.get(arm, {}), **second.get(arm, {})} for arm in dict.fromkeys([*first, *second])}


def _spelled(cells: Cells) -> dict[str, Any]:
    return {
        arm: {name: {str(seed): value for seed, value in seeds.items()} for name, seeds in found.items()}
        for arm, found in cells.items()
    }


def _read(cells: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, dict[str, dict[int, Any]]]:
    return {
        arm: {name: {int(seed): read(value) for seed, value in seeds.items()} for name, seeds in found.items()}
        for arm, found in cells.items()
    }
