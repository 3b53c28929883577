"""vLLM's own sampler (`engine.draws = "vllm"`), and what docs/engines.md says of the vLLM that is installed."""

import asyncio
import math
import re
import sys
from collections import Counter
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.engines.vllm.test_engine import PROMPT, SAMPLING, teacher_forced

from gnomon.core.errors import ConfigError
from gnomon.core.sections import EngineConfig
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.vllm.engine import SUPPORTED, make_vllm
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TINY_MODELS, save_tiny, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"


def weights(version: int, seed: int, config) -> Snapshot:
    """Return the weights of a seed."""
    return Snapshot(version, lambda: merged_tensors(tiny_model(seed, config)))


@pytest.fixture(scope="module")
def server(folder):
    """Return a server whose vLLM draws: this process has the engine of the other tests."""
    plan = EngineConfig(
        kind="vllm", draws="vllm", max_concurrent=3, server="start", python=sys.executable, timeout_seconds=120
    )
    made = make_vllm(str(folder), plan, torch.float32)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def native(server, config):
    """Return a function that runs a coroutine function on the server, with the weights of seed 0 as version 0."""

    def runs(steps):
        async def body():
            await server.load(weights(0, 0, config))
            await steps(server)

        asyncio.run(body())

    return runs


def test_it_draws_what_it_says_and_says_what_the_learner_computes(native, config):
    """Log-probabilities to 1e-5 of a plain forward pass; first tokens as often as they say, within five deviations."""

    async def steps(engine):
        for temperature in (1.0, 0.6):
            sampling = replace(SAMPLING, temperature=temperature)
            for done in await engine.generate(PROMPT, range(8), sampling):
                plain = teacher_forced(0, config, PROMPT, done, temperature)
                assert done.full_logprobs == pytest.approx(plain, abs=1e-5)
                assert done.logprobs == done.full_logprobs
                assert await engine.score(PROMPT, done.tokens, temperature) == pytest.approx(plain, abs=1e-5)
        count = 2000
        firsts = await engine.generate(PROMPT, range(count), Sampling(temperature=0.4, max_completion_length=1))
        chances = {done.tokens[0]: math.exp(done.logprobs[0]) for done in firsts}
        found = Counter(done.tokens[0] for done in firsts)
        likely = {token: chance for token, chance in chances.items() if chance * count >= 20}
        assert len(likely) >= 5
        for token, chance in likely.items():
            assert abs(found[token] - count * chance) < 5 * math.sqrt(count * chance * (1 - chance))

    native(steps)


def test_its_draws_hang_on_the_key_and_its_versions_on_the_weights(native, config):
    """A key draws the same again, alone or in company; new weights between two tokens show in the versions."""

    async def steps(engine):
        together = await engine.generate(PROMPT, [11, 2**127 + 3, 8], SAMPLING)
        assert [(await engine.generate(PROMPT, [key], SAMPLING))[0].tokens for key in (8, 2**127 + 3)] == [
            together[2].tokens,
            together[1].tokens,
        ]
        sampling = Sampling(max_completion_length=90)
        before = engine.beats
        asking = asyncio.ensure_future(engine.generate(PROMPT, range(3), sampling))
        while engine.beats == before:
            await engine._listen()
        await engine.load(weights(7, 3, config))
        assert {(done.oldest_version, done.newest_version) for done in await asking} == {(0, 7)}
        prompt = [256, *range(50, 130), 61]
        for version, seed in ((8, 0), (9, 3)):
            await engine.load(weights(version, seed, config))
            [done] = await engine.generate(prompt, [1], replace(SAMPLING, max_completion_length=4))
            assert done.full_logprobs == pytest.approx(teacher_forced(seed, config, prompt, done, 1.0), abs=1e-5)
            assert (done.oldest_version, done.newest_version) == (version, version)

    native(steps)


def test_what_it_cannot_say_is_refused(native):
    """Truncation and temperatures below 0.01 are refused, with what to set."""

    async def steps(engine):
        for sampling, words in (
            (replace(SAMPLING, top_p=0.9, top_k=5), r"without sampling.top_p = 0.9, sampling.top_k = 5 beside"),
            (replace(SAMPLING, temperature=0.001), r"raises sampling.temperature = 0.001 to 0.01"),
        ):
            with pytest.raises(ConfigError, match=words):
                await engine.generate(PROMPT, [0], sampling)

    native(steps)


def test_docs_say_what_the_installed_vllm_has(folder, monkeypatch, tmp_path):
    """Each row of the table in docs/engines.md is looked up in the package, not remembered."""
    from vllm import EngineArgs, SamplingParams, outputs
    from vllm.config.model import LogprobsMode
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the table is about vLLM on a CPU")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    arguments = {one.name for one in fields(EngineArgs)}
    mixture = save_tiny(tmp_path, config=TINY_MODELS["tiny-moe"])

    def takes(**asked: object) -> bool:
        """Whether vLLM configures a mixture so on this machine."""
        try:
            EngineArgs(model=str(mixture), dtype="float32", skip_tokenizer_init=True, **asked).create_engine_config()
        except ValueError:
            return False
        return True

    assert takes()
    has = {
        "the second model runner on a CPU without Triton": config.use_v2_model_runner,
        "asynchronous scheduling on a CPU": config.scheduler_config.async_scheduling,
        "`processed_logprobs`": "processed_logprobs" in get_args(LogprobsMode),
        "trace replay": "enable_trace_replay" in arguments and hasattr(SamplingParams(), "trace_decode_token_ids"),
        "logits processors on the second runner": find_spec("vllm.v1.worker.gpu.sample.logits_processor") is not None,
        "weight versions of an answer in spans": hasattr(outputs, "WeightVersionSpan"),
        "experts of each token, with an answer's end, on the second runner": "enable_return_routed_experts"
        in arguments,
        "experts of each token on a CPU": takes(enable_return_routed_experts=True),
        "sleep mode on a CPU": takes(enable_sleep_mode=True),
    }
    rows = re.findall(r"^\| (.+) \| (yes|no) \| .+ \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert {name: said == "yes" for name, said in rows} == has
    assert f"| vLLM {SUPPORTED[-1]} | there |" in PAGE.read_text()
