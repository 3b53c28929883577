"""F12 on a cluster: an engine that dies in the middle of taking new weights, twenty-one times."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cluster.here import CONFIG, opened, send, settled, snapshot, tiny_order

from gnomon.cluster.engines import serve_remotely
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core import failpoints
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# An engine is started anew three times in a run, so that seven pools bear twenty-one deaths.
POOLS, DEATHS = 7, 3
# Only what changed is sent, and norms are ones with every seed.
SENT = sum(
    not torch.equal(one, other)
    for (_, one), (_, other) in zip(*(merged_tensors(tiny_model(seed, CONFIG)) for seed in (0, 1)), strict=True)
)
SAMPLING = Sampling(max_completion_length=24)
PROMPTS = [[256, 50, number] for number in range(4)]


class Interrupted(LocalEngine):
    """A tiny engine that dies in the middle of a copy when a file says at which tensor; each file is for one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(tiny_model(1, CONFIG), max_concurrent=4, shared=False)
        self._folder = folder

    async def load(self, snapshot: Snapshot) -> None:
        """Load, or die at that tensor."""
        for order in self._folder.glob("exchange-*"):
            try:
                order.unlink()
            except FileNotFoundError:
                continue
            failpoints.arm(order.name.replace("-", ":"))
            break
        await super().load(snapshot)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two places for engines."""
    with opened(ResourceBundle("engine", 0.5), ResourceBundle("engine", 0.5)) as cluster:
        send(__name__)
        yield cluster


async def answers(engine: EnginePool | LocalEngine) -> list[tuple[int, ...]]:
    """Answer four prompts, each by one version from beginning to end."""
    asked = [engine.generate(prompt, range(4 * n, 4 * n + 4), SAMPLING) for n, prompt in enumerate(PROMPTS)]
    done = [one for group in await asyncio.gather(*asked) for one in group]
    assert {(one.oldest_version, one.newest_version) for one in done} == {(engine.version, engine.version)}
    return [one.tokens for one in done]


async def expected(version: int) -> Sequence[tuple[int, ...]]:
    """Return what whole weights of this version answer."""
    engine = LocalEngine(tiny_model(1, CONFIG), max_concurrent=4, shared=False)
    try:
        await engine.load(snapshot(version, seed=version))
        return await answers(engine)
    finally:
        await engine.close()


@pytest.mark.parametrize("number", range(POOLS))
def test_no_answer_is_of_half_exchanged_weights(cluster: Cluster, tmp_path: Path, number: int):
    """Three deaths: the other engine answers as whole weights do; the lost one once it has proved them."""
    said: list[str] = []

    async def body() -> None:
        order = tiny_order(partial(Interrupted, tmp_path))
        pool, *_ = serve_remotely(cluster, {"one": 0, "two": 1}, order, 60.0, 259, said.append)
        try:
            await pool.load(snapshot(0, seed=0))
            for death in range(DEATHS):
                version = death + 1
                at = 1 + (number * DEATHS + death) * (SENT - 1) // (POOLS * DEATHS - 1)
                (tmp_path / f"exchange-{at}").touch()
                await pool.load(snapshot(version, seed=version))
                assert pool.metrics()["engines/lost"] == 1, said
                assert await answers(pool) == await expected(version)
                await settled(lambda: pool.metrics()["engines/alive"] == 2, seconds=240.0)
                held = await pool.each(lambda engine: engine.fingerprints())
                assert len(held) == 2
                assert set(map(str, held.values())) == {str(fingerprints(snapshot(0, seed=version).tensors()))}
                assert await answers(pool) == await expected(version)
        finally:
            await pool.close()

    asyncio.run(body())
    assert sum(" is gone: " in line for line in said) == DEATHS
