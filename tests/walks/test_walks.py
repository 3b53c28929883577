"""Walks: a tiny model made from scratch learns sums, on every path that a real run takes."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.models.load import load_model
from gnomon.training.api import Result, train_experiment

# Sixty sums of two digits from 0 to 4; evaluation is tested elsewhere.
QUICK = ("task.size=60", "evaluation.before=false", "checkpoints.every=0")
SPO = ("algorithm=spo", "rollouts_per_step=32", "algorithm.updates.minibatches=2")

MEASURED_BY_UPDATES = {
    "loss/clipped_fraction",
    "loss/ess_fraction",
    "loss/entropy_nats",
    "loss/kl_behavior_nats",
    "mismatch/logprob_abs_mean_nats",
}
CONTRACT = {
    "rollout/reward_mean",
    "rollout/length_tokens_mean",
    "rollout/truncated_fraction",
    "rollout/degenerate_group_fraction",
    "rollout/error_fraction",
    "stream/staleness_steps_mean",
    "loss/policy",
    "loss/clipped_fraction",
    "loss/ess_fraction",
    "loss/entropy_nats",
    "loss/kl_behavior_nats",
    "learner/gradient_norm",
    "learner/learning_rate",
    "mismatch/logprob_abs_mean_nats",
    "tokens/generated",
    "tokens/trained",
    "tokens/wasted_fraction",
    "time/generate_seconds",
    "time/grade_seconds",
    "time/score_seconds",
    "time/update_seconds",
    "time/publish_seconds",
    "time/step_seconds",
    "memory/peak_bytes",
    "step",
    "seconds",
}


def walk(folder: Path, *overrides: str) -> tuple[Result, list[dict[str, Any]]]:
    """Return a finished walk of the `tiny` experiment and its metrics."""
    result = train_experiment(load(RANDOM, [*QUICK, *overrides]), folder)
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the recorded rollouts of a step."""
    return [json.loads(line) for line in (folder / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("steps", "overrides"),
    [
        (40, ()),
        (28, (*SPO, "algorithm.tracker.drift=replayed")),
        pytest.param(28, (*SPO, "algorithm.tracker.drift=accumulated"), marks=pytest.mark.slow),
        pytest.param(28, (*SPO, "algorithm.tracker.drift=constant"), marks=pytest.mark.slow),
        pytest.param(28, (*SPO, "algorithm.tracker.initial=prior"), marks=pytest.mark.slow),
    ],
    ids=["grpo", "spo-replayed", "spo-accumulated", "spo-constant", "spo-prior"],
)
def test_reward_rises(tmp_path: Path, steps: int, overrides: tuple[str, ...]):
    """The reward more than doubles: the last ten steps earn at least 0.15 more than the first ten."""
    _, rows = walk(tmp_path / "run", f"steps={steps}", *overrides)
    rewards = [row["rollout/reward_mean"] for row in rows]

    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.15


@pytest.mark.parametrize("algorithm", ["grpo", "spo", "dapo", "p3o", "gspo"])
def test_every_metric_of_the_contract_is_written(tmp_path: Path, algorithm: str):
    """Each step's row has every promised name, and every number is finite."""
    sizes = ("rollouts_per_step=32", "steps=2")
    each = f"algorithm.num_generations={1 if algorithm == 'spo' else 8}"
    _, rows = walk(tmp_path / "run", f"algorithm={algorithm}", each, *sizes)

    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert CONTRACT - set(row) == (set() if row["learner/updates"] else MEASURED_BY_UPDATES)
        assert "not_finite" not in row
        causes = {name: share for name, share in row.items() if name.startswith("waste/")}
        assert sum(causes.values()) == pytest.approx(row["tokens/wasted_fraction"]), causes
    assert any(row["learner/updates"] for row in rows)


def test_a_step_without_anything_to_learn_claims_no_measurement(tmp_path: Path):
    """A reward that is always 0 leaves no trained token: no ratio or mismatch was measured, and no weight moves."""
    reward = 'rewards=[{kind="exact", weight=0.0}]'
    result, rows = walk(tmp_path / "run", "steps=1", "rollouts_per_step=16", reward)

    assert CONTRACT - set(rows[0]) == MEASURED_BY_UPDATES
    assert (rows[0]["tokens/trained"], rows[0]["tokens/wasted_fraction"]) == (0, 1.0)
    before = load_model("tiny", torch.float32).state_dict()
    after = load_model(str(result.model), torch.float32).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dynamic_sampling_trains_on_informative_groups_alone(tmp_path: Path):
    """DAPO discards groups of equal rewards, records them as not kept, and asks other prompts in their place."""
    folder = tmp_path / "run"
    # Its penalty on length would make rewards differ; here only right and wrong shall.
    overrides = ("algorithm=dapo", "algorithm.num_generations=16", "algorithm.overlong=none")
    _, rows = walk(folder, "steps=2", "rollouts_per_step=32", *overrides, "algorithm.updates.minibatches=1")

    assert sum(row["rollout/discarded_groups"] for row in rows) > 0
    for step in (1, 2):
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rollouts(folder, step):
            groups.setdefault(row["group"], []).append(row)
        kept = [group for group in groups.values() if group[0]["kept"]]
        assert 1 <= len(kept) <= 2
        assert all(len({row["reward"] for row in group}) > 1 for group in kept)


def test_with_lora_only_adapters_are_trained(tmp_path: Path):
    """The checkpoint holds moments of adapters alone; the exported model is the base and a change of low rank."""
    result, _ = walk(tmp_path / "run", "lora.rank=4", "steps=3", "rollouts_per_step=64")

    trained = load_file(result.model / "state" / "learner.safetensors")
    assert trained
    assert all("lora_" in name for name in trained if name.count(".") > 1)
    base = load_model("tiny", torch.float32).state_dict()
    merged = load_model(str(result.model), torch.float32).state_dict()
    changes = {name: merged[name] - base[name] for name in base}
    moved = {name for name, change in changes.items() if change.abs().max() > 0}
    assert moved
    assert "model.embed_tokens.weight" not in moved
    assert {int(torch.linalg.matrix_rank(changes[name], atol=1e-6)) for name in moved} <= {1, 2, 3, 4}


def test_staleness_one_trains_on_answers_of_the_step_before(tmp_path: Path):
    """With max_staleness 1 the first batch is fresh, every later one exactly one step old, and no batch older."""
    # Room for two rounds at once, so that a round's answers all begin when it is asked.
    _, rows = walk(tmp_path / "run", "max_staleness=1", "steps=5", "rollouts_per_step=64", "engine.max_concurrent=256")

    assert rows[0]["stream/staleness_steps_max"] == 0
    assert [row["stream/staleness_steps_max"] for row in rows[1:]] == [1, 1, 1, 1]
    assert [row["stream/staleness_steps_mean"] for row in rows[1:]] == [1, 1, 1, 1]


def test_no_steps_is_an_evaluation_with_a_checkpoint(tmp_path: Path):
    """steps = 0 evaluates once and leaves a model that can be taken away."""
    result = train_experiment(load(RANDOM, ["steps=0", "task.size=60"]), tmp_path / "run")

    assert [evaluation.step for evaluation in result.evaluations] == [0]
    assert (result.model / "model.safetensors").is_file()


def test_the_same_experiment_is_the_same_run(tmp_path: Path):
    """Two runs of one seed have equal metrics, `train RUN/experiment.toml` too; another seed differs."""

    def losses(folder: Path, source: str | Path, *overrides: str) -> list[float]:
        train_experiment(load(source, overrides), folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["learner/gradient_norm"] for line in lines]

    quick = (*QUICK, "steps=3", "rollouts_per_step=32")
    first = losses(tmp_path / "a", "tiny", *quick)

    assert losses(tmp_path / "b", "tiny", *quick) == first
    assert losses(tmp_path / "c", tmp_path / "a" / "experiment.toml") == first
    assert losses(tmp_path / "d", "tiny", *quick, "seed=1") != first
