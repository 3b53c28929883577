"""Shuffled epochs."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Group, State
from gnomon.rollouts.curriculum.base import KeptPrompts, philox


class UniformCurriculum:
    """Every task once, in an order drawn from (seed, epoch) alone; then every task again in another order.

    A take that crosses into the next epoch passes over the tasks that it already holds; they come first in the take
    after it. So no take repeats a task (unless it asks for more than there are), and every epoch still asks every task
    exactly once.

    Args:
        size: Tasks in the set, at least 1.
        seed: The run's seed.

    Raises:
        ConfigError: If there is no task.

    >>> curriculum = UniformCurriculum(size=5, seed=0)
    >>> sorted(curriculum.take(2) + curriculum.take(3))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ConfigError(f"UniformCurriculum needs at least one task, got size {size}")
        self._size = size
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._passed_over: list[int] = []
        self._order = _shuffled(size, seed, epoch=0)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks; distinct if ``count`` is at most the number of tasks."""
        taken: list[int] = []
        held: set[int] = set()
        for _ in range(count):
            index = self.draw(held if count <= self._size else set())
            taken.append(index)
            held.add(index)
        return taken

    @property
    def epoch(self) -> int:
        """How many epochs the latest draw had behind it."""
        return self._epoch

    def draw(self, held: AbstractSet[int]) -> int:
        """Return the next task that is not in ``held``, which must not be all of them; those come first later."""
        for place, index in enumerate(self._passed_over):
            if index not in held:
                return self._passed_over.pop(place)
        while True:
            if self._position == self._size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = _shuffled(self._size, self._seed, self._epoch)
            index = int(self._order[self._position])
            self._position += 1
            if index not in held:
                return index
            self._passed_over.append(index)

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learn nothing: the order depends on no outcome."""
        return Metrics()

    def state(self) -> State:
        """Return epoch, position in it, and the tasks passed over: a few numbers, whatever the size."""
        return State(values={"epoch": self._epoch, "position": self._position, "passed_over": list(self._passed_over)})

    def restore(self, state: State) -> None:
        """Go on where the curriculum that returned ``state`` stood."""
        tasks = [int(index) for index in state.values["passed_over"]]
        if not (0 <= int(state.values["position"]) <= self._size and all(0 <= index < self._size for index in tasks)):
            raise ValueError(f"position {state.values['position']} and tasks {tasks[:9]} are not of {self._size} tasks")
        self._epoch = int(state.values["epoch"])
        self._position = int(state.values["position"])
        self._passed_over = tasks
        self._order = _shuffled(self._size, self._seed, self._epoch)

    def moved(self, state: State, kept: KeptPrompts | None) -> State:
        """Return a state of a former task set as one of this set: the next epoch, where the sets are not the same."""
        if kept is not None and kept.is_same:
            return state
        return State(values={"epoch": int(state.values["epoch"]) + 1, "position": 0, "passed_over": []})


def _shuffled(size: int, seed: int, epoch: int) -> NDArray[np.uint32]:
    """Return a uniform permutation: tasks sorted by a 64-bit draw (ties at 10 million: 3e-6 an epoch)."""
    return np.argsort(philox(seed, "epoch", epoch).random_raw(size), kind="stable").astype(np.uint32)
