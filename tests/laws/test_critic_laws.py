"""What must hold for advantages from a critic, and for what the critic is taught."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import Drawn, drawn, few, same, size_of, valued
from torch import Tensor

from gnomon.algorithms import (
    PRESETS,
    Algorithm,
    CriticConfig,
    Fixed,
    Gae,
    LengthAdaptive,
    LengthSigmoid,
    Returns,
    Updates,
)
from gnomon.core.types import GIVEN, Batch
from gnomon.testing import make_batch

approx = pytest.approx
CRITICS = [a for a in PRESETS.values() if a.critic is not None]
each_critic = pytest.mark.parametrize("algorithm", CRITICS, ids=lambda a: a.name)


def plan_of(algorithm: Algorithm) -> CriticConfig:
    assert algorithm.critic is not None
    return algorithm.critic


def guarded(algorithm: Algorithm, batch: Batch, seed: int = 0) -> Batch:
    """Return the batch as the critic's only minibatch, weighed."""
    single = replace(algorithm, critic=replace(plan_of(algorithm), updates=Updates()))
    (weighed,) = single.value_minibatches(single.prepare(batch), seed)
    return weighed


def value_loss(plan: CriticConfig, values: Tensor, weighed: Batch, cuts: Sequence[list[int]]) -> tuple[float, Tensor]:
    """Return the loss and d loss / d values, summed over cuts."""
    total, gradient = 0.0, torch.zeros_like(values)
    for cut in cuts:
        leaf = values[cut].detach().requires_grad_()
        loss, _ = plan.loss(leaf, weighed.rows(cut))
        total += float(loss.detach())
        (gradient[cut],) = torch.autograd.grad(loss, leaf)
    return total, gradient


@few
@given(drawn())
def test_lambda_one_is_the_return_less_the_value(d: Drawn):
    """At lambda 1 and gamma 1, A = R - V and the target is R; with V = 0 that is the return (P10)."""
    values, mask = valued(d.batch), d.batch.mask
    rewards = torch.where(mask, d.batch.rewards[:, None], 0.0)
    advantages, returns = Gae(Fixed(1.0), value_lambda=1.0)(d.batch)
    assert returns is not None
    same(advantages, torch.where(mask, rewards - values, 0.0), 1e-12)
    same(returns, rewards, 1e-12)

    without = d.batch.with_fields(values=torch.zeros_like(values))
    same(Gae(Fixed(1.0))(without)[0], Returns()(without)[0], 1e-12)


@few
@given(drawn(), st.floats(0, 1), st.floats(0.5, 1), st.sampled_from(["terminal", "value"]))
def test_the_recursion_is_the_sum(d: Drawn, lam: float, gamma: float, truncation: str):
    """A_t = sum_l (gamma lambda)^l delta_{t+l} over trained tokens, and the target is that plus V (P10)."""
    piece = Gae(Fixed(lam), value_lambda=lam, gamma=gamma, truncation=truncation)
    advantages, returns = piece(d.batch)
    assert returns is not None
    assert d.batch.bootstrap is not None
    for row in range(len(d.batch)):
        steps = d.batch.mask[row].nonzero()[:, 0].tolist()
        values = valued(d.batch)[row, steps].tolist()
        goes_on = truncation == "value" and bool(d.batch.is_truncated[row])
        following = [*values[1:], float(d.batch.bootstrap[row]) if goes_on else 0.0]
        rewards = [0.0] * (len(steps) - 1) + [float(d.batch.rewards[row])]
        errors = [x + gamma * n - v for x, n, v in zip(rewards[-len(steps) :], following, values, strict=False)]
        for place, t in enumerate(steps):
            expected = sum((gamma * lam) ** far * error for far, error in enumerate(errors[place:]))
            assert float(advantages[row, t]) == approx(expected, rel=1e-12, abs=1e-12)
            assert float(returns[row, t]) == approx(expected + values[place], rel=1e-12, abs=1e-12)


@few
@given(drawn(), st.floats(0, 1), st.floats(0, 1))
def test_targets_do_not_know_the_policys_lambda(d: Drawn, first: float, second: float):
    """The two lambdas are decoupled: the policy's changes no bit of what the critic is taught (P10)."""
    one, other = (Gae(Fixed(lam), value_lambda=0.7)(d.batch)[1] for lam in (first, second))

    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


@few
@given(drawn(), st.floats(0.01, 1))
def test_a_length_adaptive_lambda_depends_on_its_own_length_only(d: Drawn, alpha: float):
    """VAPO's lambda of a response is in [0, 1), and the same alone and in any company (P23)."""
    piece = Gae(LengthAdaptive(alpha))
    lambdas, advantages = piece.lambdas(d.batch), piece(d.batch)[0]

    assert bool(((lambdas >= 0) & (lambdas < 1)).all())
    for row in range(len(d.batch)):
        alone = d.batch.rows([row])
        assert torch.equal(piece.lambdas(alone), lambdas[row : row + 1])
        assert torch.equal(piece(alone)[0], advantages[row : row + 1])


@few
@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_a_longer_response_has_no_smaller_lambda(length: int, more: int):
    """1 - 1 / (alpha length) grows with the length, and stays below 1 (P23)."""
    short, long = LengthAdaptive()(torch.tensor([length, length + more])).tolist()

    assert 0 <= short <= long < 1


def test_the_reviews_lambda_depends_on_the_company():
    """The sigmoid of a review of VAPO is relative to the batch, so its response's lambda is not its own (P23)."""
    rule = LengthSigmoid()
    beside_short, beside_long = rule(torch.tensor([100, 10]))[0], rule(torch.tensor([100, 1000]))[0]

    assert beside_short > beside_long


@each_critic
@few
@given(drawn(), st.integers(0, 9))
def test_cutting_a_value_minibatch_changes_nothing(algorithm: Algorithm, d: Drawn, seed: int):
    """The critic's loss and gradient are the same whole, cut, and with rows in another order (P2, P3, P4)."""
    weighed, plan = guarded(algorithm, d.batch, seed), plan_of(algorithm)
    values = valued(weighed) + torch.randn(weighed.mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    rows = list(range(len(weighed)))
    loss, gradient = value_loss(plan, values, weighed, [rows])
    cut_loss, cut = value_loss(plan, values, weighed, [rows[::2], rows[1::2]] if len(rows) > 1 else [rows])
    turned_loss, turned = value_loss(plan, values.flip(0), weighed.rows(rows[::-1]), [rows])

    assert cut_loss == approx(loss, abs=1e-12 * size_of(loss, gradient, values))
    assert turned_loss == approx(loss, abs=1e-12 * size_of(loss, gradient, values))
    assert torch.equal(cut, gradient)
    assert torch.equal(turned.flip(0), gradient)


@each_critic
@few
@given(drawn(), st.integers(0, 9))
def test_every_token_of_a_value_minibatch_counts_the_same(algorithm: Algorithm, d: Drawn, seed: int):
    """The critic's loss is the mean of (V - R)^2 / 2 over the trained tokens of its minibatch (P3)."""
    for minibatch in algorithm.value_minibatches(algorithm.prepare(d.batch), seed):
        assert minibatch.returns is not None
        values = valued(minibatch) + 0.1
        error = torch.where(minibatch.mask, values - minibatch.returns, 0.0)
        wanted = float(error.square().sum()) / 2 / max(int(minibatch.mask.sum()), 1)
        plain = replace(plan_of(algorithm), clip=None)

        assert value_loss(plain, values, minibatch, [list(range(len(minibatch)))])[0] == approx(wanted, rel=1e-12)


@each_critic
@few
@given(drawn(), st.lists(st.booleans(), min_size=16, max_size=16))
def test_a_critic_learns_from_what_was_sampled(algorithm: Algorithm, d: Drawn, given_rows: list[bool]):
    """A given answer has no part in its loss; a log of which no policy is known counts whole, as nothing else is there,
    and beside demonstrations alone nothing is learned (P33).
    """
    is_given = torch.tensor(given_rows[: len(d.batch)])
    batch = d.batch.with_fields(version=torch.where(is_given, GIVEN, 0))
    demonstrated = replace(algorithm, demonstrated=True, num_generations=max(2, algorithm.num_generations))
    sampled = batch.mask & ~is_given[:, None]

    for composed, counted in ((algorithm, sampled if sampled.any() else batch.mask), (demonstrated, sampled)):
        weighed, plain = guarded(composed, batch), replace(plan_of(composed), clip=None)
        assert weighed.returns is not None
        values = valued(weighed) + 0.1
        loss, gradient = value_loss(plain, values, weighed, d.cuts)
        error = torch.where(counted, values - weighed.returns, 0.0)
        count = max(int(counted.sum()), 1)

        assert loss == approx(float(error.square().sum()) / 2 / count, rel=1e-12)
        same(gradient, error / count, 1e-12)


@each_critic
@few
@given(drawn(), st.sampled_from([float("nan"), float("inf")]))
def test_a_critic_never_sees_what_is_masked(algorithm: Algorithm, d: Drawn, junk: float):
    """Junk in values, old values and targets where the mask is false changes no bit of loss and gradient (P1)."""
    weighed, plan = guarded(algorithm, d.batch), plan_of(algorithm)
    rows, mask = list(range(len(weighed))), weighed.mask
    spoiled = guarded(algorithm, d.batch.with_fields(values=torch.where(d.batch.mask, valued(d.batch), junk)))
    assert spoiled.returns is not None
    spoiled = spoiled.with_fields(returns=torch.where(mask, spoiled.returns, junk))
    values = valued(weighed) + 0.3
    loss, gradient = value_loss(plan, values, weighed, [rows])
    other_loss, other = value_loss(plan, torch.where(mask, values, junk), spoiled, [rows])

    assert other_loss == loss
    assert torch.equal(other, gradient)


@each_critic
@few
@given(drawn(), st.integers(0, 99))
def test_the_critics_gradient_is_the_slope_of_its_loss(algorithm: Algorithm, d: Drawn, seed: int):
    """Central differences of the critic's loss, bounded or not, agree with its gradient (P20)."""
    weighed, plan = guarded(algorithm, d.batch), replace(plan_of(algorithm), clip=0.2)
    generator = torch.Generator().manual_seed(seed)
    rows = list(range(len(weighed)))
    values = valued(weighed) + torch.randn(weighed.mask.shape, generator=generator, dtype=torch.float64)
    step = 1e-6 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    _, gradient = value_loss(plan, values, weighed, [rows])
    slope = (
        value_loss(plan, values + step, weighed, [rows])[0] - value_loss(plan, values - step, weighed, [rows])[0]
    ) / 2e-6

    assert slope == approx(float((gradient * step).sum()) / 1e-6, abs=1e-7)


@each_critic
def test_a_critic_is_taught_by_its_own_values_only(algorithm: Algorithm):
    """Targets, and values as they were, are constants of the critic's loss; all masked it is 0 (P19, P22)."""
    before = torch.full((2, 2), 0.5, dtype=torch.float64).requires_grad_()
    batch = make_batch([1.0, 0.0], [[1, 1], [1, 1]]).with_fields(values=before)
    weighed = algorithm.weigh(algorithm.prepare(batch))
    values = torch.tensor([[0.1, 1.5], [0.4, 0.6]], dtype=torch.float64, requires_grad=True)
    loss, _ = replace(plan_of(algorithm), clip=0.2).loss(values, weighed)
    own, leaked = torch.autograd.grad(loss, [values, before], allow_unused=True)
    assert bool(own.any())
    assert leaked is None

    empty = guarded(algorithm, make_batch([None], [[1, 1]], values=[[0.5, 0.5]]))
    assert value_loss(plan_of(algorithm), valued(empty) + 1, empty, [[0]])[0] == 0
