"""What a benchmark measured, in values that go through JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = "gnomon-bench/1"


@dataclass(frozen=True)
class BenchMeasure:
    """One quantity: ``values``, one a repeat, warm-ups left out.

    name: of the same quantity in every contender. unit: "s", "ms", "tokens/s", "GFLOP/s", "GB/s", "GiB", ...
    limit: the best that the machine's measured ceilings allow, in the same unit; None where none is known.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    limit: float | None = None

    @property
    def median(self) -> float:
        """The middle value; of two, their mean."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        return min(self.values), max(self.values)

    @property
    def is_rate(self) -> bool:
        """Whether more is better: something per second."""
        return self.unit.endswith("/s")

    def slowdown(self, other: float) -> float:
        """Return how many times better ``other`` is than this: 2 when this takes twice as long or does half.

        >>> step, decode = BenchMeasure("total", "s", (6.0,)), BenchMeasure("decode", "tokens/s", (50.0,))
        >>> step.slowdown(3.0), decode.slowdown(100.0)
        (2.0, 2.0)
        """
        return other / self.median if self.is_rate else self.median / other


@dataclass(frozen=True)
class BenchResult:
    """What one contender showed in one case.

    facts: what is needed to read the numbers (tokens, lengths, versions, precision), JSON values.
    error: why there is no measure; None when it ran.
    """

    case: str
    contender: str
    measures: tuple[BenchMeasure, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_peer(self) -> bool:
        """Whether another program than gnomon's own was measured."""
        return self.contender.startswith(("trl", "vllm"))

    def find(self, name: str) -> BenchMeasure | None:
        """Return the measure of that name, None when there is none."""
        return next((m for m in self.measures if m.name == name), None)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "BenchResult":
        """Return what `dataclasses.asdict` or `BenchReport.as_row` made of it, also after it went through JSON."""
        listed = row.get("measures", ())
        measures = tuple(BenchMeasure(m["name"], m["unit"], tuple(m["values"]), m.get("limit")) for m in listed)
        return cls(row["case"], row["contender"], measures, dict(row.get("facts", {})), row.get("error"))


@dataclass(frozen=True)
class BenchReport:
    """All results of one run on one machine, and the settings that every contender had."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: tuple[BenchResult, ...]

    @property
    def exit_code(self) -> int:
        """1 when a contender of ours gave no result; a peer that cannot run here is said and does not count."""
        return int(any(result.error is not None and not result.is_peer for result in self.results))

    def of(self, case: str, contender: str | None = None) -> Sequence[BenchResult]:
        """Return the results of a case, of one contender if it is named."""
        return [r for r in self.results if r.case == case and contender in (None, r.contender)]

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object, with medians beside the values."""
        row: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        for result in row["results"]:
            for measure in result["measures"]:
                measure["median"] = statistics.median(measure["values"])
        return row
