"""A user's file, run as a module."""

import sys
from pathlib import Path

import pytest

from gnomon.core.user_code import run_as_module


def test_a_dataclass_with_quoted_types_finds_its_module(tmp_path: Path):
    """The module stands under its name while it runs, which is where dataclasses look types up that are texts."""
    path = tmp_path / "json.py"
    source = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 3\n"
    path.write_text(source)

    assert run_as_module(path, "_test_user_file_json").P().x == 3
    assert sys.modules["json"].__file__ != str(path)


def test_a_file_that_fails_leaves_its_name_free(tmp_path: Path):
    """What it raised comes out as it is, and half a module does not stay behind for the next one who asks."""
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nraise SystemExit('no')")

    with pytest.raises(SystemExit, match="no"):
        run_as_module(path, "_test_user_file_broken")
    assert "_test_user_file_broken" not in sys.modules
