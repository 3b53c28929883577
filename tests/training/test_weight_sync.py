"""New weights are proved to have arrived; every way of failing that we know is produced for real, and named."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.training.weights import learner_of, move
from torch import Tensor, nn

from gnomon.core.errors import WeightSyncError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.lora import adapt
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprints
from gnomon.models.transfer.rounding import rounded
from gnomon.testing import make_batch
from gnomon.training.weight_sync import (
    FLOAT32_NATS,
    ROUGH_NATS,
    CalibratedTolerance,
    FixedTolerance,
    SnapshotTransform,
    Tolerance,
    VerifiedWeightSync,
    publish_halved,
)

VOCABULARY = 259
GATE = "model.layers.0.mlp.gate_proj.weight"
Spoil = Callable[[Snapshot], Snapshot]


class Faulty:
    """A local engine that makes something else of what it is given.

    spoil: what really reaches its model. is_blind: it cannot read its weights back, and says what it was given.
    """

    def __init__(self, spoil: Spoil, is_blind: bool = False) -> None:
        self.inner = LocalEngine(tiny_model(5), shared=False)
        self.spoil, self.is_blind = spoil, is_blind
        self.given: dict[str, Fingerprint] = {}

    @property
    def version(self) -> int:
        """As the inner engine."""
        return self.inner.version

    @property
    def beats(self) -> int:
        """As the inner engine."""
        return self.inner.beats

    async def load(self, snapshot: Snapshot) -> None:
        """Load something else."""
        self.given = fingerprints(snapshot.tensors())
        await self.inner.load(self.spoil(snapshot))

    async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
        """Say what it holds, or what it was given."""
        return self.given if self.is_blind else await self.inner.fingerprints()

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """As the inner engine."""
        return await self.inner.score(prompt, response, temperature)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """As the inner engine."""
        return await self.inner.generate(prompt, keys, sampling)

    async def close(self) -> None:
        """As the inner engine."""
        await self.inner.close()


def changed(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    """Return what loads other tensors under the same version."""

    def spoil(snapshot: Snapshot) -> Snapshot:
        tensors = change({name: tensor.clone() for name, tensor in snapshot.tensors()})
        return Snapshot(snapshot.version, lambda: iter(tensors.items()))

    return spoil


class Stale:
    """Keeps the first tensors that it sees under some names; of all names when there is none."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.first: dict[str, Tensor] = {}

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, the named ones as they were first."""
        self.first = self.first or {n: t for n, t in tensors.items() if not self.names or n in self.names}
        return tensors | self.first


def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the two layers in each other's place."""
    other = {name: re.sub(r"layers\.([01])", lambda m: f"layers.{1 - int(m[1])}", name) for name in tensors}
    return {name: tensors[other[name]] for name in tensors}


def deliveries(
    engine: Engine,
    model: nn.Module,
    sending: SnapshotTransform | None = None,
    tolerance: Tolerance | None = None,
    count: int = 3,
) -> list[Metrics]:
    """Return what so many deliveries measured, with an update between one and the next."""

    async def body() -> list[Metrics]:
        torch.manual_seed(1)
        learner, pool = learner_of(model), EnginePool({"one": engine})
        weight_sync, measured = VerifiedWeightSync(pool, VOCABULARY, sending, tolerance or FixedTolerance()), []
        try:
            for _ in range(count):
                measured.append(await weight_sync.publish(pool, learner))
                move(model)
                learner.advance()
        finally:
            await pool.close()
        return measured

    return asyncio.run(body())


def test_weights_that_arrive_are_believed():
    """With weights of its own, or the learner's: the canary differs by rounding alone, in float32 by less than 1e-6."""
    model = tiny_model()
    shared = deliveries(LocalEngine(model), model)
    own = deliveries(LocalEngine(tiny_model(5), shared=False), tiny_model())

    for measured in (*shared, *own):
        assert measured["arrival/canary_abs_mean_nats"] < 1e-6
        assert measured["arrival/canary_allowed_nats"] == FLOAT32_NATS


def test_what_travels_is_counted():
    """All bytes and tensors that an engine with weights of its own took in, each time; nothing where none travel."""
    model = tiny_model()
    own = deliveries(LocalEngine(tiny_model(5), shared=False), tiny_model())
    (shared, *_) = deliveries(LocalEngine(model), model)
    size = sum(parameter.nbytes for parameter in model.parameters())

    assert [m["weights/sent_bytes"] for m in own] == [size] * 3
    assert own[0]["weights/sent_tensors"] == len(list(model.parameters()))
    assert not [name for name in shared if name.startswith("weights/")]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_rounded_weights_that_were_meant_to_be_are_believed(kind):
    """The learner computes the canary with the rounded weights too, so nothing but arithmetic may differ."""
    model = tiny_model()
    axes = input_axes(model)
    measured = deliveries(LocalEngine(tiny_model(5), shared=False), model, lambda s: rounded(s, kind, axes))

    assert max(m["arrival/canary_abs_mean_nats"] for m in measured) < 1e-6


def test_merged_adapters_are_believed():
    """An engine of its own gets plain weights; the learner's answer is computed with the same ones."""
    model = adapt(tiny_model(), LoraConfig(rank=2))
    measured = deliveries(LocalEngine(tiny_model(5), shared=False), model, lambda s: s)

    assert max(m["arrival/canary_abs_mean_nats"] for m in measured) < 1e-6


def test_what_bfloat16_may_differ_by_is_measured_first():
    """An engine that casts is no mistake; its first difference decides what later ones may be."""
    engine = LocalEngine(tiny_model(5, dtype=torch.bfloat16), shared=False)
    first, second, _ = deliveries(engine, tiny_model(), tolerance=CalibratedTolerance())

    assert first["arrival/canary_allowed_nats"] == ROUGH_NATS
    assert 1e-4 < first["arrival/canary_abs_mean_nats"] < 0.05
    allowed = max(ROUGH_NATS / 10, 8 * first["arrival/canary_abs_mean_nats"])
    assert second["arrival/canary_allowed_nats"] == pytest.approx(allowed)


def test_a_resumed_run_allows_what_it_allowed_before():
    """Unless engines of another machine differ by more when they get their first weights: then that decides."""
    tolerance = CalibratedTolerance()
    tolerance.saw(0.01)
    again, elsewhere = CalibratedTolerance(), CalibratedTolerance()
    for resumed, difference in ((again, 0.06), (elsewhere, 0.1)):
        resumed.restore(tolerance.state())
        assert resumed.nats == ROUGH_NATS
        resumed.saw(difference)
        resumed.saw(0.2)

    assert again.nats == tolerance.nats == pytest.approx(0.08)
    assert elsewhere.nats == ROUGH_NATS
    assert again.state() == tolerance.state()


FAULTS = {
    "ignores-load": (changed(Stale()), r"of version 1 did not .* engine one: 20 of 20 tensors"),
    "stale-tensor": (changed(Stale(GATE)), rf"of version 1 did not .*: 1 of 20 tensors .*\({re.escape(GATE)} is float"),
    "swapped-layers": (changed(swapped), r"of version 0 did not arrive .*: 14 of 20 tensors .*; and 11 more\)"),
    "rounded-untold": (
        lambda snapshot: rounded(snapshot, "int8", {GATE: -1}),
        rf"of version 0 did not .* 1 of 20 tensors .*{re.escape(GATE)} is float32\[.*, sent was float32\[",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_did_not_arrive_stop_the_run(fault):
    """Of an engine that reads its weights back: the tensors, the version, the engine, and what to do."""
    spoil, said = FAULTS[fault]

    with pytest.raises(WeightSyncError, match=said + ".*Nothing that it samples.*gnomon resume"):
        deliveries(Faulty(spoil), tiny_model())


def test_a_dropped_tensor_is_named():
    """An engine that says what it took in, and left one out."""

    class Dropping(Faulty):
        async def fingerprints(self) -> Mapping[str, Fingerprint] | None:
            return {name: print_ for name, print_ in self.given.items() if name != GATE}

    with pytest.raises(WeightSyncError, match=rf"1 of 20 tensors .*\({re.escape(GATE)} is missing\)"):
        deliveries(Dropping(changed(Stale(GATE)), is_blind=True), tiny_model())


BLIND = {
    "ignores-load": (changed(Stale()), 1),
    "stale-tensor": (changed(Stale(GATE)), 1),
    "swapped-layers": (changed(swapped), 0),
    "rounded-untold": (lambda snapshot: rounded(snapshot, "int8", {GATE: -1}), 0),
}


@pytest.mark.parametrize("fault", BLIND)
def test_an_engine_that_cannot_read_its_weights_is_caught_by_what_it_says(fault):
    """It has the right fingerprints, and log-probabilities that are not the learner's: the message has the numbers."""
    spoil, version = BLIND[fault]

    said = rf"has the weights of version {version} .* computes something else: .*where 0\.0001 is allowed"
    with pytest.raises(WeightSyncError, match=said):
        deliveries(Faulty(spoil, is_blind=True), tiny_model())


def test_one_of_several_is_named():
    """Every engine of a pool is asked, not the pool: the second one is at fault."""

    async def body() -> None:
        model = tiny_model()
        engines = {"good": LocalEngine(tiny_model(5), shared=False), "bad": Faulty(changed(swapped), is_blind=True)}
        pool = EnginePool(engines)
        try:
            await VerifiedWeightSync(pool, VOCABULARY).publish(pool, learner_of(model))
        finally:
            await pool.close()

    with pytest.raises(WeightSyncError, match="engine bad has the weights of version 0"):
        asyncio.run(body())


@dataclass(frozen=True)
class Lying:
    """Weights that lie where an engine fetches them, and what is said of them."""

    named: Mapping[str, Tensor]
    said: Mapping[str, Fingerprint]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them."""
        return iter(self.named.items())

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return what is said."""
        return self.said


class Elsewhere(TorchLearner):
    """A learner whose weights are fetched from where they lie, and never read here."""

    spoil: Callable[[dict[str, Fingerprint]], dict[str, Fingerprint]] = staticmethod(dict)

    def snapshot(self) -> Snapshot:
        """Return where they lie."""
        own = super().snapshot()

        def unreadable() -> Iterator[tuple[str, Tensor]]:
            raise AssertionError("the weights were brought here")

        return Snapshot(
            own.version, unreadable, lambda: Lying(dict(own.tensors()), self.spoil(fingerprints(own.tensors())))
        )


class Fetching(LocalEngine):
    """An engine that fetches weights itself."""

    async def load(self, snapshot: Snapshot) -> None:
        """Fetch, and load."""
        assert snapshot.stored is not None
        await super().load(Snapshot(snapshot.version, snapshot.stored().tensors))


def test_weights_that_lie_elsewhere_are_proved_without_reading_them_here():
    """Their fingerprints are told by whoever put them there; where these are others, the tensor is named."""

    async def body(learner: Elsewhere) -> None:
        pool = EnginePool({"one": Fetching(tiny_model(5), shared=False)})
        try:
            await VerifiedWeightSync(pool, VOCABULARY).publish(pool, learner)
        finally:
            await pool.close()

    learner = Elsewhere(tiny_model(), LearnerConfig(precision="fp32"), steps=9)
    asyncio.run(body(learner))
    learner.spoil = lambda prints: {**prints, GATE: replace(prints[GATE], digest=7)}
    with pytest.raises(WeightSyncError, match=rf"1 of 20 tensors .*\({re.escape(GATE)} is float32"):
        asyncio.run(body(learner))


def test_a_proof_changes_nothing_about_the_learner():
    """Its whole state, bit for bit and in its place, and the count of its work, also after rounded weights were tried
    on, and after a pass that failed.
    """
    model = tiny_model()
    learner, axes = learner_of(model), input_axes(model)
    batch = make_batch([1.0], [[1, 1]])
    memory = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    work = learner.state().values["work"]

    async def body() -> None:
        own = await learner.logprobs(batch)
        sent = await learner.logprobs(batch, rounded(learner.snapshot(), "int4", axes))
        assert float((own - sent).abs().max()) > 1e-3
        broken = {GATE: torch.zeros(1), "unknown": torch.ones(1)}
        with pytest.raises(KeyError, match="unknown"):
            await learner.logprobs(batch, Snapshot(0, lambda: iter(broken.items())))
        assert torch.equal(await learner.logprobs(batch), own)

    asyncio.run(body())

    assert learner.state().values["work"] == work
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == memory[name][0]
        assert torch.equal(parameter, memory[name][1])


@pytest.mark.parametrize("spoil", [Stale(), None])
def test_halved_weights_find_an_engine_that_keeps_those_it_began_with(spoil: Stale | None):
    """Before anything is learned, when its weights are those of the learner, and without fingerprints."""
    model = tiny_model(5)
    engine = Faulty(changed(spoil or (lambda tensors: tensors)), is_blind=True)
    pool = EnginePool({"own-0": engine}, vocabulary_size=VOCABULARY)

    async def body() -> None:
        await VerifiedWeightSync(pool, VOCABULARY).publish(pool, learner_of(model))
        await publish_halved(pool, learner_of(model), VOCABULARY, None)

    if spoil is None:
        asyncio.run(body())
    else:
        with pytest.raises(WeightSyncError, match="engine own-0 has the weights of version 1 as far as it can tell"):
            asyncio.run(body())
