"""A virtual clock for asyncio, and the stand-ins that a simulated run needs: tasks and empty weights.

The clock jumps from timer to timer, so hours of waiting take milliseconds and every run gives the same result.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from gnomon.core.metrics import Metrics
from gnomon.core.types import Group, Snapshot, State, Task

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """A selector that advances the clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance to the next timer and return no event; without a timer, wait for an event as usual."""
        if timeout is None:
            return super().select()
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time.

    `loop.time()` begins at 0 and equals the due time of the current timer. Coroutines that wait for threads or
        processes
    must not run in this loop, because the clock jumps past their timeouts.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end in a `VirtualLoop`.

    >>> async def wait() -> float:
    ...     await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
    ...     return asyncio.get_running_loop().time()
    >>> run_virtually(wait())
    7200.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class InOrder:
    """An endless dataset and curriculum in which each task occurs once."""

    name = "in order"

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Task:
        return Task(f"t{index}", (index,), "")

    def take(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` tasks."""
        self._next += count
        return list(range(self._next - count, self._next))

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Ignore the groups."""
        return Metrics()

    def state(self) -> State:
        """Return the index of the next task."""
        return State(values={"next": self._next})

    def restore(self, state: State) -> None:
        """Continue with the stored index."""
        self._next = int(state.values["next"])


def weights(version: int) -> Snapshot:
    """Return a snapshot without tensors."""
    return Snapshot(version, lambda: iter(()))
