"""Checkpoints that are complete and unchanged, or are not used."""

import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gnomon.core.atomic_files import (
    numbered,
    read_plain_text,
    remove_tree,
    sync_directory,
    sync_tree,
    write_durably,
    write_json,
)
from gnomon.core.errors import LIMITS, CheckpointError, refusal_of
from gnomon.core.failpoints import failpoint
from gnomon.core.tensor_files import extremes, stored, write_tensors
from gnomon.core.types import State
from gnomon.records.jsonl import Warn, warn_on_stderr
from gnomon.records.manifest import find_damage, size_bytes, verify, write_manifest

# States of a checkpoint that are well-formed and hold what no part of that kind writes.

_LARGEST = 2**53


def check_form(saved: State, own: State | None) -> None:
    """Refuse a state whose values or tensors cannot be a part's.

    Args:
        own: A state of the part itself, whose types, shapes and lists the saved one must have; None where only what
            holds of every part is looked at: whole numbers from 0 to 2^53.

    Raises:
        ValueError: A value has another type, shape or range; the message names the value.
    """
    for name, value in saved.values.items():
        mine = None if own is None else own.values.get(name)
        _check_known(name, value, mine) if own is not None and name in own.values else _check_any(name, value)
    for name, tensor in own.tensors.items() if own is not None else ():
        if name in saved.tensors:
            _check_tensor(name, saved.tensors[name], tensor)


def _check_known(name: str, value: Any, own: Any) -> None:
    if isinstance(own, Mapping) and not own:
        # A mapping that is empty at the beginning grows, as averages of roles do.
        _require(isinstance(value, Mapping), name, value, "an object")
        _check_any(name, value)
    elif isinstance(own, Mapping):
        _require(isinstance(value, Mapping) and value.keys() == own.keys(), name, value, f"an object of {sorted(own)}")
        for key in own:
            _check_known(f"{name}.{key}", value[key], own[key])
    elif isinstance(own, list):
        _require(isinstance(value, list), name, value, "a list")
        # A list may have grown since the run began; its elements are then compared with no example.
        is_alike = len(value) == len(own)
        for place, inner in enumerate(value):
            where = f"{name}[{place}]"
            _check_known(where, inner, own[place]) if is_alike else _check_any(where, inner)
    elif own is None:
        _check_any(name, value, is_flat=True)
    elif isinstance(own, float):
        # Other programs write 1.0 as 1. A value may be infinite or NaN only where the part's own is.
        is_sound = type(value) in (int, float) and (math.isfinite(value) or not math.isfinite(own))
        _require(is_sound, name, value, "a finite number")
    elif type(own) is int:
        _require(type(value) is int and 0 <= value <= _LARGEST, name, value, "a whole number from 0 to 2^53")
    else:
        _require(type(value) is type(own), name, value, f"a {type(own).__name__}")


def _check_any(name: str, value: Any, is_flat: bool = False) -> None:
    if isinstance(value, Mapping | list):
        _require(not is_flat, name, value, "one value")
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            _check_any(f"{name}[{key}]", inner)
    elif type(value) is int:
        _require(0 <= value <= _LARGEST, name, value, "a whole number from 0 to 2^53")
    else:
        _require(type(value) is not bool or not is_flat, name, value, "a number or null")


def _check_tensor(name: str, tensor: Tensor, own: Tensor) -> None:
    # What is empty at the beginning grows.
    grows = own.dim() > 0 and own.shape[0] == 0
    found, asked = (tensor.shape[1:], own.shape[1:]) if grows else (tensor.shape, own.shape)
    if tensor.dtype != own.dtype or tensor.dim() != own.dim() or found != asked:
        raise ValueError(
            f"the tensor {name} is {tensor.dtype} of shape {list(tensor.shape)}, and should be {own.dtype} of shape "
            f"{['any', *asked] if grows else list(asked)}"
        )
    if tensor.is_floating_point() and bool(own.isfinite().all()) and not bool(tensor.isfinite().all()):
        raise ValueError(f"the tensor {name} has numbers that are not finite")
    # Counts, positions and tokens; what has a sign, as streaks do, is shorter.
    if tensor.dtype in (torch.int32, torch.int64) and not all(0 <= n <= _LARGEST for n in extremes(tensor)):
        raise ValueError(f"the tensor {name} has numbers that are not from 0 to 2^53")


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {repr(value)[:60]}, and should be {what}")


# The states of a run's parts as files: tensors in safetensors, values in JSON.

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
            # Hashed while it is written: the manifest need not read the file again.
            hashes[path] = write_tensors(path, {**state.tensors, **state.lent})
        (folder / f"{name}.json").write_text(json.dumps(state.values) + "\n", encoding="utf-8")
        failpoint("checkpoint-file")
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


BEST = "best.json"
SPARE = 1.1


@dataclass(frozen=True)
class CheckpointRef:
    """The checkpoint to go on from.

    Attributes:
        warnings: One line for each newer one that is damaged.
    """

    path: Path
    step: int
    warnings: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run: ``step-N/`` with Hugging Face files at the top, ``state/`` and ``manifest.json``.

    A checkpoint is written under a hidden name, every file waits for the disk, the manifest comes last, and then the
    folder gets its name in one step. So whatever has the name ``step-N`` was complete; that it still is, its sizes and
    hashes say when it is read. An existing checkpoint is never written into.

    Args:
        keep_last: Number of newest checkpoints that are kept.
        keep_every: Steps; those at its multiples stay for good, None for none. The best one, see `save`, stays as well,
            and so do those of the steps ``kept``.
        marker: An empty file that is made with the first one. One process writes: it holds the lock of the run
            directory.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 2,
        keep_every: int | None = None,
        warn: Warn = warn_on_stderr,
        kept: frozenset[int] = frozenset(),
        marker: Path | None = None,
    ) -> None:
        self.directory, self.keep_last, self.keep_every, self.kept = directory, keep_last, keep_every, kept
        self._warn, self._marker = warn, marker

    def save(
        self,
        step: int,
        parts: Mapping[str, State],
        model_files: Callable[[Path], Mapping[Path, str] | None],
        is_best: bool = False,
        model_bytes: int = 0,
    ) -> Path:
        """Publish the checkpoint of ``step`` and return its folder; then remove those that need not be kept.

        Args:
            parts: Each becomes ``state/PART.safetensors`` and ``state/PART.json``, see `write_states`.
            model_files: Writes the model into the folder that it is given; returns the XXH3 of files that it knows.
            is_best: Whether this checkpoint is kept until a better one comes.
            model_bytes: Approximate size of the model's files, in bytes.

        Raises:
            OSError: ENOSPC when the disk, or a quota, is full.
            CheckpointError: The step has a checkpoint already, or it cannot be written; earlier checkpoints are as they
                were, and nothing is left of this one.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        # Space that an interrupted save left occupied counts as free below.
        self.remove_unfinished()
        target = self.directory / f"step-{step}"
        self._quarantine(target)
        needed = self._check_space(parts, model_bytes)
        hidden = self.directory / f".tmp-{step}-{secrets.token_hex(4)}"
        try:
            hidden.mkdir()
            hashes = write_states(hidden / "state", parts)
            hashes |= made if isinstance(made := model_files(hidden), dict) else {}
            # First the bytes, then the manifest, then the name: a folder with a name is complete after any crash.
            sync_tree(hidden)
            failpoint("checkpoint-manifest")
            write_manifest(hidden, step, hashes)
            os.rename(hidden, target)
            failpoint("checkpoint-rename")
        except BaseException as error:
            # BaseException: an interrupt in the middle must leave no half of a checkpoint behind either.
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, Exception) and (told := self._disk_error(error, step, needed)) is not None:
                raise told from error
            raise
        # The rename itself is durable only when the folder above is.
        sync_directory(self.directory)
        if self._marker is not None and not self._marker.exists():
            write_durably(self._marker, b"")
        if is_best:
            write_json(self.directory / BEST, {"step": step})
        # Last: an older checkpoint goes only when the new one cannot be lost.
        self._prune()
        return target

    def newest(self) -> CheckpointRef | None:
        """Return the newest checkpoint of which every byte is as it was written; None when there never was one.

        Raises:
            CheckpointError: There are checkpoints and all are damaged: starting again from nothing is a decision that
                is not made silently.
        """
        warnings: list[str] = []
        # From the newest on. A damaged one is passed over with a
        # warning, so that one bad disk block does not cost the run.
        for step, path in reversed(self._steps()):
            damage = find_damage(path)
            if damage is None:
                return CheckpointRef(path, step, tuple(warnings))
            if not path.is_dir():  # its run goes on, and removed it after a newer one was published
                return self.newest()
            warnings.append(f"the checkpoint {path} is damaged and is not used: {damage}")
        if warnings:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be trusted:\n  " + "\n  ".join(warnings) + "\n"
                "restore one from a copy, or start a new run with `gnomon train EXPERIMENT --run-dir DIR`"
            )
        return None

    def best(self) -> Path | None:
        """Return the checkpoint that was last saved as the best, if it is still there."""
        try:
            step = int(json.loads(read_plain_text(self.directory / BEST))["step"])
            path = self.directory / f"step-{step}"
            return path if path.is_dir() else None  # which raises for a name of hundreds of digits
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def remove_unfinished(self) -> None:
        """Remove what an interrupted save or removal left behind. Only the process that writes may do this."""
        if self.directory.is_dir():
            for left in [*self.directory.glob(".tmp-*"), *self.directory.glob(".removed-*")]:
                if left.is_symlink():
                    left.unlink()
                shutil.rmtree(left, ignore_errors=True)

    def _steps(self) -> list[tuple[int, Path]]:
        """Return the published checkpoints, the oldest first, however much of them is left."""
        listed = list(numbered(self.directory, r"step-(\d+)"))
        found = [(step, path) for step, path in listed if path.is_dir()]
        # A run that publishes one and removes another meanwhile may show neither in one listing.
        return found if list(numbered(self.directory, r"step-(\d+)")) == listed else self._steps()

    def _quarantine(self, target: Path) -> None:
        if not os.path.lexists(target):
            return
        damage = find_damage(target)
        if damage is None:
            raise CheckpointError(f"{target} exists already, and a checkpoint is never written over")
        aside = target.with_name(f"damaged-{target.name}-{secrets.token_hex(4)}")
        os.rename(target, aside)
        self._warn(f"the damaged checkpoint {target} was set aside as {aside.name}: {damage}")

    def _disk_error(self, error: Exception, step: int, needed: int) -> OSError | None:
        """Return what people are told where writing ended in ``error``; None where the files are not to blame."""
        what = f"the checkpoint of step {step} in {self.directory}"
        refused = refusal_of(error)
        if refused is not None and refused.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.directory).free
            return OSError(
                errno.ENOSPC,
                f"no space for {what}: it takes about {needed} bytes, and {free} are free now, or a quota is used up; "
                "make room, then `gnomon resume`",
            )
        if refused is not None or isinstance(error, OSError):
            why = f"{LIMITS[refused.errno or 0]}: {refused}" if refused is not None else error
            return CheckpointError(f"{what} cannot be written: {why}; those before it are as they were")
        return None

    def _check_space(self, parts: Mapping[str, State], model_bytes: int) -> int:
        """Return about how many bytes a checkpoint takes.

        Raises:
            OSError: ENOSPC when so many are not free.
        """
        steps = self._steps()
        tensors = sum(state.nbytes for state in parts.values())
        # The last checkpoint tells the size best; before there is one, tensors and model are added up.
        needed = int(SPARE * max(size_bytes(steps[-1][1]) if steps else 0, tensors + model_bytes))
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint in {self.directory} needs {needed} bytes, and {free} are free; "
                f"make room for {needed - free} more, then `gnomon resume`",
            )
        return needed

    def _prune(self) -> None:
        # Damaged ones do not count: with one of two gone bad, removing the third would leave a single good one.
        sound = [(step, path) for step, path in self._steps() if find_damage(path, is_quick=True) is None]
        best = self.best()
        for step, path in sound[: -self.keep_last]:
            is_milestone = bool(self.keep_every) and step % (self.keep_every or 1) == 0
            if not is_milestone and path != best and step not in self.kept:
                remove_tree(path, f".removed-{step}-{secrets.token_hex(4)}")


def load(path: Path, is_verified: bool = False, lazily: Collection[str] = ()) -> dict[str, State]:
    """Return the parts of a checkpoint, after comparing every byte with its manifest.

    Args:
        is_verified: Whether the bytes were just compared, as by `Checkpoints.newest`.
        lazily: See `read_states`.

    Raises:
        CheckpointError: The message says what is damaged; nothing was read then.
    """
    if not is_verified:
        verify(path)
    return read_states(path / "state", lazily)
