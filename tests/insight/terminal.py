"""A program on a terminal of its own, and what a person would see there."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

SECONDS = 60.0
_GNOMON = "import sys; from gnomon.cli.main import main; sys.exit(main())"
_SOURCES = str(Path(__file__).resolve().parents[2] / "src")


class Terminal:
    """Runs ``gnomon`` with ``arguments`` on a pseudo-terminal; `screen` is what it shows now."""

    def __init__(self, arguments: Sequence[str], columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._controller, terminal = pty.openpty()
        self._set_size(columns, lines)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment = {**inherited, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": _SOURCES}
        self.received = b""
        self.program = subprocess.Popen(
            [sys.executable, "-c", _GNOMON, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
        )
        os.close(terminal)

    @property
    def shown(self) -> str:
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._controller, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size, and tell the program as a terminal does."""
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)
        os.killpg(self.program.pid, signal.SIGWINCH)

    def wait_for(self, *texts: str, gone: Sequence[str] = (), seconds: float = SECONDS) -> str:
        """Read until all ``texts`` are on the screen and none of ``gone`` is, and return the screen."""
        return self.wait_until(
            lambda shown: all(text in shown for text in texts) and not any(text in shown for text in gone), seconds
        )

    def wait_until(self, is_there: Callable[[str], bool], seconds: float = SECONDS) -> str:
        """Read until ``is_there`` of the screen, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if is_there(self.shown):
                return self.shown
            if not self.read():
                break
        assert is_there(self.shown), f"not seen in {seconds:g} s:\n{self.shown}"
        return self.shown

    def read(self, seconds: float = 0.2) -> bool:
        """Take what the program wrote; false when it has ended and nothing is left."""
        if not select.select([self._controller], [], [], seconds)[0]:
            return self.program.poll() is None
        try:
            written = os.read(self._controller, 65536)
        except OSError:
            return False
        self.received += written
        self._stream.feed(written)
        return True

    def end(self, seconds: float = SECONDS) -> int:
        """Read until the program ends, and return its exit code."""
        end = time.monotonic() + seconds
        while self.read() and time.monotonic() < end:
            pass
        return self.program.wait(max(end - time.monotonic(), 1.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.program.poll() is None:
            os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait()
        os.close(self._controller)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
