"""Runs in which something was really wrong, and runs in which nothing was; more of them in experiments/diagnosis."""

import sys
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.diagnosis import Finding
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "diagnosis"
LETTERS = 'rewards=[{kind="format", pattern=".*[a-z].*"}]'
QUICK = (
    LETTERS,
    "rollouts_per_step=32",
    "algorithm.num_generations=4",
    "steps=10",
    "task.size=100",
    "evaluation.before=false",
    "checkpoints.every=0",
)


def trained(folder: Path, *overrides: str, fault: str = "") -> dict[str, str]:
    """Return the severity of each rule that spoke in a run of the `tiny` experiment."""
    sys.path.insert(0, str(EXPERIMENT))
    try:
        from faults import faulty
    finally:
        sys.path.remove(str(EXPERIMENT))
    with faulty(fault):
        train_experiment(load(RANDOM, [*QUICK, *overrides]), folder)
    found = [Finding.of_row(row) for row in RunRecord.of(folder).findings()]
    return {finding.rule: finding.severity for finding in found if finding is not None}


@pytest.mark.parametrize(
    ("rule", "overrides", "fault"),
    [
        ("all-wrong", ('rewards=[{kind="boxed"}]',), ""),
        ("weights-not-arrived", ("learner.optimizer.learning_rate=1e-2",), "frozen"),
        ("duplicate-rollouts", (), "copying"),
        ("all-right", ('rewards=[{kind="format", pattern=".*"}]',), ""),
    ],
)
def test_what_is_really_wrong_is_found(rule, overrides, fault, tmp_path: Path):
    """A wrong extractor, an engine whose weights stay behind, one that copies answers, a verifier that likes all."""
    assert trained(tmp_path / "run", *overrides, fault=fault)[rule] == "severe"


@pytest.mark.parametrize(
    "algorithm", ["p3o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "rloo"))]
)
def test_a_healthy_run_has_nothing_severe(algorithm, tmp_path: Path):
    """A model from scratch that begins to learn to write letters is well, by any of these algorithms."""
    assert "severe" not in trained(tmp_path / "run", f"algorithm={algorithm}").values()
