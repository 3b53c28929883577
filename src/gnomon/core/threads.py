"""Release a thread's OpenMP team when the thread goes idle.

libgomp, torch's OpenMP on Linux, gives each thread that calculates a team of its own, which waits for its next
operation: awake for a moment (`gnomon.SPIN`), then asleep. Once all teams together have more threads than there are
processors, they sleep at once, and each small operation of a working thread costs a wake-up: on two processors, where
an engine and a learner take turns, one decoding step of 64 rows took 104 ms so, and 69 ms where the others' are away.
"""

import asyncio
import contextvars
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAPS = Path("/proc/self/maps")
_NICENESS = 10
_PAUSE_SOFT = 1  # omp_pause_soft: what is asked for again is made again


def release_omp_team() -> bool:
    """End the calling thread's team, which comes back with its next parallel operation; return whether it was done.

    False where torch calculates without libgomp. Costs as much as making a thread, at that next operation. It changes
    no number that is computed.
    Source: OpenMP 5.0, 3.2.44 (omp_pause_resource_all); libgomp's gomp_throttled_spin_count_var.
    """
    library = libgomp()
    return library is not None and library.omp_pause_resource_all(_PAUSE_SOFT) == 0


def without_omp_team(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` so that it leaves no team behind in the thread that it is called in."""

    @functools.wraps(function)
    def call(*arguments: P.args, **settings: P.kwargs) -> T:
        try:
            return function(*arguments, **settings)
        finally:
            release_omp_team()

    return call


def give_way() -> None:
    """Let other threads go first, on Linux: elsewhere the number of a thread would be some process's."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


async def run_in_thread(work: Callable[[], T], thread: Executor | None = None) -> T:
    """Return what ``work`` returns in another thread, one of ``thread`` or of the loop's own; no team is left."""
    # The caller's team too: this thread goes on waiting while the other one computes.
    release_omp_team()
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(thread, context.run, without_omp_team(work))


@functools.cache
def libgomp() -> ctypes.CDLL | None:
    """Return the libgomp of this process, if there is exactly one that can be told to pause."""
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Two copies, torch's own and the system's: it is not known
    # which one computes, and pausing the wrong one helps nothing.
    if len(loaded) != 1:
        return None
    library = ctypes.CDLL(loaded.pop())
    return library if hasattr(library, "omp_pause_resource_all") else None


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, also where an event loop runs already, as in a notebook."""
    if not _is_in_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="run") as thread:
        return thread.submit(asyncio.run, work).result()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
