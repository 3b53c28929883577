"""Parts of gnomon that would not carry a plan, each with the number at which the part breaks."""

from collections.abc import Iterator

from gnomon.analysis.planner.deployment import Deployment, broadcast_refused
from gnomon.analysis.planner.layout import host_memory, trained
from gnomon.analysis.planner.quantities import seconds, size
from gnomon.analysis.planner.search import BestLayout
from gnomon.analysis.planner.traffic import gathering

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
