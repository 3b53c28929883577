"""The signals that ask a run to stop, and how processes of a run leave the answer to the run.

A scheduler sends them to all processes of a job at once. The run finishes the current step and saves; a process that
grades, replies or computes for that step must not end meanwhile. It ends with the run, by a closed socket.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# SIGUSR1 is what schedulers send a while before they end a job: `sbatch --signal=USR1@300`; SIGHUP comes when the
# terminal goes.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_MASKS = threading.local()


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the stop signals in this thread, and in each program that is started during the block.

    A program that never unblocks them is never ended by them.
    """
    # A program inherits the mask: a signal that comes while it starts waits until it has handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_over_stop_signals() -> None:
    """Let the stop signals do nothing in this process; programs that it starts have the system's defaults."""
    for number in STOP_SIGNALS:
        signal.signal(number, _pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def restore_in_forks() -> None:
    """Give processes that this one forks from now on the system's defaults, so that user code can end its own.

    A signal that comes before the new process has them waits until it has.
    """
    # Held across the fork: in the child the handler that ignores would lose a signal that came a moment too early.
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_restore)


def _pass_over(number: int, frame: object) -> None:
    """Do nothing."""


def _hold() -> None:
    _MASKS.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.before)


def _restore() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _pass_over:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _release()
