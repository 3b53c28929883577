import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.sandbox.probes import SECRET, Target, targets

HOSTILE = '''
import multiprocessing, os, signal, subprocess, sys, threading, time

def forever():
    while True:
        pass

def ignoring():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)

def forked(then):
    """Fork a child that sleeps; then do something else, in the parent."""
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)
    return then()

def detached():
    """Start a program in a session of its own, out of reach of a group kill, and wait for it."""
    subprocess.run(["sleep", "1000"], start_new_session=True)

def impostor():
    """The forked child comes back with another answer."""
    if os.fork() == 0:
        return 99.0
    time.sleep(0.1)
    return 1.0

def flood():
    for _ in range(20000):
        print('{"id": 1, "seconds": 0, "reward": 99.0, "parts": {}, "error": null}' * 10)
    os.write(1, b"x" * 100000)
    os.write(2, b"x" * 100000)
    return 1.0

def later_death():
    threading.Thread(target=lambda: (time.sleep(0.05), os._exit(5)), daemon=True).start()
    return 1.0

def interrupted():
    """A program that was started in the background ignores the signal, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)

HOSTILE = {
    "loop": forever,
    "sleep": lambda: time.sleep(1000),
    "ignore": ignoring,
    "pattern": lambda: __import__("re").match("(a+)+$", "a" * 40 + "b"),
    "fork and hang": lambda: forked(lambda: time.sleep(1000)),
    "fork and exit": lambda: forked(lambda: os._exit(3)),
    "fork and answer": lambda: forked(lambda: 1.0),
    "detach": detached,
    "impostor": impostor,
    "flood": flood,
    "exit": lambda: os._exit(3),
    "sys.exit": sys.exit,
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill the parent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000)),
    "die later": later_death,
    "memory": lambda: float(len(bytearray(64 * 2**30))),
    "close everything": lambda: os.closerange(0, 4096),
    "interrupt": interrupted,
    "raise": lambda: 1 / 0,
    "None": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "text": lambda: "1.0",
    "environment": lambda: float("GNOMON_TEST_SECRET" in os.environ),
    "pid": lambda: os.getpid(),
    "threads": lambda: len(os.listdir("/proc/self/task")),
}

def score(completion, **columns):
    if completion in HOSTILE:
        return HOSTILE[completion]()
    return float(completion)

async def later(completion, **columns):
    import asyncio
    await asyncio.sleep(1000 if completion == "sleep" else 0.001)
    return float(completion)
'''


@pytest.fixture(autouse=True)
def _search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test imports is not found by the next one."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """A file of reward functions that do what none should."""
    path = tmp_path / "hostile.py"
    path.write_text(textwrap.dedent(HOSTILE))
    return path


@pytest.fixture
def hostile(rewards: Path) -> Grading:
    """A grading by ``score``: a number is its own reward, a name from the table above misbehaves."""
    return Grading((WeightedReward(UserFunction(f"{rewards}:score")),))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """What hostile programs aim at, with a secret in the environment."""
    os.environ[SECRET] = SECRET
    with targets() as aimed:
        yield aimed
    del os.environ[SECRET]
