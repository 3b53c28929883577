"""What chooses the next prompts, and what is remembered about each."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Group, State

# From a task's id to its index, in 12 bytes a task.


class TaskIndex:
    """The ids of a task set in its order, as 64-bit hashes.

    A dictionary of 10 million ids takes more than a gigabyte; sorted hashes and their order take 120 MB. Two
    different ids share a hash with probability n^2 / 2^65 (3e-6 at 10 million), which is reported as a
    duplicate and never silently merged.

    >>> tasks = TaskIndex(["sum-0", "sum-1", "sum-2"])
    >>> tasks.index("sum-1"), len(tasks)
    (1, 3)

    Raises: DatasetError when two tasks have one id, or there is no task.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        hashes = np.fromiter((_hash(task_id) for task_id in ids), dtype=np.uint64)
        if hashes.size == 0:
            raise DatasetError("the task set is empty: there is nothing to choose a prompt from")
        order = np.argsort(hashes, kind="stable")
        self._sorted: NDArray[np.uint64] = hashes[order]
        self._order: NDArray[np.uint32] = order.astype(np.uint32)
        self._refuse_duplicates()
        self.fingerprint: str = hashlib.blake2b(hashes.astype("<u8").tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._sorted.size)

    def index(self, task_id: str) -> int:
        """Return where ``task_id`` stands in the task set.

        Raises: DatasetError when it is not in it.
        """
        found = self.find(task_id)
        if found is None:
            raise DatasetError(f"task {task_id!r} is not in the task set of {len(self)} tasks that is tracked")
        return found

    def find(self, task_id: str) -> int | None:
        """Return where ``task_id`` stands in the task set, or None if it is not in it."""
        wanted = np.uint64(_hash(task_id))
        place = int(np.searchsorted(self._sorted, wanted))
        if place == len(self) or self._sorted[place] != wanted:
            return None
        return int(self._order[place])

    def indices(self, task_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the index of each id, in their order."""
        return np.fromiter((self.index(task_id) for task_id in task_ids), dtype=np.int64, count=len(task_ids))

    def identity(self) -> dict[str, Any]:
        """Return what a saved state carries so that `check` can tell whose it is."""
        return {"tasks": len(self), "fingerprint": self.fingerprint}

    def check(self, stamp: dict[str, Any], what: str) -> None:
        """Refuse a saved state of another task set, or of the same tasks in another order.

        Raises: ConfigError naming ``what``, both sizes and both fingerprints.
        """
        if stamp["tasks"] == len(self) and stamp["fingerprint"] == self.fingerprint:
            return
        raise ConfigError(
            f"the saved {what} belongs to another task set: it has {stamp['tasks']} tasks (fingerprint "
            f"{stamp['fingerprint']}), this run has {len(self)} ({self.fingerprint}). Success rates are kept "
            "by task, so resume with the same tasks in the same order, or start a new run from exported rates"
        )

    def _refuse_duplicates(self) -> None:
        again = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if again.size == 0:
            return
        pairs = [f"{self._order[i]} and {self._order[i + 1]}" for i in again[:5]]
        raise DatasetError(
            f"{again.size} task ids are not unique, first at indices {', '.join(pairs)}; "
            "success rates are kept by id, so every task needs its own"
        )


def _hash(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "little")


Indices = Sequence[int] | NDArray[np.int64]


class Curriculum(Protocol):
    """Which task is asked next. A curriculum is `Stateful`."""

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks, as indices into the task set; fixed by seed and history."""

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learn from all finished groups, trained on or not; called once per step, after the weights were published."""

    def state(self) -> State:
        """Return everything that later choices depend on."""

    def restore(self, state: State) -> None:
        """Become the curriculum that returned ``state``."""


class TaskValues(Protocol):
    """A value for each task, which rewards are compared with. It is `Stateful`."""

    @property
    def task_index(self) -> TaskIndex:
        """Whose values these are."""

    def baseline(self, indices: Indices) -> NDArray[np.float64]:
        """Return the values of these tasks."""

    def initialize(self, groups: Sequence[Group]) -> None:
        """Start from rollouts made before training."""

    def load(self, path: Path) -> int:
        """Start from a JSON file, keyed by id; return how many tasks it named."""

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Be told the rewards of a finished step, and how far the policy moved since each task's last visit."""

    def state(self) -> State:
        """Return everything that later values depend on."""

    def restore(self, state: State) -> None:
        """Become the values that ``state`` was taken of."""
