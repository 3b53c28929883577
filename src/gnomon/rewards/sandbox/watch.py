"""Start a process, feed it, listen to it, and end it: what every isolator has in common."""

import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gnomon.core.processes.server import is_stopped
from gnomon.core.processes.stop_signals import stop_signals_blocked
from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.bubblewrap import ONE_THREAD

ENVIRONMENT = {"LANG": "C.UTF-8", "HOME": "/tmp", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "TZ": "UTC"}
ENVIRONMENT |= dict.fromkeys(ONE_THREAD, "1")
LIBRARY = os.path.dirname(os.path.realpath(os.__file__))
START_SECONDS = 10.0
_CHUNK = 1 << 16
_BURIAL_SECONDS = 5.0
_REPLY_SECONDS = 3.0  # a witness answers in less than a millisecond, but has to share its processor
TICK_SECONDS = 1.0
"""Longest wait for anything at once: a wait that takes more than twice as long shows that this process was stopped."""


class Forked:
    """A process that a template forked: it is ended by closing its report.

    Args:
        stdout: What it writes.
        stderr: What it writes.
    """

    def __init__(self, report: socket.socket, stdout: int | None, stderr: int) -> None:
        self.report = report
        self.stdout = None if stdout is None else os.fdopen(stdout, "rb", 0)
        self.stderr = os.fdopen(stderr, "rb", 0)

    def kill(self) -> None:
        """End it: its witness sees that nobody listens."""
        with suppress(OSError):
            self.report.shutdown(socket.SHUT_RDWR)


Process = subprocess.Popen[bytes] | Forked


@dataclass
class Watched:
    """A process that is being watched, with a way to end it from another thread.

    Attributes:
        is_ended: Whether that was used.
    """

    process: "Process | None" = None
    is_ended: bool = False

    def is_stopped(self, seconds: float = _REPLY_SECONDS) -> bool:
        """Whether something stopped it, or its witness, or the process that forks it.

        Args:
            seconds: Time for its witness to answer.
        """
        return self.process is not None and _is_stopped(self.process, min(seconds, _REPLY_SECONDS))

    def end(self) -> None:
        """Kill it with all of its group; nothing when it is gone already."""
        self.is_ended = True
        if self.process is not None:
            _kill(self.process)


@dataclass(frozen=True)
class SandboxEnding:
    """How a process ended.

    Attributes:
        report: What its witness said, by first word.
        cause: "time" or "output", if we ended it; "stopped", if it took too much time because a signal stopped it.
    """

    stdout: str
    stderr: str
    report: dict[str, str]
    cause: str | None
    seconds: float


class Ends(NamedTuple):
    """What a program reads from and writes to instead of texts: descriptors, closed here once the program has them."""

    read: int
    write: int


Starting = Callable[[ExitStack, int, int, "Ends | None"], tuple["Process", int]]
"""Starts a process: from the descriptors of source and standard input to the process and that of its report."""


def by_command(command: Callable[[int, int], Sequence[str]]) -> Starting:
    """Return what starts a new program.

    Args:
        command: From the descriptors of source and report to its words.
    """

    def started(stack: ExitStack, given: int, asked: int, ends: "Ends | None") -> tuple[Process, int]:
        report = os.pipe()
        stack.callback(os.close, report[0])
        try:
            with stop_signals_blocked():
                process = subprocess.Popen(
                    command(given, report[1]),
                    pass_fds=(given, report[1]),
                    stdin=asked if ends is None else ends.read,
                    stdout=subprocess.PIPE if ends is None else ends.write,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
        finally:
            os.close(report[1])
        return process, report[0]

    return started


def watch(
    starting: Starting, source: str, stdin: str, bounds: SandboxLimits, watched: Watched, ends: Ends | None = None
) -> SandboxEnding:
    """Run a program to its end, or end it.

    Args:
        ends: Descriptors in place of ``stdin`` and of what the ending holds as ``stdout``.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        given, asked = (_file(stack, text) for text in (source, stdin))
        try:
            process, report = starting(stack, given, asked, ends)
        finally:
            for end in ends or ():
                os.close(end)
        watched.process = process
        stack.callback(_reap, process)
        # The caller may have cancelled before there was a process to kill.
        if watched.is_ended:
            watched.end()
        limit = bounds.output_kib << 10
        received = {name: bytearray() for name in ("stdout", "stderr", "report")}
        pipes = {report: "report"}
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None:
                pipes[pipe.fileno()] = name
        cause = _receive(pipes, received, limit, bounds.wall_seconds)
        # Asked before the kill: afterwards a stopped program looks like one that was too slow, and would earn a 0.
        if cause == "time" and _is_stopped(process):
            cause = "stopped"
        _kill(process)
    return SandboxEnding(
        _text(received["stdout"], limit),
        _text(received["stderr"], limit),
        read_report(received["report"]),
        cause,
        time.monotonic() - began,
    )


def read_report(received: bytes | bytearray) -> dict[str, str]:
    """Return what a witness said, by first word."""
    lines = received.decode(errors="replace").splitlines()
    return {word: rest for word, _, rest in (line.partition(" ") for line in lines)}


async def in_thread(run_now: Callable[[str, str, Watched], Outcome], source: str, stdin: str) -> Outcome:
    """Run in a thread; cancelling ends the program."""
    import asyncio

    watched = Watched()
    try:
        return await asyncio.to_thread(run_now, source, stdin, watched)
    finally:
        watched.end()


def outcome(ending: SandboxEnding, folders: Sequence[str] = ()) -> Outcome:
    """Return what the sandbox answers about an ending that a witness of `inside/start.py` reported.

    Args:
        folders: Folders of packages, whose paths are not shown.
    """
    report = ending.report
    if "walls" not in report:
        why = report.get("refused") or ending.stderr or f"it did not start in {ending.seconds:.1f} s"
        return Outcome("", why, "refused", ending.seconds)
    stdout, stderr = (unnamed(text, folders) for text in (ending.stdout, ending.stderr))
    return Outcome(stdout, stderr, ending.cause or cause_of(report, stderr), ending.seconds)


def unnamed(text: str, folders: Sequence[str]) -> str:
    """Return a text with "python" in place of the machine's paths of its library and packages."""
    for folder in (LIBRARY, *folders):
        text = text.replace(folder, "python")
    return text


def cause_of(report: dict[str, str], stderr: str) -> str | None:
    """Return why a program did not end well, as its witness and its own errors say; None where it did."""
    if report.get("exit") == "0":
        return None
    if report.get("exit") == "1" and _is_memory(stderr):
        return "memory"
    if report.get("signal") == str(int(signal.SIGXCPU)):
        return "time"
    if "exit" in report:
        return f"exit {report['exit']}"
    return f"signal {report.get('signal', int(signal.SIGKILL))}"


def _is_memory(stderr: str) -> bool:
    """Whether the last line names a MemoryError, numpy's kind of it too."""
    *_, last = stderr.rstrip().split("\n")
    if last == "lost sys.stderr":  # Python 3.13, which lacked the memory for a traceback too
        last = stderr.rpartition("\nobject type name: ")[2].partition("\n")[0]
    return last.partition(":")[0].endswith("MemoryError")


def _receive(pipes: dict[int, str], received: dict[str, bytearray], limit: int, wall_seconds: float) -> str | None:
    """Read all pipes until they are closed; return why that was stopped earlier, if it was.

    The program's time begins with the report that its walls stand: a busy machine may start it late. Time in which
    this process stood still does not count: whatever stopped it stopped the program as well.
    """
    until = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        for descriptor in pipes:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return "time"
            ready = selector.select(min(left, TICK_SECONDS))
            until += stood_still(left - (until - time.monotonic()))
            for key, _ in ready:
                try:
                    chunk = os.read(key.fd, _CHUNK)
                except ConnectionResetError:  # of a report that was closed from here
                    chunk = b""
                into = received[pipes[key.fd]]
                # The walls stand, and the program begins: the time for the start is replaced by the program's own.
                if pipes[key.fd] == "report" and not into:
                    until = time.monotonic() + wall_seconds
                into += chunk
                if not chunk:
                    selector.unregister(key.fd)
                # Checked for each chunk, so that no more than one chunk beyond the limit is ever held.
                if len(into) > limit:
                    return "output"
    return None


def stood_still(seconds: float) -> float:
    """Return how long this process stood still while it waited for a tick, which took ``seconds``."""
    return seconds - TICK_SECONDS if seconds > 2 * TICK_SECONDS else 0.0


def _is_stopped(process: Process, seconds: float = _REPLY_SECONDS) -> bool:
    """Whether a signal stopped a process that is waited for, or its witness, which then gives no answer."""
    if not isinstance(process, Forked):
        return any(map(is_stopped, (process.pid, *_descendants(process.pid))))
    try:
        process.report.send(b"?")
        ready, _, _ = select.select([process.report], [], [], seconds)
        return not ready or b"stopped" in process.report.recv(_CHUNK)
    except OSError:
        return False


def _descendants(pid: int) -> Iterator[int]:
    """Yield the numbers of the processes below one; none where the system does not list them."""
    with suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _descendants(child)


def _file(stack: ExitStack, text: str) -> int:
    """Return the descriptor of a file in memory that holds the text, to be read from its start."""
    descriptor = os.memfd_create("gnomon", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(descriptor, left) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _kill(process: Process) -> None:
    if isinstance(process, Forked):
        process.kill()
    elif process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            # The whole group: it was started in a session of its own, with its witness and whatever it started.
            os.killpg(process.pid, signal.SIGKILL)


def _reap(process: Process) -> None:
    _kill(process)
    if not isinstance(process, Forked):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_BURIAL_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _text(written: bytearray, limit: int) -> str:
    return bytes(written[:limit]).decode("utf-8", errors="replace")
