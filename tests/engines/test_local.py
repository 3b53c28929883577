import asyncio
import random

import pytest
import torch

from gnomon.core.errors import ConfigError, EngineError
from gnomon.core.types import Snapshot
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.lora import adapt, merged_tensors
from gnomon.models.tiny import tiny_model
from gnomon.models.transfer.fingerprint import fingerprints

STOPS = (257, *range(20))
RAGGED = [
    ([256], 3),
    ([256, *range(65, 90)], 4),
    ([256, 72, 105], 1),
    ([256, *range(100, 140)], 2),
    ([256, *range(65, 90)], 2),
    ([9, 8, 7, 6], 5),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


def ragged_asks(sampling):
    """Calls with prompts of 1 to 41 tokens, one of them made twice; 17 rows in all, every row with its own key."""
    counts = [0, *(n for _, n in RAGGED)]
    starts = [sum(counts[: i + 1]) for i in range(len(RAGGED))]
    return [
        (prompt, [sample_key(5, 0, "t", start + i) for i in range(count)], sampling)
        for (prompt, count), start in zip(RAGGED, starts, strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("max_concurrent", [1, 3, 8, 64])
def test_logprobs_are_those_of_a_plain_forward_pass(model, ask, score, temperature, max_concurrent):
    """With rows that join and leave, every log-probability is within 1e-5 of a teacher-forced full forward."""
    asks = ragged_asks(Sampling(temperature=temperature, max_completion_length=24, stop_ids=STOPS))

    answers = ask(LocalEngine(model, max_concurrent=max_concurrent), asks)

    assert len({len(c.tokens) for each in answers for c in each}) > 3
    for (prompt, _, _), completions in zip(asks, answers, strict=True):
        for done in completions:
            exact = score(model, prompt, done, temperature)
            torch.testing.assert_close(torch.tensor(done.logprobs), exact, atol=1e-5, rtol=0)
            assert done.full_logprobs == done.logprobs


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.8), Sampling(top_k=7), Sampling(min_p=0.2), Sampling(0.7, top_p=0.9, top_k=30, min_p=0.05)],
    ids=["top-p", "top-k", "min-p", "all"],
)
def test_truncation_changes_logprobs_and_not_full_logprobs(model, ask, score, sampling):
    """full_logprobs are the plain policy's; logprobs are those of the kept tokens, renormalized."""
    asks = ragged_asks(sampling)

    answers = ask(LocalEngine(model, max_concurrent=5), asks)

    for (prompt, _, _), completions in zip(asks, answers, strict=True):
        for done in completions:
            exact = score(model, prompt, done, sampling.temperature)
            torch.testing.assert_close(torch.tensor(done.full_logprobs), exact, atol=1e-5, rtol=0)
            kept = kept_mass(model, prompt, done, sampling)
            torch.testing.assert_close(torch.tensor(done.logprobs), exact - kept.log(), atol=1e-4, rtol=0)


def kept_mass(model, prompt, done, sampling):
    """Probability of what truncation keeps at each position, by a full sort."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1]
    p = (logits / sampling.temperature).softmax(-1).double()
    left = p.clone()
    if sampling.top_k:
        left[p < p.topk(sampling.top_k).values[:, -1:]] = 0
    if sampling.top_p < 1:
        down, order = (left / left.sum(-1, keepdim=True)).sort(descending=True)
        beyond = (down.cumsum(-1) - down) >= sampling.top_p
        left = left.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), 0)
    left[p < sampling.min_p * p.amax(-1, keepdim=True)] = 0
    return left.sum(-1).float()


@pytest.mark.parametrize("max_concurrent", [1, 4, 17])
def test_the_same_keys_give_the_same_tokens_in_any_batch(model, ask, max_concurrent):
    """Order of calls and number of slots change nothing that is sampled (float32)."""
    asks = ragged_asks(Sampling(max_completion_length=16, stop_ids=STOPS))
    expected = [[c.tokens for c in each] for each in ask(LocalEngine(model, max_concurrent=64), asks)]

    for seed in range(3):
        order = random.Random(seed).sample(range(len(asks)), len(asks))
        answers = ask(LocalEngine(model, max_concurrent=max_concurrent), [asks[i] for i in order])
        assert [[c.tokens for c in each] for each in answers] == [expected[i] for i in order]


def run(engine, asks):
    """Make all calls in one turn, then close."""

    async def body():
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    return asyncio.run(body())


def test_equal_calls_give_equal_bits(model, ask):
    """Two engines given the same calls in the same order return the same floats, not just close ones."""
    asks = ragged_asks(Sampling(max_completion_length=24, stop_ids=STOPS, top_p=0.95))

    assert ask(LocalEngine(model, max_concurrent=6), asks) == ask(LocalEngine(model, max_concurrent=6), asks)


def test_a_used_engine_gives_the_bits_of_a_new_one(model):
    """What was generated before leaves no trace: buffers are larger by then, and results are the same."""
    asks = ragged_asks(Sampling(max_completion_length=24, stop_ids=STOPS))
    long = ([65] * 200, [1, 2, 3], Sampling(max_completion_length=150))

    async def body():
        engine = LocalEngine(model, max_concurrent=6)
        await engine.generate(*long)
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    assert [[c.tokens for c in each] for each in asyncio.run(body())] == [
        [c.tokens for c in each] for each in run(LocalEngine(model, max_concurrent=6), asks)
    ]


def test_greedy_decoding_is_that_of_transformers(model):
    """top-k 1 gives the tokens of generate(do_sample=False), for ragged prompts."""
    sampling = Sampling(top_k=1, max_completion_length=20, stop_ids=(257,))
    asks = [(prompt, [7], sampling) for prompt, _ in RAGGED]

    answers = run(LocalEngine(tiny_model(0), max_concurrent=4), asks)

    for (prompt, _, _), [done] in zip(asks, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=257
        )
        assert list(done.tokens) == expected[0, len(prompt) :].tolist()


def test_rows_of_one_prompt_share_its_prefill(model):
    """Four calls with one prompt of 26 tokens, 3 keys each: 25 positions go through the model once."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    prompt = [256, *range(65, 90)]
    engine = LocalEngine(model, max_concurrent=4)
    asyncio.run(engine.generate(prompt, [0], Sampling(max_completion_length=1)))
    shapes.clear()

    run(engine, [(prompt, [i, i + 100, i + 200], Sampling(max_completion_length=5)) for i in range(4)])

    hook.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 25)]
    assert shapes.count((4, 1)) == 15  # 12 rows of 5 tokens, 4 at a time


def test_different_settings_share_a_batch(model, score):
    """Rows with other temperatures, truncations, stops and budgets are decoded together, each by its own."""
    asks = [
        ([256, 72], [1, 2], Sampling(0.5, max_completion_length=9)),
        ([256, 72, 73], [3], Sampling(1.5, top_k=3, max_completion_length=4)),
        ([256], [4], Sampling(1.5, max_completion_length=14, stop_ids=STOPS)),
    ]
    model = tiny_model(3)

    answers = run(LocalEngine(model), asks)

    for (prompt, _, sampling), completions in zip(asks, answers, strict=True):
        for done in completions:
            exact = score(model, prompt, done, sampling.temperature)
            torch.testing.assert_close(torch.tensor(done.full_logprobs), exact, atol=1e-5, rtol=0)
            assert done.stop == "stop" or len(done.tokens) == sampling.max_completion_length


def snapshot_of(model, version):
    """All weights of a model as a snapshot."""
    return Snapshot(version, lambda: merged_tensors(model))


def test_an_engine_with_its_own_weights_takes_a_snapshot(ask):
    """After load it answers like the model that the snapshot came from; before, like its own."""
    source, asks = tiny_model(1), ragged_asks(Sampling(max_completion_length=8))
    expected = run(LocalEngine(source), asks)

    async def body():
        engine = LocalEngine(tiny_model(2), shared=False)
        before = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.load(snapshot_of(source, 3))
        after = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return before, after

    before, after = asyncio.run(body())
    assert [[c.logprobs for c in each] for each in after] == [[c.logprobs for c in each] for each in expected]
    assert [[c.tokens for c in each] for each in before] != [[c.tokens for c in each] for each in expected]


def test_adapters_answer_the_same_merged_and_in_place(score):
    """A shared module with LoRA layers and a plain copy that loaded its merged weights sample the same tokens."""
    adapted = adapt(tiny_model(0), LoraConfig(rank=4, alpha=8.0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    asks = ragged_asks(Sampling(max_completion_length=8))

    async def copied():
        engine = LocalEngine(tiny_model(5), shared=False)
        await engine.load(snapshot_of(adapted, 0))
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    merged, live = asyncio.run(copied()), run(LocalEngine(adapted), asks)
    plain = run(LocalEngine(tiny_model(0)), asks)
    assert [[c.tokens for c in each] for each in merged] == [[c.tokens for c in each] for each in live]
    assert [[c.tokens for c in each] for each in plain] != [[c.tokens for c in each] for each in live]
    exact = score(adapted, asks[1][0], live[1][0], 1.0)
    torch.testing.assert_close(torch.tensor(live[1][0].logprobs), exact, atol=1e-5, rtol=0)


def test_a_snapshot_that_does_not_fit_changes_nothing():
    """A missing name, an unknown name and a wrong shape are named; the weights stay as they were."""
    model = tiny_model(0)
    before = {name: tensor.clone() for name, tensor in merged_tensors(model)}
    given = {name: tensor + 1 for name, tensor in before.items()}
    given["model.extra"] = given.pop("model.norm.weight")

    async def load(tensors, match):
        engine = LocalEngine(model, shared=False)
        with pytest.raises(EngineError, match=match):
            await engine.load(Snapshot(1, lambda: iter(tensors.items())))
        assert engine.version == -1
        await engine.close()

    asyncio.run(load(given, r"missing \['model.norm.weight'\], unknown \['model.extra'\]"))
    asyncio.run(load({**before, "model.norm.weight": torch.zeros(3)}, r"model.norm.weight \(3,\) for \(64,\)"))
    assert all(torch.equal(before[name], tensor) for name, tensor in merged_tensors(model))


def test_weights_may_change_while_rows_are_on_their_way():
    """A row that began under version 0 and ended under 1 says both, and other rows only theirs."""

    async def body():
        engine = LocalEngine(tiny_model(0), shared=False)
        await engine.load(snapshot_of(tiny_model(0), 0))
        long = asyncio.create_task(engine.generate([256], [1], Sampling(max_completion_length=400)))
        short = await engine.generate([256], [2], Sampling(max_completion_length=2))
        await engine.load(snapshot_of(tiny_model(1), 1))
        late = await engine.generate([256, 3], [3], Sampling(max_completion_length=2))
        found = [(c.oldest_version, c.newest_version) for c in (short[0], (await long)[0], late[0])]
        await engine.close()
        return found

    assert asyncio.run(body()) == [(0, 0), (0, 1), (1, 1)]


def test_a_shared_module_keeps_its_training_mode_and_can_be_trained():
    """Generation runs in eval mode, and leaves mode, weights and the way back to them as they were."""
    model = tiny_model(0).train()
    modes = []
    model.model.layers[0].register_forward_pre_hook(lambda module, _: modes.append(module.training))

    run(LocalEngine(model), [([256, 5], [1], Sampling(max_completion_length=3))])

    assert model.training
    assert set(modes) == {False}
    model(torch.tensor([[256, 5, 6]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_that_fails_fails_every_caller_and_then_goes_on():
    """NaN weights raise EngineError for all who wait; with good weights the same engine answers again."""
    model = tiny_model(0)
    good = model.model.norm.weight.detach().clone()

    async def body():
        engine = LocalEngine(model)
        expected = await engine.generate([256, 1], [1], Sampling(max_completion_length=4))
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        asks = (engine.generate([256, i], [i], Sampling(max_completion_length=4)) for i in range(3))
        failures = await asyncio.gather(*asks, return_exceptions=True)
        with torch.no_grad():
            model.model.norm.weight.copy_(good)
        again = await engine.generate([256, 1], [1], Sampling(max_completion_length=4))
        await engine.close()
        return expected, failures, again

    expected, failures, again = asyncio.run(body())
    assert [type(f) for f in failures] == [EngineError] * 3
    assert "not finite" in str(failures[0])
    assert again == expected


def test_closing_fails_those_who_wait():
    """A caller in the middle of a long generation gets an EngineError, at once."""

    async def body():
        engine = LocalEngine(tiny_model(0))
        waiting = asyncio.create_task(engine.generate([256], [1], Sampling(max_completion_length=1000)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="engine was closed"):
            await waiting

    asyncio.run(body())


def test_a_cancelled_caller_frees_its_rows():
    """With one slot, a cancelled answer of 1,000 tokens lets the next call through long before its end."""
    steps = []
    model = tiny_model(0)
    model.register_forward_pre_hook(lambda module, args: steps.append(1))

    async def body():
        engine = LocalEngine(model, max_concurrent=1)
        endless = asyncio.create_task(engine.generate([256], [1], Sampling(max_completion_length=1000)))
        while len(steps) < 30:
            await asyncio.sleep(0.005)
        endless.cancel()
        [done] = await engine.generate([256], [2], Sampling(max_completion_length=3))
        await engine.close()
        return done

    assert len(asyncio.run(body()).tokens) == 3
    assert len(steps) < 900


@pytest.mark.parametrize(
    ("prompt", "match"),
    [([], "empty prompt"), ([5, 259], "from 5 to 259, outside .*259"), ([-1], "outside the model's vocabulary")],
)
def test_prompts_that_cannot_be_asked_are_refused(model, prompt, match):
    """No token, or an id that the model does not have, is the caller's mistake, found before anything runs."""
    with pytest.raises(ConfigError, match=match):
        asyncio.run(LocalEngine(model).generate(prompt, [0], Sampling()))


def test_no_slot_is_refused(model):
    """An engine without slots could never answer."""
    with pytest.raises(ConfigError, match=r"max_concurrent must be > 0, got 0"):
        LocalEngine(model, max_concurrent=0)


def test_half_precision_weights_generate():
    """A bfloat16 model decodes continuously; its log-probabilities are float32 and near its own forward pass."""
    model = tiny_model(0, dtype=torch.bfloat16)

    [[done]] = run(LocalEngine(model), [([256, 72, 105], [3], Sampling(max_completion_length=12))])

    with torch.no_grad():
        logits = model(torch.tensor([[256, 72, 105, *done.tokens]])).logits[0, 2:-1].float()
    exact = logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), exact, atol=0.1, rtol=0)


def test_what_changed_alone_is_taken_by_whoever_has_the_rest():
    """One tensor since version 4 reaches an engine of version 4, which keeps the others; one of version 5 refuses."""
    engine, first, second = LocalEngine(tiny_model(7), shared=False), tiny_model(0), tiny_model(1)
    name = "model.layers.0.mlp.gate_proj.weight"
    part = {name: dict(merged_tensors(second))[name]}

    async def body() -> None:
        await engine.load(Snapshot(4, lambda: merged_tensors(first)))
        await engine.load(Snapshot(5, lambda: iter(part.items()), since=4))
        assert await engine.fingerprints() == fingerprints({**dict(merged_tensors(first)), **part}.items())
        with pytest.raises(EngineError, match="snapshot 6 has what changed since version 4; the engine has 5"):
            await engine.load(Snapshot(6, lambda: iter(part.items()), since=4))
        with pytest.raises(EngineError, match=r"missing \['model.embed_tokens"):
            await engine.load(Snapshot(6, lambda: iter(part.items())))
        await engine.close()

    asyncio.run(body())
