"""docs/planning.md has the tables that the command makes."""

import re
from pathlib import Path

import pytest
from experiments.capacity.pages import MODELS, cell, replaced, tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "planning.md"


def shown(name: str) -> str:
    """Return what stands between a table's marks in the page."""
    (found,) = re.findall(rf"<!-- planned: {name} -->\n(.*?)\n<!-- /planned -->", PAGE.read_text(), flags=re.S)
    return str(found)


def test_a_table_is_put_between_its_marks():
    """What stood there is gone; other tables and the marks stay."""
    text = "<!-- planned: a -->\nx\ny\n<!-- /planned -->\n<!-- planned: b -->\n<!-- /planned -->\n"

    assert replaced(text, "a", "| 1 |") == text.replace("x\ny\n", "| 1 |\n")


def test_one_machine_is_planned_as_the_page_says():
    """The first row of each table is what is estimated now for eight GPUs and 7 billion parameters."""
    now = tables((8,), MODELS[:1])

    for name in ("layout", "seconds"):
        assert shown(name).startswith(now[name]())


def test_what_does_not_fit_says_why():
    """235 billion parameters on eight GPUs: an engine alone would take them all."""
    one = cell(MODELS[2], 8)

    assert one.plan is None
    assert "one engine alone takes 8" in one.reason
    assert "one engine alone takes 8" in tables((8,), MODELS[2:])["limits"]()
    assert "one engine alone takes 8" in shown("limits")


@pytest.mark.slow
def test_the_page_has_the_tables_that_are_made_now():
    """All thirteen plans, to the character."""
    for name, make in tables().items():
        table = make()
        assert shown(name) == table.rstrip() or shown(name).rstrip() == table.rstrip()
