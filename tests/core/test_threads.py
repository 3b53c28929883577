"""Threads that calculate together: whoever has done calculating leaves no helpers behind."""

import sys

import pytest
from tests.forked import Forked, ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's OpenMP on Linux only")

COUNTING = """
import asyncio, os, sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
from gnomon.core.threads import release_omp_team, run_in_thread, without_omp_team

torch.set_num_threads(3)
large = torch.randn(2000, 2000)


def calculate():
    large.mul_(1.0)
    return float(large[0, 0])


def helpers():
    return len(os.listdir("/proc/self/task")) - threading.active_count()


before = helpers()
calculate()
assert helpers() == before + 2, (before, helpers())
"""


def says(program: str) -> str:
    """What the program prints, in a process of its own: helpers of a test's own process stay out of it."""
    done = ended(Forked([], COUNTING + program))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_helpers_go_and_come_back():
    """The thread's own, as often as it calculates; a thread without any has nobody to send away."""
    program = """
assert release_omp_team() and helpers() == before
calculate()
assert helpers() == before + 2
assert release_omp_team() and release_omp_team() and helpers() == before
"""
    assert says(program) == ""


def test_work_elsewhere_leaves_none_on_either_side():
    """Neither in the thread that handed it over nor in the one that did it, when it failed too."""
    program = """
async def both():
    found = await run_in_thread(calculate)
    assert found == float(large[0, 0])
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            await run_in_thread(calculate, pool)
            assert helpers() == before, (before, helpers())
        try:
            await run_in_thread(lambda: (calculate(), 1 / 0), pool)
        except ZeroDivisionError:
            print(helpers() - before)

asyncio.run(both())
"""
    assert says(program) == "0\n"


def test_no_two_threads_of_a_run_have_helpers():
    """Looked at whenever an engine's or a learner's thread hands back: a run's threads calculate one at a time."""
    program = """
import tempfile
import time
import gnomon
from gnomon.core import threads

release_omp_team()
seen, had = [], []
own = threads.release_omp_team


def watched():
    had.append(helpers() - before)
    done = own()
    # A thread that ends is a task of the system a little longer than Python's; helpers stay until they are sent away.
    until = time.monotonic() + 1
    while helpers() > before and time.monotonic() < until:
        time.sleep(0.001)
    seen.append(helpers() - before)
    return done


threads.release_omp_team = watched
with tempfile.TemporaryDirectory() as folder:
    gnomon.train("tiny", folder + "/run", steps=2, rollouts_per_step=512)
print(max(had), max(seen))
"""
    assert says(program).splitlines()[-1] == "2 0"
