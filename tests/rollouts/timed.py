"""A clock that only moves when everybody waits, and small parts whose answers take as long as a test says."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.core.types import Completion, Grade, Snapshot, Task
from gnomon.engines.base import Sampling
from gnomon.rewards.base import Sample
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.rollout import Rollouter
from gnomon.rollouts.scheduler import RolloutBatch, RolloutScheduler

T = TypeVar("T")
UPDATE_SECONDS = 1.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing else is left to do."""

    now = 0.0
    _clock_resolution = 1e-6

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers: Any = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if timers and not self._ready:
            self.now = max(self.now, timers[0].when())
        super()._run_once()


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Questions:
    """As many tasks as are asked for, named by their index."""

    size: int = 1000
    name: str = "questions"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        return Task(f"q{index}", (index,), str(index))


@dataclass
class TimedEngine:
    """Answers a key with the key itself, after ``seconds`` of (prompt, key)."""

    seconds: Callable[[int, int], float]
    version: int = 0
    beats: int = 0
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.asked += [(prompt[0], key, self.version) for key in keys]
        return list(await asyncio.gather(*(self._answer(prompt[0], key) for key in keys)))

    async def _answer(self, index: int, key: int) -> Completion:
        oldest = self.version
        try:
            await asyncio.sleep(self.seconds(index, key))
        except asyncio.CancelledError:
            self.withdrawn.append(key)
            raise
        return Completion((key,), (-1.0,), (-1.0,), oldest, self.version, "stop")

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def close(self) -> None:
        return


class Digit:
    """Rewards by the last digit of the key: an error for 9, else 1 for even ones."""

    async def grade(self, sample: Sample) -> Grade:
        digit = int(sample.completion) % 10
        return Grade(None, error="nine") if digit == 9 else Grade(float(digit % 2 == 0))


def stream_of(engine: TimedEngine, prompts: int, generations: int = 1, **settings: Any) -> RolloutScheduler:
    """Return a stream over a thousand questions in shuffled order."""
    rollouter = Rollouter(engine, Digit(), lambda ids: str(ids[0]), Sampling(), generations, seed=0)
    return RolloutScheduler(UniformCurriculum(1000, seed=0), Questions(), rollouter, prompts, **settings)


async def train(stream: RolloutScheduler, engine: TimedEngine, steps: int) -> list[RolloutBatch]:
    """Walk: take, update for a second, publish."""
    rounds: list[RolloutBatch] = []
    async with stream:
        for _ in range(steps):
            rounds.append(await stream.next_batch())
            await asyncio.sleep(UPDATE_SECONDS)
            engine.version += 1
    return rounds
