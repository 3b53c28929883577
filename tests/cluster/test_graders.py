"""Graders in a Ray cluster of which some die, or cannot start; and nothing left behind."""

import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.here import children, kill, opened, settled

from gnomon.cluster.graders import RETURNS, Graders
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.errors import GradingError, RewardError
from gnomon.core.processes.client import Limits
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward

pytestmark = pytest.mark.slow

LIMITS = Limits(workers=1, deadline_seconds=5.0, environment=("JUDGE",))
SUMS = Grading((WeightedReward(Numeric()),))
SLOW = """
    import os, time

    def score(prompt, completion, **columns):
        if completion == "who":
            return float(len(os.environ["JUDGE"]))
        time.sleep(float(completion))
        return float(completion)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two places for graders."""
    with opened(ResourceBundle("grader", 0.5), ResourceBundle("grader", 0.5)) as cluster:
        yield cluster


@pytest.fixture
def slow(tmp_path: Path) -> Grading:
    """A reward that takes as many seconds as it gives points."""
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    return Grading((WeightedReward(UserFunction(f"{tmp_path / 'slow.py'}:score")),))


def using(cluster: Cluster, grading: Grading, use: Callable[[Graders], Awaitable[Any]], count: int = 2) -> list[str]:
    """Use graders in so many places; return what was said of them."""
    said: list[str] = []

    async def body() -> None:
        async with Graders(cluster, cluster.of("grader")[:count], grading, LIMITS, said.append) as graders:
            await use(graders)

    asyncio.run(body())
    return said


def test_rewards_read_what_they_may_of_the_runs_environment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, slow: Grading
):
    """A variable that the limits name, wherever the grader is."""
    monkeypatch.setenv("JUDGE", "secret")

    async def use(graders: Graders) -> None:
        assert (await graders.grade(Sample("p", "who"))).reward == 6.0

    assert using(cluster, slow, use) == []


def test_a_killed_grader_costs_no_sample(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, slow: Grading):
    """What it had is judged by the other, and one comes in its place; of either nothing is left afterwards."""
    monkeypatch.setenv("JUDGE", "secret")
    homes: list[tuple[str, int]] = []

    async def use(graders: Graders) -> None:
        asking = asyncio.gather(*(graders.grade(Sample("p", "0.3")) for _ in range(6)))
        await asyncio.sleep(0.2)
        home = graders.handles[0].home
        assert home is not None
        workers = children(home[1])
        assert workers
        kill(home)
        assert [grade.reward for grade in await asking] == [0.3] * 6
        await settled(lambda: graders.handles[0].cause is None)
        assert graders.handles[0].home != home
        homes.extend(handle.home for handle in graders.handles if handle.home is not None)
        await settled(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))

    said = using(cluster, slow, use)

    assert len(said) == 1
    assert said[0].startswith("lost the grader at place 0: ")
    assert said[0].endswith("; what it had is judged by the other one")
    asyncio.run(settled(lambda: not any(Path(f"/proc/{pid}").exists() for _, pid in homes)))


def test_the_only_grader_is_followed_by_one_in_its_place(cluster: Cluster):
    """Nobody else is spoken of where there is nobody else, and its samples are judged all the same."""

    async def use(graders: Graders) -> None:
        kill(graders.handles[0].home)
        assert (await graders.grade(Sample("2 + 2 =", "4", columns={"answer": "4"}))).reward == 1.0

    said = using(cluster, SUMS, use, count=1)

    assert len(said) == 1
    assert said[0].endswith("; what it had is judged by the one that is started in its place")


def test_a_reward_that_is_not_there_is_told_with_its_machine(cluster: Cluster, tmp_path: Path):
    """Before anything is graded: which file, and where it is missing."""
    grading = Grading((WeightedReward(UserFunction(f"{tmp_path / 'missing.py'}:score")),))

    async def use(graders: Graders) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardError, match=r"on the cluster's machine .*: .*there is no file .*missing.py"):
        using(cluster, grading, use)


def test_graders_that_die_again_and_again_end_the_run(cluster: Cluster):
    """Three times more each; then an error that names places and causes, for everybody who waits."""

    sample = Sample("2 + 2 =", "4", columns={"answer": "4"})

    async def use(graders: Graders) -> None:
        for _ in range(RETURNS):
            for handle in graders.handles:
                kill(handle.home)
            assert (await graders.grade(sample)).reward == 1.0
            await settled(lambda: all(handle.cause is None for handle in graders.handles))
        for handle in graders.handles:
            kill(handle.home)
        with pytest.raises(GradingError, match=r"no grader is left in the cluster \(place 0: .*; place 1: "):
            await graders.grade(sample)

    using(cluster, SUMS, use)
