"""What a run that failed says of its end to whoever looks at it later."""

import json
from pathlib import Path

import pytest

from gnomon.cli.main import main
from gnomon.records.run_card import end_of, run_card, write_card, write_end

Capture = pytest.CaptureFixture[str]
FAILING = """
def reward(prompt, completion, **columns):
    if completion == "I do not know.":
        return 0.0  # an answer of the trial before training, which no tiny model gives
    raise ValueError("no such unit")
"""


def test_a_run_that_failed_says_with_what_everywhere(tmp_path: Path, capsys: Capture):
    """Card, live view, doctor and report have the error's name and text."""
    (tmp_path / "mine.py").write_text(FAILING)
    run = tmp_path / "run"
    rewards = f'rewards=[{{kind="function", function="{tmp_path / "mine.py"}:reward"}}]'
    small = ("steps=2", "rollouts_per_step=16", "evaluation.before=false")
    assert main(["train", "tiny", *small, rewards, "--run-dir", str(run)]) == 1
    said = capsys.readouterr().err

    assert f"what the run wrote is in {run}: gnomon doctor {run}; go on with: gnomon resume {run}\n" in said
    assert end_of(json.loads((run / "run.json").read_text())).startswith("GradingError: ")
    assert main(["watch", str(run), "--json"]) == 0
    assert "no such unit" in json.loads(capsys.readouterr().out)["ended"]
    assert main(["doctor", str(run)]) == 0
    assert "It ended with GradingError: " in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "It ended with GradingError: " in page
    assert "no such unit" in page


def test_a_session_that_goes_on_forgets_how_the_last_one_ended(tmp_path: Path):
    """The end belongs to a session; secrets of the environment are not in it."""
    path = tmp_path / "run.json"
    write_card(path, run_card("cpu", 1, {"run": 0}, "fp32"))
    write_end(path, RuntimeError("x" * 5000))
    assert len(end_of(json.loads(path.read_text()))) == 2000
    write_card(path, run_card("cpu", 1, {"run": 0}, "fp32"))

    assert end_of(json.loads(path.read_text())) == ""
    write_end(path, RuntimeError("again"))
    assert end_of(json.loads(path.read_text())) == "RuntimeError: again"
    write_end(tmp_path / "none.json", RuntimeError("nowhere"))
    assert not (tmp_path / "none.json").exists()
