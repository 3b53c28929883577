"""What every algorithm says about the distance between the policy that sampled and the one that is trained."""

import math
from dataclasses import replace

import pytest
import torch

from gnomon.algorithms import GRPO, Algorithm, TruncatedIS
from gnomon.algorithms.ratios import Statistics
from gnomon.core.metrics import Metrics
from gnomon.testing import make_batch

Rows = list[list[float]]


def measured(algorithm: Algorithm, behavior: Rows, proximal: Rows, cuts: int = 1) -> Metrics:
    """Return what the loss of a batch measures, summed over cuts of its rows."""
    rows = len(behavior)
    mask = [[1, 1, 0]] * rows
    zeros = [[0.0] * 3] * rows
    batch = make_batch([1.0] * rows, mask, behavior=behavior, proximal=proximal, advantages=zeros)
    batch = algorithm.weigh(batch)
    total = Metrics()
    for part in torch.arange(rows).tensor_split(cuts):
        cut = batch.rows(part)
        total += algorithm.loss(cut.proximal, -cut.proximal, cut, Statistics()).metrics
    return total


@pytest.mark.parametrize("cuts", [1, 2])
def test_the_size_of_the_whole_update_and_its_divergence(cuts):
    """Ratios 2, 1, 1, 1: the size is 25 / (4 * 7), k3 the mean of 2 - 1 - ln 2 and three zeros; what is masked is not
    looked at, and cuts add.
    """
    behavior = [[-1.0, -2.0, 5.0], [-1.0, -0.5, 9.0]]
    proximal = [[-1.0 + math.log(2), -2.0, -3.0], [-1.0, -0.5, -3.0]]
    metrics = measured(GRPO, behavior, proximal, cuts)

    assert metrics["mismatch/ess_fraction"] == pytest.approx(25 / 28, abs=1e-12)
    assert metrics["mismatch/k3_nats"] == pytest.approx((1 - math.log(2)) / 4, abs=1e-12)


def test_a_corrections_own_size_has_a_name_of_its_own():
    """That of its weights after the cap: min(4, 2), 1, 1, 1 has 25 / (4 * 7), the ratios have 49 / (4 * 19)."""
    behavior = [[-2.0, -2.0, 0.0], [-1.0, -0.5, 0.0]]
    proximal = [[-2.0 + math.log(4), -2.0, 0.0], [-1.0, -0.5, 0.0]]
    metrics = measured(replace(GRPO, correction=TruncatedIS(cap=2.0)), behavior, proximal)

    assert metrics["mismatch/weight_ess_fraction"] == pytest.approx(25 / 28, abs=1e-12)
    assert metrics["mismatch/ess_fraction"] == pytest.approx(49 / 76, abs=1e-12)
