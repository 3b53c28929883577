"""verl 0.9.1 (`verl.trainer.ppo.rollout_corr_helper`): weights for the gap between engine and learner."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import Clip, ClippedSurrogate, GeometricClip, MaskedIS, RejectionSampling, TokenMean, TruncatedIS

BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
SURROGATE = ClippedSurrogate(Clip(0.2, 0.28), dual=3.0)


def weights(verl: Any, problem: Any, level: str, threshold: float | str) -> Tensor:
    """Return verl's weight of each token."""
    batch = problem.batch
    gap = batch.proximal - batch.behavior
    return verl.corrections.compute_rollout_correction_weights(gap, batch.mask.double(), level, threshold)[0]


def rejected(verl: Any, problem: Any, kind: str, band: str) -> Tensor:
    """Return verl's mask after rejection."""
    batch = problem.batch
    gap = batch.proximal - batch.behavior
    return verl.corrections.compute_rollout_rejection_mask(gap, batch.mask.double(), kind, band)[0]


@pytest.mark.parametrize(
    ("correction", "level", "threshold"),
    [
        (TruncatedIS(1.3), "token", 1.3),
        (TruncatedIS(1.3, "sequence"), "sequence", 1.3),
        (MaskedIS(0.7, 1.4), "token", "0.7_1.4"),
        (MaskedIS(0.4, 3.0, "sequence"), "sequence", "0.4_3.0"),
    ],
    ids=["TIS", "TIS of sequences", "IcePop", "MIS"],
)
def test_weights(verl, problem, compose, same, correction, level, threshold):
    """Truncated and masked weights times the clipped loss are verl's, in value and gradient; every token counts."""
    algorithm = compose(surrogate=SURROGATE, aggregate=TokenMean(), correction=correction)
    factors = weights(verl, problem, level, threshold)

    assert float(factors[problem.batch.mask].std()) > 0.01
    same(problem.ours(algorithm), verl.loss("vanilla", problem, weights=factors, **BOUNDS)[:2])


def test_far_engines(verl, problem, compose, same):
    """Sums of log-ratios beyond 20 are bounded by both."""
    far = problem.with_batch(behavior=problem.batch.proximal - 8)
    algorithm = compose(surrogate=SURROGATE, aggregate=TokenMean(), correction=TruncatedIS(1e12, "sequence"))
    factors = weights(verl, far, "sequence", 1e12)

    same(far.ours(algorithm), verl.loss("vanilla", far, weights=factors, **BOUNDS)[:2])


@pytest.mark.parametrize(
    ("kind", "level"), [("token_k1", "token"), ("seq_mean_k1", "geometric"), ("seq_sum_k1", "sequence")]
)
def test_rejection_bands_are_upside_down(verl, problem, kind, level):
    """verl's k1 bands bound behavior / proximal: its "0.8_1.9" keeps what our band [1 / 1.9, 1 / 0.8] keeps."""
    batch = problem.batch
    kept = rejected(verl, problem, kind, "0.8_1.9").bool()
    length = batch.mask.sum(1, keepdim=True)
    gap = torch.where(batch.mask, batch.proximal - batch.behavior, 0.0)
    share = {"token": gap, "geometric": gap.sum(1, keepdim=True) / length, "sequence": gap.sum(1, keepdim=True)}
    weight = share[level].exp()

    assert torch.equal(kept, batch.mask & (weight >= 1 / 1.9) & (weight <= 1 / 0.8))
    assert not torch.equal(kept, batch.mask & (weight >= 0.8) & (weight <= 1.9))


@pytest.mark.parametrize(("kind", "level"), [("token_k1", "token"), ("seq_mean_k1", "geometric")])
def test_rejection(verl, problem, compose, same, kind, level):
    """With bounds turned over, our rejection is verl's, but for the denominator: theirs counts what is kept."""
    batch = problem.batch
    mask = rejected(verl, problem, kind, "0.9_1.3").bool()
    algorithm = compose(
        surrogate=SURROGATE, aggregate=TokenMean(), correction=RejectionSampling(1 / 1.3, 1 / 0.9, level)
    )
    loss, gradient = problem.ours(algorithm)
    amplified = int(batch.mask.sum()) / int(mask.sum())

    assert amplified > 1
    same((loss * amplified, gradient * amplified), verl.loss("vanilla", problem, mask=mask, **BOUNDS)[:2])


def test_gmpo_with_weights(verl, problem, compose, same):
    """verl corrects a response of GMPO by the geometric mean of its weights, we by their mean: equal when all are."""
    settings = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    factors = weights(verl, problem, "token", 1.3)
    ours = problem.ours(compose(surrogate=GeometricClip(0.4), correction=TruncatedIS(1.3)))[0]
    shifted = problem.with_batch(behavior=problem.batch.proximal - 0.1)
    whole = compose(surrogate=GeometricClip(0.4), correction=TruncatedIS(1.3))

    same(
        shifted.ours(whole),
        verl.loss("geo_mean", shifted, weights=weights(verl, shifted, "token", 1.3), **settings)[:2],
    )
    assert abs(ours - verl.loss("geo_mean", problem, weights=factors, **settings)[0]) > 1e-4
