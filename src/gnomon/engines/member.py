"""One engine of several: what it has in flight, when it was last heard of, and why it was taken out."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gnomon.engines.base import Engine
from gnomon.errors import EngineError, UserError

T = TypeVar("T")

_GRACE_SECONDS = 1.0
_CLOSING_SECONDS = 15.0
_LOOKS = 8


class Lost(Exception):
    """The engine was taken out while this call was in flight, or by it; ask another one."""


class Member:
    """An engine, watched.

    It is taken out, for good, when a call raises anything but a `UserError` (that one is the caller's own), when
    nothing that was asked of it ends and nothing is drawn for ``timeout_seconds``, or when the pool says so. Every call
    in flight then raises `Lost` at once and is cancelled; nobody waits for an engine that may never answer.

    name: how people call it. cause: why it was taken out, None while it works. rows: answers on their way.
    versions: of all weights that it was given.
    """

    def __init__(self, name: str, engine: Engine, timeout_seconds: float) -> None:
        self.name, self.engine = name, engine
        self.rows = 0
        self.cause: str | None = None
        self.versions = {engine.version}
        self._timeout_seconds = timeout_seconds
        self._heard = 0.0
        self._beats = engine.beats
        self._calls: set[asyncio.Future[Any]] = set()
        self._gone: asyncio.Future[None] | None = None

    async def ask(self, call: Callable[[Engine], Awaitable[T]], rows: int = 0, is_alone: bool = False) -> T:
        """Return what ``call`` returns, within the patience that the engine has left.

        rows: answers that it asks for. is_alone: it must end within the timeout itself; otherwise whatever else ends
        counts as a sign of life. A load may hang while answers still arrive, except the first one.
        Raises: Lost; UserError as the engine raises it.
        """
        if self.cause is not None:
            raise Lost(self.cause)
        if not self._calls:
            self._gone = asyncio.get_running_loop().create_future()
        assert self._gone is not None, "made with the first call in flight"
        task = asyncio.ensure_future(call(self.engine))
        task.add_done_callback(_retrieve)
        self._calls.add(task)
        self.rows += rows
        try:
            await self._patiently(task, self._gone, is_alone)
            return self._outcome(task)
        finally:
            task.cancel()
            self._calls.discard(task)
            self.rows -= rows

    def lose(self, cause: str) -> None:
        """Take the engine out, and wake everybody who waits for it."""
        if self.cause is None:
            self.cause = cause
            if self._gone is not None and not self._gone.done():
                self._gone.set_result(None)

    async def close(self) -> None:
        """Close the engine, giving up on one that does not let itself be closed."""
        closing = asyncio.ensure_future(self.engine.close())
        closing.add_done_callback(_retrieve)
        await asyncio.wait({closing}, timeout=_CLOSING_SECONDS)
        closing.cancel()

    async def _patiently(self, task: "asyncio.Future[T]", gone: "asyncio.Future[None]", is_alone: bool) -> None:
        """Wait until the call is done or the engine lost; lose it when it was silent for the whole timeout.

        After that comes a moment more, waited for apart: when the event loop itself was held up, whatever arrived
        meanwhile is noticed in it, and an engine that keeps watch itself may say more about its end.
        """
        began = asyncio.get_running_loop().time()
        is_strict = is_alone and self.engine.version >= 0
        grace = min(_GRACE_SECONDS, self._timeout_seconds / 16)
        either: set[asyncio.Future[Any]] = {task, gone}
        while not task.done() and self.cause is None:
            self._listen()
            since = began if is_strict else max(began, self._heard)
            left = since + self._timeout_seconds - asyncio.get_running_loop().time()
            look = min(left, self._timeout_seconds / _LOOKS)
            await asyncio.wait(either, timeout=max(look, grace), return_when=asyncio.FIRST_COMPLETED)
            self._listen()
            is_silent = is_strict or since == max(began, self._heard)
            if left <= 0 and is_silent and not task.done():
                what = "it did not take new weights" if is_alone else "it finished nothing"
                self.lose(f"{what} in {self._timeout_seconds:g} seconds (engine.timeout_seconds)")

    def _listen(self) -> None:
        """Take tokens that were drawn for a sign of life, so that long answers are told from a hang."""
        if self.engine.beats != self._beats:
            self._beats, self._heard = self.engine.beats, asyncio.get_running_loop().time()

    def _outcome(self, task: "asyncio.Future[T]") -> T:
        if self.cause is not None:
            raise Lost(self.cause)
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and (error is None or isinstance(error, UserError)):
            self._heard = asyncio.get_running_loop().time()
            return task.result()
        self.lose(str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}")
        raise Lost(self.cause) from error


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Look at the outcome of a call that nobody may wait for any more, so that nobody is told of it later."""
    if not task.cancelled():
        task.exception()
