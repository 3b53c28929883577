"""A pool of forked workers. A worker gets one request at a time and ends together with all that it started."""

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.core.errors import RewardError
from gnomon.core.processes import codec
from gnomon.core.processes.client import ExitReason, ForkServer

T = TypeVar("T")

# A loop that was busy elsewhere finds the timer and the answer at once. The worker's own clock decides.
GRACE_SECONDS = 0.05
_TICK_SECONDS = 1.0
LONGEST_ANSWER = 1 << 20


class DeadlineExceeded(Exception):
    """The deadline passed without an answer."""


@dataclass(eq=False)
class Worker:
    """The run's end of one worker: requests out, answers in, one at a time."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # User code in the worker could write to the socket: an answer counts only with a number that it cannot guess.
    secret: str = field(default_factory=lambda: secrets.token_hex(8))
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def ready(self) -> None:
        """Wait until the worker has imported its code.

        Raises:
            EOFError: The worker died.
            RewardError: The message names what the worker could not import.
        """
        hello = await self._next()
        if hello["fault"] is not None:
            raise RewardError(str(hello["fault"]))

    async def ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any] | None:
        """Return the worker's answer; None for an answer that came past the deadline.

        Time in which this process stood still does not count: a scheduler that suspends a job, or a container that is
        paused, stops the worker as well.

        Raises:
            TypeError, RecursionError: The request cannot be encoded; nothing was sent.
            DeadlineExceeded: The deadline passed without an answer; the worker must get no further request.
            OSError, EOFError, ValueError: The worker died or sent no valid answer; it must get no further request.
        """
        number = f"{self.secret}-{next(self.numbers)}"
        self.writer.write(codec.encode({"id": number, **request}))
        answer = asyncio.ensure_future(self._next())
        loop, left, stood = asyncio.get_running_loop(), deadline_seconds, 0.0
        try:
            # Waited for in ticks. A tick that lasts much longer than asked means that this
            # process stood still, and the worker most likely too: that time is not counted.
            while left > 0 and not answer.done():
                began, waited = loop.time(), min(left, _TICK_SECONDS)
                await asyncio.wait({answer}, timeout=waited)
                left, late = left - waited, loop.time() - began - waited
                stood += late if late > _TICK_SECONDS else 0.0
            if not answer.done():
                await asyncio.wait({answer}, timeout=GRACE_SECONDS)
            if not answer.done():
                raise DeadlineExceeded
        finally:
            answer.cancel()
        said = answer.result()
        if said.get("id") != number:
            raise ValueError("an answer to another question")
        # By the worker's own clock: a busy loop here may read an answer late that came in time.
        return said if said["seconds"] - stood <= deadline_seconds else None

    async def _next(self) -> dict[str, Any]:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return codec.decode(line)


def _hang_up(forked: "asyncio.Future[tuple[int, socket.socket]]") -> None:
    if not forked.cancelled() and forked.exception() is None:
        forked.result()[1].close()


class WorkerPool:
    """The workers of one fork server. One thread makes all blocking calls to the fork server.

    Attributes:
        fork_server: The client of the fork server.
        workers: Workers that were forked and not yet disconnected.
    """

    def __init__(self, fork_server: ForkServer, name: str, start_seconds: float) -> None:
        self.fork_server = fork_server
        self.workers: set[Worker] = set()
        self._start_seconds = start_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def open(self) -> None:
        """Start the fork server.

        Raises:
            RewardError: The message names what could not be imported.
        """
        await self._call(self.fork_server.open)

    async def fork(self) -> Worker:
        """Return a new worker that is ready.

        Raises:
            OSError, EOFError: It died.
            TimeoutError: It was not ready in time.
            RewardError: The message names what the worker could not import.
        """
        forked = asyncio.ensure_future(self._call(self.fork_server.fork))
        try:
            pid, connection = await asyncio.shield(forked)
        except asyncio.CancelledError:
            # Nobody waits for the worker any more: it ends with its connection.
            forked.add_done_callback(_hang_up)
            raise
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_ANSWER)
        worker = Worker(pid, reader, writer)
        self.workers.add(worker)
        await asyncio.wait_for(worker.ready(), self._start_seconds)
        return worker

    async def dismiss(self, worker: Worker) -> None:
        """Close the connection to a worker."""
        self.workers.discard(worker)
        worker.writer.close()
        with contextlib.suppress(OSError):
            await worker.writer.wait_closed()

    async def end(self, worker: Worker) -> ExitReason:
        """Kill a worker with all that it started, and return how it ended."""
        return await self._call(lambda: self.fork_server.end(worker.pid))

    async def close(self) -> None:
        """Close all connections, end the fork server, and wait until all processes are gone."""
        for worker in tuple(self.workers):
            await self.dismiss(worker)
        # A cancelled close must still end the processes.
        await asyncio.shield(self._call(self.fork_server.close))
        self._thread.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
