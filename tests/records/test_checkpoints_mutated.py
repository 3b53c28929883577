"""Anything may happen to the files of a checkpoint: it is found, or it does no harm."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import CheckpointError
from gnomon.core.types import State
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig
from gnomon.models.tiny import tiny_model, tiny_tokenizer
from gnomon.records.checkpoints import Checkpoints, load

Rng = random.Random
BLOCK = 512


def same(left: dict[str, State], right: dict[str, State]) -> bool:
    """Whether two states are equal to the bit."""
    return left.keys() == right.keys() and all(
        left[name].values == right[name].values
        and left[name].tensors.keys() == right[name].tensors.keys()
        and all(torch.equal(tensor, right[name].tensors[key]) for key, tensor in left[name].tensors.items())
        for name in left
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of the steps 1 and 2, with the files that a run has."""
    learner, tokenizer = TorchLearner(tiny_model(), LearnerConfig(precision="fp32"), steps=2), tiny_tokenizer()

    def files(folder: Path) -> None:
        learner.write_model(folder)
        tokenizer.save(folder)

    checkpoints = Checkpoints(tmp_path_factory.mktemp("two"))
    for step in (1, 2):
        learner.advance()
        parts = {"learner": learner.state(), "stream": State(values={"next": step, "pending": [[3, 1, 0, 0]]})}
        checkpoints.save(step, parts, files, is_best=step == 1)
    return checkpoints.directory


def any_file(folder: Path, rng: Rng) -> Path:
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))


def flip(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))


def cut(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    os.truncate(path, rng.randrange(path.stat().st_size))


def grow(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def blank(folder: Path, rng: Rng) -> None:
    """Write zeros where something was, as a file system may after a power cut."""
    path = any_file(folder, rng)
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + BLOCK] = bytes(len(content[start : start + BLOCK]))
    path.write_bytes(bytes(content))


def remove(folder: Path, rng: Rng) -> None:
    any_file(folder, rng).unlink()


def swap(folder: Path, rng: Rng) -> None:
    left, right = any_file(folder, rng), any_file(folder, rng)
    content = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(content)


def take_from_before(folder: Path, rng: Rng) -> None:
    """Mix in a file of the checkpoint before."""
    path = any_file(folder, rng)
    shutil.copy2(folder.parent / "step-1" / path.relative_to(folder), path)


def edit(folder: Path, rng: Rng) -> None:
    """Change a digit somewhere in the manifest or in another JSON file."""
    path = rng.choice(sorted(folder.rglob("*.json")))
    text = path.read_text()
    digits = [place for place, letter in enumerate(text) if letter.isdigit()]
    if digits:
        place = rng.choice(digits)
        path.write_text(text[:place] + str((int(text[place]) + rng.randrange(1, 10)) % 10) + text[place + 1 :])


def nest(folder: Path, rng: Rng) -> None:
    """Replace a JSON file by brackets without end, or by a number of a hundred thousand digits."""
    rng.choice(sorted(folder.rglob("*.json"))).write_text(rng.choice(["[" * 200_000, "9" * 100_000, "null", "", "\0"]))


def add(folder: Path, rng: Rng) -> None:
    """Leave something that does not belong there; an empty folder changes nothing."""
    place = rng.choice([folder, folder / "state"])
    kind = rng.randrange(4)
    if kind == 0:
        (place / "extra.json").write_text("{}")
    elif kind == 1:
        (place / "empty").mkdir()
    elif kind == 2:
        (place / "link").symlink_to(folder.parent / "step-1")
    else:
        os.mkfifo(place / "pipe.json")


def replace_by_folder(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    path.unlink()
    path.mkdir()


def replace_by_link(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def rename(folder: Path, rng: Rng) -> None:
    path = any_file(folder, rng)
    path.rename(path.with_name(f"{path.name}.1"))


def lock(folder: Path, rng: Rng) -> None:
    any_file(folder, rng).chmod(0)


def renumber(folder: Path, rng: Rng) -> None:
    """Give the checkpoint of step 2 the name of another step."""
    folder.rename(folder.with_name(rng.choice(["step-3", "step-02", "step-00000000000000000000007"])))


def confuse(folder: Path, rng: Rng) -> None:
    """Say something else about the best, or leave files and folders beside the checkpoints."""
    beside = folder.parent
    kind = rng.randrange(4)
    if kind == 0:
        (beside / "best.json").write_text(rng.choice(["", "[]", '{"step": "x"}', '{"step": 1e999}', '{"step": -1}']))
    elif kind == 1:
        (beside / "step-9").write_text("no folder")
    elif kind == 2:
        (beside / "step-9").mkdir()
    else:
        (beside / ".tmp-9-abcd").mkdir()


MUTATIONS: list[Callable[[Path, Rng], None]] = [
    flip, cut, grow, blank, remove, swap, take_from_before, edit, nest, add, replace_by_folder, replace_by_link, rename,
    lock, renumber, confuse,
]  # fmt: skip


@pytest.mark.parametrize("count", [32, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_mutation_is_found_or_harmless(tmp_path: Path, two: Path, count: int):
    """The newest is used only if its states are equal to the bit; else the one before, with a line that says why.

    Nothing else happens: no other error, no start from nothing, and the run can save again.
    """
    whole = {step: load(two / f"step-{step}") for step in (1, 2)}
    used = {1: 0, 2: 0}
    for number in range(count):
        folder = tmp_path / "checkpoints"
        shutil.copytree(two, folder)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutate(folder / "step-2", random.Random(number))
        checkpoints = Checkpoints(folder, warn=lambda line: None)

        found = checkpoints.newest()
        assert found is not None, mutate.__name__
        assert same(load(found.path), whole[found.step]), mutate.__name__
        assert found.step == 2 or any("is damaged and is not used" in line for line in found.warnings), mutate.__name__
        checkpoints.best()
        checkpoints.save(4, {"stream": State(values={"next": 4})}, lambda folder: None)
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.step == 4
        used[found.step] += 1
        shutil.rmtree(folder)

    assert used[1] > used[2] > 0


@pytest.mark.parametrize("mutate", [flip, cut, remove, nest], ids=lambda mutate: mutate.__name__)
def test_a_single_damaged_checkpoint_is_no_fresh_start(tmp_path: Path, two: Path, mutate: Callable[[Path, Rng], None]):
    """Without another one the run ends with a message, and nothing begins again."""
    shutil.copytree(two / "step-2", tmp_path / "step-2")
    shutil.copytree(two / "step-1", tmp_path / "step-1")
    mutate(tmp_path / "step-2", random.Random(1))
    shutil.rmtree(tmp_path / "step-1")

    with pytest.raises(CheckpointError, match=r"can be trusted"):
        Checkpoints(tmp_path).newest()
