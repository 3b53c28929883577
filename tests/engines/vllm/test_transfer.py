"""Weights by vLLM's own weight transfer: all of it but NCCL itself, in whose place two sockets carry the tensors."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tests.engines.vllm.plugin.sockets_transfer import Wire

from gnomon.core.errors import ConfigError, EngineError
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.vllm.engine import CPU_HEAD_SIZES, runs_by_transformers
from gnomon.engines.vllm.transfer import (
    BEGIN,
    FINISH,
    MEET,
    RECEIVE,
    Sender,
    TransferEngines,
    check_backend,
    rendezvous,
)
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

# vLLM imports and computes with what is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [256, 50, 43, 50, 61]


@pytest.fixture
def wired(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of one sender and one engine's only process, as `rendezvous` describes it."""
    from vllm.distributed.weight_transfer import nccl_engine

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: Wire(info, 0))
    monkeypatch.setattr(
        nccl_engine, "worker_init_process_group", lambda info, config: Wire(info, config.rank + info.rank_offset)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    # Packed, tensors are put together by kernels for GPUs.
    return rendezvous("127.0.0.1", [1], lasting=False)


def test_what_is_sent_answers(engine: Any, snapshot: Callable[..., Any], wired: Any):
    """Twice, with other weights: fingerprints at both ends are those of the weights, and the answers are theirs."""
    seed = [3]
    sampling = Sampling(max_completion_length=12)

    async def body() -> None:
        loop, version = asyncio.get_running_loop(), [0]

        def tell(what: str, told: Any) -> None:
            asyncio.run_coroutine_threadsafe(engine.transfer(what, told, version[0]), loop).result(60)

        await engine.load(snapshot(0))
        sender = await asyncio.to_thread(Sender, wired, [tell], [1], lambda: snapshot(0, seed[0]).tensors())
        for number, given in ((7, 3), (8, 4)):
            version[0], seed[0] = number, given
            asking = asyncio.ensure_future(engine.generate(PROMPT, range(3), Sampling(max_completion_length=60)))
            await asyncio.sleep(0.05)
            sent = await asyncio.to_thread(sender.send)
            assert {done.newest_version for done in await asking} == {number}

            wanted = fingerprints(snapshot(0, given).tensors())
            assert sent == wanted
            assert await engine.fingerprints() == wanted
            local = LocalEngine(tiny_model(given, _config()), max_concurrent=3, shared=False)
            mine, theirs = [await one.generate(PROMPT, range(3), sampling) for one in (local, engine)]
            await local.close()
            assert [done.tokens for done in theirs] == [done.tokens for done in mine]
            assert [p for d in theirs for p in d.logprobs] == pytest.approx(
                [p for d in mine for p in d.logprobs], abs=1e-4
            )
            assert engine.version == number
        sender.close()

    asyncio.run(body())


def _config() -> Any:
    from tests.engines.vllm.conftest import CONFIG

    return CONFIG


def test_ranks_of_engines_follow_each_other(engine: Any):
    """Three engines of one, two and one process behind rank 0: each is told where its own begin."""
    told: list[tuple[int, str, Any]] = []
    calls = [lambda what, said, n=n: told.append((n, what, said)) for n in range(3)]
    engines = TransferEngines(calls, [1, 2, 1])
    info = rendezvous("127.0.0.1", [1, 2, 1])
    engines.init_weight_transfer_engine({**asdict(info), "rank_offset": 1})

    assert info.world_size == 5
    assert {n: said["init_info"]["rank_offset"] for n, _, said in told} == {0: 1, 1: 2, 2: 4}
    assert {what for _, what, _ in told} == {MEET}


def test_one_engine_that_fails_is_heard():
    """What it raised is raised, when the others are through."""

    def fail(what: str, told: Any) -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        TransferEngines([lambda what, told: None, fail], [1, 1]).start_weight_update()


def test_vllm_has_the_interface_that_is_used(engine: Any):
    """The installed version's workers can be told each of the four, and its client's protocol is ours."""
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.worker.gpu_worker import Worker

    assert CPUAttentionBackend.get_supported_head_sizes() == [*CPU_HEAD_SIZES]
    assert isinstance(TransferEngines([], []), VLLMWeightSyncClient)
    assert all(callable(getattr(Worker, name)) for name in (MEET, BEGIN, RECEIVE, FINISH))
    told = nccl_engine.NCCLWeightTransferUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[1, 2]])
    assert asdict(told).keys() == {"names", "dtype_names", "shapes"}


def test_it_is_known_what_it_runs_by_classes_of_transformers(engine: Any):
    """Its registry is read as text, before anything is imported; the registry itself says the same."""
    from vllm.model_executor.models.registry import ModelRegistry

    wrong = [
        name
        for name, known in ModelRegistry.models.items()
        if runs_by_transformers(name) != known.module_name.endswith(".transformers")
    ]

    assert not wrong
    assert runs_by_transformers("SmolLM3ForCausalLM")
    assert runs_by_transformers("NobodysForCausalLM")
    assert not runs_by_transformers("LlamaForCausalLM")


def test_a_transfer_that_nobody_has_is_refused(engine: Any):
    """Before anything is loaded, with the names that are known."""
    with pytest.raises(ConfigError, match=r"cluster\.transfer: .*'ncll'.*nccl"):
        check_backend("ncll")
