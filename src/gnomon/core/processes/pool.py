"""Processes that a nursery forks: asked one request at a time, and ended with all that they started."""

import asyncio
import contextlib
import itertools
import secrets
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
LONGEST_ANSWER = 1 << 20


class DeadlineExceeded(Exception):
    """The deadline passed without an answer."""


@dataclass(eq=False)
class Worker:
    """The run's end of one worker: requests out, answers in, one at a time."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    secret: str = field(default_factory=lambda: secrets.token_hex(8))
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def ready(self) -> None:
        """Wait for its first word. Raises: EOFError, or RewardError with what it could not import."""
        hello = await self._next()
        if hello["fault"] is not None:
            raise RewardError(str(hello["fault"]))

    async def ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any] | None:
        """Return its answer; None when it came past the deadline.

        Raises: TypeError, RecursionError when the request cannot be sent, and nothing was. Hung, or OSError,
            EOFError, ValueError when it died or spoke nonsense; then ask it nothing more.
        """
        number = f"{self.secret}-{next(self.numbers)}"
        self.writer.write(codec.encode({"id": number, **request}))
        answer = asyncio.ensure_future(self._next())
        try:
            for seconds in (deadline_seconds, GRACE_SECONDS):
                await asyncio.wait({answer}, timeout=seconds)
                if answer.done():
                    break
            else:
                raise DeadlineExceeded
        finally:
            answer.cancel()
        said = answer.result()
        if said.get("id") != number:
            raise ValueError("an answer to another question")
        return said if said["seconds"] <= deadline_seconds else None

    async def _next(self) -> dict[str, Any]:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return codec.decode(line)


class WorkerPool:
    """The workers of one nursery, whose blocking calls are made from one thread.

    workers: those that were forked and neither dismissed nor given up by whoever holds them.
    """

    def __init__(self, fork_server: ForkServer, name: str, start_seconds: float) -> None:
        self.fork_server = fork_server
        self.workers: set[Worker] = set()
        self._start_seconds = start_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def open(self) -> None:
        """Start the nursery. Raises: RewardError with what it could not import."""
        await self._call(self.fork_server.open)

    async def fork(self) -> Worker:
        """Return a new worker that is ready.

        Raises: OSError, EOFError when it died, TimeoutError when it was not ready in time, RewardError with what it
            could not do.
        """
        pid, connection = await self._call(self.fork_server.fork)
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_ANSWER)
        worker = Worker(pid, reader, writer)
        self.workers.add(worker)
        await asyncio.wait_for(worker.ready(), self._start_seconds)
        return worker

    async def dismiss(self, worker: Worker) -> None:
        """Hang up on a worker."""
        self.workers.discard(worker)
        worker.writer.close()
        with contextlib.suppress(OSError):
            await worker.writer.wait_closed()

    async def end(self, worker: Worker) -> ExitReason:
        """Kill a worker with all that it started, and return how it ended."""
        return await self._call(lambda: self.fork_server.end(worker.pid))

    async def close(self) -> None:
        """Dismiss everybody and end the nursery; returns when all are gone."""
        for worker in tuple(self.workers):
            await self.dismiss(worker)
        await asyncio.shield(self._call(self.fork_server.close))
        self._thread.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
