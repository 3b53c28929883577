"""How far the policy has moved since it last answered a task: what it is measured by, and the cheap way."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.curriculum.roster import Roster
from gnomon.errors import ConfigError, LearnerError
from gnomon.types import Group, State


@dataclass(frozen=True)
class Answer:
    """A response to be scored again: prompt and response ids, and where the policy chose the token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]


Score = Callable[[Sequence[Answer]], Awaitable[Sequence[Sequence[float]]]]
"""Gives, for each answer, the log-probability of every response token under the learner's present weights.

Positions where the mask is false may hold anything.
"""


class Drift(Protocol):
    """Measures policy drift in nats of mean absolute log-probability change. A drift is `Stateful`.

    Once per step, after its last update: `record`, then `measure`, whose answer goes to
    `ValueTracker.observe`.
    """

    @property
    def needs_scoring(self) -> bool:
        """Whether `measure` calls ``score``, which costs forward passes."""
        ...

    @property
    def needs_updates(self) -> int:
        """The optimizer updates that a step must have at least for `record` to make sense of them."""
        ...

    def record(self, update_drifts: Sequence[float]) -> None:
        """Take note of the mean |current - proximal| that each optimizer update of the step measured."""
        ...

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return task id to drift since the task's last visit, and count this as a visit.

        Tasks on their first visit are left out, as are tasks of which nothing could be graded (no reward, no
        visit).
        """
        ...

    def state(self) -> State:
        """Return everything that later drifts depend on."""
        ...

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``."""
        ...


@dataclass(frozen=True)
class Unmeasured:
    """No drift at all, for `Forgetting.constant`: two forward passes a step saved, and nothing to keep."""

    needs_scoring = False
    needs_updates = 1

    def record(self, update_drifts: Sequence[float]) -> None:
        """Take no note."""

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def state(self) -> State:
        """Return an empty state."""
        return State()

    def restore(self, state: State) -> None:
        """Do nothing."""


class AccumulatedDrift:
    """Adds up the drift of every step; a task's drift is what was added since its last visit.

    Each step's own drift is known without another forward pass (`estimate_step_drift`), so this is free, and
    it costs 8 bytes a task. It differs from the replayed form in two ways: drift is measured on the batch
    that was trained on, not on the task's own previous response; and steps add up to the length of the path,
    which is at least the distance between its ends, so it forgets at least as fast. Ours.

    >>> drift = AccumulatedDrift(Roster(["a", "b"]))
    >>> drift.add(0.002)
    >>> drift.total
    0.002
    """

    needs_scoring = False
    needs_updates = 2

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._total = 0.0
        self._per_update = 0.0
        # not a number: never visited
        self._total_at_visit: NDArray[np.float64] = np.full(len(roster), math.nan)

    @property
    def total(self) -> float:
        """Nats moved since training began."""
        return self._total

    def add(self, step_drift: float) -> None:
        """Move on by one step's drift.

        Raises: LearnerError when it is negative or not finite.
        """
        if not (math.isfinite(step_drift) and step_drift >= 0):
            raise LearnerError(f"a step's policy drift must be finite and >= 0 nats, got {step_drift}")
        self._total += step_drift

    def record(self, update_drifts: Sequence[float]) -> None:
        """Add the drift of a step, estimated from what its updates measured.

        Without any update (no token had a gradient) the policy stayed where it was. A single one measured nothing: it
        counts as far as an update of the latest step that could be measured went.
        """
        if len(update_drifts) > 1:
            step_drift = estimate_step_drift(update_drifts)
            self._per_update = step_drift / len(update_drifts)
        else:
            step_drift = self._per_update * len(update_drifts)
        self.add(step_drift)

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return the drift added since each task's last visit; ``score`` is not called."""
        drifts: dict[str, float] = {}
        for task_id in dict.fromkeys(group.task.id for group in groups if group.rewards):
            index = self._roster.index(task_id)
            before = float(self._total_at_visit[index])
            if not math.isnan(before):
                drifts[task_id] = self._total - before
            self._total_at_visit[index] = self._total
        return drifts

    def state(self) -> State:
        """Return the total, and the total at each task's last visit."""
        marks = torch.from_numpy(self._total_at_visit.copy())
        values = {**self._roster.stamp(), "total": self._total, "per_update": self._per_update}
        return State({"total_at_visit": marks}, values)

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``.

        Raises: ConfigError when it belongs to another task set.
        """
        self._roster.check(dict(state.values), "accumulated drift")
        if float(state.values["total"]) < 0 or float(state.values["per_update"]) < 0:
            raise ValueError(f"total is {state.values['total']}, and no drift is below 0")
        self._total = float(state.values["total"])
        self._per_update = float(state.values["per_update"])
        self._total_at_visit = state.tensors["total_at_visit"].numpy().copy()


def estimate_step_drift(update_drifts: Sequence[float]) -> float:
    """Return how far all K updates of a step moved the policy, from what each saw before it was made.

    Update k = 0..K-1 measured m_k = mean |current - proximal| in its own forward pass, when k updates had
    been made; after the last one nobody looks. The line through the origin that fits best, m = slope k, is
    extended to K:

        drift = K (sum of k m_k) / (sum of k^2)

    Assumes that each update moves the policy about as far, in about the same direction, and that minibatches
    are alike. If updates are independent steps of a random walk (m grows as sqrt k), K = 2 gives 2 m_1 for a
    truth of 1.41 m_1, and the excess shrinks as K grows: too fast a forgetting, within `Forgetting`'s bounds.
    m_0 is zero in exact arithmetic and does not enter.

    Raises: ConfigError when K is 1 (only m_0 is known, and it says nothing); LearnerError when a number is
    negative or not finite.

    >>> estimate_step_drift([0.0, 0.25, 0.5, 0.75])
    1.0
    """
    count = len(update_drifts)
    if count < 2:
        raise ConfigError(
            f"accumulated drift needs at least 2 optimizer updates a step, got {count}; set "
            'drift = "replayed" or drift = "constant", or raise updates.minibatches'
        )
    if not all(math.isfinite(m) and m >= 0 for m in update_drifts):
        raise LearnerError(f"mean |current - proximal| must be finite and >= 0, got {list(update_drifts)}")
    squares = sum(k * k for k in range(count))
    return count * sum(k * m for k, m in enumerate(update_drifts)) / squares
