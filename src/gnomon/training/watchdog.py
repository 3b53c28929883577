"""Run a coroutine with a watchdog; the first failure cancels both."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_with_watchdog(watch: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; raise what it raises, or ``watch`` as soon as it does, which cancels the work.

    A learner of several processes is asked once a step. A process that dies between would be noticed when the answers
    are there, which can take an hour; watched, it ends the step that waits for them.

    >>> async def lost() -> None:
    ...     raise ValueError("gone")
    >>> asyncio.run(run_with_watchdog(lost(), asyncio.sleep(60)))
    Traceback (most recent call last):
    ...
    ValueError: gone
    """
    watching, working = asyncio.ensure_future(watch), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        # What the work itself met says more.
        return (working if working.done() else watching).result()  # type: ignore[return-value]
    finally:
        for one in (watching, working):
            # Cancelling what is done already does nothing.
            one.cancel()
        # Wait until both have ended: a cancelled step may still hold locks or write files.
        await asyncio.gather(watching, working, return_exceptions=True)
