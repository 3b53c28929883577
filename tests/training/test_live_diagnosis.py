"""The diagnosis while a run trains: written down, said, able to stop it, and the same after a resume."""

import json
from pathlib import Path

import pytest

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, DiagnosedError
from gnomon.diagnosis import Finding, diagnose
from gnomon.records.reading import RunRecord
from gnomon.training.api import resume, train_experiment

WRONG = (
    'rewards=[{kind="boxed"}]',
    "rollouts_per_step=8",
    "algorithm.num_generations=4",
    "task.size=60",
    "evaluation.before=false",
    "checkpoints.every=3",
)


def findings(folder: Path) -> list[tuple[str, str, int]]:
    rows = [Finding.of_row(row) for row in RunRecord.of(folder).findings()]
    return [(row.rule, row.severity, row.step) for row in rows if row is not None]


def test_a_run_stops_for_what_it_is_told_to_and_goes_on_knowing_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A wrong extractor is found at step 8, and the run stops there, saved; resumed, it does not stop for it again."""
    folder = tmp_path / "run"
    with pytest.raises(DiagnosedError, match=r"stopped after step 8 of 12, and saved: .*all-wrong.*gnomon resume"):
        train_experiment(load("tiny", [*WRONG, "steps=12", 'doctor.stop_on="all-wrong"']), folder)
    said = capsys.readouterr().err
    stopped = findings(folder)
    resume(folder)

    assert said.count("warning: all-wrong (severe): 100% of groups have no right answer") == 1
    assert RunRecord.of(folder).checkpoint_steps()[-1] == 12
    assert ("all-wrong", "severe", 8) in stopped
    assert findings(folder)[: len(stopped)] == stopped
    assert len({(rule, severity) for rule, severity, _ in findings(folder)}) == len(findings(folder))
    assert "all-wrong" not in capsys.readouterr().err


def test_findings_after_the_checkpoint_are_made_again(tmp_path: Path):
    """Taken back to step 3, a run finds at step 8 what it had found there, and ends with the same file."""
    folder = tmp_path / "run"
    train_experiment(load("tiny", [*WRONG, "steps=9", "checkpoints.keep_last=9"]), folder)
    once = (folder / "findings.jsonl").read_text()
    for path in sorted((folder / "checkpoints").glob("step-*"))[1:]:
        path.rename(folder / f"{path.name}-gone")
    resume(folder)

    assert once
    assert (folder / "findings.jsonl").read_text() == once
    found = {(finding.rule, finding.severity) for finding in diagnose(RunRecord.of(folder))}
    assert {(row["rule"], row["severity"]) for row in map(json.loads, once.splitlines())} == found


def test_the_diagnosis_can_be_left_out(tmp_path: Path):
    """With doctor.on = false there is no file of findings."""
    train_experiment(load("tiny", [*WRONG, "steps=1", "doctor.on=false"]), tmp_path / "off")

    assert not (tmp_path / "off" / "findings.jsonl").exists()


def test_unknown_rules_and_severities_are_refused():
    """Before anything is loaded, with the nearest name."""
    with pytest.raises(ConfigError, match="unknown severity or rule 'sever'; did you mean 'severe'"):
        load("tiny", ['doctor.stop_on="sever"'])
    with pytest.raises(ConfigError, match="unknown rule 'throughputs'; did you mean 'throughput'"):
        load("tiny", ['doctor.rules=["-throughputs"]'])
    assert load("tiny", ['doctor.stop_on=["all-wrong", "severe"]']).experiment.doctor.stops == ("all-wrong", "severe")
