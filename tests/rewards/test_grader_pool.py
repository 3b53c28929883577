import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import ConfigError, GradingError, RewardError
from gnomon.core.processes.client import Limits
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts processes in /proc")

DEADLINE = 0.5
QUICK = Limits(workers=2, deadline_seconds=DEADLINE, start_seconds=30.0)


def using(grading: Grading, use: Callable[[GradingPool], Awaitable[Any]], limits: Limits = QUICK) -> Any:
    """Return what ``use`` returns with a running pool."""

    async def run() -> Any:
        async with GradingPool(grading, limits) as pool:
            return await use(pool)

    return asyncio.run(run())


def graded(grading: Grading, completions: Sequence[str], limits: Limits = QUICK) -> list[Grade]:
    """Grade all at the same time."""

    async def use(pool: GradingPool) -> list[Grade]:
        return await asyncio.gather(*(pool.grade(Sample("p", c)) for c in completions))

    grades: list[Grade] = using(grading, use, limits)
    return grades


def in_turn(grading: Grading, completions: Sequence[str], limits: Limits = QUICK) -> list[Grade]:
    """Grade one after the other."""

    async def use(pool: GradingPool) -> list[Grade]:
        return [await pool.grade(Sample("p", c)) for c in completions]

    grades: list[Grade] = using(grading, use, limits)
    return grades


def between_good_ones(grading: Grading, names: Sequence[str]) -> dict[str, tuple[Grade, Grade]]:
    """Grade each name and then a good answer, one after the other, by one worker: name to the two grades."""
    one = Limits(workers=1, deadline_seconds=DEADLINE)
    grades = in_turn(grading, [c for name in names for c in (name, "7")], one)
    return dict(zip(names, zip(grades[::2], grades[1::2], strict=True), strict=True))


@pytest.fixture(autouse=True)
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Count the processes that this test's grading left behind: orphans too, known by a variable they inherit."""
    mark = f"TMPDIR={tmp_path}".encode()
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def found() -> set[int]:
        numbers = set()
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    numbers.add(int(folder.name))
            except OSError:  # it ended meanwhile
                continue
        return numbers

    return found


def test_the_count_sees_every_process(hostile: Grading, left: Callable[[], set[int]]):
    """The nursery, a worker, and the program that a reward detached: three while it runs, none after."""

    async def use(pool: GradingPool) -> int:
        asked = asyncio.ensure_future(pool.grade(Sample("p", "detach")))
        await asyncio.sleep(DEADLINE / 2)
        running = len(left())
        await asked
        return running

    assert using(hostile, use, Limits(workers=1, deadline_seconds=2 * DEADLINE)) == 3
    assert left() == set()


def test_a_reward_that_hangs_times_out_and_the_next_answer_is_judged_right(
    hostile: Grading, left: Callable[[], set[int]]
):
    """In Python, in a C call, deaf to SIGTERM, with children in or out of its group; nothing of it is left."""
    names = ["loop", "sleep", "ignore", "pattern", "fork and hang", "detach"]

    for name, (hung, good) in between_good_ones(hostile, names).items():
        assert hung.error == "score: timed out after 0.5 s", name
        assert (good.reward, good.error) == (7.0, None), name

    assert left() == set()


FAILURES = {
    "exit": "score: the grading process exited with status 3",
    "fork and exit": "score: the grading process exited with status 3",
    "crash": "score: the grading process was killed by SIGSEGV",
    "close everything": "score: the grading process ",
    "sys.exit": "score: SystemExit (hostile.py:",
    "interrupt": "grading raised KeyboardInterrupt",
    "raise": "score: ZeroDivisionError: division by zero (hostile.py:",
    "memory": "score: MemoryError (hostile.py:",
    "None": "score: returned None",
    "nan": "score: returned nan",
    "inf": "score: returned inf",
    "text": "score: returned '1.0' (str)",
}


def test_a_reward_that_fails_is_an_error_and_the_next_answer_is_judged_right(hostile: Grading):
    """It says how: by exiting, crashing, raising, or returning what is no number."""
    for name, (failed, good) in between_good_ones(hostile, list(FAILURES)).items():
        assert failed.reward is None, name
        assert str(failed.error).startswith(FAILURES[name])
        assert good.reward == 7.0, name


def test_an_answer_cannot_be_forged(hostile: Grading, left: Callable[[], set[int]]):
    """Neither what is printed nor what a forked child returns takes the place of the verdict: 1, never 99."""

    for name, (first, good) in between_good_ones(hostile, ["impostor", "flood", "fork and answer"]).items():
        assert (first.reward, good.reward) == (1.0, 7.0), name

    assert left() == set()


def test_an_earlier_sample_that_kills_its_worker_late_costs_no_later_one(hostile: Grading):
    """A thread left behind ends the process during the next sample, which is then tried once more."""
    one = Limits(workers=1, deadline_seconds=5.0)

    async def use(pool: GradingPool) -> list[Grade]:
        first = await pool.grade(Sample("p", "die later"))
        await asyncio.sleep(0.2)
        return [first, *[await pool.grade(Sample("p", str(n))) for n in range(3)]]

    assert [g.reward for g in using(hostile, use, one)] == [1.0, 0.0, 1.0, 2.0]


def test_killing_the_nursery_costs_one_sample(hostile: Grading):
    """It is started again, and grading goes on."""
    killer, *others = in_turn(hostile, ["kill the parent", "1", "2", "3"])

    assert killer.error is not None
    assert [g.reward for g in others] == [1.0, 2.0, 3.0]


def test_one_sample_in_ten_hanging_mis_scores_none(hostile: Grading, left: Callable[[], set[int]]):
    """200 samples at once, 20 of which hang: 20 errors, and 180 rewards that are right."""
    completions = ["loop" if n % 20 == 3 else "sleep" if n % 20 == 13 else str(n) for n in range(200)]

    grades = graded(hostile, completions, Limits(workers=4, deadline_seconds=DEADLINE))

    for completion, grade in zip(completions, grades, strict=True):
        if completion.isdigit():
            assert grade.reward == float(completion)
        else:
            assert grade.error == "score: timed out after 0.5 s"
    assert left() == set()


def test_a_busy_event_loop_does_not_make_a_good_answer_late(hostile: Grading):
    """The loop is blocked for twice the deadline while the answer waits: the worker's clock decides."""

    async def use(pool: GradingPool) -> Grade:
        asked = asyncio.ensure_future(pool.grade(Sample("p", "7")))
        await asyncio.sleep(0)
        time.sleep(2 * DEADLINE)
        return await asked

    assert using(hostile, use).reward == 7.0


def test_a_cancelled_sample_leaves_no_answer_for_the_next(hostile: Grading):
    """Its worker is replaced: the next sample gets its own verdict, not the one that nobody waited for."""
    one = Limits(workers=1, deadline_seconds=5.0)

    async def use(pool: GradingPool) -> Grade:
        asked = asyncio.ensure_future(pool.grade(Sample("p", "sleep")))
        await asyncio.sleep(0.1)
        asked.cancel()
        return await pool.grade(Sample("p", "7"))

    assert using(hostile, use, one).reward == 7.0


def test_asynchronous_functions_are_awaited_and_time_out(rewards: Path):
    """An await that never ends is ended like a loop."""
    grading = Grading((WeightedReward(UserFunction(f"{rewards}:later")),))

    hung, good = in_turn(grading, ["sleep", "7"])

    assert hung.error == "later: timed out after 0.5 s"
    assert good.reward == 7.0


def test_workers_see_only_what_they_are_given(hostile: Grading, monkeypatch: pytest.MonkeyPatch):
    """A key in the environment is not passed on, unless it is named."""
    monkeypatch.setenv("GNOMON_TEST_SECRET", "key")

    (hidden,) = graded(hostile, ["environment"])
    (passed,) = graded(hostile, ["environment"], Limits(workers=1, environment=("GNOMON_TEST_SECRET",)))

    assert (hidden.reward, passed.reward) == (0.0, 1.0)


def test_samples_are_judged_beside_each_other(hostile: Grading):
    """Two workers are two processes, and one that is never ended judges many samples."""
    grades = graded(hostile, ["pid"] * 20)

    assert len({g.reward for g in grades}) == 2
    assert os.getpid() not in {g.reward for g in grades}


def test_rewards_that_start_threads_when_imported_are_imported_in_each_worker(tmp_path: Path):
    """Forking beside threads can hang: the workers then have the thread, and the lock that it holds is theirs."""
    path = tmp_path / "threaded.py"
    path.write_text(
        textwrap.dedent("""
        import threading, time
        lock = threading.Lock()
        def hold():
            while True:
                with lock:
                    time.sleep(0.01)
        threading.Thread(target=hold, daemon=True).start()
        def score(completion, **columns):
            if completion == "exit":
                import os; os._exit(1)
            with lock:
                return float(threading.active_count())
        """)
    )
    grading = Grading((WeightedReward(UserFunction(f"{path}:score")),))

    first, dead, good = in_turn(grading, ["1", "exit", "1"], Limits(workers=1))

    assert (first.reward, good.reward) == (2.0, 2.0)
    assert dead.error == "score: the grading process exited with status 1"


ENDING = """
import os, signal, time
from pathlib import Path
def score(completion, **columns):
    deed, _, marker = completion.partition(" ")
    who = {"self": os.getpid(), "parent": os.getppid()}.get(deed)
    if who is not None and not (marker and Path(marker).exists()):
        if marker:
            Path(marker).touch()
        os.kill(who, signal.SIGKILL)
        time.sleep(60)
    return 1.0
"""


def test_samples_beside_one_that_ends_the_grading_are_graded_as_alone(tmp_path: Path):
    """One ends the parent of all workers whenever it is graded: it is an error, and 24 others earn what they do."""
    (tmp_path / "ending.py").write_text(ENDING)
    grading = Grading((WeightedReward(UserFunction(f"{tmp_path}/ending.py:score")),))
    limits = Limits(workers=2, deadline_seconds=30.0, start_seconds=60.0)
    samples = ["parent", *["fine"] * 24, f"self {tmp_path}/one", f"parent {tmp_path}/two"]
    bad, *good = graded(grading, samples, limits)

    assert [grade.reward for grade in good] == [1.0] * 26
    assert bad.reward is None
    assert bad.error.endswith("which was killed (out of memory?), 8 times")


def test_a_sample_that_is_no_json_is_an_error_of_its_own(hostile: Grading):
    """Its columns hold an object; the worker goes on."""

    async def use(pool: GradingPool) -> list[Grade]:
        bad = await pool.grade(Sample("p", "1", columns={"when": object()}))
        return [bad, await pool.grade(Sample("p", "7"))]

    bad, good = using(hostile, use, Limits(workers=1))

    assert bad.error == "the sample cannot be sent to a grading process: Object of type object is not JSON serializable"
    assert good.reward == 7.0


def test_a_reward_that_cannot_be_imported_stops_the_start(tmp_path: Path, left: Callable[[], set[int]]):
    """With its own message, and nothing left running."""
    grading = Grading((WeightedReward(UserFunction(f"{tmp_path}/nothing.py:score")),))

    with pytest.raises(RewardError, match=r"there is no file .*nothing\.py"):
        graded(grading, ["1"])

    assert left() == set()


def test_a_reward_that_becomes_unusable_fails_the_run_and_hangs_nobody(hostile: Grading, rewards: Path):
    """The file is gone when the nursery has to be started again: everyone who waits is told."""

    async def use(pool: GradingPool) -> list[Any]:
        rewards.unlink()
        asked = [pool.grade(Sample("p", c)) for c in ("kill the parent", "1", "2", "3", "4")]
        return await asyncio.gather(*asked, return_exceptions=True)

    told = using(hostile, use, Limits(workers=1, deadline_seconds=DEADLINE))

    assert any(isinstance(t, GradingError) and "cannot be replaced" in str(t) for t in told)


def test_nothing_can_be_graded_after_close(hostile: Grading):
    """It raises at once instead of waiting for a worker that will not come."""

    async def run() -> None:
        pool = GradingPool(hostile, QUICK)
        await pool.start()
        await pool.close()
        await pool.grade(Sample("p", "1"))

    with pytest.raises(GradingError, match="closed"):
        asyncio.run(run())


def test_close_ends_what_is_still_running(hostile: Grading, left: Callable[[], set[int]]):
    """A hanging sample does not hold up the end, leaves no process, and whoever waits for it is told."""

    async def run() -> None:
        async with GradingPool(hostile, Limits(workers=2, deadline_seconds=1000.0)) as pool:
            asked = asyncio.ensure_future(pool.grade(Sample("p", "fork and hang")))
            await asyncio.sleep(0.2)
        with pytest.raises(GradingError, match="closed"):
            await asked
        await pool.close()

    asyncio.run(run())

    assert left() == set()


def test_workers_end_when_the_run_is_killed(
    hostile: Grading, rewards: Path, tmp_path: Path, left: Callable[[], set[int]]
):
    """SIGKILL leaves the run no time to close: its workers and their children end by themselves."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os, signal
        from gnomon.rewards.base import Sample
        from gnomon.rewards.function import UserFunction
        from gnomon.rewards.grading import Grading, WeightedReward
        from gnomon.core.processes.client import Limits
        from gnomon.rewards.grader_pool import GradingPool
        async def main():
            grading = Grading((WeightedReward(UserFunction({f"{rewards}:score"!r})),))
            async with GradingPool(grading, Limits(deadline_seconds=100.0)) as pool:
                asyncio.ensure_future(pool.grade(Sample("p", "detach")))
                await asyncio.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """)
    )

    ended = subprocess.run(
        [sys.executable, str(script)], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )

    assert ended.returncode == -9
    until = time.monotonic() + 10
    while left() and time.monotonic() < until:
        time.sleep(0.02)
    assert left() == set()


def test_limits_that_mean_nothing_are_refused():
    """No worker, no time, no memory."""
    for wrong in ({"workers": 0}, {"deadline_seconds": 0.0}, {"start_seconds": -1.0}, {"memory_gib": 0.0}):
        with pytest.raises(ConfigError, match=rf"^grading\.{next(iter(wrong))} must be "):
            Limits(**wrong)  # type: ignore[arg-type]


def test_pure_verifiers_go_the_same_way():
    """Columns arrive, and a penalty is taken from the sample's own length."""
    sample = Sample("1 + 1 =", "It is 2.", columns={"answer": "2", "pair": (1, 2)})

    async def use(pool: GradingPool) -> Grade:
        return await pool.grade(sample)

    grade = using(Grading((WeightedReward(Numeric(), weight=2.0),)), use)

    assert (grade.reward, grade.parts) == (2.0, {"numeric": 1.0})
