"""Weights on their way to engines elsewhere: what changed, whose share it is, and the same bits at the other end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.types import Snapshot
from gnomon.models.transfer.fingerprint import Fingerprint, expected, fingerprint, fingerprints
from gnomon.models.transfer.remote_weights import changed, from_bytes, sent, share, to_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


@given(sizes=st.lists(st.integers(0, 9), max_size=20), ranks=st.integers(1, 4), piece=st.integers(1, 40))
def test_ranks_share_all_tensors_and_none_twice(sizes: list[int], ranks: int, piece: int):
    """Every rank reads all of them, and together they yield each once, in its own rank's order."""
    named = [(str(number), torch.zeros(size)) for number, size in enumerate(sizes)]
    read: list[int] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for pair in named:
            read.append(1)
            yield pair

    shares = [[name for name, _ in share(counted(), rank, ranks, piece)] for rank in range(ranks)]

    assert sorted(name for each in shares for name in each) == sorted(name for name, _ in named)
    assert all(each == sorted(each, key=int) for each in shares)
    assert len(read) == ranks * len(named)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7,)], ids=str)
def test_a_tensor_is_the_same_bits_after_it_was_bytes(dtype: torch.dtype, shape: tuple[int, ...]):
    """Of every type and shape, also where the tensor is a transposed view, and nothing is copied on the way back."""
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    array = to_bytes(tensor.T if tensor.ndim == 2 else tensor)
    array.flags.writeable = False
    back = from_bytes(array, fingerprint(tensor.T if tensor.ndim == 2 else tensor))

    assert torch.equal(back, tensor.T if tensor.ndim == 2 else tensor)
    assert back.dtype == dtype
    assert tensor.numel() == 0 or back.data_ptr() == array.ctypes.data


def test_only_what_changed_is_told_to_have_changed():
    """One bit of one tensor, a new one, and one of another type; not what has the same bits in other memory."""
    first = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}
    known = fingerprints(first.items())
    second = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4).double(), "d": torch.ones(1)}
    second["b"][2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))

    assert [name for name, _, _, is_new in changed(second.items(), known) if is_new] == ["b", "c", "d"]
    assert {name: print_ for name, _, print_, _ in changed(second.items(), known)} == fingerprints(second.items())


@dataclass(frozen=True)
class Shelf:
    """Weights that are told by their fingerprints; reading them is an error."""

    named: Mapping[str, Tensor]

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        return expected(self.named.items(), held)


def test_what_was_sent_is_told_without_reading_it_here():
    """Of a snapshot that lies elsewhere its keeper is asked, in the precision of the engine; another one is read."""
    named = {"a": torch.full((3,), 1.001), "b": torch.zeros(2)}
    held = fingerprints((name, tensor.bfloat16()) for name, tensor in named.items())
    read = Snapshot(1, lambda: iter(named.items()))

    def unreadable() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the weights were brought here")

    assert sent(Snapshot(1, unreadable, lambda: Shelf(named)), held) == sent(read, held) == held
