"""TRL 1.16.0 (`GRPOTrainer`, experimental `GMPOTrainer`): the loss of a real trainer, its log-probabilities given."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.algorithms import (
    A_STAR_PO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    HIGH_ENTROPY,
    ICEPOP,
    LUSPO,
    VESPO,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    ConstantLength,
    Entropy,
    EntropyMask,
    GeometricClip,
    Kl,
    MaskedIS,
    OffPolicyMask,
    PolicyGradient,
    Ratio,
    SequenceMean,
    SequenceSum,
    SigmoidGate,
    TokenMean,
    TruncatedIS,
)

CLIP = ClippedSurrogate(Clip(0.2, 0.28))
SEQUENCE_CLIP = ClippedSurrogate(Clip(3e-2, 4e-2))
EPSILON = {"epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE_EPSILON = {"epsilon": 3e-2, "epsilon_high": 4e-2, "importance_sampling_level": "sequence"}


def without(problem: Any, row: int) -> Any:
    """Return the problem with a response that has no trained token."""
    mask = problem.batch.mask.clone()
    mask[row] = False
    return problem.with_batch(mask=mask)


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ({"loss_type": "grpo", **EPSILON}, {"surrogate": CLIP, "aggregate": SequenceMean()}),
        ({"loss_type": "bnpo", **EPSILON}, {"surrogate": CLIP, "aggregate": TokenMean()}),
        ({"loss_type": "dapo", **EPSILON}, {"surrogate": CLIP, "aggregate": TokenMean()}),
        ({"loss_type": "dr_grpo", **EPSILON}, {"surrogate": CLIP, "aggregate": ConstantLength(12)}),
        (
            {"loss_type": "grpo", "delta": 1.5, **EPSILON},
            {"surrogate": ClippedSurrogate(Clip(0.2, 0.28), dual=1.5), "aggregate": SequenceMean()},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 1.5},
            {"surrogate": PolicyGradient(Cap(1.5)), "aggregate": TokenMean()},
        ),
        ({"loss_type": "sapo"}, {"surrogate": SigmoidGate(1.0, 1.05), "aggregate": SequenceMean()}),
        (
            {"loss_type": "grpo", **SEQUENCE_EPSILON},
            {"surrogate": SEQUENCE_CLIP, "ratio": Ratio(level="sequence"), "aggregate": SequenceMean()},
        ),
        (
            {"loss_type": "luspo", **SEQUENCE_EPSILON},
            {"surrogate": SEQUENCE_CLIP, "ratio": Ratio(level="sequence"), "aggregate": SequenceSum()},
        ),
    ],
    ids=["grpo", "bnpo", "dapo", "dr_grpo", "delta", "cispo", "sapo", "gspo", "luspo"],
)
def test_losses(trl, problem, compose, same, settings, pieces):
    """Each loss type of TRL is a composition of our pieces, in value and gradient, k3 to the reference included."""
    algorithm = compose(**pieces, regularizers=(Kl("reference", 0.04, "k3"),))

    same(problem.ours(algorithm), trl(beta=0.04, use_bias_correction_kl=False, **settings).loss(problem))


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (GRPO, {"loss_type": "grpo"}),
        (DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
        (DR_GRPO, {"loss_type": "dr_grpo", "max_completion_length": 3000}),
        (
            GSPO,
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Algorithm) else "",
)
def test_presets(trl, problem, same, preset, settings):
    """A preset is TRL's loss of that name with the paper's settings spelled out."""
    same(problem.ours(preset), trl(**settings).loss(problem))


def test_vespo(trl, problem, same):
    """The Gamma weight of a response's whole ratio, in value and gradient, when the engine is the step's first policy.

    TRL bounds the log-ratio of a response below at log(1e-8), where the weight is nothing.
    """
    fresh = problem.with_batch(behavior=problem.batch.proximal)

    same(fresh.ours(VESPO), trl(loss_type="vespo").loss(fresh))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_high_entropy(trl, problem, same, share):
    """Only forks in the road are trained, and all tokens stay in the denominator.

    TRL's quantile lies between two tokens or on one, which is then one more than the share; ours is never more.
    """
    peer = trl(loss_type="dapo", epsilon_high=0.28, top_entropy_quantile=share)
    mask = problem.batch.mask
    kept = int(peer.trainer.get_high_entropy_mask(-problem.current / 2, mask, 1 - share).sum())
    ours = replace(HIGH_ENTROPY, correction=EntropyMask((kept + 0.5) / int(mask.sum())))

    same(problem.ours(ours), peer.loss(problem))
    assert kept - int(share * int(mask.sum())) in (0, 1)


def test_icepop(trl, problem, same):
    """IcePop is a mask of engine ratios outside [0.5, 5] before GRPO's loss."""
    named = {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0}
    peer = trl(loss_type="grpo", **{f"vllm_importance_sampling_{key}": value for key, value in named.items()})
    peer.trainer.use_vllm = True
    weight = peer.scored(problem)["importance_sampling_ratio"]

    assert float(weight.std()) > 0.01
    same(problem.ours(ICEPOP), peer.loss(problem, importance_sampling_ratio=weight))


def test_luspo(trl, problem, same):
    """The preset, with the paper's bounds."""
    settings = {"importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}

    same(problem.ours(LUSPO), trl(loss_type="luspo", **settings).loss(problem))


def test_grpo_by_default_is_not_grpo(trl, problem, same):
    """TRL's GRPOTrainer without settings has DAPO's denominator."""
    theirs = trl().loss(problem)

    same(problem.ours(replace(GRPO, aggregate=TokenMean())), theirs)
    assert abs(problem.ours(GRPO)[0] - theirs[0]) > 1e-4


def test_delta_below_the_clip(trl, problem, compose):
    """TRL's delta bounds the ratio of good tokens too; set below 1 + epsilon_high, it is no dual clip any more."""
    algorithm = compose(surrogate=ClippedSurrogate(Clip(0.2, 0.5), dual=1.1))

    assert problem.ours(algorithm)[0] < trl(loss_type="grpo", delta=1.1, epsilon_high=0.5).loss(problem)[0] - 1e-3


def test_first_step(trl, problem, same):
    """With no stored log-probabilities TRL, like us, anchors on the current policy without its gradient."""
    fresh = problem.with_batch(proximal=None)

    same(fresh.ours(GRPO), trl(loss_type="grpo").loss(problem, old_per_token_logps=None))


def test_unbiased_kl(trl, problem, compose, same):
    """TRL's default KL is our unbiased one when the engine's policy is the step's first."""
    fresh = problem.with_batch(behavior=problem.batch.proximal)
    algorithm = compose(regularizers=(Kl("reference", 0.04, "unbiased"),))

    same(fresh.ours(algorithm), trl(loss_type="grpo", beta=0.04).loss(fresh))


def test_unbiased_kl_from_stale_samples(trl, problem, compose):
    """With another engine TRL's weight is still current / proximal, ours current / behavior, what was sampled from."""
    algorithm = compose(regularizers=(Kl("reference", 0.04, "unbiased"),))

    theirs = trl(loss_type="grpo", beta=0.04).loss(problem)
    assert abs(problem.ours(algorithm)[0] - theirs[0]) > 1e-4


@pytest.mark.parametrize(
    ("correction", "settings"),
    [
        (TruncatedIS(1.3), {"mode": "token_truncate", "clip_max": 1.3}),
        (TruncatedIS(1.3, "sequence"), {"mode": "sequence_truncate", "clip_max": 1.3}),
        (MaskedIS(0.7, 1.4), {"mode": "token_mask", "clip_min": 0.7, "clip_max": 1.4}),
        (MaskedIS(0.0, 3.0, "sequence"), {"mode": "sequence_mask"}),
    ],
    ids=["token_truncate", "sequence_truncate", "token_mask", "sequence_mask, the default"],
)
def test_engine_corrections(trl, problem, compose, same, correction, settings):
    """The four corrections of TRL for another engine are ours, applied to the clipped loss and not to the KL."""
    named = {f"vllm_importance_sampling_{key}": value for key, value in settings.items()}
    peer = trl(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, **named)
    peer.trainer.use_vllm = True
    weight = peer.scored(problem)["importance_sampling_ratio"]
    algorithm = compose(correction=correction, regularizers=(Kl("reference", 0.04, "k3"),))

    assert float(weight.std()) > 0.01
    same(problem.ours(algorithm), peer.loss(problem, importance_sampling_ratio=weight))


def test_off_policy_mask(trl, problem, compose, same):
    """DeepSeek's sequence mask is TRL's, measured from what the engine sampled with."""
    algorithm = compose(correction=OffPolicyMask(0.05))
    theirs = trl(loss_type="grpo", off_policy_mask_threshold=0.05).loss(
        problem, sampling_per_token_logps=problem.batch.behavior
    )

    assert abs(problem.ours(GRPO)[0] - theirs[0]) > 1e-4
    same(problem.ours(algorithm), theirs)


def test_entropy_bonus(trl, problem, compose, same):
    """TRL's bonus is a mean over tokens whatever the loss is: ours with TokenMean, which weighs both alike."""
    entropy = (Entropy(0.1),)
    apart = trl(loss_type="grpo", entropy_coef=0.1).loss(problem)[0]
    alike = trl(loss_type="dapo", entropy_coef=0.1).loss(problem)

    same(problem.ours(compose(aggregate=TokenMean(), regularizers=entropy)), alike)
    assert abs(problem.ours(compose(regularizers=entropy))[0] - apart) > 1e-4


@pytest.mark.parametrize("name", ["low", "high", "region"])
def test_clip_fractions(trl, problem, compose, same, name):
    """TRL's clip_ratio metrics are our clipped fractions."""
    peer, ours = trl(loss_type="grpo", **EPSILON), problem.metrics(compose(surrogate=CLIP)).values()
    peer.loss(problem)
    ending = {"low": "clipped_low_fraction", "high": "clipped_high_fraction", "region": "clipped_fraction"}[name]

    same(ours[f"loss/{ending}"], peer.trainer._metrics["train"][f"clip_ratio/{name}_mean"][-1], 1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_empty_responses(trl, problem, same, loss_type):
    """A response without trained tokens counts in TRL's denominator and not in ours: 16 / 15 apart."""
    empty, preset = without(problem, 3), {"grpo": GRPO, "dr_grpo": DR_GRPO}[loss_type]
    loss, gradient = empty.ours(preset)
    theirs = trl(loss_type=loss_type, max_completion_length=3000).loss(empty)

    same((loss * 15 / 16, gradient * 15 / 16), theirs)


@pytest.mark.parametrize(
    ("loss_type", "preset", "exact"),
    [("grpo", GRPO, True), ("dapo", DAPO, True), ("bnpo", DAPO, False)],
    ids=["grpo", "dapo", "bnpo"],
)
def test_accumulation(trl, problem, same, loss_type, preset, exact):
    """Micro-batches add up to our whole step for TRL's grpo and dapo; bnpo is a mean of means, and does not."""
    peer = trl(
        loss_type=loss_type, epsilon_high=preset.surrogate.trust.high, gradient_accumulation_steps=2,
        per_device_train_batch_size=8,
    )  # fmt: skip
    halves = [range(0, 8), range(8, 16)]
    parts = [type(problem)(problem.batch.rows(list(rows)), problem.current[list(rows)]) for rows in halves]
    total = sum(peer.loss(part, num_items_in_batch=problem.batch.mask.sum())[0] for part in parts)

    same(bool(abs(total - problem.ours(preset)[0]) < 1e-7), exact)


def test_token_mean_over_a_generation(trl, problem, same):
    """Two steps from one generation share one denominator in TRL, half its tokens; ours counts each step's own."""
    peer = trl(loss_type="dapo", epsilon_high=0.28, per_device_train_batch_size=8, steps_per_generation=2)
    rows = list(range(8))
    first = type(problem)(problem.batch.rows(rows), problem.current[rows])
    own, shared = int(first.batch.mask.sum()), int(problem.batch.mask.sum()) / 2
    loss, gradient = first.ours(DAPO)

    same((loss * own / shared, gradient * own / shared), peer.loss(first, num_items_in_batch=problem.batch.mask.sum()))


def test_gmpo(trl, problem, compose, same):
    """The geometric clip is TRL's experimental GMPO."""
    peer = trl("trl.experimental.gmpo.GMPOTrainer", epsilon=0.4, epsilon_high=0.4, beta=0.04)
    algorithm = compose(surrogate=GeometricClip(0.4), regularizers=(Kl("reference", 0.04, "k3"),))

    same(problem.ours(algorithm), peer.loss(problem))


def test_regression(trl, problem, same):
    """A*-PO's second stage is TRL's experimental one: log-probabilities summed, regressed on the reward less V*."""
    batch = problem.batch
    value = batch.values[:, 0]
    asked = problem.with_batch(advantages=(batch.rewards - value)[:, None].expand_as(batch.behavior))
    peer = trl("trl.experimental.a2po.A2POTrainer", beta2=1e-3)
    leaf = problem.current.clone().requires_grad_()
    peer.trainer._get_sequence_logps = lambda *_: torch.where(batch.mask, leaf, 0.0).sum(1)
    inputs = dict.fromkeys(["input_ids", "attention_mask", "logits_to_keep"])
    reference = torch.where(batch.mask, batch.reference, 0.0).sum(1)
    inputs |= {"ref_logps": reference, "rewards": batch.rewards, "v_star": value}
    theirs = peer.trainer.compute_loss(peer.trainer.model, inputs)

    same(asked.ours(A_STAR_PO), (theirs.detach(), torch.autograd.grad(theirs, leaf)[0]))


def test_parameters_of_a_model(trl, drawn, same):
    """Through a real model in float64, at temperature 0.7, gradients of all parameters are TRL's."""
    problem = drawn(0, holes=False)
    peer = trl(loss_type="grpo", temperature=0.7)
    model = peer.trainer.model.double()
    inputs = peer.step(problem, old_per_token_logps=None)
    inputs["completion_ids"] = torch.randint(2, 32, problem.batch.mask.shape)
    inputs["completion_mask"] = inputs.pop("tool_mask")
    peer.trainer.current_gradient_accumulation_steps = 1
    theirs = torch.autograd.grad(peer.trainer._compute_loss(model, inputs), list(model.parameters()))

    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    scores = (model(tokens).logits[:, :-1] / 0.7).log_softmax(-1)
    current = scores.gather(2, tokens[:, 1:, None]).squeeze(2)
    weighed = GRPO.weigh(problem.batch.with_fields(proximal=None))
    loss = GRPO.loss(current, -current, weighed, GRPO.statistics(current, weighed))
    ours = torch.autograd.grad(loss.total, list(model.parameters()))

    assert sum(float(g.abs().sum()) for g in ours) > 1e-3
    same(ours, theirs)
