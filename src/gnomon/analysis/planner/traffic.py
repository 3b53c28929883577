"""Bytes that travel in one step, and the seconds that they take."""

import math
from dataclasses import dataclass

from gnomon.analysis.planner.deployment import Deployment
from gnomon.analysis.planner.layout import Layout, trained


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
    share = (n - 1) / n
    passes_ = micro_batches(place, layout)
    scored = job.scored * -(-job.computed // (n * layout.micro))
    whole = place.shape.parameters * job.item
    return Traffic(
        gathered=share * whole * (2 * passes_ + scored),
        reduced=share * 4 * trained(place.shape, job) * passes_,
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
    each = job.computed / (job.minibatches * layout.learners)
    return job.epochs * job.minibatches * max(1, math.ceil(each / layout.micro))


def gathering(place: Deployment, devices: int, size: float, pieces: int) -> float:
    """Return seconds until each of ``devices`` has received ``size`` bytes.

    Size over rate, and for each of ``pieces`` a ring's n - 1 steps, of which one per further node crosses the network.
    """
    if devices == 1:
        return 0.0
    hardware, reached = place.hardware, place.reached
    nodes = hardware.nodes(devices)
    ring = (devices - nodes) * reached.hop_inside + (nodes - 1) * reached.hop_between
    return size / (hardware.between(devices) * reached.links) + pieces * ring


def communicating(place: Deployment, layout: Layout) -> float:
    """Return the seconds of all gathers and reductions of a step's updates and scores."""
    moved, layers = traffic(place, layout), place.shape.layers + 1
    job = place.job
    passes_ = micro_batches(place, layout)
    scored = job.scored * math.ceil(job.computed / (layout.learners * layout.micro))
    pieces = layers * (3 * passes_ + scored)
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
    merged = size / reached.merging if moved < size else size / reached.store
    n, answering = layout.learners, layout.engines * layout.parts
    gathered = gathering(place, n, size, place.shape.layers + 1)
    sources, nodes = hardware.nodes(n), hardware.nodes(answering)
    is_one_node = hardware.nodes(n + answering) == 1
    put = moved / n / (hardware.host_link * reached.links) + moved / (min(n, _WRITERS * sources) * reached.store)
    fetched = 0.0 if is_one_node else (1 + math.log2(max(1.0, nodes / sources))) * moved / reached.tcp
    taken = merged + size / (layout.parts * hardware.host_link * reached.links)
    rate = hardware.link if is_one_node else hardware.net
    return {"store": gathered + put + fetched + taken, "nccl": gathered + size / (rate * reached.broadcast)}


_WRITERS = 4
"""Processes of one machine that copy at full rate; more processes share the memory's bandwidth."""
