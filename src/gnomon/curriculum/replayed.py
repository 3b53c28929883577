"""Policy drift measured as SPO's recipe does: the previous response to a task, scored again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.curriculum.drift import Answer, Score
from gnomon.curriculum.roster import Roster
from gnomon.errors import ConfigError, LearnerError
from gnomon.types import Group, Rollout, State

Logprobs = NDArray[np.float32]


@dataclass(frozen=True)
class _Visit:
    """The last response to a task, and its log-probabilities after the updates of that visit's step."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: Logprobs

    def answer(self, prompt: tuple[int, ...]) -> Answer:
        return Answer(prompt, tuple(self.tokens.tolist()), tuple(self.mask.tolist()))


class ReplayedDrift:
    """Drift of a task = mean over trained tokens of |log-prob then - log-prob now| of its previous response.

    "Then" is after the updates of the previous visit's step, "now" after this one's, so two visits in
    consecutive steps see exactly one step's movement. One scoring pass over previous and new responses of the
    visited tasks.

    Of several rollouts of a task the last graded one is kept. Kept for each visited task: 9 bytes a response
    token (id, mask, float32 log-prob). Beyond ``capacity_tokens`` the tasks that were not visited for longest
    are dropped; when one of them comes back its drift is unknown but larger than most, so it is reported as
    infinite (rho_min).

    capacity_tokens: >= 1; 2^26 tokens are 0.6 GB.
    Raises: ConfigError when it is not positive.
    Source: SPO, arXiv 2509.13232, section 3.1, and its public recipe for the estimator, which the paper
    leaves open.
    """

    needs_scoring = True
    needs_updates = 1

    def __init__(self, roster: Roster, capacity_tokens: int = 2**26) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"ReplayedDrift.capacity_tokens must be at least 1, got {capacity_tokens}")
        self._roster = roster
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

    def pending(self, groups: Sequence[Group]) -> dict[str, Answer]:
        """Return task id to previous response, for those of the visited tasks that have one."""
        answers: dict[str, Answer] = {}
        for task_id, rollout in _last_graded(groups).items():
            visit = self._visits.get(self._roster.index(task_id))
            if visit is not None:
                answers[task_id] = visit.answer(rollout.prompt)
        return answers

    async def measure(self, groups: Sequence[Group], score: Score) -> Mapping[str, float]:
        """Return each task's drift since its last visit, and keep its new response instead.

        Raises: LearnerError when ``score`` answers with numbers that do not fit or are not finite; nothing is
        changed then.
        """
        previous, newest = self.pending(groups), _last_graded(groups)
        answers = [*previous.values(), *(Answer(r.prompt, r.response, r.mask) for r in newest.values())]
        if not answers:
            return {}
        logprobs = _checked(answers, await score(answers))
        drifts: dict[str, float] = {}
        for task_id in newest:
            if self._roster.index(task_id) in self._dropped:
                drifts[task_id] = math.inf
        for task_id, now in zip(previous, logprobs[: len(previous)], strict=True):
            drifts[task_id] = self._drift(self._roster.index(task_id), now)
        for (task_id, rollout), now in zip(newest.items(), logprobs[len(previous) :], strict=True):
            self._keep(self._roster.index(task_id), rollout, now)
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
        return State(flat, self._roster.stamp())

    def restore(self, state: State) -> None:
        """Become the drift that returned ``state``.

        Raises: ConfigError when it belongs to another task set.
        """
        self._roster.check(dict(state.values), "replayed drift")
        arrays = {name: tensor.numpy() for name, tensor in state.tensors.items()}
        cuts = [0, *arrays["ends"].tolist()]
        tasks = [*arrays["indices"].tolist(), *arrays["dropped"].tolist()]
        is_whole = cuts == sorted(cuts) and all(cuts[-1] == len(arrays[n]) for n in ("tokens", "mask", "logprobs"))
        is_whole = is_whole and len(cuts) == len(arrays["indices"]) + 1
        if not (is_whole and all(0 <= task < len(self._roster) for task in tasks)):
            raise ValueError("its tokens, ends and tasks do not belong together")
        self._visits = {
            index: _Visit(*(arrays[name][start:end].copy() for name in ("tokens", "mask", "logprobs")))
            for index, start, end in zip(arrays["indices"].tolist(), cuts, cuts[1:], strict=False)
        }
        self._dropped = set(arrays["dropped"].tolist())
        self._stored_tokens = cuts[-1]

    def _drift(self, index: int, now: Logprobs) -> float:
        visit = self._visits[index]
        change = np.abs(visit.logprobs.astype(np.float64) - now)
        return float(change[visit.mask].mean())

    def _keep(self, index: int, rollout: Rollout, logprobs: Logprobs) -> None:
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


def _checked(answers: Sequence[Answer], scored: Sequence[Sequence[float]]) -> list[Logprobs]:
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
