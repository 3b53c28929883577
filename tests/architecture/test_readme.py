"""Every command in README.md works, because it is tried here; those of docs/ are read.

The programs, files, verbs, options and experiments of all of them must exist. The line above each block of
commands says whether that is all, as a comment that readers do not see:

    <!-- test: run -->     also executed by `make test-full`, from top to bottom, in a copy of the repository
    <!-- test: parse -->   not executed
"""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.forked import Forked, ended

import gnomon
from gnomon.cli.arguments import parser_of
from gnomon.cli.main import VERBS, main
from gnomon.config.reading import check_evaluation, check_names
from gnomon.core.errors import UserError

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


TOML = re.compile(r"^```toml\n(.*?)^```$", re.M | re.S)
ROW = json.dumps(dict.fromkeys(("prompt", "answer", "chosen"), "2+2=4") | {"rejected": "2+2=5"})
FILE = re.compile(r"[\w/.-]+\.(?:jsonl|json|py)\b")


def page_complaint(words: list[str]) -> str:
    """Return what is wrong with a `gnomon` command of a page, as far as it is known without torch."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if words[1] not in VERBS:
                return f"unknown verb {words[1]}"
            given = parser_of(words[1], None).parse_intermixed_args(words[2:])
            if words[1] in ("train", "plan", "compare") and given.experiment is not None:
                check_names(given.experiment, given.overrides, is_here=False)
            elif words[1] == "sft":
                check_names({"algorithm": "sft"}, [given.experiment, *given.overrides], verb="sft")
            elif words[1] == "evaluate":
                check_evaluation(given.overrides)
    except SystemExit:
        return said.getvalue()
    except UserError as error:
        return str(error)
    return ""


def test_commands_and_settings_of_all_pages_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Verbs, options, experiments and settings that docs/ shows, in commands and in TOML; files are made."""
    commands, tables, wrong = 0, 0, []
    monkeypatch.chdir(tmp_path)
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        shown = [*blocks(text), *(Block("", 0, table) for table in TOML.findall(text))]
        for name in FILE.findall("".join(block.script for block in shown)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("from any_names import *" if name.endswith(".py") else ROW)
        for words in (words for block in blocks(text) for words in block.commands if words[0] == "gnomon"):
            commands += 1
            wrong += [f"{page.name}: {shlex.join(words)}: {said}"] if (said := page_complaint(words)) else []
        for table in map(tomllib.loads, TOML.findall(text)):
            tables += 1
            try:
                whole = {"model": "tiny", "algorithm": "grpo", "task": "arithmetic", "steps": 1, **table}
                check_names(whole, [], is_here=False)
            except UserError as error:
                wrong.append(f"{page.name}: {table}: {error}")

    assert wrong == []
    assert commands > 30
    assert tables >= 10


def test_python_of_all_pages_parses_and_imports_what_exists():
    """Each block is a program, and what it takes from gnomon and from experiments/ is there."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(code, page.name)):
                match node:
                    case ast.ImportFrom(module=str(module)) if module.startswith(("gnomon", "experiments")):
                        found += [(importlib.import_module(module), name.name) for name in node.names]
                    case ast.Attribute(value=ast.Name(id="gnomon"), attr=name):
                        found.append((gnomon, name))

    assert [(module.__name__, name) for module, name in found if not hasattr(module, name)] == []
    assert len(found) > 20


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
