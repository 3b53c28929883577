"""`gnomon train tiny`: what a new user's first minute shows."""

from pathlib import Path

import pytest
import torch
from experiments.claims.exact_rates import success_rates

from gnomon.config.experiment import load
from gnomon.models.hf_names import HfNames, as_folder
from gnomon.models.load import check_weights, load_model
from gnomon.models.tiny import TAUGHT, tiny_tokenizer
from gnomon.records.jsonl import read_rows
from gnomon.tasks.build import build
from gnomon.tasks.chat import ChatRenderer
from gnomon.training.api import train_experiment


def test_the_model_answers_one_sum_in_seven(tmp_path: Path):
    """The exact chance over all sums is a seventh; other programs get the same weights; nothing is read on meta."""
    tasks = build(load("tiny").experiment.task, ChatRenderer(tiny_tokenizer()))
    different = list({task.text: task for task in (tasks[n] for n in range(len(tasks)))}.values())
    model = load_model("tiny-sums", torch.float32)
    rates = success_rates(model, tiny_tokenizer(), different)

    assert len(rates) == 100
    assert sum(rates) / len(rates) == pytest.approx(1 / 7, abs=0.01)
    assert check_weights("tiny-sums") == ()
    again = load_model(as_folder("tiny-sums", tmp_path / "model"), torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert HfNames("tiny-sums").is_plain


def test_the_first_minute_has_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """That the model was taught is a note, for nothing is wrong."""
    few = ["steps=1", "rollouts_per_step=16", "evaluation.samples=1", "evaluation.before=false", "held_out.size=5"]
    train_experiment(load("tiny", few), tmp_path / "run")

    said = capsys.readouterr().err.splitlines()
    assert TAUGHT in said
    assert [line for line in said if line.startswith("warning")] == []


@pytest.mark.slow
def test_it_learns_sums_that_it_is_never_trained_on(tmp_path: Path):
    """From about a seventh to nearly all of the sums that are never trained on, and the doctor finds nothing."""
    run = train_experiment(load("tiny"), tmp_path / "run")
    before, after = (run.evaluations[place].headline.mean for place in (0, -1))

    assert before < 0.25
    assert after > 0.85
    assert [row for row in read_rows(run.directory / "findings.jsonl") if row["rule"] != "throughput"] == []
