"""Divide the devices between learning and answering: list every division that fits and simulate the best."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

from gnomon.analysis.planner.deployment import Deployment, Lengths, PlannedJob
from gnomon.analysis.planner.hardware import GPUS, size
from gnomon.analysis.planner.layout import (
    GIGABYTE,
    Layout,
    Stages,
    cache_room,
    concurrency,
    host_memory,
    kept_bytes,
    learner_memory,
    pace_of,
    row_tokens,
    stages,
)
from gnomon.analysis.planner.simulate import Flow, Timing, simulate
from gnomon.core.errors import ConfigError
from gnomon.core.sentences import many
from gnomon.learner.optimizer import MOMENT_BYTES
from gnomon.models.adapter_config import KINDS

STEPS, FILLING, CANDIDATES = 5, 2, 3
_MOST_ROWS = 2048
_LEAST_ROWS = 8
_LARGEST_PASS = 65_536


@dataclass(frozen=True)
class BestLayout:
    """A layout, its stages one by one, and the simulation of all stages together."""

    layout: Layout
    stages: Stages
    flow: Flow


def best_layout(place: Deployment) -> BestLayout:
    """Return the layout that trains the most tokens per second.

    `Stages` estimates every layout that fits; the three best are simulated.

    Raises:
        ConfigError: If no layout fits; the message says by how much.
    """
    try:
        fitting = list(layouts(place))
    except ConfigError as error:
        # Nothing fits: what would fit is found by trying changes, so that the error names a setting and its price.
        said = (f"{way} (a step takes {factor:.2g} times as long)" for way, factor in remedies(place))
        ways = "; or ".join(said) or "a smaller model, shorter answers"
        raise ConfigError(
            f"{place.shape.name} does not fit on {many(place.devices, 'device')} of "
            f"{place.hardware.memory / GIGABYTE:.0f} GB, however they are parted ({error}).\nIt fits with {ways}"
        ) from error
    # The formulas rank all layouts at once; a simulation takes far longer, so only the best are simulated.
    ranked = sorted(fitting, key=lambda layout: estimated(place, stages(place, layout)))
    found = [(layout, stages(place, layout)) for layout in ranked[:CANDIDATES]]
    run = [BestLayout(layout, taken, simulated(place, layout, taken)) for layout, taken in found]
    return max(run, key=lambda one: one.flow.tokens_per_second)


def estimated(place: Deployment, taken: Stages) -> float:
    """Return the estimated seconds of a step."""
    # How many steps the engines may be ahead of the learner.
    depth = place.job.staleness - place.job.slack
    if depth <= 0:
        return taken.synchronous()
    return taken.taking_turns() if place.is_shared else taken.overlapped(depth)


def layouts(place: Deployment) -> Iterator[Layout]:
    """Yield every layout that fits.

    Raises:
        ConfigError: If no layout fits.
    """
    count, reason = 0, ""
    try:
        fewest = engine_parts(place)
        reason = f"one engine alone takes {fewest}"
        pairs = [(n, parts) for parts in widths(place, fewest) for n in _shares(place)]
    except ConfigError as error:
        reason, pairs = str(error), []
    for learners, parts in pairs:
        # Shared devices each have an engine; otherwise what does not learn answers.
        engines = place.devices if place.is_shared else (place.devices - learners) // parts
        if engines < 1:
            continue
        # More engines than prompts in flight would stay idle.
        ahead = place.job.prompts * (place.job.staleness + 1 - place.job.slack)
        layout = passes_for(place, Layout(learners, min(engines, ahead), parts))
        if isinstance(layout, str):
            # Larger engines leave fewer devices to learn, so the smallest engine shows by how much the layout misses.
            reason = f"{learners} learning: {layout}" if parts == fewest else reason
            continue
        count += 1
        yield layout
    if not count:
        raise ConfigError(reason)


def fits(place: Deployment) -> bool:
    """Return whether the place holds its job, in the devices and in the memory of a node."""
    try:
        layout = next(layouts(place))
    except ConfigError:
        return False
    return sum(host_memory(place, layout).values()) <= place.hardware.host_memory * place.reached.memory


_RANK = 32
_PLAIN_MOMENTS = 8.0
_MOST_NODES = 32
_SHORTEST = 256


def remedies(place: Deployment) -> Iterator[tuple[str, float]]:
    """Yield ways in which the job fits: what to set or to take, and by what factor a step takes longer or shorter.

    The factor is to the step that was asked for, on the same devices with as much memory as it needs. Settings come in
    the order of that factor, two at most; passes and recomputed layers are the planner's own choice in all of them.
    """
    # The step that was asked for has no time of its own, as it does not fit: it is estimated with unlimited memory.
    asked = _seconds(replace(place, hardware=replace(place.hardware, memory=1e3 * place.hardware.memory)))
    found = dict[str, float]()
    for changes in (_plain_changes, _quantized_changes, _shorter):
        # A quantized base is slower than a plain one, and shorter answers are other work.
        if f"lora.rank={_RANK}" not in found and (not found or changes is not _shorter):
            places = {name: replace(place, job=changed) for name, changed in changes(place.job).items()}
            found |= {name: _seconds(changed) / asked for name, changed in places.items() if fits(changed)}
    yield from islice(sorted(found.items(), key=itemgetter(1)), 2)
    node, more = place.hardware.node, place.devices * 2
    while more <= node * _MOST_NODES:
        wider = replace(place, devices=more)
        if fits(wider):
            yield f"--gpus {more}", _seconds(wider) / asked
            break
        more *= 2
    larger = (replace(place, hardware=gpu) for gpu in GPUS.values() if gpu.memory > place.hardware.memory)
    for wider in islice(filter(fits, larger), 1):
        yield f"--hardware {wider.hardware.name}", _seconds(wider) / asked


def _plain_changes(job: PlannedJob) -> dict[str, PlannedJob]:
    """Return what can be set, by how it is spelled: adapters, offload, smaller passes."""
    # With adapters the base is the reference, so no second copy is held.
    adapted = replace(job, rank=job.rank or _RANK, has_reference=False)
    changes = {} if job.rank else {f"lora.rank={_RANK}": adapted}
    if job.moment_bytes == _PLAIN_MOMENTS:
        changes["learner.optimizer.moments=8bit"] = replace(job, moment_bytes=2 * MOMENT_BYTES)
    if not job.is_offloaded and job.base is None:
        changes["learner.offload=true"] = replace(job, is_offloaded=True)
        if not job.rank:
            changes[f"lora.rank={_RANK} learner.offload=true"] = replace(adapted, is_offloaded=True)
    if job.micro > job.longest:
        least = math.ceil(job.longest)
        changes[f"learner.max_tokens_per_micro_batch={least}"] = replace(job, micro=least)
    return changes


def _quantized_changes(job: PlannedJob) -> dict[str, PlannedJob]:
    """Return the ways with a quantized base."""
    if job.base is not None or job.is_offloaded:
        return {}
    named, rank = "" if job.rank else f"lora.rank={_RANK} ", job.rank or _RANK
    return {f"{named}lora.base={kind}": replace(job, rank=rank, base=kind, has_reference=False) for kind in KINDS}


def _shorter(job: PlannedJob) -> dict[str, PlannedJob]:
    """Return the job with answers of a half, a quarter and so on, and the same on a base in 4 bits."""
    found, longest = dict[str, PlannedJob](), job.answers.longest // 2
    while longest >= _SHORTEST:
        shorter = replace(job, answers=Lengths(min(job.answers.mean, longest / 2), longest))
        cut = f"sampling.max_completion_length={longest}"
        # Each also on a quantized base, since neither alone may be enough.
        found |= {cut: shorter} | {f"{way} {cut}": few for way, few in _quantized_changes(shorter).items()}
        longest //= 2
    return found


def _seconds(place: Deployment) -> float:
    """Return the estimated seconds of the best layout's step."""
    return min(estimated(place, stages(place, layout)) for layout in layouts(place))


def widths(place: Deployment, fewest: int) -> Iterator[int]:
    """Yield the devices that an engine can have: powers of two that divide the attention heads, as vLLM requires."""
    parts = fewest
    # The smallest width is tried in any case, so that its error tells what is missing.
    while parts == fewest or (not place.is_shared and parts <= place.hardware.node and place.shape.heads % parts == 0):
        yield parts
        parts *= 2


def engine_parts(place: Deployment) -> int:
    """Return the fewest devices of a node that hold an engine with a KV cache for 8 responses.

    Raises:
        ConfigError: If a whole node is too small.
    """
    parts, most = 1, 1 if place.is_shared else place.hardware.node
    while parts <= most:
        row = row_tokens(place.job) * place.shape.cache(parts, place.job.item)
        if cache_room(place, parts) >= _LEAST_ROWS * row:
            return parts
        parts *= 2
    weights, room = place.shape.parameters * place.job.item, most * place.hardware.memory
    tokens = row_tokens(place.job)
    cached = _LEAST_ROWS * tokens * place.shape.cache(1, place.job.item)
    raise ConfigError(
        f"the weights of {place.shape.name} are {size(weights)}, keys and values of {_LEAST_ROWS} answers of "
        f"{tokens:,.0f} tokens with their prompts {size(cached)}, and "
        + (
            f"a node of {most} {place.hardware.name} has {size(room)} for both; an engine of several nodes is not "
            "planned here: take larger devices, or shorter prompts and answers"
            if most > 1
            else f"one {place.hardware.name} has {size(room)} for both and for what learning keeps"
        )
    )


def passes_for(place: Deployment, layout: Layout) -> Layout | str:
    """Return the layout with the largest passes that fit, or the reason why no pass fits.

    Layers are computed again only if that is necessary, or if passes without it would be much smaller.
    """
    least = math.ceil(place.job.longest)
    each = place.job.computed / (place.job.minibatches * layout.learners)
    most = max(least, min(_LARGEST_PASS, math.ceil(each)))
    chosen: Layout | None = None
    # Without recomputation first, which is a quarter less work where there is memory for it.
    for is_recomputed in (False, True):
        # Memory with an empty pass, and what is left divided by a token's activations: the largest pass.
        empty = learner_memory(place, replace(layout, micro=0, is_recomputed=is_recomputed))
        room = (empty.room - empty.total) / kept_bytes(place.shape, place.job, is_recomputed)
        tokens = place.job.micro or min(most, int(room))
        if tokens < least or room < tokens:
            continue
        found = replace(layout, micro=tokens, is_recomputed=is_recomputed)
        # A layout that recomputes layers must be at least 3% faster than one that does not.
        if chosen is None or stages(place, found).updating < 0.97 * stages(place, chosen).updating:
            chosen = found
    if chosen is not None:
        return chosen
    held = learner_memory(place, replace(layout, micro=place.job.micro or least))
    return (
        f"{held.total / GIGABYTE:.0f} GB a device with passes of {place.job.micro or least} tokens, of "
        f"{held.room / GIGABYTE:.0f} that may be planned"
    )


def simulated(place: Deployment, layout: Layout, taken: Stages) -> Flow:
    """Simulate the layout's run on the virtual clock.

    A step of more than 2,048 responses is simulated as a fraction of itself, with the same fraction of the engines and
    a learner that is slower by that fraction. The waiting is the same, but the longest response is a little shorter.
    """
    job = place.job
    share = min(1.0, _MOST_ROWS / job.rows)
    prompts = max(1, round(job.prompts * share))
    engines = max(1, round(layout.engines * share))
    # Again from the rounded number of prompts, or the rounding would count as throughput.
    share = prompts / job.prompts
    # Everything that a response waits for shrinks by the same share, so that it waits as long.
    part = replace(job, prompts=prompts, graders=max(1, round(job.graders * share)))
    whole = timing(place, layout, taken)
    scaled = replace(whole, engines=engines, learn=lambda tokens: whole.learn(tokens / share))
    flow = simulate(part, scaled, STEPS, FILLING + job.staleness)
    return replace(flow, trained=flow.trained / share, generated=flow.generated / share)


def timing(place: Deployment, layout: Layout, taken: Stages) -> Timing:
    """Return the simulation's inputs. Engines pause while they load weights, and during a whole broadcast."""
    each = taken.updating / place.job.answered
    # Through the store an engine goes on answering while weights are on their way, and pauses only to load them.
    taking = place.shape.parameters * place.job.item / place.reached.store / layout.parts
    return Timing(
        pace=pace_of(place, layout),
        engines=layout.engines,
        most=concurrency(place, layout),
        grade=place.reached.grade,
        learn=lambda tokens: tokens * (each + place.reached.driver_token),
        publish=taken.publishing,
        pause=taken.publishing if place.job.is_broadcast else min(taken.publishing, taking),
    )


def _shares(place: Deployment) -> Iterator[int]:
    """Yield possible numbers of learners: all numbers within a node, or about 32 multiples of a node."""
    node, devices = place.hardware.node, place.devices
    # Shared devices all learn; a quantized base cannot be sharded, so one device learns.
    if place.is_shared or place.job.base is not None:
        yield devices if place.is_shared else 1
        return
    if devices <= node:
        yield from range(1, devices)
        return
    nodes = devices // node
    # About 32 candidates are enough: the throughput changes little from one node to the next.
    step = max(1, nodes // 32)
    yield from (share * node for share in range(step, nodes, step))
