"""What a finished run prints."""

import sys
from pathlib import Path

import pytest

from gnomon.cli.results import show
from gnomon.training.evaluate import EvalScore, Evaluation
from gnomon.training.result import ModelFolder, Result

ONE = Evaluation(4, "gsm8k", 2, 1, {"answer": EvalScore(0.5, 0.1, 0.9)}, {}, {}, 1.0, 0.0, 0, 0.0)


@pytest.mark.parametrize("evaluations", [(), (ONE,)])
def test_next_commands_are_not_refused(
    evaluations: tuple[Evaluation, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`gnomon evaluate RUN` comes next where the run holds questions out; without any the verb refuses the run."""
    (tmp_path / "experiment.toml").write_text("steps = 4")
    show(Result(tmp_path, ModelFolder(tmp_path), 4, evaluations), as_json=False)
    said = capsys.readouterr().out

    assert f"gnomon export {tmp_path} my-model" in said
    assert (f"next    gnomon evaluate {tmp_path} --samples 4\n        gnomon export" in said) is bool(evaluations)
    assert (f"next    gnomon export {tmp_path} my-model" in said) is not bool(evaluations)


@pytest.mark.parametrize("is_on_path", [True, False])
def test_next_commands_are_typed_as_this_one_was(
    is_on_path: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """`gnomon` where the shell finds this program by that name, else the path that was typed."""
    program = tmp_path / "gnomon"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path if is_on_path else tmp_path / "elsewhere"))
    show(Result(tmp_path, ModelFolder(tmp_path), 4, ()), as_json=False)

    assert f"next    {'gnomon' if is_on_path else program} export" in capsys.readouterr().out
