"""`gnomon completion SHELL`: the scripts complete what the parsers know."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gnomon.algorithms import NAMED
from gnomon.cli.completion import bash, every_verb, fish, zsh
from gnomon.cli.main import VERBS, main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { :; }
_gnomon
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "gnomon.bash"
    path.write_text(bash(every_verb()))
    return path


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    command = ["bash", "--norc", "-c", ASK, "ask", str(script), "gnomon", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tra"], {"train"}),
        (["re"], {"resume", "report", "reward-model", "rewards", "reproduce"}),
        (["train", "ti"], {"tiny"}),
        (["train", "tiny", "--run"], {"--run-dir"}),
        (["train", "tiny", "learner.optimizer.learning_r"], {"learner.optimizer.learning_rate="}),
        (["train", "tiny", "algorithm", "=", "dap"], {"dapo"}),
        (["train", "tiny", "algorithm", "="], set(NAMED)),
        (["train", "tiny", "steps", "=", "1"], set()),
        (["compare", "tiny", "--algorithms", "gsp"], {"gspo", "gspo-token"}),
        (["doctor", "--fail-on", ""], {"note", "warning", "severe"}),
        (["doctor", "--fail-on", "=", "sev"], {"severe"}),
        (["rewards", "num"], {"numeric"}),
        (["completion", "z"], {"zsh"}),
        (["train", "tiny", "--run-dir", ""], set()),
        (["no-such-verb", "x"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(script: Path, words: list[str], offered: set[str]):
    """Bash offers verbs, options, settings, and the names that an argument may have; nothing where a file goes."""
    assert set(completed(script, *words)) == offered


def test_every_option_of_every_verb_is_in_every_script():
    """The scripts are written from the parsers, so no option can be forgotten."""
    verbs = every_verb()

    assert [verb.name for verb in verbs] == list(VERBS)
    for text, prefix in ((bash(verbs), "--"), (zsh(verbs), "--"), (fish(verbs), "-l ")):
        for verb in verbs:
            assert verb.name in text
            assert [o.name for o in verb.options if prefix + o.name.removeprefix("--") not in text] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Where the shell is installed, it finds no mistake in the syntax of its script."""
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ran = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stderr) == (0, "")


def test_fish_completes(tmp_path: Path):
    """Where fish is installed, it offers verbs, names, settings and values of options."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    path = tmp_path / "gnomon.fish"
    path.write_text(fish(every_verb()))
    for line, offered in (
        ("gnomon tra", "train"),
        ("gnomon train quick", "quickstart"),
        ("gnomon train tiny algorithm=dap", "algorithm=dapo"),
        ("gnomon train tiny learner.optimizer.learning_r", "learner.optimizer.learning_rate="),
        ("gnomon doctor --fail-on s", "severe"),
    ):
        command = ["fish", "-N", "-c", f"source {path}; complete -C '{line}'"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)

        assert [each.split("\t")[0] for each in ran.stdout.splitlines()] == [offered]
