"""Seconds of the stages of a step: operations over rates and bytes over bandwidths."""

import math
from dataclasses import dataclass
from functools import cached_property

from gnomon.analysis.planner.deployment import Deployment
from gnomon.analysis.planner.layout import Layout, concurrency, row_tokens
from gnomon.analysis.planner.shapes import ModelShape
from gnomon.analysis.planner.traffic import communicating, micro_batches, publishing
from gnomon.models.quantized import TRAFFIC

_PANELS = 128


@dataclass(frozen=True)
class UpdatePace:
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
        read = self.shape.read(rows) * item / (self.parts * hardware.bandwidth * reached.reading)
        operations = 2 * (self.shape.active + self.shape.embedding) * rows
        if self.place.is_shared and not self.place.job.is_sleeping:
            read += dequantizing(self.place)
        summed = 2 * self.shape.layers * (reached.exchange + self._summing(rows)) if self.parts > 1 else 0.0
        return reached.decode_step + read + operations / (self.parts * self._products()) + summed

    @cached_property
    def cached(self) -> float:
        """Seconds that one more token of context adds to a step."""
        reached, hardware, shape = self.place.reached, self.place.hardware, self.shape
        read = shape.cache(self.parts, self.place.job.item) / (hardware.bandwidth * reached.reading)
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
        return 2 * size * (self.parts - 1) / self.parts / (self.place.hardware.link * self.place.reached.links)


def pace_of(place: Deployment, layout: Layout) -> UpdatePace:
    """Return the decoding speed of the layout's engines."""
    return UpdatePace(place.shape, place, layout.parts)


def update_seconds(place: Deployment, layout: Layout) -> tuple[float, float]:
    """Return seconds of computing and seconds of communicating of a step's updates and scores.

    A forward pass takes two operations for each token and each weight that the token uses. A backward pass takes twice
    that, or once if the weights are frozen, and once more if layers are computed again.
    """
    job, shape = place.job, place.shape
    body = 2 * shape.active * job.computed + _attention(shape, job.pairs)
    head = 2 * shape.embedding * job.answered
    backward = 1 if job.rank else 2
    trained = body * (1 + backward + layout.is_recomputed) + head * (1 + backward)
    # A separate critic makes the same passes as the policy, without the head.
    whole = job.epochs * (trained + (body * (3 + layout.is_recomputed) if job.has_critic else 0))
    whole += job.scored * (body + head)
    mixture = place.reached.mixture if shape.experts else 1.0
    rate = layout.learners * place.hardware.operations * place.reached.training * mixture
    scored = job.scored * math.ceil(job.computed / (layout.learners * layout.micro))
    again = micro_batches(place, layout) * (2 + layout.is_recomputed) + scored
    moved = communicating(place, layout)
    if job.is_offloaded:
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
        updating=max(computing, moving) + (1 - hidden) * min(computing, moving),
        computing=computing,
        communicating=moving,
        publishing=0.0 if is_same else published["nccl" if place.job.is_broadcast else "store"],
        by_nccl=published["nccl"],
        driving=place.job.answered * place.reached.driver_token,
    )


def flowing(place: Deployment, layout: Layout) -> float:
    """Return the seconds that full engines need for a step's tokens."""
    job, pace = place.job, pace_of(place, layout)
    ahead = job.staleness + 1 - job.slack
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
    queued = (rows - together) * job.answers.mean / together * pace.step(together, row_tokens(job))
    longest = job.answers.longest_of(job.rows)
    step = longest / _PANELS
    seconds = 0.0
    for n in range(_PANELS):
        tokens = (n + 0.5) * step
        alive = max(1.0, together * job.answers.alive(tokens))
        seconds += step * pace.step(alive, job.prompt + tokens)
    return prompts * pace.prompt + queued + seconds


def _attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of a forward pass on pairs of tokens, in all layers."""
    return 4.0 * shape.layers * shape.heads * shape.head * pairs
