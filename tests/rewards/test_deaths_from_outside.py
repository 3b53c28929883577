"""Whatever process of grading is killed from outside while it works: asked again or an error, never a reward of 0."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnomon.core.processes.client import Limits
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.code.reward import Code
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.watch import Watched

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are found in /proc, and our walls are Linux's"
)

SLOW = "import time\ntime.sleep(0.1)\n"
ADD = f"{SLOW}def add(a, b):\n    return a + b"
RIGHT = [
    (f"{SLOW}print(sum(map(int, input().split())))", {"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    (ADD, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}),
    (ADD, ["assert add(1, 2) == 3"]),
    (ADD, "def check(candidate):\n    for a in range(3):\n        assert candidate(a, 2) == a + 2\ncheck(add)"),
]  # fmt: skip
GUILTY = "import os\nfor pid in (os.getppid(), os.getpid()):\n    os.kill(pid, 9)"


def descendants(pid: int) -> Iterator[int]:
    """Yield the numbers of all processes below one, the nearest first."""
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def whose(pid: int) -> str:
    """Return what a process is: the program of a sandbox, its witness, or a grading process."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "sandbox" if b"inside.start" in command else "grading" if b"grading_worker" in command else ""


def killing(kind: str, seconds: float, most: int, done: threading.Event, killed: list[int]) -> None:
    """Kill a process of that kind every so often, ``most`` at most; the same choice for the same processes."""
    draws = random.Random(kind)
    while not done.wait(seconds) and len(killed) < most:
        with contextlib.suppress(OSError):
            found = [pid for pid in descendants(os.getpid()) if whose(pid) == kind]
            if found:
                os.kill(chosen := draws.choice(found), signal.SIGKILL)
                killed.append(chosen)


def graded(samples: list[Sample], kind: str, seconds: float, most: int = 1000) -> tuple[list[Grade], int]:
    """Return the grades of all, and how many processes were killed meanwhile."""
    done, killed = threading.Event(), list[int]()

    async def grade() -> list[Grade]:
        limits = Limits(workers=2, deadline_seconds=20.0)
        async with GradingPool(Grading((WeightedReward(Code()),)), limits) as pool:
            thread.start()
            return list(await asyncio.gather(*(pool.grade(sample) for sample in samples)))

    thread = threading.Thread(target=killing, args=(kind, seconds, most, done, killed))
    try:
        return asyncio.run(grade()), len(killed)
    finally:
        done.set()
        thread.join()


def answer(program: str, tests: object) -> Sample:
    """Return an answer that holds a program."""
    return Sample("", f"```python\n{program}\n```", columns={"tests": tests, "entry_point": "add"})


SAMPLES = [answer(*RIGHT[n % len(RIGHT)]) for n in range(24)]


def test_right_programs_earn_1_or_are_errors_whichever_sandbox_is_killed():
    """Programs and their witnesses, seven a second: 24 right programs in four forms of tests, and none earns 0."""
    grades, killed = graded(SAMPLES, "sandbox", 0.15)

    assert killed
    assert [g for g in grades if g.error is None and g.reward != 1.0] == []
    assert [g for g in grades if g.reward == 1.0], "and most are asked again"


def test_right_programs_earn_1_whichever_grader_is_killed():
    """Two of the graders and their common parent: a start may be killed twice, so each sample is asked again."""
    grades, killed = graded(SAMPLES, "grading", 0.4, 2)

    assert killed
    assert [(g.reward, g.error) for g in grades] == [(1.0, None)] * len(SAMPLES)


def test_a_sandbox_that_is_killed_before_its_program_begins_is_started_again():
    """Killed while its interpreter starts, it says nothing: no program of the answer's can have done that."""
    watched, ended = Watched(), list[Outcome]()
    sandbox = LinuxSandbox(SandboxLimits(wall_seconds=20.0))
    running = threading.Thread(target=lambda: ended.append(sandbox.run_now("print(input())", "42", watched)))
    running.start()
    while (process := watched.process) is None and running.is_alive():
        time.sleep(0)
    assert isinstance(process, subprocess.Popen)
    os.kill(process.pid, signal.SIGKILL)
    running.join()

    assert (ended[0].cause, ended[0].stdout) == (None, "42\n")


def test_a_program_that_kills_is_wrong_and_those_beside_it_are_right():
    """Eight right programs beside two that kill their parent and themselves: rewards as if each were alone."""
    began = time.monotonic()
    samples = [answer(*RIGHT[n % len(RIGHT)]) for n in range(8)]
    grades, _ = graded([answer(GUILTY, RIGHT[0][1]), *samples, answer(GUILTY, RIGHT[0][1])], "nobody", 1.0)

    assert [g.reward for g in grades] == [0.0, *[1.0] * 8, 0.0]
    assert time.monotonic() - began < 60
