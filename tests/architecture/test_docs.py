"""What people read first stays short, and every link between pages leads to something."""

import ast
import builtins
import io
import keyword
import re
import tokenize
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from experiments.recipes.curves import pictures, recorded
from tests.architecture.sources import ROOT, none_of

from gnomon.core.svg import write_svg

NAMES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"(?m)^#{1,6} +(.+?) *#*$")
FENCE = re.compile(r"(?ms)^(`{3,}).*?^\1 *$")


CITED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)")
ELSEWHERE = {
    "Generator", "HuggingFaceStorageWriter", "broadcast_object_list", "permutation", "repeat_kv", "save_to_disk",
    "warmup_ratio",
}  # fmt: skip
"""Names of other libraries that docstrings and comments compare with."""


def names_of(tree: ast.AST) -> set[str]:
    """Return every name that a module defines, takes or reads."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for part in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, part, None)
            found |= set(name.split(".")) if isinstance(name, str) else set()
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", said).replace(" ", "-")
        found.add(next(s for s in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if s not in found))
    return found


def broken(page: Path) -> list[str]:
    """Return the links of a page, to files and to headings, that lead nowhere, each with its line."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    found = []
    for number, link, anchor in ((number, *match) for number, line in lines for match in LINK.findall(line)):
        target = page.parent / link if link else page
        is_there = target.exists()
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not is_there:
            found.append(f"{page.name}:{number}: {link}{'#' * bool(anchor)}{anchor}")
    return found


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("# One Word", "one-word"),
        ("## `code`, and more", "code-and-more"),
        ("## What [it](x.md) is", "what-it-is"),
        ("## Again\n## Again", "again-1"),
        ("## snake_case #", "snake_case"),
    ],
)
def test_anchors_are_those_of_headings(text: str, anchor: str):
    """A heading's anchor is its words in lower case with hyphens; the second of one name is numbered."""
    assert anchor in anchors(text)
    assert anchors("```\n# no heading\n```\n") == set()


def test_broken_links_are_found(tmp_path: Path):
    """A missing file, a missing heading of another page and one of the same page are named with their line."""
    (tmp_path / "there.md").write_text("# Here\n")
    page = tmp_path / "page.md"
    page.write_text("# Top\n[a](there.md#here) [b](#top) [c](there.md)\n[d](gone.md) [e](there.md#gone) [f](#gone)\n")

    assert broken(page) == ["page.md:3: gone.md", "page.md:3: there.md#gone", "page.md:3: #gone"]


def test_the_changelog_says_in_20_lines_what_the_first_version_is():
    """Its section has 20 bullets; what comes after it says what a user notices, in groups, in at most 800 words."""
    *later, first = re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1:]

    assert first.startswith("[0.1.0]")
    assert first.count("\n- ") == 20, "change a bullet; facts that were measured belong in docs/log"
    assert len(first.split()) <= 600
    for version in later:
        assert {*re.findall(r"(?m)^### (\w+)$", version)} <= {"Added", "Changed", "Fixed"}
        assert len(version.split()) <= 800, "leave internals out; facts that were measured belong in docs/log"


def test_the_readme_is_at_most_150_lines_with_25_bullets_and_two_figures():
    """The README says what gnomon does in at most 25 bullets, and shows a real run and a claim."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    bullets = text.partition("## What it does")[2].partition("\n## ")[0].count("\n- ")

    assert len(text.splitlines()) <= 150
    assert 10 <= bullets <= 25
    figures = re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", text)
    assert figures == ["docs/quickstart.svg", "experiments/spo_against_grpo/figure.svg"]


def test_pictures_of_runs_are_drawn_from_their_numbers(tmp_path: Path):
    """The README's picture and that of the recipes are what experiments/recipes/curves.py draws today."""
    for file, picture in pictures().items():
        write_svg(tmp_path / file.name, picture)

        assert file.read_text(encoding="utf-8") == (tmp_path / file.name).read_text(encoding="utf-8"), file.name


def test_the_readme_says_of_the_first_run_what_was_recorded():
    """Its table has the recorded shares of right answers and of right forms."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("answer", "format"):
        told = [one[name] for one in recorded(ROOT / "experiments" / "recipes" / "quickstart.json")["evaluations"]]
        cells = (f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in told)

        assert re.search(name + r" +" + " +".join(map(re.escape, cells)), text), name


def test_decisions_are_one_page_and_name_every_day():
    """docs/log/README.md has at most 900 words and links every page of a day."""
    folder = ROOT / "docs" / "log"
    page = (folder / "README.md").read_text(encoding="utf-8")
    days = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")

    assert len(page.split()) <= 900
    assert days
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d\.md", day) for day in days)
    none_of([day for day in days if f"({day})" not in page], "link the day in docs/log/README.md")


def test_links_between_pages_lead_somewhere():
    """A link of the README, the changelog, CONTRIBUTING or a page of docs names a file, and a heading, that exists."""
    none_of([link for page in PAGES for link in broken(page)], "name the file where it is now")


def test_the_version_is_the_same_everywhere():
    """pyproject.toml has the version; the citation repeats it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_names_in_docstrings_and_comments_are_those_of_the_code():
    """What stands in single backquotes is a name of today: a reader who searches for it finds it."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    known = {*dir(builtins), *keyword.kwlist, *ELSEWHERE}
    for path, tree in trees.items():
        known |= names_of(tree) | set(path.relative_to(ROOT).with_suffix("").parts)
    known |= {name for path in (ROOT / "tests").rglob("*.py") for name in path.with_suffix("").parts}

    def unknown(path: Path) -> list[str]:
        prose = [
            (node.lineno, node.value.value)
            for node in ast.walk(trees[path])
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        tokens = tokenize.generate_tokens(io.StringIO(files[path]).readline)
        prose += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        return [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, text in prose
            for name in CITED.findall(text)
            if not known.issuperset(name.split(".")) and find_spec(name.split(".")[0]) is None
        ]

    none_of([line for path in files for line in unknown(path)], "name what stands there today")
