"""Runs whose rollouts have several turns: they learn, they agree with the learner, they go on, and they survive."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, Stopped
from gnomon.training.api import resume, train_experiment
from gnomon.training.notes import starting_notes
from gnomon.training.run import StopRequest

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]

MINE = '''
import asyncio
import time

from gnomon.tasks.environment import Reply


class Legible:
    """Two answers that begin with a sign between ! and P are right; what was wrong is said, half characters too."""

    def reset(self, answer, seed):
        assert answer.isdigit() and seed >= 0
        return None

    async def step(self, text):
        await asyncio.sleep(0)
        is_right = "!" <= text[:1] <= "P"
        return Reply("ok" if is_right else f"\\u00e9<|eos|>{text}", reward=0.5 * is_right)


class Hostile(Legible):
    """One answer in four breaks it, by its first character."""

    async def step(self, text):
        kind = ord(text[:1] or "x") % 16
        if kind == 0:
            time.sleep(1000)
        if kind == 1:
            raise RuntimeError("broken by an answer")
        if kind == 2:
            return Reply("x" * 10**6)
        return await super().step(text)


class Wrong(Legible):
    """Its author returns something else than a reply, whatever is said."""

    async def step(self, text):
        return 3.5


class Absent:
    """It never begins."""

    def reset(self):
        raise ConnectionError("no server")

    def step(self, text):
        raise AssertionError
'''

OPTIONS = [
    "name=talk", "algorithm.num_generations=4", "rollouts_per_step=32", "task.size=60", "evaluation.before=false",
    "learner.precision=fp32", "sampling.max_completion_length=60", "environment.max_turns=2",
    "environment.max_turn_tokens=2", "environment.max_reply_tokens=50",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of environments in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def options(name: str, steps: int, *more: str) -> list[str]:
    """What is changed about the `tiny` experiment."""
    return [*OPTIONS, f"environment.use=mine.py:{name}", f"steps={steps}", *more]


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("algorithm", [(), pytest.param(("algorithm=gigpo",), marks=pytest.mark.slow)])
def test_what_an_environment_rewards_is_learned(place: Path, algorithm: tuple[str, ...]):
    """Over 12 steps the reward rises; the learner's log-probabilities are the engine's, with replies between them."""
    train_experiment(load(RANDOM, [*algorithm, *options("Legible", 12)]), place / "run")
    metrics = rows(place / "run" / "metrics.jsonl")
    rewards = [row["rollout/reward_mean"] for row in metrics]

    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert [row["turns/mean"] for row in metrics] == [2.0] * 12
    assert max(row["mismatch/logprob_abs_mean_nats"] for row in metrics) < 1e-5
    assert max(row["tokens/generated"] for row in metrics) <= 32 * 4, "replies are not generated"
    for line in rows(place / "run" / "rollouts" / "step-000001.jsonl"):
        assert (line["turns"], line["ended_by"], line["stop"]) == (2, "turns", "length")
        assert (set(line["turn_rewards"]) <= {0.0, 0.5}, sum(line["turn_rewards"])) == (True, line["reward"])
        assert [p for p, m in zip(line["logprobs"], line["mask"], strict=True) if not m and p != 0.0] == []
        reply = [t for t, m in zip(line["response"], line["mask"], strict=True) if not m]
        assert [t for t in reply if t > 255] == [], "what an answer said is text in its reply"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_draws(place: Path, capsys: Capture):
    """The draws of every turn depend on what is asked alone: two sessions have the tokens and rewards of one.

    Only the company that an answer was computed in differs, and with it the last digits; the card says so.
    """
    two_steps = load(RANDOM, options("Legible", 2, "rollouts_per_step=16", "held_out.size=2"))
    train_experiment(two_steps, place / "whole")
    with pytest.raises(Stopped, match="stopped after step 1"):
        train_experiment(two_steps, place / "run", StopRequest(signal.SIGTERM, after=1))
    resume(place / "run")

    same = ("response", "mask", "reward", "turns", "ended_by", "oldest_version")
    for step in (1, 2):
        ours, theirs = (rows(place / run / "rollouts" / f"step-{step:06d}.jsonl") for run in ("run", "whole"))
        assert [[line[key] for key in same] for line in ours] == [[line[key] for key in same] for line in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
    assert "draws every token with the same random number" in capsys.readouterr().err


def test_an_environment_that_always_fails_is_refused(place: Path):
    """Every reply is of a wrong type, which is no policy's doing: said before a model loads, with what is right."""
    with pytest.raises(ConfigError, match=r"step failed to the answer '': TypeError: step returned float, expected a"):
        train_experiment(load(RANDOM, options("Wrong", 2, "rollouts_per_step=8")), place / "run")


def test_what_breaks_an_environment_breaks_one_rollout(place: Path):
    """Hanging, raising and flooding are counted by cause, each in its rollouts, and the run goes on to its end."""
    train_experiment(load(RANDOM, options("Hostile", 2, "environment.timeout_seconds=0.3")), place / "run")
    metrics = rows(place / "run" / "metrics.jsonl")
    causes = {"no reply after 0.3 s", "RuntimeError: broken by an answer", "a reply of 1000000 characters"}

    for step, row in enumerate(metrics, start=1):
        lines = rows(place / "run" / "rollouts" / f"step-{step:06d}.jsonl")
        for by in ("timeout", "fault", "flood", "turns"):
            count = sum(line["ended_by"] == by for line in lines)
            assert row[f"turns/ended_by_{by}_fraction"] == pytest.approx(count / len(lines))
        causes -= {cause for cause in causes for line in lines if cause in (line["cause"] or "")}
        assert [line["error"] for line in lines] == [None] * len(lines)
        assert row["rollout/error_fraction"] == 0
    assert causes == set(), "each kind of fault was seen"


def test_an_environment_that_never_begins_is_refused(place: Path, capsys: Capture):
    """Before a model loads, with the cause and exit code 2."""
    code = main(["train", RANDOM, *options("Absent", 2), "--run-dir", "run"])

    assert code == 2
    assert "reset failed: ConnectionError: no server (mine.py:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "environment.use=mine.py:Legibel",
            "environment.use = 'mine.py:Legibel': unknown name 'Legibel'; did you mean",
        ),
        ("environment.settings={pay=2}", "environment.settings {'pay': 2} do not fit 'mine.py:Legible'"),
        ("environment.max_turns=0", "environment.max_turns must be at least 1, got 0"),
        ("environment.max_turn=3", "unknown key 'max_turn'; did you mean 'max_turns'"),
        ("environment.kind=tool", "environment: unknown kind 'tool'; did you mean 'tools'?"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_first(place: Path, capsys: Capture, override: str, message: str):
    """Exit code 2 and one message, before a run directory is made."""
    code = main(["train", RANDOM, *options("Legible", 1), override, "--run-dir", "run"])
    said = capsys.readouterr().err

    assert (code, (place / "run").exists()) == (2, False)
    assert message in said


@pytest.mark.slow
def test_tools_are_told_called_and_graded(place: Path):
    """A model without a template is told about the Python tool in the prompt; an answer without a call is the last."""
    tools = ["environment.kind=tools", 'environment.tools=["python"]', "sampling.max_completion_length=4"]
    train_experiment(load(RANDOM, ["steps=1", "rollouts_per_step=16", "learner.precision=fp32", *tools]), place / "run")
    lines = rows(place / "run" / "rollouts" / "step-000001.jsonl")

    for line in lines:
        prompt = bytes(token for token in line["prompt"] if token < 256).decode()
        assert '{"name": "python"' in prompt
        assert "<tool_call>" in prompt
        assert line["ended_by"] in ("done", "tokens")
        assert line["parts"].keys() == {"answer"}, "the task's own reward"


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The example with an environment of one's own trains and is evaluated; its record is the same from anywhere."""
    monkeypatch.chdir(ROOT)
    loaded = load("examples/own_environment.toml", ["steps=1"])
    train_experiment(loaded, tmp_path / "run")
    [row] = rows(tmp_path / "run" / "metrics.jsonl")
    written = load(tmp_path / "run" / "experiment.toml").experiment

    assert row["turns/mean"] >= 1
    assert written.environment is not None
    assert written.environment.use == f"{ROOT / 'examples' / 'own_environment.py'}:Hints"
    assert starting_notes(written) == starting_notes(loaded.experiment)
