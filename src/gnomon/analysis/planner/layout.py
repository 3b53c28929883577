"""Which devices learn and which answer, and the memory that each device needs."""

from dataclasses import dataclass

from gnomon.analysis.planner.deployment import Deployment
from gnomon.analysis.planner.job import PlannedJob
from gnomon.analysis.planner.shapes import ModelShape
from gnomon.models.quantized import AT_ONCE_GPU, BITS

GIGABYTE = 1e9
_LOGITS_SHARE, _LOGITS_COPIES, _LOGITS_TOKENS = 64, 4, 8192


@dataclass(frozen=True)
class Layout:
    """A division of the devices.

    Attributes:
        learners: Devices that learn, one process each.
        engines: Engines, each of ``parts`` devices (tensor parallelism).
        micro: Tokens of a learner's pass.
        is_recomputed: Whether the backward pass computes layers again (gradient checkpointing).
    """

    learners: int
    engines: int
    parts: int = 1
    micro: int = 16_384
    is_recomputed: bool = True


@dataclass(frozen=True)
class Held:
    """Bytes on one device by purpose.

    Attributes:
        room: Bytes that may be planned.
    """

    parts: dict[str, float]
    room: float

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the bytes fit into the device."""
        return self.total <= self.room


def trained(shape: ModelShape, job: PlannedJob) -> int:
    """Return the number of weights with gradients."""
    return shape.adapters(job.rank) if job.rank else shape.parameters


def learner_memory(place: Deployment, layout: Layout) -> Held:
    """Return the peak memory of a learner's device.

    Sharded over the learners: float32 masters, gradients and two moments, 16 bytes for each trained weight (10 with
    moments in 8 bits); frozen weights as they are stored. Not sharded: the gathered layer and the next one, one layer's
    gradient in the computing precision and in float32, embedding and head (gathered during the whole pass),
    activations, and a few copies of float32 logits.
    """
    shape, job, hardware, n = place.shape, place.job, place.hardware, layout.learners
    own, item = trained(shape, job), job.item
    frozen = stored_bytes(shape, job) if job.rank else 0
    outside = shape.embedding * (1 if shape.is_tied else 2)
    parts = {
        "weights": (4 * own + frozen) / n,
        "gradients": 4 * own / n,
        "moments": job.moment_bytes * own / n,
        "reference": shape.parameters * item / n if job.has_reference else 0.0,
        "critic": shape.parameters * (8 + job.moment_bytes) / n if job.has_critic else 0.0,
        "average": own * (item + (4 if item < 4 else 0)) / n if job.has_average else 0.0,
        "gathered": _gathered(shape.layer, outside, item, bool(job.rank)) if n > 1 or job.is_offloaded else 0.0,
        "dequantized": _dequantized_bytes(shape, job),
        "activations": layout.micro * kept_bytes(shape, job, layout.is_recomputed),
        # A chunk of logits and its copies; a chunk is at most a 64th of the memory (`models.head`).
        "logits": _LOGITS_COPIES * min(_LOGITS_TOKENS * 4.0 * shape.vocabulary, hardware.memory / _LOGITS_SHARE),
        "libraries": place.libraries,
    }
    if place.is_shared and not job.is_sleeping:
        # One process computes with a rounded copy of its masters, or its engine has one of offloaded masters.
        computing = shape.parameters if job.is_offloaded else own if item < 4 and not job.rank else 0
        parts["weights that compute"] = float(computing * item)
    if job.is_offloaded:
        parts |= dict.fromkeys(("weights", "gradients", "moments", "reference", "critic", "average"), 0.0)
    return Held(parts, hardware.memory * place.reached.memory)


def stored_bytes(shape: ModelShape, job: PlannedJob) -> float:
    """Return the bytes of the weights that compute: layers as `lora.base` stores them, the rest in full precision."""
    each = job.item if job.base is None else BITS[job.base] / 8
    return shape.body * each + (shape.parameters - shape.body) * job.item


def _dequantized_bytes(shape: ModelShape, job: PlannedJob) -> float:
    """Return the bytes of the largest matrix while it is dequantized, with what `models.quantized` makes on the way."""
    if job.base is None:
        return 0.0
    largest = shape.width * max(shape.inner, shape.heads * shape.head)
    return largest * job.item + (min(largest, AT_ONCE_GPU) * 6 if job.base == "nf4" else largest * 4)


def kept_bytes(shape: ModelShape, job: PlannedJob, is_recomputed: bool) -> float:
    """Return the bytes that a token's forward pass keeps.

    With recomputation these are every layer's input and one layer's activations, otherwise all activations. Adapters
    are float32, and so is each input of one that they keep: in bfloat16 a dense layer of Qwen3's form keeps twice as
    much with them as without (counted in tests/analysis/planner/test_small_cards.py).
    """
    layer, item = float(job.item * shape.kept), job.item
    if job.rank and not shape.experts:
        asked, kept = shape.heads * shape.head, shape.kv_heads * shape.head
        width, inner, key = (28, 10, 8) if item < 4 else (16, 16, 12)
        layer = width * shape.width + inner * shape.inner + 12 * asked + key * kept + 28 * job.rank
    return item * shape.layers * shape.width + layer if is_recomputed else shape.layers * layer


def engine_memory(place: Deployment, layout: Layout) -> Held:
    """Return the memory of an engine's device, with the KV cache of all responses that the engine decodes at once."""
    shape, job, k = place.shape, place.job, layout.parts
    parts = {
        "weights and what is learned with" if place.is_shared else "weights": _resident_bytes(place, k),
        "cache": concurrency(place, layout) * row_tokens(job) * shape.cache(k, job.item),
        "libraries": place.libraries,
    }
    return Held(parts, place.hardware.memory * place.reached.memory)


def row_tokens(job: PlannedJob) -> float:
    """Return the mean tokens of a row's KV cache while the row is decoded."""
    return job.prompt + job.answers.mean / 2


def concurrency(place: Deployment, layout: Layout) -> int:
    """Return the responses that an engine decodes at once, fewer than requested if the KV cache is too small."""
    room = cache_room(place, layout.parts)
    row = row_tokens(place.job) * place.shape.cache(layout.parts, place.job.item)
    return max(0, min(place.job.concurrent, int(room / row)))


def cache_room(place: Deployment, parts: int) -> float:
    """Return the bytes for the KV cache on each of ``parts`` devices; negative if the weights do not fit."""
    usable = place.hardware.memory * place.reached.memory - place.libraries
    return usable - _resident_bytes(place, parts)


def _resident_bytes(place: Deployment, parts: int) -> float:
    """Return the bytes on each device of an engine beside the KV cache: its weights, or all that learning keeps."""
    own = place.shape.parameters * place.job.item / parts
    if place.is_shared:
        held = learner_memory(place, Layout(place.devices, 1, micro=0)).parts
        kept = sum(held.get(name, 0.0) for name in _KEPT_WHILE_ANSWERING)
        return kept + own if place.job.is_sleeping else kept
    return own


_KEPT_WHILE_ANSWERING = (
    "weights", "gradients", "moments", "reference", "critic", "average", "weights that compute",
)  # fmt: skip
"""What a learner keeps on its device while the engine of the same device answers."""


def host_memory(place: Deployment, layout: Layout) -> dict[str, float]:
    """Return bytes in the memory of one node, by purpose.

    A saving node copies its shards of weights and moments to write them; a learner of one process copies the model,
    too, which several write tensor by tensor. A node of engines has two versions of the weights in its object store. A
    node of learners holds a copy of its shards of masters and moments, in case a step is undone, and offloaded shards.
    The run's own node holds rollouts that wait for a step.
    """
    shape, job = place.shape, place.job
    own, per_node = trained(shape, job), min(layout.learners, place.hardware.node) / layout.learners
    return {
        "saving": 12.0 * own * per_node + (shape.parameters * job.item if layout.learners == 1 else 0.0),
        "published weights": 0.0
        if job.is_broadcast or (place.is_shared and not job.is_sleeping)
        else 2.0 * shape.parameters * job.item,
        "a step that is undone": 12.0 * own * per_node if job.is_undone else 0.0,
        "offloaded": 16.0 * own * per_node if job.is_offloaded else 0.0,
        "rollouts on their way": job.answered * (job.staleness + 1 - job.slack) * ROLLOUT_BYTES,
    }


ROLLOUT_BYTES = 113
"""Bytes of a response's token in the run's own process: id, two log-probabilities, mask and text as Python objects
(measured in experiments/capacity)."""


def _gathered(layer: int, outside: int, item: int, is_frozen: bool) -> float:
    # Two whole layers, and one layer's gradient in the computing precision and in float32, which all-reduce sums.
    gradient = 0 if is_frozen else item + 4
    return layer * (2 * item + gradient) + outside * (item + gradient)
