"""A user's own reward, from a file beside the experiment to the weights; and what happens when it fails."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.models.tiny import EOS
from gnomon.training.api import train_experiment

Capture = pytest.CaptureFixture[str]

REWARDS = '''
import math
import time


def ours(prompt, completion, answer, **columns):
    """Ours: one sample; any column by its name."""
    assert prompt.endswith("=") and answer.isdigit()
    return float("!" <= completion[:1] <= "P")


def trl(prompts, completions, answer, **columns):
    """TRL's: lists of all answers to a question."""
    assert len(set(prompts)) == 1 and len(prompts) == len(completions) == len(answer)
    return [float("!" <= completion[:1] <= "P") for completion in completions]


async def verl(data_source, solution_str, ground_truth, extra_info=None):
    """verl's, and asynchronous."""
    assert data_source == "arithmetic" and ground_truth.isdigit()
    return {"score": float("!" <= solution_str[:1] <= "P"), "acc": 1.0}


def fails_sometimes(prompt, completion):
    """Hangs, raises and is not a number for one answer in four, by its first character."""
    kind = ord(completion[:1] or "x") % 16
    if kind == 0:
        time.sleep(60)
    if kind == 1:
        raise ValueError("no such thing")
    if kind == 2:
        return math.nan
    return float("!" <= completion[:1] <= "P")


def fails_always(prompt, completion):
    if len(completion) > 3:
        return 0.0  # an answer of the trial before training; sampling ends after three tokens
    raise ZeroDivisionError("a fault in the reward")
'''

EXPERIMENT = """
name = "own-reward"
model = "tiny"
algorithm = {{ preset = "grpo", num_generations = 4 }}
steps = {steps}
rollouts_per_step = 32
rewards = [{{ kind = "function", function = "{function}", name = "own" }}]
task = {{ kind = "arithmetic", highest = 4, size = 60 }}
held_out = {{ size = 5 }}
sampling = {{ max_completion_length = 3 }}
learner = {{ precision = "fp32", optimizer = {{ learning_rate = 3e-3 }} }}
evaluation = {{ before = false }}
grading = {{ deadline_seconds = 0.3, max_error_fraction = 0.9 }}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of rewards in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def write_experiment(place: Path, function: str, steps: int) -> Path:
    """Write an experiment with a reward of one's own."""
    path = place / "own.toml"
    path.write_text(EXPERIMENT.format(function=f"mine.py:{function}", steps=steps))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("function", ["ours", "trl", "verl"])
def test_a_reward_of_ones_own_is_learned(place: Path, function: str):
    """In each signature the same reward, under its own name, rises; three runs are one run."""
    train_experiment(load(write_experiment(place, function, steps=12)), place / "run")
    metrics = rows(place / "run" / "metrics.jsonl")
    rewards = [row["rollout/reward_mean"] for row in metrics]

    assert [row["reward/own_mean"] for row in metrics] == rewards
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert [row["rollout/error_fraction"] for row in metrics] == [0] * 12
    recorded = rows(place / "run" / "rollouts" / "step-000001.jsonl")
    assert all(row["reward"] == float("!" <= row["text"][:1] <= "P") for row in recorded)


def test_samples_that_cannot_be_graded_are_counted_and_not_trained_on(place: Path):
    """A reward that hangs, raises or is not a number makes an error: no zero, no training token, one count."""
    train_experiment(load(write_experiment(place, "fails_sometimes", steps=2)), place / "run")
    metrics = rows(place / "run" / "metrics.jsonl")

    causes = {"timed out after 0.3 s", "ValueError: no such thing", "nan"}
    for step, row in enumerate(metrics, start=1):
        recorded = rows(place / "run" / "rollouts" / f"step-{step:06d}.jsonl")
        errors = [line for line in recorded if line["error"] is not None]
        graded = [line["reward"] for line in recorded if line["error"] is None]
        causes -= {cause for cause in causes for line in errors if cause in line["error"]}
        assert errors
        assert all(line["reward"] is None for line in errors)
        assert row["rollout/error_fraction"] == pytest.approx(len(errors) / len(recorded))
        assert row["rollout/reward_mean"] == pytest.approx(sum(graded) / len(graded))
        assert row["tokens/trained"] <= sum(len(line["response"]) for line in recorded if line["error"] is None)
    assert causes == set(), "each kind of failure was seen"


def test_a_reward_that_always_fails_stops_the_run(place: Path, capsys: Capture):
    """Past the allowed fraction the run ends with exit code 1, the cause, and samples to look at: their questions."""
    experiment = str(write_experiment(place, "fails_always", steps=2))
    code = main(["train", experiment, "grading.max_error_fraction=0.2", "--run-dir", "run"])
    said = capsys.readouterr()

    assert (code, said.out) == (1, "")
    # How many were judged when the run ended depends on the grading workers.
    found = re.search(r"gnomon train: the run failed: (\d+) of the last (\d+) samples \(100%\) could not be", said.err)
    assert found is not None, said.err
    assert found[1] == found[2]
    assert "own: ZeroDivisionError: a fault in the reward" in said.err
    assert "Fix the reward function, or allow more errors (grading.max_error_fraction)." in said.err
    assert any(f"{a}+{b}=" in said.err for a in range(5) for b in range(5))
    assert "Traceback" not in said.err


def test_control_tokens_in_questions_are_text(place: Path):
    """A dataset cannot end the user's turn: what looks like a control token reaches the model as its letters."""
    questions = [f"{EOS}{n}+1={EOS}" for n in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps({"prompt": q, "answer": "1"}) + "\n" for q in questions))
    options = ["task=rows.jsonl", 'rewards=[{kind="numeric"}]', "held_out.size=1", "held_out.fraction=0.2"]
    train_experiment(load("tiny", [*options, "steps=1", "rollouts_per_step=32"]), place / "run")

    for row in rows(place / "run" / "rollouts" / "step-000001.jsonl"):
        # Bytes below 256; 256 begins a text, 257 is the control token itself, 258 pads.
        assert row["question"] in questions
        assert [token for token in row["prompt"] if token > 256] == []
        assert bytes(token for token in row["prompt"] if token < 256).decode() == row["question"]
