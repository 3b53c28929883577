import asyncio
import math
from dataclasses import replace

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [256, 50, 43, 50, 61]
SAMPLING = Sampling(max_completion_length=12, stop_ids=(257,))
TRUNCATED = Sampling(temperature=0.7, top_p=0.8, top_k=40, min_p=0.02, max_completion_length=12, stop_ids=(257, 50))


def teacher_forced(seed, config, prompt, done, temperature):
    """Return the tempered log-probabilities of an answer from one forward pass of transformers."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *done.tokens]])
        logits = tiny_model(seed, config)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED], ids=["plain", "truncated"])
def test_it_answers_what_the_local_engine_answers(run, config, sampling):
    """Same weights, same keys: the same tokens and stop reasons, and both log-probabilities to 1e-5."""

    async def steps(engine):
        local = LocalEngine(tiny_model(0, config), max_concurrent=3)
        ours = await local.generate(PROMPT, range(8), sampling)
        await local.close()
        theirs = await engine.generate(PROMPT, range(8), sampling)
        assert [(d.tokens, d.stop) for d in theirs] == [(d.tokens, d.stop) for d in ours]
        for one, other in zip(theirs, ours, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.full_logprobs == pytest.approx(other.full_logprobs, abs=1e-5)
        assert {d.stop for d in theirs} == {"stop", "length"} or not sampling.is_truncated

    run(steps)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_full_logprobs_are_those_of_a_plain_forward(run, config, temperature):
    """Cut by top-p or not, `full_logprobs` is what transformers scores, to 1e-5; `logprobs` is larger when cut."""

    async def steps(engine):
        for top_p in (1.0, 0.5):
            sampling = replace(SAMPLING, temperature=temperature, top_p=top_p)
            for done in await engine.generate(PROMPT, range(4), sampling):
                plain = teacher_forced(0, config, PROMPT, done, temperature)
                assert done.full_logprobs == pytest.approx(plain, abs=1e-5)
                assert all(p <= 0 for p in done.logprobs)
                if top_p == 1.0:
                    assert done.logprobs == done.full_logprobs
                else:
                    cut = [p - q for p, q in zip(done.logprobs, done.full_logprobs, strict=True)]
                    assert all(0.3 < c <= math.log(2) + 1e-5 for c in cut)

    run(steps)


def test_order_and_company_change_nothing_that_is_asked_for(run):
    """Asked one by one, in another order, or beside other settings, an answer's tokens are the same."""

    async def steps(engine):
        together = await engine.generate(PROMPT, [11, 3, 8, 5, 19], SAMPLING)
        (alone,), mixed = await asyncio.gather(
            engine.generate(PROMPT, [8], SAMPLING), engine.generate([65] * 20, [1, 2], TRUNCATED)
        )
        assert alone.tokens == together[2].tokens
        assert [d.tokens for d in mixed] == [d.tokens for d in await engine.generate([65] * 20, [1, 2], TRUNCATED)]
        assert await engine.generate(PROMPT, [], SAMPLING) == []

    run(steps)


def test_an_answer_ends_at_its_first_stop_token_or_at_the_budget(run):
    """ "stop" ends in the one stop token that it holds; "length" has exactly the budget and none."""

    async def steps(engine):
        sampling = Sampling(max_completion_length=9, stop_ids=(257, 50, 51, *range(100, 140)))
        reasons = set()
        for done in await engine.generate(PROMPT, range(24), sampling):
            ends = [place for place, token in enumerate(done.tokens) if token in sampling.stop_ids]
            assert ends == ([len(done.tokens) - 1] if done.stop == "stop" else [])
            assert done.stop == "stop" or len(done.tokens) == 9
            reasons.add(done.stop)
        assert reasons == {"stop", "length"}

    run(steps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_score_is_what_the_engine_said_of_its_own_tokens(run, temperature):
    """Equal to `full_logprobs` to 1e-5, also where sampling was truncated, and up to the end of the context."""

    async def steps(engine):
        sampling = Sampling(temperature=temperature, top_p=0.8, max_completion_length=91)
        for done in await engine.generate(PROMPT, range(2), sampling):
            scores = await engine.score(PROMPT, done.tokens, temperature)
            assert scores == pytest.approx(done.full_logprobs, abs=1e-5)
        assert await engine.score(PROMPT, [], temperature) == []

    run(steps)


def test_new_weights_answer_and_the_first_ones_again(run, config, snapshot):
    """A prompt that older weights computed is not found again: its scores follow every load, to 1e-5."""

    async def steps(engine):
        # Longer than any block of the cache, so that it is kept there.
        prompt = [256, *range(50, 130), 61]
        for version, seed in enumerate([0, 3, 0]):
            await engine.load(snapshot(version, seed))
            [done] = await engine.generate(prompt, [1], replace(SAMPLING, max_completion_length=4))
            again = await engine.generate(prompt, [1], replace(SAMPLING, max_completion_length=4))
            assert again == [done]
            assert done.full_logprobs == pytest.approx(teacher_forced(seed, config, prompt, done, 1.0), abs=1e-5)
            assert (engine.version, done.oldest_version, done.newest_version) == (version, version, version)

    run(steps)


def test_weights_change_between_two_tokens_of_an_answer(run, snapshot):
    """Answers on their way go on with the new weights: their versions say so, and the tokens before are the same."""

    async def steps(engine):
        sampling = Sampling(max_completion_length=90)
        plain = await engine.generate(PROMPT, range(5), sampling)
        asking = asyncio.ensure_future(engine.generate(PROMPT, range(5), sampling))
        await asyncio.sleep(0.05)
        await engine.load(snapshot(7, 3))
        answers = await asking
        assert [d.newest_version for d in answers] == [7] * 5
        # Three at once: the last two had to wait, and saw the new weights only.
        assert [d.oldest_version for d in answers] == [0, 0, 0, 7, 7]
        for before, after in zip(plain[:3], answers[:3], strict=True):
            assert before.tokens[0] == after.tokens[0]
            assert before.tokens != after.tokens

    run(steps)


def test_it_says_which_weights_arrived(run, snapshot):
    """Fingerprints are those of the snapshot, under its names."""

    async def steps(engine):
        await engine.load(snapshot(1, 3))
        assert await engine.fingerprints() == fingerprints(snapshot(1, 3).tensors())

    run(steps)


def test_weights_that_do_not_fit_change_nothing(run):
    """A missing name or another shape is an EngineError; version and answers are as before."""

    async def steps(engine):
        before = await engine.generate(PROMPT, [1], SAMPLING)
        weights = dict(tiny_model(1).named_parameters())
        with pytest.raises(
            EngineError, match=r"snapshot 5 does not fit .*shapes model.embed_tokens.weight \(259, 64\)"
        ):
            await engine.load(Snapshot(5, lambda: iter(weights.items())))
        with pytest.raises(EngineError, match=r"snapshot 6 does not fit .*missing \['model.norm.weight'"):
            await engine.load(Snapshot(6, lambda: ((n, w) for n, w in weights.items() if n != "model.norm.weight")))
        assert engine.version == 0
        assert await engine.generate(PROMPT, [1], SAMPLING) == before

    run(steps)


def test_a_cancelled_caller_frees_its_rows(run):
    """Eight long answers are dropped; one that came later does not wait for them."""

    async def steps(engine):
        asking = asyncio.ensure_future(engine.generate(PROMPT, range(8), Sampling(max_completion_length=90)))
        await asyncio.sleep(0.05)
        asking.cancel()
        await engine.generate(PROMPT, [1], Sampling(max_completion_length=2))
        # The row that was just answered is put away a moment later.
        assert len(engine._thread._active) <= 1
        assert not engine._thread._waiting

    run(steps)


def test_what_cannot_be_asked_is_refused_in_words(run):
    """Empty prompts, unknown tokens, a budget beyond the context, and experts are a ConfigError."""

    async def steps(engine):
        assert len(await engine.generate([65] * 92, [0], replace(SAMPLING, max_completion_length=4))) == 1
        with pytest.raises(ConfigError, match=r"prompt of 93 tokens and max_completion_length = 4 .*96"):
            await engine.generate([65] * 93, [0], replace(SAMPLING, max_completion_length=4))
        with pytest.raises(ConfigError, match="empty prompt"):
            await engine.generate([], [0], SAMPLING)
        with pytest.raises(ConfigError, match=r"prompt has token ids from 65 to 999, outside .* vocabulary of 259"):
            await engine.generate([65, 999], [0], SAMPLING)
        with pytest.raises(ConfigError, match=r"response has token ids from 65 to 999, outside .* vocabulary of 259"):
            await engine.score(PROMPT, [65, 999], 1.0)
        with pytest.raises(ConfigError, match="which experts"):
            await engine.generate(PROMPT, [0], replace(SAMPLING, record_routing=True))

    run(steps)


def test_there_is_one_in_a_process(engine, folder):
    """A second one is refused while the first is open."""
    from gnomon.engines.vllm.engine import VllmEngine

    with pytest.raises(ConfigError, match="has a vLLM engine already"):
        VllmEngine(str(folder), torch.float32)


def test_the_learner_beside_it_keeps_its_threads(engine):
    """vLLM replaces `torch.set_num_threads` on CPUs; it is put back."""
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
