"""verl 0.9.1 (`verl.trainer.ppo.core_algos`): losses, penalties and denominators on random steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import (
    CISPO,
    DAPO,
    DECOUPLED_PPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    PPO,
    SAPO,
    VC_PPO,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    ConstantLength,
    CriticConfig,
    GeometricClip,
    Kl,
    PolicyGradient,
    Ratio,
    SequenceMean,
    SequenceSum,
    SigmoidGate,
    TokenMean,
)
from gnomon.core.metrics import Metrics
from gnomon.models.head import chosen_logprobs

AGGREGATES = [
    ("token-mean", TokenMean()),
    ("seq-mean-token-mean", SequenceMean()),
    ("seq-mean-token-sum", SequenceSum()),
]
modes = pytest.mark.parametrize(("mode", "aggregate"), AGGREGATES, ids=[mode for mode, _ in AGGREGATES])
BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def number(metrics: Metrics, name: str) -> float:
    """Return one metric as a number."""
    return metrics.values()[name]


def without(problem: Any, row: int) -> Any:
    """Return the problem with a response that has no trained token."""
    mask = problem.batch.mask.clone()
    mask[row] = False
    return problem.with_batch(mask=mask)


@pytest.mark.parametrize(
    ("preset", "name", "mode", "settings"),
    [
        (GRPO, "vanilla", "seq-mean-token-mean", {}),
        (DAPO, "vanilla", "token-mean", {"clip_ratio_high": 0.28}),
        (DR_GRPO, "vanilla", "seq-mean-token-sum-norm", {"global_batch_info": {"loss_scale_factor": 3000}}),
        (PPO, "vanilla", "token-mean", {}),
        (VC_PPO, "vanilla", "seq-mean-token-mean", {}),
        (DECOUPLED_PPO, "vanilla", "token-mean", {}),
        (GSPO, "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        (GSPO_TOKEN, "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        (GMPO, "geo_mean", "token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        (SAPO, "sapo", "token-mean", {}),
        (CISPO, "cispo", "token-mean", {"clip_ratio_low": 10.0, "clip_ratio_high": 4.0}),
    ],
    ids=lambda x: x.name if isinstance(x, Algorithm) else "",
)
def test_presets(verl, problem, same, preset, name, mode, settings):
    """A preset's loss is verl's with the paper's settings spelled out, its dual clip put out of reach."""
    batch = problem.batch
    weights = None
    if preset.correction is not None:
        gap = batch.proximal - batch.behavior
        weights, _ = verl.corrections.compute_rollout_correction_weights(gap, batch.mask.double(), "token", 5.0)

    same(problem.ours(preset), verl.loss(name, problem, mode, weights, clip_ratio_c=1e9, **settings)[:2])


@modes
def test_dual_clip(verl, problem, compose, same, mode, aggregate):
    """Asymmetric clip with a dual clip is verl's "vanilla" loss, in value and gradient, on every denominator."""
    algorithm = compose(surrogate=ClippedSurrogate(Clip(0.2, 0.28), dual=1.5), aggregate=aggregate)

    same(problem.ours(algorithm), verl.loss("vanilla", problem, mode, clip_ratio_c=1.5, **BOUNDS)[:2])


def test_clip_fractions(verl, problem, compose, same):
    """verl's pg_clipfrac and pg_clipfrac_lower are our clipped and dual-clipped fractions."""
    algorithm = compose(surrogate=ClippedSurrogate(Clip(0.2, 0.28), dual=1.5))
    _, _, theirs = verl.loss("vanilla", problem, clip_ratio_c=1.5, **BOUNDS)
    metrics = problem.metrics(algorithm)

    same(number(metrics, "loss/clipped_fraction"), theirs["actor/pg_clipfrac"])
    same(number(metrics, "loss/dual_clipped_fraction"), theirs["actor/pg_clipfrac_lower"])
    assert theirs["actor/pg_clipfrac_lower"] > 0


def test_extreme_ratios(verl, problem, compose, same):
    """Log-ratios of +-30 are bounded to +-20 by both, with no gradient beyond."""
    far = problem.current + 30 * torch.sign(problem.batch.behavior - problem.batch.proximal)
    extreme = problem.with_batch(proximal=far)
    algorithm = compose(surrogate=ClippedSurrogate(Clip(0.2, 0.28), dual=3.0), aggregate=TokenMean())

    same(extreme.ours(algorithm), verl.loss("vanilla", extreme, clip_ratio_c=3.0, **BOUNDS)[:2])


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_gspo(verl, problem, compose, same, level):
    """GSPO and GSPO-token are both verl's "gspo" when it is averaged over sequences and A is one for a sequence."""
    algorithm = compose(ratio=Ratio(level=level), surrogate=ClippedSurrogate(Clip(3e-2, 4e-2)))
    theirs = verl.loss("gspo", problem, "seq-mean-token-mean", clip_ratio_low=3e-2, clip_ratio_high=4e-2)

    same(problem.ours(algorithm), theirs[:2])


def test_gspo_token_with_advantages_of_tokens(verl, problem, compose, same):
    """GSPO-token is verl's "gspo" also when every token has an advantage of its own."""
    varied = problem.with_batch(advantages=problem.batch.values)
    algorithm = compose(ratio=Ratio(level="sequence_token"), surrogate=ClippedSurrogate(Clip(3e-2, 4e-2)))
    theirs = verl.loss("gspo", varied, "seq-mean-token-mean", clip_ratio_low=3e-2, clip_ratio_high=4e-2)

    same(varied.ours(algorithm), theirs[:2])


def test_gspo_clamp(verl, problem, compose, same):
    """verl's "gspo" bounds the sequence's log-ratio to 10 from above only: with Ratio(clamp=10) we are equal."""
    far = problem.with_batch(proximal=problem.current - 15)
    theirs = verl.loss("gspo", far, "seq-mean-token-mean")[:2]
    clip = ClippedSurrogate(Clip(0.2, 0.2))

    same(far.ours(compose(ratio=Ratio(level="sequence_token", clamp=10.0), surrogate=clip))[0], theirs[0])
    assert abs(far.ours(compose(ratio=Ratio(level="sequence_token"), surrogate=clip))[0]) > 100 * abs(theirs[0])


def test_gspo_on_the_default_denominator(verl, problem, same):
    """With verl's default token-mean its "gspo" is another loss than GSPO: long responses count more."""
    settings = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}

    same(problem.ours(GSPO), verl.loss("gspo", problem, "seq-mean-token-mean", **settings)[:2])
    assert abs(problem.ours(GSPO)[0] - verl.loss("gspo", problem, "token-mean", **settings)[0]) > 1e-3


def test_sapo(verl, problem, compose, same):
    """The soft gate is verl's "sapo", which is a mean over sequences whatever it is asked for."""
    algorithm = compose(surrogate=SigmoidGate(1.0, 1.05))

    same(problem.ours(algorithm), verl.loss("sapo", problem, "token-mean", tau_pos=1.0, tau_neg=1.05)[:2])


@pytest.mark.parametrize(
    ("low", "high", "trust"),
    [(10.0, 4.0, Cap(5.0)), (0.2, 0.2, Cap(1.2, floor=0.8))],
    ids=["one-sided", "verl's default"],
)
def test_cispo(verl, problem, compose, same, low, high, trust):
    """A cap is verl's "cispo" with 1 + clip_ratio_high as cap; its default also has a floor of 0.8."""
    algorithm = compose(surrogate=PolicyGradient(trust), aggregate=TokenMean())
    theirs = verl.loss("cispo", problem, clip_ratio_low=low, clip_ratio_high=high)

    same(problem.ours(algorithm), theirs[:2])
    same(number(problem.metrics(algorithm), "loss/capped_fraction"), theirs[2]["actor/pg_clipfrac"])


def test_gmpo(verl, problem, compose, same):
    """The geometric clip is verl's "geo_mean"."""
    algorithm = compose(surrogate=GeometricClip(0.4))
    theirs = verl.loss("geo_mean", problem, clip_ratio_low=0.4, clip_ratio_high=0.4)

    same(problem.ours(algorithm), theirs[:2])


def test_gmpo_with_an_empty_response(verl, problem, compose, same):
    """verl's "geo_mean" divides by all responses, we by those with a trained token: 16 / 15 apart."""
    empty = without(problem, 3)
    loss, gradient = empty.ours(compose(surrogate=GeometricClip(0.4)))
    theirs = verl.loss("geo_mean", empty, clip_ratio_low=0.4, clip_ratio_high=0.4)

    same((loss * 15 / 16, gradient * 15 / 16), theirs[:2])


@modes
def test_denominators_leave_out_empty_responses(verl, problem, same, mode, aggregate):
    """A response without a trained token is no response, for verl's agg_loss as for us."""
    batch = without(problem, 3).batch
    losses = problem.batch.values
    ours = (aggregate(batch.mask, batch.group) * losses).sum()

    same(ours, verl.core.agg_loss(losses, batch.mask.double(), mode))


def test_constant_length(verl, problem, same):
    """Dr. GRPO's constant is verl's loss_scale_factor, which must be given: its default is the padded width."""
    batch, losses, mode = problem.batch, problem.batch.values, "seq-mean-token-sum-norm"
    mask, wider = batch.mask.double(), torch.nn.functional.pad(batch.mask.double(), (0, 8))
    padded = torch.nn.functional.pad(losses, (0, 8))

    ours = (ConstantLength(100)(batch.mask, batch.group) * losses).sum()
    same(ours, verl.core.agg_loss(losses, mask, mode, loss_scale_factor=100))
    same(ours, verl.core.agg_loss(padded, wider, mode, loss_scale_factor=100))
    same(verl.core.agg_loss(padded, wider, mode) * 20 / 12, verl.core.agg_loss(losses, mask, mode))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches(verl, problem, compose, same, mode):
    """Cuts add up to our whole step when verl is told the step's counts; by itself it counts each cut alone."""
    batch = problem.batch
    aggregate = dict(AGGREGATES)[mode]
    whole, _ = problem.ours(compose(aggregate=aggregate))
    cuts = [range(0, 3), range(3, 16)]
    counts = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(batch)}

    def total(**settings: Any) -> float:
        parts = [type(problem)(batch.rows(list(rows)), problem.current[list(rows)]) for rows in cuts]
        return sum(verl.loss("vanilla", part, mode, clip_ratio_c=1e9, **settings)[0] for part in parts)

    same(total(global_batch_info=counts), whole)
    same(total(global_batch_info=counts | {"dp_size": 2}) / 2, whole)
    assert abs(total() / 2 - whole) > 1e-4


@pytest.mark.parametrize(
    ("estimator", "theirs"), [("k1", "k1"), ("k2", "k2"), ("k3", "low_var_kl"), ("k2_grad_k3", "k3+")]
)
def test_kl_estimators(verl, problem, compose, same, estimator, theirs):
    """Each estimate of the distance to the reference is verl's kl_penalty of that name, in value and slope."""
    leaf, still = problem.current.clone().requires_grad_(), problem.with_batch(advantages=0 * problem.current)
    batch, kl = still.batch, Kl("reference", 0.1, estimator)
    penalty = verl.core.kl_penalty(leaf, batch.reference, theirs)
    total = 0.1 * verl.core.agg_loss(penalty, batch.mask.double(), "token-mean")

    same(
        still.ours(compose(aggregate=TokenMean(), regularizers=(kl,))),
        (total.detach(), torch.autograd.grad(total, leaf)[0]),
    )


def test_k3_of_a_far_reference(verl, problem, compose, same):
    """verl bounds k3 at 10, where its gradient ends: at d = -4 ours is 49.6 and still pulls the token back up."""
    far = problem.with_batch(reference=problem.current + 4, advantages=0 * problem.current)
    loss, gradient = far.ours(compose(regularizers=(Kl("reference", 1.0, "k3"),)))
    leaf = problem.current.clone().requires_grad_()
    theirs = verl.core.kl_penalty(leaf, far.batch.reference, "k3")

    same(loss, torch.e**4 - 1 - 4)
    same(theirs.detach(), torch.full_like(leaf, 10.0))
    assert float(torch.autograd.grad(theirs.sum(), leaf)[0].abs().max()) == 0
    assert bool((gradient[far.batch.mask] < 0).all())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy(same, temperature):
    """The head that never makes all logits at once gives verl's log-probabilities, entropies and gradients."""
    import verl.utils.torch_functional as functional

    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(8, 50), torch.randn(20, 8), torch.randint(0, 50, (20,))
    pull = torch.randn(2, 20)
    ours = chosen_logprobs(hidden, head, targets, temperature, 7, True)
    logits = head(hidden) / temperature
    theirs = (functional.logprobs_from_logits(logits, targets), functional.entropy_from_logits(logits))

    slopes = [torch.autograd.grad((torch.stack(both) * pull).sum(), head.weight)[0] for both in (ours, theirs)]
    same(torch.stack(ours).detach(), torch.stack(theirs).detach(), 1e-5)
    same(*slopes, 1e-5)


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss(verl, problem, same, clip):
    """The critic's loss is verl's compute_value_loss, in value, gradient and clipped fraction."""
    batch = problem.batch
    weights = TokenMean()(batch.mask, batch.group)
    cut = batch.with_fields(weights=weights, returns=batch.reference)
    leaf, other = (problem.current.clone().requires_grad_() for _ in range(2))
    ours, metrics = CriticConfig(clip=clip).loss(leaf, cut)
    theirs, clipped = verl.core.compute_value_loss(
        other, batch.reference, batch.values, batch.mask.double(), clip if clip is not None else 1e9
    )

    same(ours.detach(), theirs.detach())
    same(torch.autograd.grad(ours, leaf)[0], torch.autograd.grad(theirs, other)[0])
    same(number(metrics, "critic/clipped_fraction"), clipped)


def reinforce(verl: Any, problem: Any, **settings: Any) -> tuple[float, Tensor]:
    """Return verl's bypass mode: one policy sampled and is the anchor."""
    same_anchor = problem.with_batch(proximal=problem.batch.behavior)
    plan = {"rollout_is": "token", "rollout_is_threshold": 2.0, **settings}
    from verl.workers.config.actor import PolicyLossConfig

    return verl.loss("bypass_mode", same_anchor, policy_loss=PolicyLossConfig(rollout_correction=plan))[:2]


@pytest.mark.parametrize(
    ("kind", "surrogate"),
    [("reinforce", PolicyGradient(Cap(2.0))), ("ppo_clip", ClippedSurrogate(Clip(0.2, 0.2), dual=3.0))],
)
def test_bypass_mode(verl, problem, compose, same, kind, surrogate):
    """A ratio anchored on behavior is verl's bypass mode, truncated or clipped, and is corrected once."""
    algorithm: Algorithm = compose(ratio=Ratio(anchor="behavior"), surrogate=surrogate, aggregate=TokenMean())

    same(problem.ours(algorithm), reinforce(verl, problem, loss_type=kind))
