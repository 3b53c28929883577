"""The states of a run's parts as files: tensors in safetensors, values in JSON."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gnomon.core.errors import CheckpointError
from gnomon.core.failpoints import reach
from gnomon.core.tensor_files import stored, write_tensors
from gnomon.core.types import State

_PART = re.compile(r"[A-Za-z0-9_-]+")


def write_states(folder: Path, parts: Mapping[str, State]) -> dict[Path, str]:
    """Write ``PART.safetensors`` and ``PART.json`` for each part; return the XXH3 of each of the first.

    Of a part that several processes hold, each writes its share into the folder ``PART``.

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
        if state.shares is not None:
            (folder / name).mkdir()
            hashes |= state.shares.write(folder / name)
        else:
            path = folder / f"{name}.safetensors"
            hashes[path] = write_tensors(path, {**state.tensors, **state.lent})
        (folder / f"{name}.json").write_text(json.dumps(state.values) + "\n", encoding="utf-8")
        reach("checkpoint-file")
    return hashes


def read_states(folder: Path, lazily: Collection[str] = ()) -> dict[str, State]:
    """Return what `write_states` wrote.

    Args:
        lazily: Parts whose tensors come as `StoredTensor`, read when their rows are asked for: before the files go. So
            do those of a part that several processes wrote.

    Raises:
        CheckpointError: The message names the file that is none of its.
    """
    parts: dict[str, State] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            tensors: Any
            if (place := path.with_suffix("")).is_dir():
                tensors = stored(place)
            elif path.stem in lazily:
                tensors = stored(path.with_suffix(".safetensors"))
            else:
                # Cloned, for what was loaded is a view of the file, and the file goes when newer checkpoints come.
                tensors = {name: tensor.clone() for name, tensor in load_file(path.with_suffix(".safetensors")).items()}
            values = json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OSError) as error:
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
