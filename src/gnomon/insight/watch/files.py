"""Files of a run that grows, read so that a look costs what was added since the one before."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

T = TypeVar("T")
Row = dict[str, Any]

_MARK_BYTES = 64


@dataclass
class Growing(Generic[T]):
    """A file of JSON objects, one a line, to which a run appends.

    A file that was replaced, cut or changed before its end (a run that resumes cuts it back to its checkpoint) is read
    again from its beginning; one that is gone has no rows. A last line without line feed is not whole yet, and damaged
    lines are passed over.
    keep: what becomes of a row; None passes it over, so that memory holds what is shown alone.
    """

    path: Path
    keep: Callable[[Row], T | None]
    rows: list[T] = field(default_factory=list)
    _identity: tuple[int, int] = (0, 0)
    _read: int = 0
    _mark: bytes = b""

    def look(self) -> None:
        """Read what is new."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._read:
                    self._begin(identity)
                file.seek(self._read - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    self._begin(identity)
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._take(line)
        except OSError:
            self._begin((0, 0))

    def _begin(self, identity: tuple[int, int]) -> None:
        self._identity, self._read, self._mark, self.rows = identity, 0, b"", []

    def _take(self, line: bytes) -> None:
        self._read += len(line)
        self._mark = line[-_MARK_BYTES:]
        row = parsed(line)
        kept = None if row is None else self.keep(row)
        if kept is not None:
            self.rows.append(kept)


@dataclass
class Unchanged(Generic[T]):
    """What a small file says, read again only when it is another one or was written to. absent: said without a file."""

    path: Path
    read: Callable[[bytes], T]
    absent: T
    _known: tuple[int, int, int] | None = None
    _said: T | None = None

    def look(self) -> T:
        """Return what it says now."""
        try:
            status = self.path.stat()
            known = (status.st_ino, status.st_size, status.st_mtime_ns)
            if known != self._known or self._said is None:
                self._said = self.read(self.path.read_bytes())
                self._known = known
        except OSError:
            self._known = self._said = None
        return self.absent if self._said is None else self._said


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file can be drawn: a number, finite and of a size that arithmetic survives.

    >>> is_number(1), is_number(True), is_number(float("inf"))
    (True, False, False)
    """
    return type(value) in (int, float) and isinstance(value, int | float) and -1e300 < value < 1e300


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value of a file can be the number of a step.

    >>> is_step(3), is_step(3.0), is_step(-1)
    (True, False, False)
    """
    return type(value) is int and 0 <= value < 10**12


def parsed(line: bytes) -> Row | None:
    """Return the object of a line, None where it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
