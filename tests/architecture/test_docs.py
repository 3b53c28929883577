"""What people read first stays short, and every link between pages leads to something."""

import re
import tomllib
from pathlib import Path

from tests.architecture.sources import ROOT, none_of

NAMES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#[^)\s]*)?\)")


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere, each with its line."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    links = [(number, link) for number, line in lines for link in LINK.findall(line)]
    return [f"{page.name}:{number}: {link}" for number, link in links if not (page.parent / link).exists()]


def test_the_unreleased_changes_are_at_most_800_words():
    """The changelog says what a user notices of the next version, in the three groups, in at most 800 words."""
    unreleased = re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1]

    assert unreleased.startswith("[Unreleased]")
    assert re.findall(r"(?m)^### (\w+)$", unreleased) == ["Added", "Changed", "Fixed"]
    assert len(unreleased.split()) <= 800, "leave internals out; facts that were measured belong in docs/log"


def test_the_readme_is_at_most_150_lines_with_25_bullets_and_one_figure():
    """The README says what gnomon does in at most 25 bullets; claims and their table are in docs/claims.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    bullets = text.partition("## What it does")[2].partition("\n## ")[0].count("\n- ")

    assert len(text.splitlines()) <= 150
    assert 10 <= bullets <= 25
    assert len(re.findall(r"!\[[^]]+\]\([^)]+\.svg\)", text)) == 1


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
    """A relative link of the README, the changelog, CONTRIBUTING or a page of docs names a file that exists."""
    none_of([link for page in PAGES for link in broken(page)], "name the file where it is now")


def test_the_version_is_the_same_everywhere():
    """pyproject.toml has the version; the citation repeats it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_what_a_developer_runs():
    """Every command of the workflow is a target of the Makefile."""
    commands = re.findall(r"^ +- run: make ([\w-]+)$", (ROOT / ".github/workflows/test.yml").read_text(), re.M)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)

    assert commands
    assert set(commands) <= set(targets)
