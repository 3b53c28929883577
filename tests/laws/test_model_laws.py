"""What must hold for every algorithm with a model under it: log-probabilities come from logits, and move weights."""

import asyncio
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import Drawn, drawn, fewer, presets, prompted, size_of
from torch import Tensor, nn

from gnomon.algorithms import Algorithm
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.critic import CausalCritic, ValueHead
from gnomon.models.head import chosen_logprobs
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.testing import loss_and_gradient, make_batch

SHAPE = TinyConfig(width=16, heads=2, kv_heads=1)
# Adam's first step with epsilon 1 is g / (|g| + 1): the new weights tell the gradient, entry for entry.
REVEALING = OptimizerConfig(learning_rate=1.0, epsilon=1.0, max_gradient_norm=float("inf"))
every = pytest.mark.parametrize("algorithm", presets(), ids=lambda a: a.name)
critics = pytest.mark.parametrize("algorithm", [a for a in presets() if a.critic], ids=lambda a: a.name)


class Subject:
    """A learner of a tiny model with a critic, which every question finds as it was made."""

    def __init__(self, budget: int, trunk: str = "separate", dtype: torch.dtype = torch.float32) -> None:
        head = ValueHead(SHAPE.width)
        nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        model = tiny_model(0, SHAPE, dtype)
        critic = head if trunk == "shared" else CausalCritic(tiny_model(1, SHAPE, dtype), head)
        plan = LearnerConfig(optimizer=REVEALING, max_tokens_per_micro_batch=budget)
        self.learner = TorchLearner(model, plan, 10, critic=critic)
        self._first = self.learner.state()

    def tensors(self) -> Mapping[str, Tensor]:
        return self.learner.state().tensors

    def after(self, work: Coroutine[Any, Any, Metrics]) -> tuple[Mapping[str, Tensor], Metrics]:
        """Return the state after one piece of work on the learner as it was made, and what was measured."""
        self.learner.restore(self._first)
        metrics = asyncio.run(work)
        return self.tensors(), metrics


@cache
def subject(budget: int, trunk: str = "separate", dtype: torch.dtype = torch.float32) -> Subject:
    return Subject(budget, trunk, dtype)


@cache
def scorer(shares_prompts: bool) -> TokenScorer:
    scorer = TokenScorer(tiny_model(0, SHAPE))
    assert scorer.shares_prompts
    scorer.shares_prompts = shares_prompts
    return scorer


def trunk_of(algorithm: Algorithm) -> str:
    return "separate" if algorithm.critic is None else algorithm.critic.trunk


def weighed(algorithm: Algorithm, batch: Batch) -> Batch:
    return algorithm.weigh(algorithm.prepare(batch))


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], atol: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def is_identical(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


@every
@fewer
@given(drawn())
def test_the_token_budget_changes_no_update(algorithm: Algorithm, d: Drawn):
    """One row a micro-batch or all at once: the same weights and moments, to float32 rounding (P3)."""
    minibatch = weighed(algorithm, prompted(d.batch))
    (one, _), (all_at_once, _) = (
        (s := subject(budget)).after(s.learner.update(minibatch, algorithm, 0)) for budget in (1, 10_000)
    )

    assert_close(one, all_at_once, atol=3e-6)


@critics
@fewer
@given(drawn())
def test_the_token_budget_changes_no_lesson(algorithm: Algorithm, d: Drawn):
    """The same for the critic, on a trunk of its own or the policy's (P3)."""
    prepared = algorithm.prepare(prompted(d.batch))
    for minibatch in algorithm.value_minibatches(prepared, 0)[:2]:
        (one, _), (all_at_once, _) = (
            (s := subject(budget, trunk_of(algorithm))).after(s.learner.fit(minibatch, algorithm, 0))
            for budget in (1, 10_000)
        )

        assert_close(one, all_at_once, atol=3e-6)


@every
@fewer
@given(drawn())
def test_packed_rows_have_the_gradient_of_padded_ones(algorithm: Algorithm, d: Drawn):
    """Responses behind one shared prompt, or in rows of their own: the same loss and weights' gradient (P5)."""
    minibatch = weighed(algorithm, prompted(d.batch))
    losses, gradients = [], []
    for shares in (True, False):
        scores = scorer(shares)(minibatch.tokens, minibatch.prompt_lengths, minibatch.mask)
        if not scores.logprobs.requires_grad:
            return
        statistics = algorithm.statistics(scores.logprobs, minibatch, scores.entropy)
        loss = algorithm.loss(scores.logprobs, scores.entropy, minibatch, statistics).total
        parameters = dict(scorer(shares).model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()))
        losses.append(float(loss.detach()))
        gradients.append(dict(zip(parameters, found, strict=True)))

    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    assert_close(gradients[0], gradients[1], atol=1e-5)


@every
@fewer
@given(drawn(), st.floats(-30, 30))
def test_a_constant_added_to_all_logits_is_nothing(algorithm: Algorithm, d: Drawn, constant: float):
    """Log-probabilities, entropies, loss and gradient do not see what a softmax cannot see (P21)."""
    rows, columns = d.batch.mask.shape
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows * columns, 8, generator=generator)
    head = nn.Linear(8, 50)
    nn.init.normal_(head.weight, std=0.2, generator=generator)
    targets = torch.randint(0, 50, (rows * columns,), generator=generator)
    seen = []
    for added in (0.0, constant):
        nn.init.constant_(head.bias, added)
        scores = chosen_logprobs(hidden, head, targets, 0.8, 7, with_entropy=True)
        seen.append([s.detach().reshape(rows, columns) for s in scores])
    prepared = algorithm.prepare(prompted(d.batch))
    loss, gradient = loss_and_gradient(algorithm, prepared, seen[0][0])
    other_loss, other = loss_and_gradient(algorithm, prepared, seen[1][0])
    scale = size_of(loss, gradient, seen[0][0])

    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=2e-5)
    assert other_loss == pytest.approx(loss, abs=1e-4 * scale)
    torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-4 * scale)


def answered() -> Batch:
    """Return two groups of answers with a hole, one truncated, behind prompts of three tokens."""
    masks = [[1, 1, 1], [1, 0, 1, 1], [1, 1], [1, 1, 1, 1, 1]]
    behavior = [[-2.0] * 5] * 4
    return prompted(
        make_batch(
            [1.0, 0.0, 1.0, 0.25],
            masks,
            [0, 0, 1, 1],
            behavior=behavior,
            proximal=behavior,
            reference=[[-2.125] * 5] * 4,
            sharpened=[[-0.5] * 5] * 4,
            values=[[0.5] * 5] * 4,
            baseline=[0.3, 0.3, 0.6, 0.6],
            is_truncated=[False, False, False, True],
            component_rewards=[[1.0], [0.0], [1.0], [0.25]],
            components=("a",),
            component_weights=(1.0,),
        )
    )


@every
def test_a_minibatch_without_a_trained_token_makes_no_step(algorithm: Algorithm):
    """Policy and critic, masters and moments keep every bit: no decay, no momentum, no step counted (P22)."""
    batch = answered()
    batch = algorithm.prepare(batch.with_fields(mask=torch.zeros_like(batch.mask)))
    one = subject(10_000, trunk_of(algorithm))
    moved, first = one.after(one.learner.update(weighed(algorithm, answered()), algorithm, 0))
    metrics = asyncio.run(one.learner.update(algorithm.weigh(batch), algorithm, 0))
    for minibatch in algorithm.value_minibatches(batch, 0):
        metrics += asyncio.run(one.learner.fit(minibatch, algorithm, 0))

    assert first["learner/updates"] == 1
    assert is_identical(one.tensors(), moved)
    assert metrics["learner/skipped_updates"] == 1
    assert metrics.values().get("critic/updates", 0) == 0


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_same_kernel_says_again_is_exactly_on_policy(algorithm: Algorithm, dtype: torch.dtype):
    """Scored by one learner and updated by its twin, ratios are exactly 1, in bfloat16 as well (P26)."""
    sampler, twin = Subject(1, dtype=dtype).learner, subject(1, dtype=dtype)
    batch = answered()
    proximal = asyncio.run(sampler.score(batch, {"proximal"})).proximal
    batch = batch.with_fields(proximal=proximal, behavior=proximal, full_behavior=proximal, reference=proximal - 0.125)
    _, metrics = twin.after(twin.learner.update(weighed(algorithm, batch), algorithm, 0))

    assert metrics["loss/clipped_fraction"] == 0
    assert metrics["loss/drift_abs_nats"] == 0
    assert metrics["loss/ess_fraction"] == 1
    assert metrics.values().get("loss/ratio_max", 1.0) == 1
    assert metrics["learner/updates"] == 1
