"""Programs that a warm process forks: what they import is there, so each begins in milliseconds, not in five seconds.

The server has imported gnomon and transformers and started no thread. What a test says about an import, about the
environment that an interpreter begins in, or about the way in which one ends, needs an interpreter of its own instead.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "gnomon.cli.train", "gnomon.training.api", "gnomon.analysis.plan", "gnomon.insight.report.write",
        "transformers.models.llama.modeling_llama", __name__,
    ]
)  # fmt: skip
GNOMON = "import sys; from gnomon.cli.main import main; sys.exit(main())"


def _run(
    code: str,
    arguments: list[str],
    place: tuple[str, dict[str, str]],
    outputs: tuple[Connection, Connection],
    before: Callable[[], object] | None,
) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    os.chdir(place[0])
    os.environ.clear()
    os.environ.update(place[1])
    sys.argv = ["-c", *arguments]
    sys.stdout.reconfigure(line_buffering=True)
    if before is not None:
        before()
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class Forked:
    """A program at work, as `subprocess.Popen` has it: ``gnomon ARGUMENTS``, or other code with these arguments.

    Args:
        before: Called in the process before the code; it can be pickled.
        environment: What is changed; None for a variable is without it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        code: str = GNOMON,
        before: Callable[[], object] | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        changed = {**os.environ, **(environment or {})}
        place = str(cwd or os.getcwd()), {name: value for name, value in changed.items() if value is not None}
        self.args = list(arguments)
        pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        theirs = tuple(writing for _, writing in pipes)
        self._process = FORKS.Process(target=_run, args=(code, self.args, place, theirs, before))
        self._process.start()
        for writing in theirs:
            writing.close()
        self.stdout, self.stderr = (_opened(reading) for reading, _ in pipes)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the program works."""
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program at once."""
        self._process.kill()

    def wait(self, timeout: float = 120) -> int | None:
        """Return the exit code, once there is one or the timeout is over."""
        self._process.join(timeout)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Return what it printed, once it has ended. Raises: AssertionError after the timeout, in seconds."""
        said = ["", ""]

        def read(number: int, output: TextIO) -> None:
            with output:
                said[number] = output.read()

        threads = [threading.Thread(target=read, args=each) for each in enumerate((self.stdout, self.stderr))]
        for thread in threads:
            thread.start()
        if self.wait(timeout) is None:
            self.kill()
            raise AssertionError(f"{self.args} is still at work after {timeout:g} s")
        for thread in threads:
            thread.join(timeout)
        return said[0], said[1]


def _opened(reading: Connection) -> TextIO:
    file = os.fdopen(os.dup(reading.fileno()), encoding="utf-8", errors="replace")
    reading.close()
    return file


def ended(program: Forked) -> "subprocess.CompletedProcess[str]":
    """Return what a program printed and how it ended."""
    out, err = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)
