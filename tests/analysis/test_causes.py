"""What checks of a claim's cause read: each worked out by hand."""

import json
import math
from typing import Any

import pytest
import torch
from experiments.claims.folders import experiments_folder
from experiments.group_free.waiting import LogNormal, QueueSetting

from gnomon.algorithms.user_pieces import load_object
from gnomon.testing import make_batch


def part(claim: str, name: str) -> Any:
    """Return a function of a claim's file."""
    return load_object(f"{experiments_folder() / claim / 'claim.py'}:{name}")


def test_a_gap_clips_by_itself_what_it_takes_beyond_the_widths():
    """exp(-0.3) = 0.74 and exp(0.25) = 1.28 are beyond 0.8 and 1.27, exp(0.1) and exp(-0.2) = 0.82 are not; what is
    masked does not count: two of four. The means of the two responses are -0.1 and 0.025."""
    gap = torch.tensor([[-0.3, 0.1, 0.0], [0.25, -0.2, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])

    assert part("gspo_engine", "beyond_clip")(gap, mask) == 0.5
    assert part("gspo_engine", "of_response")(gap, mask) == pytest.approx(0.0625)


def test_exchanging_the_rule_changes_advantages_by_a_share_of_their_variance():
    """Three tokens, values of 0, a reward of 1. The paper's lambda is 1 - 1 / (0.5 x 3) = 1/3: advantages 1/9, 1/3, 1.
    Fixed at 0.5: 1/4, 1/2, 1. Their difference has the variance 0.0079733, the latter 0.1458333: a share of 0.05467.
    """
    batch = make_batch([1.0], [[1, 1, 1]], values=[[0.0, 0.0, 0.0]])

    assert part("vapo_forms", "exchanged")("paper", "fixed")(batch) == pytest.approx(0.0546737, rel=1e-5)
    assert part("vapo_forms", "exchanged")("fixed", "fixed")(batch) == 0.0


def test_lambdas_of_the_two_forms_are_told_apart():
    """Lengths of 2 and 4: the paper's 0 and 1/2. The sigmoid's mean is 3, its deviation sqrt(2): places -0.707 and
    0.707, so 0.3 + 0.65 x 0.33024 = 0.51465 and 0.3 + 0.65 x 0.66976 = 0.73535: 0.51465 and 0.23535 apart."""
    batch = make_batch([1.0, 0.0], [[1, 1], [1, 1, 1, 1]])

    assert part("vapo_forms", "apart")(batch) == pytest.approx(0.375, abs=1e-4)
    assert part("vapo_forms", "spread")(batch, "paper") == pytest.approx(0.5 / math.sqrt(2))
    assert part("vapo_forms", "spread")(batch, "sigmoid") == pytest.approx(0.2207 / math.sqrt(2), abs=1e-4)


def test_the_slowest_answer_decides_how_long_a_batch_waits():
    """Where all take a second the slowest is the mean, and a batch of 8 takes a second; at sigma 1 a step lasts as long
    as its slowest, so that 8 rollouts come in mean times slowest-over-mean seconds."""
    counted = part("group_free", "counted")
    alike, spread = (counted(QueueSetting(8, 4), LogNormal(sigma), (10, 0), 0) for sigma in (0.0, 1.0))

    assert alike == pytest.approx((8.0, 1.0, 1.0))
    assert spread.slowest > 1.5
    assert spread.rate == pytest.approx(8 / (spread.mean * spread.slowest), rel=1e-3)


def test_answers_on_vllm_are_as_long_as_their_draws():
    """What the seeds foretell of the mean length is what was recorded of the runs that waited, to a token in 64."""
    vllm = json.loads((experiments_folder() / "group_free" / "vllm.json").read_text())
    foretold = [part("group_free", "budgets")(vllm, seed).mean for seed in range(3)]

    assert foretold == pytest.approx(
        [run["tokens_of_trained"] for run in vllm["found"]["group-synchronous"]["runs"]], abs=0.02
    )
