"""docs/dissect.md shows what the command prints."""

import json
import re
import shlex
from pathlib import Path

import pytest

from gnomon.analysis.dissect.verify import ABSOLUTE, GOLDENS, RELATIVE
from gnomon.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dissect.md").read_text()


def block(language: str) -> str:
    """Return the first fenced block of ``language``."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None
    return found[1]


def test_the_worked_example_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The page's batch and command give the page's output, line by line."""
    command, _, expected = block("console").partition("\n")
    monkeypatch.chdir(tmp_path)
    Path("batch.json").write_text(block("json"))
    code = main(shlex.split(command)[2:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    assert code == 0
    assert printed == expected.splitlines()


def test_the_numbers_named_in_the_json_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every key of the page's table is a key of the object."""
    path = tmp_path / "batch.json"
    path.write_text(block("json"))
    assert main(["dissect", str(path), "--algorithms", "p3o", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    of_the_object = PAGE.partition("## A worked")[2]
    named = set(re.findall(r"\| `(statistics\.)?([a-z_]+)` \|", of_the_object))
    found = row["algorithms"]["p3o"]

    assert [key for prefix, key in named if prefix and key not in found["statistics"]] == []
    assert {key for prefix, key in named if not prefix} == set(found) - {"statistics"} | {"cosine"}


def test_the_tolerance_and_the_number_of_cases_are_true():
    """What the page says of `--verify` is what it does."""
    assert f"to {RELATIVE:g} of the larger one plus {ABSOLUTE:g}" in PAGE
    assert len(GOLDENS) == 13
    assert "Thirteen reference cases" in PAGE
