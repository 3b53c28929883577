"""Rounds on their way: synchronous at staleness 0, overlapped above it, the same prompts either way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from gnomon.core.errors import ConfigError
from gnomon.core.types import Completion, Grade, Group, Snapshot, Task
from gnomon.engines.base import Sampling
from gnomon.rewards.base import Sample
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler


@dataclass
class Numbers:
    """Ten tasks named by their index."""

    name: str = "numbers"

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Task:
        return Task(f"n{index}", (index,), str(index))


@dataclass
class Echo:
    """Answers with the key's last digit, and remembers what it was asked."""

    version: int = 0
    asked: list[tuple[int, ...]] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(0)
        self.asked.append(tuple(prompt))
        return [Completion((k % 10,), (-1.0,), (-1.0,), self.version, self.version, "stop") for k in keys]

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def close(self) -> None:
        return


class Parity:
    """Rewards an even answer."""

    async def grade(self, sample: Sample) -> Grade:
        await asyncio.sleep(0)
        return Grade(float(int(sample.completion) % 2 == 0))


def stream_of(engine: Echo, staleness: int = 0, **settings: object) -> RolloutScheduler:
    rollouter = Rollouter(engine, Parity(), lambda ids: str(ids[0]), Sampling(), generations=2, seed=0)
    return RolloutScheduler(UniformCurriculum(10, seed=0), Numbers(), rollouter, 3, staleness, **settings)


def test_synchronous_rounds_are_asked_only_when_they_are_taken():
    """At staleness 0 nothing is asked ahead: after two takes of three prompts, six prompts were asked."""
    engine = Echo()

    async def walk() -> None:
        async with stream_of(engine) as stream:
            for number in range(2):
                engine.version = number
                finished = await stream.next_batch()
                assert finished.number == number
                assert {r.oldest_version for g in finished.groups for r in g.rollouts} == {number}

    asyncio.run(walk())
    assert len(engine.asked) == 6


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_bound_on_staleness_is_reached_and_never_passed(staleness: int):
    """A round asked at step s is trained on at step s + n: after the first n steps the age is exactly n."""
    engine = Echo()

    async def walk() -> list[int]:
        ages: list[int] = []
        async with stream_of(engine, staleness) as stream:
            for step in range(6):
                finished = await stream.next_batch()
                ages.append(max(step - r.oldest_version for g in finished.groups for r in g.rollouts))
                await asyncio.sleep(0.01)
                engine.version = step + 1
        return ages

    ages = asyncio.run(walk())
    assert max(ages) == staleness
    assert ages[-1] == staleness


def test_rounds_in_flight_are_asked_again_after_a_restart():
    """What was in flight when the state was taken is asked first by the stream that restores it, draws included."""

    async def interrupted() -> tuple[list[str], list[str]]:
        async with stream_of(Echo(), staleness=1) as stream:
            await stream.next_batch()
            state, seen = stream.state(), stream.curriculum.state()
            lost = await stream.next_batch()
        async with stream_of(Echo(), staleness=1) as again:
            again.restore(state)
            again.curriculum.restore(seen)
            found = await again.next_batch()
        return answers(lost.groups), answers(found.groups)

    lost, found = asyncio.run(interrupted())
    assert lost == found


def answers(groups: Sequence[Group]) -> list[str]:
    return [f"{g.task.id}:{r.text}" for g in groups for r in g.rollouts]


def test_refused_groups_are_replaced_until_the_bound():
    """Dynamic sampling asks other prompts for refused groups, keeps order, and counts what it discarded."""

    async def walk(attempts: int) -> tuple[int, int]:
        stream = stream_of(Echo(), is_kept=lambda group: not group.is_degenerate, max_attempts=attempts)
        async with stream:
            finished = await stream.next_batch()
        return len(finished.groups), len(finished.filtered)

    kept, dropped = asyncio.run(walk(50))
    assert kept == 3
    assert dropped > 0


def test_negative_staleness_is_refused():
    """There is no training on answers from the future."""
    with pytest.raises(ConfigError, match="max_staleness must be 0"):
        stream_of(Echo(), staleness=-1)


def test_a_prompt_asked_again_in_one_round_answers_anew():
    """With as many tasks as prompts a step, and a filter that refuses the first attempt, the second draws anew."""
    seen: list[tuple[str, int]] = []

    def is_kept(group: Group) -> bool:
        seen.append((group.task.id, group.rollouts[0].response[0]))
        return len(seen) > 10

    rollouter = Rollouter(Echo(), Parity(), lambda ids: str(ids[0]), Sampling(), generations=2, seed=0)
    stream = RolloutScheduler(UniformCurriculum(10, 0), Numbers(), rollouter, 10, is_kept=is_kept, max_attempts=2)
    asyncio.run(stream.next_batch())
    first, second = dict(seen[:10]), dict(seen[10:])

    assert first.keys() == second.keys()
    assert first != second


def test_no_prompt_is_taken_that_will_not_be_asked():
    """When every attempt is used up, the next round goes on with the next prompts: none is passed over."""

    def asked(**filtering: object) -> list[tuple[int, ...]]:
        engine = Echo()
        stream = stream_of(engine, **filtering)

        async def three() -> None:
            for _ in range(3):
                await stream.next_batch()

        asyncio.run(three())
        return engine.asked

    assert asked(is_kept=lambda group: False, max_attempts=1) == asked()
