"""Weights on their way to engines, and the proof that they arrived before what they sample is trained on."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gnomon.core.errors import NotFiniteError, WeightSyncError
from gnomon.core.failpoints import reach
from gnomon.core.metrics import Last, Mean, Metrics, Sum
from gnomon.core.progress import working
from gnomon.core.threads import elsewhere
from gnomon.core.types import Batch, Snapshot, State
from gnomon.engines.base import Engine
from gnomon.engines.pool import EnginePool, fault_of_logprobs
from gnomon.learner.base import Learner
from gnomon.models.transfer.fingerprint import Fingerprint, differences
from gnomon.models.transfer.remote_weights import sent

Sending = Callable[[Snapshot], Snapshot]
"""What becomes of a snapshot on its way: adapters are merged, matrices rounded."""

PROMPT_TOKENS, RESPONSE_TOKENS = 4, 12
FLOAT32_NATS, ROUGH_NATS = 1e-4, 0.25
GROWTH = 8.0
_SHOWN = 3
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
    than ``allowance`` says. Weights that are others differ by more, or are told apart by their fingerprints.

    Attributes:
        engines: All of them.
        sending: What becomes of the learner's weights on their way; None when engines get the very same numbers.
        vocabulary_size: Canary ids are below it.
        allowance: `FixedTolerance` where learner and engine both compute in float32, else `CalibratedTolerance`. Ours:
            peers check a version number, or nothing.
    """

    engines: EnginePool
    vocabulary_size: int
    sending: Sending | None = None
    allowance: Tolerance = field(default=FixedTolerance())

    async def publish(self, engine: Engine, learner: Learner) -> Metrics:
        """Load the learner's weights into every engine and prove that they arrived.

        Raises:
            WeightSyncError: Naming engine, version and tensors, or the numbers that differ.
            EngineError: If no engine is left.
            NotFiniteError: If these weights give log-probabilities that are no numbers.
        """
        snapshot = learner.snapshot() if self.sending is None else self.sending(learner.snapshot())
        # A learner that fails over its weights is no fault of an engine, so they are read before one is asked.
        if snapshot.stored is not None:
            await elsewhere(snapshot.stored)
        elif self.sending is not None:
            snapshot = await _kept(snapshot)
        else:
            await elsewhere(lambda: next(iter(snapshot.tensors()), None))
        with working("sending weights", is_brief=True):
            await self.engines.load(snapshot)
        reach("deliver")
        began, taken = time.perf_counter(), list[Fingerprint]()
        for name, held in (await self.engines.each(lambda e: e.fingerprints())).items():
            if held is not None:
                await self._compare(name, held, snapshot)
                taken += held.values()
        ids = canary(self.vocabulary_size)
        prompt, response = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
        own = await learner.logprobs(_batch(ids), None if self.sending is None else snapshot)
        if not bool(own.isfinite().all()):
            raise NotFiniteError(_useless(snapshot.version))
        said = await self.engines.each(lambda e: e.score(prompt, response, 1.0))
        for name, scores in said.items():
            if (wrong := fault_of_logprobs(scores, len(response))) is not None:
                raise WeightSyncError(f"the engine {name} answers a score with {wrong}: mend its method score")
        apart = {name: _separate(own[0].tolist(), scores) for name, scores in said.items()}
        allowed = self.allowance.nats
        for name, differs in apart.items():
            if not differs <= allowed:
                raise WeightSyncError(_otherwise(name, snapshot.version, differs, allowed))
        largest = max(apart.values(), default=0.0)
        self.allowance.saw(largest)
        return Metrics.of(
            {
                "arrival/canary_abs_mean_nats": Last(largest),
                "arrival/canary_allowed_nats": Last(allowed),
                "time/arrival_seconds": Mean(time.perf_counter() - began, 1),
            }
        ) + _counted(taken, snapshot)

    async def _compare(self, name: str, held: Mapping[str, Fingerprint], snapshot: Snapshot) -> None:
        expected = await elsewhere(partial(sent, snapshot, held))
        wrong = differences(expected, held)
        if wrong:
            raise WeightSyncError(_missing(name, snapshot.version, wrong, len(expected)))


WeightSync = VerifiedWeightSync | PlainWeightSync | NoWeightSync
"""What the training loop calls to send weights to engines."""


async def publish_halved(engines: EnginePool, learner: Learner, vocabulary_size: int, sending: Sending | None) -> float:
    """Let engines answer with half of each of the learner's weights, to see that they do.

    Engines that keep the weights they began with agree with the learner as long as a run has not learned much, so the
    first weights that they are sent are others, by far.

    Args:
        engines: All of them; they hold weights of the next version afterwards.
        learner: In this process, in others, or on a cluster.
        vocabulary_size: Canary ids are below it.
        sending: As in `VerifiedWeightSync`.

    Returns:
        Nats by which an engine's log-probabilities were allowed to differ, in the mean: half of what halving does to
        the learner's own, 0.25 at most.

    Raises:
        WeightSyncError: An engine does not answer with them.
    """

    def halved(snapshot: Snapshot) -> Snapshot:
        whole = snapshot if sending is None else sending(snapshot)
        return Snapshot(whole.version + 1, lambda: ((name, _half(tensor)) for name, tensor in whole.tensors()))

    batch = _batch(canary(vocabulary_size))
    own = await learner.logprobs(batch)
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
    tensors = await elsewhere(lambda: list(snapshot.tensors()))
    return Snapshot(snapshot.version, lambda: iter(tensors))


def canary(vocabulary_size: int) -> list[int]:
    """Return fixed token ids, spread over the vocabulary."""
    return [place * _STRIDE % vocabulary_size for place in range(1, PROMPT_TOKENS + RESPONSE_TOKENS + 1)]


def _batch(tokens: Sequence[int]) -> Batch:
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
