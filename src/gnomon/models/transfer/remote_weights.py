"""Weights that lie where others fetch them: what changed since they were last put there, who puts what, and bytes."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.core.types import Adapted, Snapshot
from gnomon.models.transfer.fingerprint import Fingerprint, expected, fingerprint

Bytes = NDArray[np.uint8]
Weight = TypeVar("Weight", bound=Tensor | Adapted)
PIECE_BYTES = 128 << 20
"""Tensors are put together until they are so large, and one that is larger goes alone."""


class Stored(Protocol):
    """What `Snapshot.stored` returns. It is small: tensors are fetched only when they are read."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, which are read-only."""

    def expected(self, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
        """Return what `fingerprint.expected` returns of them, reading none but those that an engine casts."""


def sent(snapshot: Snapshot, held: Mapping[str, Fingerprint]) -> Mapping[str, Fingerprint]:
    """Return name to fingerprint of what a snapshot sends, each in the precision in which an engine ``held`` it."""
    if snapshot.stored is None:
        return expected(snapshot.tensors(), held)
    stored: Stored = snapshot.stored()
    return stored.expected(held)


def share(
    named: Iterable[tuple[str, Weight]], rank: int, size: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[str, Weight]]:
    """Yield the tensors that are this rank's to put, of those that all of ``size`` ranks have in one order.

    They are dealt in turn by the place at which they begin, a piece's worth to each; all are read, since reading may be
    something that all ranks do together.

    >>> named = [(str(n), torch.zeros(2)) for n in range(5)]
    >>> [[name for name, _ in share(named, rank, 2, piece_bytes=16)] for rank in range(2)]
    [['0', '1', '4'], ['2', '3']]
    """
    place = 0
    for name, tensor in named:
        # Turns go by bytes and not by tensors, so that ranks put about equally much.
        if place // piece_bytes % size == rank:
            yield name, tensor
        place += tensor.nbytes


def changed(
    named: Iterable[tuple[str, Tensor]], known: Mapping[str, Fingerprint]
) -> Iterator[tuple[str, Tensor, Fingerprint, bool]]:
    """Yield each tensor with its fingerprint, and whether that is another than the one that is ``known``."""
    for name, tensor in named:
        print_ = fingerprint(tensor)
        yield name, tensor, print_, known.get(name) != print_


def to_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor, UInt8[n]; the same memory where it is contiguous and on the CPU."""
    array: Bytes = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def from_bytes(array: Bytes, print_: Fingerprint) -> Tensor:
    """Return the tensor whose type and shape are ``print_``'s, in the memory of ``array``, which is read-only."""
    dtype: torch.dtype = vars(torch)[print_.dtype]
    return viewed(array).view(dtype).view(print_.shape)


def viewed(memory: Bytes) -> Tensor:
    """Return the same bytes as a tensor, UInt8[n], which keeps them alive. Not to be written to, where they are shared.

    torch warns of every array that is read-only, so it is shown the address.
    """
    if not memory.size:
        return torch.empty(0, dtype=torch.uint8)
    plain = np.ascontiguousarray(memory)
    shown: Any = (ctypes.c_uint8 * plain.size).from_address(plain.ctypes.data)
    # The array must outlive the tensor, which knows only the address.
    shown.keeps = plain
    return torch.frombuffer(shown, dtype=torch.uint8)
