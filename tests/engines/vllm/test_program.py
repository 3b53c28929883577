import asyncio
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.sections import EngineConfig
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.vllm.client import VllmServerEngine
from gnomon.engines.vllm.engine import make_vllm
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [256, 50, 43, 50, 61]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, max_completion_length=12, stop_ids=(257,))


def alive(process: int) -> bool:
    """Whether a process runs and is more than a line in the table of those that ended."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_of_its_own_answers_as_the_engine_in_process(run, folder, snapshot):
    """Answers and scores equal those in process; loads, fingerprints, refusals, damage and death arrive in words."""
    plan = EngineConfig(kind="vllm", max_concurrent=3, server="start", python=sys.executable, timeout_seconds=120)

    async def steps(engine):
        expected = await engine.generate(PROMPT, range(4), SAMPLING)
        scores = await engine.score(PROMPT, [65, 66], 0.7)
        served = make_vllm(str(folder), plan, torch.float32)
        assert isinstance(served, VllmServerEngine)
        process = served._started.program.pid
        try:
            # The folder's weights are those of seed 0, so it answers before the first load.
            assert [d.tokens for d in await served.generate(PROMPT, range(4), SAMPLING)] == [d.tokens for d in expected]
            asking = asyncio.ensure_future(served.generate(PROMPT, range(3), Sampling(max_completion_length=90)))
            await asyncio.sleep(0.05)
            await served.load(snapshot(4, 3))
            assert {(d.oldest_version, d.newest_version) for d in await asking} == {(-1, 4)}
            assert await served.fingerprints() == fingerprints(snapshot(4, 3).tensors())
            await served.load(snapshot(5))
            assert served.version == 5
            assert await served.score(PROMPT, [65, 66], 0.7) == pytest.approx(scores, abs=1e-6)
            with pytest.raises(ConfigError, match=r"at http://127.*prompt of 93 tokens .*96"):
                await served.generate([65] * 93, [0], Sampling(max_completion_length=4))
            nan = {name: tensor * math.nan for name, tensor in snapshot(6).tensors()}
            await served.load(Snapshot(6, lambda: iter(nan.items())))
            for _ in range(2):
                with pytest.raises(EngineError, match="not finite"):
                    await served.generate(PROMPT, [0], SAMPLING)
            os.kill(process, signal.SIGKILL)
            with pytest.raises(EngineError, match=rf"process {process} exited with code -9; it last said:[^$]*serving"):
                await served.generate(PROMPT, [0], SAMPLING)
        finally:
            await served.close()
        assert not alive(process)

    run(steps)


def test_a_model_that_vllm_cannot_serve_is_said_with_its_last_words():
    """Heads of 16 have no kernel on a CPU: the server ends, and the first call says so with the end of its log."""
    plan = EngineConfig(kind="vllm", server="start", timeout_seconds=120)

    async def body():
        served = make_vllm("tiny", plan, torch.float32)
        try:
            with pytest.raises(EngineError, match=r"exited with code 1; it last said:[^$]*heads 16 wide"):
                await served.generate(PROMPT, [0], SAMPLING)
        finally:
            await served.close()

    asyncio.run(body())


def test_a_server_ends_with_whoever_started_it(folder):
    """The pipe that it watches is closed when its parent dies; it is gone within seconds, loaded or not."""
    plan = EngineConfig(kind="vllm", server="start")
    served = make_vllm(str(folder), plan, torch.float32)
    program = served._started.program
    time.sleep(3)
    program.stdin.close()
    assert program.wait(timeout=60) == -signal.SIGKILL
    asyncio.run(served.close())
