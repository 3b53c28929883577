"""Bytes that travel in one step, and how long they take."""

import math
from dataclasses import dataclass

from gnomon.planner.deployment import Deployment
from gnomon.planner.layout import Layout, trained


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step. gathered, reduced: into each device that learns. published: weights, once, or adapters.
    answers: tokens and log-probabilities from engines to the run's process. batch: from there to the learners, all of
    them together.
    """

    gathered: float
    reduced: float
    published: float
    answers: float
    batch: float


def traffic(place: Deployment, layout: Layout) -> Traffic:
    """Return what travels."""
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
    """Return the bytes of one publication: of adapters alone in float32, where experts have none (`models.lora`)."""
    shape, job = place.shape, place.job
    is_alone = job.rank > 0 and not shape.experts
    return float(4 * shape.adapters(job.rank) if is_alone else shape.parameters * job.item)


_BATCH_BYTES = 40
"""Of one position of a padded batch: its token as 8 bytes, and eight numbers of 4 in the matrices beside it."""


def micro_batches(place: Deployment, layout: Layout) -> int:
    """Return the passes that each learner makes in a step, forward and backward: as many as the busiest."""
    job = place.job
    each = job.computed / (job.minibatches * layout.learners)
    return job.epochs * job.minibatches * max(1, math.ceil(each / layout.micro))


def gathering(place: Deployment, devices: int, size: float, pieces: int) -> float:
    """Return seconds until each of ``devices`` has taken in ``size`` bytes in so many pieces.

    Size over rate, and for each piece a ring's n - 1 steps, of which as many as there are nodes cross the network.
    """
    if devices == 1:
        return 0.0
    hardware, reached = place.hardware, place.reached
    nodes = hardware.nodes(devices)
    ring = (devices - nodes) * reached.hop_inside + (nodes - 1) * reached.hop_between
    return size / (hardware.between(devices) * reached.links) + pieces * ring


def communicating(place: Deployment, layout: Layout) -> float:
    """Return the seconds of all gathers and sums of a step's updates and scores."""
    moved, layers = traffic(place, layout), place.shape.layers + 1
    job = place.job
    passes_ = micro_batches(place, layout)
    scored = job.scored * math.ceil(job.computed / (layout.learners * layout.micro))
    pieces = layers * (3 * passes_ + scored)
    return gathering(place, layout.learners, moved.gathered + moved.reduced, pieces)


def publishing(place: Deployment, layout: Layout) -> dict[str, float]:
    """Return seconds of bringing new weights to the engines: by the object store, and by NCCL.

    Either way they are gathered first. By the store: every learner copies its share to its machine's memory and puts it
    into the store; each node of engines fetches all of it, and nodes that have it serve others; each device takes in
    its part. With adapters those alone are put and fetched, and each node of engines merges. By NCCL: one device sends,
    all others take in.
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
"""Processes of one machine that copy at a rate of their own; more share its memory."""
