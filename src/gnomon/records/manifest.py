"""The manifest: what a checkpoint consists of, so that anything that is missing, changed or added is noticed."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gnomon.core.atomic_files import open_plain, sync_directory, sync_file
from gnomon.core.errors import CheckpointError
from gnomon.core.progress import show_progress
from gnomon.core.tensor_files import xxh3

_BLOCK_BYTES_COPYING = 1 << 22


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy ``files`` into ``folder``, with their times and rights.

    Raises:
        OSError: A file cannot be copied, for example since the disk is full; finished copies stay.
    """
    with show_progress(f"copying to {folder}", sum(file.stat().st_size for file in files), "bytes") as steps:
        for file in files:
            with open_plain(file) as source, open(folder / file.name, "xb") as target:
                while block := source.read(_BLOCK_BYTES_COPYING):
                    target.write(block)
                    steps.advance(len(block))
            shutil.copystat(file, folder / file.name)


NAME = "manifest.json"
FORMAT = "gnomon-checkpoint/2"
_FORMATS = ("gnomon-checkpoint/1", FORMAT)
_SHA256, _XXH3 = "sha256", "xxh3_128"
_NAMES = {_SHA256: "SHA-256", _XXH3: "XXH3"}
_LARGE_BYTES = _BLOCK_BYTES = 1 << 20
# Of a manifest itself; each file of a checkpoint takes about 150.
_MANIFEST_BYTES = 1 << 24


def write_manifest(folder: Path, step: int, hashes: Mapping[Path, str] | None = None) -> None:
    """Write size and hash of every file under ``folder``; this is the last file of a checkpoint.

    The hash is SHA-256, and XXH3 (128 bits) of files beyond 1 MiB, which takes a fifth of the time: it is there for
    accidents; a program that can forge a file can write the manifest as well.

    Args:
        hashes: XXH3 hashes of files whose content is known; these files are not read again.
    """
    known = {} if hashes is None else hashes
    files = {name: _entry(path, known.get(path)) for name, path in _files(folder)}
    path = folder / NAME
    path.write_bytes(_render(FORMAT, step, files))
    sync_file(path)
    sync_directory(folder)


def find_damage(folder: Path, is_quick: bool = False) -> str | None:
    """Return what is wrong with a checkpoint, in words, or None when every byte is as it was written.

    Args:
        is_quick: Whether only names and sizes are compared.
    """
    if folder.is_symlink():
        return "it is a link to somewhere else"
    try:
        if not stat.S_ISREG((kind := (folder / NAME).lstat()).st_mode) or kind.st_size > _MANIFEST_BYTES:
            return "its manifest is no plain file, or far too large for one"
        raw = (folder / NAME).read_bytes()
        manifest = json.loads(raw)
        # The file must be what would be written again: then no byte of the manifest itself was changed.
        if manifest["format"] not in _FORMATS:
            return f"its manifest is in the format {manifest['format']!r}, not {FORMAT!r}"
        if raw != _render(manifest["format"], manifest["step"], manifest["files"]):
            return "its manifest was changed"
        # A folder that was renamed would be resumed at another step than its state is of.
        if folder.name != f"step-{manifest['step']}":
            return f"it is of step {manifest['step']}"
        return _compare(folder, manifest["files"], is_quick)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"it cannot be read: {error}"


def verify(folder: Path) -> None:
    """Raise CheckpointError, saying what is wrong, unless every byte is as it was written."""
    damage = find_damage(folder)
    if damage is not None:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {damage}")


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files under ``folder``."""
    return sum(path.stat().st_size for _, path in _files(folder))


def _compare(folder: Path, expected: dict[str, dict[str, int | str]], is_quick: bool) -> str | None:
    found = dict(_files(folder))
    for name in sorted(expected.keys() - found.keys()):
        return f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        return f"{name} does not belong to it"
    for name, path in sorted(found.items()):
        if path.is_symlink() or not path.is_file():
            return f"{name} is no plain file"
        size = path.stat().st_size
        if size != expected[name]["bytes"]:
            return f"{name} has {size} bytes, and {expected[name]['bytes']} were written"
    return None if is_quick else _differing(folder, found, expected)


def _differing(folder: Path, found: dict[str, Path], expected: dict[str, dict[str, int | str]]) -> str | None:
    total = sum(path.stat().st_size for path in found.values())
    with show_progress(f"verifying {folder.name}", total, "bytes") as steps:
        for name, path in sorted(found.items()):
            kind = _SHA256 if _SHA256 in expected[name] else _XXH3
            if _hashed(path, kind, steps.advance) != expected[name][kind]:
                return f"{name} is not what was written (its {_NAMES[kind]} differs)"
    return None


def _render(form: str, step: int, files: object) -> bytes:
    body = {"format": form, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=2, sort_keys=True) + "\n").encode()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for parent, folders, names in os.walk(folder):
        # os.walk does not follow links to folders, and would leave them out of the list.
        for name in [*names, *(f for f in folders if (Path(parent) / f).is_symlink())]:
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if relative != NAME:
                yield relative, path


def _entry(path: Path, known: str | None) -> dict[str, int | str]:
    size = path.stat().st_size
    if size > _LARGE_BYTES:
        return {"bytes": size, _XXH3: known or _hashed(path, _XXH3)}
    return {"bytes": size, _SHA256: _hashed(path, _SHA256)}


def _hashed(path: Path, kind: str, report: Callable[[int], None] = lambda count: None) -> str:
    digest = hashlib.sha256() if kind == _SHA256 else xxh3()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            report(count)
    return digest.hexdigest()
