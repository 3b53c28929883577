"""A learner that scores at another temperature than the sampler's: off-policy on purpose, by a known amount."""

import json
import math
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.cli.results import show
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.training.api import train_experiment
from gnomon.training.notes import temperature_note
from gnomon.training.python_api import evaluate


def rows(folder: Path, *overrides: str) -> list[dict[str, float]]:
    train_experiment(load(RANDOM, ["steps=2", "rollouts_per_step=32", "evaluation.before=false", *overrides]), folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_answers_are_off_policy_by_the_temperature_alone(tmp_path: Path) -> None:
    """Drawn at 1.5 and scored at 1, the first step's effective size falls below that of one temperature, which is 1."""
    apart = rows(tmp_path / "apart", "sampling.temperature=1.5", "learner.temperature=1.0")
    alike = rows(tmp_path / "alike", "sampling.temperature=1.5", "learner.temperature=1.5")
    plain = rows(tmp_path / "plain", "sampling.temperature=1.5")

    assert apart[0]["mismatch/learner_temperature_abs_nats"] > 0.01
    assert "mismatch/learner_temperature_nats" not in plain[0]
    assert apart[0]["mismatch/engine_abs_nats"] == pytest.approx(0.0, abs=1e-4), "the engine itself differs by nothing"
    same = [key for key in plain[0] if key.startswith(("loss/", "rollout/", "mismatch/"))]
    assert {k: alike[0][k] for k in same} == {k: plain[0][k] for k in same}
    assert apart[0]["rollout/reward_mean"] == plain[0]["rollout/reward_mean"], "the first answers are the same"


def test_greedy_training_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    """At temperature 0 a group is one answer, and a ratio has no draw; one answer a prompt and a temperature train."""
    with pytest.raises(ConfigError, match=r"the \d+ answers to a prompt .* set it above 0, and evaluation\.sampling"):
        rows(tmp_path / "group", "sampling.temperature=0", "learner.temperature=1")
    with pytest.raises(ConfigError, match=r"or give learner\.temperature = 1"):
        rows(tmp_path / "single", "algorithm=spo", "sampling.temperature=0")
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be 0 \(greedy\) or more, and finite, got -1"):
        rows(tmp_path / "below", "sampling.temperature=-1")
    with pytest.raises(
        ConfigError, match=r"the \d+ answers to a prompt .* set it to 0 \(every token\) or above 1, and"
    ):
        rows(tmp_path / "likeliest", "sampling.top_k=1")
    for greedy in ("temperature=0", "top_k=1"):
        with pytest.raises(ConfigError, match=r"all 4 answers .* are the same; ask for one sample"):
            rows(tmp_path / "held-out", f"evaluation.sampling.{greedy}", "evaluation.samples=4")

    trained = rows(tmp_path / "chosen", "algorithm=spo", "sampling.temperature=0", "learner.temperature=1")
    assert trained[0]["mismatch/total_abs_nats"] == pytest.approx(0.0, abs=1e-4), "recorded at temperature 1"


def test_held_out_answers_may_be_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation at temperature 0 beside training at 1: the same answers each time, and what is said fits it."""
    overrides = ["steps=0", "evaluation.sampling.temperature=0"]
    result = train_experiment(load(RANDOM, overrides), tmp_path / "first")
    first = result.evaluations[-1]
    again = evaluate(tmp_path / "first", overrides=["evaluation.sampling.temperature=0", "seed=7"])

    assert first.drawn.startswith("temperature 0, ")
    assert again.headline.mean == first.headline.mean
    show(result, as_json=False)
    assert f"evaluate {tmp_path / 'first'}\n" in capsys.readouterr().out, "several samples would be refused"


def test_it_is_said_and_checked() -> None:
    """A note where the two differ, none where they do not; a temperature of 0 or below and one that is none."""
    apart = load(RANDOM, ["learner.temperature=0.8"]).experiment
    assert temperature_note(apart).startswith("answers are drawn at temperature 1 and scored at 0.8")
    assert temperature_note(load(RANDOM, ["learner.temperature=1.0"]).experiment) is None
    assert temperature_note(load(RANDOM).experiment) is None
    assert math.isclose(apart.scoring_temperature, 0.8)
    for wrong in ("0", "-1", "inf"):
        with pytest.raises(ConfigError, match="temperature"):
            load(RANDOM, [f"learner.temperature={wrong}"])
