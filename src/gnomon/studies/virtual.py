"""An event loop whose clock jumps: hours of waiting in milliseconds, and the same result every time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Where a loop would sleep until the next timer, moves the clock to it instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; without a timer there is nothing to jump to, so that is waited for."""
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time, and computing takes none.

    `loop.time()` begins at 0 and is exactly the time of the timer that is due. What waits for other threads or
    processes must not run in it: the clock jumps past their timeouts while they work.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end on a clock of its own.

    >>> async def wait() -> float:
    ...     await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
    ...     return asyncio.get_running_loop().time()
    >>> run_virtually(wait())
    7200.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
