"""Which devices learn and which answer: memory, traffic and the seconds of each stage, as arithmetic."""

import math
from dataclasses import dataclass
from functools import cached_property

from gnomon.analysis.planner.deployment import Deployment, PlannedJob
from gnomon.analysis.planner.shapes import ModelShape
from gnomon.models.quantized import AT_ONCE_GPU, BITS, TRAFFIC

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
    # Only trained weights have masters, gradients and moments; frozen ones are stored once.
    own, item = trained(shape, job), job.item
    frozen = stored_bytes(shape, job) if job.rank else 0
    # Embedding and head, which are one matrix where they are tied.
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
    # What is offloaded lies in the machine's memory, where `host_memory` counts it.
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
        # Bytes for each number of the model's width, of the inner width and of keys and values that autograd keeps.
        width, inner, key = (28, 10, 8) if item < 4 else (16, 16, 12)
        layer = width * shape.width + inner * shape.inner + 12 * asked + key * kept + 28 * job.rank
    # With recomputation one layer at a time has its activations, while every layer's input stays.
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
    # Rows are at all lengths at once, so the mean row decides how many fit.
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
        # With micro=0, since no pass is under way while the engine answers.
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
    # The share of all learners that live on one node.
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


# Bytes that travel in one step, and the seconds that they take.


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step.

    Attributes:
        gathered: Weights into each learner.
        reduced: Gradients into each learner.
        published: Weights or adapters, counted once.
        answers: Tokens and log-probabilities from engines to the run's process.
        batch: From the run's process to all learners together.
    """

    gathered: float
    reduced: float
    published: float
    answers: float
    batch: float


def traffic(place: Deployment, layout: Layout) -> Traffic:
    """Return the bytes of one step."""
    job, n = place.job, layout.learners
    share, passes = (n - 1) / n, micro_batches(place, layout)
    # Fully sharded: each pass gathers what the other n - 1 learners hold, once
    # forward and once backward, and each backward pass reduces float32 gradients.
    whole = place.shape.parameters * job.item
    return Traffic(
        gathered=share * whole * (2 * passes + scoring_passes(place, layout)),
        reduced=share * 4 * trained(place.shape, job) * passes,
        published=sent(place),
        answers=job.answered * 16,
        batch=job.rows * job.longest * _BATCH_BYTES * n,
    )


def sent(place: Deployment) -> float:
    """Return the bytes of one publication: float32 adapters, or all weights if there are experts (`models.lora`)."""
    shape, job = place.shape, place.job
    is_alone = job.rank > 0 and not shape.experts
    return float(4 * shape.adapters(job.rank) if is_alone else shape.parameters * job.item)


_BATCH_BYTES = 40
"""Bytes of one position of a padded batch: a token of 8 bytes and eight numbers of 4 bytes."""


def micro_batches(place: Deployment, layout: Layout) -> int:
    """Return the passes of the busiest learner in a step, forward and backward."""
    job = place.job
    # A minibatch is divided among the learners, and its share is cut into passes of `micro` tokens.
    each = job.computed / (job.minibatches * layout.learners)
    return job.epochs * job.minibatches * max(1, math.ceil(each / layout.micro))


def scoring_passes(place: Deployment, layout: Layout) -> int:
    """Return the forward passes of each learner in a step that compute log-probabilities alone."""
    return place.job.scored * math.ceil(place.job.computed / (layout.learners * layout.micro))


def gathering(place: Deployment, devices: int, size: float, pieces: int) -> float:
    """Return seconds until each of ``devices`` has received ``size`` bytes.

    Size over rate, and for each of ``pieces`` a ring's n - 1 steps, of which one per further node crosses the network.
    """
    if devices == 1:
        return 0.0
    hardware, reached = place.hardware, place.reached
    nodes = hardware.nodes(devices)
    # Small pieces cost the latency of the ring, whatever their size.
    ring = (devices - nodes) * reached.hop_inside + (nodes - 1) * reached.hop_between
    return size / (hardware.between(devices) * reached.links) + pieces * ring


def communicating(place: Deployment, layout: Layout) -> float:
    """Return the seconds of all gathers and reductions of a step's updates and scores."""
    moved, layers = traffic(place, layout), place.shape.layers + 1
    pieces = layers * (3 * micro_batches(place, layout) + scoring_passes(place, layout))
    return gathering(place, layout.learners, moved.gathered + moved.reduced, pieces)


def publishing(place: Deployment, layout: Layout) -> dict[str, float]:
    """Return the seconds of a weight sync, through the object store and by NCCL.

    Both ways gather the weights first. Object store: each learner copies its share to its machine's memory and into the
    store; each node of engines fetches everything, and nodes with the weights serve other nodes; each device loads its
    part. With adapters, only adapters are stored and fetched, and each node of engines merges them. NCCL: one device
    sends and all others receive.
    """
    hardware, reached, size = place.hardware, place.reached, place.shape.parameters * place.job.item
    moved = sent(place)
    # Adapters are merged into the weights on each node of engines; whole weights are only read.
    merged = size / reached.merging if moved < size else size / reached.store
    n, answering = layout.learners, layout.engines * layout.parts
    gathered = gathering(place, n, size, place.shape.layers + 1)
    sources, nodes = hardware.nodes(n), hardware.nodes(answering)
    is_one_node = hardware.nodes(n + answering) == 1
    # Device to host in parallel over the learners, then host to
    # store, which at most 4 processes of a machine do at full rate.
    put = moved / n / (hardware.host_link * reached.links) + moved / (min(n, _WRITERS * sources) * reached.store)
    # The nodes that have the weights double with each round: log2 rounds after the first.
    fetched = 0.0 if is_one_node else (1 + math.log2(max(1.0, nodes / sources))) * moved / reached.tcp
    taken = merged + size / (layout.parts * hardware.host_link * reached.links)
    rate = hardware.link if is_one_node else hardware.net
    return {"store": gathered + put + fetched + taken, "nccl": gathered + size / (rate * reached.broadcast)}


_WRITERS = 4
"""Processes of one machine that copy at full rate; more processes share the memory's bandwidth."""


# Seconds of the stages of a step: operations over rates and bytes over bandwidths.

_PANELS = 128


@dataclass(frozen=True)
class DecodingPace:
    """Decoding speed of an engine of ``parts`` devices."""

    shape: ModelShape
    place: Deployment
    parts: int

    def fixed(self, rows: float) -> float:
        """Return seconds of a decoding step of ``rows`` responses, without reading their KV cache.

        The step reads the weights, multiplies each row with the weights that the row uses, and with tensor parallelism
        makes two all-reduces per layer. Reading and multiplying are added because different kernels do them in turn.
        """
        reached, hardware, item = self.place.reached, self.place.hardware, self.place.job.item
        # Weights are read once for all rows of the step, which is why more rows decode faster together.
        read = self.shape.read(rows) * item / (self.parts * hardware.bandwidth * reached.reading)
        operations = 2 * (self.shape.active + self.shape.embedding) * rows
        if self.place.is_shared and not self.place.job.is_sleeping:
            # gnomon's own engine answers with the learner's quantized base; vLLM has weights of its own.
            read += dequantizing(self.place)
        summed = 2 * self.shape.layers * (reached.exchange + self._summing(rows)) if self.parts > 1 else 0.0
        return reached.decode_step + read + operations / (self.parts * self._products()) + summed

    @cached_property
    def cached(self) -> float:
        """Seconds that one more token of context adds to a step."""
        reached, hardware, shape = self.place.reached, self.place.hardware, self.shape
        read = shape.cache(self.parts, self.place.job.item) / (hardware.bandwidth * reached.reading)
        # Scores and weighted sum over one more key: two multiply-adds a head and dimension.
        return read + 4 * shape.layers * shape.heads * shape.head / (self.parts * self._products())

    @cached_property
    def prompt(self) -> float:
        """Seconds of computing one prompt, once for all its responses."""
        job = self.place.job
        operations = 2 * self.shape.active * job.prompt + _attention(self.shape, job.prompt**2 / 2)
        return operations / (self.parts * self._products())

    def step(self, rows: float, context: float) -> float:
        """Return seconds of one step of ``rows`` responses, each with ``context`` tokens so far."""
        return self.fixed(rows) + self.cached * rows * context

    def _products(self) -> float:
        mixture = self.place.reached.mixture if self.shape.experts else 1.0
        return self.place.hardware.operations * self.place.reached.products * mixture

    def _summing(self, rows: float) -> float:
        size = rows * self.shape.width * self.place.job.item
        # A ring all-reduce sends every byte twice but for one share.
        return 2 * size * (self.parts - 1) / self.parts / (self.place.hardware.link * self.place.reached.links)


def pace_of(place: Deployment, layout: Layout) -> DecodingPace:
    """Return the decoding speed of the layout's engines."""
    return DecodingPace(place.shape, place, layout.parts)


def update_seconds(place: Deployment, layout: Layout) -> tuple[float, float]:
    """Return seconds of computing and seconds of communicating of a step's updates and scores.

    A forward pass takes two operations for each token and each weight that the token uses. A backward pass takes twice
    that, or once if the weights are frozen, and once more if layers are computed again.
    """
    job, shape = place.job, place.shape
    # One forward pass; the head is applied to responses alone, since no loss reads a prompt's logits.
    body = 2 * shape.active * job.computed + _attention(shape, job.pairs)
    head = 2 * shape.embedding * job.answered
    # Frozen weights need the gradient of their input but none of their own.
    backward = 1 if job.rank else 2
    trained = body * (1 + backward + layout.is_recomputed) + head * (1 + backward)
    # A separate critic makes the same passes as the policy, without the head.
    whole = job.epochs * (trained + (body * (3 + layout.is_recomputed) if job.has_critic else 0))
    # Scoring passes: the proximal policy, the reference, values.
    whole += job.scored * (body + head)
    mixture = place.reached.mixture if shape.experts else 1.0
    rate = layout.learners * place.hardware.operations * place.reached.training * mixture
    again = micro_batches(place, layout) * (2 + layout.is_recomputed) + scoring_passes(place, layout)
    moved = communicating(place, layout)
    if job.is_offloaded:
        # Offloaded masters, gradients and moments of 16 bytes a weight travel to the device and back.
        moved += 32.0 * shape.parameters / layout.learners / (place.hardware.host_link * place.reached.links)
    return whole / rate + again * dequantizing(place), moved


def dequantizing(place: Deployment) -> float:
    """Return the seconds of dequantizing every layer once, by the bytes that PyTorch's operations move."""
    job = place.job
    moved = 0.0 if job.base is None else place.shape.body * (TRAFFIC[job.base] + job.item)
    return moved / (place.hardware.bandwidth * place.reached.reading)


@dataclass(frozen=True)
class Stages:
    """Seconds of one step's stages, each by itself.

    Attributes:
        answering: Until the last of a step's responses, if the engines have no other work.
        flowing: For a step's responses on engines that are always full.
        updating: Computing, and the communicating that does not overlap with it.
        by_nccl: Publishing from device to device.
        driving: Of the run's own process.
    """

    answering: float
    flowing: float
    grading: float
    updating: float
    computing: float
    communicating: float
    publishing: float
    by_nccl: float
    driving: float

    @property
    def learning(self) -> float:
        """Seconds from a step's last grade until engines have the step's weights."""
        return self.driving + self.updating + self.publishing

    def synchronous(self) -> float:
        """Return the seconds of a step in which all stages wait for each other."""
        return self.answering + self.grading + self.learning

    def taking_turns(self) -> float:
        """Return the seconds of a step ahead of the learner on its own devices: only grading overlaps with it."""
        return self.answering + max(self.grading, self.learning)

    def overlapped(self, depth: int) -> float:
        """Return the approximate seconds of a step if responses may take ``depth`` steps.

        The slowest of the engines, the learner, and the longest responses spread over ``depth`` steps decides.
        """
        return max(self.flowing, self.learning, self.answering / depth)


def stages(place: Deployment, layout: Layout) -> Stages:
    """Return the seconds of every stage."""
    computing, moving = update_seconds(place, layout)
    published, is_same = publishing(place, layout), place.is_shared and not place.job.is_sleeping
    hidden = place.reached.hidden
    return Stages(
        answering=answering(place, layout),
        flowing=flowing(place, layout),
        grading=place.reached.grade * math.ceil(place.job.generations / place.job.graders),
        # The longer of both decides, and of the shorter the part that does not overlap with it is added.
        updating=max(computing, moving) + (1 - hidden) * min(computing, moving),
        computing=computing,
        communicating=moving,
        # An engine on the learner's own weights needs no publication.
        publishing=0.0 if is_same else published["nccl" if place.job.is_broadcast else "store"],
        by_nccl=published["nccl"],
        driving=place.job.answered * place.reached.driver_token,
    )


def flowing(place: Deployment, layout: Layout) -> float:
    """Return the seconds that full engines need for a step's tokens."""
    job, pace = place.job, pace_of(place, layout)
    ahead = job.staleness + 1 - job.slack
    # No more rows than the scheduler lets be under way.
    rows = min(concurrency(place, layout), ahead * job.rows / layout.engines)
    if rows <= 0:
        return math.inf
    drawn = pace.step(rows, row_tokens(job)) * job.answered / (rows * layout.engines)
    return drawn + pace.prompt * job.prompts / layout.engines


def answering(place: Deployment, layout: Layout) -> float:
    """Return the seconds that engines need for one step's responses without other work.

    The busiest engine has ceil(prompts / engines) prompts. While more responses wait than the engine decodes at once,
    the rate is that of a full engine. Then rows end one after the other.
    """
    job, pace = place.job, pace_of(place, layout)
    prompts = -(-job.prompts // layout.engines)
    rows, most = prompts * job.generations, concurrency(place, layout)
    if most <= 0:
        return math.inf
    together = min(rows, most)
    # While rows wait, each that ends is replaced at once, so the engine stays full.
    queued = (rows - together) * job.answers.mean / together * pace.step(together, row_tokens(job))
    longest = job.answers.longest_of(job.rows)
    step = longest / _PANELS
    seconds = 0.0
    for n in range(_PANELS):
        tokens = (n + 0.5) * step
        # The tail: fewer and fewer rows share each step, until the longest is alone.
        alive = max(1.0, together * job.answers.alive(tokens))
        seconds += step * pace.step(alive, job.prompt + tokens)
    return prompts * pace.prompt + queued + seconds


def _attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of a forward pass on pairs of tokens, in all layers."""
    return 4.0 * shape.layers * shape.heads * shape.head * pairs
