"""A run that goes on by itself after a fault: the same command again, a few times, after growing pauses."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gnomon.core.errors import CheckpointError, DiagnosedError, GnomonError, NotFiniteError
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import step_rows
from gnomon.training.signals import asking_signals, leave_terminal

_PROGRAM = "import sys; from gnomon.cli.main import main; sys.exit(main())"
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_LOOK_SECONDS = 0.1
_FAILED = 1
# Another try would meet the same numbers, the same files, or do what the user asked to be kept from.
_FINAL = (NotFiniteError, CheckpointError, DiagnosedError)
_LONGEST_NAME = 100

Say = Callable[[str], None]


def run_with_restarts(arguments: Sequence[str], run: Path, restarts: int, say: Say) -> int:
    """Run ``gnomon ARGUMENTS`` in a process of its own, and again after a fault; return the exit code of the last try.

    A fault is a process that a signal ended that nobody sent here (out of memory, say), or an exit code of 1, unless
    what it reports would only be met again: see `reporting`. It is not tried again when the tries are used up, or two
    in a row recorded no step beyond the one before. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on, and are the end.

    Source: ours; the plan of fault F11.

    Args:
        run: The run's directory.
        restarts: At most so many.
        say: Tells people one line.
    """
    before: int | None = None
    with _Child() as child:
        for tried in range(restarts + 1):
            code, error = child.run(arguments)
            if child.is_stopped or not _is_fault(code, error):
                break
            reached, what = _last_step(run), _in_words(code, error)
            if tried == restarts:
                say(f"{what} after step {reached}; {_times(restarts)} used up")
                break
            # A fault that recurs at the same step most likely comes from the data or the code, so a retry cannot help.
            if before is not None and reached <= before:
                say(f"{what} at step {reached} for the second time in a row, so it is not tried again")
                break
            before, pause = reached, _PAUSES[min(tried, len(_PAUSES) - 1)]
            say(f"{what} after step {reached}; going on in {pause:g} s (restart {tried + 1} of {restarts})")
            if not child.rest(pause):
                break
        return child.stopped_code() or (code if code >= 0 else 128 - code)


@contextmanager
def reporting(descriptor: int | None) -> Iterator[None]:
    """Tell the supervisor of this process which error of ours ended the block.

    When the watcher is killed this process is asked to stop, as by SIGTERM (on Linux).

    Args:
        descriptor: Where; None: nobody does.
    """
    if descriptor is None:
        yield
        return
    from gnomon.core.processes.server import die_with_parent

    # Otherwise graders and engines would inherit the pipe.
    os.set_inheritable(descriptor, False)
    die_with_parent(signal.SIGTERM)
    try:
        yield
    except GnomonError as error:
        # A subclass of a final error is reported by the name that `_is_fault` knows.
        final = next((kind.__name__ for kind in _FINAL if isinstance(error, kind)), type(error).__name__)
        os.write(descriptor, final.encode()[:_LONGEST_NAME])
        raise


class _Child:
    """One process after another, and the signals that are meant for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0
        self._before: dict[int, object] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._signal > 0

    def stopped_code(self) -> int:
        """Return the exit code where a signal came while there was no process; else 0."""
        return 128 + self._signal if self._signal and self._process is None else 0

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Return how a process ended, as `subprocess` says it, and the name of the error that it reported, or ""."""
        reading, writing = os.pipe()
        try:
            command = [sys.executable, "-P", "-c", _PROGRAM, *arguments, "--report", str(writing)]
            # A group of its own: a terminal's Ctrl-C reaches it once, from here, and not twice.
            self._process = subprocess.Popen(command, pass_fds=(writing,), process_group=0)
        finally:
            os.close(writing)
        # A signal may have arrived before `_process` was set, when `_pass_on` had no process to send it to.
        if self._signal:
            self._process.send_signal(self._signal)
        code = self._process.wait()
        # Whatever it started may still hold the other end; what it wrote is there.
        os.set_blocking(reading, False)
        try:
            return code, os.read(reading, _LONGEST_NAME).decode()
        except BlockingIOError:
            return code, ""
        finally:
            os.close(reading)

    def rest(self, seconds: float) -> bool:
        """Wait, and return whether nobody asked for the end meanwhile."""
        # No process: a signal during the pause only ends the pause.
        self._process, end = None, time.monotonic() + seconds
        while not self._signal and (left := end - time.monotonic()) > 0:
            time.sleep(min(_LOOK_SECONDS, left))
        return not self._signal

    def __enter__(self) -> "_Child":
        self._before = {number: signal.signal(number, self._pass_on) for number in asking_signals()}
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        self._signal = number
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def _is_fault(code: int, error: str) -> bool:
    return code < 0 or (code == _FAILED and error not in {kind.__name__ for kind in _FINAL})


def _in_words(code: int, error: str) -> str:
    if code >= 0:
        return f"the run failed ({error or 'an error that nobody foresaw'})"
    return f"the run's process was ended by {signal.Signals(-code).name}"


def _times(restarts: int) -> str:
    return "its one restart is" if restarts == 1 else f"all {restarts} restarts are"


def _last_step(run: Path) -> int:
    return max((row["step"] for row in step_rows(RunDirectory(run).metrics)), default=0)
