"""What is no part of the wheel, and how `gnomon` says so."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gnomon.cli import clone
from gnomon.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_the_package_alone():
    """Neither benchmarks nor experiments are in it, and nothing is put in from elsewhere."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert wheel == {"packages": ["src/gnomon"]}


@pytest.mark.parametrize(("verb", "folder"), [("bench", "benchmarks"), ("reproduce", "experiments")])
def test_a_verb_of_a_clone_says_outside_of_one_that_it_needs_one(tmp_path: Path, verb: str, folder: str):
    """A package that lies elsewhere ends with exit code 2 and what to type."""
    code = (
        f"import gnomon, sys; gnomon.__file__ = {str(tmp_path / 'a' / 'b' / 'gnomon' / '__init__.py')!r}\n"
        f"from gnomon.cli.main import main; sys.exit(main([{verb!r}, *{['--list'] if verb == 'reproduce' else []!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)

    assert ran.returncode == 2
    assert f"this needs a clone of the repository: {folder}/ is no part of the installed package" in ran.stderr


def test_in_a_clone_the_folder_can_be_imported():
    """Nothing is refused, and the root of the clone is where Python looks."""
    clone.enter_clone("bench", "benchmarks")

    assert str(ROOT) in sys.path
    with pytest.raises(ConfigError, match="nowhere/ is no part"):
        clone.enter_clone("bench", "nowhere")
