"""Signals that end a run: the first lets it finish and save, the second does not wait."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gnomon.core.processes.stop_signals import STOP_SIGNALS
from gnomon.core.user_code import end_at_once

if TYPE_CHECKING:
    from gnomon.training.run import StopRequest

# The escape sequence that shows the cursor.
_CURSOR = "\x1b[?25h"


def asking_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to stop here: SIGHUP is none of them where it is ignored, as under nohup."""
    return tuple(n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


@contextmanager
def stop_on_signals(stop: "StopRequest", say: Callable[[str], None], what: str, go_on: str) -> Iterator[None]:
    """Turn the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP into a request to stop, and say so; a second ends all.

    A second SIGHUP does not: a terminal that goes sends it, and so does the shell. Under nohup none is taken.

    Args:
        what: Is finished and saved first, such as "this step".
        go_on: The command that goes on with it.
    """
    asked: SimpleQueue[int] = SimpleQueue()

    def request(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            # The terminal may be gone, and then the next line printed would raise in the middle of a step.
            leave_terminal()
            if stop.signal:
                return
        if stop.signal:
            # Written without a lock, because a thread that holds it stands still now; a live line hid the cursor.
            shown = _CURSOR if os.isatty(2) else ""
            os.write(2, f"{shown}\nstopped at once, and nothing was saved; go on with: {go_on}\n".encode())
            end_at_once(128 + number)
        stop.signal = number
        # `SimpleQueue.put` is reentrant, unlike a lock or a print, so a signal handler may call it.
        asked.put(number)

    def answer() -> None:
        # A thread of its own: what prints may be at work where the signal comes, and may not be entered twice.
        if number := asked.get():
            again = "Ctrl-C" if number == signal.SIGINT else "the signal"
            say(f"stopping: finishing and saving {what}; {again} again quits now, without saving")

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers: the program that called us handles signals.
        yield
        return
    before = {number: signal.signal(number, request) for number in asking_signals()}
    answering = threading.Thread(target=answer, name="gnomon-stopping", daemon=True)
    answering.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # 0 is no signal, and ends the thread.
        asked.put(0)
        answering.join()


def leave_terminal() -> None:
    """Write to nowhere what was for a terminal that is gone: a line that nobody can read must not end the run."""
    for descriptor in (1, 2):
        try:
            # Zero bytes: the error alone says whether the terminal is still there.
            os.write(descriptor, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
