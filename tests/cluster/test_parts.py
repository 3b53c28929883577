"""Engines, weights and graders in processes of a Ray cluster: the same answers, bits and grades as in one process.

The cluster serves other files too, since starting one takes seconds; so does starting an actor.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tests.cluster.here import CONFIG, snapshot, standing, tiny_engine, tiny_order

from gnomon.cluster.engines import ActorReply, FetchStats, RemoteEngine
from gnomon.cluster.graders import Graders
from gnomon.cluster.ray import Cluster
from gnomon.cluster.weight_store import WeightCache, WeightsRef, WeightStore
from gnomon.core.errors import ConfigError, GradingError
from gnomon.core.processes.client import Limits
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.lora import adapt, merged_tensors, parts
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

PROMPT = [256, 50, 43, 50, 61]
SAMPLING = Sampling(max_completion_length=12, stop_ids=(257,))


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """A place for an engine, and one for a grader."""
    return standing()


@dataclass
class Served:
    """An engine in the cluster, what it was sent, and the loop in which it is asked."""

    engine: RemoteEngine
    fetched: list[FetchStats]
    runner: asyncio.Runner


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Served]:
    """An engine that all tests share."""
    fetched: list[FetchStats] = []
    with asyncio.Runner() as runner:
        engine = RemoteEngine(cluster, 0, tiny_order(), WeightCache(), fetched.append)
        yield Served(engine, fetched, runner)
        runner.run(engine.close())


def moved(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """Weights of a seed, some of them changed in their last bit."""
    tensors = {name: tensor.clone() for name, tensor in merged_tensors(tiny_model(seed, CONFIG))}
    for name in names:
        flat = tensors[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
    return tensors


def test_an_engine_elsewhere_answers_as_one_here(served: Served):
    """The same tokens and, to rounding, probabilities; a bad prompt is the caller's; only what changed is sent.

    Of 20 tensors all are sent first, none when none changed, and one when one bit of one did; each time the engine
    holds what was sent, to the bit.
    """

    async def work(engine: RemoteEngine) -> None:
        local = tiny_engine()
        await asyncio.gather(local.load(snapshot(0)), engine.load(snapshot(0)))
        here, there = await asyncio.gather(*(e.generate(PROMPT, range(8), SAMPLING) for e in (local, engine)))
        assert [done.tokens for done in there] == [done.tokens for done in here]
        assert await engine.score(PROMPT, [65, 66], 0.7) == pytest.approx(await local.score(PROMPT, [65, 66], 0.7))
        await local.close()
        with pytest.raises(ConfigError, match="empty prompt"):
            await engine.generate([], [0], SAMPLING)

        first = snapshot(0)
        whole = sum(tensor.nbytes for _, tensor in first.tensors())
        name = next(name for name, _ in first.tensors() if name.endswith("gate_proj.weight"))
        later = moved(0, name)
        for version, tensors in ((1, dict(first.tensors())), (2, later)):
            await engine.load(Snapshot(version, lambda tensors=tensors: iter(tensors.items())))
            assert engine.version == version
            assert await engine.fingerprints() == fingerprints(tensors.items())
        sent = [(one.size, one.tensors) for one in served.fetched]
        assert sent == [(whole, 20), (0, 0), (later[name].nbytes, 1)]

    served.runner.run(work(served.engine))


def test_adapters_travel_alone(served: Served):
    """After the first time nothing comes but A and B of the layers that have them; the engine merges, to the bit.

    An engine that is made anew gets everything, and no base twice afterwards.
    """
    model = adapt(tiny_model(0, CONFIG), LoraConfig(rank=2, targets=("q_proj",)))
    versions = iter(range(100, 200))

    def moving() -> Snapshot:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1)
        return Snapshot(next(versions), lambda: merged_tensors(model), parts=lambda: parts(model))

    async def work(engine: RemoteEngine) -> None:
        adapters = [parameter.nbytes for name, parameter in model.named_parameters() if "lora_" in name]
        await engine.load(moving())
        for _ in range(2):
            snapshot = moving()
            await engine.load(snapshot)
            assert await engine.fingerprints() == fingerprints(snapshot.tensors())
            latest = served.fetched[-1]
            assert (latest.tensors, latest.size) == (2 * 2, sum(adapters))

    served.runner.run(work(served.engine))


def test_weights_to_be_merged_are_read_merged_by_anybody(cluster: Cluster):
    """Put by two ranks, an adapter's weight is the merged one for whoever reads it, in another precision too."""
    model = adapt(tiny_model(0, CONFIG), LoraConfig(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    whole = dict(merged_tensors(model))
    shelved = WeightsRef.joined([WeightStore(rank, 2, piece_bytes=4000).put(1, parts(model)) for rank in range(2)])

    assert {name: tensor.tolist() for name, tensor in shelved.tensors()} == {n: t.tolist() for n, t in whole.items()}
    assert shelved.expected({}) == fingerprints(whole.items())
    halves = fingerprints((name, tensor.bfloat16()) for name, tensor in whole.items())
    assert shelved.expected(halves) == halves


def test_weights_lie_as_they_were_put(cluster: Cluster):
    """Over 12 versions in which other tensors change, put by two ranks in small pieces: all are bit-equal, each time.

    What lies there is never more than twice what is in use, whatever became of the rest.
    """
    generator = torch.Generator().manual_seed(0)
    named = {f"w{number}": torch.rand(16 + number, generator=generator) for number in range(30)}
    shelves = [WeightStore(rank, 2, piece_bytes=500) for rank in range(2)]
    for version in range(12):
        for name in named:
            if float(torch.rand((), generator=generator)) < 0.3:
                named[name] = torch.rand(len(named[name]), generator=generator)
        parts = [store.put(version, named.items(), lasting=version % 2 == 0) for store in shelves]
        shelved = WeightsRef.joined(parts)
        found = dict(shelved.tensors())

        assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in named.items()}
        assert shelved.expected({}) == fingerprints(named.items())
        halves = fingerprints((name, tensor.bfloat16()) for name, tensor in named.items())
        assert shelved.expected(halves) == halves
        assert sum(part.nbytes for part in named.values()) >= sum(map(sum, (s._sizes.values() for s in shelves))) / 2


def test_grades_are_those_of_one_machine(cluster: Cluster):
    """Right, wrong, none, and a sample that cannot travel."""
    grading, limits = Grading((WeightedReward(Numeric()),)), Limits(workers=1)
    samples = [Sample("2 + 2 =", text, columns={"answer": "4"}) for text in ("4", "5", "no number")]
    odd = Sample("p", "4", columns={"answer": object()})

    async def body() -> None:
        async with GradingPool(grading, limits) as pool, Graders(cluster, [1], grading, limits, print) as graders:
            here = await asyncio.gather(*(pool.grade(sample) for sample in samples))
            assert await asyncio.gather(*(graders.grade(sample) for sample in samples)) == here
            assert "cannot be sent to a grading process" in str((await graders.grade(odd)).error)
        with pytest.raises(GradingError, match="the graders are closed"):
            await graders.grade(samples[0])

    asyncio.run(body())


def test_weights_that_a_step_did_not_change_have_its_version(served: Served):
    """They were put under version 5 and are sent as version 9: the engine says 9, and nothing travels twice."""
    named = dict(merged_tensors(tiny_model(0, CONFIG)))
    shelved = WeightStore().put(5, named.items())

    async def work(engine: RemoteEngine) -> None:
        for version in (5, 9):
            await engine.load(Snapshot(version, shelved.tensors, lambda: shelved))
            assert engine.version == version
        assert served.fetched[-1].tensors == 0

    served.runner.run(work(served.engine))


def test_a_reply_that_was_overtaken_changes_nothing(served: Served, cluster: Cluster):
    """An engine said version 8 and what it had said before, version 7, comes later: it has the weights of version 8."""

    async def work(engine: RemoteEngine) -> None:
        asking = asyncio.ensure_future(engine.generate(PROMPT, range(8), SAMPLING))
        await asyncio.sleep(0)
        for number, version in ((10**6, 8), (10**6 - 1, 7)):
            await engine._answer(cluster.put(ActorReply(None, number, version, beats=1)))
            assert engine.version == 8
        await asking

    served.runner.run(work(served.engine))
