"""P3O's KL over whole distributions: of the head, of the learner, and of a run, against the formula."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import few
from tests.random_model import RANDOM
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.algorithms import GRPO, P3O, SDFT, Algorithm, EssKl, Kl, ReferencePolicy, Updates
from gnomon.algorithms.regularizers import kl_estimate
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch, TopLogprobs
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.reference import ReferenceModels
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.head import scored
from gnomon.models.logprobs import TokenScorer
from gnomon.models.reference import response_logprobs
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.testing import make_batch
from gnomon.training.api import train_experiment
from gnomon.training.checks import check_settings
from gnomon.training.resolve import resolve

EXACT = replace(P3O, name="p3o-exact", regularizers=(EssKl("exact"),), updates=Updates(minibatches=2))
VOCABULARY = 259


def kl_of_logits(logits: Tensor, top: TopLogprobs) -> Tensor:
    """The formula as it is read: the kept tokens are events, all others together one more."""
    policy = logits.log_softmax(-1)
    own, other = policy.gather(-1, top.tokens.long()), top.logprobs
    if own.shape[-1] < logits.shape[-1]:
        rest = [(1 - part.exp().sum(-1, keepdim=True)).log() for part in (own, other)]
        own, other = (torch.cat(pair, -1) for pair in zip((own, other), rest, strict=True))
    return (own.exp() * (own - other)).sum(-1)


def top_of(logprobs: Tensor, count: int) -> TopLogprobs:
    values, tokens = logprobs.topk(count, dim=-1)
    return TopLogprobs(tokens.int(), values)


def test_by_hand():
    """p = (.6, .3, .1), q = (.5, .3, .2): KL = .6 ln 1.2 + .1 ln .5 = 0.040078; slopes p (f - KL).

    f = (0.182322, 0, -0.693147), so slopes are 0.085346, -0.012023, -0.073323. With the likeliest token alone, .6
    against .5 and .4 against .5: .6 ln 1.2 + .4 ln .8 = 0.020136; f of the others is -0.223144, and their slopes are
    .3 and .1 times (-0.223144 - 0.020136): -0.072984, -0.024328; that of the first is their sum's opposite.
    """
    head = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(head.weight)
    behavior = torch.tensor([[0.5, 0.3, 0.2]]).log()
    expected = {
        3: (0.040078216, [0.085346004, -0.012023465, -0.07332254]),
        1: (0.020135513, [0.097311, -0.072984, -0.024328]),
    }
    for count, (value, slopes) in expected.items():
        hidden = torch.tensor([[0.6, 0.3, 0.1]]).log().requires_grad_()
        _, _, kl = scored(hidden, head.float(), torch.tensor([1]), (1.0, 8, True), top_of(behavior, count))
        kl.sum().backward()
        assert kl.item() == pytest.approx(value, abs=1e-6)
        assert hidden.grad is not None
        assert hidden.grad[0].tolist() == pytest.approx(slopes, abs=1e-6)


@few
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 3, 12, 13]),
    st.sampled_from([2, 7, 64]),
    st.sampled_from([0.7, 1.0]),
    st.sampled_from([None, 0.8, 3.0]),
)
def test_the_head_gives_value_and_gradients_of_the_formula(
    seed: int, count: int, chunk: int, temperature: float, bound: float | None
):
    """Whole or lumped, in any chunks, at any temperature, bounded or not, beside the other results' gradients."""
    torch.manual_seed(seed)
    head = nn.Linear(6, 13)
    hidden = torch.randn(9, 6, requires_grad=True)
    targets, weights = torch.randint(0, 13, (9,)), torch.randn(3, 9)
    top = top_of(torch.randn(9, 13).log_softmax(-1), count)

    def run(logprobs: Tensor, entropy: Tensor, kl: Tensor) -> list[Tensor]:
        loss = sum((w * part).sum() for w, part in zip(weights, (logprobs, entropy, kl), strict=True))
        return [kl, *torch.autograd.grad(loss, [hidden, head.weight, head.bias])]

    logits = (head(hidden) if bound is None else bound * (head(hidden) / bound).tanh()) / temperature
    policy = logits.log_softmax(-1)
    wanted = run(policy.gather(1, targets[:, None])[:, 0], -(policy.exp() * policy).sum(-1), kl_of_logits(logits, top))
    found = run(*scored(hidden, head, targets, (temperature, chunk, True), top, bound))

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_the_exact_kl_is_the_mean_of_the_one_sample_estimate():
    """Over every outcome of behavior, weighed by its probability: value, and gradient to the logits."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([0.1, 0.4, -0.3, 0.2], dtype=torch.float64).log_softmax(0)
    current = logits.log_softmax(0)
    batch = make_batch([1.0] * 4, [[1]] * 4, behavior=behavior[:, None].tolist())
    view = P3O.view(current[:, None], -current[:, None], batch, P3O.statistics(current[:, None], batch))
    mean = (behavior.exp() * kl_estimate(view, behavior[:, None], "unbiased")[:, 0]).sum()
    exact = kl_of_logits(logits, top_of(behavior, 4))

    assert float(mean.detach()) == pytest.approx(float(exact.detach()))
    (one,), (other,) = (torch.autograd.grad(each, logits, retain_graph=True) for each in (mean, exact))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("count", [5, VOCABULARY])
def test_the_scorer_gives_it_at_every_trained_token(make_model, make_batch, count: int, is_split: bool):
    """Of a model whose head is computed apart, in chunks of 4, and of one that is run row by row; 0 elsewhere."""
    model, batch = make_model(), make_batch()
    top = distributions(batch, count)
    scorer = TokenScorer(model, chunk_tokens=4)
    scorer.is_split = is_split
    scorer.shares_prompts = is_split and scorer.shares_prompts
    scores = scorer.against(top)(batch.tokens, batch.prompt_lengths, batch.mask, batch.temperature)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    logits = model(input_ids=batch.tokens).logits[rows, batch.prompt_lengths[rows] + columns - 1] / batch.temperature
    wanted = kl_of_logits(logits, TopLogprobs(*(part[rows, columns] for part in top)))

    assert scores.anchor_kl is not None
    torch.testing.assert_close(scores.anchor_kl[batch.mask], wanted, rtol=1e-4, atol=1e-5)
    assert not scores.anchor_kl[~batch.mask].any()
    found, other = (
        torch.autograd.grad(each, list(model.parameters()), retain_graph=True, allow_unused=True)
        for each in (scores.anchor_kl.sum(), wanted.sum())
    )
    for one, another in zip(found, other, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)
    assert scorer(batch.tokens, batch.prompt_lengths, batch.mask).anchor_kl is None


def distributions(batch: Batch, count: int) -> TopLogprobs:
    """Made ones, rather flat, for each position."""
    generator = torch.Generator().manual_seed(1)
    logits = 0.3 * torch.randn(*batch.mask.shape, VOCABULARY, generator=generator)
    return top_of(logits.log_softmax(-1), count)


@pytest.mark.parametrize("count", [5, VOCABULARY])
def test_cuts_change_nothing(make_learner, make_batch, count: int):
    """The weights after an update are the same in micro-batches of 20, 40 and 4,096 tokens."""
    batch = make_batch()
    top = distributions(batch, count)
    batch = batch.with_fields(top_tokens=top.tokens, top_logprobs=top.logprobs)
    minibatch = EXACT.weigh(EXACT.prepare(batch))
    found = []
    for tokens in (20, 40, 4096):
        learner = make_learner(max_tokens_per_micro_batch=tokens)
        metrics = asyncio.run(learner.update(minibatch, EXACT, 0))
        found.append((metrics, {name: tensor.clone() for name, tensor in learner.snapshot().tensors()}))
    other = asyncio.run(make_learner().update(minibatch, P3O, 0))

    assert found[0][0]["loss/ess_kl"] > 0
    assert found[0][0]["loss/ess_kl"] != pytest.approx(other["loss/ess_kl"])
    for metrics, weights in found[1:]:
        assert metrics["loss/ess_kl"] == pytest.approx(found[0][0]["loss/ess_kl"], rel=1e-5)
        for name, tensor in found[0][1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6)


@pytest.mark.parametrize("preset", [GRPO, SDFT], ids=lambda preset: preset.name)
def test_an_update_that_goes_on_from_scoring_reads_the_references_distributions(
    preset: Algorithm, make_model, make_learner, make_batch
):
    """The graph that scoring keeps for the first of two updates has the KL to the reference: the same weights as
    without it.
    """
    regularizers = (Kl("reference", 0.1, "exact", top_k=5),) if preset is GRPO else ()
    algorithm = replace(preset, regularizers=regularizers, updates=Updates(minibatches=2), reference=ReferencePolicy())
    found = []
    for is_kept in (True, False):
        models = ReferenceModels(make_model(seed=2), top=algorithm.reference_top)
        plan = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_micro_batch=40)
        learner = TorchLearner(make_model(), plan, 10, reference=models)
        batch = make_batch()

        async def both(learner=learner, batch=batch, is_kept=is_kept) -> list[Any]:
            first = algorithm.first_rows(batch, 0, 0) if is_kept else None
            scored = (await learner.score(batch, algorithm.needs, first)).into(batch)
            return [await learner.update(m, algorithm, 0) for m in algorithm.minibatches(algorithm.prepare(scored), 0)]

        assert len(asyncio.run(both())) == 2
        found.append({name: tensor.clone() for name, tensor in learner.snapshot().tensors()})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=1e-4)


def test_the_factor_is_one_minus_the_effective_size():
    """Ratios 2, 1, 1 of the drawn tokens: e = 16 / 18, so a KL of 0.3, 0.6 and 0 adds 2 / 18 of 0.9 / 3."""
    logs = torch.tensor([[2.0], [1.0], [1.0]], dtype=torch.float64).log()
    batch = make_batch([1.0, 1.0, 1.0], [[1], [1], [1]], advantages=[[0.0]] * 3)
    weighed = EXACT.weigh(batch)
    given = torch.tensor([[0.3], [0.6], [0.0]], dtype=torch.float64)
    loss = EXACT.loss(logs - 1, logs, weighed, EXACT.statistics(logs - 1, weighed), given)

    assert loss.parts["ess_kl"] == pytest.approx(2 / 18 * 0.9 / 3)
    with pytest.raises(ConfigError, match=r"the batch has none.*estimator = \"unbiased\""):
        EXACT.loss(logs - 1, logs, weighed, EXACT.statistics(logs - 1, weighed))


@pytest.mark.parametrize("count", [0, 7])
def test_an_engine_returns_the_distribution_that_it_drew_from(count: int):
    """Each row has the drawn token's own log-probability, and the tokens are the likeliest of a plain pass."""
    model: Any = tiny_model(1, TinyConfig(width=16, heads=2, kv_heads=1))
    asked = Sampling(temperature=0.8, max_completion_length=6, top_logprobs=count)

    async def ask() -> Any:
        engine = LocalEngine(model)
        both = await asyncio.gather(
            engine.generate((5, 6), (1, 2), asked), engine.generate((9,), (3,), replace(asked, top_logprobs=None))
        )
        await engine.close()
        return both

    with_top, without = asyncio.run(ask())
    assert without[0].top is None
    for done in with_top:
        assert done.top is not None
        assert done.top.tokens.shape == done.top.logprobs.shape == (len(done.tokens), count or VOCABULARY)
        for position, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
            ids = done.top.tokens[position].tolist()
            if token in ids:
                assert float(done.top.logprobs[position, ids.index(token)]) == pytest.approx(logprob, abs=1e-5)
            before = (5, 6, *done.tokens[:position])
            likeliest = response_logprobs(model, before, (ids[0],), 0.8)
            assert float(done.top.logprobs[position, 0]) == pytest.approx(likeliest[0], abs=1e-4)
        if not count:
            assert done.top.logprobs.exp().sum(-1).tolist() == pytest.approx([1.0] * len(done.tokens), abs=1e-5)


@pytest.mark.parametrize("top_k", [0, 16])
@pytest.mark.parametrize("more", [(), ("max_staleness=2", "algorithm.updates.epochs=2")], ids=["alternating", "stale"])
def test_a_run_adds_it(tmp_path: Path, top_k: int, more: tuple[str, ...]):
    """Two updates a step, and stale answers: the KL is there from the first step on."""
    pieces = f'algorithm.regularizers=[{{piece = "EssKl", estimator = "exact", top_k = {top_k}}}]'
    reward = tmp_path / "parity.py"
    reward.write_text("def parity(prompt, completion):\n    return float(len(completion.encode()) % 2)\n")
    overrides = ["algorithm=p3o", "algorithm.updates.minibatches=2", "steps=3", "rollouts_per_step=16", pieces, *more]
    overrides += [f'rewards=[{{kind = "function", function = "{reward}:parity"}}]', "sampling.max_completion_length=8"]
    train_experiment(load(RANDOM, [*overrides, "learner.optimizer.learning_rate=1e-3"]), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss/ess_kl_estimate_nats"] for row in rows if "loss/ess_kl_estimate_nats" in row]

    assert len(found) == 3
    assert all(value > 1e-5 for value in found)


REFUSED = {
    "vllm": (["engine.kind=vllm"], "return the log-probability of the drawn token alone; set engine.kind = 'local'"),
    "top-p": (["sampling.top_p=0.9"], "sampling.top_p = 0.9 gives tokens probability 0"),
    "min-p and top-k": (["sampling.min_p=0.1", "sampling.top_k=5"], "sampling.top_k = 5, sampling.min_p = 0.1 gives"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(overrides: list[str], message: str):
    """Engines that return one number a token, and distributions that leave tokens out."""
    exact = 'algorithm.regularizers=[{piece = "EssKl", estimator = "exact"}]'
    with pytest.raises(ConfigError, match=message):
        check_settings(resolve(load(RANDOM, ["algorithm=p3o", exact, *overrides]).experiment))


def test_settings_that_mean_nothing_are_refused():
    """The mixture's distribution is not kept, and top_k is of the exact KL alone."""
    with pytest.raises(ConfigError, match='anchor = "behavior", or estimator = "unbiased"'):
        EssKl("exact", "mixture")
    with pytest.raises(ConfigError, match="top_k = 8 is of estimator"):
        EssKl(top_k=8)
    with pytest.raises(ConfigError, match=r"EssKl\.top_k must be >= 0"):
        EssKl("exact", top_k=-1)


def test_memory_is_bounded_by_the_chunk():
    """With 4 of 1,000 tokens kept, no tensor has more numbers than 8 rows of logits: forward and backward."""
    head = nn.Linear(4, 1000, bias=False)
    hidden = torch.randn(64, 4, requires_grad=True)
    top = top_of(torch.randn(64, 1000).log_softmax(-1), 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        scored(hidden, head, torch.zeros(64, dtype=torch.long), (1.0, 8, True), top)[2].sum().backward()
    assert 0 < largest <= 8 * 1000
