"""Runs on preferences and labels: what the policy learns, and what the run leaves behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gnomon.config.experiment import load
from gnomon.diagnosis.facts import Facts
from gnomon.training.api import train_experiment
from gnomon.training.build_data import questions

QUICK = ("learner.precision=fp32", "evaluation.before=false", "checkpoints.every=0", "max_staleness=0")
LEARNED = ("learner.optimizer.learning_rate=1e-3", "rollouts_per_step=16", "steps=8")
SUMS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "9+9"} for n in range(8)]


def table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["dpo", "ipo-preference"])
def test_a_run_raises_the_margin_of_its_pairs(name: str, tmp_path: Path):
    """No margin before the first update, a growing one after; records say which answer was chosen, and no policy's."""
    path = table(tmp_path, SUMS)
    more = (f"algorithm={name}", f"task={path}", "held_out.size=2", "rollouts_per_step=8")

    run = train_experiment(load("tiny", [*QUICK, *LEARNED, *more]), tmp_path / "run")

    margins = run.metrics["loss/preference_margin_nats"]
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > max(2, margins[1])
    assert run.metrics["loss/preference_accuracy"][-1] == 1
    assert run.metrics["loss/policy"][-1] < run.metrics["loss/policy"][0]
    assert "loss/perplexity" not in run.metrics
    rows = run.rollouts(2)
    assert [row.rollout.grade.reward for row in rows] == [1, 0] * 4
    assert {row.rollout.text for row in rows[1::2]} == {"9+9"}


def test_a_run_tells_good_answers_from_bad_ones(tmp_path: Path):
    """KTO: good answers gain on the reference, bad ones lose; the rows that measure the KL have no reward."""
    given = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in SUMS
        for kind in row
        if kind != "prompt"
    ]
    path = table(tmp_path, given)
    more = ("algorithm=kto", f"task={path}", "held_out.size=0", "rollouts_per_step=16")

    run = train_experiment(load("tiny", [*QUICK, *LEARNED, *more]), tmp_path / "run")

    good, bad = (run.metrics[f"loss/preference_{kind}_nats"] for kind in ("desired", "undesired"))
    assert good[0] == pytest.approx(0, abs=1e-4)
    assert good[-1] - bad[-1] > max(2, good[1] - bad[1])
    assert min(run.metrics["loss/preference_kl_nats"]) >= 0
    rewards = [row.rollout.grade.reward for row in run.rollouts(1)]
    assert set(rewards[::2]) == {1, -1}
    assert set(rewards[1::2]) == {None}


@pytest.mark.parametrize(("label", "said"), [(True, ["every label says good"]), (False, ["every label says bad"])])
def test_labels_of_one_kind_are_said(label: bool, said: list[str], tmp_path: Path):
    """Nothing tells good from bad there: a note names what is missing, and rows of both kinds have none."""
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": label} for row in SUMS]
    for more, expected in ((rows, said), ([*rows, rows[0] | {"prompt": "a", "label": not label}], [])):
        settings = ("algorithm=kto", f"task={table(tmp_path, more)}", "held_out.size=0", "rollouts_per_step=4")
        notes = "; ".join(questions(load("tiny", [*QUICK, *settings]).experiment).said)

        assert [each for each in ("every label says good", "every label says bad") if each in notes] == expected


@pytest.mark.parametrize("table", [{"algorithm": {"samples": "pairs"}}, {"rollouts_from": "runs/first/rollouts"}])
def test_rules_about_sampling_are_silent_of_given_answers(table: dict[str, Any]):
    """Nobody samples in such a run, so no mismatch and no reward that stands still is a finding."""
    assert Facts.of(table).is_supervised
    assert not Facts.of({"algorithm": {"samples": "policy"}}).is_supervised
