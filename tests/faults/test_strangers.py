"""A run directory of somebody else: looking at it, and evaluating it, runs nothing that it names."""

import re
import shutil
from pathlib import Path

import pytest

from gnomon.cli.main import main
from gnomon.records.ownership import TRUST, named_code
from gnomon.training.python_api import train

EVIL = """
from dataclasses import dataclass
open({marker!r}, "w").write("ran")
@dataclass(frozen=True)
class X:
    pass
def score(prompt, completion, **columns):
    return 1.0
"""
FORMS = {
    "plain": 'aggregate = "{evil}:X"',
    "table": 'aggregate = {{piece = "{evil}:X"}}',
    "advantage": 'advantage = "{evil}:X"',
    "nested": 'surrogate = {{piece = "ClippedSurrogate", trust = "{evil}:X"}}',
    "list": 'regularizers = ["{evil}:X"]',
    "list of tables": 'regularizers = [{{piece = "{evil}:X"}}]',
    "list by place": 'regularizers = {{0 = "{evil}:X"}}',
    "preset": 'preset = "{evil}:X"',
    "dotted": 'surrogate.trust = "{evil}:X"',
    "dotted piece": 'surrogate.trust.piece = "{evil}:X"',
    "module": 'aggregate = "evil:X"',
    "keep": 'keep = "{evil}:X"',
    "sampler": 'sampler = "{evil}:X"',
    "tracker": 'tracker = "{evil}:X"',
    "correction": 'correction = "{evil}:X"',
}
REWARDS = [
    'rewards = [{kind = "function", function = "evil.py:score"}]',
    'rewards = ["evil.py:score"]',
    "trust_remote_code = true",
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this user's that names no code."""
    place = tmp_path_factory.mktemp("begun") / "run"
    train("tiny", run_dir=place, steps=1, rollouts_per_step=16)
    return place


@pytest.fixture
def theirs(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with a file of a stranger's in it and beside it."""
    shutil.copytree(begun, tmp_path / "r")
    for folder in (tmp_path, tmp_path / "r"):
        (folder / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "r"


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_piece_is_run(form: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """report, watch, doctor, evaluate and compare: each ends, and the file has not run."""
    line = FORMS[form].format(evil=theirs / "evil.py")
    text = (theirs / "experiment.toml").read_text()
    text = re.sub(r"(?ms)^\[algorithm(\.[^\]]*)?\]\n.*?(?=^\[(?!algorithm)|\Z)", "", text)
    preset = "" if form == "preset" else 'preset = "grpo"\n'
    (theirs / "experiment.toml").write_text(f"{text}\n[algorithm]\n{preset}{line}\n")
    looked = [main([*words, str(theirs)]) for words in (["report"], ["doctor"], ["watch", "--once"])]
    evaluated = main(["evaluate", str(theirs)])
    said = capsys.readouterr().err
    compared = main(["compare", str(theirs / "experiment.toml"), "--algorithms", "grpo,spo", "--budget", "10"])

    assert not (tmp_path / "ran").exists()
    assert all(code in (0, 1, 2) for code in looked)
    assert (evaluated, compared) == (2, 2)
    assert "was not begun by this user on this machine, and its experiment.toml names code: piece" in said
    assert "Traceback" not in said + capsys.readouterr().err


@pytest.mark.parametrize("line", REWARDS)
def test_neither_is_a_reward_nor_a_model_s_own_code(line: str, theirs: Path, tmp_path: Path):
    """What evaluating needs is refused where the run is not this user's."""
    kept = (theirs / "experiment.toml").read_text()
    kept = re.sub(r"(?m)^(rewards|trust_remote_code) = .*\n", "", kept)
    kept = re.sub(r"(?ms)^\[\[rewards\]\]\n.*?(?=^\[)", "", kept)
    (theirs / "experiment.toml").write_text(f"{line}\n{kept}")

    assert main(["evaluate", str(theirs)]) == 2
    assert not (tmp_path / "ran").exists()


ELSEWHERE = {
    "interpreter": '[engine]\nkind = "vllm"\nserver = "start"\npython = "{evil}"\n',
    "cluster's interpreter": '[engine]\nkind = "vllm"\npython = "{evil}"\n[cluster]\nkind = "ray"\n',
    "server": '[engine]\nkind = "vllm"\nserver = "http://127.0.0.1:9"\n',
    "cluster": '[cluster]\nkind = "ray"\naddress = "ray://127.0.0.1:1"\n',
    "cluster by name": 'cluster = "ray://127.0.0.1:1"\n',
}


@pytest.mark.parametrize("form", ELSEWHERE)
def test_no_interpreter_server_or_cluster_of_theirs_is_used(
    form: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """evaluate and compare name what would run code, and start and reach nothing."""
    evil = tmp_path / "python"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    evil.chmod(0o755)
    kept = (theirs / "experiment.toml").read_text()
    kept = re.sub(r"(?ms)^\[(engine|cluster)\]\n.*?(?=^\[|\Z)", "", kept)
    lines = ELSEWHERE[form].format(evil=evil)
    text = f"{lines}\n{kept}" if not lines.startswith("[") else f"{kept}\n{lines}"
    (theirs / "experiment.toml").write_text(text)
    compared = ["--algorithms", "grpo,spo", "--budget", "10", "--out", str(tmp_path / "out")]

    assert main(["evaluate", str(theirs)]) == 2
    assert main(["compare", str(theirs / "experiment.toml"), *compared]) == 2
    assert capsys.readouterr().err.count("was not begun by this user on this machine") == 2
    assert not (tmp_path / "ran").exists()


def test_one_s_own_run_is_evaluated_with_its_own_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As before; under another user's key it is a stranger's, unless that user says that it is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(prompt, completion, **columns):\n    return len(completion) / 100\n")
    (tmp_path / "t.jsonl").write_text("".join(f'{{"prompt": "q {n}", "answer": "1"}}\n' for n in range(20)))
    settings = ["task=t.jsonl", "rewards=[{kind='function', function='mine.py:score'}]", "held_out.size=3"]
    settings += ["held_out.fraction=0.3", "steps=1", "rollouts_per_step=16", "checkpoints.every=1"]
    assert main(["train", "tiny", *settings, "--run-dir", "run"]) == 0
    assert main(["evaluate", "run"]) == 0
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "another"))
    capsys.readouterr()

    assert main(["evaluate", "run"]) == 2
    assert "mine.py:score\nRead that code first" in capsys.readouterr().err
    monkeypatch.setenv(TRUST, "1")
    assert main(["evaluate", "run"]) == 0


def test_texts_that_only_look_like_code_name_none():
    """Patterns, prompts and paths hold colons too."""
    plain = {"model": "a:b", "system": "say: x", "rewards": [{"kind": "format", "pattern": "a:b"}], "algorithm": "grpo"}

    assert named_code(plain) == ()
