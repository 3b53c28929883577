"""Safetensors files, written past the page cache and hashed on the way, and read as far as they are asked for.

The library's own writer copies each tensor into a bytes object of its own, the system copies that into its page cache,
and a manifest reads all of it again: several processor seconds for a checkpoint, which the step that goes on beside it
has to do without. Here every byte is copied once, into a block that the disk takes as it is.

A tensor that several processes hold lies in several files, some of its rows in each, as torch.distributed.checkpoint's
`HuggingFaceStorageWriter` writes them and its reader reads them: the header says where the rows belong. Nothing is
pickled.
"""

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gnomon.core.atomic_files import real_path
from gnomon.core.errors import CheckpointError
from gnomon.core.types import Loan

SHARE = "shard-{:05d}-model-00001-of-00001.safetensors"
"""Name of the file of one process of several, counted from 1."""
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the greatest number of a tensor, NaN where it holds one; 0 and 0 of an empty one."""
    if tensor.numel() == 0:
        return 0, 0
    # Both at once: from an accelerator each number is a wait of its own.
    low, high = torch.stack(torch.aminmax(tensor.detach())).tolist()
    return low, high


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one file or several, which is read as far as its rows are asked for.

    Attributes:
        name: In the files.
        size: Of each axis.
        kind: Name of its type, without "torch.".
        files: Each file with the first and the number of the rows in it, in their order.
    """

    name: str
    size: tuple[int, ...]
    kind: str
    files: tuple[tuple[str, int, int], ...]

    @property
    def shape(self) -> torch.Size:
        """Return the whole tensor's."""
        return torch.Size(self.size)

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's name for ``kind``."""
        found: torch.dtype = vars(torch)[self.kind]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Whether its numbers have fractions."""
        return self.dtype.is_floating_point

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Return these rows, or all."""
        if not self.size:
            with safe_open(self.files[0][0], framework="pt") as file:
                number: Tensor = file.get_tensor(self.name)
                return number
        begin, end, _ = (slice(None) if isinstance(rows, EllipsisType) else rows).indices(self.size[0])
        # An empty piece first, so that no rows at all are a tensor of the right shape.
        found = [torch.empty(0, *self.size[1:], dtype=self.dtype)]
        for path, first, count in self.files:
            # The rows that are asked for, counted from this file's first.
            low, high = max(begin - first, 0), min(end - first, count)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    found.append(file.get_slice(self.name)[low:high])
        return found[-1] if len(found) <= 2 else torch.cat(found)


def stored(place: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of a folder with the shares of several processes; only headers are read.

    Raises:
        CheckpointError: A file is none of these, or the shares of a tensor do not make a whole.
        SafetensorError, ValueError, OSError: A file cannot be read.
    """
    pieces: dict[str, list[tuple[int, tuple[int, ...], str, str]]] = {}
    there = real_path(place)  # for processes of other folders, too
    for path in sorted(there.iterdir()) if there.is_dir() else [there]:
        if path.suffix != ".safetensors" or path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is no share of a checkpoint")
        with safe_open(path, framework="pt") as file:
            sharding = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                view = file.get_slice(name)
                shape, kind = tuple(view.get_shape()), _KINDS[view.get_dtype()]
                offsets = sharding[name][_OFFSETS] if sharding else [0] * len(shape)
                # Shares split the first axis alone: other axes begin at 0.
                if len(offsets) != len(shape) or any(offsets[1:]):
                    raise CheckpointError(f"{path} has of {name} what begins at {offsets}, and shares are whole rows")
                pieces.setdefault(name, []).append((offsets[0] if shape else 0, shape, kind, str(path)))
    return {name: _whole(name, sorted(found)) for name, found in pieces.items()}


def _whole(name: str, pieces: list[tuple[int, tuple[int, ...], str, str]]) -> StoredTensor:
    _, shape, kind, _ = pieces[0]
    files, rows = [], 0
    for first, own, other, path in pieces:
        # Each share must begin where the one before ended: no gap and no overlap.
        if (first, own[1:], other) != (rows, shape[1:], kind) or (not shape and len(pieces) > 1):
            raise CheckpointError(
                f"the shares of {name} do not fit together: {path} has {other} of shape {list(own)} from row {first} "
                f"on, and the {rows} rows before are {kind} of shape {list(shape[1:])}"
            )
        count = own[0] if own else 1
        files.append((path, rows, count))
        rows += count
    return StoredTensor(name, (rows, *shape[1:]) if shape else (), kind, tuple(files))


_BLOCK_BYTES = 1 << 22
_HEADER_MULTIPLE = 8
_DIRECT = getattr(os, "O_DIRECT", 0)
_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64",
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
_KINDS = {code: str(kind).removeprefix("torch.") for kind, code in _TYPES.items()}


def xxh3() -> Any:
    """Return a new digest of the kind that large files have: XXH3, 128 bits."""
    import xxhash

    return xxhash.xxh3_128()


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Loan], metadata: Mapping[str, str] | None = None) -> str:
    """Write a new safetensors file and return its XXH3 (128 bits, hexadecimal), of what was to be written.

    Tensors may share memory and lie anywhere; each is written as it is here. What is lent is given back once it is
    written. Where a loan says at which row of a whole it begins, the header says so of each tensor.

    Args:
        metadata: Texts for the file's header.

    Raises:
        CheckpointError: The format does not have a type, or a tensor is named __metadata__.
        OSError: The file cannot be written.
    Source: the format is https://huggingface.co/docs/safetensors; `safetensors.torch.load_file` reads it.
    """
    # Large items first, so that each lies at a multiple of its size, as the format asks.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    return write_in_order(path, dict(ordered), iter(ordered), metadata)


def write_in_order(
    path: Path,
    forms: Mapping[str, Tensor | Loan],
    tensors: Iterator[tuple[str, Tensor | Loan]],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write as `write_tensors` does, and ask for each tensor only when those before it are written.

    Args:
        forms: Shape and type of each tensor, in the order of the file; they may be on the meta device.
        tensors: Yields at least those, in that order.
        metadata: Texts for the file's header.

    Raises:
        CheckpointError: As `write_tensors`, or a tensor is another one than ``forms`` says.
    """
    with _Output(path) as output:
        output.add(np.frombuffer(_header(path, forms, metadata or {}), dtype=np.uint8))
        for name, form in forms.items():
            found, tensor = next(tensors)
            if (found, tensor.shape, tensor.dtype) != (name, form.shape, form.dtype):
                raise CheckpointError(
                    f"{path.name}: {name} {tuple(form.shape)} {form.dtype} was to come, and {found} "
                    f"{tuple(tensor.shape)} {tensor.dtype} came"
                )
            if isinstance(tensor, Loan):
                _add_lent(output, tensor)
            else:
                output.add(_bytes(tensor))
            # Gone before the next one is made.
            del tensor
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
            # The one copy of each byte.
            self._block[self._filled : self._filled + count] = content[:count]
            self._filled += count
            content = content[count:]
            if self._filled == _BLOCK_BYTES:
                self._flush()

    def end(self) -> str:
        """Write what is left, and return the hash of everything."""
        # O_DIRECT takes whole pages only, and the last block is none.
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
                    # EINVAL of a direct write means that the file system does not take it so; any other error is real.
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


def _header(path: Path, tensors: Mapping[str, Tensor | Loan], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"{path.stem} has a tensor named __metadata__, which safetensors keeps for itself")
        if tensor.dtype not in _TYPES:
            raise CheckpointError(f"{path.stem} has the tensor {name} of {tensor.dtype}, which safetensors does not")
        end = start + tensor.nbytes
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    if any(isinstance(tensor, Loan) and tensor.start is not None for tensor in tensors.values()):
        sharding = {name: {_OFFSETS: _offsets(tensor)} for name, tensor in tensors.items()}
        entries["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # The data begins at a multiple of 8, so that tensors can be mapped into memory where they lie.
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text


def _offsets(tensor: Tensor | Loan) -> list[int]:
    start = tensor.start if isinstance(tensor, Loan) else 0
    return [start or 0, *[0] * (len(tensor.shape) - 1)] if len(tensor.shape) else []


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
