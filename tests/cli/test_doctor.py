"""``gnomon doctor``: findings a person can read in 80 columns and a program can act on."""

import json
from pathlib import Path

import pytest

from gnomon.cli.doctor import describe
from gnomon.cli.main import main
from gnomon.diagnosis import Finding, FindingSample

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of twelve steps whose verifier fails on a tenth of all answers."""
    (tmp_path / "experiment.toml").write_text("steps = 20\n")
    rows = [{"step": step, "rollout/error_fraction": 0.1, "rollout/reward_mean": 0.5} for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_findings_are_read_in_80_columns(run: Path, capsys: Capture):
    """What is wrong, steps, meaning, advice and numbers; no line is longer than 80 characters."""
    assert main(["doctor", str(run)]) == 0
    said = capsys.readouterr().out

    assert "1 finding after step 12 of 20, stopped" in said
    assert "SEVERE   verifier-errors" in said
    assert "steps 1 to 12" in said
    assert "grading.deadline_seconds" in said
    assert max(map(len, said.splitlines()[1:])) <= 80


def test_a_program_can_act_on_them(run: Path, capsys: Capture):
    """One JSON object; exit code 1 only for a finding as grave as was asked for, or without a step to judge."""
    assert main(["doctor", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert [(f["rule"], f["severity"]) for f in found["findings"]] == [("verifier-errors", "severe")]
    assert found["step"] == 12
    assert main(["doctor", str(run), "--fail-on", "severe"]) == 1
    (run / "metrics.jsonl").write_text("")
    assert main(["doctor", str(run), "--fail-on", "note"]) == 1
    assert "there is no step to judge" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Capture):
    """With exit code 2, and what starts one."""
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert "gnomon train" in capsys.readouterr().err


def test_a_terminal_obeys_no_answer():
    """Escape sequences, line breaks and marks of direction in answers are written out; markup is only text."""
    sample = FindingSample(3, "t", "2+2=", "\x1b[2Jgone\n\u202e[bold]", 0.0)
    finding = Finding("r", "note", 1, 3, "said", {"a": 0.123456}, "means", ("try",), (sample,))
    said = describe(finding)

    assert "\x1b" not in said
    assert "\u202e" not in said
    assert r"\x1b[2Jgone\n\u202e[bold]" in said
