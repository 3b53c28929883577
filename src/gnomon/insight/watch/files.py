"""Files of a run that grows, read so that a look costs what was added since the one before."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from gnomon.core.atomic_files import open_plain, read_plain
from gnomon.records.corruption import chosen_rollouts, damaged_rollouts
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import is_step, parsed

T = TypeVar("T")
Row = dict[str, Any]

_MARK_BYTES = 64


@dataclass
class Growing(Generic[T]):
    """A file of JSON objects, one a line, to which a run appends.

    A file that was replaced, cut or changed before its end (a run that resumes cuts it back to its checkpoint) is read
    again from its beginning; one that is gone has no rows. A last line without line feed is not whole yet, and damaged
    lines are passed over and counted, as `records.damage` counts them.

    Attributes:
        keep: What becomes of a row; None passes it over, so that memory holds what is shown alone.
    """

    path: Path
    keep: Callable[[Row], T | None]
    rows: list[T] = field(default_factory=list)
    damaged: int = 0
    _identity: tuple[int, int] = (0, 0)
    _read: int = 0
    _mark: bytes = b""

    def look(self) -> None:
        """Read what is new."""
        try:
            with open_plain(self.path) as file:
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
        self._identity, self._read, self._mark, self.rows, self.damaged = identity, 0, b"", [], 0

    def _take(self, line: bytes) -> None:
        self._read += len(line)
        self._mark = line[-_MARK_BYTES:]
        row = parsed(line)
        self.damaged += row is None or not is_step(row.get("step"))
        kept = None if row is None else self.keep(row)
        if kept is not None:
            self.rows.append(kept)


@dataclass
class DamagedRollouts:
    """Counts the damaged lines of rollout files: of those that a report would read, and then of each new one."""

    run: RunDirectory
    _counts: dict[int, int] = field(default_factory=dict)
    _last: int = -1

    def look(self, newest: int) -> int:
        """Return how many there are.

        Args:
            newest: The last step that has its rollouts on disk, 0 for none.
        """
        if newest < self._last:
            self._counts, self._last = {}, -1
        steps = range(self._last + 1, newest + 1)
        files = {step: self.run.rollouts / f"step-{step:06d}.jsonl" for step in steps}
        files = chosen_rollouts(self.run) if self._last < 0 else files
        self._counts |= {step: damaged_rollouts(path) for step, path in files.items()}
        self._last = newest
        return sum(self._counts.values())


@dataclass
class Unchanged(Generic[T]):
    """What a small file says, read again only when it is another one or was written to.

    Attributes:
        absent: Said without a file.
    """

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
                self._said = self.read(read_plain(self.path))
                self._known = known
        except OSError:
            self._known = self._said = None
        return self.absent if self._said is None else self._said
