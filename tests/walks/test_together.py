"""What each has tests of its own works together too: staleness, engines, rounding, conversations, withdrawal."""

from pathlib import Path
from typing import Any

import pytest

from gnomon.config.experiment import load
from gnomon.records.jsonl import read_rows
from gnomon.records.rollouts import read_rollouts
from gnomon.training.api import train_experiment

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "steps=4", "rollouts_per_step=16", "algorithm.num_generations=4", "evaluation.before=false", "held_out.size=2",
    "learner.precision=fp32", "checkpoints.every=0", "grading.workers=1", "device=cpu",
)  # fmt: skip
STALE = ("max_staleness=2", "engine.count=2", "staleness.slack=1")


def trained(folder: Path, experiment: str, *settings: str) -> list[dict[str, Any]]:
    """Return the metrics of every step."""
    train_experiment(load(experiment, [*QUICK, *settings]), folder / "run")
    return list(read_rows(folder / "run" / "metrics.jsonl"))


@pytest.fixture
def conversing(monkeypatch: pytest.MonkeyPatch) -> str:
    """The experiment with an environment, which names its file from the root."""
    monkeypatch.chdir(ROOT)
    return "examples/own_environment.toml"


@pytest.mark.slow
def test_conversations_with_two_engines_a_step_ahead_and_rounded_weights(tmp_path: Path, conversing: str):
    """No token is older than the bound, whichever turn it is of; both engines prove their weights; rounding shows."""
    rows = trained(tmp_path, conversing, *STALE, "engine.rounding=int8")

    assert [row["engines/alive"] for row in rows] == [2] * 4
    assert max(row["stream/staleness_steps_max"] for row in rows) in (1, 2)
    assert max(row["turns/max"] for row in rows) > 1
    assert max(row["arrival/canary_abs_mean_nats"] for row in rows) < 1e-5
    assert min(row["mismatch/precision_abs_nats"] for row in rows) > 1e-4
    for step in range(1, 5):
        for read in read_rollouts(tmp_path / "run" / "rollouts" / f"step-{step:06d}.jsonl"):
            done = read.rollout
            assert done.oldest_version <= done.newest_version <= step - 1
            assert step - 1 - done.oldest_version <= 2
            assert [p for p, chosen in zip(done.logprobs, done.mask, strict=True) if not chosen and p] == []


def test_conversations_that_are_withdrawn_leave_every_step_whole(tmp_path: Path, conversing: str):
    """Dropped in the middle of a turn by a measured bound: nobody is lost, and every step has its rollouts."""
    measured = ("max_staleness=measured", "staleness.limit=2", "staleness.stragglers=drop", "engine.count=2")
    rows = trained(tmp_path, conversing, *measured)

    assert [row["engines/lost"] + row["engines/asked_again"] for row in rows] == [0] * 4
    assert max(row["stream/staleness_steps_max"] for row in rows) <= 2
    for step, row in enumerate(rows, start=1):
        lines = list(read_rollouts(tmp_path / "run" / "rollouts" / f"step-{step:06d}.jsonl"))
        assert sum(line.is_kept for line in lines) + row["stream/distrusted_rollouts"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["spo", "p3o", "ppo", "dapo"])
def test_algorithms_of_every_shape_train_on_stale_answers_of_several_engines(tmp_path: Path, algorithm: str):
    """Single-stream, for stale samples, with a critic, and refilling without a barrier."""
    single = () if algorithm != "spo" else ("algorithm.num_generations=1", "algorithm.tracker.initial=prior")
    rows = trained(tmp_path, "tiny", f"algorithm={algorithm}", *STALE, *single)

    assert len(rows) == 4
    assert [row["engines/alive"] for row in rows] == [2] * 4
    assert max(row["stream/staleness_steps_max"] for row in rows) <= 2
    parts = [sum(row[f"mismatch/{part}_nats"] for part in PARTS) for row in rows if "mismatch/total_nats" in row]
    assert parts == pytest.approx(
        [row["mismatch/total_nats"] for row in rows if "mismatch/total_nats" in row], abs=1e-6
    )


PARTS = ("truncation", "staleness", "engine", "precision", "temperature")
