"""A model that two processes of vLLM's hold together: the same answers, and new weights in both."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.cluster.here import children
from tests.engines.vllm.conftest import CONFIG

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.sections import EngineConfig
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.vllm.client import VllmServerEngine
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PLAN = EngineConfig(kind="vllm", server="start", tensor_parallel=2, max_concurrent=8, timeout_seconds=60)
PROMPT = [256, 50, 43, 50, 61]


def test_two_processes_answer_as_one_and_take_new_weights(folder: Path, snapshot):
    """Tokens of the local engine, log-probabilities to 1e-4, before and after an exchange; scores and proof as well."""
    sampling = Sampling(max_completion_length=20)

    async def body() -> None:
        engine = VllmServerEngine.start(str(folder), PLAN, torch.float32)
        local = LocalEngine(tiny_model(9, CONFIG), max_concurrent=8, shared=False)
        try:
            for version, seed in ((0, 0), (1, 3)):
                for one in (engine, local):
                    await one.load(snapshot(version, seed))
                mine, theirs = [await one.generate(PROMPT, range(8), sampling) for one in (local, engine)]
                assert [done.tokens for done in theirs] == [done.tokens for done in mine]
                for ours, others in zip(mine, theirs, strict=True):
                    assert others.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
                assert {done.newest_version for done in theirs} == {version}
                assert await engine.fingerprints() == fingerprints(snapshot(version, seed).tensors())
                scores = [await one.score(PROMPT, [50, 61, 43], 0.7) for one in (local, engine)]
                assert scores[1] == pytest.approx(scores[0], abs=1e-4)
        finally:
            await engine.close()
            await local.close()

    asyncio.run(body())


def test_the_death_of_one_of_them_is_the_engines(folder: Path, snapshot):
    """Killed between two answers: whoever asks next is told, in words, and nobody waits."""

    async def body() -> None:
        engine = VllmServerEngine.start(str(folder), PLAN, torch.float32)
        try:
            await engine.load(snapshot(0))
            assert engine._started is not None
            server = engine._started.program.pid
            workers = [n for n in children(server) if b"VLLM::Worker" in Path(f"/proc/{n}/cmdline").read_bytes()]
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            with pytest.raises(EngineError, match=r"vLLM cannot go on|does not answer|has answered nothing"):
                await asyncio.wait_for(engine.generate(PROMPT, range(2), Sampling(max_completion_length=20)), 100)
        finally:
            await engine.close()

    asyncio.run(body())


def test_heads_that_cannot_be_dealt_out_are_refused(tmp_path: Path):
    """Four heads over three processes: vLLM's own words, as a ConfigError, by the server's log."""
    model = save_tiny(tmp_path / "model", config=TinyConfig(width=128, context_length=96))

    async def body() -> None:
        engine = VllmServerEngine.start(
            str(model), EngineConfig(kind="vllm", server="start", tensor_parallel=3), torch.float32
        )
        try:
            with pytest.raises((EngineError, ConfigError), match=r"vLLM cannot serve .*heads"):
                await engine.score(PROMPT, [1], 1.0)
        finally:
            await engine.close()

    asyncio.run(body())
