"""The forecast for a cluster as sentences and as JSON, with the parts of gnomon that would not carry it."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from gnomon.analysis.planner.deployment import Deployment, broadcast_refused
from gnomon.analysis.planner.hardware import SOURCES, count, seconds, size
from gnomon.analysis.planner.layout import (
    GIGABYTE,
    Held,
    concurrency,
    engine_memory,
    gathering,
    host_memory,
    learner_memory,
    micro_batches,
    traffic,
    trained,
)
from gnomon.analysis.planner.search import BestLayout, best_layout
from gnomon.training.notes import many

# Parts of gnomon that would not carry a plan, each with the number at which the part breaks.

_MUCH = 0.2
_MOST_ROLLOUTS = 1_000_000
_HALF = 0.5


def limits(place: Deployment, found: BestLayout) -> tuple[str, ...]:
    """Return one sentence for each part that breaks or takes much of a step."""
    parts = (_saving, _weights, _undoing, _driving, _rollouts, _publishing, _ring, _experts, _waiting)
    return tuple(said for part in parts for said in part(place, found))


def _saving(place: Deployment, found: BestLayout) -> Iterator[str]:
    needed, room = host_memory(place, found.layout)["saving"], place.hardware.host_memory
    held = trained(place.shape, place.job) / place.shape.parameters
    each = 12 * held * min(1.0, place.hardware.node / found.layout.learners)
    each += place.job.item if found.layout.learners == 1 else 0
    if needed > _MUCH * room:
        yield (
            f"Saving copies a node's shares of the state in its memory: {size(needed)} of {size(room)}; it breaks at "
            f"{room / each / 1e9:.0f} billion parameters{', trained as here' if place.job.rank else ''}."
        )


def _weights(place: Deployment, found: BestLayout) -> Iterator[str]:
    needed, room = host_memory(place, found.layout)["published weights"], place.hardware.host_memory
    if needed > _MUCH * room:
        yield (
            f"Every node of engines holds published weights in memory, two versions at a time: {size(needed)} of "
            f"{size(room)}."
        )


def _undoing(place: Deployment, found: BestLayout) -> Iterator[str]:
    needed, room = host_memory(place, found.layout)["a step that is undone"], place.hardware.host_memory
    if needed > _MUCH * room:
        each = min(found.layout.learners, place.hardware.node)
        copying = needed / each / (place.hardware.host_link * place.reached.links)
        yield (
            "Before a step of several updates or with a critic, each learner copies its share of the state, so that "
            f"the step can be undone: {size(needed)} of the {size(room)} in the memory of one node, {seconds(copying)} "
            "a step; algorithm.updates of 1, or adapters, avoid the copy."
        )


def _driving(place: Deployment, found: BestLayout) -> Iterator[str]:
    share = found.stages.driving / found.flow.step_seconds
    if share > _MUCH:
        rate = 1 / place.reached.driver_token
        yield (
            f"The run's own process takes {place.reached.driver_token * 1e6:.2g} us for each token of an answer "
            f"(collate, advantages, records), one after the other: {seconds(found.stages.driving)} a step. The process "
            f"handles at most {rate:,.0f} tokens a second, whatever the number of GPUs; records.rollouts = false "
            "saves some of this time."
        )


def _rollouts(place: Deployment, found: BestLayout) -> Iterator[str]:
    needed, room = host_memory(place, found.layout)["rollouts on their way"], place.hardware.host_memory
    if needed > _MUCH * room:
        yield f"Rollouts on their way are Python objects in the run's own process: {size(needed)} of {size(room)}."
    if place.job.rows > _MOST_ROLLOUTS:
        yield f"rollouts_per_step is {_MOST_ROLLOUTS:,} at most."


def _publishing(place: Deployment, found: BestLayout) -> Iterator[str]:
    if found.stages.publishing <= _MUCH * found.flow.step_seconds:
        return
    taken, quicker = seconds(found.stages.publishing), seconds(found.stages.by_nccl)
    if place.job.is_broadcast:
        yield f"No engine answers while weights are sent from device to device: {taken} a step."
    elif broadcast_refused(place.shape, place.job):
        yield (
            f"Weights travel through the machines' memory and TCP: {taken} a step; from device to device by NCCL it "
            f"would be {quicker}, which gnomon does not do with {broadcast_refused(place.shape, place.job)}."
        )
    else:
        yield (
            f"Weights travel through the machines' memory and TCP: {taken} a step; from device to device by NCCL "
            f"(cluster.transfer = 'nccl', not yet tried on GPUs) {quicker}."
        )


def _ring(place: Deployment, found: BestLayout) -> Iterator[str]:
    devices = found.layout.learners
    waiting = gathering(place, devices, 0.0, 1)
    moving = gathering(place, devices, place.shape.layer * place.job.item, 0)
    if devices > place.hardware.node and waiting > _HALF * moving:
        yield (
            f"The learner is one ring of {devices} (no hybrid sharding): a layer is gathered in {moving * 1e3:.1f} "
            f"ms, and {waiting * 1e3:.1f} ms more pass while the first byte goes round. Parts in a node and copies "
            "between nodes would not wait for it."
        )


def _experts(place: Deployment, found: BestLayout) -> Iterator[str]:
    if not place.shape.experts:
        return
    shape = place.shape
    yield (
        f"The learner has no expert parallelism: for {shape.active_parameters / 1e9:.0f} billion parameters that a "
        f"token meets, {shape.parameters / 1e9:.0f} billion are gathered, three times a pass; a layer takes "
        f"{size(shape.layer * place.job.item)} on every device while it computes, and communicating takes "
        f"{found.stages.communicating / max(found.stages.computing, 1e-9):.0%} of the time of computing."
    )


def _waiting(place: Deployment, found: BestLayout) -> Iterator[str]:
    if place.job.staleness == 0 and not place.is_shared:
        yield (
            "Learners and engines are different devices, and with max_staleness = 0 one side always waits: "
            f"{1 - found.flow.answering:.0%} of the time engines have nothing to do, {1 - found.flow.learning:.0%} "
            "learners. With engine.sleeps = true each engine shares the GPU of a learner, and they work in turn."
        )


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
            "learner_bytes": learner_memory(place, layout).parts,
            "engine_bytes": engine_memory(place, layout).parts,
            "host_bytes": host_memory(place, layout),
            "traffic_bytes": asdict(traffic(place, layout)),
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
        yield from _layout(self.place, self.found)
        yield from _memory(self.place, self.found)
        yield from _seconds(self.place, self.found)
        yield f"Bottleneck: {self.bottleneck}."
        yield f"Set: {' '.join(self.settings)}"
        yield from self.advice
        if self.limits:
            yield "What gnomon's present parts cannot carry, or barely carry:"
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
        tuple(_advice(place, found)),
        limits(place, found),
    )


def bottleneck(place: Deployment, found: BestLayout) -> str:
    """Return the stage that limits the throughput."""
    stages, flow = found.stages, found.flow
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
    if flow.learning > 1 - _IDLE:
        return f"learning, most of all {learning}"
    if flow.answering > 1 - _IDLE and flow.learning < 1 - 2 * _IDLE:
        return "answering"
    if stages.answering > 2 * stages.flowing and flow.learning < 1 - _IDLE:
        return LONGEST
    return f"both sides alike; of learning most of all {learning}"


def _layout(place: Deployment, found: BestLayout) -> Iterator[str]:
    layout, job, hardware = found.layout, place.job, place.hardware
    answering = layout.engines * layout.parts
    left = place.devices - layout.learners - answering
    idle = f", {left} {'is' if left == 1 else 'are'} idle" if left else ""
    if place.is_shared:
        idle = ", the same in turn"
    mixture = f", {place.shape.active_parameters / 1e9:.0f} of them for a token" if place.shape.experts else ""
    yield (
        f"{place.shape.name} ({count(place.shape.parameters)} parameters{mixture}) on {place.devices} "
        f"{hardware.name} in {many(hardware.nodes(place.devices), 'node')}: {layout.learners} "
        f"{'learns' if layout.learners == 1 else 'learn'}, {answering} {'answers' if answering == 1 else 'answer'} as "
        f"{many(layout.engines, 'engine')} of {layout.parts}{idle}; "
        f"{many(job.graders, 'process grades', 'processes grade')}, on processors."
    )
    yield (
        f"A step: {many(job.prompts, 'prompt')} of {job.prompt:.0f} tokens, {many(job.generations, 'answer')} each of "
        f"{job.answers.mean:.3g} on average and {job.answers.longest} at most; {count(job.answered)} tokens. "
        + ("Synchronous." if job.staleness == 0 else f"At most {job.staleness} steps old, {job.slack} of slack.")
    )


def _memory(place: Deployment, found: BestLayout) -> Iterator[str]:
    layout = found.layout
    yield f"Learner: {_held(learner_memory(place, layout))}."
    yield (
        f"Engine: {_held(engine_memory(place, layout))}; {concurrency(place, layout)} answers at once of "
        f"{place.job.concurrent} asked for."
    )
    host = {name: size for name, size in host_memory(place, layout).items() if size >= GIGABYTE}
    if host:
        yield f"A node's memory, of {place.hardware.host_memory / GIGABYTE:,.0f} GB: {_list(host)}."
    moved = traffic(place, layout)
    yield (
        f"A step moves {size(moved.gathered)} of weights and {size(moved.reduced)} of gradients into each learner in "
        f"{many(micro_batches(place, layout), 'pass', 'passes')} of {layout.micro:,} tokens, publishes "
        f"{size(moved.published)}, and brings {size(moved.answers)} of answers and {size(moved.batch)} of batch "
        "through the run's own process."
    )


def _seconds(place: Deployment, found: BestLayout) -> Iterator[str]:
    stages, flow = found.stages, found.flow
    yield (
        f"Each stage by itself: answering {seconds(stages.answering)} ({seconds(stages.flowing)} by engines that are "
        f"always full), grading one prompt's answers {seconds(stages.grading)}, the run's own process "
        f"{seconds(stages.driving)}, updating {seconds(stages.updating)} (computing {seconds(stages.computing)}, "
        f"communicating {seconds(stages.communicating)}), publishing {seconds(stages.publishing)} "
        f"({'by NCCL' if place.job.is_broadcast else f'by NCCL {seconds(stages.by_nccl)}'})."
    )
    yield (
        f"Together, simulated: {seconds(flow.step_seconds)} a step, {flow.tokens_per_second:,.0f} trained tokens a "
        f"second ({flow.tokens_per_second / place.devices:,.0f} a device). Engines work {flow.answering:.0%} of the "
        f"time, learners {flow.learning:.0%}; answers are {flow.staleness_mean:.2f} steps old on average, "
        f"{flow.staleness_max} at most."
    )


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


def _advice(place: Deployment, found: BestLayout) -> Iterator[str]:
    """Yield further suggestions."""
    job = place.job
    if job.staleness == 0 and not place.is_shared:
        yield "With max_staleness = 1 neither side waits for the other; answers are then one step older."
    if bottleneck(place, found) == LONGEST:
        yield (
            f"A step's last answer takes {seconds(found.stages.answering)}, and engines that were always full would "
            f"take {seconds(found.stages.flowing)}: allow more steps for an answer (max_staleness), ask for more "
            "answers a step, or use an algorithm without groups."
        )
    busy = _grading(place, found)
    if busy > job.graders / 2:
        yield (
            f"Grading keeps {busy:.1f} of {many(job.graders, 'process', 'processes')} busy all the time if an answer "
            f"takes {seconds(place.reached.grade)}; set cluster.graders times grading.workers to "
            f"{math.ceil(2 * busy)} or more."
        )


def _grading(place: Deployment, found: BestLayout) -> float:
    """Return the number of processes that grading keeps busy."""
    return place.job.rows * place.reached.grade / found.flow.step_seconds


def _assumed(place: Deployment) -> Iterator[str]:
    by_kind = defaultdict[str, list[str]](list)
    for name, value in asdict(place.reached).items():
        by_kind[SOURCES[name][0]].append(f"{name} {value:g}")
    yield from (f"  {kind}: {', '.join(names)}" for kind, names in by_kind.items())


def _held(held: Held) -> str:
    named = {name: size for name, size in held.parts.items() if size >= GIGABYTE / 20}
    return f"{held.total / GIGABYTE:.1f} GB of {held.room / GIGABYTE:.0f} a device: {_list(named)}"


def _list(sizes: dict[str, float]) -> str:
    ordered = sorted(sizes.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {size / GIGABYTE:.3g}" for name, size in ordered)
