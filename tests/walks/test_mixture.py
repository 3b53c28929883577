"""A tiny mixture of experts is trained from scratch, with free routers and with replayed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.models.load import load_model
from gnomon.training.api import train_experiment

REWARD = "examples/own_reward.py"
# A reward that an untrained model earns now and then, so that there is something to learn from the first step on.
REWARDS = f'[{{kind="function",function="{REWARD}:brief"}},{{kind="function",function="{REWARD}:starts_with_a_digit"}}]'
QUICK = (
    "model=tiny-moe",
    "task.size=60",
    "evaluation.before=false",
    "checkpoints.every=0",
    "steps=3",
    "rollouts_per_step=32",
    "algorithm.updates.minibatches=2",
    f"rewards={REWARDS}",
)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("routing", ["free", "proximal", "behavior"])
def test_a_mixture_learns(tmp_path: Path, routing: str):
    """Three steps raise the reward and move the routers; how many experts changed is said, which ones is not kept."""
    result = train_experiment(load(RANDOM, [*QUICK, f"algorithm.routing={routing}"]), tmp_path / "run")
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    before, after = (load_model(name, torch.float32).state_dict() for name in ("tiny-moe", str(result.model)))
    routers = [name for name in before if name.endswith("gate.weight")]

    assert rows[-1]["rollout/reward_mean"] > rows[0]["rollout/reward_mean"]
    assert [row["learner/updates"] for row in rows] == [2, 2, 2]
    assert len(routers) == 2
    assert not any(torch.equal(before[name], after[name]) for name in routers)
    assert all("routing" not in row for row in lines(tmp_path / "run" / "rollouts" / "step-000001.jsonl"))
    assert all(0.0 < row["routing/changed_fraction"] < 0.5 for row in rows)
    assert all(row["mismatch/logprob_abs_max_nats"] < 1e-5 for row in rows)
