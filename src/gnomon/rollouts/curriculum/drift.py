"""How far the policy has moved since it last answered a task: what it is measured by, and the cheap way."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError, LearnerError
from gnomon.core.types import Group, Rollout, State
from gnomon.rollouts.curriculum.base import KeptPrompts, TaskIndex


@dataclass(frozen=True)
class ScoredAnswer:
    """A response to be scored again: prompt and response ids, and where the policy chose the token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]


Score = Callable[[Sequence[ScoredAnswer]], Awaitable[Sequence[Sequence[float]]]]
"""Gives, for each answer, the log-probability of every response token under the learner's present weights.

Positions where the mask is false may hold anything.
"""


class Drift(Protocol):
    """Measures policy drift in nats of mean absolute log-probability change. A drift is `Stateful`.

    Once per step, after its last update: `record`, then `measure`, whose answer goes to
    `ValueTracker.observe`.
    """

    @property
    def needs_updates(self) -> int:
        """The optimizer updates that a step must have at least for `record` to make sense of them."""

    def record(self, update_drifts: Sequence[float]) -> None:
        """Take note of the mean |current - proximal| that each optimizer update of the step measured."""

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return task id to drift since the task's last visit, and count this as a visit.

        Tasks on their first visit are left out, as are tasks of which nothing could be graded (no reward, no
        visit).
        """

    def state(self) -> State:
        """Return everything that later drifts depend on."""

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``."""

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set."""


@dataclass(frozen=True)
class NoDrift:
    """No drift at all, for `DecayRule.constant`: two forward passes a step saved, and nothing to keep."""

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

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return an empty state."""
        return State()


class AccumulatedDrift:
    """Adds up the drift of every step; a task's drift is what was added since its last visit.

    Each step's own drift is known without another forward pass (`estimate_step_drift`), so this is free, and
    it costs 8 bytes a task. It differs from the replayed form in two ways: drift is measured on the batch
    that was trained on, not on the task's own previous response; and steps add up to the length of the path,
    which is at least the distance between its ends, so it forgets at least as fast. Ours.

    >>> drift = AccumulatedDrift(TaskIndex(["a", "b"]))
    >>> drift.add(0.002)
    >>> drift.total
    0.002
    """

    needs_updates = 2

    def __init__(self, task_index: TaskIndex) -> None:
        self._task_index = task_index
        self._total = 0.0
        self._per_update = 0.0
        # not a number: never visited
        self._total_at_visit: NDArray[np.float64] = np.full(len(task_index), math.nan)

    @property
    def total(self) -> float:
        """Nats moved since training began."""
        return self._total

    def add(self, step_drift: float) -> None:
        """Move on by one step's drift.

        Raises:
            LearnerError: If it is negative or not finite.
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
            # 0 for a step without an update.
            step_drift = self._per_update * len(update_drifts)
        self.add(step_drift)

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return the drift added since each task's last visit; ``score`` is not called."""
        drifts: dict[str, float] = {}
        for task_id in dict.fromkeys(group.task.id for group in groups if group.rewards):
            index = self._task_index.index(task_id)
            before = float(self._total_at_visit[index])
            if not math.isnan(before):
                drifts[task_id] = self._total - before
            self._total_at_visit[index] = self._total
        return drifts

    def state(self) -> State:
        """Return the total, and the total at each task's last visit."""
        marks = torch.from_numpy(self._total_at_visit.copy())
        values = {**self._task_index.identity(), "total": self._total, "per_update": self._per_update}
        return State({"total_at_visit": marks}, values)

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``.

        Raises:
            ConfigError: If it belongs to another task set.
        """
        self._task_index.check(dict(state.values), "accumulated drift")
        if float(state.values["total"]) < 0 or float(state.values["per_update"]) < 0:
            raise ValueError(f"total is {state.values['total']}, and no drift is below 0")
        self._total = float(state.values["total"])
        self._per_update = float(state.values["per_update"])
        self._total_at_visit = state.tensors["total_at_visit"].numpy().copy()

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set; a new task was never visited."""
        own = self.state()
        marks = kept.moved(state.tensors["total_at_visit"], own.tensors["total_at_visit"])
        return State({"total_at_visit": marks}, {**state.values, **self._task_index.identity()})


def estimate_step_drift(update_drifts: Sequence[float]) -> float:
    """Return how far all K updates of a step moved the policy, from what each saw before it was made.

    Update k = 0..K-1 measured m_k = mean |current - proximal| in its own forward pass, when k updates had been made;
    after the last one nobody looks. The line through the origin that fits best, m = slope k, is extended to K:

        drift = K (sum of k m_k) / (sum of k^2)

    Assumes that each update moves the policy about as far, in about the same direction, and that minibatches are alike.
    If updates are independent steps of a random walk (m grows as sqrt k), K = 2 gives 2 m_1 for a truth of 1.41 m_1,
    and the excess shrinks as K grows: too fast a forgetting, within `DecayRule`'s bounds. m_0 is zero in exact
    arithmetic and does not enter.

    Raises:
        ConfigError: If K is 1 (only m_0 is known, and it says nothing).
        LearnerError: If a number is negative or not finite.

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


# Policy drift measured as SPO's recipe does: the previous response to a task, scored again.

Logprobs = NDArray[np.float32]


@dataclass(frozen=True)
class _Visit:
    """The last response to a task, and its log-probabilities after the updates of that visit's step."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: Logprobs

    def answer(self, prompt: tuple[int, ...]) -> ScoredAnswer:
        return ScoredAnswer(prompt, tuple(self.tokens.tolist()), tuple(self.mask.tolist()))


class RescoredDrift:
    """Drift of a task = mean over trained tokens of |log-prob then - log-prob now| of its previous response.

    "Then" is after the updates of the previous visit's step, "now" after this one's, so two visits in consecutive steps
    see exactly one step's movement. One scoring pass over previous and new responses of the visited tasks.

    Of several rollouts of a task the last graded one is kept. Kept for each visited task: 9 bytes a response token (id,
    mask, float32 log-prob). Beyond ``capacity_tokens`` the tasks that were not visited for longest are dropped; when
    one of them comes back its drift is unknown but larger than most, so it is reported as infinite (rho_min).

    Source: SPO, arXiv 2509.13232, section 3.1, and its public recipe for the estimator, which the paper leaves open.

    Args:
        capacity_tokens: >= 1; 2^26 tokens are 0.6 GB.

    Raises:
        ConfigError: If it is not positive.
    """

    needs_updates = 1

    def __init__(self, task_index: TaskIndex, capacity_tokens: int = 2**26) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"RescoredDrift.capacity_tokens must be at least 1, got {capacity_tokens}")
        self._task_index = task_index
        self._capacity = capacity_tokens
        # insertion order is visit order: the first is the one to drop
        self._visits: dict[int, _Visit] = {}
        self._dropped: set[int] = set()
        self._stored_tokens = 0

    def __len__(self) -> int:
        return len(self._visits)

    @property
    def stored_tokens(self) -> int:
        """Response tokens kept now; at most ``capacity_tokens``."""
        return self._stored_tokens

    def record(self, update_drifts: Sequence[float]) -> None:
        """Take no note: drift is measured on the tasks' own responses."""

    def pending(self, groups: Sequence[Group]) -> dict[str, ScoredAnswer]:
        """Return task id to previous response, for those of the visited tasks that have one."""
        answers: dict[str, ScoredAnswer] = {}
        for task_id, rollout in _last_graded(groups).items():
            visit = self._visits.get(self._task_index.index(task_id))
            if visit is not None:
                answers[task_id] = visit.answer(rollout.prompt)
        return answers

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return each task's drift since its last visit, and keep its new response instead.

        Raises:
            LearnerError: If ``score`` answers with numbers that do not fit or are not finite; nothing is changed then.
        """
        # Previous and new responses are scored in one pass, under the weights after this step's updates.
        previous, newest = self.pending(groups), _last_graded(groups)
        answers = [*previous.values(), *(ScoredAnswer(r.prompt, r.response, r.mask) for r in newest.values())]
        if not answers:
            return {}
        logprobs = _checked(answers, await score(answers))
        drifts: dict[str, float] = {}
        for task_id in newest:
            # Its response is no longer kept, so the drift is unknown and counts as large.
            if self._task_index.index(task_id) in self._dropped:
                drifts[task_id] = math.inf
        for task_id, now in zip(previous, logprobs[: len(previous)], strict=True):
            drifts[task_id] = self._drift(self._task_index.index(task_id), now)
        for (task_id, rollout), now in zip(newest.items(), logprobs[len(previous) :], strict=True):
            self._keep(self._task_index.index(task_id), rollout, now)
        self._drop_oldest()
        return drifts

    def state(self) -> State:
        """Return the kept responses end to end, in visit order, and where each ends."""
        visits = list(self._visits.values())
        flat = {
            "tokens": _joined([v.tokens for v in visits], np.int32),
            "mask": _joined([v.mask for v in visits], np.bool_),
            "logprobs": _joined([v.logprobs for v in visits], np.float32),
            "ends": torch.from_numpy(np.cumsum([v.tokens.size for v in visits], dtype=np.int64)),
            "indices": torch.tensor(list(self._visits), dtype=torch.int64),
            "dropped": torch.tensor(sorted(self._dropped), dtype=torch.int64),
        }
        return State(flat, self._task_index.identity())

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``.

        Raises:
            ConfigError: If it belongs to another task set.
        """
        self._task_index.check(dict(state.values), "replayed drift")
        arrays = {name: tensor.numpy() for name, tensor in state.tensors.items()}
        cuts = [0, *arrays["ends"].tolist()]
        tasks = [*arrays["indices"].tolist(), *arrays["dropped"].tolist()]
        is_whole = cuts == sorted(cuts) and all(cuts[-1] == len(arrays[n]) for n in ("tokens", "mask", "logprobs"))
        is_whole = is_whole and len(cuts) == len(arrays["indices"]) + 1
        if not (is_whole and all(0 <= task < len(self._task_index) for task in tasks)):
            raise ValueError("its tokens, ends and tasks do not belong together")
        self._visits = {
            index: _Visit(*(arrays[name][start:end].copy() for name in ("tokens", "mask", "logprobs")))
            for index, start, end in zip(arrays["indices"].tolist(), cuts, cuts[1:], strict=False)
        }
        self._dropped = set(arrays["dropped"].tolist())
        self._stored_tokens = cuts[-1]

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set.

        A response to a prompt whose tokens are others now cannot be compared with: its drift is reported as infinite.
        """
        former, moved = (RescoredDrift(index) for index in (TaskIndex(kept.former_ids), self._task_index))
        former.restore(state)
        places = kept.successors
        here = {places[there]: visit for there, visit in former._visits.items() if there in places}
        others = [place for place in here if not kept.is_rendered[place]]
        moved._dropped = {places[there] for there in former._dropped if there in places}.union(others)
        moved._visits = {place: visit for place, visit in here.items() if place not in moved._dropped}
        return moved.state()

    def _drift(self, index: int, now: Logprobs) -> float:
        visit = self._visits[index]
        change = np.abs(visit.logprobs.astype(np.float64) - now)
        return float(change[visit.mask].mean())

    def _keep(self, index: int, rollout: Rollout, logprobs: Logprobs) -> None:
        # Removed first, so that the new entry goes to the end of the insertion order.
        replaced = self._visits.pop(index, None)
        if replaced is not None:
            self._stored_tokens -= replaced.tokens.size
        mask = np.asarray(rollout.mask, np.bool_)
        self._visits[index] = _Visit(
            np.asarray(rollout.response, np.int32), mask, np.where(mask, logprobs, np.float32(0))
        )
        self._stored_tokens += mask.size
        self._dropped.discard(index)

    def _drop_oldest(self) -> None:
        while self._stored_tokens > self._capacity:
            index = next(iter(self._visits))
            self._stored_tokens -= self._visits.pop(index).tokens.size
            self._dropped.add(index)


def _last_graded(groups: Sequence[Group]) -> dict[str, Rollout]:
    """Return task id to the last rollout with a reward and at least one token of the policy's own."""
    return {g.task.id: r for g in groups for r in g.rollouts if r.grade.reward is not None and any(r.mask)}


def _checked(answers: Sequence[ScoredAnswer], scored: Sequence[Sequence[float]]) -> list[Logprobs]:
    rows = [np.asarray(row, np.float32) for row in scored]
    if [row.shape for row in rows] != [(len(answer.response),) for answer in answers]:
        raise LearnerError(
            f"scoring {len(answers)} responses gave {len(rows)} rows of "
            f"{[row.size for row in rows][:8]} numbers for {[len(a.response) for a in answers][:8]} tokens"
        )
    for answer, row in zip(answers, rows, strict=True):
        if not np.isfinite(row[np.asarray(answer.mask, np.bool_)]).all():
            raise LearnerError("a log-probability of a previous or new response is not finite under the new weights")
    return rows


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))
