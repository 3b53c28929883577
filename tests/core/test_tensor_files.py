"""Tensors go into files as they are, or were when they were lent, and the library reads them."""

import threading
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gnomon.core.errors import CheckpointError
from gnomon.core.tensor_files import write_tensors
from gnomon.core.types import Loan

BLOCK = 1 << 22
SHARED_MEMORY = Path("/dev/shm")


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def read(path: Path) -> dict[str, Tensor]:
    """Return copies: what the library returns is the file itself, which another test may write over."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("count", [0, 1, BLOCK // 4 - 100, BLOCK // 4, BLOCK // 4 + 1, 3 * BLOCK // 4 + 7])
def test_tensors_of_any_size_come_back_and_the_hash_is_the_files(tmp_path: Path, count: int):
    """Around the size of a block, behind tensors that leave every following byte at an odd place."""
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "x": numbers(count, 1), "y": numbers(5, 2).bfloat16()}

    said = write_tensors(tmp_path / "x", tensors)

    found = read(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert said == xxhash.xxh3_128((tmp_path / "x").read_bytes()).hexdigest()


def test_every_tensor_lies_at_a_multiple_of_its_size(tmp_path: Path):
    """As the format asks: a reader may look at the file where it lies."""
    mixed = {"a": torch.ones(3, dtype=torch.uint8), "b": numbers(3, 0).double(), "c": numbers(3, 0).half()}
    write_tensors(tmp_path / "x", {**mixed, "d": torch.tensor(True), "e": numbers(1, 0)})

    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in load_file(tmp_path / "x").values())


def test_tensors_that_share_memory_or_lie_otherwise_are_written_whole(tmp_path: Path):
    """A view, a transposed and an expanded one, single numbers with strides of their own: each its own values."""
    whole = numbers(12, 3).reshape(3, 4)
    tensors = {"whole": whole, "row": whole[1], "turned": whole.T, "spread": whole[:, :1].expand(3, 5)}
    tensors |= {"one": torch.tensor(7).expand(1), "far": whole[1:2, 2:3], "none": whole[:0].T, "number": whole[2, 3]}
    write_tensors(tmp_path / "x", tensors)

    found = read(tmp_path / "x")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a file system in memory")
def test_a_file_system_without_direct_writing_gets_the_same_file(tmp_path: Path):
    """One in memory has no disk to write to past its cache; Linux before 6.6 says so when the file is opened."""
    tensors = {"x": numbers(BLOCK // 2 + 3, 4)}
    there = SHARED_MEMORY / f"gnomon-test-{tmp_path.name}"
    try:
        assert write_tensors(there, tensors) == write_tensors(tmp_path / "x", tensors)
        assert there.read_bytes() == (tmp_path / "x").read_bytes()
    finally:
        there.unlink()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path):
    """A new file, or an error."""
    (tmp_path / "x").write_text("mine")

    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {"x": torch.ones(1)})
    assert (tmp_path / "x").read_text() == "mine"


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path):
    """With the names of file and tensor."""
    with pytest.raises(CheckpointError, match=r"part has the tensor odd of torch\.complex128"):
        write_tensors(tmp_path / "part", {"odd": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize("is_recalled", [False, True])
def test_what_is_lent_is_written_as_it_was_lent(tmp_path: Path, is_recalled: bool):
    """The owner changes it after it was recalled, before it is read; without that nothing is copied."""
    tensor = numbers(BLOCK // 2, 5)
    before, loan = tensor.clone(), Loan(tensor)
    if is_recalled:
        loan.recall()
        tensor.zero_()
    else:
        with loan.reading() as lent:
            assert lent.data_ptr() == tensor.data_ptr()
    write_tensors(tmp_path / "x", {"x": loan, "y": torch.ones(1)})

    assert torch.equal(read(tmp_path / "x")["x"], before)


def test_owners_may_change_what_is_being_written(tmp_path: Path):
    """Twenty tensors lent, and overwritten one by one while they are written: the file holds none of it."""
    tensors = {f"t{n}": numbers(BLOCK // 3 + n, n) for n in range(20)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    loans = {name: Loan(tensor) for name, tensor in tensors.items()}
    began = threading.Event()

    def change() -> None:
        began.set()
        for name, loan in reversed(loans.items()):
            loan.recall()
            tensors[name].fill_(7)

    thread = threading.Thread(target=change)
    thread.start()
    began.wait()
    write_tensors(tmp_path / "x", loans)
    thread.join()

    assert all(torch.equal(tensor, before[name]) for name, tensor in read(tmp_path / "x").items())
    assert all(bool((tensor == 7).all()) for tensor in tensors.values())


def test_nothing_is_copied_once_it_was_written(tmp_path: Path):
    """A loan that ended is nobody's: recalling it costs no memory."""
    loan = Loan(numbers(10, 0))
    write_tensors(tmp_path / "x", {"x": loan})
    loan.recall()

    with safe_open(tmp_path / "x", framework="pt") as file:
        assert list(file.keys()) == ["x"]
    with pytest.raises(AssertionError, match="given back"), loan.reading():
        pass
