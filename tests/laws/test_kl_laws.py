"""What estimates of a KL are on average: every outcome of a categorical policy, weighed by who sampled it."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import few, same
from torch import Tensor

from gnomon.algorithms import GRPO
from gnomon.algorithms.ratios import Statistics
from gnomon.algorithms.regularizers import Estimator, kl_estimate
from gnomon.testing import make_batch


@dataclass(frozen=True)
class Two:
    """Logits of the current policy, and the logarithm of the anchor's probabilities, Float64[K]."""

    logits: Tensor
    anchor: Tensor

    def divergence(self, forward: bool = True) -> tuple[Tensor, Tensor]:
        """Return KL(current || anchor), or the other direction, and its gradient to the logits."""
        leaf = self.logits.clone().requires_grad_()
        current = leaf.log_softmax(0)
        first, second = (current, self.anchor) if forward else (self.anchor, current)
        value = (first.exp() * (first - second)).sum()
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    def expected(self, estimator: Estimator, of_current: bool) -> tuple[Tensor, Tensor]:
        """Return mean and mean gradient of an estimate, over samples of the current policy or of the anchor."""
        count = len(self.logits)
        leaf = self.logits.clone().requires_grad_()
        current = leaf.log_softmax(0)
        samples = current.detach() if of_current else self.anchor
        batch = make_batch([1.0] * count, [[1]] * count, behavior=samples[:, None].tolist())
        view = GRPO.view(current[:, None], -current[:, None], batch, Statistics())
        estimate = kl_estimate(view, self.anchor[:, None], estimator)[:, 0]
        (gradient,) = torch.autograd.grad((samples.exp() * estimate).sum(), leaf)
        return (samples.exp() * estimate.detach()).sum(), gradient


@st.composite
def two(draw: st.DrawFn) -> Two:
    """Draw two policies over 2 to 6 outcomes."""
    logits = draw(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6))
    first, second = torch.tensor(logits, dtype=torch.float64).unbind(1)
    return Two(first, second.log_softmax(0))


@few
@given(two())
def test_from_its_own_samples(policies: Two):
    """k1 and k3 have the KL's value, k2 its gradient, k3 the other direction's, and k1 none at all (P25)."""
    value, gradient = policies.divergence()
    _, backward = policies.divergence(forward=False)
    of = {name: policies.expected(name, of_current=True) for name in ("k1", "k2", "k3", "k2_grad_k3", "unbiased")}

    for name in ("k1", "k3", "k2_grad_k3", "unbiased"):
        same(of[name][0], value, 1e-12)
    for name in ("k2", "k2_grad_k3", "unbiased"):
        same(of[name][1], gradient, 1e-12)
    same(of["k3"][1], backward, 1e-12)
    same(of["k1"][1], torch.zeros_like(gradient), 1e-12)


@few
@given(two())
def test_from_the_anchors_samples(policies: Two):
    """The unbiased estimate has the KL's value and gradient; k3 estimates chi^2(b, pi) - KL(b || pi) (P25)."""
    value, gradient = policies.divergence()
    other, _ = policies.divergence(forward=False)
    chi_square = ((2 * policies.anchor - policies.logits.log_softmax(0)).exp()).sum() - 1
    found, slope = policies.expected("unbiased", of_current=False)
    k3, _ = policies.expected("k3", of_current=False)

    same(found, value, 1e-12)
    same(slope, gradient, 1e-12)
    same(k3, chi_square - other, 1e-10)


@few
@given(two())
def test_estimates_are_never_negative(policies: Two):
    """k2, k3 and the unbiased estimate of every single outcome are at least 0, to rounding (P25)."""
    current = policies.logits.log_softmax(0)
    count = len(current)
    batch = make_batch([1.0] * count, [[1]] * count, behavior=policies.anchor[:, None].tolist())
    view = GRPO.view(current[:, None], current[:, None], batch, Statistics())
    for name in ("k2", "k3", "unbiased"):
        assert bool((kl_estimate(view, policies.anchor[:, None], name) >= -1e-14).all())
