"""What algorithms become at their limits: one another."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import Drawn, drawn, few, same, scored

from gnomon.algorithms import (
    DECOUPLED_PPO,
    GMPO,
    GRPO,
    GSPO,
    P3O,
    SAPO,
    Cap,
    Capped,
    Clip,
    ClippedSurrogate,
    GeometricClip,
    PolicyGradient,
    SigmoidGate,
    TruncatedIS,
)
from gnomon.algorithms.protocols import Correction
from gnomon.testing import loss_and_gradient

approx = pytest.approx
FREE = ClippedSurrogate(Clip(1e9, 1e9))
PLAIN = replace(DECOUPLED_PPO, name="ppo-clip", correction=None)


@pytest.mark.parametrize("correction", [TruncatedIS(5.0), Capped(1e6)], ids=repr)
@few
@given(drawn())
def test_decoupled_is_plain_when_nothing_is_stale(correction: Correction, d: Drawn):
    """With behavior = proximal, decoupled PPO keeps every bit of PPO's loss and gradient (P11)."""
    batch = PLAIN.prepare(d.batch.with_fields(proximal=d.batch.behavior))
    loss, gradient = loss_and_gradient(PLAIN, batch, d.current)
    other_loss, other = loss_and_gradient(replace(DECOUPLED_PPO, correction=correction), batch, d.current)

    assert other_loss == loss
    assert torch.equal(other, gradient)


@few
@given(drawn())
def test_without_a_clip_the_proximal_policy_drops_out(d: Drawn):
    """At epsilon = infinity and without a cap the loss is -A current / behavior, whatever is proximal (P11)."""
    proximal, reference = scored(d.batch)
    free = replace(DECOUPLED_PPO, surrogate=FREE, correction=TruncatedIS(float("inf")))
    direct = replace(PLAIN, surrogate=FREE, ratio=replace(PLAIN.ratio, anchor="behavior"))
    wanted_loss, wanted = loss_and_gradient(direct, direct.prepare(d.batch), d.current)
    for other in (proximal, reference, d.current):
        batch = free.prepare(d.batch.with_fields(proximal=other))
        loss, gradient = loss_and_gradient(free, batch, d.current)

        assert loss == approx(wanted_loss, rel=1e-12, abs=1e-12)
        same(gradient, wanted, 1e-12)


@few
@given(drawn(), st.floats(1e-7, 1e-5))
def test_a_soft_gate_without_a_slope_is_the_plain_ratio(d: Drawn, tau: float):
    """As tau goes to 0, SAPO's gradient tends to that of -r A (P27)."""
    soft = replace(SAPO, surrogate=SigmoidGate(tau, tau))
    batch = SAPO.prepare(d.batch)
    _, gradient = loss_and_gradient(soft, batch, d.current)
    _, plain = loss_and_gradient(replace(SAPO, surrogate=FREE), batch, d.current)

    same(gradient, plain, 1e-8)


@few
@given(drawn(wild=True), st.floats(0.2, 5))
def test_a_soft_gate_has_a_bounded_slope(d: Drawn, tau: float):
    """|d loss / d log current| <= |A| max_r 4 s (1 - s) r, s = sigmoid(tau (r - 1)), however large the ratio (P27)."""
    soft = replace(SAPO, surrogate=SigmoidGate(tau, tau))
    batch = soft.weigh(soft.prepare(d.batch))
    assert batch.weights is not None
    assert batch.advantages is not None
    ratio = torch.logspace(-3, 3, 100_001, dtype=torch.float64)
    gate = torch.sigmoid(tau * (ratio - 1))
    bound = float((4 * gate * (1 - gate) * ratio).max()) * (1 + 1e-6)
    _, gradient = loss_and_gradient(soft, batch, d.current)

    assert bool((gradient.abs() <= batch.weights * batch.advantages.abs() * bound + 1e-15).all())


@few
@given(drawn())
def test_a_geometric_clip_that_never_acts_is_a_sequence_ratio(d: Drawn):
    """GMPO without a clipped token is GSPO without its clip (P27)."""
    batch = GMPO.prepare(d.batch)
    loss, gradient = loss_and_gradient(replace(GMPO, surrogate=GeometricClip(1e3)), batch, d.current)
    other_loss, other = loss_and_gradient(replace(GSPO, surrogate=FREE), batch, d.current)

    assert loss == approx(other_loss, rel=1e-12, abs=1e-12)
    same(gradient, other, 1e-12)


@few
@given(drawn(), st.floats(-0.5, 0.5))
def test_a_sequence_ratio_is_a_token_ratio_when_tokens_agree(d: Drawn, shift: float):
    """With one token a response, or one log-ratio for all its tokens, GSPO is GRPO with the same clip (P27)."""
    narrow = GSPO.prepare(d.batch.with_fields(mask=d.batch.mask & (d.batch.mask.cumsum(1) == 1)))
    even = GSPO.prepare(d.batch)
    proximal, _ = scored(d.batch)
    clip = ClippedSurrogate(Clip(0.2, 0.2))
    for batch, current in ((narrow, d.current), (even, proximal + shift)):
        loss, gradient = loss_and_gradient(replace(GSPO, surrogate=clip), batch, current)
        other_loss, other = loss_and_gradient(replace(GRPO, surrogate=clip), batch, current)

        assert loss == approx(other_loss, rel=1e-12, abs=1e-12)
        same(gradient, other, 1e-12)


@few
@given(drawn())
def test_p3o_trusts_as_far_as_the_step_says(d: Drawn):
    """d loss / d log current = a (-min(rho, e) A + (1 - e) rho log rho), with e of the whole minibatch (P8)."""
    batch = P3O.weigh(P3O.prepare(d.batch))
    assert batch.weights is not None
    assert batch.advantages is not None
    shift = torch.where(batch.mask, d.current - batch.behavior, 0.0)
    ratios = shift.exp()[batch.mask]
    e = float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())) if len(ratios) else 1.0
    push = -shift.exp().clamp(max=e) * batch.advantages + (1 - e) * shift.exp() * shift
    _, gradient = loss_and_gradient(P3O, batch, d.current)

    same(gradient, batch.weights * push, 1e-12)


@few
@given(drawn(), st.floats(0.1, 3))
def test_p3o_with_a_chosen_cap_is_one_sided_cispo(d: Drawn, cap: float):
    """Without its leash, and with a constant in place of e, P3O is CISPO with a ratio to behavior (P17)."""
    capped = replace(P3O, surrogate=PolicyGradient(Cap(cap)), regularizers=())
    batch = capped.weigh(capped.prepare(d.batch))
    assert batch.weights is not None
    assert batch.advantages is not None
    ratio = torch.where(batch.mask, (d.current - batch.behavior).exp(), 0.0)
    _, gradient = loss_and_gradient(capped, batch, d.current)

    same(gradient, -batch.weights * ratio.clamp(max=cap) * batch.advantages, 1e-12)
