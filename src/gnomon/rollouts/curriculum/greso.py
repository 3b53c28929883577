"""Shuffled epochs that skip, before anything is generated, what taught nothing the last times: GRESO."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.algorithms.sections import Greso
from gnomon.core.metrics import Last, Mean, Measure, Metrics
from gnomon.core.types import Group, State
from gnomon.rollouts.curriculum.base import KeptPrompts, TaskIndex, philox
from gnomon.rollouts.curriculum.uniform import UniformCurriculum

_LONGEST = 32767  # visits in a row that are counted; the floor is reached long before

Outcome = Literal["easy", "hard", "mixed"]


class GresoCurriculum:
    """Asks tasks in shuffled epochs, each with a chance that falls with every visit in a row that taught nothing.

    A visit teaches nothing when all its responses earned the same. After z such visits in a row, all right (easy) or
    all wrong (hard), a task is asked with chance

        max(p^z, floor),  p = p_easy or p_hard

    and otherwise skipped until the next epoch. One visit of another outcome begins anew: z counts easy and hard visits
    apart, and is 0 after rewards that differ. After each step, once the first epoch is over, p_easy falls by ``step``
    when the share of easy groups reached a third of ``target``, and rises by it when it did not; p_hard likewise with
    two thirds. Both stay in [lowest, highest].

    Rewards need not be 0 and 1: a shared reward is right when it is nearer the highest than the lowest reward seen so
    far, the range beginning as [0, 1]. A floor of 0.1 for the right format is wrong then, and 1 is right. Groups with
    fewer than two graded rollouts change nothing.

    A take looks at as many tasks as there are at most; if it skipped too many by then, the next ones are asked whatever
    their chance, so it always ends. No take repeats a task (unless it asks for more than there are). Each retained
    gradient is unbiased, but the mix of prompts is not the table's: ``greso/effective_prompts`` says over how many
    prompts the chances are spread, exp(entropy), at most all.

    Source: GRESO, arXiv 2506.02177; constants of its code. That code keys by text, takes rewards of at most 0.11 as
    wrong, and asks more prompts than a step needs, which `Informative` does here.

    Args:
        task_index: The ids of the task set.
        seed: The run's seed; the coins of take t are a counter-based stream for (seed, t).

    Memory: 2 bytes a task, and 12 of the task index.
    """

    def __init__(self, task_index: TaskIndex, plan: Greso, seed: int) -> None:
        self._task_index = task_index
        self._plan = plan
        self._seed = seed
        self._epochs = UniformCurriculum(len(task_index), seed)
        # easy visits in a row above 0, hard ones below
        self._streak: NDArray[np.int16] = np.zeros(len(task_index), np.int16)
        self._tally: Counter[int] = Counter({0: len(task_index)})
        self._easy = self._hard = plan.initial
        self._lowest, self._highest = 0.0, 1.0
        self._takes = 0
        self._looked_at = self._skipped = 0

    def chance(self, index: int) -> float:
        """Return the chance with which a task is asked when its turn comes."""
        return self._chance(int(self._streak[index]))

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks; distinct if ``count`` is at most the number of tasks."""
        size = len(self._task_index)
        coins = philox(self._seed, "greso", self._takes)
        self._takes += 1
        taken: list[int] = []
        held: set[int] = set()
        looked_at = 0
        while len(taken) < count:
            index = self._epochs.draw(held if count <= size else set())
            chance = self.chance(index)
            # 53 bits make a number in [0, 1), so a chance of 1 always holds
            is_asked = chance >= 1 or looked_at >= size or (int(coins.random_raw()) >> 11) * 2.0**-53 < chance
            looked_at += 1
            if is_asked:
                taken.append(index)
                held.add(index)
        self._looked_at += looked_at
        self._skipped += looked_at - count
        return taken

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Lengthen or end the streak of each visited task, adapt p, and return what happened since the last time."""
        outcomes: Counter[Outcome] = Counter()
        for group in groups:
            if len(group.rewards) >= 2:
                outcome = self._outcome(group)
                outcomes[outcome] += 1
                self._lengthen(self._task_index.index(group.task.id), outcome)
        seen = outcomes.total()
        if seen and self._epochs.epoch > 0:
            tolerated = self._plan.target * seen
            # in thirds, so that a third of 12 is reached by 4 whatever the rounding
            self._easy = self._adapted(self._easy, 3 * outcomes["easy"] >= tolerated)
            self._hard = self._adapted(self._hard, 3 * outcomes["hard"] >= 2 * tolerated)
        measures: dict[str, Measure] = {
            "greso/skipped_fraction": Mean(self._skipped, self._looked_at),
            "greso/easy_fraction": Mean(outcomes["easy"], seen),
            "greso/hard_fraction": Mean(outcomes["hard"], seen),
            "greso/p_easy": Last(self._easy),
            "greso/p_hard": Last(self._hard),
            "greso/effective_prompts": Last(self.effective_prompts()),
        }
        self._looked_at = self._skipped = 0
        return Metrics.of(measures)

    def effective_prompts(self) -> float:
        """Return exp of the entropy of the tasks' chances: how many equally likely tasks would be as varied."""
        weighed = [(number, self._chance(streak)) for streak, number in self._tally.items() if number]
        total = math.fsum(number * chance for number, chance in weighed)
        shares = [(number * chance / total, chance / total) for number, chance in weighed]
        return math.exp(-math.fsum(mass * math.log(share) for mass, share in shares))

    def state(self) -> State:
        """Return streaks, p, the range of rewards, the place in the epoch, and what the next metrics begin with."""
        values = {
            **self._task_index.identity(),
            "epochs": dict(self._epochs.state().values),
            "easy": self._easy,
            "hard": self._hard,
            "range": [self._lowest, self._highest],
            "takes": self._takes,
            "looked_at": self._looked_at,
            "skipped": self._skipped,
        }
        return State({"streak": torch.from_numpy(self._streak.copy())}, values)

    def restore(self, state: State) -> None:
        """Go on where the curriculum that returned ``state`` stood.

        Raises:
            ConfigError: If it was of another task set.
        """
        values = state.values
        self._task_index.check(dict(values), "curriculum")
        self._epochs.restore(State(values=values["epochs"]))
        self._streak = state.tensors["streak"].numpy().copy()
        streaks, numbers = np.unique(self._streak, return_counts=True)
        self._tally = Counter(dict(zip(streaks.tolist(), numbers.tolist(), strict=True)))
        self._easy, self._hard = float(values["easy"]), float(values["hard"])
        self._lowest, self._highest = (float(bound) for bound in values["range"])
        self._takes = int(values["takes"])
        self._looked_at, self._skipped = int(values["looked_at"]), int(values["skipped"])

    def moved(self, state: State, kept: KeptPrompts | None) -> State:
        """Return a state of a former task set as one of this set; a new task has no streak."""
        if kept is None:
            return self.state()
        epochs = dict(self._epochs.moved(State(values=state.values["epochs"]), kept).values)
        streak = kept.moved(state.tensors["streak"], torch.from_numpy(self._streak))
        return State({"streak": streak}, {**state.values, **self._task_index.identity(), "epochs": epochs})

    def _chance(self, streak: int) -> float:
        p = self._easy if streak > 0 else self._hard
        return max(p ** abs(streak), self._plan.floor)

    def _outcome(self, group: Group) -> Outcome:
        self._lowest = min(self._lowest, *group.rewards)
        self._highest = max(self._highest, *group.rewards)
        if not group.is_degenerate:
            return "mixed"
        shared = group.rewards[0]
        return "easy" if self._highest - shared < shared - self._lowest else "hard"

    def _lengthen(self, index: int, outcome: Outcome) -> None:
        before = int(self._streak[index])
        after = 0
        if outcome == "easy":
            after = min(max(before, 0) + 1, _LONGEST)
        if outcome == "hard":
            after = max(min(before, 0) - 1, -_LONGEST)
        self._streak[index] = after
        self._tally[before] -= 1
        self._tally[after] += 1

    def _adapted(self, p: float, is_reached: bool) -> float:
        change = -self._plan.step if is_reached else self._plan.step
        return min(max(p + change, self._plan.lowest), self._plan.highest)
