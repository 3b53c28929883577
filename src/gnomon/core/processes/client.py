"""The run's side of `core/processes/server.py`: start the fork server, have it fork and end workers, close it.

All calls block, each for milliseconds except `open`; `core/processes/pool.py` makes them from one thread of
its own.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gnomon.core.errors import ConfigError, GradingError, RewardError, bounded
from gnomon.core.processes.server import Channel
from gnomon.core.processes.stop_signals import STOP_SIGNALS, stop_signals_blocked
from gnomon.core.redaction import tail
from gnomon.core.tables import to_table

# What a grading process may know of its surroundings. No keys, no tokens: those are passed by name.
_ENVIRONMENT = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH",
    "PYTHONUSERBASE", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
)  # fmt: skip
# Workers grade beside each other: a thread for each core in each of them would make them wait for one another.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
@bounded(
    "grading",
    workers="at least 1",
    deadline_seconds="above 0",
    start_seconds="above 0",
    memory_gib="above 0, or None for no limit",
)
class Limits:
    """What grading may use.

    Attributes:
        workers: Number of processes that grade at the same time, >= 1.
        deadline_seconds: Seconds of wall time for one sample, > 0; after that the worker is killed with all that it
            started.
        start_seconds: Seconds for importing the rewards, > 0.
        memory_gib: Address space that a worker may take beyond its imports; None for no limit.
        environment: Names of further environment variables that rewards may read, such as a judge's key.
    """

    workers: int = 2
    deadline_seconds: float = 5.0
    start_seconds: float = 60.0
    memory_gib: float | None = 4.0
    environment: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExitReason:
    """How a worker ended.

    Its own code exits, or ends by a fault such as SIGSEGV. A signal that another process or the kernel sends (out of
    memory, or to stop it), or the end of the fork server, says nothing about the work that was under way.

    Attributes:
        words: "was killed by SIGKILL".
        is_foreign: Whether that was not its own code's doing.
    """

    words: str
    is_foreign: bool = False


@dataclass(frozen=True)
class WorkerProgram:
    """A program of workers. module: run by name. settings: a dataclass that it is told, as a table.

    Attributes:
        what: What it imports, in messages: "the rewards".
        names: Names of what it imports, for messages.
    """

    module: str
    settings: Any
    what: str
    names: str


class ForkServer:
    """One process that forks the workers of a program.

    starts: how often it was started.
    """

    def __init__(self, work: WorkerProgram, limits: Limits) -> None:
        if sys.platform == "win32":
            raise ConfigError("grading processes need fork, which Windows does not have; use WSL")
        self._work = work
        self._limits = limits
        self._control: socket.socket | None = None
        self._channel: Channel | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._forked: set[int] = set()
        self._owed = 0
        self.starts = 0

    def open(self) -> None:
        """Start the fork server and have it import the rewards.

        Raises:
            RewardError: A reward cannot be used or does not import in time.
            GradingError: The program itself does not start.
        """
        for remaining in reversed(range(_STARTS)):
            try:
                # Forking beside other threads can leave a lock held forever: then each worker imports for itself.
                if self._open(warm=True) > 1:
                    self.close()
                    self._open(warm=False)
            except _KilledAtStart:
                if not remaining:
                    raise
            else:
                return

    def fork(self) -> tuple[int, socket.socket]:
        """Return a new worker's number and the socket to talk to it, which speaks first when it is ready.

        A fork server that died (a reward killed it, or the system ran out of memory) is started again.

        Raises:
            RewardError, GradingError: As for `open`.
            OSError, EOFError: The fork server died once more.
        """
        try:
            return self._fork()
        except (OSError, EOFError):
            self.close()
            self.open()
        return self._fork()

    def end(self, pid: int) -> ExitReason:
        """Kill a worker with all that it started and return how it ended."""
        # A number of a former fork server may belong to another process by now, and is never killed.
        if pid not in self._forked:
            return _WITH_FORK_SERVER  # one that was started since then knows nothing of it
        self._forked.discard(pid)
        try:
            answer = self._ask({"do": "end", "pid": pid})
        except (OSError, EOFError):
            _kill_group(pid)
            return _WITH_FORK_SERVER
        status = answer["status"]
        if answer["was_stopped"]:
            return ExitReason("was stopped by a signal", is_foreign=True)
        # It lived when it was killed: the connection broke, or the answer was none.
        if not answer["was_dead"]:
            return ExitReason("closed its connection, or sent what is no answer")
        return ExitReason(exit_reason(status), status is not None and -status in _FOREIGN)

    def kill(self) -> None:
        """End the fork server at once, from any thread; `open` in another thread then returns."""
        if self._program is not None and self._program.poll() is None:
            _kill_group(self._program.pid)

    def close(self) -> None:
        """End every worker and the fork server, and wait until they are gone."""
        if self._control is not None:
            self._control.close()
        if self._program is not None:
            try:
                self._program.wait(_ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                _kill_group(self._program.pid)
                self._program.wait()
            # A fork server that did not end by itself did not end its workers either.
            if self._program.returncode != 0:
                for pid in self._forked:
                    _kill_group(pid)
        if self._said is not None:
            self._said.close()
        self._forked = set()
        self._control = self._channel = self._program = self._said = None

    def _open(self, warm: bool) -> int:
        """Start the program and return how many threads it has after its imports."""
        # The socket is the lifeline: it closes with this process, however that ends, and the fork server ends then.
        ours, theirs = socket.socketpair()
        self._control, self._channel, self._owed = ours, Channel(ours), 0
        self.starts += 1
        # A file and no pipe: a pipe that nobody reads would stop the program once it is full.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 # closed in `close`
        with theirs, stop_signals_blocked():
            self._program = subprocess.Popen(
                [sys.executable, "-P", "-m", self._work.module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=self._environment(),
                start_new_session=True,
            )
        memory = self._limits.memory_gib
        setup = {
            "settings": to_table(self._work.settings),
            # User code is found where this process finds it; "" is the
            # working directory, which -P leaves out on purpose.
            "search": [p for p in sys.path if p],
            "memory_bytes": None if memory is None else int(memory * 2**30),
            "warm": warm,
        }
        try:
            ready = self._ask(setup, self._limits.start_seconds)
        except (OSError, EOFError) as error:
            raise self._no_start(error) from error
        if ready["fault"] is not None:
            self.close()
            raise RewardError(ready["fault"])
        return int(ready["threads"])

    def _no_start(self, error: Exception) -> Exception:
        ended = self._ended_by_itself()
        self.kill()
        said = self._tail()
        self.close()
        if isinstance(error, TimeoutError):
            return RewardError(
                f"importing {self._work.what} ({self._work.names}) took more than {self._limits.start_seconds:g} s; "
                "an import must not start work, or give it more time with start_seconds"
            )
        wrong = f"the process {exit_reason(ended)} while it imported {self._work.what} ({self._work.names})"
        # Killed from outside: the reward's import is not to blame, and is tried again.
        if ended is not None and -ended in _FOREIGN:
            return _KilledAtStart(wrong)
        if said or ended is None:
            return GradingError(f"{wrong}: {said or repr(error)}")
        return RewardError(f"{wrong}; an import must not end the process")

    def _ended_by_itself(self) -> int | None:
        """Return the status of a program that hung up, once it has one."""
        assert self._program is not None, "it was started"
        try:
            return self._program.wait(1)
        except subprocess.TimeoutExpired:
            return None

    def _tail(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        return tail(self._said.read(), 2000)

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = int(self._ask({"do": "fork"}, file=theirs.fileno())["pid"])
        except BaseException:
            ours.close()
            raise
        self._forked.add(pid)
        return pid, ours

    def _ask(self, message: Mapping[str, Any], seconds: float | None = None, file: int | None = None) -> dict[str, Any]:
        """Return the fork server's answer, which comes in the order of asking: one that came too late is passed
        over.
        """
        if self._control is None or self._channel is None:
            raise EOFError("the fork server is closed")
        self._control.settimeout(_ANSWER_SECONDS if seconds is None else seconds)
        self._channel.send(dict(message), file)
        self._owed += 1
        answer: dict[str, Any] | None = None
        # An answer that came after its deadline is still in the socket, before the one that is waited for now.
        while self._owed:
            answer, _ = self._channel.receive()
            if answer is None:
                raise EOFError("the fork server closed its socket")
            self._owed -= 1
        assert answer is not None, "one answer was owed at least"
        return answer

    def _environment(self) -> dict[str, str]:
        passed = {k: os.environ[k] for k in (*_ENVIRONMENT, *self._limits.environment) if k in os.environ}
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (source, passed.get("PYTHONPATH", "")) if p)
        # The order of a set of texts must not be another one in the next session. Bytecode is never written: where
        # files may not be larger, Python leaves half a compiled module, and every later program reads that half.
        fixed = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**dict.fromkeys(_ONE_THREAD, "1"), **fixed, **passed, "PYTHONPATH": path}


class _KilledAtStart(GradingError):
    """A program that another process or the kernel ended while it imported: it is started again."""


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_STARTS = 3
_FOREIGN = frozenset({signal.SIGKILL, signal.SIGQUIT, *STOP_SIGNALS})
_WITH_FORK_SERVER = ExitReason(
    "ended with the process that started it, which was killed (out of memory?)", is_foreign=True
)


def exit_reason(status: int | None) -> str:
    """Return how a process ended, in words; None is not known."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
