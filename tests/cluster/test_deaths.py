"""Engines of a cluster that are killed at the worst moments: the step ends as without it, or with all causes named."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.here import CONFIG, opened, send, settled, snapshot, tiny_order

from gnomon.cluster.engines import serve_remotely
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.errors import EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = pytest.mark.slow

MOMENTS = ("start", "load", "generate", "fingerprints")


def die(folder: Path, moment: str) -> None:
    """End this process as SIGKILL does, if a death at this moment was ordered; each order is for one process."""
    for order in folder.glob(f"{moment}-*"):
        try:
            order.unlink()
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


class Doomed(LocalEngine):
    """A tiny engine that dies when it is told to."""

    def __init__(self, folder: Path) -> None:
        die(folder, "start")
        super().__init__(tiny_model(1, CONFIG), max_concurrent=3, shared=False)
        self._folder = folder

    async def load(self, snapshot: Snapshot) -> None:
        """Die, or load."""
        die(self._folder, "load")
        await super().load(snapshot)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Answer, and die before anybody hears of it."""
        answers = await super().generate(prompt, keys, sampling)
        die(self._folder, "generate")
        return answers

    async def fingerprints(self):
        """Die, or tell."""
        die(self._folder, "fingerprints")
        return await super().fingerprints()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two places for engines."""
    with opened(ResourceBundle("engine", 0.5), ResourceBundle("engine", 0.5)) as cluster:
        send(__name__)
        yield cluster


async def step(pool: EnginePool, version: int) -> list[tuple[int, ...]]:
    """Answer six prompts, take new weights, and prove them; return the answers."""
    sampling = Sampling(max_completion_length=40)
    asked = [pool.generate([256, 50, n], range(4 * n, 4 * n + 4), sampling) for n in range(6)]
    answers = await asyncio.gather(*asked)
    await pool.load(snapshot(version, seed=version))
    held = await pool.each(lambda engine: engine.fingerprints())
    assert set(map(str, held.values())) == {str(fingerprints(snapshot(version, seed=version).tensors()))}
    return [done.tokens for group in answers for done in group]


def walked(cluster: Cluster, folder: Path, moment: str, deaths: int, said: list[str]) -> None:
    """Walk steps with two engines, ``deaths`` of which die at a moment of the first one; the next begins with both."""

    async def body() -> None:
        if moment == "start":
            order(folder, moment, deaths)
        pool, *_ = serve_remotely(
            cluster, {"one": 0, "two": 1}, tiny_order(partial(Doomed, folder)), 20.0, 259, said.append
        )
        try:
            await pool.load(snapshot(0))
            if moment != "start":
                order(folder, moment, deaths)
            first = await step(pool, 1)
            await settled(lambda: pool.metrics()["engines/alive"] == 2)
            assert await step(pool, 0) != first
            assert await step(pool, 1) == first
        finally:
            await pool.close()

    asyncio.run(body())


def order(folder: Path, moment: str, deaths: int) -> None:
    """Let so many engines die at a moment."""
    for number in range(deaths):
        (folder / f"{moment}-{number}").touch()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_survives_one_death_of_two(cluster: Cluster, tmp_path: Path, moment: str):
    """Wherever it dies: the answers that its weights give, new weights proved, and soon two engines again."""
    said: list[str] = []
    walked(cluster, tmp_path, moment, 1, said)

    assert len(said) == 2
    assert said[0].startswith("lost engine ")
    assert " is gone: " in said[0]
    assert said[1].endswith(("is back, and holds the weights of version 0", "of version 1"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_both_deaths_end_it_in_words(cluster: Cluster, tmp_path: Path, moment: str):
    """With an error that names each engine and how it ended."""

    with pytest.raises(EngineError, match=r"no engine is left to answer \(one: .* is gone: .*; two: .* is gone: "):
        walked(cluster, tmp_path, moment, 2, [])
