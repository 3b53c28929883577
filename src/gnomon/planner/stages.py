"""Seconds of the stages of a step: products over rates, bytes over bandwidths, nothing else."""

import math
from dataclasses import dataclass

from gnomon.planner.deployment import Deployment
from gnomon.planner.layout import Layout, concurrency, row_tokens
from gnomon.planner.shapes import ModelShape
from gnomon.planner.traffic import communicating, publishing

_PANELS = 128


@dataclass(frozen=True)
class UpdatePace:
    """How fast an engine of ``parts`` devices decodes.

    fixed(rows): seconds of a step whatever was said before. cached: more of them for each token whose keys and values
    are read. prompt: seconds of a prompt.
    """

    shape: ModelShape
    place: Deployment
    parts: int

    def fixed(self, rows: float) -> float:
        """Return the seconds of a step of ``rows`` answers, without their keys and values.

        The weights are read, each row is multiplied with those that it meets, and with tensor parallelism the devices
        sum twice a layer. Reading and multiplying are added: they are different kernels, and one waits for the other.
        """
        reached, hardware, item = self.place.reached, self.place.hardware, self.place.job.item
        read = self.shape.read(rows) * item / (self.parts * hardware.bandwidth * reached.reading)
        operations = 2 * (self.shape.active + self.shape.embedding) * rows
        summed = 2 * self.shape.layers * (reached.exchange + self._summing(rows)) if self.parts > 1 else 0.0
        return reached.decode_step + read + operations / (self.parts * self._products()) + summed

    @property
    def cached(self) -> float:
        """Seconds that one more token of context costs in a step."""
        reached, hardware, shape = self.place.reached, self.place.hardware, self.shape
        read = shape.cache(self.parts, self.place.job.item) / (hardware.bandwidth * reached.reading)
        return read + 4 * shape.layers * shape.heads * shape.head / (self.parts * self._products())

    @property
    def prompt(self) -> float:
        """Seconds of computing one prompt, once for all of its answers."""
        job = self.place.job
        operations = 2 * self.shape.active * job.prompt + _attention(self.shape, job.prompt**2 / 2)
        return operations / (self.parts * self._products())

    def step(self, rows: float, context: float) -> float:
        """Return the seconds of one step of ``rows`` answers, each of ``context`` tokens so far."""
        return self.fixed(rows) + self.cached * rows * context

    def _products(self) -> float:
        mixture = self.place.reached.mixture if self.shape.experts else 1.0
        return self.place.hardware.operations * self.place.reached.products * mixture

    def _summing(self, rows: float) -> float:
        size = rows * self.shape.width * self.place.job.item
        return 2 * size * (self.parts - 1) / self.parts / (self.place.hardware.link * self.place.reached.links)


def pace_of(place: Deployment, layout: Layout) -> UpdatePace:
    """Return how fast the layout's engines decode."""
    return UpdatePace(place.shape, place, layout.parts)


def update_seconds(place: Deployment, layout: Layout) -> tuple[float, float]:
    """Return seconds of computing and of communicating of a step's updates and scores.

    A forward pass multiplies each token with every weight that it meets, twice an operation; a backward pass takes two
    of them, or one where the weights are frozen; layers that are computed again one more.
    """
    job, shape = place.job, place.shape
    body = 2 * shape.active * job.computed + _attention(shape, job.pairs)
    head = 2 * shape.embedding * job.answered
    backward = 1 if job.rank else 2
    trained = body * (1 + backward + layout.is_recomputed) + head * (1 + backward)
    # A critic of its own makes the same passes as the policy, without the head.
    whole = job.epochs * (trained + (body * (3 + layout.is_recomputed) if job.has_critic else 0))
    whole += job.scored * (body + head)
    mixture = place.reached.mixture if shape.experts else 1.0
    rate = layout.learners * place.hardware.operations * place.reached.training * mixture
    moved = communicating(place, layout)
    if job.is_offloaded:
        moved += 32.0 * shape.parameters / layout.learners / (place.hardware.host_link * place.reached.links)
    return whole / rate, moved


@dataclass(frozen=True)
class Stages:
    """Seconds of one step, each stage by itself. answering: until the last of a step's answers, if nothing else is
    asked. flowing: that a step's answers take of engines that are always full. updating: computing and what of
    communicating it cannot hide. by_nccl: publishing, where weights go from device to device.
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
        """Seconds from a step's last grade until engines have its weights."""
        return self.driving + self.updating + self.publishing

    def synchronous(self) -> float:
        """Return the seconds of a step in which everyone waits for everyone."""
        return self.answering + self.grading + self.learning

    def overlapped(self, depth: int) -> float:
        """Return about how long a step takes when answers may be ``depth`` steps on their way: as the slowest of both
        sides and of the longest answers, which have that many steps to come.
        """
        return max(self.flowing, self.learning, self.answering / depth)


def stages(place: Deployment, layout: Layout) -> Stages:
    """Return the seconds of every stage."""
    computing, moving = update_seconds(place, layout)
    published = publishing(place, layout)
    hidden = place.reached.hidden
    return Stages(
        answering=answering(place, layout),
        flowing=flowing(place, layout),
        grading=place.reached.grade * math.ceil(place.job.generations / place.job.graders),
        updating=max(computing, moving) + (1 - hidden) * min(computing, moving),
        computing=computing,
        communicating=moving,
        publishing=published["nccl" if place.job.is_broadcast else "store"],
        by_nccl=published["nccl"],
        driving=place.job.answered * place.reached.driver_token,
    )


def flowing(place: Deployment, layout: Layout) -> float:
    """Return how long engines that are kept full take for as many tokens as a step has."""
    job, pace = place.job, pace_of(place, layout)
    ahead = job.staleness + 1 - job.slack
    rows = min(concurrency(place, layout), ahead * job.rows / layout.engines)
    if rows <= 0:
        return math.inf
    drawn = pace.step(rows, row_tokens(job)) * job.answered / (rows * layout.engines)
    return drawn + pace.prompt * job.prompts / layout.engines


def answering(place: Deployment, layout: Layout) -> float:
    """Return how long engines take that are asked for one step's answers and nothing else.

    The busiest has ceil(prompts / engines) prompts. While it has more answers than it decodes at once the rate is that
    of a full engine; then rows end one after the other, and the last is alone.
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
    """Return operations of a forward pass on pairs of tokens: scores and sums, in all layers."""
    return 4.0 * shape.layers * shape.heads * shape.head * pairs
