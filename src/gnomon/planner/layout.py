"""Who computes where, and what each device then holds."""

from dataclasses import dataclass

from gnomon.planner.deployment import Deployment
from gnomon.planner.job import PlannedJob
from gnomon.planner.shapes import ModelShape

GIGABYTE = 1e9
_LOGITS_SHARE, _LOGITS_COPIES, _LOGITS_TOKENS = 64, 4, 8192


@dataclass(frozen=True)
class Layout:
    """learners: devices that learn, one process each. engines: that answer, each of ``parts`` devices (tensor
    parallelism). micro: tokens of a pass. is_recomputed: layers are computed again in the backward pass.
    """

    learners: int
    engines: int
    parts: int = 1
    micro: int = 16_384
    is_recomputed: bool = True


@dataclass(frozen=True)
class Held:
    """Bytes on one device, by what they are for. room: that may be planned."""

    parts: dict[str, float]
    room: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.total <= self.room


def trained(shape: ModelShape, job: PlannedJob) -> int:
    """Return the weights that have gradients."""
    return shape.adapters(job.rank) if job.rank else shape.parameters


def learner_memory(place: Deployment, layout: Layout) -> Held:
    """Return what a device that learns holds at most.

    Parts: of what is trained float32 masters, gradients and two moments, 16 bytes a weight; of what is frozen the
    numbers that compute; divided by the devices. Constants: the layer that is gathered and the next one, with the
    gradient of one (in the computing precision and in float32), and what is outside of the layers (table, head), which
    is gathered through the whole pass; activations; logits in float32, a few copies.
    """
    shape, job, hardware, n = place.shape, place.job, place.hardware, layout.learners
    own, item = trained(shape, job), job.item
    frozen = shape.parameters * item if job.rank else 0
    outside = shape.embedding * (1 if shape.is_tied else 2)
    parts = {
        "weights": (4 * own + frozen) / n,
        "gradients": 4 * own / n,
        "moments": 8 * own / n,
        "reference": shape.parameters * item / n if job.has_reference else 0.0,
        "critic": shape.parameters * 16 / n if job.has_critic else 0.0,
        "average": own * (item + (4 if item < 4 else 0)) / n if job.has_average else 0.0,
        "gathered": _gathered(shape.layer, outside, item, bool(job.rank)) if n > 1 or job.is_offloaded else 0.0,
        "activations": layout.micro * kept_bytes(shape, item, layout.is_recomputed),
        "logits": _logits(place),
        "libraries": place.reached.libraries,
    }
    if job.is_offloaded:
        parts |= dict.fromkeys(("weights", "gradients", "moments", "reference", "critic", "average"), 0.0)
    return Held(parts, hardware.memory * place.reached.memory)


def kept_bytes(shape: ModelShape, item: int, is_recomputed: bool) -> float:
    """Return what a token's forward pass keeps: every layer's activations, or every layer's input and one layer's."""
    if is_recomputed:
        return item * (shape.layers * shape.width + shape.kept)
    return item * shape.layers * shape.kept


def engine_memory(place: Deployment, layout: Layout) -> Held:
    """Return what a device of an engine holds, with keys and values of as many answers as it decodes at once."""
    shape, job, k = place.shape, place.job, layout.parts
    parts = {
        "weights": shape.parameters * job.item / k,
        "cache": concurrency(place, layout) * row_tokens(job) * shape.cache(k, job.item),
        "libraries": place.reached.libraries,
    }
    return Held(parts, place.hardware.memory * place.reached.memory)


def row_tokens(job: PlannedJob) -> float:
    """Return the tokens of a row's keys and values, on average while it is decoded."""
    return job.prompt + job.answers.mean / 2


def concurrency(place: Deployment, layout: Layout) -> int:
    """Return how many answers an engine decodes at once: as many as asked for, fewer where the cache has no room."""
    room = cache_room(place, layout.parts)
    row = row_tokens(place.job) * place.shape.cache(layout.parts, place.job.item)
    return max(0, min(place.job.concurrent, int(room / row)))


def cache_room(place: Deployment, parts: int) -> float:
    """Return the bytes of each of ``parts`` devices that are left for keys and values; below 0 where none are."""
    usable = place.hardware.memory * place.reached.memory - place.reached.libraries
    return usable - place.shape.parameters * place.job.item / parts


def host_memory(place: Deployment, layout: Layout) -> dict[str, float]:
    """Return bytes in the memory of one node, by what they are for.

    Of the node that saves: everything, gathered. Of each node of engines: the weights in its object store, the version
    before them too. Of the node that copies a step's state in case that it is undone. Of each node of learners: what is
    offloaded. Of the run's own: rollouts that are on their way.
    """
    shape, job = place.shape, place.job
    own, per_node = trained(shape, job), min(layout.learners, place.hardware.node) / layout.learners
    return {
        "saving": 12.0 * own + shape.parameters * job.item,
        "published weights": 0.0 if job.is_broadcast else 2.0 * shape.parameters * job.item,
        "a step that is undone": 12.0 * own if job.is_undone else 0.0,
        "offloaded": 16.0 * own * per_node if job.is_offloaded else 0.0,
        "rollouts on their way": job.answered * (job.staleness + 1 - job.slack) * ROLLOUT_BYTES,
    }


ROLLOUT_BYTES = 113
"""Of a token of an answer in the run's own process: its id, two log-probabilities, its mask, its text; Python objects
(measured: experiments/capacity)."""


def _gathered(layer: int, outside: int, item: int, is_frozen: bool) -> float:
    # Two layers whole, and of one its gradient in the computing precision and in float32 on its way to be summed.
    gradient = 0 if is_frozen else item + 4
    return layer * (2 * item + gradient) + outside * (item + gradient)


def _logits(place: Deployment) -> float:
    """Return the bytes of a chunk of logits and its copies; a chunk is a 64th of the memory (`models.head`)."""
    row = 4.0 * place.shape.vocabulary
    return _LOGITS_COPIES * min(_LOGITS_TOKENS * row, place.hardware.memory / _LOGITS_SHARE)
