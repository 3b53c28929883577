"""One piece of writing at a time, in a thread, while the run goes on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from gnomon.core.errors import DiagnosedError, Stopped
from gnomon.core.metrics import Metrics, Sum
from gnomon.core.progress import show_progress
from gnomon.core.threads import give_way, without_omp_team


class Background:
    """Work that the run need not wait for, one piece under way at most; a second one waits for the first.

    Nothing fails silently: what a piece raised is raised by the next call of `begin`, `check` or `settle`, and when the
    block ends. The end of the block waits for the piece under way, a run that was asked to stop too; when something
    else went wrong there, that is what is raised. The thread gives way to others (niceness 10, on Linux): the
    arithmetic of a step is not slowed down.

    Args:
        is_asynchronous: Whether a thread does the work; otherwise the caller does it.
        what: Is written, in words.
    """

    def __init__(self, is_asynchronous: bool = True, what: str = "the checkpoint") -> None:
        self.is_asynchronous = is_asynchronous
        self._what = what
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what, initializer=give_way)
        self._under_way: Future[float] | None = None
        self._waited = self._worked = 0.0

    def begin(self, work: Callable[[], object], is_waited_for: bool = False) -> None:
        """Do ``work`` while the caller goes on, after waiting for the piece before. is_waited_for: do it here and now.

        Raises:
            Exception: The piece before raised it; ``work`` is not begun then.
        """
        # Waits here, so that never more than one checkpoint is in memory beside the run's own weights.
        self.settle()
        if self.is_asynchronous and not is_waited_for:
            self._under_way = self._thread.submit(without_omp_team(_timed), work)
            return
        seconds = _timed(work)
        self._waited += seconds
        self._worked += seconds

    def check(self) -> None:
        """Wait for nothing.

        Raises:
            Exception: A finished piece raised it.
        """
        if self._under_way is not None and self._under_way.done():
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            Exception: The piece raised it.
        """
        # Taken off before it is waited for: an error is raised once and not again by the next call.
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        began = time.perf_counter()
        try:
            with show_progress(f"waiting until {self._what} is on the disk"):
                self._worked += under_way.result()
        finally:
            self._waited += time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Return, since the last call, the seconds that were waited for pieces and that finished ones took."""
        waited, worked = self._waited, self._worked
        self._waited = self._worked = 0.0
        return Metrics.of({"time/checkpoint_wait_seconds": Sum(waited), "time/checkpoint_write_seconds": Sum(worked)})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with show_progress(f"waiting until {self._what} is on the disk"):
            self._thread.shutdown(wait=True)
        # Any other error is what the user should see; a failed checkpoint would hide it.
        if error is None or isinstance(error, Stopped | DiagnosedError):
            self.settle()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
