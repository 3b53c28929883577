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
from tests.forked import Forked

from gnomon.core.processes.client import Limits
from gnomon.core.processes.stop_signals import STOP_SIGNALS
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.code.reward import Code
from gnomon.rewards.function import UserFunction
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
    return "sandbox" if b"from inside" in command else "grading" if b"grading_worker" in command else ""


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


def signalling(number: signal.Signals, done: threading.Event, struck: set[int]) -> None:
    """Send a signal to every process below this one, again and again."""
    while not done.wait(0.1):
        for pid in list(descendants(os.getpid())):
            with contextlib.suppress(OSError):
                if whose(pid):
                    os.kill(pid, number)
                    struck.add(pid)


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


@pytest.mark.parametrize(
    ("number", "packages"),
    [
        *(pytest.param(number, (), id=number.name) for number in STOP_SIGNALS),
        pytest.param(STOP_SIGNALS[0], ("numpy",), id=f"template-{STOP_SIGNALS[0].name}"),
        *(
            pytest.param(number, ("numpy",), id=f"template-{number.name}", marks=pytest.mark.slow)
            for number in STOP_SIGNALS[1:]
        ),
    ],
)
def test_signals_that_ask_a_run_to_stop_end_nothing_that_grades_its_step(
    number: signal.Signals, packages: tuple[str, ...]
):
    """A scheduler sends them to every process of a job, and the run finishes its step: each right program earns 1."""
    done, struck = threading.Event(), set[int]()
    thread = threading.Thread(target=signalling, args=(number, done, struck))

    async def grade() -> tuple[list[Grade], int]:
        grading = Grading((WeightedReward(Code(packages=packages)),))
        async with GradingPool(grading, Limits(workers=2, deadline_seconds=20.0)) as pool:
            thread.start()
            grades = await asyncio.gather(*(pool.grade(sample) for sample in SAMPLES[:12]))
            return list(grades), pool._worker_pool.fork_server.starts

    try:
        grades, starts = asyncio.run(grade())
    finally:
        done.set()
        thread.join()

    assert len(struck) > 2
    assert [(g.reward, g.error) for g in grades] == [(1.0, None)] * 12
    assert starts == 1


def test_what_a_reward_starts_is_ended_by_the_signals_that_it_sends(tmp_path: Path):
    """A program, and a process that it forked: only its own process passes the signals over."""
    (tmp_path / "mine.py").write_text(
        "import multiprocessing, subprocess, time\n"
        "def score(completion):\n"
        "    started = subprocess.Popen(['sleep', '100'])\n"
        "    forked = multiprocessing.get_context('fork').Process(target=time.sleep, args=(100,))\n"
        "    forked.start()\n"
        "    started.terminate(), forked.terminate(), forked.join()\n"
        "    return -started.wait() - forked.exitcode\n"
    )

    async def grade() -> Grade:
        grading = Grading((WeightedReward(UserFunction(f"{tmp_path}/mine.py:score")),))
        async with GradingPool(grading, Limits(deadline_seconds=20.0)) as pool:
            return await pool.grade(Sample("", ""))

    assert asyncio.run(grade()).reward == 30.0


def test_an_answer_whose_grader_is_stopped_is_graded_again(tmp_path: Path):
    """A process that stands still by a signal until its deadline says nothing about the answer."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, signal, time\n"
        "def score(completion):\n"
        f"    mark = pathlib.Path({str(tmp_path)!r}) / completion\n"
        "    if completion == 'always' or not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return 1.0\n"
    )

    async def grade() -> list[Grade]:
        grading = Grading((WeightedReward(UserFunction(f"{tmp_path}/mine.py:score"), name="mine"),))
        async with GradingPool(grading, Limits(deadline_seconds=0.3)) as pool:
            return list(await asyncio.gather(*(pool.grade(Sample("", text)) for text in ("once", "always"))))

    once, always = asyncio.run(grade())
    assert (once.reward, once.error) == (1.0, None)
    assert (always.reward, always.error) == (None, "mine: the grading process was stopped by a signal, 8 times")


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


def stopping(which: int, most: int, done: threading.Event) -> None:
    """Stop programs below this process that are behind their walls, or their witnesses (0), ``most`` times."""
    stopped = set[int]()
    while len(stopped) < most and not done.wait(0.01):
        for pid in [pid for pid in descendants(os.getpid()) if pid not in stopped]:
            with contextlib.suppress(OSError):
                if "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text() and len(stopped) < most:
                    os.kill(pid if which else parent_of(pid), signal.SIGSTOP)
                    stopped.add(pid)


def parent_of(pid: int) -> int:
    """Return the number of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("which", "packages"),
    [(0, ()), (1, ("numpy",)), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, ()), (0, ("numpy",))))],
    ids=["witness", "forked program", "program", "forked witness"],
)
def test_a_program_that_is_stopped_runs_again(which: int, packages: tuple[str, ...]):
    """Stopped once until its time is over: its output the second time. Always: refused, which is never a reward."""
    sandbox = LinuxSandbox(SandboxLimits(wall_seconds=1.0), packages=packages)
    ends = []
    for most in (1, 9):
        done = threading.Event()
        thread = threading.Thread(target=stopping, args=(which, most, done))
        thread.start()
        ends.append(sandbox.run_now("import time\ntime.sleep(0.4)\nprint(input())", "42"))
        done.set()
        thread.join()

    assert (ends[0].cause, ends[0].stdout) == (None, "42\n")
    assert ends[1].cause == "refused"
    # Stopped while it starts, it is known as one that did not.
    assert "killed or stopped it twice" in ends[1].stderr or "it did not start" in ends[1].stderr


def test_a_program_cannot_stop_itself():
    """So one that stands still was stopped from outside, and is no program that took too long."""
    program = (
        "import os, signal\nfor n in (19, 20, 21, 22):\n    try: os.kill(os.getpid(), n)\n    except OSError: print(n)"
    )

    assert LinuxSandbox(SandboxLimits(wall_seconds=20.0)).run_now(program).stdout.split() == ["19", "20", "21", "22"]


SUSPENDED = """
import asyncio
from tests.rewards.test_deaths_from_outside import RIGHT, answer
from gnomon.core.processes.client import Limits
from gnomon.rewards.code.reward import Code
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

async def grade():
    slow = [(program.replace("0.1", "0.5"), tests) for program, tests in RIGHT]
    grading = Grading((WeightedReward(Code(case_seconds=1.5, total_seconds=3.0)),))
    async with GradingPool(grading, Limits(workers=4, deadline_seconds=4.0)) as pool:
        print("ready", flush=True)
        return await asyncio.gather(*(pool.grade(answer(*each)) for each in slow))
print([(grade.reward, grade.error) for grade in asyncio.run(grade())])
"""


@pytest.mark.slow
def test_a_job_that_is_suspended_grades_as_if_it_had_not_been():
    """A scheduler, or a paused container, stops every process and lets them go on: no time limit counts meanwhile."""
    program = Forked([], SUSPENDED)
    assert program.stdout.readline() == "ready\n"
    while not any(whose(pid) == "sandbox" for pid in descendants(program.pid)):
        time.sleep(0.01)
    everybody = [program.pid, *descendants(program.pid)]
    for number, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
        for pid in everybody:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(seconds)

    assert program.communicate()[0] == f"{[(1.0, None)] * 4}\n"


def test_a_program_that_kills_is_wrong_and_those_beside_it_are_right():
    """Eight right programs beside two that kill their parent and themselves: rewards as if each were alone."""
    samples = [answer(*RIGHT[n % len(RIGHT)]) for n in range(8)]
    grades, _ = graded([answer(GUILTY, RIGHT[0][1]), *samples, answer(GUILTY, RIGHT[0][1])], "nobody", 1.0)

    assert [g.reward for g in grades] == [0.0, *[1.0] * 8, 0.0]
