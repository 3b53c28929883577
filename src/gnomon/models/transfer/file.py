"""Weights as a safetensors file for other processes of this machine, in shared memory if there is room."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gnomon.core.errors import EngineError

_SHARED_MEMORY = Path("/dev/shm")
_NAME = "weights.safetensors"
_SPARE = 1.1


def write(named: Iterable[tuple[str, Tensor]]) -> Path:
    """Write weights into shared memory if there is room, else to disk, readable only by this user.

    Tensors that share memory are written one by one. The reader removes the file with `remove`.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named:
        here = tensor.detach().to("cpu").contiguous()
        # safetensors refuses tensors that share memory.
        tensors[name] = here.clone() if here.data_ptr() in seen else here
        seen.add(here.data_ptr())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    # A tenth more than the weights: other programs use the shared memory too.
    has_room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > _SPARE * size
    folder = Path(tempfile.mkdtemp(prefix="gnomon-weights-", dir=_SHARED_MEMORY if has_room else None))
    try:
        save_file(tensors, folder / _NAME)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / _NAME


def remove(path: Path) -> None:
    """Remove a file of `write`."""
    shutil.rmtree(path.parent, ignore_errors=True)


def read(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a file.

    Raises:
        EngineError: If the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, for a safetensors file is no mapping
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights in {path} cannot be read: {error}") from error


@contextmanager
def lent(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Provide weights to other processes as a file that is removed after the block."""
    path = write(named)
    try:
        yield str(path)
    finally:
        remove(path)
