"""Epochs in place of a number of steps, where answers are generated; tests of supervised rows are in test_sft.py."""

from collections import Counter
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment
from gnomon.training.build_data import completed

SMALL = (
    "task.size=12", "held_out.size=2", "rollouts_per_step=8", "algorithm.num_generations=2", "evaluation.before=false",
)  # fmt: skip


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 6), (0.5, 2), (3.3333333333333335, 10)])
def test_steps_are_passes_over_the_prompts_rounded_up(epochs: float, steps: int):
    """12 prompts, 4 a step: three steps an epoch; a half epoch is two; ten thirds are 40 prompts, ten steps."""
    found = completed(load(RANDOM, [*SMALL, f"epochs={epochs}"]))

    assert found.experiment.steps == steps
    assert f"of 12 rows, 4 a step, is steps = {steps}" in found.notes[-1]


@pytest.mark.parametrize("name", ["num_train_epochs", "total_epochs", "trainer.total_epochs", "num_episodes", "epochs"])
def test_other_libraries_names_are_understood(name: str):
    """TRL's, verl's and OpenRLHF's."""
    assert completed(load(RANDOM, [*SMALL, f"{name}=2"])).experiment.steps == 6


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("spo", "as many as the epochs have, some more often than others"),
        ("dapo", "other rows are asked for groups that are refused"),
        ("{preset='grpo', sampler={piece='Greso'}}", "rows that taught nothing are passed over"),
    ],
)
def test_where_prompts_are_not_asked_equally_often_it_says_what_an_epoch_is(algorithm: str, said: str):
    """SPO draws by uncertainty, DAPO asks others for refused groups, GRESO passes over prompts."""
    loaded = load(RANDOM, [f"algorithm={algorithm}", "rollouts_per_step=16", "epochs=2"])

    assert said in completed(loaded).notes[-1]


def test_a_run_of_epochs_asks_every_prompt_as_often(tmp_path: Path):
    """Two epochs of 12 prompts, in six steps: each twice."""
    assert train_experiment(load(RANDOM, [*SMALL, "epochs=2"]), tmp_path / "run").steps == 6

    record = RunRecord(tmp_path / "run")
    asked = Counter(task for n in record.rollout_steps() for task in {r.rollout.task_id for r in record.rollouts(n)})
    assert set(asked.values()) == {2}
    assert len(asked) == 12
