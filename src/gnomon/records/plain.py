"""Files of a run directory are read where they are plain files: nothing else may be waited for."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading in bytes. Whoever puts a named pipe, a device or a folder in its place is not waited for.

    Raises: OSError, which says what is there, when it is no plain file.
    """
    refuse_special(path)
    # It may become another between the two looks.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse_special(path)
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file. Raises: as `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def read_plain_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a plain file, in UTF-8. Raises: as `open_plain`; UnicodeDecodeError."""
    return read_plain(path).decode("utf-8", errors)


def refuse_special(path: Path) -> None:
    """Raise OSError where something is at ``path`` that is no plain file, and FileNotFoundError where nothing is."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, f"it is {_named(kind)}, not a file", str(path))


def _named(kind: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_it, name in kinds if is_it(kind)), "a device")
