"""`gnomon report`, and the page that every run leaves behind."""

import json
from pathlib import Path

import pytest
from tests.insight.report.test_write import make_run

import gnomon
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import Stopped
from gnomon.training.api import train_experiment
from gnomon.training.run import StopRequest

Capture = pytest.CaptureFixture[str]
SMALL = ["rollouts_per_step=16", "held_out.size=2", "task.size=60", "evaluation.before=false"]


def test_it_says_where_the_page_is(tmp_path: Path, capsys: Capture):
    """The path and the size, on one line; with --json one object and nothing else."""
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    out = tmp_path / "page.html"

    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"report  {run}/report.html  (0.")
    assert main(["report", str(run), str(other), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"report": str(out), "bytes": out.stat().st_size, "runs": [str(run), str(other)]}


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: Capture):
    """Named twice, also by another path: exit code 2 and no page."""
    run = make_run(tmp_path / "run")

    assert main(["report", str(run), str(run / ".." / "run")]) == 2
    assert "is named twice, and a run cannot be compared with itself; name each run once" in capsys.readouterr().err
    assert not (run / "comparison.html").exists()


def test_what_is_no_run_is_said(tmp_path: Path, capsys: Capture):
    """Exit code 2 and a sentence that says how a run begins."""
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "gnomon train EXPERIMENT" in capsys.readouterr().err


def test_every_run_leaves_a_page(tmp_path: Path, capsys: Capture):
    """A finished run has one, and the result names it; rollouts say what their step made of them."""
    arguments = ["train", "tiny", "steps=1", "algorithm=spo", "algorithm.tracker.initial=prior", *SMALL]
    assert main([*arguments, "--run-dir", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    lines = (tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if "entropy" in row)

    assert f"report  {tmp_path}/run/report.html" in capsys.readouterr().out
    assert "1 of 1 steps" in text
    assert "still running" not in text
    assert {"advantages", "proximal", "baseline", "entropy"} <= set(row)
    assert all(f'name="color" value="{key}"' in text for key in ("advantage", "surprise", "entropy", "ratio", "trust"))
    assert len(row["proximal"]) == len(row["response"])


def test_a_run_that_was_stopped_has_a_page_too(tmp_path: Path):
    """It says so."""
    with pytest.raises(Stopped, match="stopped after step 1 of 3"):
        train_experiment(load("tiny", ["steps=3", *SMALL]), tmp_path / "run", StopRequest(15, after=1))

    assert "1 of 3 steps, stopped" in (tmp_path / "run" / "report.html").read_text()


FAILS = """
def mine(prompt, completion, **columns):
    if completion == "I do not know.":
        return 0.0  # an answer of the trial before training, which no tiny model gives
    raise ValueError("no such unit")
"""


def test_a_run_that_failed_has_a_page_too(tmp_path: Path):
    """Rewards that cannot be given end a run; what it had done until then can be seen."""
    reward = tmp_path / "mine.py"
    reward.write_text(FAILS)
    rewards = f'rewards=[{{verifier={{kind="function", function="{reward}:mine"}}, name="mine"}}]'
    with pytest.raises(gnomon.RunError):
        train_experiment(load("tiny", ["steps=3", "rollouts_per_step=64", rewards]), tmp_path / "run")

    assert "of 3 steps, stopped" in (tmp_path / "run" / "report.html").read_text()
