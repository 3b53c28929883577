"""Grading in processes that can be killed: a reward that hangs or crashes costs one sample and no other.

Each worker judges one sample at a time. When the deadline passes, its whole process group is killed and a new
worker is forked (milliseconds: the rewards are imported already), so a later sample never waits for, and is
never judged by, a process that an earlier one damaged.

This contains mistakes. It is no sandbox: rewards run with the user's rights.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

from gnomon.core.errors import ConfigError, GnomonError, GradingError, refusal_of
from gnomon.core.processes.client import ExitReason, ForkServer, Limits
from gnomon.core.processes.exceptions import exception_text
from gnomon.core.processes.pool import DeadlineExceeded, Worker, WorkerPool
from gnomon.core.threads import run_in_thread
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample, Verdict
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.grading_worker import from_sample, grading_program, to_verdict
from gnomon.rewards.judge import RubricJudge
from gnomon.rewards.model import RewardModel


class Scorer(Protocol):
    """A loaded reward model, or the client of a judge."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Mapping[str, float] | str]:
        """Return what each answer to one question gets, or the cause why it gets nothing.

        What it gets is named by what follows the part's name: "" is the score.
        """
        ...

    def close(self) -> None:
        """Begin nothing new; nothing to do unless said otherwise."""
        return


_SPAWN_ATTEMPTS = 3
_TRIES = 2
_FOREIGN_TRIES = 8
"""Tries of a sample whose workers are killed from outside, or by another sample; none of that is its own doing."""


class GradingPool:
    """Grades samples in ``limits.workers`` processes, after the reward models have scored them in a thread of this one.

    Args:
        grading: The rewards.
        limits: Limits of the processes.
        load: Loads a reward model; needed where there is one.

    >>> async def grade_one() -> float | None:
    ...     async with GradingPool(grading) as pool:
    ...         return (await pool.grade(Sample("1 + 1 =", "2", columns={"answer": "2"}))).reward
    >>> from gnomon.rewards.exact import Numeric
    >>> from gnomon.rewards.grading import WeightedReward
    >>> grading = Grading((WeightedReward(Numeric()),))
    >>> asyncio.run(grade_one())
    1.0
    """

    def __init__(
        self,
        grading: Grading,
        limits: Limits | None = None,
        load: Callable[[RewardModel | RubricJudge], Scorer] | None = None,
    ) -> None:
        if grading.models and load is None:
            raise ConfigError(f"the reward '{next(iter(grading.models))}' is a model, and nothing here loads models")
        self._load = load
        self._models: list[tuple[WeightedReward, Scorer, ThreadPoolExecutor]] = []
        self._grading = grading
        self._limits = limits or Limits()
        self._worker_pool = WorkerPool(
            ForkServer(grading_program(grading), self._limits), "grading", self._limits.start_seconds
        )
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        self._replacements: set[asyncio.Task[ExitReason]] = set()
        self._fault: GnomonError | None = None
        self._is_closed = False
        self._is_joint = grading.may_be_joint

    async def start(self) -> None:
        """Load the reward models, import the rewards and fork the workers.

        Raises:
            ModelError: If a reward model cannot be used.
            RewardError: If a reward cannot be used.
        """
        try:
            for reward in self._grading.rewards:
                if isinstance(reward.verifier, RewardModel | RubricJudge) and self._load is not None:
                    # A model computes a batch at a time, in the order of asking; judges are waited for.
                    workers = reward.verifier.concurrency if isinstance(reward.verifier, RubricJudge) else 1
                    threads = ThreadPoolExecutor(workers, thread_name_prefix="scores")
                    self._models.append((reward, await run_in_thread(partial(self._load, reward.verifier)), threads))
            await self._worker_pool.open()
            for _ in range(self._limits.workers):
                self._idle.put_nowait(await self._spawn())
        except BaseException:
            # Kill before close: a worker that hangs in an import would otherwise be waited for.
            self._worker_pool.fork_server.kill()
            await self.close()
            raise

    async def close(self) -> None:
        """End every worker with all that it started, and wait until they are gone. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fault = GradingError("the grading pool is closed")
        # Replacements that are under way end first, or a worker that is being forked would outlive the pool.
        await asyncio.gather(*self._replacements, return_exceptions=True)
        # None wakes whoever waits for a worker; `_take` puts it back for the next one.
        self._idle.put_nowait(None)
        await self._worker_pool.close()
        for _, score, threads in self._models:
            score.close()
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        self._models.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def grade(self, sample: Sample) -> Grade:
        """Return a reward or an error; never raises for a bad sample.

        A sample whose worker dies is tried once more, in case an earlier sample had damaged that worker, and more often
        where the worker was killed from outside. It is an error then, never a reward.

        Raises:
            GradingError: If no worker can be started, a reward model fails, or after `close`.
        """
        (sample,) = await self._scored([sample])
        (grade,) = await self._graded({"sample": from_sample(sample)}, 1)
        return grade

    async def grade_together(self, samples: Sequence[Sample]) -> list[Grade]:
        """Return the grades of all answers to one question, which a reward may compare with each other.

        They have the deadlines of all of them together. Where no reward sees them all, it is `grade` of each.

        Raises:
            GradingError: As `grade`.
        """
        samples = await self._scored(samples)
        if self._is_joint and samples:
            grades = await self._graded({"samples": [from_sample(sample) for sample in samples]}, len(samples))
            if grades:
                return grades
            # The workers answered that no reward sees all samples. Nothing was
            # imported here to find that out, and nothing changes it later.
            self._is_joint = False
        alone = await asyncio.gather(*(self._graded({"sample": from_sample(sample)}, 1) for sample in samples))
        return [grade for (grade,) in alone]

    async def _scored(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return answers to one question with the scores of all reward models.

        Raises:
            GradingError: If a model fails.
        """
        for reward, score, threads in self._models:
            seen = [(number, part) for number, one in enumerate(samples) if (part := reward.seen(one)) is not None]
            if self._is_closed or not seen:
                continue
            try:
                found = await run_in_thread(partial(score, [part for _, part in seen]), threads)
            except Exception as error:
                if refusal_of(error) is not None:  # a full disk ends a run as it does elsewhere
                    raise
                raise GradingError(
                    f"the model of the reward '{reward.part}' failed: {exception_text(error)}; "
                    "where memory ran out, lower its batch_size"
                ) from error
            given = {number: value for (number, _), value in zip(seen, found, strict=True)}
            samples = [
                replace(one, scores={**one.scores, **_named(reward.part, given.get(number, {}))})
                for number, one in enumerate(samples)
            ]
        return samples

    async def _graded(self, request: dict[str, Any], count: int) -> list[Grade]:
        own = foreign = 0
        while True:
            said = await self._try(request, count)
            if isinstance(said, list):
                return [Grade(verdict.reward, verdict.parts, verdict.error, verdict.answer) for verdict in said]
            # Deaths by the sample's own doing and deaths from outside have separate limits: a machine that
            # kills workers, when memory is short, must not turn good samples into errors at the second kill.
            own, foreign = own + (not said.is_foreign), foreign + said.is_foreign
            if own == _TRIES or foreign == _FOREIGN_TRIES:
                often = f", {foreign} times" if said.is_foreign else ""
                return [Grade(None, error=f"{self._names}: the grading process {said.words}{often}")] * count

    async def _try(self, request: dict[str, Any], count: int) -> list[Verdict] | ExitReason:
        """Return ``count`` verdicts, or how the worker died."""
        worker = await self._take()
        # Until the reply is here the worker may still be at work on this sample. A
        # cancelled request therefore replaces its worker instead of giving it back.
        is_sound = False
        try:
            said = await worker.ask(request, self._limits.deadline_seconds * count)
            is_sound = True
            if said is None:
                return [self._late] * count
            return [to_verdict(fields) for fields in said.get("verdicts", [said])]
        except (TypeError, RecursionError) as error:
            # Raised while the request is encoded, before a byte is sent: the worker is untouched.
            is_sound = True
            return [Verdict(None, error=f"the sample cannot be sent to a grading process: {error}")] * count
        except (DeadlineExceeded, OSError, EOFError, ValueError) as error:
            is_sound = True  # its succession is waited for here, to learn how it died
            # Shielded, since a cancelled request must not cancel the
            # replacement: the pool would lose a worker for good.
            death = await asyncio.shield(self._replace_worker(worker))
            return [self._late] * count if isinstance(error, DeadlineExceeded) and not death.is_foreign else death
        finally:
            if not is_sound:
                self._replace_worker(worker)
            elif worker in self._worker_pool.workers:
                self._idle.put_nowait(worker)

    async def _take(self) -> Worker:
        while True:
            worker = await self._idle.get()
            if worker is None or self._fault is not None:
                self._idle.put_nowait(None)
                raise GradingError(str(self._fault)) from self._fault
            # A worker can die while it is idle; its end of file is seen here, before a sample is given to it.
            if not worker.reader.at_eof():
                return worker
            self._replace_worker(worker)

    def _replace_worker(self, worker: Worker) -> "asyncio.Task[ExitReason]":
        """End a worker and put another in its place; the result says how it ended."""
        self._worker_pool.workers.discard(worker)
        succession = asyncio.ensure_future(self._replace(worker))
        self._replacements.add(succession)
        succession.add_done_callback(self._replacements.discard)
        return succession

    async def _replace(self, worker: Worker) -> ExitReason:
        await self._worker_pool.dismiss(worker)
        if self._is_closed:
            return ExitReason("ended with the pool")
        death = await self._worker_pool.end(worker)
        if self._fault is not None:
            return death
        try:
            self._idle.put_nowait(await self._spawn())
        except GnomonError as error:
            self._fault = GradingError(f"a grading process that {death.words} cannot be replaced: {error}")
            self._idle.put_nowait(None)
        return death

    async def _spawn(self) -> Worker:
        """Return a new worker.

        Raises:
            GradingError: If three in a row die before their first word. Those that end with the process that started
                them, which a sample may kill, are not counted until it was started `_FOREIGN_TRIES` times.
        """
        # A death counts against the rewards only if the fork server did not
        # restart meanwhile: else the server's end took the worker along.
        births, fork_server = 0, self._worker_pool.fork_server
        last = fork_server.starts + _FOREIGN_TRIES
        while births < _SPAWN_ATTEMPTS:
            starts = fork_server.starts
            try:
                return await self._worker_pool.fork()
            except TimeoutError as error:
                raise GradingError(f"a worker was not ready after {self._limits.start_seconds:g} s") from error
            except (OSError, EOFError) as error:
                died = error
            births += starts == fork_server.starts or starts >= last
        raise GradingError(f"grading processes die when they start: {died!r}") from died

    @property
    def _late(self) -> Verdict:
        return Verdict(None, error=f"{self._names}: timed out after {self._limits.deadline_seconds:g} s")

    @property
    def _names(self) -> str:
        return ", ".join(r.part for r in self._grading.rewards)


def _named(part: str, found: Mapping[str, float] | str) -> dict[str, float | str]:
    """Return what one answer gets by its whole names."""
    return {part: found} if isinstance(found, str) else {part + end: value for end, value in found.items()}
