"""A run whose rollouts come from rounded weights learns, and says what the rounding did."""

from pathlib import Path
from statistics import fmean

from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.records.jsonl import read_rows
from gnomon.training.api import train_experiment

QUICK = ("task.size=60", "evaluation.before=false", "checkpoints.every=0", "grading.workers=1")


def test_a_run_with_fp8_rollouts_learns(tmp_path: Path):
    """The reward rises, every delivery was proved, and rounding is all that engine and learner differ by."""
    train_experiment(load(RANDOM, [*QUICK, "steps=20", "engine.rounding=fp8"]), tmp_path / "run")
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    rewards = [row["rollout/reward_mean"] for row in rows]

    assert fmean(rewards[-5:]) > fmean(rewards[:3]) + 0.05
    assert all(row["arrival/canary_abs_mean_nats"] < 1e-5 for row in rows)
    assert all(row["mismatch/precision_abs_nats"] > 1e-3 for row in rows)
    assert all(row["mismatch/engine_abs_nats"] < 1e-5 for row in rows)
    assert {row["mismatch/staleness_abs_nats"] for row in rows} == {0.0}
