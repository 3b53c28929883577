"""F5, F6, F9: what hangs, answers nonsense or takes all memory costs its own sample, and no other one."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gnomon.core.processes.client import Limits
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

SAMPLES = 1000
REWARD = """
import re, time

def score(prompt, completion, **more):
    if completion == "loop":
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "pattern":
        re.match("(a+)+$", "a" * 40 + "b")
    if completion == "memory":
        return float(len(bytearray(64 * 2**30)))
    time.sleep(0.05)
    return float(completion)
"""


def graded(path: Path, completions: Sequence[str], deadline: float) -> tuple[list[Grade], float]:
    """Return the grades of all, asked at once, and the seconds it took."""
    path.write_text(REWARD)
    grading = Grading((WeightedReward(UserFunction(f"{path}:score")),))

    async def run() -> tuple[list[Grade], float]:
        async with GradingPool(grading, Limits(workers=8, deadline_seconds=deadline, memory_gib=1.0)) as pool:
            began = time.monotonic()
            grades = await asyncio.gather(*(pool.grade(Sample("p", c)) for c in completions))
            return list(grades), time.monotonic() - began

    return asyncio.run(run())


def test_no_memory_is_an_error_of_one_sample(tmp_path: Path):
    """Four of twelve ask for 64 GiB: they are errors, and the others are judged right."""
    completions = ["memory" if number % 3 == 0 else str(number) for number in range(12)]

    grades, _ = graded(tmp_path / "score.py", completions, 5.0)

    for completion, grade in zip(completions, grades, strict=True):
        if completion == "memory":
            assert "MemoryError" in str(grade.error)
        else:
            assert grade.reward == float(completion)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_samples_of_which_a_hundred_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """900 right rewards, 100 errors; what hangs costs its deadline and a new process each, and nothing else.

    Eight workers, 0.05 s a good answer, 0.25 s until a hung one is ended.
    """
    hangs = {3: "loop", 13: "sleep", 23: "pattern"}
    completions = [hangs.get(n % 30, str(n)) for n in range(SAMPLES)]
    hung = sum(not c.isdigit() for c in completions)

    grades, seconds = graded(tmp_path / "score.py", completions, 0.25)

    wrong = [
        (c, g)
        for c, g in zip(completions, grades, strict=True)
        if (g.reward != float(c) if c.isdigit() else g.error != "score: timed out after 0.25 s")
    ]
    ideal = (hung * 0.25 + (SAMPLES - hung) * 0.05) / 8
    with capsys.disabled():
        print(f"\n{hung} of {SAMPLES} hung: {seconds:.1f} s, {ideal:.1f} s by themselves, {len(wrong)} mis-scored")
    assert wrong == []
