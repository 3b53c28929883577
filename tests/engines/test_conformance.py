"""What every engine promises: `gnomon.testing` has the promises, for engines of a user's own too."""

import asyncio
import importlib.util
from collections.abc import Callable

import pytest
import torch

from gnomon.cluster.ray import import_ray
from gnomon.cluster.start import loopback_ray
from gnomon.engines.base import Engine
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.engines.scripted import ScriptedEngine
from gnomon.models.tiny import tiny_model
from gnomon.testing import (
    ENGINE_PROMISES,
    OWN_WEIGHTS_PROMISES,
    TRIAL_CONFIG,
    TRIAL_CONTEXT,
    Promise,
    a_score_disturbs_no_answer,
    a_score_is_what_was_said_of_its_own_tokens,
    check_engine,
    greedy_answers_are_the_likeliest,
    trial_model,
    trial_snapshot,
)


def scripted() -> Engine:
    """An engine whose answer's length and tokens depend on the key."""
    return ScriptedEngine(
        lambda prompt, key: [(key * 7 + n) % 250 for n in range(key % 20)], context_length=TRIAL_CONTEXT
    )


def local() -> Engine:
    """A tiny model with room for three rows."""
    return LocalEngine(tiny_model(0, TRIAL_CONFIG), max_concurrent=3)


def local_copy() -> Engine:
    """The same with weights of its own."""
    return LocalEngine(tiny_model(1, TRIAL_CONFIG), max_concurrent=3, shared=False)


def pool() -> Engine:
    """Two of them behind one protocol."""
    return EnginePool({"a": local_copy(), "b": local_copy()}, vocabulary_size=258)


def vllm() -> Engine:
    """The same, computed by vLLM."""
    from gnomon.engines.vllm.engine import VllmEngine

    return VllmEngine(trial_model(), torch.float32, max_concurrent=3)


def vllm_native() -> Engine:
    """The same, drawn by vLLM's own sampler."""
    from gnomon.engines.vllm.engine import VllmEngine

    return VllmEngine(trial_model(), torch.float32, max_concurrent=3, draws="vllm")


def remote() -> Engine:
    """The same in a process of a Ray cluster."""
    from tests.cluster.here import standing, tiny_order

    from gnomon.cluster.engines import RemoteEngine
    from gnomon.cluster.weight_store import WeightCache

    return RemoteEngine(standing(), 0, tiny_order(), WeightCache())


def transformers_generate() -> Engine:
    """The example of an engine of one's own."""
    from examples.own_engine import Generate

    return Generate(trial_model(), torch.float32, torch.device("cpu"), max_concurrent=3)


has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not here: make test-full")
with_vllm, with_native = (
    pytest.param(make, marks=[has_vllm, pytest.mark.filterwarnings("ignore")]) for make in (vllm, vllm_native)
)
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not here")
if all(map(importlib.util.find_spec, ("vllm", "ray"))):
    # vLLM imports Ray, which has to be told before that it shows its key.
    loopback_ray(import_ray)
with_ray = pytest.param(remote, marks=[has_ray, pytest.mark.slow])


MAKERS = [scripted, local, local_copy, pool, transformers_generate, with_vllm, with_native, with_ray]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("promise", ENGINE_PROMISES, ids=lambda promise: promise.__name__)
def test_an_engine_holds_what_engines_promise(make: Callable[[], Engine], promise: Promise):
    """All promises by all engines, but what one without weights of its own cannot hold."""
    torch.set_num_threads(1)
    if make in (local, scripted) and promise in OWN_WEIGHTS_PROMISES:
        pytest.skip("it has no weights of its own")
    if make is vllm_native and promise is a_score_is_what_was_said_of_its_own_tokens:
        pytest.skip("it refuses top-p; tests/engines/vllm/test_native.py holds its scores without")
    check_engine(make, promise)


def test_an_engine_of_shared_weights_scores_beside_answers_and_is_greedy():
    """The engine of the learner's own module, which has no weights to compare, holds what the others hold of these."""
    check_engine(local, a_score_disturbs_no_answer, greedy_answers_are_the_likeliest)


@pytest.mark.parametrize("make", [local, scripted])
def test_an_engine_without_weights_of_its_own_has_none_to_compare(make: Callable[[], Engine]):
    """It answers with the learner's module, or from a function."""

    async def body() -> None:
        engine = make()
        await engine.load(trial_snapshot(0))
        assert await engine.fingerprints() is None
        await engine.close()

    asyncio.run(body())
