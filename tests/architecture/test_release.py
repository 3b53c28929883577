"""What a release is made of: images, workflows and the script that tries the packages name what exists."""

import re
import subprocess
import tomllib

import pytest
from tests.architecture.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = ROOT / "tests" / "release.sh"
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def test_every_extra_that_is_pinned_is_tried():
    """The script installs and uses each extra but the trackers that send data elsewhere, vLLM, and those of a clone."""
    text = SCRIPT.read_text()
    (default,) = re.findall(r"^\[ \$# -gt 0 \] \|\| set -- (.*)$", text, re.M)
    used = re.findall(r"^\t([a-z-]+)\) echo ", text, re.M)
    asked_for = {"vllm", "wandb", "trackio", "mlflow", "swanlab"}
    wanted = set(PROJECT["optional-dependencies"]) - {"all", "dev", "docs"} - asked_for

    assert set(default.split()) == set(used) == wanted


def test_the_script_is_a_script():
    """A shell finds no mistake in its syntax."""
    subprocess.run(["sh", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_an_image_is_built_from_files_that_exist(image):
    """What a Dockerfile copies is in the repository and not left out by .dockerignore."""
    copied = [word for line in re.findall(r"^COPY (.*)$", image.read_text(), re.M) for word in line.split()[:-1]]
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)

    assert len(IMAGES) == 2
    assert copied
    assert [name for name in copied if not (ROOT / name).exists() or name not in kept] == []


@pytest.mark.parametrize("name", ["test", "release", "nightly"])
def test_a_workflow_runs_targets_that_exist(name: str):
    """Every `make` of a workflow is a target of the Makefile, those of its matrix too."""
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    commands = set(re.findall(r"^ +- run: make ([\w-]+)$", text, re.M))
    if "run: make ${{ matrix.target }}" in text:
        commands.update(re.findall(r"[\w-]+", re.findall(r"^ +target: \[(.*)\]$", text, re.M)[0]))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))

    assert commands
    assert commands <= targets


def test_every_night_runs_all_that_test_full_runs():
    """What no job runs is broken within days: the parts of `test-full` are the nightly jobs, `lint` is of each push."""
    (parts,) = re.findall(r"^test-full: (.*?) ##", (ROOT / "Makefile").read_text(), re.M)
    (jobs,) = re.findall(r"^ +target: \[(.*)\]$", (ROOT / ".github/workflows/nightly.yml").read_text(), re.M)

    assert {"lint", *re.findall(r"[\w-]+", jobs)} == set(parts.split())
