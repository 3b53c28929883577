"""Values on their way between processes: a text, and the bytes of the tensors beside it. No pickle.

A value is made of what JSON has, tuples, frozen dataclasses and tensors. A dataclass says where it is found
(``module:Name``) and what its fields are; it is made anew at the other end, so that it checks itself. A tensor is a
number in the text; its bytes lie in a file in memory that the other end maps (`packed`), or in an array that a store of
objects hands out (`boxed`): nothing is copied there.
"""

import json
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.algorithms.user_pieces import load_object, reference_of
from gnomon.models.transfer.remote_weights import Bytes, to_bytes, viewed

_CLASS, _TENSOR, _TUPLE = "@", "#", "()"
_ALIGNED = 64


@contextmanager
def packed(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the text of ``value``, and the number of the open file with its tensors.

    Raises:
        TypeError: For what cannot travel.
    """
    text, placed, size = _laid_out(value)
    file = _memory_file()
    try:
        os.ftruncate(file, size)
        for tensor, start in placed:
            _write(file, tensor, start)
        yield text, file
    finally:
        os.close(file)


def unpacked(text: str, file: int) -> Any:
    """Return the value that was packed; ``file`` is closed, and lives as long as a tensor of it.

    Tensors may be written to, which the other side does not see.
    """
    said = json.loads(text)
    size = os.fstat(file).st_size
    # Copy on write: torch wants writable memory, and no process may change what the other ranks read.
    memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY) if size else None
    os.close(file)
    tensors = [_read(memory, place) for place in said["tensors"]]
    return _made(said["value"], tensors)


def boxed(value: Any) -> tuple[str, Bytes]:
    """Return the text of ``value``, and one array with the bytes of its tensors.

    Raises:
        TypeError: For what cannot travel.

    >>> unboxed(*boxed({"loss": torch.ones(2), "step": 3}))
    {'loss': tensor([1., 1.]), 'step': 3}
    """
    text, placed, size = _laid_out(value)
    memory = np.empty(size, dtype=np.uint8)
    for tensor, start in placed:
        memory[start : start + tensor.nbytes] = to_bytes(tensor)
    return text, memory


def unboxed(text: str, memory: Bytes) -> Any:
    """Return the value that was boxed. Its tensors lie in ``memory``, which others may read: do not write to them."""
    said = json.loads(text)
    view = viewed(memory)
    tensors = [
        view[start : start + math.prod(shape) * vars(torch)[name].itemsize].view(vars(torch)[name]).view(shape)
        for name, shape, start in said["tensors"]
    ]
    return _made(said["value"], tensors)


def _laid_out(value: Any) -> tuple[str, Sequence[tuple[Tensor, int]], int]:
    """Return the text of ``value``, its tensors with the byte at which each begins, and the bytes of all."""
    tensors: list[Tensor] = []
    plain, starts, size = _plain(value, tensors), list[int](), 0
    for tensor in tensors:
        starts.append(size)
        # Each tensor begins at a multiple of 64 bytes, a cache line, as torch's own allocator aligns it.
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    placed = list(zip(tensors, starts, strict=True))
    places = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start] for tensor, start in placed]
    return json.dumps({"value": plain, "tensors": places}), placed, size


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    # JSON has lists alone, and a frozen dataclass with a list in place of a tuple cannot be hashed.
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(inner, tensors) for inner in value]}
    if isinstance(value, list):
        return [_plain(inner, tensors) for inner in value]
    if isinstance(value, Mapping):
        return {key: _plain(inner, tensors) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: _plain(vars(value)[f.name], tensors) for f in fields(value) if f.init}
        return {_CLASS: reference_of(type(value)), **own}
    raise TypeError(f"a {type(value).__name__} cannot travel: {value!r}")


def _made(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_made(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_made(inner, tensors) for inner in value[_TUPLE])
    if _CLASS not in value:
        return {key: _made(inner, tensors) for key, inner in value.items()}
    # The text names any importable object, so only a dataclass is called: unlike a pickle, it cannot run a function.
    found = load_object(value[_CLASS])
    if not (isinstance(found, type) and is_dataclass(found)):
        raise TypeError(f"{value[_CLASS]} is no dataclass")
    return found(**{key: _made(inner, tensors) for key, inner in value.items() if key != _CLASS})


def _memory_file() -> int:
    """Return the number of a new file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gnomon")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, tensor: Tensor, start: int) -> None:
    # Not through a mapping, which ends the process by a signal where memory is full; a write raises OSError.
    left = to_bytes(tensor).data
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def _read(memory: mmap.mmap | None, place: list[Any]) -> Tensor:
    name, shape, start = place
    dtype: torch.dtype = vars(torch)[name]
    count = math.prod(shape)
    if memory is None or count == 0:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=start).view(dtype).view(shape)
    )
