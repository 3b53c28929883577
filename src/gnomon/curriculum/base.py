"""What chooses the next prompts."""

from collections.abc import Sequence
from typing import Protocol

from gnomon.types import Group, State


class Curriculum(Protocol):
    """Which task is asked next. A curriculum is `Stateful`."""

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks, as indices into the task set; fixed by seed and history."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from finished groups; called once per step, after the weights were published."""
        ...

    def state(self) -> State:
        """Return everything that later choices depend on."""
        ...

    def restore(self, state: State) -> None:
        """Become the curriculum that returned ``state``."""
        ...
