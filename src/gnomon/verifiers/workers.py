"""Grading in processes that can be killed: a reward that hangs or crashes costs one sample and no other.

Each worker judges one sample at a time. When the deadline passes, its whole process group is killed and a new
worker is forked (milliseconds: the rewards are imported already), so a later sample never waits for, and is
never judged by, a process that an earlier one damaged.

This contains mistakes. It is no sandbox: rewards run with the user's rights.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from gnomon.errors import GnomonError, GradingError, RewardError
from gnomon.types import Grade
from gnomon.verifiers import wire
from gnomon.verifiers.base import Sample, Verdict
from gnomon.verifiers.grade import Grading
from gnomon.verifiers.nursery import Limits, Nursery

T = TypeVar("T")

# A loop that was busy elsewhere finds the timer and the answer at once. The worker's own clock decides.
GRACE_SECONDS = 0.05
LONGEST_ANSWER = 1 << 20
_BIRTHS = 3


class Hung(Exception):
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
        self.writer.write(wire.encode({"id": number, **request}))
        answer = asyncio.ensure_future(self._next())
        try:
            for seconds in (deadline_seconds, GRACE_SECONDS):
                await asyncio.wait({answer}, timeout=seconds)
                if answer.done():
                    break
            else:
                raise Hung
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
        return wire.decode(line)


class GradingPool:
    """Grades samples in ``limits.workers`` processes.

    >>> async def grade_one() -> float | None:
    ...     async with GradingPool(grading) as pool:
    ...         return (await pool.grade(Sample("1 + 1 =", "2", columns={"answer": "2"}))).reward
    >>> from gnomon.verifiers.exact import Numeric
    >>> from gnomon.verifiers.grade import WeightedReward
    >>> grading = Grading((WeightedReward(Numeric()),))
    >>> asyncio.run(grade_one())
    1.0
    """

    def __init__(self, grading: Grading, limits: Limits | None = None) -> None:
        self._grading = grading
        self._limits = limits or Limits()
        self._nursery = Nursery(grading, self._limits)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        self._workers: set[Worker] = set()
        self._successions: set[asyncio.Task[str]] = set()
        self._fault: GnomonError | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Import the rewards and fork the workers.

        Raises: RewardError when a reward cannot be used.
        """
        try:
            await self._call(self._nursery.open)
            for _ in range(self._limits.workers):
                self._idle.put_nowait(await self._hire())
        except BaseException:
            self._nursery.kill()
            await self.close()
            raise

    async def close(self) -> None:
        """End every worker with all that it started, and wait until they are gone. Twice is once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fault = GradingError("the grading pool is closed")
        await asyncio.gather(*self._successions, return_exceptions=True)
        for worker in tuple(self._workers):
            await self._dismiss(worker)
        self._idle.put_nowait(None)
        await asyncio.shield(self._call(self._nursery.close))
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def grade(self, sample: Sample) -> Grade:
        """Return a reward or an error; never raises for a bad sample.

        A sample whose worker dies is tried once more, in case an earlier sample had damaged that worker.
        Raises: GradingError when no worker can be started, or after `close`.
        """
        fields = wire.from_sample(sample)
        verdict, death = await self._try(fields)
        if death is not None:
            verdict, death = await self._try(fields)
        if verdict is None:
            return Grade(None, error=f"{self._names}: the grading process {death}")
        return Grade(verdict.reward, verdict.parts, verdict.error)

    async def _try(self, fields: dict[str, Any]) -> tuple[Verdict | None, str | None]:
        """Return a verdict, or how the worker died."""
        worker = await self._take()
        is_sound = False
        try:
            said = await worker.ask({"sample": fields}, self._limits.deadline_seconds)
            is_sound = True
            return self._late if said is None else wire.to_verdict(said), None
        except Hung:
            return self._late, None
        except (TypeError, RecursionError) as error:
            is_sound = True
            return Verdict(None, error=f"the sample cannot be sent to a grading process: {error}"), None
        except (OSError, EOFError, ValueError):
            is_sound = True  # its succession is waited for here, to learn how it died
            return None, await asyncio.shield(self._succeed(worker))
        finally:
            if not is_sound:
                self._succeed(worker)
            elif worker in self._workers:
                self._idle.put_nowait(worker)

    async def _take(self) -> Worker:
        while True:
            worker = await self._idle.get()
            if worker is None or self._fault is not None:
                self._idle.put_nowait(None)
                raise GradingError(str(self._fault)) from self._fault
            if not worker.reader.at_eof():
                return worker
            self._succeed(worker)

    def _succeed(self, worker: Worker) -> "asyncio.Task[str]":
        """End a worker and put another in its place; the result says how it ended."""
        self._workers.discard(worker)
        succession = asyncio.ensure_future(self._replace(worker))
        self._successions.add(succession)
        succession.add_done_callback(self._successions.discard)
        return succession

    async def _replace(self, worker: Worker) -> str:
        await self._dismiss(worker)
        if self._is_closed:
            return "ended with the pool"
        obituary = await self._call(lambda: self._nursery.end(worker.pid))
        if self._fault is not None:
            return obituary
        try:
            self._idle.put_nowait(await self._hire())
        except GnomonError as error:
            self._fault = GradingError(f"a grading process that {obituary} cannot be replaced: {error}")
            self._idle.put_nowait(None)
        return obituary

    async def _hire(self) -> Worker:
        """Return a new worker. Raises: GradingError when three in a row die before their first word."""
        for _ in range(_BIRTHS):
            try:
                return await self._fork()
            except TimeoutError as error:
                raise GradingError(f"a worker was not ready after {self._limits.start_seconds:g} s") from error
            except (OSError, EOFError) as error:
                died = error
        raise GradingError(f"grading processes die when they start: {died!r}") from died

    async def _fork(self) -> Worker:
        pid, connection = await self._call(self._nursery.fork)
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_ANSWER)
        worker = Worker(pid, reader, writer)
        self._workers.add(worker)
        await asyncio.wait_for(worker.ready(), self._limits.start_seconds)
        return worker

    async def _dismiss(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.writer.close()
        with contextlib.suppress(OSError):
            await worker.writer.wait_closed()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @property
    def _late(self) -> Verdict:
        return Verdict(None, error=f"{self._names}: timed out after {self._limits.deadline_seconds:g} s")

    @property
    def _names(self) -> str:
        return ", ".join(r.part for r in self._grading.rewards)
