"""Safetensors files, written past the page cache and hashed on the way.

The library's own writer copies each tensor into a bytes object of its own, the system copies that into its page cache,
and a manifest reads all of it again: several processor seconds for a checkpoint, which the step that goes on beside it
has to do without. Here every byte is copied once, into a block that the disk takes as it is.
"""

import errno
import fcntl
import json
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gnomon.core.errors import CheckpointError
from gnomon.core.failpoints import reach
from gnomon.core.types import Loan, State
from gnomon.records.manifest import xxh3

_PART = re.compile(r"[A-Za-z0-9_-]+")


def write_states(folder: Path, parts: Mapping[str, State]) -> dict[Path, str]:
    """Write ``PART.safetensors`` and ``PART.json`` for each part; return the XXH3 of each of the first.

    Tensors of any type and shape come back bit for bit, on the CPU. Values come back equal: integers and floats
    exactly, NaN and infinities too; a tuple comes back as a list.

    Raises:
        CheckpointError: The files cannot have a name, or JSON has no form for a value.
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hashes: dict[Path, str] = {}
    for name, state in parts.items():
        if not _PART.fullmatch(name):
            raise CheckpointError(f"the part {name!r} needs a name of letters, digits, _ and - alone")
        _check(state.values, name)
        path = folder / f"{name}.safetensors"
        hashes[path] = write_tensors(path, {**state.tensors, **state.lent})
        (folder / f"{name}.json").write_text(json.dumps(state.values) + "\n", encoding="utf-8")
        reach("checkpoint-file")
    return hashes


def read_states(folder: Path) -> dict[str, State]:
    """Return what `write_states` wrote.

    Raises:
        CheckpointError: The message names the file that is none of its.
    """
    parts: dict[str, State] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            # Cloned, for what was loaded is a view of the file, and the file goes when newer checkpoints come.
            tensors = {name: tensor.clone() for name, tensor in load_file(path.with_suffix(".safetensors")).items()}
            values = json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError, RecursionError, OSError) as error:
            raise CheckpointError(f"the state {path.with_suffix('')} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"the state {path} holds a {type(values).__name__}, not an object of values")
        parts[path.stem] = State(tensors, values)
    return parts


def _check(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}: JSON has only text as keys, and 1 would become '1'")
            _check(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]")
    elif not (value is None or type(value) in (bool, int, float, str)):
        kind = "a tensor; it belongs into State.tensors" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointError(f"{path} is {kind}, which JSON does not have")


_BLOCK_BYTES = 1 << 22
_HEADER_MULTIPLE = 8
_DIRECT = getattr(os, "O_DIRECT", 0)
_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64",
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Loan]) -> str:
    """Write a new safetensors file and return its XXH3 (128 bits, hexadecimal), of what was to be written.

    Tensors may share memory and lie anywhere; each is written whole. What is lent is given back once it is written.

    Raises:
        CheckpointError: The format does not have a type, or a tensor is named __metadata__.
        OSError: The file cannot be written.
    Source: the format is https://huggingface.co/docs/safetensors; `safetensors.torch.load_file` reads it.
    """
    # Large items first, so that each lies at a multiple of its size, as the format asks.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with _Output(path) as output:
        output.add(np.frombuffer(_header(path, ordered), dtype=np.uint8))
        for _, tensor in ordered:
            if isinstance(tensor, Loan):
                _add_lent(output, tensor)
            else:
                output.add(_bytes(tensor))
        return output.end()


class _Output:
    """A new file that goes to the disk in whole blocks, past the page cache where the file system allows it."""

    def __init__(self, path: Path) -> None:
        self._hash = xxh3()
        # The disk reads it where it is: at the beginning of a page.
        self._memory = mmap.mmap(-1, _BLOCK_BYTES)
        self._block = np.frombuffer(self._memory, dtype=np.uint8)
        self._filled = 0
        self._is_direct = bool(_DIRECT)
        self._file = self._opened(path)

    def add(self, content: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        """Write ``content``, one byte an item, behind what was added before."""
        while len(content) > 0:
            count = min(len(content), _BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = content[:count]
            self._filled += count
            content = content[count:]
            if self._filled == _BLOCK_BYTES:
                self._flush()

    def end(self) -> str:
        """Write what is left, and return the hash of everything."""
        self._through_cache()
        self._flush()
        return str(self._hash.hexdigest())

    def _flush(self) -> None:
        with memoryview(self._memory)[: self._filled] as block:
            self._hash.update(block)
            written = 0
            while written < len(block):
                try:
                    written += os.write(self._file, block[written:])
                except OSError as error:
                    if not self._is_direct or error.errno != errno.EINVAL:
                        raise
                    self._through_cache()
        self._filled = 0

    def _opened(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The refusal comes after the file was made.
        self._is_direct = False
        return os.open(path, flags & ~os.O_EXCL, 0o666)

    def _through_cache(self) -> None:
        """Go on as any file: the last block has no whole page, and some file systems say so late."""
        if self._is_direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)
            self._is_direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._file)


def _header(path: Path, tensors: list[tuple[str, Tensor | Loan]]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors:
        if name == "__metadata__":
            raise CheckpointError(f"{path.stem} has a tensor named __metadata__, which safetensors keeps for itself")
        if tensor.dtype not in _TYPES:
            raise CheckpointError(f"{path.stem} has the tensor {name} of {tensor.dtype}, which safetensors does not")
        end = start + tensor.nbytes
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text


def _add_lent(output: _Output, loan: Loan) -> None:
    # Block by block: the owner of the tensor waits for one block, and not for the disk to take all of it.
    for start in range(0, loan.nbytes, _BLOCK_BYTES):
        with loan.reading() as tensor:
            output.add(_bytes(tensor)[start : start + _BLOCK_BYTES])
    loan.end()


def _bytes(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the tensor's memory, or a copy's where that is elsewhere or in another order."""
    plain = tensor.detach().cpu().contiguous()
    # A single number counts as in order whatever its stride, and only a stride of 1 can be seen as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
