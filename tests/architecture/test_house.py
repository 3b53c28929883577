"""House rules that ruff does not know: names, docstrings, leftovers, and traces of one machine."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gnomon"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".cfg", ".yml", ".yaml", ""}

# Words that name nothing: each of them could be said of any code at all.
BANNED = {"old", "data", "info", "util", "utils", "manager", "helper", "helpers"}
BANNED |= {"process", "handle", "misc", "zscore"}

# Written so that this file does not match itself.
LEFTOVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")
MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|home|opt|Users)/\w|file:/[/]/|C:\\[U]sers")
REGISTRY = re.compile(r"pypi[.]org/simple|files[.]pythonhosted|[-]-(?:extra-)?index-url|huggingface[.]co/api")


def words(name: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, lowered."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and line of every class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def undocumented(tree: ast.Module) -> list[str]:
    """Return the public functions and classes at the top of a module that have no docstring."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    return [n.name for n in public if not ast.get_docstring(n)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_names_say_something(path: Path):
    """No module, class or function is named with a word that fits everything."""
    tree = ast.parse(path.read_text())
    named = [(path.stem, 1), *defined(tree)]

    assert [f"{path.name}:{line} {name}" for name, line in named if words(name) & BANNED] == []


def test_words_are_cut_at_underscores_and_capitals():
    """`subprocess` is one word and allowed; `DataLoader` and `old_logprobs` are two."""
    assert words("DataLoader") == {"data", "loader"}
    assert words("old_logprobs") == {"old", "logprobs"}
    assert words("subprocess") == {"subprocess"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_their_public_names_have_docstrings(path: Path):
    """Whatever can be imported by name says what it is."""
    tree = ast.parse(path.read_text())

    assert ast.get_docstring(tree), f"{path.name} does not say what it is"
    assert undocumented(tree) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_annotations_are_real(path: Path):
    """`from __future__ import annotations` is not used: annotations are read at run time."""
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]

    assert [n.lineno for n in imports if n.module == "__future__"] == []


def test_every_room_is_a_package():
    """Each folder of src has an `__init__.py`; import contracts and the wheel would not see it otherwise."""
    folders = {path.parent for path in SOURCES}

    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT / "tests")))
def test_tests_say_what_they_claim(path: Path):
    """A test is a plain function whose docstring is its claim."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [n for n in functions if n.name.startswith("test_")]

    assert [f"{path.name}:{n.lineno} {n.name}" for n in tests if not ast.get_docstring(n)] == []
    assert [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("Test")] == []


def test_nothing_is_left_to_do_and_nothing_names_a_machine(tracked: list[Path]):
    """No notes to ourselves, no path of one machine, no address of a package registry in any file."""
    found: list[str] = []
    for path in tracked:
        if path.suffix not in TEXT:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if any(pattern.search(line) for pattern in (LEFTOVER, MACHINE, REGISTRY)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")

    assert found == []
