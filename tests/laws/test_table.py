"""The table of laws says where each is tested, and it is so."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_law_names_a_test_that_exists():
    """P1 to P33 stand in order, each with at least one test, and every test that is named can be found."""
    rows = re.findall(r"^\| (P\d+) \|.*::\w+` \|$", TABLE.split("## Where")[0], re.MULTILINE)
    missing = [f"{file}::{name}" for file, name in NAMED if name not in functions_of(ROOT / file)]

    assert rows == [f"P{number}" for number in range(1, 34)]
    assert missing == []


def test_every_test_that_names_a_law_is_in_the_table():
    """A test in this folder whose claim ends in (P...) is found from the table."""
    claims = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and re.search(r"\(P\d", ast.get_docstring(node) or ""):
                claims.append((f"tests/laws/{path.name}", node.name))

    assert [f"{file}::{name}" for file, name in claims if (file, name) not in NAMED] == []
    assert len(claims) > 30
