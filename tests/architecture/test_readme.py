"""Every command in README.md works, because it is tried here.

The programs, files, verbs, options and experiments of all of them must exist. The line above each block of
commands says whether that is all, as a comment that readers do not see:

    <!-- test: run -->     also executed by `make test-full`, from top to bottom, in a copy of the repository
    <!-- test: parse -->   not executed
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.forked import Forked, ended

from gnomon.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
COMMAND_LANGUAGES = {"bash", "console", "sh", "shell"}
BLOCK = re.compile(r"(?:^<!-- test: (?P<how>\w+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
# Programs that a README may tell people to type without our checking what they do.
TRUSTED = {"git", "cd", "pip", "export", "tensorboard", "less", "ls", "cat", "tail"}


@dataclass(frozen=True)
class Block:
    """One fenced block of commands and what its annotation asks for ("" when there is none)."""

    how: str
    line: int
    script: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command."""
        joined = self.script.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(text: str) -> list[Block]:
    """Return the blocks of commands; of a console session only what follows the `$ `."""
    found: list[Block] = []
    for match in BLOCK.finditer(text):
        language, script = match["language"], match["text"]
        if language not in COMMAND_LANGUAGES:
            continue
        if language == "console":
            script = "".join(f"{x[2:]}\n" for x in script.splitlines() if x.startswith("$ "))
        found.append(Block(match["how"] or "", text.count("\n", 0, match.start()) + 1, script))
    return found


def in_the_environment() -> dict[str, str]:
    """Return the environment variables under which `gnomon` and `python` are those of this interpreter."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def shell(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command and return what it said."""
    return subprocess.run(words, cwd=folder, env=in_the_environment(), capture_output=True, text=True, check=False)


def complaint(words: list[str]) -> str:
    """Return what is wrong with a command, seen without executing it, or "" when its parts all exist."""
    program, *arguments = [w for w in words if not re.match(r"[A-Z_]+=", w)] or ["export"]
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        ran = shell(["make", "--dry-run", *arguments], ROOT)
        return ran.stderr if ran.returncode else ""
    if program == "gnomon":
        return gnomon_complaint(arguments)
    if program.startswith("python"):
        files = [a for a in arguments if a.endswith(".py")]
        return "; ".join(f"no file {name}" for name in files if not (ROOT / name).is_file())
    return "" if program in TRUSTED else f"unknown program {program}"


def gnomon_complaint(arguments: list[str]) -> str:
    """Return what is wrong with a `gnomon` command: `plan` checks what `train` is told, help the rest."""
    verb, rest = arguments[0], arguments[1:]
    if verb.startswith("--"):
        return ""
    if verb in ("train", "plan"):
        planned = [a for i, a in enumerate(rest) if "--run-dir" not in (a, rest[i - 1] if i else "")]
        said = io.StringIO()  # in this process: a new one spends five seconds on imports
        with contextlib.chdir(ROOT), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(["plan", *planned])
        return said.getvalue() if code else ""
    ran = shell(["gnomon", verb, "--help"], ROOT)
    if ran.returncode:
        return ran.stderr or f"gnomon {verb} --help exits with {ran.returncode}"
    options = [a.split("=")[0] for a in rest if a.startswith("--")]
    known = re.findall(r"--[\w-]+", ran.stdout)
    return "; ".join(f"gnomon {verb} has no {o}" for o in options if o not in known)


def test_blocks_are_read_with_their_annotation():
    """Two blocks: of the console one only what is typed, of the other that nobody said how it is tested."""
    text = "<!-- test: run -->\n```console\n$ ls # all\nREADME.md\n```\n\n```bash\nmake \\\n  train\n```\n"
    first, second = blocks(text)

    assert (first.how, first.line, first.commands) == ("run", 1, [["ls"]])
    assert (second.how, second.line, second.commands) == ("", 7, [["make", "train"]])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("make no-such-target", "No rule to make target"),
        ("python examples/no_such_file.py", "no file examples/no_such_file.py"),
        ("curl -O x", "unknown program curl"),
        ("gnomon no-such-verb", "unknown verb"),
        ("gnomon train tyni steps=5", "'tiny'"),
        ("gnomon evaluate runs/first --sample 4", "has no --sample"),
    ],
)
def test_a_wrong_command_is_found(command: str, said: str):
    """A target, file, program, verb, experiment or option that does not exist is named."""
    assert said in complaint(shlex.split(command))


def test_every_block_says_how_it_is_tested():
    """No command in the README is left to chance."""
    known = {"run", "parse"}

    assert [f"README.md line {b.line}" for b in blocks(README.read_text()) if b.how not in known] == []


def test_what_commands_name_exists():
    """Each command names a program, file, verb, options and experiment that exist."""
    complaints = {shlex.join(words): complaint(words) for b in blocks(README.read_text()) for words in b.commands}

    assert {command: said for command, said in complaints.items() if said} == {}


@pytest.mark.timeout(3600)
def test_commands_work(tmp_path: Path, tracked: list[Path]):
    """The `run` blocks succeed, one after the other, in a copy of the repository."""
    for path in tracked:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    scripts = [block for block in blocks(README.read_text()) if block.how == "run"]
    for block in scripts:
        typed = [(words[0], words[1:]) for words in block.commands]
        if any(program != "gnomon" for program, _ in typed) or re.search(r"[|$<>;&*`]", block.script):
            ends = [shell(["bash", "-euo", "pipefail", "-c", block.script], tmp_path)]
        else:  # the program itself once, then forks of a process that has imported it
            own = [shell(["gnomon", *typed.pop(0)[1]], tmp_path)] if block is scripts[0] else []
            ends = [*own, *(ended(Forked(arguments, cwd=tmp_path)) for _, arguments in typed)]
        for ran in ends:
            said = f"{ran.args}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
            assert ran.returncode == 0, f"README.md line {block.line}:\n{block.script}\n{said}"


def test_the_readme_counts_verdicts_as_the_table_of_claims_does():
    """The README has word, headline, effect and scale of each claim as docs/claims.md does, and counts the words."""
    claims = (ROOT / "docs" / "claims.md").read_text()
    verdicts = re.findall(r"(?m)^\| \[.*?\]\(\S+/README\.md\) \(`\w+`\) \| ([a-z ]+) \|", claims)
    said = [f"{number} {word}" for number, word in re.findall(r"(\d+) (?:are )?\*([a-z ]+)\*", README.read_text())]

    assert len(verdicts) > 10
    listed = re.findall(r"(?m)^\| \[(\w+)\]\(experiments/\S+\) (\| .*)$", README.read_text())
    assert len(listed) == len(verdicts)
    assert [name for name, row in listed if f"(`{name}`) {row}" not in claims] == []
    assert sorted(said) == sorted(f"{verdicts.count(word)} {word}" for word in set(verdicts))
