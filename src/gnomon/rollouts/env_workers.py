"""The run's side of `tasks/env_server.py`: one process for each rollout that is under way, ended when it misbehaves."""

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from gnomon.core.errors import ConfigError, EngineError, RewardError, shortened
from gnomon.core.processes.client import ExitReason, ForkServer, Limits, WorkerProgram
from gnomon.core.processes.pool import DeadlineExceeded, Worker, WorkerPool
from gnomon.core.processes.server import Channel
from gnomon.core.progress import show_progress
from gnomon.core.types import EndedBy
from gnomon.rewards.base import Sample
from gnomon.rewards.sandbox.container import ENGINE_VARIABLES
from gnomon.tasks import environment
from gnomon.tasks.environment import EnvironmentConfig

T = TypeVar("T")

_TRIES = 3
"""Processes that are started, or asked what an environment offers, where what ends them is not the environment."""
_ALONE = 4
"""Environments at once whose processes have parents of their own."""


class EnvError(Exception):
    """An environment failed in one rollout.

    Args:
        by: How the conversation ended.
        cause: The cause, in one line.
    """

    def __init__(self, by: EndedBy, cause: str) -> None:
        super().__init__(cause)
        self.by: EndedBy = by
        self.cause = cause


class EnvWorkerLost(Exception):
    """The process of an environment ended, and the environment did not end it: a conversation to play again."""


@dataclass(frozen=True)
class EnvAnswer:
    """What an environment said: messages as (role, text), a reward to add, and whether that was all.

    An agent may pay each role that it called the policy by, ``by_role``.
    """

    messages: Sequence[tuple[str, str]]
    reward: float
    is_done: bool
    by_role: Mapping[str, float] | None = None


def answered(
    messages: Sequence[tuple[str, str]], reward: float | Mapping[str, float] | None, is_done: bool
) -> EnvAnswer:
    """Return what was said with its reward, which may be a table of roles."""
    if isinstance(reward, Mapping):
        return EnvAnswer(messages, 0.0, is_done, reward)
    return EnvAnswer(messages, reward or 0.0, is_done)


@dataclass
class EnvWorker:
    """One environment for one rollout.

    Attributes:
        is_sound: Whether its process may serve another rollout afterwards.
    """

    worker: Worker
    timeout_seconds: float
    exit_reason: Callable[[Worker], Coroutine[Any, Any, ExitReason]]
    is_sound: bool = True

    async def reset(
        self, prompt: str, columns: Mapping[str, Any], seed: int, variables: Mapping[str, str] | None = None
    ) -> EnvAnswer:
        """Return its first observation; what it draws from now on begins with ``seed``. An agent runs to its end.

        Args:
            variables: Environment variables that an agent gets, which then has no deadline here; None for none.

        Raises:
            EnvError: If the environment fails.
            EnvWorkerLost: If its worker is gone.
        """
        request = {"do": "reset", "prompt": prompt, "columns": dict(columns), "seed": seed}
        if variables is None:
            return await self._ask(request)
        return await self._ask({**request, "variables": dict(variables)}, math.inf)

    async def step(self, text: str) -> EnvAnswer:
        """Return its reply to an answer.

        Raises:
            EnvError: If the environment fails.
            EnvWorkerLost: If its worker is gone.
        """
        return await self._ask({"do": "step", "text": text})

    async def end(self) -> float:
        """Have it close, and return the reward that it knows only now, or 0.

        Raises:
            EnvError: If the environment fails.
            EnvWorkerLost: If its worker is gone.
        """
        return (await self._ask({"do": "close"})).reward

    async def blame(self, late: str = "") -> EnvError | EnvWorkerLost:
        """End a process that gave no answer; return whose failure it is, the environment's or that of what ended it.

        Args:
            late: What is said of one that took too long; "" where it ended.
        """
        death = await self.exit_reason(self.worker)
        if death.is_foreign:
            return EnvWorkerLost(death.words)
        return EnvError("timeout", late) if late else EnvError("fault", f"its process {death.words}")

    async def _ask(self, request: dict[str, Any], seconds: float | None = None) -> EnvAnswer:
        # Not sound until the reply has arrived: a caller that is cancelled meanwhile leaves a worker in an unknown
        # state.
        is_sound, self.is_sound = self.is_sound, False
        late = f"no reply after {self.timeout_seconds:g} s"
        try:
            said = await self.worker.ask(request, self.timeout_seconds if seconds is None else seconds)
        except (TypeError, RecursionError) as error:
            raise EnvError("fault", f"the task's columns cannot be sent: {error}") from error
        except DeadlineExceeded as error:
            raise await self.blame(late) from error
        except (OSError, EOFError, ValueError) as error:
            raise await self.blame() from error
        if said is None:
            raise EnvError("timeout", late)
        if said["fault"] is not None:
            raise EnvWorkerLost(said["fault"]) if said.get("is_lost") else EnvError("fault", said["fault"])
        if "flood" in said:
            raise EnvError("flood", f"a reply of {said['flood']} characters")
        self.is_sound = is_sound
        messages = [(str(role), str(text)) for role, text in said.get("messages", ())]
        return answered(messages, said["reward"], bool(said.get("is_done")))


class EnvWorkers:
    """Environments for ``plan.max_concurrent`` rollouts at once; more wait.

    A process serves one rollout at a time. It serves another one only if nothing went wrong in it. All processes have
    one parent, which code in any of them can end; what must not share that fate is opened ``alone``.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._plan = plan
        self._worker_pool = WorkerPool(environment_fork_server(plan), "environments", Limits().start_seconds)
        self._free = asyncio.Semaphore(plan.max_concurrent)
        self._free_alone = asyncio.Semaphore(_ALONE)
        self._idle: list[Worker] = []

    async def __aenter__(self) -> Self:
        try:
            with show_progress("starting environments"):
                await self._worker_pool.open()
        except RewardError as error:
            await self._worker_pool.close()
            raise ConfigError(str(error)) from error
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._worker_pool.close()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[EnvWorker]:
        """Give a rollout an environment of its own; its process is ended afterwards if it is not sound.

        Raises:
            EngineError: If no process can be started.
        """
        async with self._free:
            # A process may have ended while it was idle.
            while self._idle and self._idle[-1].reader.at_eof():
                await self._reap(self._idle.pop())
            worker = self._idle.pop() if self._idle else await self._spawn()
            env_worker = EnvWorker(worker, self._plan.timeout_seconds, self._reap)
            is_over = False
            try:
                yield env_worker
                is_over = True
            finally:
                if is_over and env_worker.is_sound:
                    self._idle.append(worker)
                elif worker in self._worker_pool.workers:
                    # Not where `blame` has reaped it already. Shielded: a cancelled rollout must not leave its process
                    # behind.
                    await asyncio.shield(self._reap(worker))

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[EnvWorker]:
        """Give a rollout an environment whose process has a parent of its own, which costs an import.

        Raises:
            EngineError: If no process can be started.
        """
        async with self._free_alone:
            worker_pool = WorkerPool(environment_fork_server(self._plan), "environment", Limits().start_seconds)

            async def exit_reason(worker: Worker) -> ExitReason:
                await worker_pool.dismiss(worker)
                return await worker_pool.end(worker)

            try:
                yield EnvWorker(await self._spawn(worker_pool), self._plan.timeout_seconds, exit_reason)
            finally:
                await asyncio.shield(worker_pool.close())

    async def _spawn(self, worker_pool: WorkerPool | None = None) -> Worker:
        try:
            if worker_pool is not None:
                await worker_pool.open()
            pool = worker_pool or self._worker_pool
            for _ in range(_TRIES - 1):
                # Another conversation may end the parent of all between a fork and the first word of what was forked.
                with contextlib.suppress(EOFError, ConnectionError):
                    return await pool.fork()
            return await pool.fork()
        except (OSError, EOFError, TimeoutError, RewardError) as error:
            raise EngineError(f"a process for the environment {self._plan.names} does not start: {error!r}") from error

    async def _reap(self, worker: Worker) -> ExitReason:
        if worker not in self._worker_pool.workers:
            return ExitReason("ended")
        await self._worker_pool.dismiss(worker)
        return await self._worker_pool.end(worker)


def describe(plan: EnvironmentConfig) -> tuple[dict[str, Any], ...]:
    """Import the environment in a process that can be killed, and return the JSON schemas of its tools.

    Raises:
        ConfigError: If it cannot be found, imported, built with its settings, or described.
    """
    fork_server = environment_fork_server(plan)
    try:
        with show_progress(f"trying the environment {plan.names}"):
            fork_server.open()
            for _ in range(_TRIES):
                pid, connection = fork_server.fork()
                with connection:
                    connection.settimeout(Limits().start_seconds)
                    said = _described(Channel(connection))
                how = fork_server.end(pid)
                # Tried again only where something else ended the process, such as the kernel's memory killer.
                if said is not None or not how.is_foreign:
                    break
    except (RewardError, OSError, EOFError) as error:
        raise ConfigError(str(error)) from error
    finally:
        fork_server.close()
    if said is None or said["fault"] is not None:
        fault = f"its process {how.words}" if said is None else said["fault"]
        raise ConfigError(f"the environment {plan.names} cannot be built with {plan.settings}: {fault}")
    return tuple(said["schemas"])


def _described(channel: Channel) -> dict[str, Any] | None:
    """Return what a worker says of its environment; None where it ended."""
    said, _ = channel.receive()
    if said is not None and said["fault"] is None:
        channel.send({"id": "describe", "do": "describe"})
        said, _ = channel.receive()
    return said


def environment_fork_server(plan: EnvironmentConfig) -> ForkServer:
    """Return a fork server, not yet open, of processes that run the environment."""
    engines = ENGINE_VARIABLES if plan.container else ()
    limits = Limits(memory_gib=plan.memory_gib or None, environment=(*plan.variables, *engines))
    return ForkServer(WorkerProgram("gnomon.tasks.env_server", plan, "the environment", plan.names), limits)


# An environment is played with made answers before a model loads, in a process as in training.

FORM = (
    "an environment is `reset(**columns) -> str | None` and `step(text: str) -> Reply | str`, "
    'Reply(text="", reward=None, is_done=False, role="user")'
)
_OURS = f"({Path(environment.__file__).name}:"
_ENDED = "its process ended"
_MOST_HUNG = 2
"""Conversations with one answer, where what ends their processes is not the environment."""


@dataclass(frozen=True)
class _Played:
    """One conversation of one answer.

    Attributes:
        where: What failed, "" for nothing.
        heard: What reset, step and close returned.
    """

    sample: Sample
    where: str = ""
    cause: str = ""
    heard: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether it was called or returned what none may be, whatever the answer."""
        return _OURS in self.cause

    @property
    def said(self) -> str:
        """The failure in words."""
        answer = "" if self.where == "reset" else f" to the answer {self.sample.completion!r}"
        return f"{self.where} failed{answer}: {self.cause}"


def try_environment(plan: EnvironmentConfig, questions: Sequence[Sequence[Sample]]) -> tuple[str, ...]:
    """Play one turn with each made answer to a few questions; each conversation has an instance of its own.

    Returns:
        What should be said, a sentence each.

    Raises:
        ConfigError: Naming the cause and the protocol's line when it takes or returns what no environment may, or fails
            in every conversation.
    """
    fork_server = environment_fork_server(plan)
    with show_progress(f"trying the environment {plan.names}"):
        try:
            fork_server.open()
            samples = [sample for answers in questions for sample in answers]
            played = list(_conversations(fork_server, plan, samples))
            again = () if any(one.where for one in played) else tuple(_conversations(fork_server, plan, samples[:1]))
        finally:
            fork_server.close()
    failed = [one for one in played if one.where]
    fatal = next((one for one in failed if one.is_wrong), None)
    if fatal is None and failed and len(failed) == len(played):
        fatal = failed[0]
    if fatal is not None:
        many = "each" if len(failed) == len(played) else str(len(failed))
        columns = ", ".join(map(str, fatal.sample.columns)) or "none"
        raise ConfigError(
            f"environment '{plan.names}': {fatal.said}\n"
            f"so it was in {many} of the {len(played)} conversations that were tried; the row's columns are {columns}\n"
            f"{FORM}"
        )
    if not failed:
        return tuple(
            f"environment '{plan.names}': {where} returned {shortened(str(one.heard[place]))}, and when it was played "
            f"again with the same seed {shortened(str(other.heard[place]))}: a resumed run plays another game; draw by "
            "the column seed, or by random and numpy, which are seeded"
            for one, other in zip(played[:1], again, strict=True)
            for place, where in [(0, "reset"), (1, "step")]
            if one.heard[place] != other.heard[place]
        )[:1]
    return (
        f"environment '{plan.names}' fails in {len(failed)} of {len(played)} conversations that were tried; "
        f"{failed[0].said}; a reply that fails ends a rollout, which is graded as it is",
    )


def _conversations(fork_server: ForkServer, plan: EnvironmentConfig, samples: Sequence[Sample]) -> Iterator[_Played]:
    hung = 0
    for sample in samples:
        if hung >= _MOST_HUNG:
            return
        for _ in range(_TRIES):
            pid, connection = fork_server.fork()
            with closing(connection):
                played = _played(connection, plan, sample)
            how = fork_server.end(pid)
            if played.cause != _ENDED or not how.is_foreign:
                break
        if played.cause == _ENDED:
            played = replace(played, cause=f"its process {how.words}")
        # Each hanging conversation costs a whole timeout, so two are enough to know.
        hung += played.cause.startswith("no reply after")
        yield played


def _played(connection: socket.socket, plan: EnvironmentConfig, sample: Sample) -> _Played:
    channel = Channel(connection)
    connection.settimeout(Limits().start_seconds)
    hello, _ = channel.receive()
    if hello is None or hello["fault"] is not None:
        return _Played(sample, "its process", _ENDED if hello is None else str(hello["fault"]))
    columns = {"seed": 0, **sample.columns}
    requests: Mapping[str, dict[str, Any]] = {
        "reset": {"prompt": sample.prompt, "columns": columns, "seed": 0},
        "step": {"text": sample.completion},
        "close": {},
    }
    connection.settimeout(plan.timeout_seconds)
    heard: list[Mapping[str, Any]] = []
    for where, request in requests.items():
        try:
            channel.send({"id": where, "do": where, **request})
            said, _ = channel.receive()
        except TimeoutError:
            return _Played(sample, where, f"no reply after {plan.timeout_seconds:g} s (environment.timeout_seconds)")
        except (OSError, EOFError):
            said = None
        if said is None:
            return _Played(sample, where, _ENDED)
        if said["fault"] is not None:
            return _Played(sample, where, str(said["fault"]))
        heard.append({name: said.get(name) for name in ("messages", "reward", "is_done")})
    return _Played(sample, heard=tuple(heard))
