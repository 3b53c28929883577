"""Tensors in the shares of several processes: any rows of them, and nothing of what does not fit together."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gnomon.core.errors import CheckpointError
from gnomon.core.tensor_files import SHARE, stored, write_tensors
from gnomon.core.types import Loan, State
from gnomon.records.checkpoints import Checkpoints, load, read_states
from gnomon.records.manifest import write_manifest

WHOLE = {
    "a": torch.arange(21.0).view(7, 3), "b": torch.arange(7).bfloat16(), "c": torch.tensor(2.5), "d": torch.ones(2, 0)
}  # fmt: skip


def shares(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor | Loan]]:
    """Return what each of so many processes holds, as FSDP2 deals rows out; what has none is the first one's."""
    found: list[dict[str, Tensor | Loan]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        if not tensor.ndim:
            found[0][name] = tensor
            continue
        rows = -(-len(tensor) // count)
        for rank, part in enumerate(tensor.split(rows)):
            found[rank][name] = Loan(part, rank * rows)
    return found


def written(folder: Path, count: int) -> Path:
    """Return a folder with the shares of so many processes."""
    folder.mkdir(parents=True)
    for rank, tensors in enumerate(shares(WHOLE, count), start=1):
        write_tensors(folder / SHARE.format(rank), tensors)
    return folder


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_any_rows_are_read_from_the_shares_of_any_number(tmp_path: Path, count: int):
    """Also where some process has no row of a tensor; types, shapes and every bit."""
    found = stored(written(tmp_path / "learner", count))

    assert {name: (t.shape, t.dtype, t.nbytes) for name, t in found.items()} == {
        name: (t.shape, t.dtype, t.nbytes) for name, t in WHOLE.items()
    }
    assert all(torch.equal(tensor[...], WHOLE[name]) for name, tensor in found.items())
    for begin in range(8):
        for end in range(8):
            assert torch.equal(found["a"][begin:end], WHOLE["a"][begin:end])
    assert torch.equal(found["b"][-2:], WHOLE["b"][-2:])


class Boom:
    """A pickle that leaves a mark."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", SHARE.format(2), "more.safetensors"])
def test_a_pickle_among_the_shares_executes_nothing(tmp_path: Path, name: str):
    """Under the names that torch's pickled form has, and under ours, also where the manifest was written for it."""
    run, mark = tmp_path / "run", tmp_path / "mark"
    pickle.loads(pickle.dumps(Boom(mark)))
    mark.unlink()
    checkpoints = Checkpoints(run)
    path = checkpoints.save(1, {"learner": State(WHOLE)}, lambda folder: None)
    (path / "state" / "learner.safetensors").unlink()
    (written(path / "state" / "learner", 2) / name).write_bytes(pickle.dumps(Boom(mark)))

    with pytest.raises(CheckpointError, match="can be trusted"):
        checkpoints.newest()
    write_manifest(path, 1)
    with pytest.raises(CheckpointError, match=r"no share of a checkpoint|cannot be read"):
        load(path)

    assert not mark.exists()


def test_shares_that_make_no_whole_are_refused(tmp_path: Path):
    """One is missing, is another run's, is of other rows, or has a header that is none of ours."""
    folder = written(tmp_path / "a" / "learner", 3)
    (tmp_path / "a" / "learner.json").write_text("{}")
    middle, other = folder / SHARE.format(2), written(tmp_path / "b", 2) / SHARE.format(2)
    sound = middle.read_bytes()
    middle.unlink()
    spoiled = [None, other.read_bytes(), sound[:-3], b""]
    for told in ("{}", "[]", "5", json.dumps({"a": {"saved_offsets": [3, 1]}}), json.dumps({"a": 1}), "{"):
        save_file({"a": WHOLE["a"][3:6].clone()}, tmp_path / "x", metadata={"DCP_SHARDING_INFO": told})
        spoiled.append((tmp_path / "x").read_bytes())

    for content in spoiled:
        if content is not None:
            middle.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"do not fit together|cannot be read|shares are whole rows"):
            read_states(tmp_path / "a")
        middle.unlink(missing_ok=True)
    middle.write_bytes(sound)
    assert torch.equal(read_states(tmp_path / "a")["learner"].tensors["a"][...], WHOLE["a"])
    (folder / "link.safetensors").symlink_to(other)
    with pytest.raises(CheckpointError, match="is no share of a checkpoint"):
        read_states(tmp_path / "a")
