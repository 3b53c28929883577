"""The run card says what a run ran on, and nothing else."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.records.run_card import commit_of, run_card, write_card, write_end, write_slow


def test_the_card_names_versions_machine_and_promise(tmp_path: Path):
    """Versions, processor, device, threads, seeds, precision and the reproducibility level are there, as JSON."""
    write_card(tmp_path / "run.json", run_card("cpu", 2, {"run": 7}, "fp32"))
    card = json.loads((tmp_path / "run.json").read_text())

    assert {"python", "torch", "transformers"} <= set(card["versions"])
    assert (card["device"], card["threads"], card["seeds"], card["precision"]) == ("cpu", 2, {"run": 7}, "fp32")
    assert card["cpu"]
    assert card["reproducibility"].startswith("R0 exact")
    promise = "with these versions, this commit of gnomon, this C compiler (or none) and this number of threads"
    assert promise in card["reproducibility"]
    assert run_card("cuda:0", 2, {}, "bf16").reproducibility.startswith("R2 lossless")


def test_the_card_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No value of the environment gets into the card."""
    monkeypatch.setenv("WANDB_API_KEY", "secret-8f2c")
    write_card(tmp_path / "run.json", run_card("cpu", 1, {"run": 0}, "fp32"))

    assert "secret-8f2c" not in (tmp_path / "run.json").read_text()


def test_a_resumed_run_keeps_its_first_card(tmp_path: Path):
    """Later sessions are added under `resumed`."""
    path = tmp_path / "run.json"
    for threads in (1, 2, 3):
        write_card(path, run_card("cpu", threads, {"run": 0}, "fp32"))
    card = json.loads(path.read_text())

    assert card["threads"] == 1
    assert [session["threads"] for session in card["resumed"]] == [2, 3]


def test_a_slower_way_that_a_trial_finds_is_in_the_card_of_its_session(tmp_path: Path):
    """The newest session's, behind what was known before, once; how the session ended stays."""
    path = tmp_path / "run.json"
    write_slow(path, "no run was begun")
    assert not path.exists()
    for known in ((), ("known",)):
        write_card(path, replace(run_card("cpu", 1, {"run": 0}, "fp32"), slow=known))
    write_end(path, ValueError("over"))
    for said in ("in waves", "row by row", "in waves"):
        write_slow(path, said)
    card = json.loads(path.read_text())

    assert (card["slow"], card["resumed"][0]["slow"]) == ([], ["known", "in waves", "row by row"])
    assert card["resumed"][0]["ended"] == "ValueError: over"


def test_a_commit_is_read_with_its_dirt(tmp_path: Path):
    """Outside git and before the first commit there is none; a changed tracked file makes it dirty."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    assert commit_of(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit_of(tmp_path) is None
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    clean = commit_of(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "f").write_text("2")

    assert commit_of(tmp_path) == {"commit": clean["commit"], "dirty": True}
