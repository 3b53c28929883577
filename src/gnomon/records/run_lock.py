"""The owner of a run's lock, read without taking the lock."""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.atomic_files import open_plain
from gnomon.records.directory import LOCK


@dataclass(frozen=True)
class LockOwner:
    """The process that has a run, as it says of itself; zero and empty where it has said nothing yet."""

    pid: int = 0
    host: str = ""
    started: str = ""


def lock_owner(run: Path) -> LockOwner | None:
    """Return who works on the run at ``run`` now, None when no process does.

    The kernel is asked, for a note that a process left behind says nothing of whether it lives: with a shared lock that
    is given back at once. A run that begins in that very moment tries again.
    """
    try:
        with open_plain(run / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _said(file.read(4096))
    except OSError:
        return None
    return None


def _said(note: bytes) -> LockOwner:
    try:
        found = json.loads(note)
        owner = LockOwner(found["pid"], found["host"], found["started"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockOwner()
    is_sound = type(owner.pid) is int and isinstance(owner.host, str) and isinstance(owner.started, str)
    return owner if is_sound else LockOwner()
