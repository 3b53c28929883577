"""One piece of writing at a time, in a thread, while the run goes on."""

import errno
import threading
from collections.abc import Callable

import pytest

from gnomon.core.errors import EngineError, Stopped
from gnomon.records.background import Background

PATIENCE_SECONDS = 20.0


def waiting_for(event: threading.Event, done: list[str], name: str = "slow") -> Callable[[], None]:
    """Return work that ends when the event is set."""

    def work() -> None:
        assert event.wait(PATIENCE_SECONDS)
        done.append(name)

    return work


def fail() -> None:
    raise OSError(errno.ENOSPC, "no space")


def test_work_goes_on_while_its_beginner_does():
    """`begin` returns at once; `settle` waits, and the wait is counted, as is the work."""
    event, done = threading.Event(), list[str]()
    with Background() as background:
        background.begin(waiting_for(event, done))
        background.check()
        assert done == []
        threading.Timer(0.2, event.set).start()
        background.settle()
        assert done == ["slow"]
        seconds = background.metrics().values()

    assert seconds["time/checkpoint_wait_seconds"] >= 0.1
    assert seconds["time/checkpoint_write_seconds"] >= 0.1
    assert set(background.metrics().values().values()) == {0.0}


def test_one_piece_is_under_way_at_most():
    """The second is begun when the first has ended, never beside it."""
    event, done = threading.Event(), list[str]()
    with Background() as background:
        background.begin(waiting_for(event, done, "first"))
        threading.Timer(0.1, event.set).start()
        background.begin(lambda: done.append("second"))

    assert done == ["first", "second"]


def test_what_is_waited_for_is_done_here():
    """Synchronous, or on demand, it runs in the caller's own thread, and the whole of it counts as waiting."""
    threads: list[int] = []
    for background, is_waited_for in [(Background(False), False), (Background(), True)]:
        with background:
            background.begin(lambda: threads.append(threading.get_ident()), is_waited_for)
            seconds = background.metrics().values()
        assert seconds["time/checkpoint_wait_seconds"] == seconds["time/checkpoint_write_seconds"] > 0

    assert threads == [threading.get_ident()] * 2


@pytest.mark.parametrize("call", ["check", "begin", "settle"])
def test_a_failure_is_raised_by_the_next_call(call: str):
    """Once, whatever the call; a piece that was to follow is not begun."""
    done: list[str] = []
    with Background() as background:
        background.begin(fail)
        background._thread.submit(int).result()  # the one thread has finished what came before
        calls = {"check": background.check, "settle": background.settle, "begin": lambda: background.begin(done.clear)}
        with pytest.raises(OSError, match="no space"):
            calls[call]()
        background.check()


@pytest.mark.parametrize("ended_by", [None, Stopped("stopped", 15)])
def test_the_end_waits_and_raises(ended_by: Exception | None):
    """A run that ends, or that a signal stops, does not claim to be saved when it is not."""

    def run() -> None:
        with Background() as background:
            background.begin(fail)
            if ended_by is not None:
                raise ended_by

    with pytest.raises(OSError, match="no space"):
        run()


def test_another_error_comes_first():
    """The end waits for the work all the same, so that what is being saved gets its name."""
    event, done = threading.Event(), list[str]()

    def run() -> None:
        with Background() as background:
            background.begin(waiting_for(event, done))
            threading.Timer(0.1, event.set).start()
            raise EngineError("all engines are lost")

    with pytest.raises(EngineError, match="all engines are lost"):
        run()
    assert done == ["slow"]
