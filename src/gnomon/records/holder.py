"""Which process works on a run, asked so that nobody is disturbed."""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from gnomon.records.directory import LOCK
from gnomon.records.plain import open_plain


@dataclass(frozen=True)
class Holder:
    """The process that has a run, as it says of itself; zero and empty where it has said nothing yet."""

    pid: int = 0
    host: str = ""
    started: str = ""


def holder_of(run: Path) -> Holder | None:
    """Return who works on the run at ``run`` now, None when nobody does.

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


def _said(note: bytes) -> Holder:
    try:
        found = json.loads(note)
        holder = Holder(found["pid"], found["host"], found["started"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Holder()
    is_sound = type(holder.pid) is int and isinstance(holder.host, str) and isinstance(holder.started, str)
    return holder if is_sound else Holder()
