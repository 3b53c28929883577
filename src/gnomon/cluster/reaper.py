"""Remove everything that a run's own Ray cluster leaves: ``python -m gnomon.cluster.reaper FOLDER``.

The program waits for the run to end: the run holds the program's standard input open, and a dead run closes it. Ray's
servers, which outlive the command that starts them, its agents and its workers have files open in the cluster's folder.

A run that ends normally says so on standard input. Otherwise the reaper prints a message, because Ray ends a program
without a message if its servers on the same machine die at the wrong moment.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

CLEAN_EXIT = b"."
_SUDDEN = (
    "gnomon: the run ended without a word: it was killed, or Ray ended it because its servers on this machine died. "
    "What it started here is being ended; go on from the newest checkpoint with gnomon resume"
)
_SECONDS = 10.0
_PAUSE = 0.1
_GRACE = 2.0


def users_of(folder: Path, spared: Collection[int]) -> list[int]:
    """Return this user's processes, without ``spared``, that have a file open in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd"):
        number = int(entry.parent.name)
        with contextlib.suppress(OSError):
            # By open files and not by parents: Ray's servers outlive the command that started them, and belong to init
            # then.
            opened = (os.readlink(link) for link in entry.iterdir())
            if number not in spared and any(path.startswith(f"{folder}/") for path in opened):
                found.append(number)
    return found


def sweep(folder: Path, spared: Collection[int]) -> None:
    """End the processes that use the folder, with SIGTERM and then SIGKILL, and remove the folder."""
    began, wanted = time.monotonic(), signal.SIGTERM
    while (left := users_of(folder, spared)) and time.monotonic() - began < _SECONDS:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, wanted)
        time.sleep(_PAUSE)
        # What has not ended two seconds after SIGTERM does not end by itself.
        if time.monotonic() - began > _GRACE:
            wanted = signal.SIGKILL
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the run's end, then sweep. The run itself is spared: it may only have closed its cluster."""
    spared, said = (os.getpid(), os.getppid()), b""
    while heard := os.read(0, 1 << 10):
        said += heard
    if said != CLEAN_EXIT:
        print(_SUDDEN, file=sys.stderr, flush=True)
    sweep(Path(sys.argv[1]), spared)


if __name__ == "__main__":
    main()
