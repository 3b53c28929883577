"""The notebooks run from top to bottom, each in a program of its own, as whoever opens one runs it."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = ["first_run", "own_reward", "own_algorithm", "reading_a_run", "comparing_algorithms"]
# Runs the code of a notebook in one namespace, and keeps each cell's source where tracebacks and inspect look for it.
# What a cell defines belongs to __main__, as in a kernel.
KERNEL = """
import json, linecache, sys
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), globals())
"""


def cells(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


def test_there_are_five_notebooks():
    """These notebooks, in the order in which they lead to each other."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NOTEBOOKS)
    for name, following in pairwise(NOTEBOOKS):
        assert f"({following}.ipynb)" in "".join(cells(name)[-1]["source"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_what_it_printed(name: str):
    """A cell has no output and no number, so that a notebook changes only when somebody changes it."""
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]

    assert len(code) >= 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells(name)}) == len(cells(name))


@pytest.mark.parametrize(
    "name", [NOTEBOOKS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS[1:])]
)
def test_a_notebook_runs(name: str, tmp_path: Path):
    """Every cell runs, in an empty folder and without a network."""
    command = [sys.executable, "-c", KERNEL, str(FOLDER / f"{name}.ipynb")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
