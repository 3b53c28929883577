"""Large blocks that come and go every step, kept out of a heap that gives nothing back."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

MMAP_THRESHOLD, MMAP_MAX = -3, -4
_BLOCKS, _BYTES = 65536, 2**20
_tuned: list[bool] = []


def note_tuned() -> None:
    """Remember that the heap keeps what is freed (`learner.machine.tune_allocator`)."""
    _tuned.append(True)


@contextmanager
def outside_heap() -> Iterator[None]:
    """Inside the block, allocations of a MiB or more get pages of their own, which go back when they are freed.

    In a heap that never shrinks, copies of all weights that are made and freed once a step leave holes between what
    training keeps, and the process grows: from 3.8 to 5.3 GiB within six steps of the fixed work's size. Fresh pages
    cost a third of a second a step there. Without effect where the heap is glibc's own way.
    """
    if not _tuned or platform.libc_ver()[0] != "glibc":
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(MMAP_THRESHOLD, _BYTES)
    mallopt(MMAP_MAX, _BLOCKS)
    try:
        yield
    finally:
        mallopt(MMAP_MAX, 0)
