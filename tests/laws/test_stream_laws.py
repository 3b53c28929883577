"""What must hold for the stream of rollouts: how stale an answer may become."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import few

from gnomon.core.types import Completion, Grade, Snapshot, Task
from gnomon.engines.base import Sampling
from gnomon.rewards.base import Sample
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutScheduler


@dataclass
class Questions:
    """Seven tasks."""

    name: str = "questions"

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Task:
        return Task(f"q{index}", (index,), str(index))


@dataclass
class Ledger:
    """An engine that writes down the version at which each prompt was admitted."""

    version: int = 0
    admitted: list[int] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.admitted.append(self.version)
        return [Completion((1,), (-1.0,), (-1.0,), self.version, self.version, "stop") for _ in keys]

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def close(self) -> None:
        return


class AlwaysRight:
    """Rewards everything."""

    async def grade(self, sample: Sample) -> Grade:
        return Grade(1.0)


@few
@given(prompts=st.integers(1, 4), staleness=st.integers(0, 4), steps=st.integers(1, 5))
def test_the_nth_prompt_is_admitted_when_it_cannot_become_too_stale(prompts: int, staleness: int, steps: int):
    """At version v exactly those prompts n are asked for which floor((n - 1) / B) <= v + eta; eta = 0 waits (P30)."""
    engine = Ledger()

    async def walk() -> None:
        rollouter = Rollouter(engine, AlwaysRight(), str, Sampling(), generations=1, seed=0)
        curriculum = UniformCurriculum(7, seed=0)
        async with RolloutScheduler(curriculum, Questions(), rollouter, prompts, staleness) as stream:
            for step in range(steps):
                finished = await stream.next_batch()
                for _ in range(20):  # let what was admitted reach the engine before the weights change
                    await asyncio.sleep(0)
                ages = [step - r.oldest_version for g in finished.groups for r in g.rollouts]
                assert max(ages) == min(step, staleness)
                engine.version = step + 1

    asyncio.run(walk())
    assert len(engine.admitted) == (steps + staleness) * prompts
    for place, version in enumerate(engine.admitted):
        assert version == max(0, place // prompts - staleness)
