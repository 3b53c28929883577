"""House rules that ruff does not know: names, docstrings, leftovers, and traces of one machine."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import (
    ROOT,
    SOURCES,
    TESTS,
    functions,
    none_of,
    parameters,
    parse,
    spot,
    words,
)

TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".cfg", ".yml", ".yaml", ""}

# Words that name nothing: each of them could be said of any code at all.
BANNED = {"old", "info", "util", "utils", "misc", "zscore"}

# Words of our own for what the field has a word for.
RETIRED = {
    "answerer", "apart", "arrival", "asker", "beside", "bridge", "brood", "bury", "careless", "caution", "census",
    "crew", "gang", "glance", "glimpse", "graver", "hire", "holder", "lanes", "laps", "lean", "lesson", "luck",
    "nursery", "obituary", "parcel", "partner", "quiet", "rewinding", "roster", "seat", "shelf", "staff", "stamp",
    "standing", "sweeper", "trunk", "unseen", "untracked", "unvalued", "valuing",
}  # fmt: skip

# Names of modules, classes and functions that had such a word in another sense than the field's.
RETIRED_NAMES = {
    "anchored", "deal_rows", "dismiss_team", "draw_key", "elsewhere", "lets_in", "lies_in_line",
    "may_write_out", "own_key", "say_whose_code", "shown_by", "staged", "take_back", "talk_by", "taught_rows",
    "telling_rows", "told_before_code", "walls_of", "weakened", "within_memory",
    "Asker", "Brood", "Caution", "Crew", "Gang", "Judging", "Labor", "Lesson", "Nursery", "Own", "Partner", "Practiced",
    "Seat", "Shelf", "Told", "Unmeasured", "Unpracticed", "Untracked", "Valuing", "assemble", "examination",
    "glimpse", "obituary", "restarting", "rewinding", "roster", "session", "staging", "stopping", "vllm_serve",
}  # fmt: skip

# Settings of experiments, which people have in their files.
SETTINGS = {"trunk", "frozen_trunk"}

# Written so that this file does not match itself.
LEFTOVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")
MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|home|opt|Users)/\w|file:/[/]/|C:\\[U]sers")
REGISTRY = re.compile(r"pypi[.]org/simple|files[.]pythonhosted|[-]-(?:extra-)?index-url|huggingface[.]co/api")

KINDS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def defined(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and line of a module and of every class and function in it."""
    yield path.stem, 1
    yield from ((n.name, n.lineno) for n in ast.walk(parse(path)) if isinstance(n, KINDS))


def bound(tree: ast.Module) -> dict[str, int]:
    """Return the parameters, variables and attributes that a file gives a value, each with its first line."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.setdefault(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.attr, node.lineno)
    return found


def undocumented(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the public functions and classes at the top of a module that have no docstring, with their lines."""
    public = [n for n in tree.body if isinstance(n, KINDS) and not n.name.startswith("_")]
    return [(n.name, n.lineno) for n in public if not ast.get_docstring(n)]


def test_names_say_something():
    """No module, class or function is named with a word that fits everything."""
    named = [(path, name, line) for path in SOURCES for name, line in defined(path)]
    found = [f"{spot(p, line)}: {name} has {w}" for p, name, line in named for w in sorted(words(name) & BANNED)]

    none_of(found, "say which: not old_logprobs but behavior_logprobs, not utils but what the functions do")


def test_words_are_cut_at_underscores_and_capitals():
    """`subprocess` is one word and allowed; `DataLoader` and `old_logprobs` are two."""
    assert words("DataLoader") == {"data", "loader"}
    assert words("old_logprobs") == {"old", "logprobs"}
    assert words("subprocess") == {"subprocess"}


def test_retired_words_do_not_come_back():
    """No module, class, function, parameter, variable or attribute has a word that the field does not know."""
    named = [(path, name, line) for path in SOURCES for name, line in (*defined(path), *bound(parse(path)).items())]
    found = [
        f"{spot(p, line)}: {name} has {w}"
        for p, name, line in named
        if name not in SETTINGS
        for w in sorted(words(name) & RETIRED)
    ]
    found += [f"{spot(p, line)}: {name}" for p in SOURCES for name, line in defined(p) if name in RETIRED_NAMES]

    none_of(found, "use the field's term; docs/glossary.md has it")


def test_every_binding_is_seen():
    """A parameter, a variable, a field, an attribute and a loop variable count; what is only read does not."""
    source = "class A:\n  field: int = 1\n  def f(self, given):\n    self.kept = local = read\n    [i for i in x]"

    assert set(bound(ast.parse(source))) == {"field", "self", "given", "kept", "local", "i"}


def test_public_classes_have_names_of_their_own():
    """No public class name means two things."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(spot(path, node.lineno))
    found = [f"{', '.join(where)}: {name}" for name, where in sorted(places.items()) if len(where) > 1]

    none_of(found, "say in the name what each of them is: ToolCall and PendingCall, not twice Call")


def test_modules_and_their_public_names_have_docstrings():
    """Whatever can be imported by name says what it is."""
    found = [spot(path) for path in SOURCES if not ast.get_docstring(parse(path))]
    found += [f"{spot(path, line)}: {name}" for path in SOURCES for name, line in undocumented(parse(path))]

    none_of(found, "write a docstring whose first line says what it is")


def entries(docstring: str, section: str) -> list[str]:
    """Return the names that stand before a colon in a section of a docstring."""
    found = re.search(rf"^{section}:\n((?: {{4}}.*\n?|\n)+)", docstring, re.MULTILINE)
    return re.findall(r"^ {4}(\S.*?):(?: |$)", found[1], re.MULTILINE) if found else []


def test_docstrings_name_arguments_and_errors_in_sections():
    """`Args` names parameters, `Raises` names exceptions, and neither stands in a sentence: editors read sections."""
    found = []
    for path in SOURCES:
        for node in (n for n in ast.walk(parse(path)) if isinstance(n, KINDS)):
            text = ast.get_docstring(node) or ""
            said = ["Raises: within a line"] if re.search(r"Raises: +\S", text) else []
            raised = (name for each in entries(text, "Raises") for name in each.split(", "))
            said += [f"Raises {name}" for name in raised if not re.fullmatch(r"_?[A-Z][\w.]*", name)]
            if not isinstance(node, ast.ClassDef):
                a = node.args
                known = {arg.arg for arg in (*parameters(node), *filter(None, (a.vararg, a.kwarg)))}
                named = (name for each in entries(text, "Args") for name in each.split(", "))
                said += [f"Args {name}" for name in named if name.lstrip("*") not in known]
            found += [f"{spot(path, node.lineno)}: {node.name}: {each}" for each in said]

    none_of(found, "write Google's sections: `Args:`, `Raises:`, and a line for each")


def test_no_sentence_of_a_docstring_breaks_into_a_deeper_line():
    """A formatter once left single words on lines of their own, four columns deeper, within forty sentences."""
    offenders = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                depths = [len(line) - len(line.lstrip()) if line.strip() else -1 for line in lines]
                offenders += [
                    f"{spot(path, getattr(node, 'lineno', 1))} {line.strip()}"
                    for number, line in enumerate(lines)
                    if depths[number - 1 : number + 2] == [0, 4, 0] and not re.search(r":$|^\S+: ", lines[number - 1])
                ]
    none_of(offenders, "fill the paragraph again")


def test_annotations_are_real():
    """`from __future__ import annotations` is not used: annotations are read at run time."""
    found = [
        spot(path, node.lineno)
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]

    none_of(found, "remove the import; quote the one annotation that needs it")


def test_nothing_that_a_cache_hands_out_can_be_changed():
    """One caller's change would be every later caller's value; mypy refuses to change a Mapping or a Sequence."""
    none_of(
        [
            f"{spot(path, function.lineno)} {function.name} -> {ast.unparse(function.returns)}"
            for path in SOURCES
            for function in functions(parse(path))
            if function.returns is not None
            and any(re.search(r"\b(lru_)?cache\b", ast.unparse(each)) for each in function.decorator_list)
            and re.match(r"(dict|list|set|bytearray)\b", ast.unparse(function.returns))
        ],
        "say Mapping, Sequence, frozenset or tuple; a caller who must change it takes a copy",
    )


def test_every_room_is_a_package():
    """Each folder of src has an `__init__.py`; import contracts and the wheel would not see it otherwise."""
    folders = sorted({path.parent for path in SOURCES})
    found = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()]

    none_of(found, "add an __init__.py with a docstring")


def test_tests_say_what_they_claim():
    """A test is a plain function whose docstring is its claim."""
    found = []
    for path in TESTS:
        tree = parse(path)
        tests = [n for n in functions(tree) if n.name.startswith("test_")]
        found += [f"{spot(path, n.lineno)}: {n.name} has no docstring" for n in tests if not ast.get_docstring(n)]
        classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("Test")]
        found += [f"{spot(path, n.lineno)}: {n.name} is a class of tests" for n in classes]

    none_of(found, "write the claim in one sentence; make methods plain functions")


def test_nothing_is_left_to_do_and_nothing_names_a_machine(tracked: list[Path]):
    """No notes to ourselves, no path of one machine, no address of a package registry in any file."""
    found: list[str] = []
    for path in tracked:
        if path.suffix not in TEXT:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if any(pattern.search(line) for pattern in (LEFTOVER, MACHINE, REGISTRY)):
                found.append(f"{spot(path, number)}: {line.strip()[:80]}")

    none_of(found, "do it or file it; name no path of a machine and no package registry")
