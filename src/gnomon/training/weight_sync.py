"""Weights on their way to engines, and the proof that they arrived before what they sample is trained on."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gnomon.core.errors import NotFiniteError, WeightSyncError
from gnomon.core.failpoints import failpoint
from gnomon.core.metrics import Last, Mean, Measure, Metrics, Sum
from gnomon.core.progress import show_progress
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Batch, Snapshot, State
from gnomon.engines.base import Engine
from gnomon.engines.pool import EnginePool, fault_of_logprobs
from gnomon.learner.base import Learner
from gnomon.models.transfer.fingerprint import Fingerprint, differences
from gnomon.models.transfer.remote_weights import sent

SnapshotTransform = Callable[[Snapshot], Snapshot]
"""What becomes of a snapshot on its way: adapters are merged, matrices rounded."""

PROMPT_TOKENS, RESPONSE_TOKENS = 4, 12
# Measured: two orders of summation in float32 differ by 5e-7 nats on the canary, bfloat16 by 0.05 to 0.11.
FLOAT32_NATS, ROUGH_NATS = 1e-4, 0.25
# Rounding differences grow as training makes logits larger, so later ones may be this many times the first.
GROWTH = 8.0
_SHOWN = 3
# Knuth's multiplicative hash (2^32 / golden ratio): its multiples spread over any vocabulary without a generator.
_STRIDE = 2654435761


@dataclass(frozen=True)
class PlainWeightSync:
    """No proof: for engines without weights, such as scripted ones."""

    async def publish(self, engine: Engine, learner: Learner) -> Metrics:
        """Load a snapshot."""
        await engine.load(learner.snapshot())
        return Metrics()


@dataclass(frozen=True)
class NoWeightSync:
    """No sync: where no answer of a step is generated. What generates held-out answers gets the weights then."""

    async def publish(self, engine: Engine, learner: Learner) -> Metrics:
        """Send nothing."""
        return Metrics()


@dataclass(frozen=True)
class FixedTolerance:
    """The same for ever: where both compute in float32, 1e-4."""

    nats: float = FLOAT32_NATS

    def saw(self, difference: float) -> None:
        """Take no note."""


class CalibratedTolerance:
    """What may differ is measured by the first delivery, when fingerprints have just proved the weights.

    Its difference d0 must not exceed 0.25 nats, and later ones not max(0.025, min(0.25, 8 d0)): in bfloat16 rounding is
    a matter of luck at first, and grows with the logits. It is `Stateful`: a resumed run goes on with the d0 that it
    began with, unless its engines, on another machine perhaps, differ by more than that allows when they get their
    first weights; then that difference is d0.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._is_begun = False

    @property
    def nats(self) -> float:
        """The largest mean absolute difference that proves the weights."""
        return self._later() if self._is_begun else ROUGH_NATS

    def saw(self, difference: float) -> None:
        """Take note of a first delivery."""
        # After a resume the first difference decides again, but only if it exceeds what was allowed: another machine
        # rounds differently.
        if not self._is_begun and (self._first is None or difference > self._later()):
            self._first = difference
        self._is_begun = True

    def state(self) -> State:
        """Return what engines differed by at first."""
        return State(values={"first": self._first})

    def restore(self, state: State) -> None:
        """Allow what was allowed before."""
        first = state.values["first"]
        self._first = None if first is None else float(first)

    def _later(self) -> float:
        return ROUGH_NATS if self._first is None else min(ROUGH_NATS, max(ROUGH_NATS / 10, GROWTH * self._first))


Tolerance = CalibratedTolerance | FixedTolerance
"""What an engine's log-probabilities of the canary may differ by from the learner's."""


@dataclass
class VerifiedWeightSync:
    """Loads, then asks each engine that works two things.

    **Which weights do you hold?** Fingerprints of all tensors, against those that were sent: to the bit. An engine that
    shares the learner's module has nothing to compare.

    **What do you say?** A canary: 12 fixed tokens after 4, log-probabilities at temperature 1 by `Engine.score` against
    the learner's own with the weights as they were sent, so that only arithmetic may differ: in the mean by no more
    than ``tolerance`` says. Weights that are others differ by more, or are told apart by their fingerprints.

    Attributes:
        engines: All of them.
        transform: What becomes of the learner's weights on their way; None when engines get the very same numbers.
        vocabulary_size: Canary ids are below it.
        tolerance: `FixedTolerance` where learner and engine both compute in float32, else `CalibratedTolerance`. Ours:
            peers check a version number, or nothing.
    """

    engines: EnginePool
    vocabulary_size: int
    transform: SnapshotTransform | None = None
    tolerance: Tolerance = field(default=FixedTolerance())

    async def publish(self, engine: Engine, learner: Learner) -> Metrics:
        """Load the learner's weights into every engine and prove that they arrived.

        Raises:
            WeightSyncError: Naming engine, version and tensors, or the numbers that differ.
            EngineError: If no engine is left.
            NotFiniteError: If these weights give log-probabilities that are no numbers.
        """
        snapshot = learner.snapshot() if self.transform is None else self.transform(learner.snapshot())
        # A learner that fails over its weights is no fault of an engine, so they are read before one is asked.
        # ``stored`` is set where the weights lie in another process or in the object store of a cluster.
        if snapshot.stored is not None:
            await run_in_thread(snapshot.stored)
        elif self.transform is not None:
            snapshot = await _kept(snapshot)
        else:
            await run_in_thread(lambda: next(iter(snapshot.tensors()), None))
        with show_progress("sending weights", is_brief=True):
            await self.engines.load(snapshot)
        failpoint("deliver")
        began, taken = time.perf_counter(), list[Fingerprint]()
        # Which tensors an engine holds, to the bit. An engine without fingerprints shares the learner's own.
        for name, held in (await self.engines.each(lambda e: e.fingerprints())).items():
            if held is not None:
                await self._compare(name, held, snapshot)
                taken += held.values()
        # What it computes with them: right tensors under a wrong name, or in a stale cache, give other numbers.
        ids = canary(self.vocabulary_size)
        prompt, response = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
        own = await learner.logprobs(_batch(ids), None if self.transform is None else snapshot)
        if not bool(own.isfinite().all()):
            raise NotFiniteError(_useless(snapshot.version))
        said = await self.engines.each(lambda e: e.score(prompt, response, 1.0))
        for name, scores in said.items():
            if (wrong := fault_of_logprobs(scores, len(response))) is not None:
                raise WeightSyncError(f"the engine {name} answers a score with {wrong}: fix its method score")
        gaps = {name: _separate(own[0].tolist(), scores) for name, scores in said.items()}
        allowed = self.tolerance.nats
        for name, differs in gaps.items():
            # Written as "not <=" so that NaN fails too.
            if not differs <= allowed:
                raise WeightSyncError(_otherwise(name, snapshot.version, differs, allowed))
        largest = max(gaps.values(), default=0.0)
        self.tolerance.saw(largest)
        return Metrics.of(
            {
                "arrival/canary_abs_mean_nats": Last(largest),
                "arrival/canary_allowed_nats": Last(allowed),
                "time/arrival_seconds": Mean(time.perf_counter() - began, 1),
            }
        ) + _counted(taken, snapshot)

    async def _compare(self, name: str, held: Mapping[str, Fingerprint], snapshot: Snapshot) -> None:
        expected = await run_in_thread(partial(sent, snapshot, held))
        wrong = differences(expected, held)
        if wrong:
            raise WeightSyncError(_missing(name, snapshot.version, wrong, len(expected)))


WeightSync = VerifiedWeightSync | PlainWeightSync | NoWeightSync
"""What the training loop calls to send weights to engines."""


async def publish_halved(
    engines: EnginePool, learner: Learner, vocabulary_size: int, transform: SnapshotTransform | None
) -> float:
    """Let engines answer with half of each of the learner's weights, to see that they do.

    Engines that keep the weights they began with agree with the learner as long as a run has not learned much, so the
    first weights that they are sent are others, by far.

    Args:
        engines: All of them; they hold weights of the next version afterwards.
        learner: In this process, in others, or on a cluster.
        vocabulary_size: Canary ids are below it.
        transform: As in `VerifiedWeightSync`.

    Returns:
        Nats by which an engine's log-probabilities were allowed to differ, in the mean: half of what halving does to
        the learner's own, 0.25 at most.

    Raises:
        WeightSyncError: An engine does not answer with them.
    """

    def halved(snapshot: Snapshot) -> Snapshot:
        whole = snapshot if transform is None else transform(snapshot)
        return Snapshot(whole.version + 1, lambda: ((name, _half(tensor)) for name, tensor in whole.tensors()))

    batch = _batch(canary(vocabulary_size))
    own = await learner.logprobs(batch)
    # The engine cannot be compared with the learner as it is, only with the learner under the same halved weights.
    other = await learner.logprobs(batch, await _kept(halved(learner.snapshot())))
    allowed = min(ROUGH_NATS, max(ROUGH_NATS / 10, float((own - other).abs().mean()) / 2))
    await VerifiedWeightSync(engines, vocabulary_size, halved, FixedTolerance(allowed)).publish(engines, learner)
    return allowed


def _half(tensor: Tensor) -> Tensor:
    """Return half of a tensor of real numbers, on the CPU, where there is room."""
    return tensor.detach().cpu() / 2 if tensor.is_floating_point() else tensor


def _counted(taken: Sequence[Fingerprint], snapshot: Snapshot) -> Metrics:
    """Return what engines with weights of their own took in: all of it each time. A cluster's count what they fetch."""
    if not taken or snapshot.stored is not None:
        return Metrics()
    return Metrics.of(
        {"weights/sent_bytes": Sum(sum(one.nbytes for one in taken)), "weights/sent_tensors": Sum(len(taken))}
    )


async def _kept(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with its tensors in memory: rounded once, and read by several."""
    tensors = await run_in_thread(lambda: list(snapshot.tensors()))
    return Snapshot(snapshot.version, lambda: iter(tensors))


def canary(vocabulary_size: int) -> list[int]:
    """Return fixed token ids, spread over the vocabulary."""
    return [place * _STRIDE % vocabulary_size for place in range(1, PROMPT_TOKENS + RESPONSE_TOKENS + 1)]


def _batch(tokens: Sequence[int]) -> Batch:
    # One row of 4 prompt and 12 response tokens; the fields that scoring does not read are zeros.
    blank = torch.zeros(1, RESPONSE_TOKENS)
    return Batch(
        tokens=torch.tensor([tokens]),
        prompt_lengths=torch.tensor([PROMPT_TOKENS]),
        lengths=torch.tensor([len(tokens)]),
        mask=torch.ones(1, RESPONSE_TOKENS, dtype=torch.bool),
        rewards=torch.zeros(1),
        is_graded=torch.ones(1, dtype=torch.bool),
        is_truncated=torch.zeros(1, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.long),
        version=torch.zeros(1, dtype=torch.long),
        behavior=blank,
        full_behavior=blank,
    )


def _separate(own: Sequence[float], said: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(own, said, strict=True)) / len(own)


def _missing(name: str, version: int, wrong: Sequence[str], count: int) -> str:
    shown = "; ".join([*wrong[:_SHOWN], *([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])])
    return (
        f"the weights of version {version} did not arrive in engine {name}: {len(wrong)} of {count} tensors are not "
        f"what was sent ({shown}). Nothing that it samples from them was trained on. {_ADVICE}"
    )


def _useless(version: int) -> str:
    return (
        f"the weights of version {version} give log-probabilities that are not finite, so the update before was too "
        "large, and nothing can be learned from here; the newest checkpoint is of before: resume from it with a "
        "lower learning rate"
    )


def _otherwise(name: str, version: int, differs: float, allowed: float) -> str:
    return (
        f"engine {name} has the weights of version {version} as far as it can tell, but computes something else: "
        f"log-probabilities of {RESPONSE_TOKENS} fixed tokens are {differs:.3g} nats from the learner's on average, "
        f"where {allowed:.3g} is allowed. Nothing that it samples from them was trained on. {_ADVICE}"
    )


_ADVICE = (
    "Go on from the last checkpoint with gnomon resume. If it happens again, engine and learner do not agree on this "
    'model: try engine.kind = "local" or another version of the engine, and learner.precision = "fp32" to tell '
    "rounding from a mistake"
)


# Decompose the mismatch between the policy that sampled and the policy that is trained.

ROWS, ONE_IN = 4, 16


@dataclass(frozen=True)
class NoMismatchProbe:
    """No measurement: for engines without weights, such as scripted ones."""

    async def measure(self, batch: Batch, step: int) -> Metrics:
        """Measure nothing."""
        return Metrics()


@dataclass(frozen=True)
class DecomposedMismatch:
    """Scores the same tokens in every way between the one that sampled them and the model itself.

    Log-probabilities of a token, each differing from the next in one thing, and what the difference is called:

        behavior         of the engine that sampled, as it sampled
                           truncation: top-p, top-k, min-p, a grammar
        full_behavior    without truncation
                           staleness: weights moved since
        engine           with the weights that it holds now
                           engine: another program, other kernels, another order of sums, another precision
        learner, sent    the learner with the weights as they were sent
                           precision: rounding, and adapters merged into weights
        learner          the learner with its own: the proximal policy
                           temperature: logits divided by it
        model            the learner at temperature 1

    Each part is the upper line less the lower one, so that they add up to ``total`` on the same tokens. A line that
    cannot differ from the one below is not computed: no staleness where a rollout's oldest token is of the current
    version, no precision without rounding, no temperature at 1. Then every token is measured, for nothing. Otherwise
    rows are chosen in turn: a sixteenth of the batch, one at least and four at most. What the engine's two ways of
    computing differ by (token by token, or all at once) counts as staleness in a rollout that is stale, and as the
    engine's in one that is not.

    Source: the gaps are those of algorithms for training and inference that differ; taking them apart is ours.

    Attributes:
        transform: As in `VerifiedWeightSync`; None when engines get the learner's own numbers.
        is_averaged: The proximal policy is an average of weights, and not the learner as it is.
        sampled_at: Temperature of the sampler where the learner scores at another one (`LearnerConfig.temperature`);
            all lines above are then at it, and ``learner_temperature`` is what the learner's own log-probabilities
            differ by between the two, beside the parts of ``total``.
        is_asleep: The engine sleeps while this is measured. Of a batch with a stale rollout, staleness and engine are
            one part then, which is called staleness.
    """

    engine: Engine
    learner: Learner
    transform: SnapshotTransform | None = None
    is_averaged: bool = False
    sampled_at: float | None = None
    is_asleep: bool = False

    async def measure(self, batch: Batch, step: int) -> Metrics:
        """Return ``mismatch/PART_nats``, the mean, and ``mismatch/PART_abs_nats``, the mean absolute value; of total
        too. Nothing without a trained token.
        """
        began = time.perf_counter()
        rows = self._rows(batch, step)
        if len(rows) == 0:
            return Metrics()
        probe = batch.rows(rows)
        parts = await self._parts(probe) if self._is_shared(batch) else await self._parts_at_two(probe)
        measures: dict[str, Measure] = {"time/probe_seconds": Mean(time.perf_counter() - began, 1)}
        for name, part in parts.items():
            tokens = part[probe.mask].double()
            measures[f"mismatch/{name}_nats"] = Mean(float(tokens.sum()), len(tokens))
            measures[f"mismatch/{name}_abs_nats"] = Mean(float(tokens.abs().sum()), len(tokens))
        return Metrics.of(measures)

    def _rows(self, batch: Batch, step: int) -> Tensor:
        # Rows without a trained token have nothing to compare, and of what was given no engine said how likely it was.
        rows = (batch.mask.any(1) & ~batch.is_given).nonzero()[:, 0]
        is_fresh = bool((batch.version[rows] == self.learner.version).all())
        if is_fresh and self.transform is None and self._is_cheap(batch):
            return rows
        # The window moves on by its own width each step, so that every place of the batch is measured in turn.
        count = max(1, min(ROWS, len(rows) // ONE_IN))
        return rows.roll(-step * count)[:count]

    def _is_cheap(self, batch: Batch) -> bool:
        return self._is_known(batch) and batch.temperature == 1 and self._is_shared(batch)

    def _is_shared(self, batch: Batch) -> bool:
        """Whether sampler and learner have one temperature."""
        return self.sampled_at is None or self.sampled_at == batch.temperature

    async def _parts_at_two(self, probe: Batch) -> dict[str, Tensor]:
        """Return the parts at the sampler's temperature, and what the learner's own differs by from them."""
        drawn = probe.with_fields(temperature=self.sampled_at, proximal=None)
        own = await self._own(probe)
        at_sampler = await self.learner.logprobs(drawn)
        return {**await self._parts(drawn), "learner_temperature": at_sampler - own}

    def _is_known(self, batch: Batch) -> bool:
        return batch.proximal is not None and not self.is_averaged

    async def _own(self, probe: Batch) -> Tensor:
        """Return the learner's own log-probabilities, from the batch where it was scored with these weights."""
        known = None if self.is_averaged else probe.proximal
        return await self.learner.logprobs(probe) if known is None else known

    async def _parts(self, probe: Batch) -> dict[str, Tensor]:
        own = await self._own(probe)
        # Each stays equal to the line below it, and its part 0, where the two cannot differ.
        sent, plain, engine = own, own, probe.full_behavior
        if self.transform is not None:
            sent = await self.learner.logprobs(probe, self.transform(self.learner.snapshot()))
        if probe.temperature != 1:
            plain = await self.learner.logprobs(probe.with_fields(temperature=1.0))
        stale = (probe.version != self.learner.version).nonzero()[:, 0].tolist()
        is_one_part = bool(stale) and self.is_asleep
        # A sleeping engine holds no weights that could score the stale rows.
        if is_one_part:
            engine = sent
        elif stale:
            scores = await asyncio.gather(*(self._ask(probe, row) for row in stale))
            # The probe's own log-probabilities are a field of the batch and must stay as they are.
            engine = engine.clone()
            for row, score in zip(stale, scores, strict=True):
                engine[row, : len(score)] = torch.tensor(score)
        return {
            "truncation": probe.behavior - probe.full_behavior,
            "staleness": probe.full_behavior - engine,
            **({} if is_one_part else {"engine": engine - sent}),
            "precision": sent - own,
            "temperature": own - plain,
            "total": probe.behavior - plain,
        }

    async def _ask(self, probe: Batch, row: int) -> list[float]:
        start, end = int(probe.prompt_lengths[row]), int(probe.lengths[row])
        tokens = probe.tokens[row].tolist()
        return await self.engine.score(tokens[:start], tokens[start:end], probe.temperature)


MismatchProbe = DecomposedMismatch | NoMismatchProbe
"""What the training loop calls to measure the mismatch between engine and learner."""
