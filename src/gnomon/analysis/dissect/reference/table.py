"""The formulas of each preset (section 16.2), and their combination to a loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnomon.analysis.dissect.reference.advantages import (
    Credit,
    added,
    batch_mean,
    by_state,
    fixed,
    gae,
    group_mean,
    lead_over_second,
    leave_one_out,
    length_adaptive,
    length_sigmoid,
    length_weighted,
    over_batch,
    over_mean,
    over_optimum,
    per_reward,
    returns,
    teacher_gap,
    tracked,
    whitened,
)
from gnomon.analysis.dissect.reference.arrays import ReferenceAnswer, Response, Step, Vector
from gnomon.analysis.dissect.reference.losses import (
    BoundedRatio,
    Factors,
    Pusher,
    balanced_clip,
    bounded_cap,
    capped,
    clip,
    close_in_kl,
    close_in_tv,
    future_influence,
    gamma_kernel,
    geometric_clip,
    most_undecided,
    policy_gradient,
    quadratic_penalty,
    regression,
    sequence_clip,
    small_second_moment,
    soft_gate,
    within,
    without_covariant,
)
from gnomon.analysis.dissect.reference.terms import (
    Term,
    Weights,
    constant_length,
    covariance_kl,
    leash,
    positive_nll,
    prompt_mean,
    reference_k2,
    sequence_mean,
    sequence_sum,
    token_mean,
)


@dataclass(frozen=True)
class Oracle:
    """An algorithm as formulas.

    Attributes:
        credit: Rewards to advantages.
        push: Ratios to losses and slopes.
        mean: Weights of tokens.
        terms: Added terms.
        value_lambda: Lambda of a critic's targets; the value loss is the token mean of (V - target)^2 / 2.
        factors: What a correction multiplies losses by.
    """

    credit: Credit
    push: Pusher
    mean: Weights
    terms: tuple[Term, ...] = ()
    value_lambda: float | None = None
    factors: Factors | None = None

    def __call__(self, step: Step) -> ReferenceAnswer:
        """Compute one optimizer step."""
        responses = step.responses()
        advantages, weights = self.credit(responses), self.mean(responses)
        trusted = BoundedRatio(
            _effective_size([r.current - r.behavior for r in responses]),
            _effective_size([r.current - r.proximal for r in responses]),
            responses,
            advantages,
        )
        pushes = [self.push(r, a, trusted) for r, a in zip(responses, advantages, strict=True)]
        ones = [np.ones(len(r)) for r in responses]
        factors = ones if self.factors is None else self.factors(responses, advantages)
        scaled = [w * f for w, f in zip(weights, factors, strict=True)]
        policy = math.fsum(float(x) for s, p in zip(scaled, pushes, strict=True) for x in s * p.loss)
        gradient = [s * p.slope for s, p in zip(scaled, pushes, strict=True)]
        loss = policy
        for term in self.terms:
            value, slopes = term(responses, weights, trusted)
            loss += value
            gradient = [g + s for g, s in zip(gradient, slopes, strict=True)]
        tokens = max(sum(len(r) for r in responses), 1)
        return ReferenceAnswer(
            advantages=step.scatter(advantages),
            loss=loss,
            policy_loss=policy,
            value_loss=None if self.value_lambda is None else _value_loss(responses, self.value_lambda),
            gradient=step.scatter(gradient),
            clipped_fraction=sum(int(p.is_clipped.sum()) for p in pushes) / tokens,
            out_of_band_fraction=sum(int(p.is_out.sum()) for p in pushes) / tokens,
            ess_fraction=trusted.behavior,
        )


def _effective_size(log_ratios: Sequence[Vector]) -> float:
    """Return (sum rho)^2 / (n sum rho^2) over all tokens (section 5.1); 1 of none."""
    rho = np.exp(np.concatenate([np.zeros(0), *log_ratios]))
    return float(np.sum(rho) ** 2 / (len(rho) * np.sum(rho**2))) if len(rho) else 1.0


def _value_loss(responses: Sequence[Response], value_lambda: float) -> float:
    # target - V is the advantage with the target's lambda (section 7.1).
    errors = [float(x) for vector in gae(fixed(value_lambda))(responses) for x in vector]
    return math.fsum(x**2 for x in errors) / 2 / max(len(errors), 1)


_group = group_mean("group")
_centered = group_mean("none")
_narrow, _higher = clip(0.2, 0.2), clip(0.2, 0.28)

ORACLES: Mapping[str, Oracle] = {
    "reinforce": Oracle(returns(), capped(math.inf), token_mean),
    "rloo": Oracle(leave_one_out(kl=0.05), _narrow, sequence_mean),
    "reinforce-pp": Oracle(whitened(returns(kl=0.01)), _narrow, token_mean),
    "reinforce-pp-baseline": Oracle(
        whitened(_centered, skip_degenerate=True), _narrow, token_mean, (reference_k2(0.01),)
    ),
    "opo": Oracle(length_weighted, capped(math.inf), token_mean),
    "rae": Oracle(over_optimum, _narrow, token_mean),
    "a-star-po": Oracle(over_optimum, regression(beta=1e-3), sequence_mean),
    "ppo": Oracle(whitened(gae(fixed(0.95))), _narrow, token_mean, value_lambda=0.95),
    "vc-ppo": Oracle(gae(fixed(0.95)), _narrow, sequence_mean, value_lambda=1.0),
    "grpo": Oracle(_group, _narrow, sequence_mean),
    "dr-grpo": Oracle(_centered, _narrow, constant_length(3000)),
    "dapo": Oracle(_group, _higher, token_mean),
    "lite-ppo": Oracle(group_mean("batch"), _narrow, token_mean),
    "gdpo": Oracle(over_batch(per_reward(_group)), _narrow, sequence_mean),
    "gigpo": Oracle(added(_group, by_state(0.95), 1.0), _narrow, token_mean),
    "gspo": Oracle(_group, sequence_clip(3e-4, 4e-4), sequence_mean),
    "gspo-token": Oracle(_group, sequence_clip(3e-4, 4e-4), sequence_mean),
    "gmpo": Oracle(_group, geometric_clip(0.4), sequence_mean),
    "sapo": Oracle(_group, soft_gate(1.0, 1.05), sequence_mean),
    "cispo": Oracle(_group, capped(5.0), token_mean),
    "p3o": Oracle(_group, bounded_cap(), token_mean, (leash(),)),
    "p3o-two-anchor": Oracle(_group, bounded_cap(both=True), token_mean, (leash(is_mixture=True),)),
    "spo": Oracle(tracked(), _higher, token_mean),
    "vapo": Oracle(gae(length_adaptive(0.05)), _higher, token_mean, (positive_nll(0.1),), value_lambda=1.0),
    "vapo-review": Oracle(gae(length_sigmoid(0.3, 0.95)), _higher, token_mean, value_lambda=1.0),
    "decoupled-ppo": Oracle(_group, clip(0.2, 0.2, cap=5.0), token_mean),
    "opd": Oracle(teacher_gap, capped(math.inf), token_mean),
    "ipo": Oracle(_centered, policy_gradient(), token_mean, factors=close_in_tv(0.3)),
    "dppo": Oracle(_centered, policy_gradient(), constant_length(8192), factors=close_in_tv(0.15, outward=True)),
    "dppo-kl": Oracle(_centered, policy_gradient(), constant_length(8192), factors=close_in_kl(0.05)),
    "icepop": Oracle(_group, _narrow, sequence_mean, factors=within(0.5, 5.0)),
    "flash-reinforce": Oracle(batch_mean, policy_gradient(), sequence_mean, factors=close_in_kl(5e-3, mean=True)),
    "maxrl": Oracle(over_mean(), _narrow, token_mean),
    "luspo": Oracle(_group, sequence_clip(2e-3, 2.5e-3), sequence_sum),
    "vespo": Oracle(_group, gamma_kernel((2.0, 3.0), (3.0, 2.0)), token_mean),
    "pass-at-k": Oracle(lead_over_second, _narrow, sequence_mean),
    "high-entropy": Oracle(_group, _higher, token_mean, factors=most_undecided(0.2)),
    "clip-cov": Oracle(_group, clip(1.0, 1.0), token_mean, factors=without_covariant(2e-4, 1.0, 5.0)),
    "kl-cov": Oracle(_group, capped(math.inf), token_mean, (covariance_kl(1.0, 2e-3),)),
    "m2po": Oracle(_group, policy_gradient(), token_mean, factors=small_second_moment(0.04)),
    "bapo": Oracle(_group, balanced_clip(0.5, (0.6, 0.9), (1.2, 3.0), 0.05), token_mean),
    "fipo": Oracle(_group, clip(0.2, 0.28, dual=10.0), token_mean, factors=future_influence(32.0, 1.0, 1.2, 10.0)),
    "cfpo": Oracle(_group, quadratic_penalty(0.2), sequence_mean),
    "scalerl": Oracle(over_batch(_centered), policy_gradient(5.0), prompt_mean),
}
"""A preset's name to its formulas, with the numbers of the papers (or of the register, section 17)."""
