"""Signals that end a run: acknowledged at once, and a second one does not wait."""

import fcntl
import os
import signal
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.training.runs import signaled

from gnomon.training.run import StopRequest
from gnomon.training.signals import stop_on_signals

# Something that does not look whether it is asked to stop: a step that takes long.
BUSY = """
import sys, time
from gnomon.training.run import StopRequest
from gnomon.training.signals import stop_on_signals

stop = StopRequest()
with stop_on_signals(stop, lambda said: print(said, flush=True), "this step", "gnomon resume RUN"):
    print("working", flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and (len(sys.argv) == 1 or not stop.signal):
        time.sleep(0.01)
print(f"saved, asked by {stop.signal}", flush=True)
"""


def busy(*arguments: str, before: Callable[[], object] | None = None) -> Forked:
    """Start such a program, and return it when it is at work."""
    program = Forked(arguments, BUSY, before)
    assert program.stdout.readline() == "working\n"
    return program


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "the signal"), (signal.SIGUSR1, "the signal")]
)
def test_the_first_signal_is_answered_and_the_second_does_not_wait(number: signal.Signals, again: str):
    """In the middle of a step: one line on what happens now, and after the second 128 + signal and how to go on."""
    program = busy()
    program.send_signal(number)
    assert program.stdout.readline() == (
        f"stopping: finishing and saving this step; {again} again quits now, without saving\n"
    )
    assert program.poll() is None
    program.send_signal(number)
    out, err = program.communicate(timeout=30)

    assert program.returncode == 128 + number
    assert out == ""
    assert err == "\nstopped at once, and nothing was saved; go on with: gnomon resume RUN\n"


def test_a_terminal_that_goes_twice_lets_it_finish():
    """The kernel and the shell each send SIGHUP: the current step is finished, and the lines to nowhere end nothing."""
    program = busy("obedient")
    for _ in range(3):
        program.send_signal(signal.SIGHUP)
    out, err = program.communicate(timeout=30)

    assert (program.returncode, err) == (0, "")
    assert out.endswith("saved, asked by 1\n")


def _take_terminal(name: str) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    os.close(terminal)


def test_a_run_whose_terminal_is_closed_goes_on_to_its_save(tmp_path: Path):
    """With a real terminal behind it that is closed: SIGHUP comes of itself, and nothing it prints fails."""
    controller, terminal = os.openpty()
    ended = tmp_path / "ended"
    script = BUSY + f"print('more'); open({str(ended)!r}, 'w').write(str(stop.signal))\n"
    program = Forked(["obedient"], script, partial(_take_terminal, os.ttyname(terminal)))
    assert os.read(controller, 99).startswith(b"working")
    os.close(terminal)
    os.close(controller)

    program.communicate(timeout=30)
    assert program.returncode == 0
    assert ended.read_text() == "1"


def test_under_nohup_a_hangup_stays_ignored():
    """Whoever asked for that goes on working; and the other signals still stop it."""
    program = busy("obedient", before=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN))
    program.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    out, _ = program.communicate(timeout=30)

    assert program.returncode == 0
    assert out.endswith("saved, asked by 15\n")


def test_one_signal_lets_it_finish():
    """The request is seen, what is at hand ends, and the handlers are what they were."""
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(StopRequest(), print, "the step", "again"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before

    program = busy("obedient")
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=30)

    assert (program.returncode, err) == (0, "")
    assert out.endswith("saved, asked by 15\n")


def test_another_thread_leaves_signals_alone():
    """Handlers stay what they were, and an error of the block has no other error behind it."""
    before, met = signal.getsignal(signal.SIGINT), list[BaseException]()

    def work() -> None:
        try:
            with stop_on_signals(StopRequest(), print, "the step", "again"):
                assert signal.getsignal(signal.SIGINT) is before
                raise KeyError("of the block")
        except KeyError as error:
            met.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert [(str(error), error.__context__) for error in met] == [("'of the block'", None)]


def test_a_run_says_that_it_is_stopping_before_it_has_stopped(tmp_path: Path):
    """Ctrl-C during `gnomon train`: the line, then the step that was saved, exit code 130."""
    run = tmp_path / "run"
    ran = signaled(run, signal.SIGINT, ["steps=400", "task.size=40", "rollouts_per_step=16", "checkpoints.every=0"])
    said = ran.stderr.splitlines()

    assert ran.returncode == 130
    assert "stopping: finishing and saving this step; Ctrl-C again quits now" in ran.stderr
    assert said[-1].endswith(f"and saved; go on with: gnomon resume {run}")
