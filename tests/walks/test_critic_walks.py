"""Walks with a critic and with imitation: a tiny model learns sums on every path that these add to a run."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.training.api import train_experiment

QUICK = ("task.size=60", "evaluation.before=false", "checkpoints.every=0", "grading.workers=1")
TAUGHT = "algorithm.critic.pretraining={steps=4, frozen_trunk=false}"
FROZEN = "algorithm.critic.pretraining={steps=2, frozen_trunk=true}"
# The critic's rate is the policy's own, which is high for a model of this size.
SLOWLY = "algorithm.critic.learning_rate_ratio=0.5"
# The answers have at most three tokens: a lambda of 1 - 1 / (alpha length) needs a large alpha.
SHORT = "algorithm.advantage.policy_lambda.alpha=5"
UPDATES = ("algorithm.updates.minibatches=1", "algorithm.critic.updates.minibatches=2")
VAPO = ("algorithm=vapo", SHORT, TAUGHT, SLOWLY, *UPDATES, "algorithm.num_generations=8")
ALGORITHMS = {
    "ppo": ("algorithm=ppo", "algorithm.critic.clip=0.2"),
    "vapo": VAPO,
    # Wrong answers are imitated too: whether an early one is right is chance.
    "vapo-review": ("algorithm=vapo-review", FROZEN, "algorithm.replay.above=-1"),
}
CRITIC = {
    "critic/explained_variance",
    "critic/loss",
    "critic/clipped_fraction",
    "critic/gradient_norm",
    "critic/learning_rate",
    "critic/return_mean",
    "critic/value_mean",
    "critic/value_first_mean",
    "critic/value_last_mean",
    "critic/updates",
    "time/critic_seconds",
}
PRETRAINED = CRITIC | {
    "step",
    "seconds",
    "rollout/reward_mean",
    "rollout/length_tokens_mean",
    "tokens/generated",
    "time/generate_seconds",
    "time/score_seconds",
    "time/update_seconds",
    "time/step_seconds",
}
IMITATION = {"imitation/buffer", "imitation/loss", "imitation/updates", "imitation/rows"}


def walk(folder: Path, *overrides: str, name: str = "metrics") -> list[dict[str, Any]]:
    """Return the metrics of a finished walk of the `tiny` experiment."""
    train_experiment(load(RANDOM, [*QUICK, *overrides]), folder)
    return rows(folder, name)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of one of a run's files."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_reward_and_explained_variance_rise(tmp_path: Path):
    """Forty steps of VAPO more than double the reward, and its critic comes to know what it did not know at first."""
    taken = walk(tmp_path / "run", *VAPO, "steps=40")
    rewards = [row["rollout/reward_mean"] for row in taken]
    explained = [row["critic/explained_variance"] for row in taken]

    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.15
    assert fmean(explained[-10:]) > fmean(explained[:10]) + 0.2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_metric_of_a_critic_is_written(tmp_path: Path, algorithm: str):
    """Each row of steps and of pre-training has every promised name, and every number is finite."""
    run = tmp_path / "run"
    each = "algorithm.critic.updates={epochs=2, minibatches=2}"
    taken = walk(run, *ALGORITHMS[algorithm], each, "steps=4", "rollouts_per_step=32")

    for row in taken:
        assert set(row) >= CRITIC
        assert "not_finite" not in row
        assert row["critic/updates"] == 4
    if algorithm == "vapo-review":
        assert set(taken[3]) >= IMITATION
    if algorithm != "ppo":
        for row in rows(run, "pretraining"):
            assert set(row) >= PRETRAINED
            assert "not_finite" not in row


def test_pretraining_may_overlap_with_answering(tmp_path: Path):
    """With max_staleness 1 the rounds in flight at its end are the first that are trained on, and still fresh."""
    run = tmp_path / "run"
    taken = walk(run, *VAPO, "max_staleness=1", "steps=3", "rollouts_per_step=32", "engine.max_concurrent=256")

    assert [row["stream/staleness_steps_max"] for row in rows(run, "pretraining")] == [0, 0, 0, 0]
    assert [row["stream/staleness_steps_max"] for row in taken] == [0, 1, 1]


def test_a_critic_that_was_taught_first_still_reports_what_it_did_not_know(tmp_path: Path):
    """A head of zeros explains nothing of the first batch, whether it is then taught before or after the policy."""
    plain = ("algorithm=vc-ppo", "algorithm.critic.pretraining=none", "algorithm.num_generations=4", "steps=1")
    for order in ("before", "after"):
        first = walk(tmp_path / order, *plain, f"algorithm.critic.order={order}")[0]

        assert first["critic/value_mean"] == 0
        assert first["critic/explained_variance"] == 0
        # Taught before, it expects something by then, so that rewards of 0 have an advantage as well.
        assert (first["advantage/exact_zero_fraction"] == 0) == (order == "before")
