"""docs/glossary.md explains every term once, and every page names modules and classes that exist."""

import ast
import re
from pathlib import Path

from tests.architecture.sources import MODULES, PACKAGE, ROOT, none_of, parse

DOCS = ROOT / "docs"
GLOSSARY = DOCS / "glossary.md"
# Pages that tell what was, with the names of then.
HISTORY = {"log.md", "claims.md"}

CODE = re.compile(r"`([^`\n]+)`")
# "models/head.py", "head.py::test_name", "tests/faults/test_files.py"; a name with braces stands for several files.
FILE = re.compile(r"^(?:[\w.{},-]+/)*[\w{},]+\.py(?=$|::)")
DOTTED = re.compile(r"\bgnomon(?:\.\w+)+")
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
# What a new user stumbled over, each with what it was to say in docs/log/2026-11-27.md.
DIALECT = re.compile(
    r"\b(reckon(ed|ing)?|mend(s|ed|ing)?|step at hand|other company|round again|broken off|model away|need not be here|"
    r"shape alone|as grave as|once more stops|forbids fetching|leave that out|no folder here|are given up|hardly do|"
    r"true difference of|4 times in 5|worth no retry|no matter of seeds|by right|meets? by chance|compute as ever|"
    r"ends in words|showed just now|one word away|right and wrong:|not only to look like it|corrected for their number|"
    r"what became of its tokens)\b",
    re.IGNORECASE,
)


def rows() -> list[list[str]]:
    """Return the cells of every row of the glossary: term, meaning, where, known as, formerly."""
    lines = GLOSSARY.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "term"]


def names_of(path: Path) -> set[str]:
    """Return the names that a module defines at its top or imports there."""
    names: set[str] = set()
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__all__" in names:  # names that a package loads when they are first used
                names |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def pages() -> list[Path]:
    """Return the pages that tell what is."""
    return sorted(path for path in DOCS.glob("*.md") if path.name not in HISTORY)


def spread(name: str) -> list[str]:
    """Return "a/b.py" and "a/c.py" for "a/{b,c}.py"."""
    found = re.search(r"\{([^}]*)\}", name)
    if not found:
        return [name]
    return [name[: found.start()] + each + name[found.end() :] for each in found.group(1).split(",")]


def files_named(text: str) -> list[str]:
    """Return the Python files that a text names as code."""
    found = [match.group() for code in CODE.findall(text) if (match := FILE.match(code))]
    return [each for name in found for each in spread(name)]


def is_known(module: str) -> bool:
    """Whether "gnomon.a.b" is a module, a package, or a name in one; what a name itself has is not looked up."""
    if module in MODULES:
        return True
    parent, _, name = module.rpartition(".")
    if parent == "gnomon":
        return f'"{name}"' in (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return parent in MODULES and name in names_of(MODULES[parent])


def test_the_glossary_names_every_room():
    """Each room of the package has a section of the glossary, and no section names a room that is gone."""
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    sections = re.findall(r"^## `(\w+)`$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(sections) == sorted(rooms)


def test_a_term_is_explained_once():
    """No term has two meanings, and each has one."""
    terms = [row[0].lower() for row in rows()]
    found = sorted({f"{term} is there twice" for term in terms if terms.count(term) > 1})
    found += [f"{row[0]} has {len(row)} cells, or no meaning" for row in rows() if len(row) != 5 or not row[1]]

    none_of(found, "keep one row with one meaning; the columns are term, meaning, where, known as, formerly")


def test_the_glossary_points_at_what_exists():
    """Each module in the glossary's column `where` exists, and so does each class and function named after it."""
    found = []
    for term, _, where, *_ in rows():
        path, *names = CODE.findall(where)
        if not (PACKAGE / path).is_file():
            found.append(f"{term}: no src/gnomon/{path}")
        else:
            found += [f"{term}: no {name} in {path}" for name in names if name not in names_of(PACKAGE / path)]

    none_of(found, "write the module and the name as they are now")


def test_pages_name_files_that_exist():
    """Each Python file that a page names is one of the package, of the tests or of the repository."""
    places = (
        ROOT,
        PACKAGE,
        ROOT / "tests",
        PACKAGE / "analysis" / "planner",
        ROOT / "experiments",
        ROOT / "benchmarks",
    )
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    made_up = {"mine.py", "judge.py", "path.py", "tools.py", "own.py"}
    found = [
        f"{page.name}: {name}"
        for page in pages()
        for name in files_named(page.read_text(encoding="utf-8"))
        if name not in made_up and name not in known and not any((place / name).is_file() for place in places)
    ]

    none_of(found, "name the file as it is now")


def test_pages_name_modules_that_exist():
    """Each `gnomon.a.b` on a page is a module or a name in one."""
    found = [
        f"{page.name}: {name}"
        for page in pages()
        for name in DOTTED.findall(page.read_text(encoding="utf-8"))
        if not is_known(name)
    ]

    none_of(found, "name the module as it is now")


def test_links_to_the_repository_lead_somewhere():
    """Each relative link of a page out of docs/ leads to a file or folder."""
    found = [
        f"{page.name}: {target}"
        for page in DOCS.glob("*.md")
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (DOCS / target).exists()
    ]

    none_of(found, "correct the link")


def test_pages_and_messages_have_no_sentence_that_a_new_user_stumbled_over():
    """Words of no field, as a new user listed them, stand on no page, in no message and in no docstring."""
    sources = [path for ending in ("*.py", "*.toml", "*.j2") for path in PACKAGE.rglob(ending)]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in [*sources, *DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for match in DIALECT.finditer(path.read_text(encoding="utf-8"))
    ]

    none_of(found, "say it in the field's words, or as a sentence with a subject and a verb")


def test_a_name_with_braces_is_several_files():
    """`a/{b,c}.py` is two files, and code that is no Python file is none."""
    assert files_named("see `a/{b,c}.py`, `d.py::test_e`, `time/wait_seconds`") == ["a/b.py", "a/c.py", "d.py"]
