"""Rounds of prompts on their way: the whole of sync and async.

``max_staleness + 1`` rounds are in flight at most, and a new one is asked only inside `take`, that is after the
weights of the step before were published. A round asked at step s with staleness n is trained on at step s + n, so
the bound is structural: zero alternates between asking and training, a positive number overlaps them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from gnomon.curriculum.base import Curriculum
from gnomon.errors import ConfigError
from gnomon.rollouts.rollout import Asker, Stopwatch
from gnomon.tasks.base import TaskSet
from gnomon.types import Group, State

_ATTEMPT = 1 << 40
"""Added to a round's number for each further attempt, so that a task asked again in one round draws afresh."""


@dataclass(frozen=True)
class Round:
    """What one step trains on.

    groups: kept, in the order they were asked. dropped: groups that the filter refused, with their cost.
    """

    number: int
    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]
    watch: Stopwatch


@dataclass
class _InFlight:
    number: int
    indices: list[int]
    answer: asyncio.Task[Round]


@dataclass
class RolloutStream:
    """Asks rounds of ``prompts_per_step`` prompts ahead of training. `Stateful`.

    is_kept: which finished groups are trained on; the others' places are taken by other prompts, at most
    ``max_attempts`` rounds of asking in all, after which the step is smaller; a round without any kept group is
    trained on as it is, which changes nothing and is counted.
    """

    curriculum: Curriculum
    tasks: TaskSet
    asker: Asker
    prompts_per_step: int
    max_staleness: int = 0
    is_kept: Callable[[Group], bool] = lambda group: True
    max_attempts: int = 1
    _next: int = 0
    _waiting: list[list[int]] = field(default_factory=list)
    _flying: deque[_InFlight] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 (synchronous) or more steps, got {self.max_staleness}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for flying in self._flying:
            flying.answer.cancel()
        await asyncio.gather(*(flying.answer for flying in self._flying), return_exceptions=True)
        self._flying.clear()

    async def take(self) -> Round:
        """Return the oldest round, graded; asks new ones until ``max_staleness + 1`` are in flight."""
        while len(self._flying) <= self.max_staleness:
            indices = self._waiting.pop(0) if self._waiting else self.curriculum.take(self.prompts_per_step)
            answer = asyncio.create_task(self._answer(self._next, indices))
            self._flying.append(_InFlight(self._next, indices, answer))
            self._next += 1
        oldest = self._flying[0]
        finished = await oldest.answer
        self._flying.popleft()
        return finished

    async def _answer(self, number: int, indices: Sequence[int]) -> Round:
        watch = Stopwatch()
        kept: list[Group] = []
        dropped: list[Group] = []
        for attempt in range(self.max_attempts):
            if attempt:
                indices = self.curriculum.take(self.prompts_per_step - len(kept))
            for group in await self._ask(number + attempt * _ATTEMPT, indices, watch):
                is_kept = self.is_kept(group) and len(kept) < self.prompts_per_step
                (kept if is_kept else dropped).append(group)
            if len(kept) == self.prompts_per_step:
                break
        if not kept:
            kept, dropped = dropped[: self.prompts_per_step], dropped[self.prompts_per_step :]
        return Round(number, tuple(kept), tuple(dropped), watch)

    async def _ask(self, number: int, indices: Sequence[int], watch: Stopwatch) -> list[Group]:
        asked = [asyncio.ensure_future(self.asker.ask(self.tasks[index], number, watch)) for index in indices]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    def state(self) -> State:
        """Return the round counter and the rounds in flight, which are asked again with the same draws."""
        first = self._flying[0].number if self._flying else self._next
        pending = [flying.indices for flying in self._flying] + self._waiting
        return State(values={"next": first, "pending": pending})

    def restore(self, state: State) -> None:
        """Ask the rounds that were in flight first."""
        self._next = int(state.values["next"])
        self._waiting = [[int(i) for i in indices] for indices in state.values["pending"]]
