"""A lost engine that comes back: started anew, proved, and only then asked."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gnomon.core.errors import EngineError
from gnomon.core.types import Completion, Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.transfer.fingerprint import Fingerprint, fingerprints

PROMPT, SAMPLING = [7, 8, 9], Sampling(max_completion_length=12, stop_ids=(257,))


def weights(version: int) -> Snapshot:
    """Weights that say which version they are."""
    return Snapshot(version, lambda: iter([("w", torch.full((2,), float(version)))]))


@dataclass
class Holding:
    """A scripted engine that knows which weights it holds, dies when it is told to, and notes what it is asked.

    spoil: what it holds of what it is given. gate: which a load waits for.
    """

    spoil: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    gate: asyncio.Event | None = None
    is_dead: bool = False
    log: list[str] = field(default_factory=list)
    held: Mapping[str, Fingerprint] = field(default_factory=dict)
    inner: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(lambda prompt, key: [key % 250, 1]))

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def beats(self) -> int:
        return self.inner.beats

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.log.append(f"generate {self.version}")
        if self.is_dead:
            raise EngineError("killed")
        return await self.inner.generate(prompt, keys, sampling)

    async def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return [-1.0] * len(response)

    async def load(self, snapshot: Snapshot) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.is_dead:
            raise EngineError("killed")
        self.held = fingerprints(self.spoil(snapshot).tensors())
        await self.inner.load(snapshot)
        self.log.append(f"load {snapshot.version}")

    async def fingerprints(self) -> Mapping[str, Fingerprint]:
        self.log.append("fingerprints")
        return self.held

    async def close(self) -> None:
        self.log.append("close")


Again = Callable[[str], Awaitable[Engine]]


def successors(*engines: Holding) -> Again:
    """Return what gives these, one after another, and gives up then."""
    left = list(engines)

    async def restart(name: str) -> Engine:
        if not left:
            raise EngineError("no machine is left")
        return left.pop(0)

    return restart


async def settled(is_so: Callable[[], bool]) -> None:
    """Let others work until it is so."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to that")


def walked(restart: Again, work: Callable[[EnginePool, Holding], Awaitable[Any]]) -> list[str]:
    """Do ``work`` with a pool of two, the first of which it may end; return what was said."""
    said: list[str] = []

    async def body() -> None:
        first, second = Holding(), Holding()
        pool = EnginePool({"first": first, "second": second}, 1.0, 258, said.append, restart)
        await pool.load(weights(0))
        await work(pool, first)
        await pool.close()

    asyncio.run(body())
    return said


async def lose(pool: EnginePool, engine: Holding) -> None:
    """Let an engine die over a question, which the other one answers."""
    engine.is_dead = True
    assert len(await pool.generate(PROMPT, [1, 2], SAMPLING)) == 2


def test_a_lost_engine_comes_back_when_it_has_proved_its_weights():
    """It is closed, another is started, loaded and looked at; then it is asked first again, being named first."""
    other = Holding()

    async def work(pool: EnginePool, first: Holding) -> None:
        await lose(pool, first)
        await settled(lambda: pool.metrics()["engines/alive"] == 2)
        await pool.generate(PROMPT, [3], SAMPLING)
        assert first.log[-1] == "close"

    said = walked(successors(other), work)

    assert other.log == ["load 0", "fingerprints", "generate 0", "close"]
    assert said[0].startswith("lost engine first: killed; 1 of 2 engines go on")
    assert said[1:] == ["engine first is back, and holds the weights of version 0"]


def test_losses_and_returns_are_counted_once():
    """Each in the metrics of the step in which it happened."""

    async def work(pool: EnginePool, first: Holding) -> None:
        await lose(pool, first)
        assert pool.metrics().values() == {
            "engines/alive": 1,
            "engines/lost": 1,
            "engines/returned": 0,
            "engines/asked_again": 1,
        }
        seen: list[float] = []
        await settled(lambda: seen.append(pool.metrics()["engines/returned"]) or sum(seen) > 0)
        assert sum(seen) == 1
        assert pool.metrics()["engines/returned"] == 0

    walked(successors(Holding()), work)


def test_an_engine_that_holds_other_weights_is_never_asked():
    """It says their version, and has other bits: the next one is started in its place."""
    wrong, right = Holding(spoil=lambda snapshot: weights(9)), Holding()

    async def work(pool: EnginePool, first: Holding) -> None:
        await lose(pool, first)
        await settled(lambda: pool.metrics()["engines/alive"] == 2)

    walked(successors(wrong, right), work)

    assert wrong.log == ["load 0", "fingerprints", "close"]
    assert right.log == ["load 0", "fingerprints", "close"]


def test_nobody_waits_for_one_that_is_on_its_way_back():
    """Answers and newer weights come and go meanwhile; it proves the newest before it is asked."""

    async def work(pool: EnginePool, first: Holding) -> None:
        other.gate = asyncio.Event()
        await lose(pool, first)
        await asyncio.sleep(0.01)
        await pool.load(weights(1))
        await pool.generate(PROMPT, [5], SAMPLING)
        assert pool.metrics()["engines/alive"] == 1
        other.gate.set()
        await settled(lambda: pool.metrics()["engines/alive"] == 2)
        assert pool.version == 1

    other = Holding()
    walked(successors(other), work)

    assert other.log == ["load 0", "fingerprints", "load 1", "fingerprints", "close"]


def test_one_that_does_not_come_back_is_told():
    """The run goes on with the other one, and says why."""

    async def work(pool: EnginePool, first: Holding) -> None:
        await lose(pool, first)
        await asyncio.sleep(0.01)
        await pool.generate(PROMPT, [5], SAMPLING)

    said = walked(successors(Holding(is_dead=True)), work)

    assert said[1:] == ["engine first does not come back: no machine is left"]
