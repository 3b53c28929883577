"""Honest seconds: warmed up, repeated, and with what other programs did meanwhile."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
_QUIET = 0.15
"""Cores that others may use on a machine that counts as quiet."""


def repeat(work: Callable[[], Any], repeats: int, warmups: int = 1, before: Callable[[], Any] | None = None,
           ) -> tuple[float, ...]:  # fmt: skip
    """Return the seconds of each of ``repeats`` calls of ``work``, after ``warmups`` that are not counted.

    before: called ahead of every call, outside the clock.
    """
    seconds = []
    for call in range(warmups + repeats):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        if call >= warmups:
            seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def peak_gib() -> float:
    """Return the largest resident size of this process so far, in GiB."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def resident_bytes() -> int | None:
    """Return the resident size of this process now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Lap:
    """Wall-clock seconds of a block, and the cores that other programs kept busy during it (None if unknown)."""

    seconds: float = 0.0
    others: float | None = None


@contextmanager
def lap() -> Iterator[Lap]:
    """Measure the block; the children that it waited for count as our own."""
    measured = Lap()
    began, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield measured
    measured.seconds = time.perf_counter() - began
    now = _busy_seconds()
    if busy is not None and now is not None and measured.seconds > 0:
        measured.others = max(0.0, now - busy - (_own_seconds() - own)) / measured.seconds


def wait_until_idle(most_seconds: float) -> bool:
    """Wait until other programs have been quiet for two seconds; return false when they never were."""
    end, calm = time.monotonic() + most_seconds, 0
    while time.monotonic() < end:
        with lap() as moment:
            time.sleep(0.5)
        calm = calm + 1 if (moment.others or 0.0) < _QUIET else 0
        if calm == 4:
            return True
    return False


def _busy_seconds() -> float | None:
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(word) for word in words]
    # user, nice, system; irq, softirq, steal. Idle and waiting for disks are left out.
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
