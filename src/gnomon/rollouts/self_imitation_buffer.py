"""The best responses so far, kept to be imitated."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.core.types import GIVEN, Grade, Group, Rollout, State, Task
from gnomon.rollouts.curriculum.base import KeptPrompts, philox
from gnomon.tasks.base import TaskSet


class _Kept(NamedTuple):
    """A response that is kept, or a segment of one; ``number`` counts what was observed, so newer ones have more."""

    reward: float
    number: int
    rollout: Rollout

    @property
    def rank(self) -> tuple[float, int]:
        """Best reward first, newer before older among equals."""
        return -self.reward, -self.number


class SelfImitationReplay:
    """Graded responses with a reward above a bound: the best of each prompt, and of these the best of all.

    Among equal rewards the newer stays. The same response to the same prompt is kept once. What is kept depends on all
    that was observed and its order, not on how it was cut into steps. What a response was sampled with is forgotten
    (its log-probabilities are zeros), for imitation compares with no sampler; `Stateful`.

    Rewards count as shaped, penalties on length included. Errors, which have no reward, never enter, nor does what the
    policy did not sample.

    Args:
        plan: Its ``capacity``, ``per_prompt``, ``above`` and ``rows``.
        seed: The run's seed; draw n is fixed by it, n, and what is kept.
        mask_truncated: Whether truncated responses are left out, as they are of the algorithm's own loss.

    Memory: at most ``capacity`` responses with their prompts.
    """

    def __init__(self, plan: SelfImitationBuffer, seed: int, mask_truncated: bool = False) -> None:
        self._plan = plan
        self._seed = seed
        self._mask_truncated = mask_truncated
        self._kept: list[_Kept] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rewards(self) -> list[float]:
        """The rewards of what is kept, best first."""
        return [kept.reward for kept in self._kept]

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in the responses of finished groups, in their order."""
        arriving = []
        for whole in (rollout for group in groups for rollout in group.rollouts if rollout.oldest_version != GIVEN):
            reward, rows = whole.grade.reward, [row for row in whole.rows if self._is_trained(row)]
            if reward is not None and reward > self._plan.above and rows:
                arriving += [_Kept(reward, self._arrived, _plain(row, reward)) for row in rows]
                self._arrived += 1
        self._kept = self._best([*self._kept, *arriving])

    def _is_trained(self, row: Rollout) -> bool:
        return any(row.mask) and not (self._mask_truncated and row.is_truncated)

    def draw(self, number: int) -> list[Group]:
        """Return the ``number``-th draw: ``rows`` different responses, each as likely, or all if there are fewer.

        Each is a group of its own.
        """
        # A random key for each response; the smallest keys are a uniform draw without replacement.
        keys = philox(self._seed, "replay", number).random_raw(len(self._kept))
        places = np.argsort(keys, kind="stable")[: self._plan.rows]
        rollouts = [self._kept[place].rollout for place in places.tolist()]
        return [Group(Task(rollout.task_id, rollout.prompt, ""), (rollout,)) for rollout in rollouts]

    def state(self) -> State:
        """Return all that is kept, and how many responses ever arrived."""
        rollouts = [kept.rollout for kept in self._kept]
        tensors = {
            # Rows of different lengths end to end, with their lengths beside them.
            "prompts": _joined(rollout.prompt for rollout in rollouts),
            "prompt_lengths": torch.tensor([len(rollout.prompt) for rollout in rollouts], dtype=torch.int64),
            "responses": _joined(rollout.response for rollout in rollouts),
            "response_lengths": torch.tensor([len(rollout.response) for rollout in rollouts], dtype=torch.int64),
            "masks": _joined(rollout.mask for rollout in rollouts).bool(),
            "truncated": torch.tensor([rollout.is_truncated for rollout in rollouts], dtype=torch.bool),
            "versions": torch.tensor([(r.oldest_version, r.newest_version) for r in rollouts]).long().view(-1, 2),
            "rewards": torch.tensor(self.rewards, dtype=torch.float64),
            "arrivals": torch.tensor([kept.number for kept in self._kept], dtype=torch.int64),
        }
        return State(tensors, {"arrived": self._arrived, "task_ids": [rollout.task_id for rollout in rollouts]})

    def restore(self, state: State) -> None:
        """Become the buffer that returned ``state``; a smaller plan keeps the best of it."""
        tensors = state.tensors
        parts = zip(
            state.values["task_ids"],
            _split(tensors["prompts"], tensors["prompt_lengths"]),
            _split(tensors["responses"], tensors["response_lengths"]),
            _split(tensors["masks"], tensors["response_lengths"]),
            tensors["truncated"].tolist(),
            tensors["versions"].tolist(),
            tensors["rewards"].tolist(),
            tensors["arrivals"].tolist(),
            strict=True,
        )
        self._kept = self._best(
            _Kept(
                reward,
                number,
                Rollout(
                    task_id=task_id,
                    prompt=prompt,
                    response=response,
                    mask=mask,
                    logprobs=(0.0,) * len(response),
                    full_logprobs=(0.0,) * len(response),
                    text="",
                    grade=Grade(reward),
                    oldest_version=versions[0],
                    newest_version=versions[1],
                    stop="length" if is_truncated else "stop",
                ),
            )
            for task_id, prompt, response, mask, is_truncated, versions, reward, number in parts
        )
        self._arrived = int(state.values["arrived"])

    def moved(self, state: State, kept: KeptPrompts, tasks: TaskSet) -> State:
        """Return a state of a former task set as one of ``tasks``: responses to prompts whose tokens are the same."""
        former, moved = SelfImitationReplay(self._plan, self._seed), SelfImitationReplay(self._plan, self._seed)
        former.restore(state)
        for each in former._kept:
            place = kept.successor(each.rollout.task_id)
            if place is not None and tasks[place].prompt == each.rollout.prompt:
                moved._kept.append(each._replace(rollout=replace(each.rollout, task_id=tasks[place].id)))
        moved._arrived = former._arrived
        return moved.state()

    def _best(self, candidates: Iterable[_Kept]) -> list[_Kept]:
        best: list[_Kept] = []
        of_prompt: Counter[str] = Counter()
        seen: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
        # Best first, so the limits of the buffer and of each prompt cut off the worst. Segments come and go together.
        for _, rows in groupby(sorted(candidates, key=lambda kept: kept.rank), key=lambda kept: kept.number):
            whole = list(rows)
            task_id = whole[0].rollout.task_id
            answer = (task_id, tuple(row.rollout.response for row in whole))
            has_room = len(seen) < self._plan.capacity and of_prompt[task_id] < self._plan.per_prompt
            if has_room and answer not in seen:
                best += whole
                of_prompt[task_id] += 1
                seen.add(answer)
        return best


def _plain(rollout: Rollout, reward: float) -> Rollout:
    """Return what imitation needs of a rollout."""
    zeros = (0.0,) * len(rollout.response)
    return replace(rollout, logprobs=zeros, full_logprobs=zeros, text="", grade=Grade(reward), routing=None, top=None)


def _joined(rows: Iterable[Sequence[int]]) -> Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)


def _split(joined: Tensor, lengths: Tensor) -> Iterator[tuple[int, ...]]:
    return (tuple(row.tolist()) for row in joined.split(lengths.tolist()))
