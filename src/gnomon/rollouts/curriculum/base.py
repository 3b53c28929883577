"""What chooses the next prompts, and what is remembered about each."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Group, State, Task, answer_of

# From a task's id to its index, in 12 bytes a task.

_NUMBERING = ("id", "index", "idx", "uuid", "extra_info", "data_source")
_KEYS = np.dtype([("id", "<u8"), ("content", "<u8"), ("prompt", "<u8")])
# 2^64 / golden ratio, odd: its multiples differ for all counts.
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class PromptKeys:
    """What tells the prompts of a task set from each other, in its order; 24 bytes a prompt.

    Attributes:
        ids: Hashes UInt64[N] of the ids. A table without ids numbers its rows, so that another row changes them.
        contents: Hashes UInt64[N] of question and answer, which are the same wherever the row stands.
        prompts: Hashes UInt64[N] of the prompt's tokens, which a system message or a chat template changes.
    """

    ids: NDArray[np.uint64]
    contents: NDArray[np.uint64]
    prompts: NDArray[np.uint64]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> "PromptKeys":
        """Return the keys of tasks."""
        rows = ((_hash(t.id), _hash_of(_content(t)), _hash_of(np.array(t.prompt, "<i8").tobytes())) for t in tasks)
        # One pass over the tasks: rendering one may be slow.
        made = np.fromiter(rows, dtype=_KEYS)
        return cls(*(np.ascontiguousarray(made[name], np.uint64) for name in ("id", "content", "prompt")))

    def __len__(self) -> int:
        return int(self.ids.size)

    def kept_of(self, former: "PromptKeys") -> "KeptPrompts":
        """Return which of these prompts were in a former set; a content that occurs several times is paired in order.

        >>> tasks = [Task(name, (1,), name) for name in "abc"]
        >>> PromptKeys.of(tasks).kept_of(PromptKeys.of(tasks[1:])).places.tolist()
        [-1, 0, 1]
        """
        places = np.full(len(self), -1, np.int64)
        # Contents that occur several times were numbered, so the hashes are unique on both sides.
        _, here, there = np.intersect1d(
            _numbered(self.contents), _numbered(former.contents), assume_unique=True, return_indices=True
        )
        places[here] = there
        kept = np.flatnonzero(places >= 0)
        is_rendered = np.zeros(len(self), bool)
        # The same question, but perhaps under another system message or chat template.
        is_rendered[kept] = self.prompts[kept] == former.prompts[places[kept]]
        return KeptPrompts(places, is_rendered, former.ids)


@dataclass(frozen=True)
class KeptPrompts:
    """Which prompts of a task set were in a former one, and where.

    Attributes:
        places: Int64[N]: the place of each prompt in the former set, -1 for a new one.
        is_rendered: Bool[N]: whether its tokens are what they were.
        former_ids: Hashes UInt64[M] of the former ids, in the former order.
    """

    places: NDArray[np.int64]
    is_rendered: NDArray[np.bool_]
    former_ids: NDArray[np.uint64]

    @property
    def is_same(self) -> bool:
        """Whether both sets ask the same in the same order."""
        return np.array_equal(self.places, np.arange(self.former_ids.size))

    @property
    def new(self) -> list[int]:
        """The prompts that were not there."""
        return np.flatnonzero(self.places < 0).tolist()

    @property
    def said(self) -> str:
        """Counts, in words.

        >>> tasks = [Task(name, (1,), name) for name in "abc"]
        >>> PromptKeys.of(tasks[1:]).kept_of(PromptKeys.of(tasks[:2])).said
        '1 of 2 prompts; 1 gone; 1 new'
        """
        kept, before = int((self.places >= 0).sum()), self.former_ids.size
        return f"{kept:,} of {before:,} prompts; {before - kept:,} gone; {self.places.size - kept:,} new"

    @cached_property
    def successors(self) -> dict[int, int]:
        """From the place of a prompt in the former set to its place in this one."""
        return {int(self.places[here]): here for here in np.flatnonzero(self.places >= 0).tolist()}

    def successor(self, former_id: str) -> int | None:
        """Return where the prompt of a former id stands now; None where it is gone."""
        there = np.flatnonzero(self.former_ids == np.uint64(_hash(former_id)))
        return self.successors.get(int(there[0])) if there.size else None

    def moved(self, saved: Tensor, own: Tensor) -> Tensor:
        """Return ``saved``, which has a row for each former prompt, as rows of this set; new ones as in ``own``.

        Raises:
            ValueError: If ``saved`` is not of the former set.
        """
        if saved.shape[:1] != (self.former_ids.size,) or saved.dtype != own.dtype:
            raise ValueError(f"a tensor of {list(saved.shape)} is not of {self.former_ids.size} prompts")
        here = torch.from_numpy(np.flatnonzero(self.places >= 0))
        moved = own.clone()
        moved[here] = saved[torch.from_numpy(self.places)[here]]
        return moved

    def moved_rows(self, saved: State, own: State) -> State:
        """Return ``own`` with the rows of ``saved`` in every tensor, as `moved` does."""
        return State({name: self.moved(saved.tensors[name], each) for name, each in own.tensors.items()}, own.values)


def _content(task: Task) -> bytes:
    """Return question and answer; without an answer, all columns but those that number rows."""
    answer = answer_of(task.columns)
    columns = {k: v for k, v in task.columns.items() if k not in _NUMBERING} if answer is None else answer
    return json.dumps([task.text, columns], sort_keys=True, default=str).encode(errors="backslashreplace")


def _numbered(contents: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes that differ where a content occurs again: by how often it stood before."""
    order = np.argsort(contents, kind="stable")
    ranked = contents[order]
    is_first = np.concatenate([[True], ranked[1:] != ranked[:-1]])[: ranked.size]
    places = np.arange(ranked.size)
    # In sorted order: how far each entry lies behind the first of its value.
    again = np.empty(ranked.size, np.uint64)
    again[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return contents + again * _ODD


class TaskIndex:
    """The ids of a task set in its order, as 64-bit hashes.

    A dictionary of 10 million ids takes more than a gigabyte; sorted hashes and their order take 120 MB. Two different
    ids share a hash with probability n^2 / 2^65 (3e-6 at 10 million), which is reported as a duplicate and never
    silently merged.

    Args:
        ids: Ids of the prompts in order, or their hashes as `PromptKeys` has them.

    Raises:
        DatasetError: If two tasks have one id, or there is no task.

    >>> tasks = TaskIndex(["sum-0", "sum-1", "sum-2"])
    >>> tasks.index("sum-1"), len(tasks)
    (1, 3)
    """

    def __init__(self, ids: Iterable[str] | NDArray[np.uint64]) -> None:
        hashes = ids if isinstance(ids, np.ndarray) else np.fromiter(map(_hash, ids), dtype=np.uint64)
        if hashes.size == 0:
            raise DatasetError("the task set is empty: there is nothing to choose a prompt from")
        order = np.argsort(hashes, kind="stable")
        self._sorted: NDArray[np.uint64] = hashes[order]
        # 32 bits hold 4 billion tasks.
        self._order: NDArray[np.uint32] = order.astype(np.uint32)
        self._refuse_duplicates()
        self.fingerprint: str = hashlib.blake2b(hashes.astype("<u8").tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._sorted.size)

    def index(self, task_id: str) -> int:
        """Return where ``task_id`` stands in the task set.

        Raises:
            DatasetError: If it is not in it.
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

    def check(self, saved: dict[str, Any], what: str) -> None:
        """Refuse a saved state of another task set, or of the same tasks in another order.

        Raises:
            ConfigError: Naming ``what``, both sizes and both fingerprints.
        """
        if saved["tasks"] == len(self) and saved["fingerprint"] == self.fingerprint:
            return
        raise ConfigError(
            f"the saved {what} belongs to another task set: it has {saved['tasks']} tasks (fingerprint "
            f"{saved['fingerprint']}), this run has {len(self)} ({self.fingerprint}). Success rates are kept "
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
    return _hash_of(task_id.encode())


def _hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


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

    def value(self, task: Task) -> float:
        """Return the value of a task."""

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

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set; a new task has the value that it has now."""


def is_informative(group: Group, part: str = "") -> bool:
    """Whether the group's rewards differ, so that a group baseline gives a gradient.

    Only graded rollouts count: an error is no reward. With fewer than two of them nothing can differ.

    Source: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling), with "rewards differ" for any kind of reward where
    the paper says "neither all correct nor all wrong".

    Args:
        part: Looks at this component of the reward instead, as it was before weights and penalties; one that has no
            such component looks at the reward.
    """
    parts = [r.grade.parts.get(part) for r in group.rollouts if r.grade.reward is not None]
    if part and None not in parts:
        return len(set(parts)) > 1
    return not group.is_degenerate


def philox(seed: int, purpose: str, number: int) -> np.random.Philox:
    """Return the bits for the ``number``-th choice made for ``purpose``.

    Counter-based (Philox 4x64, keyed by a hash of the three), so resuming needs the number alone. Read it
    with ``random_raw``: NumPy guarantees the bits of its generators from version to version, but not what
    `Generator.permutation` or `Generator.choice` make of them.

    >>> int(philox(0, "a", 1).random_raw()) == int(philox(0, "a", 1).random_raw())
    True
    >>> int(philox(0, "a", 1).random_raw()) == int(philox(0, "a", 2).random_raw())
    False
    """
    text = f"{seed}\x1f{purpose}\x1f{number}"
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))
