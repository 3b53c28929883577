"""Losses that compare given answers: by hand, and against formulas in numpy on any batch and any cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gnomon.algorithms import (
    DPO,
    GRPO,
    IPO_PREFERENCE,
    KTO,
    REWARD_MODEL,
    Algorithm,
    PreferenceLoss,
    ProspectLoss,
    Ratio,
    resolve,
)
from gnomon.core.errors import ConfigError
from gnomon.core.types import Batch
from gnomon.testing import loss_and_gradient, make_batch

exact: dict[str, Any] = {"rel": 1e-12, "abs": 1e-13}
approx = pytest.approx


def pairs() -> tuple[Batch, torch.Tensor]:
    """Return two pairs: log-ratios of 1 and -1, and of 0 and -1, so margins of 2 and 1; the last pair is turned."""
    mask = [[True, True], [True], [True], [True]]
    batch = make_batch([1.0, 0.0, 0.0, 1.0], mask, [0, 0, 1, 1])
    reference = torch.tensor([[-1.5, -2.5], [-2.0, 9.0], [-1.0, 9.0], [-1.0, 9.0]], dtype=torch.float64)
    current = torch.tensor([[-1.0, -2.0], [-3.0, 9.0], [-2.0, 9.0], [-1.0, 9.0]], dtype=torch.float64)
    return batch.with_fields(reference=reference), current


def test_dpo_raises_the_margin_of_each_pair():
    """beta = 1/2: -log sigmoid of 1 and 1/2, mean over 2 pairs; slopes -+ beta sigmoid(-beta m) / 2 on each token."""
    batch, current = pairs()
    algorithm = replace(DPO, surrogate=PreferenceLoss(0.5))

    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), current)

    assert loss == approx((np.log1p(np.exp(-1.0)) + np.log1p(np.exp(-0.5))) / 2, **exact)
    first, second = 0.25 / (1 + np.exp(1.0)), 0.25 / (1 + np.exp(0.5))
    expected = [[-first, -first], [first, 0], [second, 0], [-second, 0]]
    assert gradient.numpy() == approx(np.array(expected), **exact)


def test_ipo_of_preferences_stops_at_its_margin():
    """beta = 1/2: (2 - 1)^2 and (1 - 1)^2; slopes 2 (m - 1) / 2 on the first pair alone, and on its chosen answer +."""
    batch, current = pairs()
    algorithm = replace(IPO_PREFERENCE, surrogate=PreferenceLoss(0.5, "squared"))

    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), current)

    assert loss == approx(0.5, **exact)
    assert gradient.numpy() == approx(np.array([[1.0, 1.0], [-1.0, 0], [0, 0], [0, 0]]), **exact)


def by_formula(kind: str, beta: float, smoothing: float, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and slope of each pair's margin."""
    if kind == "squared":
        return (margin - 0.5 / beta) ** 2, 2 * (margin - 0.5 / beta)
    if kind == "hinge":
        return np.maximum(0, 1 - beta * margin), np.where(beta * margin < 1, -beta, 0.0)
    right, wrong = np.log1p(np.exp(-beta * margin)), np.log1p(np.exp(beta * margin))
    slope = -(1 - smoothing) * beta / (1 + np.exp(beta * margin)) + smoothing * beta / (1 + np.exp(-beta * margin))
    return (1 - smoothing) * right + smoothing * wrong, slope


@pytest.mark.parametrize("level", ["sequence_product", "sequence"])
@pytest.mark.parametrize(
    ("kind", "smoothing"), [("logistic", 0.0), ("logistic", 0.2), ("squared", 0.0), ("hinge", 0.0)]
)
def test_every_cut_has_the_loss_of_the_formula(kind: Any, smoothing: float, level: Any):
    """Random pairs, answers of each in different cuts: loss and gradient of numpy's sums over pairs, to 1e-12."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        lengths = rng.integers(1, 6, 8)
        group = rng.permutation([0, 0, 1, 1, 2, 2, 3, 3])
        rewards = np.zeros(8)
        for number in range(4):
            rewards[rng.choice(np.flatnonzero(group == number))] = 1
        mask = np.arange(5) < lengths[:, None]
        current, reference = (np.where(mask, rng.normal(-2, 2, (8, 5)), 7.0) for _ in range(2))
        scale = 1 / lengths if level == "sequence" else np.ones(8)
        ratio = np.where(mask, current - reference, 0).sum(1) * scale
        side = np.where(rewards > 0, 1, -1)
        margin = np.array([(side * ratio)[group == number].sum() for number in range(4)])
        losses, slopes = by_formula(kind, 0.3, smoothing, margin)
        algorithm = replace(
            DPO, ratio=Ratio("reference", level, np.inf), surrogate=PreferenceLoss(0.3, kind, smoothing)
        )
        batch = make_batch(rewards.tolist(), [[True] * n for n in lengths], group.tolist())
        batch = batch.with_fields(reference=torch.tensor(reference)[:, : batch.width])
        whole = torch.tensor(current)[:, : batch.width]

        for cuts in (None, [[n] for n in range(8)], [[0, 5], [1, 2, 3], [4, 6, 7]]):
            loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), whole, cuts)

            assert loss == approx(losses.mean(), **exact)
            expected = np.where(mask, (slopes[group] * side * scale / 4)[:, None], 0)[:, : batch.width]
            assert gradient.numpy() == approx(expected, **exact)


@pytest.mark.parametrize("cuts", [[[0, 1, 2, 3, 4, 5]], [[n] for n in range(6)], [[5, 0], [], [1, 2, 3, 4]]])
def test_a_reward_model_learns_the_difference_of_scores_on_any_cut(cuts: list[list[int]]):
    """Mean of -log sigmoid(m) over pairs and its slopes -+ sigmoid(-m) / 3, by numpy; a pair may be cut."""
    rng = np.random.default_rng(11)
    group, rewards = [2, 0, 1, 0, 1, 2], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    scores = torch.tensor(rng.normal(0, 2, 6))
    batch = make_batch(rewards, [[True] * n for n in (3, 1, 2, 2, 4, 1)], group).with_fields(bootstrap=scores)
    (whole,) = REWARD_MODEL.value_minibatches(batch, 0)
    side = np.where(np.array(rewards) > 0, 1, -1)
    margin = np.array([(side * scores.numpy())[np.array(group) == number].sum() for number in range(3)])
    live, total = scores.clone().requires_grad_(), 0.0

    for rows in cuts:
        index = torch.tensor(rows, dtype=torch.long)
        loss, _ = REWARD_MODEL.critic.pair_loss(live[index], whole.rows(index))
        loss.backward()
        total += float(loss.detach())

    assert total == approx(np.log1p(np.exp(-margin)).mean(), **exact)
    assert live.grad.numpy() == approx(-side / (1 + np.exp(margin[group])) / 3, **exact)


def test_a_tie_of_scores_counts_half():
    """Before the first step every score is 0: loss log 2, accuracy 1/2, margin 0."""
    batch = make_batch([1.0, 0.0], [[True], [True]], [0, 0]).with_fields(bootstrap=torch.zeros(2).double())
    (whole,) = REWARD_MODEL.value_minibatches(batch, 0)

    loss, measured = REWARD_MODEL.critic.pair_loss(torch.zeros(2).double(), whole)

    assert float(loss.detach()) == approx(np.log(2), **exact)
    assert measured.values()["critic/preference_accuracy"] == 0.5


def test_equal_rewards_prefer_nothing():
    """Of two sampled answers with one reward neither is chosen: no gradient, where a group of GRPO has none either."""
    batch, current = pairs()
    online = replace(DPO, samples="policy")

    _, gradient = loss_and_gradient(online, online.prepare(batch.with_fields(rewards=torch.ones(4))), current)

    assert not bool(gradient.any())


def test_kto_moves_each_kind_its_own_way():
    """Log-ratios of 2 and -1 of a good and a bad answer, 1 and 0 of the others: z = 1/2; with beta = 1/2 both 3/4.

    1 - sigmoid(3/4) of both, 1 and 3 their weights: 4/2 of it; slopes -+ weight beta sigmoid (1 - sigmoid) / 2.
    """
    batch = make_batch([1.0, 0.0, -1.0, 0.0], [[True, True], [True], [True], [True]], [0, 0, 1, 1])
    batch = batch.with_fields(is_graded=torch.tensor([True, False, True, False]), reference=torch.zeros(4, 2).double())
    current = torch.tensor([[1.5, 0.5], [1.0, 9.0], [-1.0, 9.0], [0.0, 9.0]], dtype=torch.float64)
    algorithm = replace(KTO, surrogate=ProspectLoss(0.5, 1.0, 3.0))

    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), current)

    sigmoid = 1 / (1 + np.exp(-0.75))
    assert loss == approx(2 * (1 - sigmoid), **exact)
    slope = 0.5 * sigmoid * (1 - sigmoid) / 2
    assert gradient.numpy() == approx(np.array([[-slope, -slope], [0, 0], [3 * slope, 0], [0, 0]]), **exact)


def test_every_cut_of_labels_has_the_loss_of_the_formula():
    """Random answers, and those that measure the KL in other cuts: numpy's means over labelled answers, to 1e-12."""
    rng = np.random.default_rng(3)
    for shift in (-3.0, 0.0, 1.0):
        lengths = rng.integers(1, 6, 8)
        labels = np.array([1, 0, -1, 0, -1, 0, 1, 0])
        mask = np.arange(5) < lengths[:, None]
        current, reference = (np.where(mask, rng.normal(-2, 1, (8, 5)), 7.0) for _ in range(2))
        gain = np.where(mask, current + shift - reference, 0).sum(1)
        kl = max(0.0, gain[labels == 0].mean())
        value = 1 / (1 + np.exp(-0.3 * labels * (gain - kl)))
        weight = np.where(labels > 0, 2.0, 1.0)
        batch = make_batch([float(x) for x in labels], [[True] * n for n in lengths], [0, 0, 1, 1, 2, 2, 3, 3])
        reference = torch.tensor(reference - shift)[:, : batch.width]
        batch = batch.with_fields(is_graded=torch.tensor(labels != 0), reference=reference)
        algorithm = replace(KTO, surrogate=ProspectLoss(0.3, 2.0, 1.0))
        whole = torch.tensor(current)[:, : batch.width]

        for cuts in (None, [[n] for n in range(8)], [[0, 5], [1, 2, 3], [4, 6, 7]]):
            loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), whole, cuts)

            assert loss == approx((weight * (1 - value))[labels != 0].mean(), **exact)
            slope = -weight * labels * 0.3 * value * (1 - value) / 4
            assert gradient.numpy() == approx(np.where(mask, slope[:, None], 0)[:, : batch.width], **exact)


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (DPO, {"num_generations": 4}, "num_generations = 2"),
        (DPO, {"updates": {"minibatches": 2}}, "updates is about sampled ones"),
        (DPO, {"samples": "policy", "updates": {"minibatches": 2}}, "one loss for a pair .* algorithm.updates"),
        (DPO, {"ratio": "Ratio"}, "compares log-ratios of whole responses .* set algorithm.ratio"),
        (DPO, {"aggregate": "TokenMean"}, 'algorithm.aggregate = "SequenceMean"'),
        (DPO, {"samples": "data"}, 'set algorithm.samples = "policy"'),
        (GRPO, {"samples": "pairs"}, "a chosen and a rejected answer"),
        (GRPO, {"samples": "labels"}, "are what ProspectLoss judges"),
        (KTO, {"samples": "policy"}, 'set algorithm.samples = "labels"'),
        (KTO, {"surrogate": {"piece": "ProspectLoss", "beta": 0.0}}, "beta must be > 0"),
        (REWARD_MODEL, {"samples": "policy"}, 'set algorithm.samples = "pairs"'),
        (REWARD_MODEL, {"num_generations": 4}, "algorithm.num_generations = 2"),
        (REWARD_MODEL, {"advantage": "GroupRelative"}, "no policy does"),
        (REWARD_MODEL, {"critic": {"trunk": "separate"}}, "trunk say otherwise"),
        (REWARD_MODEL, {"critic": {"clip": 0.2}}, "clip say otherwise"),
        (DPO, {"surrogate": {"piece": "PreferenceLoss", "loss": "squared", "smoothing": 0.1}}, "smoothing must be in"),
    ],
)
def test_senseless_compositions_of_pairs_are_refused(base: Algorithm, change: dict[str, Any], said: str):
    """Each message names the setting that mends it."""
    with pytest.raises(ConfigError, match=said):
        resolve({"preset": base.name, **change})
