"""The near side of a template: a process with the packages loaded, which forks each program in milliseconds."""

import atexit
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from gnomon.core.errors import ConfigError
from gnomon.core.processes.server import is_stopped
from gnomon.core.processes.stop_signals import stop_signals_blocked
from gnomon.rewards.sandbox.base import NotRun, SandboxLimits
from gnomon.rewards.sandbox.packages import places, room_mib
from gnomon.rewards.sandbox.watch import ENVIRONMENT, Ends, Forked, Process

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside import template, start; start.nameless(); "
    "template.main()"
)


_IMPORT_SECONDS = 120.0  # from a cold disk
_STARTS = 3


class InterpreterTemplate:
    """Starts programs by forking. Processes that are forked from this one share it; it ends when all are gone.

    Args:
        interpreter: The interpreter on the far side.
        folder: The folder on the far side.
        packages: That it imports first.

    Raises:
        ConfigError: If one of them cannot be imported.
    """

    def __init__(self, interpreter: str, folder: str, packages: tuple[str, ...]) -> None:
        # SEQPACKET keeps messages apart: requests of several processes that share this socket cannot mix.
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, stop_signals_blocked():
            command = [interpreter, "-s", "-S", "-P", "-X", "utf8", "-c", _START, folder]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *places(packages)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        # A forked child inherits this object; only the process that started the template may wait for it.
        self._owner = os.getpid()
        atexit.register(self.close)
        self._ours.settimeout(_IMPORT_SECONDS)
        try:
            said = self._ours.recv(1 << 12).decode(errors="replace")
        except OSError as error:
            said = str(error)
        if said != "ready":
            self.close()
            raise ConfigError(f"packages = {list(packages)}: {said or 'the process that imports them ended'}")

    @property
    def pid(self) -> int:
        """Return the number of its process."""
        return self._process.pid

    def close(self) -> None:
        """Let it go; it ends when no other process can ask it."""
        self._ours.close()
        if os.getpid() == self._owner and self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
                return
            self._process.kill()

    def fork(self, ends: Sequence[int], words: Sequence[str]) -> None:
        """Have it fork a program.

        Args:
            ends: Its input, output, errors, source and report.

        Raises:
            OSError: If the template is gone.
        """
        socket.send_fds(self._ours, ["\0".join(words).encode()], list(ends))


_TEMPLATES: dict[tuple[str, ...], InterpreterTemplate] = {}
_LOCK = threading.Lock()


def template(
    interpreter: str, folder: str, packages: tuple[str, ...], former: InterpreterTemplate | None = None
) -> InterpreterTemplate:
    """Return this process's template for these packages, a new one in place of ``former``."""
    with _LOCK:
        found = _TEMPLATES.get(packages)
        # Two threads may find the same template dead. The second one gets the replacement that the first one made.
        if found is None or found is former:
            found = _TEMPLATES[packages] = InterpreterTemplate(interpreter, folder, packages)
        return found


class Forking:
    """Starts a program behind walls through a template, as `watch.by_command` does without one.

    Args:
        is_kept: Whether it is an interpreter that is asked again and again.
        seed: Seed of what the program draws; "" for the system's.
    """

    def __init__(
        self, where: tuple[str, str], walls: tuple[str, ...], bounds: SandboxLimits, packages: tuple[str, ...],
        is_kept: bool = False, seed: str = "",
    ) -> None:  # fmt: skip
        self._where, self._packages = where, packages
        # The words on the command line have fixed places, so the flag is the sign of a number that is always positive.
        files = -bounds.files_mib if is_kept else bounds.files_mib
        numbers = (bounds.cpu_seconds, bounds.memory_mib + room_mib(packages), files, bounds.threads)
        self._words = (seed, ",".join(walls), *map(str, numbers), *places(packages))

    def __call__(self, stack: ExitStack, given: int, asked: int, ends: Ends | None) -> tuple[Process, int]:
        """Start it.

        Raises:
            NotRun: If it cannot be had.
        """
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        errors = os.pipe()
        output = None if ends is not None else os.pipe()
        process = Forked(ours, None if output is None else output[0], errors[0])
        stack.callback(process.stderr.close)
        if process.stdout is not None:
            stack.callback(process.stdout.close)
        try:
            read = asked if ends is None else ends.read
            write = output[1] if output is not None else ends.write if ends is not None else -1
            self.fork((read, write, errors[1], given, theirs.fileno()))
        finally:
            theirs.close()
            os.close(errors[1])
            if output is not None:
                os.close(output[1])
        return process, ours.fileno()

    def warm(self) -> None:
        """Have the template there, so that processes that are forked from this one share it."""
        template(*self._where, self._packages)

    def fork(self, ends: Sequence[int]) -> None:
        """Have the template fork, a new one where the present one is gone or was killed while it imported.

        Raises:
            NotRun: None could be had.
        """
        former: InterpreterTemplate | None = None
        cause: Exception
        for _ in range(_STARTS):
            try:
                former = template(*self._where, self._packages, former)
                # A stopped template takes a request and never answers it.
                if not is_stopped(former.pid):
                    return former.fork(ends, self._words)
                cause = NotRun("a signal stopped it")
            except (ConfigError, OSError) as error:
                cause = error
        raise NotRun(f"the process that programs are forked from cannot be asked: {cause}")
