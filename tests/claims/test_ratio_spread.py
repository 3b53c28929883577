"""How far a step moves tokens and responses: the spread of log-ratios, worked out by hand."""

from pathlib import Path

import pytest
import torch
from experiments.claims.estimates import NotMeasured
from experiments.claims.ratio_spread import spread, step_spread
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.training.api import train_experiment

HALF = torch.tensor([[0.5, -0.5, 0.5, -0.5], [1.0, 1.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])


def test_a_spread_is_of_tokens_and_of_means():
    """Six tokens: squares 4 x 0.25 and 2 x 1, so sqrt(3 / 6) a token; means 0 and 1, so sqrt(1 / 2) a response.

    Together: lengths times squared means are 0 and 2 x 1, mean squares 0.25 and 1, so sqrt(2 / 1.25) = 1.265. What is
    masked (9) counts nowhere.
    """
    found = spread(HALF, MASK)

    assert (found.token, found.response) == pytest.approx((0.5**0.5, 0.5**0.5))
    assert found.together == pytest.approx(1.6**0.5)


def test_tokens_that_move_alike_are_the_root_of_the_length_apart():
    """Nine tokens of 0.2 each: a response is as wide as a token, three times what independent tokens would give."""
    found = spread(torch.full((5, 9), 0.2), torch.ones(5, 9, dtype=torch.bool))

    assert (found.token, found.response, found.together) == pytest.approx((0.2, 0.2, 3.0))


def test_independent_tokens_are_narrower_by_the_root_of_the_length():
    """4,000 responses of 2 to 20 tokens, each token drawn by itself and some responses twice as wide: 1, to 3%."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 21, (4000,), generator=generator)
    mask = torch.arange(20) < lengths[:, None]
    wide = 1.0 + torch.randint(0, 2, (4000, 1), generator=generator)
    drawn = torch.randn(4000, 20, generator=generator, dtype=torch.float64)

    assert spread(drawn * wide, mask).together == pytest.approx(1.0, abs=0.03)


def test_where_nothing_changed_there_is_no_spread():
    """Equal policies have no quotient, and an empty response counts nowhere."""
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(NotMeasured, match="nothing changed"):
        spread(torch.zeros(2, 2), mask)

    assert spread(torch.tensor([[0.5, 0.5], [7.0, 7.0]]), mask).token == 0.5


@pytest.mark.slow
def test_a_step_moves_the_answers_of_the_next_one(tmp_path: Path):
    """A token moves more than the mean of a response; without answers after the last step there is nothing to score."""
    reward = '[{kind="function",function="examples/own_reward.py:starts_with_a_digit"}]'
    kept = ("steps=2", "checkpoints.every=1", "evaluation.before=false", "rollouts_per_step=32", "task.size=60")
    train_experiment(load(RANDOM, [*kept, f"rewards={reward}"]), tmp_path / "run")
    found = step_spread(tmp_path / "run", 1)

    assert 0 < found.response < found.token
    with pytest.raises(NotMeasured, match="answers of step 3"):
        step_spread(tmp_path / "run", 2)
