"""An engine that releases its memory while the learner works: what is held, who waits, and what wakes it."""

import asyncio
import gc
from typing import Any

import pytest
import torch

from gnomon.core.errors import EngineError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.engines.rng import sample_key
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model

PROMPT, KEYS = [256, *range(65, 90)], [sample_key(5, 0, "t", place) for place in range(6)]
SAMPLING = Sampling(max_completion_length=24, stop_ids=(257, *range(20)))


def snapshot(version: int, seed: int = 0, **settings: Any) -> Snapshot:
    weights = [(name, tensor.clone()) for name, tensor in merged_tensors(tiny_model(seed))]
    return Snapshot(version, lambda: iter(weights), **settings)


def held() -> int:
    """Return the bytes of all tensors of this process, each memory once."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_it_answers_the_same_whether_it_slept_or_not(architecture: Any):
    """Tokens, log-probabilities and fingerprints of three versions of weights are equal to the bit."""
    config = TinyConfig(architecture=architecture)

    async def answers(sleeps: bool) -> list[Any]:
        engine, found = LocalEngine(tiny_model(0, config), shared=False), list[Any]()
        for version, seed in enumerate((0, 1, 2)):
            weights = tiny_model(seed, config)
            await engine.load(Snapshot(version, lambda weights=weights: merged_tensors(weights)))
            found += [await engine.generate(PROMPT, KEYS, SAMPLING), await engine.fingerprints()]
            found += await engine.score(PROMPT, [1, 2, 3], 1.0)
            if sleeps:
                await engine.sleep()
        await engine.close()
        return found

    assert asyncio.run(answers(True)) == asyncio.run(answers(False))


def test_no_weight_and_no_key_or_value_is_held_while_it_sleeps():
    """Counted over all tensors of the process: asleep as much as before it was made, less than a hundredth of it."""

    async def counted() -> tuple[int, int, int, int]:
        before = held()
        engine = LocalEngine(tiny_model(0), shared=False, kept_bytes=1 << 20)
        await engine.load(Snapshot(0, lambda: merged_tensors(tiny_model(0))))
        await engine.generate(PROMPT, KEYS, SAMPLING)
        awake, beats, computed = held(), engine.beats, engine.computed
        await engine.sleep()
        asleep = held()
        assert (engine.beats, engine.computed) == (beats, computed)
        await engine.load(Snapshot(1, lambda: merged_tensors(tiny_model(0))))
        woken = held()
        await engine.close()
        return before, awake, asleep, woken

    before, awake, asleep, woken = asyncio.run(counted())
    weights = sum(one.nbytes for _, one in merged_tensors(tiny_model(0)))
    assert awake - before > weights
    assert asleep - before < weights / 100
    assert woken - before >= weights


def test_released_weights_are_never_computed_with():
    """Asked while it sleeps it fails, also when it gets only what changed; all weights wake it."""

    async def asked() -> None:
        engine = LocalEngine(tiny_model(0), shared=False)
        await engine.load(snapshot(0))
        await engine.sleep()
        await engine.sleep()
        for asking in (engine.generate(PROMPT, KEYS, SAMPLING), engine.score(PROMPT, [1], 1.0), engine.fingerprints()):
            with pytest.raises(EngineError, match="the engine sleeps: it released its weights"):
                await asking
        with pytest.raises(EngineError, match="changed since version 0; the engine has -2; it had released"):
            await engine.load(snapshot(1, since=0))
        assert engine.version == 0
        await engine.load(snapshot(1))
        assert engine.version == 1
        assert len(await engine.generate(PROMPT, KEYS, SAMPLING)) == len(KEYS)
        await engine.close()

    asyncio.run(asked())


def test_the_learners_own_weights_are_not_released():
    """An engine that shares them says so."""
    with pytest.raises(EngineError, match="has none that it could release"):
        asyncio.run(LocalEngine(tiny_model(0)).sleep())


def test_answers_on_their_way_are_given_before_it_sleeps_and_later_ones_after_it_woke():
    """Events in order: the answer that was begun, sleep, the load, the answer that was asked in between."""

    async def ordered() -> list[str]:
        pool, events = EnginePool({"local": LocalEngine(tiny_model(0), shared=False)}), list[str]()
        await pool.load(snapshot(0))

        async def ask(name: str) -> None:
            done = await pool.generate(PROMPT, KEYS, SAMPLING)
            events.append(f"{name} by {done[0].oldest_version}")

        first = asyncio.ensure_future(ask("first"))
        await asyncio.sleep(0)
        await pool.sleep()
        events.append("asleep")
        second = asyncio.ensure_future(ask("second"))
        for _ in range(1000):
            await asyncio.sleep(0)
        events.append("waiting" if not second.done() else "answered")
        await pool.load(snapshot(1))
        await asyncio.gather(first, second)
        await pool.close()
        return events

    assert asyncio.run(ordered()) == ["first by 0", "asleep", "waiting", "second by 1"]


class Lost(ScriptedEngine):
    """An engine whose process is gone when it is to wake."""

    async def sleep(self) -> None:
        """Release nothing."""

    async def load(self, snapshot: Snapshot) -> None:
        if snapshot.version > 0:
            raise EngineError("its process is gone")
        await super().load(snapshot)


def test_an_engine_that_was_lost_asleep_is_found_when_it_is_to_wake():
    """Another one answers what waited; where none is left, whoever waited is told so."""

    async def after(*others: str) -> Any:
        lost = list[str]()
        sleeping = {name: LocalEngine(tiny_model(0), shared=False) for name in others}
        pool = EnginePool({"gone": Lost(lambda prompt, key: [1, 257]), **sleeping}, warn=lost.append)
        await pool.load(snapshot(0))
        await pool.sleep()
        asked = asyncio.ensure_future(pool.generate(PROMPT, KEYS, SAMPLING))
        await asyncio.sleep(0)
        try:
            await pool.load(snapshot(1))
            return (await asked)[0].newest_version, lost[0]
        finally:
            await asyncio.gather(asked, return_exceptions=True)
            await pool.close()

    assert asyncio.run(after("other"))[0] == 1
    with pytest.raises(EngineError, match=r"no engine is left to answer \(gone: its process is gone"):
        asyncio.run(after())


def test_an_engine_that_cannot_sleep_is_named():
    """It is no use to wait for it."""

    async def asleep() -> None:
        pool = EnginePool({"scripted": ScriptedEngine(lambda prompt, key: [1, 257])})
        await pool.load(snapshot(0))
        await pool.sleep()

    with pytest.raises(EngineError, match="ScriptedEngine cannot release its weights"):
        asyncio.run(asleep())
