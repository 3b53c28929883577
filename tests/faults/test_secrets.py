"""Secrets stay where they are: none of those planted is in anything that a run writes or prints."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.redaction import for_people, without_secrets
from gnomon.engines.vllm.client import check_address
from gnomon.tasks.environment import EnvironmentConfig

NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "GNOMON_ENGINE_KEY", "OPENAI_API_KEY", "JUDGE_KEY", "AWS_SECRET_ACCESS_KEY",
    "PGPASSWORD", "SLACK_WEBHOOK_URL", "WEIRD_TOKEN", "SERVICE_CREDENTIALS",
)  # fmt: skip
SECRETS = {name: f"s3cr3t-{name.lower()}-0123456789" for name in NAMES}
SECRETS["SERVICE_CREDENTIALS"] = 's3cr3t "quoted" \\ and 0123456789'
# Of several lines, as keys are.
SECRETS["WEIRD_TOKEN"] = (
    "-----BEGIN KEY-----\nczNjcjN0bW9yZQ0123456789/+abc\nZW5kb2ZpdA0123456789==\n-----END KEY-----\n"
)
# What is no variable: in the user's own file, and in a table that is none of gnomon's.
IN_CODE, IN_TOML = "hf_" + "planted0in0code0" * 2, "sk-" + "planted0in0toml0" * 2
REWARD = """
import base64
import os
key = {in_code!r}

def score(prompt, completion, **more):
    number = sum(map(ord, completion)) % 9
    seen = [os.environ.get(name) for name in {names!r}]
    if number == 0:
        raise ValueError("the judge refused " + str(seen) + key)
    if number == 1:
        print(seen, key)
        return float("nan")
    if number == 2:
        return str(seen)
    if number == 3:
        raise ValueError(base64.b64encode(os.environ["WEIRD_TOKEN"].encode()).decode())
    if number == 4:
        return seen[number // 2]
    if number == 5:
        raise ValueError(os.environ["WEIRD_TOKEN"])
    return 0.1 * number
"""


def found_in(folder: Path, *texts: str) -> list[str]:
    """Return which planted secrets are in a file under ``folder`` or in a text, in any form that they could have."""
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()] + [t.encode() for t in texts]
    forms = {v: {v.encode(), json.dumps(v)[1:-1].encode(), repr(v)[1:-1].encode()} for v in SECRETS.values()}
    forms |= {v: {v.encode()} for v in (IN_CODE, IN_TOML)}
    for value in SECRETS.values():
        forms[value] |= {part.encode() for part in value.split("\n") if len(part) >= 20}
        forms[value] |= {" ".join(value.split()).encode(), base64.b64encode(value.encode())[:-4]}
    return [value for value, ways in forms.items() if any(way in content for way in ways for content in contents)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a reward that tells what it knows, in an environment full of secrets."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "judge.py").write_text(REWARD.format(names=NAMES, in_code=IN_CODE))
    (folder / "bad.toml").write_text(f'model = "tiny"\nalgorithm = "grpo"\n[wandb]\napi_key = "{IN_TOML}"\n')
    monkeypatch.chdir(folder)
    return folder


TINY = [
    "train", RANDOM, "steps=2", "task.size=20", "rollouts_per_step=16", "held_out.size=2", "grading.workers=1",
    "rewards=[{kind='function', function='judge.py:score'}]", f"grading.environment={json.dumps(list(NAMES))}",
]  # fmt: skip
REFUSED = [
    ["train", "bad.toml"],
    ["train", RANDOM, f"engine.max_concurrent='{IN_TOML}'"],
    ["train", RANDOM, f"model=http://me:{SECRETS['HF_TOKEN']}@host/model"],
]


def check_nothing_told(work: Path, capsys: Any, runs: list[tuple[list[str], int]]) -> None:
    """Run verbs and look at all that they wrote and printed."""
    codes = [main(verb) for verb, _ in runs]
    said = capsys.readouterr()

    assert codes == [code for _, code in runs], said.err
    assert "runs your code: reward judge.py:score" in said.err
    records = "".join(path.read_text() for path in (work / "out").rglob("*.jsonl"))
    assert "the judge refused" in records
    assert "[JUDGE_KEY]" in records
    assert found_in(work / "out", said.out, said.err) == []
    # They are found where they were planted, so that looking for them can fail.
    assert set(found_in(work)) == {IN_CODE, IN_TOML}


def test_twelve_planted_secrets_are_in_nothing_that_a_run_leaves(work: Path, capsys: Any):
    """Ten variables, which a reward reads and tells in errors, output and results; one in its code, one in TOML."""
    first = [*TINY, "grading.max_error_fraction=0.99", "records.batches=true", "--run-dir", "out/first"]

    check_nothing_told(work, capsys, [(first, 0), *((verb, 2) for verb in REFUSED)])


@pytest.mark.slow
def test_nor_in_what_failing_resumed_and_evaluated_runs_leave(work: Path, capsys: Any):
    """The same, past the error budget, resumed, and evaluated."""
    first = [*TINY, "grading.max_error_fraction=0.99", "--run-dir", "out/first"]
    failing = [*TINY, "grading.max_error_fraction=0", "--run-dir", "out/second"]

    check_nothing_told(
        work, capsys, [(first, 0), (failing, 1), (["resume", "out/first"], 0), (["evaluate", "out/first"], 0)]
    )


def test_an_error_that_nobody_foresaw_is_shown_without_secrets(tmp_path: Path):
    """Its traceback, which is worth an issue for everybody to read."""
    code = "import os, gnomon.cli.main as m\nm._run = lambda *a: 1 / {os.environ['HF_TOKEN']: 0}['x']\nm.main()"
    environment = {**os.environ, **SECRETS, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", code, "train", "x"], capture_output=True, text=True, env=environment, check=False
    )

    assert shown.returncode == 1
    assert "KeyError: 'x'" in shown.stderr
    code = code.replace("['x']", "[os.environ['HF_TOKEN'] + '!']")
    shown = subprocess.run(
        [sys.executable, "-c", code, "train", "x"], capture_output=True, text=True, env=environment, check=False
    )
    assert "KeyError: '[HF_TOKEN]!'" in shown.stderr
    assert found_in(tmp_path, shown.stdout, shown.stderr) == []


@pytest.mark.parametrize(
    "text",
    [
        "http://me:pass@host/v1", "hf_abcdefghijklmnopqrstuvwxyz", "sk-proj-abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789", "xoxb-1234567890-abcdef", "glpat-abcdefghijklmnopqrst",
    ],
)  # fmt: skip
def test_what_looks_like_a_key_is_not_shown(text: str):
    """Provider's forms and passwords in addresses, inside any message."""
    shown = for_people(f"refused ({text}), try again")

    assert text not in shown
    assert shown.startswith("refused (")
    assert shown.endswith("), try again")


@pytest.mark.parametrize(
    "text", ["step 3/10  reward 0.25", "sha256 " + "0a" * 32, "http://127.0.0.1:8777", "task-12", "skip-this-one"]
)
def test_ordinary_messages_are_left_alone(text: str):
    """Hashes, addresses and names are no secrets."""
    assert for_people(text) == text


def test_short_values_and_other_names_are_no_secrets():
    """A value of seven characters would be found everywhere; a name must have the word whole."""
    environment = {"API_KEY": "1234567", "TOKENIZERS_PARALLELISM": "parallelism", "MONKEY": "banana-banana"}

    assert without_secrets("1234567 parallelism banana-banana", environment) == "1234567 parallelism banana-banana"


def test_the_longer_of_two_secrets_goes_first():
    """One that begins with another leaves no rest."""
    assert without_secrets("abcdefg8-ijkl", {"A_KEY": "abcdefg8", "B_KEY": "abcdefg8-ijkl"}) == "[B_KEY]"


def test_a_secret_in_an_experiment_is_refused(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """What stands in the experiment is written down, so keys are passed as variables; the value is not repeated."""
    with pytest.raises(ConfigError, match=r"settings\.judge_api_key would be written") as raised:
        EnvironmentConfig(use="x.py:X", settings={"judge_api_key": "planted-planted"})
    assert "planted-planted" not in str(raised.value)
    monkeypatch.setenv("GNOMON_ENGINE_KEY", "k")
    with pytest.raises(ConfigError, match="so the key does not belong there"):
        check_address("http://me:planted-planted@127.0.0.1:8777")


def test_a_model_s_own_code_is_printed_and_recorded(tmp_path: Path, capsys: Any):
    """Whoever trusts a model's code is told so at start, and the card names the model; by default it names none."""
    tiny = ["steps=0", "task.size=20", "held_out.size=2", "rollouts_per_step=8"]
    for name, trusted in (("no", "false"), ("yes", "true")):
        run = tmp_path / name
        assert main(["train", RANDOM, *tiny, f"trust_remote_code={trusted}", "--run-dir", str(run)]) == 0
        card = json.loads((run / "run.json").read_text())
        assert card["trusted_models"] == ({"tiny": ""} if trusted == "true" else {})
        assert ("the own code of the model tiny may run" in capsys.readouterr().err) == (trusted == "true")
    assert load(RANDOM).experiment.trust_remote_code is False


# Keeps what a person had been shown by the time that it was imported first.
NOSY = """
import pathlib
try:
    with open({seen!r}, "x") as seen:
        seen.write(pathlib.Path({shown!r}).read_text())
except FileExistsError:
    pass
"""
SCORE = "def score(completion, **more):\n    return 1.0\n"
SMALL = ["tiny", "steps=0", "task.size=20", "held_out.size=2", "rollouts_per_step=8", "grading.workers=1"]


@pytest.fixture
def nosy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs a verb, and returns what was shown before the user's file was imported."""
    seen, shown = tmp_path / "seen", tmp_path / "shown"
    for name, ours in (("nosy", SCORE), ("own", "from gnomon.algorithms import GRPO as OWN\n")):
        (tmp_path / f"{name}.py").write_text(NOSY.format(seen=str(seen), shown=str(shown)) + ours)

    def run(*verb: str) -> str:
        seen.unlink(missing_ok=True)
        with shown.open("w", buffering=1) as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            assert main(list(verb)) == 0
        return seen.read_text()

    return run


def test_own_code_is_named_before_any_of_it_runs(nosy: Callable[..., str], tmp_path: Path):
    """The line is on standard error before the reward's module is imported for the first time; so with every verb."""
    named, run = f"{tmp_path}/nosy.py:score", str(tmp_path / "run")
    small = [*SMALL, f"rewards=[{{kind='function', function='{named}'}}]"]

    for verb in (["plan", *small], ["train", *small, "--run-dir", run], ["evaluate", run]):
        assert f"runs your code: reward {named}\n" in nosy(*verb), verb
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / ".saved").unlink(missing_ok=True)
    assert f"runs your code: reward {named}\n" in nosy("resume", run)


def test_an_algorithm_of_ones_own_is_named_before_it_runs(nosy: Callable[..., str], tmp_path: Path):
    """A file that an experiment names for its algorithm is said before its first line is run."""
    named = f"{tmp_path}/own.py:OWN"

    assert f"runs your code: {named}\n" in nosy("plan", *SMALL, f"algorithm={named}")


def test_own_pieces_tools_and_environments_are_named_at_start(tmp_path: Path, capsys: Any):
    """Whatever of the user's runs is listed before it does, and in the card."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, replace\nfrom gnomon.algorithms import GRPO\n"
        "from gnomon.algorithms.loss_aggregation import TokenMean\n"
        "@dataclass(frozen=True)\nclass Mine(TokenMean):\n    pass\n"
        "OWN = replace(GRPO, name='own', aggregate=Mine())\n"
    )
    tiny = ["steps=0", "task.size=20", "held_out.size=2", "rollouts_per_step=8"]
    own = f"algorithm={tmp_path}/mine.py:OWN"

    assert main(["train", RANDOM, *tiny, own, "--run-dir", str(tmp_path / "run")]) == 0

    said = capsys.readouterr().err
    assert f"the algorithm is your code, which was run: {tmp_path}/mine.py:OWN" in said
    assert f"runs your code: piece {tmp_path}/mine.py:Mine" in said
    card = json.loads((tmp_path / "run" / "run.json").read_text())
    assert card["foreign_code"] == [f"piece {tmp_path}/mine.py:Mine"]
