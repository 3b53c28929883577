"""A fork server: a program that imports user code once, then forks a worker in milliseconds for each request.

The fork server stays single-threaded and never runs user code beyond its import, so it cannot hang. A worker reads
requests from a socket of its own and answers each. The module loads no torch.

A PID is not reused before the parent reaps the process, and the fork server is the parent of its workers: a kill
cannot hit an unrelated process. When the run is gone, its sockets close; the fork server then ends all workers and
itself.
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gnomon.core.errors import UserError
from gnomon.core.processes import codec
from gnomon.core.processes.stop_signals import pass_over_stop_signals, restore_in_forks

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
REAP_SECONDS = 5.0
_EXITING = 0x4  # PF_EXITING of Linux's sched.h, in the flags of proc(5)


class Handler(Protocol):
    """What workers do; grading is one kind."""

    @property
    def what(self) -> str:
        """What is imported, for messages: "the rewards"."""

    def prepare(self) -> None:
        """Import what answering needs.

        Raises:
            UserError: Something that it needs cannot be imported.
        """

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request. Never raises."""


class Channel:
    """Lines over a socket, with open files beside them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        """Send a message, and an open file beside it."""
        line = codec.encode(message)
        if file is not None:
            # The descriptor travels with the first bytes; what was not sent follows without it.
            line = line[socket.send_fds(self._connection, [line], [file]) :]
        self._connection.sendall(line)

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """Return the next message, None at the end, and the files that came with it."""
        files: list[int] = []
        while b"\n" not in self._read:
            some, new, _, _ = socket.recv_fds(self._connection, 1 << 16, 4)
            # A worker that execs a program must not hand the descriptors on.
            for file in new:
                os.set_inheritable(file, False)
            files += new
            if not some:
                return None, files
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return codec.decode(line), files

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class ForkServerProcess:
    """The fork server: forks workers, ends them, and reaps them.

    Args:
        handler: Answers the requests of a worker.
        memory_bytes: Address space that a worker may take beyond its imports; None is no limit.
        warm: Whether the user code was imported here; otherwise each worker imports it.
    """

    def __init__(self, handler: Handler, memory_bytes: int | None, warm: bool) -> None:
        self._handler = handler
        self._memory_bytes = memory_bytes
        self._warm = warm
        self._workers: set[int] = set()
        # What importing the rewards started (a server, say) is not swept away with a worker.
        self._existing = _children()

    def serve(self, control: Channel) -> None:
        """Fork and end workers on request, until the run closes the control socket."""
        while True:
            order, files = control.receive()
            if order is None:
                break
            if order["do"] == "fork":
                control.send({"pid": self._fork(control, files[0])})
            else:
                # Asked before the kill: whether it died by itself decides whose fault it was.
                was_dead = order["pid"] in self._workers and _is_dead(order["pid"])
                was_stopped = not was_dead and is_stopped(order["pid"])
                control.send({"status": self._end(order["pid"]), "was_dead": was_dead, "was_stopped": was_stopped})
        for pid in tuple(self._workers):
            self._end(pid)
        self._existing = set()
        self._sweep()

    def _fork(self, control: Channel, file: int) -> int:
        fork_server = os.getpid()
        pid = os.fork()
        # No return from here: an exception in a child must not climb into the fork server's loop.
        if pid == 0:
            try:
                control.close()
                _limit_memory(self._memory_bytes)
                work(Channel(socket.socket(fileno=file)), self._handler, fork_server, self._warm)
            finally:
                os._exit(70)
        os.close(file)
        self._workers.add(pid)
        return pid

    def _end(self, pid: int) -> int | None:
        """Kill a worker with all that it started; return its exit status (negative: the signal)."""
        if pid not in self._workers:
            return None
        for kill in (os.killpg, os.kill):  # the group, and the worker should it not lead one yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        self._workers.discard(pid)
        status = _reap(pid)
        self._sweep()
        return status

    def _sweep(self) -> None:
        """Kill what ended workers left in sessions of its own: orphans become children of the fork server."""
        until = time.monotonic() + REAP_SECONDS
        spared = self._workers | self._existing
        # In a loop, since the death of an orphan may hand its own children to the fork server.
        while (orphans := {p for p in _children() - spared if not _is_monitor(p)}) and time.monotonic() < until:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                _reap(pid)


def work(channel: Channel, handler: Handler, fork_server: int, warm: bool) -> NoReturn:
    """Answer requests until the run closes the socket. Runs in a forked child and never returns."""
    # A session of its own: its whole group can be killed, and signals of the terminal do not reach it.
    os.setsid()
    die_with_parent(signal.SIGKILL)
    # The parent may have died between the fork and the death signal.
    if os.getppid() != fork_server:
        os._exit(0)
    # A child that a reward forks must not answer in the worker's place, nor hold its socket open.
    os.register_at_fork(after_in_child=channel.close)
    restore_in_forks()
    fault = None if warm else _prepare(handler)
    channel.send({"ready": fault is None, "fault": fault})
    while True:
        request, _ = channel.receive()
        if request is None:
            os._exit(0)
        began = time.monotonic()
        answer = handler.answer(request)
        seconds = time.monotonic() - began
        channel.send({"id": request["id"], "seconds": seconds, **answer})


def _prepare(handler: Handler) -> str | None:
    try:
        handler.prepare()
    except UserError as error:
        return str(error)
    except BaseException as error:
        return f"importing {handler.what} raised {type(error).__name__}: {error}"
    return None


def _limit_memory(more_bytes: int | None) -> None:
    """Let the address space grow by ``more_bytes`` beyond what the imports took; what needs more raises."""
    if more_bytes is None or sys.platform != "linux":
        return
    import resource

    # What the imports took differs by gigabytes between libraries, so the limit is on what comes after.
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = taken + more_bytes
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _is_monitor(pid: int) -> bool:
    """Whether it is podman's monitor of a container, which ends by itself once it has removed that."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "conmon\n" and not _is_dead(pid)
    return False


def _children() -> set[int]:
    """Return the numbers of this process's children; none where the system does not list them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return set()
    return {int(pid) for pid in listed.split()}


def _is_dead(pid: int) -> bool:
    """Whether a child has ended or is about to; it stays to be waited for.

    A socket closes a moment before its process can be waited for, but not before the kernel marks the process as
    exiting.
    """
    try:
        # The program's name, in brackets, may hold blanks and brackets; fields are counted from the last bracket on.
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        return bool(flags & _EXITING)
    except OSError:
        pass
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether the system lets a process stand still, by a signal or a debugger; False where the system does not say.

    Signs of life from the process itself would not do: one that waits for another gives none either.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "tT"


def _reap(pid: int) -> int | None:
    """Wait for a killed child; return its exit status, None when it does not die in time or was no child."""
    until = time.monotonic() + REAP_SECONDS
    while time.monotonic() < until:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def die_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when the one that started it is gone (on Linux); 0 sends none."""
    _prctl(_SET_DEATH_SIGNAL, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(read: Callable[[Any], Handler]) -> None:
    """Import what the handler needs, report to the run, and serve.

    Args:
        read: Turns the settings that the run sent into the handler.
    """
    pass_over_stop_signals()
    os.set_inheritable(int(sys.argv[1]), False)
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    # Importing user code may hang and the run may die meanwhile; afterwards the closed socket says so.
    die_with_parent(signal.SIGKILL)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    setup, _ = control.receive()
    if setup is None:
        return
    # Behind this interpreter's own: user folders must not replace modules of the standard library.
    sys.path.extend(folder for folder in setup["search"] if folder not in sys.path)
    handler = read(setup["settings"])
    fault = _prepare(handler) if setup["warm"] else None
    control.send({"ready": fault is None, "fault": fault, "threads": _threads()})
    if fault is not None:
        return
    # From here on the closed socket says that the run is gone, and
    # workers are ended in order; a kill would leave what they started.
    die_with_parent(0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno() if sys.stderr else 2)
    gc.freeze()  # a collection in a worker would otherwise copy the pages that it shares with the fork server
    ForkServerProcess(handler, setup["memory_bytes"], setup["warm"]).serve(control)


def run_program(read: Callable[[Any], Handler]) -> NoReturn:
    """Be the program: `main`, and an end in which at-exit functions and threads of user code have no say."""
    try:
        main(read)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
