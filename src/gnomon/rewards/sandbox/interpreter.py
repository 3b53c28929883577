"""One interpreter behind walls that is kept from call to call, and stands still between them."""

import os
import secrets
import selectors
import socket
import time
from contextlib import ExitStack, suppress

from gnomon.rewards.sandbox.base import NotRun, Outcome
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.packages import folders_of
from gnomon.rewards.sandbox.watch import (
    START_SECONDS,
    TICK_SECONDS,
    Forked,
    Watched,
    cause_of,
    read_report,
    stood_still,
    unnamed,
)

_CHUNK = 1 << 16
_NUMBER_BYTES = 16


class Interpreter:
    """Runs codes one after the other in one module: what one defines, the next one finds.

    Each code has the sandbox's time and room for output of its own. One that takes too much, or that ends the process,
    ends the interpreter; the next code begins in a new one. Between two codes the process is stopped, so that nothing
    that was left behind in it computes or writes.

    Args:
        seed: Seed of what its programs draw from ``random`` and ``numpy.random``.
    """

    def __init__(self, sandbox: LinuxSandbox, seed: int) -> None:
        self._sandbox = sandbox
        self._seed = seed
        self._stack = ExitStack()
        self._process: Forked | None = None
        self._ask: socket.socket | None = None
        self._said = bytearray()

    def run(self, code: str) -> Outcome:
        """Run a code to its end.

        Raises:
            NotRun: If nothing of the code's own ended the process.
        """
        began = time.monotonic()
        process, ask = self._process, self._ask
        if process is None or ask is None:
            process, ask = self._begin()
        else:
            with suppress(OSError):
                # The process was stopped after its last code; its witness lets it go on.
                process.report.send(b"c")
        # The far side sends the number back when the code has run. No
        # code can know it, and so none can end its own call early.
        number = secrets.token_bytes(_NUMBER_BYTES)
        text = code.encode(errors="replace")
        received, cause, is_done = {"stdout": bytearray(), "stderr": bytearray()}, None, False
        try:
            ask.settimeout(self._sandbox.bounds.wall_seconds)
            ask.sendall(len(text).to_bytes(8, "little") + number + text)
            cause, is_done = self._receive(process, ask, number, received)
        except OSError:  # it ended meanwhile: its witness says how
            cause, is_done = self._receive(process, ask, number, received)
        finally:
            # A tool has four fifths of a reply's time: its host is told before the reply is late.
            if cause == "time" and Watched(process).is_stopped(max(0.5, self._sandbox.bounds.wall_seconds / 8)):
                cause = "stopped"
            if not is_done:
                self.close()
        if cause == "stopped":
            raise NotRun("something outside of the sandbox stopped the interpreter")
        limit = self._sandbox.bounds.output_kib << 10
        folders = folders_of(self._sandbox.packages)
        stdout, stderr = (unnamed(bytes(received[name][:limit]).decode(errors="replace"), folders) for name in received)
        if not is_done and cause is None:
            report = read_report(self._said)
            # No word of an end, or a SIGKILL, which the filter lets no program send: the code is not to blame.
            if not report.keys() & {"exit", "signal"} or self._sandbox.is_killed(report):
                raise NotRun("something outside of the sandbox ended the interpreter (is the machine out of memory?)")
            cause = cause_of(report, stderr) or "exit 0"
        return Outcome(stdout, stderr, cause, time.monotonic() - began)

    def stop(self) -> None:
        """End the process from another thread than that which runs a code, which lets go of the rest."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and all that it holds."""
        if self._process is not None:
            self._process.kill()
        self._stack.close()
        self._process = self._ask = None

    def _begin(self) -> tuple[Forked, socket.socket]:
        # What an attempt opened whose fork failed is still on the stack.
        self.close()
        self._said = bytearray()
        starting = self._sandbox.forking(is_kept=True, seed=str(self._seed))
        ask, theirs = socket.socketpair()
        self._stack.callback(ask.close)
        null = os.open(os.devnull, os.O_RDONLY)
        self._stack.callback(os.close, null)
        output = os.pipe()
        try:
            errors = os.pipe()
            report, away = socket.socketpair()
            process = Forked(report, output[0], errors[0])
            for pipe in (process.stdout, process.stderr, report):
                if pipe is not None:
                    self._stack.callback(pipe.close)
            try:
                starting.fork((theirs.fileno(), output[1], errors[1], null, away.fileno()))
            finally:
                away.close()
                os.close(errors[1])
        finally:
            theirs.close()
            os.close(output[1])
        self._process, self._ask = process, ask
        # The walls must stand before any code is sent: `_receive` takes them for granted.
        report.settimeout(START_SECONDS)
        try:
            while b"\n" not in self._said:
                some = report.recv(_CHUNK)
                self._said += some or b"refused it ended before its walls stood\n"
        except TimeoutError:
            self._said += b"refused it did not start in time\n"
        if "walls" not in (said := read_report(self._said)):
            self.close()
            raise NotRun(said.get("refused", "it did not start"))
        return process, ask

    def _receive(
        self, process: Forked, ask: socket.socket, number: bytes, received: dict[str, bytearray]
    ) -> tuple[str | None, bool]:
        """Read until the number comes back and the process stands still; return why it is to be ended, and whether not.

        What is read to the end after the process stood still or ended is all that the code wrote.
        """
        bounds, back = self._sandbox.bounds, b""
        until = time.monotonic() + bounds.wall_seconds
        pipes = (("stdout", process.stdout), ("stderr", process.stderr))
        outputs = {pipe.fileno(): received[name] for name, pipe in pipes if pipe is not None}
        begun = len(self._said)
        with selectors.DefaultSelector() as selector:
            for end in (*outputs, ask.fileno(), process.report.fileno()):
                selector.register(end, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                ready = selector.select(min(left, TICK_SECONDS))
                # Time in which this process itself was stopped is given back to the code.
                until += stood_still(left - (until - time.monotonic()))
                for key, _ in ready:
                    try:
                        some = os.read(key.fd, _CHUNK)
                    except ConnectionResetError:
                        some = b""
                    if not some:
                        selector.unregister(key.fd)
                    if key.fd == process.report.fileno():
                        self._said += some
                        if not some or b"exit " in self._said or b"signal " in self._said:
                            return _drained(outputs, bounds.output_kib), False
                        # Only now is all output in the pipes: the process cannot write
                        # any more, so reading to the end is complete.
                        if b"still\n" in self._said[begun:]:
                            cause = _drained(outputs, bounds.output_kib)
                            return cause, cause is None
                    elif key.fd in outputs:
                        outputs[key.fd] += some
                        if len(outputs[key.fd]) > bounds.output_kib << 10:
                            return "output", False
                    elif some:
                        back += some
                        # Anything else on this socket was written by the code, which has no business there.
                        if not number.startswith(back):
                            return "protocol", False
                        if back == number:
                            with suppress(OSError):
                                process.report.send(b"s")
        return "time", False


def _drained(outputs: dict[int, bytearray], limit_kib: int) -> str | None:
    """Read what pipes hold now; return "output" where that is too much."""
    for end, received in outputs.items():
        os.set_blocking(end, False)
        try:
            while some := os.read(end, _CHUNK):
                received += some
                if len(received) > limit_kib << 10:
                    return "output"
        except BlockingIOError:
            pass
        finally:
            os.set_blocking(end, True)
    return None
