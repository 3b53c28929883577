"""Two engines in a Ray cluster of which some die."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.cluster.here import kill, opened, settled, snapshot, tiny_order

from gnomon.cluster.engines import RemoteEngine, serve_remotely
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.errors import EngineError
from gnomon.core.metrics import Metrics
from gnomon.engines.base import Sampling
from gnomon.engines.pool import EnginePool
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = pytest.mark.slow

PROMPT = [256, 50, 43, 50, 61]
LONG = Sampling(max_completion_length=90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two places for engines."""
    with opened(ResourceBundle("engine", 0.5), ResourceBundle("engine", 0.5)) as cluster:
        yield cluster


def with_pool(
    cluster: Cluster, work: Callable[[EnginePool, list[RemoteEngine], Callable[[], Metrics]], Awaitable[Any]]
) -> list[str]:
    """Do ``work`` with two engines behind one protocol; return what was said."""
    said: list[str] = []

    async def body() -> None:
        pool, measured, started = serve_remotely(cluster, {"one": 0, "two": 1}, tiny_order(), 20.0, 259, said.append)
        engines = list(started.values())
        try:
            await work(pool, engines, measured)
        finally:
            await pool.close()

    asyncio.run(body())
    return said


def test_a_killed_engine_costs_nothing_and_comes_back_proved(cluster: Cluster):
    """SIGKILL while both answer: every group comes once, as without it; then another holds the present weights."""

    async def groups(pool: EnginePool) -> list[list[tuple[int, ...]]]:
        asked = [pool.generate(PROMPT, range(8 * n, 8 * n + 8), LONG) for n in range(6)]
        return [[done.tokens for done in group] for group in await asyncio.gather(*asked)]

    async def work(pool: EnginePool, engines: list[RemoteEngine], measured: Callable[[], Metrics]) -> None:
        await pool.load(snapshot(0))
        expected = await groups(pool)
        assert measured()["weights/sent_tensors"] == 40
        asking = asyncio.ensure_future(groups(pool))
        await asyncio.sleep(0.1)
        assert not asking.done()
        kill(engines[0].home)
        assert await asking == expected
        counts = pool.metrics()
        assert (counts["engines/lost"], counts["engines/alive"]) == (1, 1)
        assert counts["engines/asked_again"] >= 1
        await pool.load(snapshot(1, seed=2))
        await settled(lambda: pool.metrics()["engines/alive"] == 2)
        held = await pool.each(lambda engine: engine.fingerprints())
        assert held == dict.fromkeys(("one", "two"), fingerprints(snapshot(1, seed=2).tensors()))

    said = with_pool(cluster, work)

    assert len(said) == 2
    assert said[0].startswith("lost engine one: process ")
    assert "is gone" in said[0]
    assert said[1] == "engine one is back, and holds the weights of version 1"


def test_without_any_engine_left_everybody_is_told(cluster: Cluster):
    """Both killed: an error that names each and its cause, at once."""

    async def work(pool: EnginePool, engines: list[RemoteEngine], measured: Callable[[], Metrics]) -> None:
        await pool.load(snapshot(0))
        asking = asyncio.ensure_future(pool.generate(PROMPT, range(30), LONG))
        await asyncio.sleep(0.1)
        for engine in engines:
            kill(engine.home)
        with pytest.raises(EngineError, match=r"no engine is left to answer \(one: process .* gone.*; two: process"):
            await asyncio.wait_for(asking, 20)

    with_pool(cluster, work)
