"""verl 0.9.1 (`verl.trainer.ppo.core_algos`): losses and advantages of 2025 and 2026."""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.algorithms import (
    CLIP_COV,
    DPPO,
    DPPO_KL,
    KL_COV,
    Cap,
    Clip,
    ClippedSurrogate,
    CovarianceKl,
    CovarianceMask,
    GroupRelative,
    MarginalBest,
    OptimalTokenBaseline,
    PerReward,
    PolicyGradient,
    TokenMean,
)
from gnomon.testing import make_batch


def fresh(problem: Any) -> Any:
    """Return the problem with the policy that sampled as the step's first, of probabilities that are below 1."""
    proximal = problem.batch.proximal.clamp(max=-0.02)
    return problem.with_batch(behavior=proximal, proximal=proximal)


def plan(**settings: Any) -> Any:
    """Return the settings of a policy loss."""
    return importlib.import_module("verl.workers.config").PolicyLossConfig(**settings)


@pytest.mark.parametrize(("preset", "name", "bound"), [(DPPO, "dppo_tv", 0.15), (DPPO_KL, "dppo_kl", 0.05)])
def test_dppo(verl, problem, same, preset, name, bound):
    """Both divergences of DPPO, in value and gradient; verl's cap on the ratio, 3 unless set, put out of reach."""
    step = fresh(problem)
    settings = {"clip_ratio_low": bound, "clip_ratio_high": bound}
    theirs = verl.loss(name, step, clip_ratio_c=1e9, **settings)
    capped = verl.loss(name, step, clip_ratio_c=3.0, **settings)
    plain = replace(preset, aggregate=TokenMean())

    same(step.ours(plain), theirs[:2])
    assert (
        0
        < theirs[2]["actor/pg_clipfrac"]
        == pytest.approx(step.metrics(plain).values()["mismatch/masked_fraction"], abs=1e-7)
    )
    same(step.ours(replace(plain, surrogate=PolicyGradient(Cap(3.0)))), capped[:2])


def test_clip_cov(verl, problem, same):
    """With every token of the band chosen, which leaves nothing to a draw, values and gradients are verl's."""
    chosen = replace(CLIP_COV, correction=CovarianceMask(1.0, 0.1, 5.0), surrogate=ClippedSurrogate(Clip(1.0, 1e9)))
    settings = plan(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0)
    theirs = verl.loss("clip_cov", problem, clip_ratio_low=1.0, clip_ratio_high=1e9, policy_loss=settings)

    same(problem.ours(chosen), theirs[:2])
    assert theirs[2]["actor/pg_clipfrac"] > 0.05


def test_clip_cov_of_clipped_tokens(verl, problem, same):
    """Tokens whose ratio is clipped are no candidates in verl and are in ours: other values, the same gradient."""
    chosen = replace(CLIP_COV, correction=CovarianceMask(1.0, 0.1, 5.0), surrogate=ClippedSurrogate(Clip(0.2, 0.2)))
    settings = plan(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0)
    theirs = verl.loss("clip_cov", problem, clip_ratio_low=0.2, clip_ratio_high=0.2, policy_loss=settings)

    same(problem.ours(chosen)[1], theirs[1])


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_kl_cov(verl, problem, same, share):
    """The gradient is verl's; the value is not, for ours is that of log-probabilities and theirs that of ratios."""
    ours = replace(KL_COV, regularizers=(CovarianceKl(0.7, share),))
    theirs = verl.loss("kl_cov", problem, policy_loss=plan(kl_cov_ratio=share, ppo_kl_coef=0.7))

    same(problem.ours(ours)[1], theirs[1])


def placed(batch: Any, rewards: Tensor) -> Tensor:
    """Return rewards on each response's last trained token, as verl wants them."""
    last = batch.mask.shape[1] - 1 - batch.mask.int().flip(1).argmax(1)
    return torch.zeros_like(batch.behavior).index_put((torch.arange(len(batch)), last), rewards.double())


def test_gdpo(verl, drawn, same):
    """Each reward in its group's scale, weighed and added up, then whitened over tokens; verl's rewards are float32.

    The preset's last scale is that of responses, the paper's; verl's is that of tokens, where long ones weigh more.
    """
    batch = drawn(3, holes=False).batch
    both = torch.stack([batch.rewards, (batch.rewards * 37).sin()], 1)
    batch = batch.with_fields(component_rewards=both, components=("a", "b"), component_weights=(1.0, 0.5))
    mask = batch.mask.double()
    prompts = torch.ones(len(batch), 1)
    theirs, _ = verl.core.get_adv_estimator_fn("gdpo")(
        token_level_rewards=placed(batch, batch.rewards),
        response_mask=mask,
        index=np.array(batch.group.tolist()),
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": both[:, 0].numpy(), "b": both[:, 1].numpy()},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, mask], 1).long()},
    )
    inner = PerReward(GroupRelative())(batch)[0]
    values = inner[batch.mask]

    ours = torch.where(batch.mask, (inner - values.mean()) / (values.var() + 1e-8).sqrt(), 0.0)
    same(ours, theirs, 1e-5)


def test_pass_at_k(verl, problem, same):
    """The best response's lead over the second; verl divides by the group's deviation unless it is told not to."""
    batch = problem.batch
    given = {"token_level_rewards": verl.rewards(batch), "response_mask": batch.mask.double()}
    given |= {"index": np.array(batch.group.tolist())}
    estimate = verl.core.get_adv_estimator_fn("grpo_passk")
    plain, _ = estimate(**given, config={"norm_adv_by_std_in_grpo": False})
    scaled, _ = estimate(**given, config={"norm_adv_by_std_in_grpo": True})
    ours = MarginalBest()(batch)[0]

    same(ours, plain)
    assert float(ours.abs().sum()) > 0
    assert float((scaled - ours).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("name", "holes"), [("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)], ids=["plain", "holes"]
)
@pytest.mark.parametrize("seed", range(4))
def test_optimal_token_baseline(verl, drawn, same, name, holes, seed):
    """The baseline of each token, tool output skipped as in verl's form for many turns, the longest tail without one.

    The sum of squared probabilities that verl reads is p^2 over the probability at half the temperature.
    """
    batch = fresh(drawn(seed, holes=holes)).batch
    odds = 2 * (batch.proximal - (-torch.expm1(batch.proximal)).log()) + 1
    colder = -torch.nn.functional.softplus(-odds)
    given = {"token_level_rewards": verl.rewards(batch), "response_mask": batch.mask.double()}
    theirs, _ = verl.core.get_adv_estimator_fn(name)(
        **given,
        index=np.array(batch.group.tolist()),
        old_log_probs=batch.proximal,
        sum_pi_squared=(2 * batch.proximal - colder).exp(),
        epsilon=1e-15,
    )

    same(OptimalTokenBaseline()(batch.with_fields(sharpened=colder))[0], theirs)
    assert float(theirs.abs().max()) > 0.1


def test_a_response_alone_has_no_baseline(verl, same):
    """Its returns are its advantages, in verl and in ours; advantage.singleton = "zero" trains nothing there."""
    batch = make_batch([0.7], [[1, 1]], proximal=[[-1.0, -2.0]], sharpened=[[-0.5, -1.5]])
    ours, zero = (OptimalTokenBaseline(kind)(batch)[0].tolist() for kind in ("raw", "zero"))

    assert (ours, zero) == ([[0.7, 0.7]], [[0.0, 0.0]])
    theirs, _ = verl.core.get_adv_estimator_fn("tir_optimal_token_baseline")(
        token_level_rewards=verl.rewards(batch),
        response_mask=batch.mask.double(),
        index=np.array([0]),
        old_log_probs=batch.proximal,
        sum_pi_squared=(2 * batch.proximal - batch.sharpened).exp(),
        config=SimpleNamespace(),
    )
    same(torch.tensor(ours), theirs)
