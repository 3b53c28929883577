"""What chooses the next prompts, and what is remembered about each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gnomon.curriculum.roster import Roster
from gnomon.metrics import Metrics
from gnomon.types import Group, State

Indices = Sequence[int] | NDArray[np.int64]


class Curriculum(Protocol):
    """Which task is asked next. A curriculum is `Stateful`."""

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks, as indices into the task set; fixed by seed and history."""
        ...

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learn from all finished groups, trained on or not; called once per step, after the weights were published."""
        ...

    def state(self) -> State:
        """Return everything that later choices depend on."""
        ...

    def restore(self, state: State) -> None:
        """Become the curriculum that returned ``state``."""
        ...


class TaskValues(Protocol):
    """A value for each task, which rewards are compared with. It is `Stateful`."""

    @property
    def roster(self) -> Roster:
        """Whose values these are."""
        ...

    def baseline(self, indices: Indices) -> NDArray[np.float64]:
        """Return the values of these tasks."""
        ...

    def initialize(self, groups: Sequence[Group]) -> None:
        """Start from rollouts made before training."""
        ...

    def load(self, path: Path) -> int:
        """Start from a JSON file, keyed by id; return how many tasks it named."""
        ...

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Be told the rewards of a finished step, and how far the policy moved since each task's last visit."""
        ...

    def state(self) -> State:
        """Return everything that later values depend on."""
        ...

    def restore(self, state: State) -> None:
        """Become the values that ``state`` was taken of."""
        ...
