"""Files that are either whole or not there, whatever stops the program that writes them."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from gnomon.core.errors import RunDirectoryError
from gnomon.core.failpoints import failpoint
from gnomon.core.redaction import redacted


def real_path(path: str | Path) -> Path:
    """Return the absolute path of a file without links; a link that leads to itself stays as it is.

    ``Path.resolve`` raises RuntimeError for such a link on Python 3.11 and 3.12.
    """
    return Path(os.path.realpath(path))


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading in bytes. A named pipe, a device or a folder in its place is refused without waiting.

    Raises:
        OSError: ``path`` is no plain file; the message says what it is.
    """
    # Looked at by name first: opening a named pipe waits for a writer, and opening a device may do something.
    refuse_special(path)
    # It may become another between the two looks.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse_special(path)
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file.

    Raises:
        OSError: As for `open_plain`.
    """
    with open_plain(path) as file:
        return file.read()


def read_plain_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a plain file, in UTF-8.

    Raises:
        OSError: As for `open_plain`.
        UnicodeDecodeError: The file is no UTF-8.
    """
    return read_plain(path).decode("utf-8", errors)


def refuse_special(path: Path) -> None:
    """Raise OSError where something is at ``path`` that is no plain file, and FileNotFoundError where nothing is."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, f"it is {_named(kind)}, not a file", str(path))


def _named(kind: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_it, name in kinds if is_it(kind)), "a device")


def write_durably(path: Path, content: bytes, is_synced: bool = True) -> None:
    """Replace ``path`` by ``content`` at once: a reader, or a crash, sees all of it or what was there before.

    Written beside it, then renamed.

    Args:
        is_synced: Whether the file also survives a power cut; this takes some milliseconds.

    Raises:
        OSError: The file cannot be written, or ``path`` is a pipe, a device or a folder; the temporary file is removed
            and ``path`` is unchanged.
    """
    try:
        refuse_special(path)
    except OSError as error:
        # Nothing is there, or a link that leads to itself: it is replaced.
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write or a sync does not say of which file
        raise
    if is_synced:
        sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, durably.

    Raises:
        OSError: The file cannot be written.
        ValueError: ``value`` holds NaN or infinity.
    """
    text = json.dumps(redacted(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_durably(path, text.encode())


def sync_file(path: Path) -> None:
    """Wait until the content of ``path`` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in ``path`` are on the disk; without it a rename can be lost in a power cut."""
    sync_file(path)


def sync_tree(path: Path) -> None:
    """Wait until every file and every folder under ``path`` is on the disk."""
    # Bottom up: a folder's names are synced after what they name.
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(Path(folder) / name)
        sync_directory(Path(folder))


def remove_tree(path: Path, hidden_name: str) -> None:
    """Remove a folder so that a crash in between leaves no half of it under its own name.

    Args:
        hidden_name: Name in the same parent that the folder gets before its files are removed.
    """
    hidden = path.with_name(hidden_name)
    # Removing a tree takes many calls. One rename takes the name
    # away first, so no half of it is ever found under the name.
    os.replace(path, hidden)
    sync_directory(path.parent)
    failpoint("checkpoint-retire")
    shutil.rmtree(hidden, ignore_errors=True)


def keep_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Rewrite a file of lines with those that are kept, durably, and only when one is not.

    A last line without its line feed was torn by a crash, and is not offered.
    """
    content = read_plain(path)
    # rfind gives -1 where there is no line feed, and the slice is empty then.
    whole = content[: content.rfind(b"\n") + 1]
    kept = b"".join(line for line in whole.splitlines(keepends=True) if is_kept(line))
    if kept != content:
        write_durably(path, kept)


def numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return the entries of a folder whose names match ``pattern``, each with its number, in order of numbers.

    Args:
        folder: The folder; one that does not exist has no entries.
        pattern: A regular expression for the whole name; its first group is the number.
    """
    if not folder.is_dir():
        return []
    found = ((re.fullmatch(pattern, path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def step_files(directory: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return the steps that have a file ``step-000012.SUFFIX``, and the files, in order of steps.

    Temporary files that a killed writer left are removed.
    """
    for torn in directory.glob(".step-*.tmp"):
        torn.unlink()
    return numbered(directory, rf"step-(\d+)\.{suffix}")


def drop_step_files(directory: Path, suffix: str, step: int) -> None:
    """Remove the files of steps after ``step``, which a run that resumes there will make again."""
    for number, path in step_files(directory, suffix):
        if number > step:
            path.unlink()


def write_page(path: Path, content: bytes) -> None:
    """Replace the file that a person named for a page.

    Raises:
        RunDirectoryError: ``path`` is a folder or cannot be written.
    """
    if os.path.isdir(path) or not path.name:
        raise RunDirectoryError(
            f"{path} is a folder, and a page is a file; name one in it, as --out {path / 'page.html'}"
        )
    try:
        with suppress(FileNotFoundError):
            refuse_special(path)  # also a link that leads to itself
        write_durably(path, content, is_synced=False)
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror or error}; name a file in a folder that is there, --out FILE"
        ) from error
