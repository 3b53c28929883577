"""What every engine promises."""

import asyncio
import functools
import importlib.util
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine, Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

CONTEXT = 96
# Heads of 32: vLLM's kernels for CPUs know none smaller.
CONFIG = TinyConfig(width=128, context_length=CONTEXT)
PROMPT = [256, 50, 43, 50, 61]
SAMPLING = Sampling(max_completion_length=12, stop_ids=(257,))


def scripted() -> Engine:
    """An engine whose answer's length and tokens depend on the key."""
    return ScriptedEngine(lambda prompt, key: [(key * 7 + n) % 250 for n in range(key % 20)], context_length=CONTEXT)


def local() -> Engine:
    """A tiny model with room for three rows."""
    return LocalEngine(tiny_model(0, CONFIG), max_concurrent=3)


def local_copy() -> Engine:
    """The same with weights of its own."""
    return LocalEngine(tiny_model(1, CONFIG), max_concurrent=3, shared=False)


def pool() -> Engine:
    """Two of them behind one protocol."""
    return EnginePool({"a": local_copy(), "b": local_copy()}, vocabulary_size=258)


def snapshot(version: int, seed: int = 0) -> Snapshot:
    """A tiny model's weights as some version; made once, for several engines may read them at the same time."""
    tensors = list(merged_tensors(tiny_model(seed, CONFIG)))
    return Snapshot(version, lambda: iter(tensors))


@functools.cache
def folder() -> Path:
    """Where the model of another seed is, for engines that load it themselves."""
    return save_tiny(Path(tempfile.mkdtemp(prefix="gnomon-conformance-")), 1, CONFIG)


def vllm() -> Engine:
    """The same, computed by vLLM."""
    from gnomon.engines.vllm.engine import VllmEngine

    return VllmEngine(str(folder()), torch.float32, max_concurrent=3)


def remote() -> Engine:
    """The same in a process of a Ray cluster."""
    from tests.cluster.here import standing, tiny_order

    from gnomon.cluster.engines import RemoteEngine
    from gnomon.cluster.weight_store import WeightCache

    return RemoteEngine(standing(), 0, tiny_order(), WeightCache())


has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not here: make test-full")
with_vllm = pytest.param(vllm, marks=[has_vllm, pytest.mark.filterwarnings("ignore")])
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not here")
with_ray = pytest.param(remote, marks=[has_ray, pytest.mark.slow])
every_engine = pytest.mark.parametrize("make", [scripted, local, local_copy, pool, with_vllm, with_ray])


def run(make: Callable[[], Engine], steps) -> None:
    """Run the coroutine function ``steps`` on a new engine, which is closed after it."""

    async def body() -> None:
        torch.set_num_threads(1)
        engine = make()
        await engine.load(snapshot(0))
        await steps(engine)
        await engine.close()

    asyncio.run(body())


@every_engine
def test_one_completion_per_key_in_order(make):
    """Answers come in key order; asked one by one they are the same."""

    async def steps(engine: Engine) -> None:
        keys = [11, 3, 8, 5, 19]
        together = await engine.generate(PROMPT, keys, SAMPLING)
        alone = [(await engine.generate(PROMPT, [key], SAMPLING))[0] for key in keys]
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        assert await engine.generate(PROMPT, [], SAMPLING) == []

    run(make, steps)


@every_engine
def test_tokens_and_logprobs_belong_together(make):
    """Each token has two log-probabilities, at most 0 and finite, equal without truncation."""

    async def steps(engine: Engine) -> None:
        for done in await engine.generate(PROMPT, range(8), SAMPLING):
            assert len(done.tokens) == len(done.logprobs) == len(done.full_logprobs) >= 1
            assert all(math.isfinite(p) and p <= 0 for p in done.logprobs)
            assert done.logprobs == done.full_logprobs

    run(make, steps)


@every_engine
@pytest.mark.parametrize("stop_ids", [(257,), (257, 50, 51, *range(100, 140))], ids=["one", "many"])
def test_a_completion_ends_at_its_first_stop_token_or_at_the_budget(make, stop_ids):
    """ "stop" ends in the one stop token that it holds; "length" has exactly the budget and none."""

    async def steps(engine: Engine) -> None:
        sampling = Sampling(max_completion_length=9, stop_ids=stop_ids)
        reasons = set()
        for done in await engine.generate(PROMPT, range(24), sampling):
            ends = [place for place, token in enumerate(done.tokens) if token in stop_ids]
            assert ends == ([len(done.tokens) - 1] if done.stop == "stop" else [])
            assert len(done.tokens) <= 9
            assert done.stop == "stop" or len(done.tokens) == 9
            reasons.add(done.stop)
        assert reasons == {"stop", "length"} or len(stop_ids) == 1

    run(make, steps)


@every_engine
def test_versions_are_those_of_the_loaded_weights(make):
    """An engine answers -1 before the first load; a completion carries the version that sampled it."""

    async def steps(engine: Engine) -> None:
        assert engine.version == 0
        await engine.load(snapshot(4))
        [done] = await engine.generate(PROMPT, [1], SAMPLING)
        assert (engine.version, done.oldest_version, done.newest_version) == (4, 4, 4)

    new = make()
    assert new.version == -1
    asyncio.run(new.close())
    run(make, steps)


@every_engine
def test_prompt_and_budget_must_fit_the_context(make):
    """92 + 4 fit into 96, one more does not, and the message has the numbers."""

    async def steps(engine: Engine) -> None:
        sampling = Sampling(max_completion_length=4)
        assert len(await engine.generate([65] * (CONTEXT - 4), [0], sampling)) == 1
        with pytest.raises(ConfigError, match=r"prompt of 93 tokens and max_completion_length = 4 .*96"):
            await engine.generate([65] * (CONTEXT - 3), [0], sampling)

    run(make, steps)


@every_engine
def test_a_closed_engine_refuses(make):
    """After close, generate and load raise; closing twice does not."""

    async def steps(engine: Engine) -> None:
        await engine.close()
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.generate(PROMPT, [0], SAMPLING)
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.load(snapshot(1))
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.score(PROMPT, [65], 1.0)

    run(make, steps)


@every_engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_score_is_what_the_engine_said_of_its_own_tokens(make, temperature):
    """Equal to `full_logprobs` to 1e-5, also where sampling was truncated; an empty response has no score."""

    async def steps(engine: Engine) -> None:
        sampling = Sampling(temperature=temperature, top_p=0.8, max_completion_length=12, stop_ids=(257,))
        for done in await engine.generate(PROMPT, range(4), sampling):
            scores = await engine.score(PROMPT, done.tokens, temperature)
            assert scores == pytest.approx(done.full_logprobs, abs=1e-5)
        assert await engine.score(PROMPT, [], temperature) == []

    run(make, steps)


@pytest.mark.parametrize("make", [local, local_copy, with_vllm, with_ray])
def test_a_score_is_of_the_weights_that_answer_now(make):
    """It follows `load`, also while answers are on their way, which it does not disturb."""

    async def steps(engine: Engine) -> None:
        alone = await engine.generate(PROMPT, range(3), SAMPLING)
        first, answers = await asyncio.gather(
            engine.score(PROMPT, [65, 66], 1.0), engine.generate(PROMPT, range(3), SAMPLING)
        )
        assert [a.tokens for a in answers] == [a.tokens for a in alone]
        assert first == pytest.approx(await engine.score(PROMPT, [65, 66], 1.0), abs=1e-6)
        with pytest.raises(ConfigError, match=r"response has token ids from 65 to 999, outside .* vocabulary of 259"):
            await engine.score(PROMPT, [65, 999], 1.0)
        with pytest.raises(ConfigError, match="empty prompt"):
            await engine.score([], [65], 1.0)

    run(make, steps)


@pytest.mark.parametrize("make", [local_copy, pool, with_vllm, with_ray])
def test_a_score_follows_a_load(make):
    """Other weights score otherwise, and the first ones as before."""

    async def steps(engine: Engine) -> None:
        first = await engine.score(PROMPT, [65, 66], 1.0)
        await engine.load(snapshot(1, seed=2))
        second = await engine.score(PROMPT, [65, 66], 1.0)
        await engine.load(snapshot(2))
        assert await engine.score(PROMPT, [65, 66], 1.0) == pytest.approx(first, abs=1e-6)
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.1

    run(make, steps)


@pytest.mark.parametrize("make", [local_copy, pool, with_vllm, with_ray])
def test_an_engine_says_which_weights_it_holds(make):
    """Those of the snapshot that it was given, under its names."""

    async def steps(engine: Engine) -> None:
        assert await engine.fingerprints() == fingerprints(snapshot(0).tensors())

    run(make, steps)


@pytest.mark.parametrize("make", [local, scripted])
def test_an_engine_without_weights_of_its_own_has_none_to_compare(make):
    """It answers with the learner's module, or from a function."""

    async def nothing(engine: Engine) -> None:
        assert await engine.fingerprints() is None

    run(make, nothing)
