"""Start a process, feed it, listen to it, and end it: what every isolator has in common."""

import asyncio
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

from gnomon.rewards.sandbox.base import Outcome, SandboxLimits

_ENVIRONMENT = {"LANG": "C.UTF-8", "HOME": "/tmp", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "TZ": "UTC"}
_LIBRARY = os.path.dirname(os.path.realpath(os.__file__))
_START_SECONDS = 10.0
_CHUNK = 1 << 16
_BURIAL_SECONDS = 5.0


@dataclass
class Watched:
    """A process that is being watched, with a way to end it from another thread. is_ended: whether that was used."""

    process: "subprocess.Popen[bytes] | None" = None
    is_ended: bool = False

    def end(self) -> None:
        """Kill it with all of its group; nothing when it is gone already."""
        self.is_ended = True
        if self.process is not None:
            _kill(self.process)


@dataclass(frozen=True)
class SandboxEnding:
    """How a process ended. report: what its witness said, by first word. cause: "time" or "output", if we ended it."""

    stdout: str
    stderr: str
    report: dict[str, str]
    cause: str | None
    seconds: float


class Ends(NamedTuple):
    """What a program reads from and writes to instead of texts: descriptors, closed here once the program has them."""

    read: int
    write: int


def watch(
    command: Callable[[int, int], Sequence[str]],
    source: str,
    stdin: str,
    bounds: SandboxLimits,
    watched: Watched,
    ends: Ends | None = None,
) -> SandboxEnding:
    """Run the command to its end, or end it.

    command: from the descriptors of source and report to the words of the command line. ends: in place of ``stdin``
    and of what the ending holds as ``stdout``.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        given, asked = (_file(stack, text) for text in (source, stdin))
        report = os.pipe()
        stack.callback(os.close, report[0])
        try:
            process = subprocess.Popen(
                command(given, report[1]),
                pass_fds=(given, report[1]),
                stdin=asked if ends is None else ends.read,
                stdout=subprocess.PIPE if ends is None else ends.write,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(report[1])
            for end in ends or ():
                os.close(end)
        watched.process = process
        stack.callback(_reap, process)
        if watched.is_ended:
            watched.end()
        limit = bounds.output_kib << 10
        heard = {name: bytearray() for name in ("stdout", "stderr", "report")}
        pipes = {report[0]: "report"}
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None:
                pipes[pipe.fileno()] = name
        cause = _listen(pipes, heard, limit, bounds.wall_seconds)
        _kill(process)
    lines = heard["report"].decode(errors="replace").splitlines()
    return SandboxEnding(
        _text(heard["stdout"], limit),
        _text(heard["stderr"], limit),
        {word: rest for word, _, rest in (line.partition(" ") for line in lines)},
        cause,
        time.monotonic() - began,
    )


async def in_thread(run_now: Callable[[str, str, Watched], Outcome], source: str, stdin: str) -> Outcome:
    """Run in a thread; cancelling ends the program."""
    watched = Watched()
    try:
        return await asyncio.to_thread(run_now, source, stdin, watched)
    finally:
        watched.end()


def outcome(ending: SandboxEnding) -> Outcome:
    """Return what the sandbox answers about an ending that a witness of `inside/start.py` reported."""
    report = ending.report
    if "walls" not in report:
        why = report.get("refused") or ending.stderr or f"it did not start in {ending.seconds:.1f} s"
        return Outcome("", why, "refused", ending.seconds)
    stdout, stderr = (text.replace(_LIBRARY, "python") for text in (ending.stdout, ending.stderr))
    return Outcome(stdout, stderr, ending.cause or _cause(report, stderr), ending.seconds)


def _cause(report: dict[str, str], stderr: str) -> str | None:
    if report.get("exit") == "0":
        return None
    if report.get("exit") == "1" and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    if report.get("signal") == str(int(signal.SIGXCPU)):
        return "time"
    if "exit" in report:
        return f"exit {report['exit']}"
    return f"signal {report.get('signal', int(signal.SIGKILL))}"


def _listen(pipes: dict[int, str], heard: dict[str, bytearray], limit: int, wall_seconds: float) -> str | None:
    """Read all pipes until they are closed; return why that was stopped earlier, if it was.

    The program's time begins with the report that its walls stand: a busy machine may start it late.
    """
    until = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        for descriptor in pipes:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return "time"
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                into = heard[pipes[key.fd]]
                if pipes[key.fd] == "report" and not into:
                    until = time.monotonic() + wall_seconds
                into += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(into) > limit:
                    return "output"
    return None


def _file(stack: ExitStack, text: str) -> int:
    """Return the descriptor of a file in memory that holds the text, to be read from its start."""
    descriptor = os.memfd_create("gnomon", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(descriptor, left) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_BURIAL_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _text(written: bytearray, limit: int) -> str:
    return bytes(written[:limit]).decode("utf-8", errors="replace")
