"""The forecast for a cluster as sentences and as JSON, with the parts of gnomon that would not support it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gnomon.analysis.planner import layout as layouts
from gnomon.analysis.planner.deployment import Deployment, broadcast_refused
from gnomon.analysis.planner.hardware import SOURCES, count, seconds, size
from gnomon.analysis.planner.layout import GIGABYTE, Held, concurrency
from gnomon.analysis.planner.search import BestLayout, best_layout
from gnomon.core.sentences import sentences


def _said(part: str, place: Deployment, found: BestLayout, **given: Any) -> tuple[str, ...]:
    words: dict[str, Any] = {"count": count, "seconds": seconds, "size": size, "held": _held, "largest": _largest}
    words |= {"place": place, "found": found, "layouts": layouts, "broadcast_refused": broadcast_refused}
    return tuple(sentences("analysis/planner/forecast.j2", part, **words, **given))


def limits(place: Deployment, found: BestLayout) -> tuple[str, ...]:
    """Return one sentence for each part that breaks or takes much of a step."""
    return _said("limits", place, found)


_IDLE = 0.15
LONGEST = "the longest answers"


@dataclass(frozen=True)
class ClusterForecast:
    """Everything that `gnomon plan --hardware` prints."""

    place: Deployment
    found: BestLayout
    bottleneck: str
    settings: tuple[str, ...]
    advice: tuple[str, ...]
    limits: tuple[str, ...]

    def as_row(self) -> dict[str, object]:
        """Return one JSON object in seconds, bytes, tokens and shares, not rounded."""
        place, found = self.place, self.found
        layout, flow = found.layout, found.flow
        return {
            "model": place.shape.name,
            "parameters": place.shape.parameters,
            "active_parameters": place.shape.active_parameters,
            "hardware": asdict(place.hardware),
            "devices": place.devices,
            "layout": asdict(layout),
            "learner_bytes": layouts.learner_memory(place, layout).parts,
            "engine_bytes": layouts.engine_memory(place, layout).parts,
            "host_bytes": layouts.host_memory(place, layout),
            "traffic_bytes": asdict(layouts.traffic(place, layout)),
            "stage_seconds": asdict(found.stages),
            "simulated": asdict(flow)
            | {"step_seconds": flow.step_seconds, "tokens_per_second": flow.tokens_per_second},
            "bottleneck": self.bottleneck,
            "settings": list(self.settings),
            "advice": list(self.advice),
            "limits": list(self.limits),
            "efficiencies": {
                name: {"value": value, "kind": SOURCES[name][0], "source": SOURCES[name][1]}
                for name, value in asdict(place.reached).items()
            },
        }

    def sentences(self) -> Iterator[str]:
        """Yield the forecast line by line."""
        yield from _said("shape_of", self.place, self.found)
        yield f"Bottleneck: {self.bottleneck}."
        yield f"Set: {' '.join(self.settings)}"
        yield from self.advice
        if self.limits:
            yield "What gnomon's present parts do not support, or barely support:"
            yield from (f"  - {said}" for said in self.limits)
        yield "These numbers are computed, not measured. Numbers that are not on a data sheet:"
        yield from _assumed(self.place)


def forecast(place: Deployment) -> ClusterForecast:
    """Return the forecast of the best layout.

    Raises:
        ConfigError: If no layout fits.
    """
    found = best_layout(place)
    return ClusterForecast(
        place,
        found,
        bottleneck(place, found),
        tuple(_settings(place, found)),
        _advice(place, found),
        limits(place, found),
    )


def bottleneck(place: Deployment, found: BestLayout) -> str:
    """Return the stage that limits the throughput."""
    stages, flow = found.stages, found.flow
    # The share of the grading processes that is busy.
    grading = _grading(place, found) / place.job.graders
    if grading > max(flow.answering, flow.learning, 0.5):
        return "grading"
    inside = {
        "updating": stages.updating,
        "publishing weights": stages.publishing,
        "the run's own process": stages.driving,
    }
    learning = max(inside, key=lambda name: inside[name])
    if learning == "updating" and stages.communicating > stages.computing:
        learning = "communicating in updates, for which passes are too small or learners too many"
    # The simulation says which side never waits. Where neither is
    # busy all the time, the longest responses hold both up.
    if flow.learning > 1 - _IDLE:
        return f"learning, most of all {learning}"
    if flow.answering > 1 - _IDLE and flow.learning < 1 - 2 * _IDLE:
        return "answering"
    if stages.answering > 2 * stages.flowing and flow.learning < 1 - _IDLE:
        return LONGEST
    return f"both sides alike; of learning most of all {learning}"


def _settings(place: Deployment, found: BestLayout) -> Iterator[str]:
    """Yield the layout as overrides for `gnomon train`."""
    layout = found.layout
    yield "device=cuda" if place.devices == 1 else "cluster=auto"
    yield f"learner.processes={layout.learners}"
    yield f"learner.max_tokens_per_micro_batch={layout.micro}"
    yield f"learner.gradient_checkpointing={'true' if layout.is_recomputed else 'false'}"
    yield f"engine.count={layout.engines}"
    if layout.parts > 1 or place.job.is_broadcast:
        yield "engine.kind=vllm"
    if layout.parts > 1:
        yield f"engine.tensor_parallel={layout.parts}"
    yield f"engine.max_concurrent={concurrency(place, layout)}"


def _advice(place: Deployment, found: BestLayout) -> tuple[str, ...]:
    is_longest = bottleneck(place, found) == LONGEST
    return _said("advice", place, found, is_longest=is_longest, busy=_grading(place, found))


def _grading(place: Deployment, found: BestLayout) -> float:
    """Return the number of processes that grading keeps busy."""
    return place.job.rows * place.reached.grade / found.flow.step_seconds


def _assumed(place: Deployment) -> Iterator[str]:
    by_kind = defaultdict[str, list[str]](list)
    for name, value in asdict(place.reached).items():
        by_kind[SOURCES[name][0]].append(f"{name} {value:g}")
    yield from (f"  {kind}: {', '.join(names)}" for kind, names in by_kind.items())


def _held(held: Held) -> str:
    named = _largest(held.parts, GIGABYTE / 20)
    return f"{held.total / GIGABYTE:.1f} GB of {held.room / GIGABYTE:.0f} a device: {named}"


def _largest(sizes: dict[str, float], least: float = GIGABYTE) -> str:
    ordered = sorted(sizes.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {size / GIGABYTE:.3g}" for name, size in ordered if size >= least)
