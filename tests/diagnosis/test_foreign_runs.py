"""The doctor reads runs of TRL, verl and prime-rl, and says which rules could not look."""

import json
from pathlib import Path

import pytest
from tests import foreign

from gnomon.cli.main import main
from gnomon.diagnosis.catalog import RULES
from gnomon.diagnosis.recorded import diagnose_foreign
from gnomon.records.foreign import read_foreign

STEPS = 40


def found(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return severities by rule, and what the other rules need."""
    findings, unable = diagnose_foreign(read_foreign(path))
    return {finding.rule: finding.severity for finding in findings}, unable


def test_a_healthy_run_has_no_finding(tmp_path: Path):
    """And the rules that look at what TRL does not log say what they need."""
    severities, unable = found(foreign.trl(tmp_path, [0.2 + 0.01 * n for n in range(STEPS)]))

    assert severities == {}
    assert unable["duplicate-rollouts"] == "rollout/duplicate_pair_fraction"
    assert unable["mismatch"] == "mismatch/k3_nats"
    assert unable["held-out-gap"] == "evaluations with answers"
    assert unable["dominant-part"] == "settings of the run"
    assert unable.keys() < RULES.keys()
    assert not {"reward-falls", "entropy-collapse", "gradient-norm", "degenerate-groups"} & unable.keys()


def test_faults_are_found_by_what_each_library_logs(tmp_path: Path):
    """A reward that falls (TRL), entropy and clipping (verl), and a mismatch (prime-rl)."""
    trl = foreign.trl(tmp_path / "trl", [0.8] * 20 + [0.05] * 20)
    verl = foreign.verl(tmp_path / "verl", [0.5] * STEPS, **{"actor/pg_clipfrac": 0.6})
    prime = foreign.prime_rl(tmp_path / "prime", [0.5] * STEPS)
    rows = [json.loads(line) for line in (prime / "metrics.jsonl").read_text().splitlines()]
    foreign.lines(prime / "metrics.jsonl", [row | {"mismatch_kl/all/mean": 0.5} for row in rows])

    assert found(trl)[0]["reward-falls"] == "severe"
    assert found(verl)[0]["clip-fraction"] == "severe"
    assert found(prime)[0]["mismatch"] == "severe"


def test_groups_are_judged_by_the_answers(tmp_path: Path):
    """No answer is right: groups are all wrong, though verl logs no such share; a later gap is seen in validation."""
    path = foreign.verl(tmp_path, [0.0] * STEPS)
    for step in range(1, STEPS + 1):
        rows = [
            {"input": f"{step}+{n}?", "output": "I do not know", "score": 0.0, "step": step}
            for n in range(8)
            for _ in range(4)
        ]
        foreign.lines(path / "rollouts" / f"{step}.jsonl", rows)
    severities, unable = found(path)

    assert severities["all-wrong"] == severities["degenerate-groups"] == "severe"
    assert "all-wrong" not in unable


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Findings, rules that could not look and notes, as text and as JSON; --fail-on counts."""
    path = str(foreign.trl(tmp_path / "trl", [0.8] * 20 + [0.05] * 20))

    assert main(["doctor", path, "--fail-on", "severe"]) == 1
    said = capsys.readouterr().out
    assert "as TRL logged it" in said
    assert "rules that could not look:" in said
    assert main(["doctor", path, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["library"], row["findings"][0]["rule"]) == ("TRL", "reward-falls")
    assert "mismatch" in row["could_not_look"]

    (tmp_path / "trl" / "trainer_state.json").write_text("{")
    assert main(["doctor", path]) == 2
    assert "no state of a Trainer" in capsys.readouterr().err
