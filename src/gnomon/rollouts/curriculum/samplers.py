"""What chooses the next prompts: shuffled epochs, those without what teaches nothing, and the most uncertain ones."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.algorithms.sections import Greso, NoPositiveResampling
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Last, Mean, Measure, Metrics
from gnomon.core.types import Group, State
from gnomon.rollouts.curriculum.base import Indices, KeptPrompts, TaskIndex, philox
from gnomon.rollouts.curriculum.tracker import ValueTracker

# Shuffled epochs.


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
        self.looked_at = 0  # in the latest take

    def take(self, count: int, asks: Callable[[int], bool] = lambda index: True) -> list[int]:
        """Return the next ``count`` tasks; distinct if ``count`` is at most the number of tasks.

        Args:
            count: How many.
            asks: Whether a task is asked when its turn comes. After as many looks as there are tasks, each is.
        """
        taken: list[int] = []
        held: set[int] = set()
        self.looked_at = 0
        while len(taken) < count:
            # A take of more tasks than there are has to repeat some.
            index = self.draw(held if count <= self._size else set())
            if self.looked_at >= self._size or asks(index):
                taken.append(index)
                held.add(index)
            self.looked_at += 1
        return taken

    @property
    def epoch(self) -> int:
        """How many epochs the latest draw had behind it."""
        return self._epoch

    def draw(self, held: AbstractSet[int]) -> int:
        """Return the next task that is not in ``held``, which must not be all of them; those come first later."""
        # Left over from an epoch that ended inside a take: they are asked before the next epoch goes on.
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


# Shuffled epochs that skip, before anything is generated, what taught nothing the last times: GRESO.

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
        coins = philox(self._seed, "greso", self._takes)
        self._takes += 1

        def asks(index: int) -> bool:
            chance = self.chance(index)
            # 53 bits make a number in [0, 1), so a chance of 1 always holds
            return chance >= 1 or (int(coins.random_raw()) >> 11) * 2.0**-53 < chance

        taken = self._epochs.take(count, asks)
        self._looked_at += self._epochs.looked_at
        self._skipped += self._epochs.looked_at - count
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
        # In the first epoch no task has a history yet.
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
        # By streak and not by task: 10 million tasks have few different streaks.
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
        if not (0 <= self._easy <= 1 and 0 <= self._hard <= 1 and self._lowest <= self._highest):
            raise ValueError(f"easy, hard and range are {self._easy}, {self._hard} and {values['range']}")
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
        # Kept beside the streaks, so that the metric needs no pass over all tasks.
        self._tally[before] -= 1
        self._tally[after] += 1

    def _adapted(self, p: float, is_reached: bool) -> float:
        change = -self._plan.step if is_reached else self._plan.step
        return min(max(p + change, self._plan.lowest), self._plan.highest)


# Shuffled epochs without the prompts that are mastered: ScaleRL's no-positive-resampling.


class NoPositiveCurriculum:
    """Asks tasks in shuffled epochs, and a task no more once a visit passed often enough.

    The pass rate of a visit is the share of its graded responses whose reward is at least ``success``. A take looks at
    as many tasks as there are at most; the next ones are asked whether they were dropped or not, so that it always
    ends: when all tasks are mastered they come again, and ``sampler/dropped_fraction`` is 1. No take repeats a task
    (unless it asks for more than there are).

    Args:
        task_index: The ids of the task set.
        plan: When a task is mastered.
        seed: The run's seed.

    Memory: 1 byte a task, and 12 of the task index.
    """

    def __init__(self, task_index: TaskIndex, plan: NoPositiveResampling, seed: int) -> None:
        self._task_index = task_index
        self._plan = plan
        self._epochs = UniformCurriculum(len(task_index), seed)
        self._dropped: NDArray[np.bool_] = np.zeros(len(task_index), bool)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks; distinct if ``count`` is at most the number of tasks."""
        return self._epochs.take(count, lambda index: not self._dropped[index])

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Drop the tasks that these visits show to be mastered."""
        for group in groups:
            grades = [r.grade for r in group.sampled.rollouts if r.grade.reward is not None]
            # A response without that component is judged by its whole reward.
            passed = [(g.parts.get(self._plan.part, g.reward) or 0.0) >= self._plan.success for g in grades]
            if passed and sum(passed) / len(passed) >= self._plan.pass_rate:
                self._dropped[self._task_index.index(group.task.id)] = True
        return Metrics.of({"sampler/dropped_fraction": Last(float(self._dropped.mean()))})

    def state(self) -> State:
        """Return which tasks were dropped, and the place in the epoch."""
        values = {**self._task_index.identity(), "epochs": dict(self._epochs.state().values)}
        return State({"dropped": torch.from_numpy(self._dropped.copy())}, values)

    def restore(self, state: State) -> None:
        """Go on where the curriculum that returned ``state`` stood.

        Raises:
            ConfigError: If it was of another task set.
        """
        self._task_index.check(dict(state.values), "curriculum")
        self._epochs.restore(State(values=state.values["epochs"]))
        self._dropped = state.tensors["dropped"].numpy().copy()

    def moved(self, state: State, kept: KeptPrompts | None) -> State:
        """Return a state of a former task set as one of this set; a new task is not dropped."""
        if kept is None:
            return self.state()
        epochs = dict(self._epochs.moved(State(values=state.values["epochs"]), kept).values)
        dropped = kept.moved(state.tensors["dropped"], torch.from_numpy(self._dropped))
        return State({"dropped": dropped}, {**self._task_index.identity(), "epochs": epochs})


# Prompts by how uncertain their outcome is: SPO's curriculum.

Floats = NDArray[np.float64]

_PIECE = 1 << 16  # 64-bit words read at a time: half a megabyte, which stays in the cache
_FIRST_SHARE = 32  # candidates looked at first, per task wanted


class PrioritizedCurriculum:
    """Draws tasks without replacement, each with a chance that grows with the spread of its outcomes.

    weight = sqrt(v (1 - v)) / n_eff^gamma + epsilon

    The numerator is the standard deviation of a binary reward: tasks that always or never succeed teach little.
    ``gamma`` also favors tasks that are known badly. ``epsilon``, outside the fraction, keeps every task possible.
    Values outside [0, 1] (rewards of other scales) count as 0 or 1 here, so such tasks get ``epsilon`` alone: scale
    rewards into [0, 1] if you want them told apart.

    Drawn by Gumbel-top-k: the tasks with the largest log w - log(-log u), which is the same as drawing one after the
    other by weight without putting any back. The u of task i in take t is word i of a counter-based stream for (seed,
    t), so only t has to be saved. See `_largest` for why a take from 10 million tasks needs few logarithms.

    The tracker learns by its own `ValueTracker.observe`; here `observe` does nothing.

    Source: SPO, arXiv 2509.13232, eq. 11; gamma from its OpenReview version. Gumbel-top-k: Vieira 2014; Kool et al.,
    arXiv 1903.06059. The public recipe draws from one loader chunk only; here every task can be drawn.

    Args:
        epsilon: > 0.
        gamma: Discount, in [0, 1]; 0 is the paper's.

    Raises:
        ConfigError: If these do not hold.
    """

    def __init__(self, tracker: ValueTracker, epsilon: float, gamma: float, seed: int) -> None:
        if not epsilon > 0:
            raise ConfigError(f"epsilon must be > 0 or some prompts are never asked, got {epsilon}")
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma must be in [0, 1], got {gamma}")
        self._tracker = tracker
        self._epsilon = epsilon
        self._gamma = gamma
        self._seed = seed
        self._takes = 0

    def weights(self, indices: Indices) -> Floats:
        """Return the unnormalized chance of these tasks."""
        value = np.clip(self._tracker.baseline(indices), 0.0, 1.0)
        spread = np.sqrt(value * (1 - value))
        if self._gamma > 0:
            spread /= self._tracker.n_eff(indices) ** self._gamma
        return np.asarray(spread + self._epsilon, np.float64)

    def take(self, count: int) -> list[int]:
        """Return ``count`` tasks, largest key first; distinct if there are that many, else in full rounds.

        Raises:
            ConfigError: If gamma > 0 and some task's n_eff is 0 (a tracker with prior 0 before any sample).
        """
        if self._gamma > 0 and self._tracker.n_eff_floor <= 0:
            raise ConfigError(
                f"gamma {self._gamma} divides by n_eff, which is 0 for tasks without samples when the "
                "tracker's prior is 0; set tracker.prior = 0.5 or gamma = 0"
            )
        taken: list[int] = []
        while len(taken) < count:
            taken += self._largest(min(count - len(taken), len(self._tracker)))
            self._takes += 1
        return taken

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learn nothing here: the tracker observes, and the weights are read from it at the next take."""
        return Metrics()

    def state(self) -> State:
        """Return the number of takes so far; the tracker saves itself."""
        return State(values={"takes": self._takes})

    def restore(self, state: State) -> None:
        """Go on after that many takes; restore the tracker as well."""
        self._takes = int(state.values["takes"])

    def moved(self, state: State, kept: KeptPrompts | None) -> State:
        """Return the state itself: it says nothing of tasks."""
        return state

    def _largest(self, count: int) -> list[int]:
        """Return the ``count`` tasks of largest key, without computing most keys.

        No weight exceeds ``ceiling``, so a task with u < c has a key of at most log ceiling - log(-log c).
        Keys are computed for the tasks with u >= c only; if ``count`` of them reach that bound, no other task
        can be among the largest. Otherwise c is lowered and the same u are looked at again: the answer does
        not depend on c.
        """
        size = len(self._tracker)
        # relative slack: a weight may exceed its bound by rounding
        ceiling = (0.5 / self._tracker.n_eff_floor**self._gamma if self._gamma else 0.5) + self._epsilon
        log_ceiling = math.log(ceiling * (1 + 1e-9))
        share = _FIRST_SHARE * count / size
        while True:
            # The candidates are the tasks whose 32-bit word is at least this: about ``share`` of all.
            lowest = math.ceil((1 - share) * 2**32) if share < 1 else 0
            found, uniforms = self._candidates(lowest)
            keys = gumbel_keys(self.weights(found), uniforms)
            if found.size >= count:
                best = _top(keys, count)
                # The bound on the keys of all tasks that were not looked at.
                if lowest == 0 or keys[best[-1]] >= log_ceiling - math.log(-math.log(lowest / 2**32)):
                    return [int(index) for index in found[best]]
            share *= 4

    def _candidates(self, lowest: int) -> tuple[NDArray[np.int64], Floats]:
        """Return the tasks whose 32-bit word is at least ``lowest``, in order, and their uniforms."""
        bits = philox(self._seed, "priority", self._takes)
        size = len(self._tracker)
        found: list[NDArray[np.int64]] = []
        chosen: list[NDArray[np.uint32]] = []
        for start in range(0, size, 2 * _PIECE):
            width = min(2 * _PIECE, size - start)
            words = bits.random_raw((width + 1) // 2).astype("<u8", copy=False).view("<u4")[:width]
            above = np.flatnonzero(words >= np.uint32(lowest))
            found.append(above + start)
            chosen.append(words[above])
        # the middle of each of 2^32 cells: never 0, never 1
        uniforms = (np.concatenate(chosen).astype(np.float64) + 0.5) * 2.0**-32
        return np.concatenate(found), uniforms


def gumbel_keys(weights: Floats, uniforms: Floats) -> Floats:
    """Return log w - log(-log u); the k largest are a weighted draw of k without replacement.

    Args:
        weights: > 0.
        uniforms: Uniform draws, in (0, 1).

    >>> gumbel_keys(np.array([0.28, 0.5]), np.array([0.9, 0.2])).round(8).tolist()
    [0.97740165, -1.16903218]
    """
    return np.asarray(np.log(weights) - np.log(-np.log(uniforms)), np.float64)


def _top(keys: Floats, count: int) -> NDArray[np.int64]:
    """Return the places of the ``count`` largest keys, largest first, earlier places first among equals."""
    places = np.arange(keys.size)
    if count < keys.size:
        # argpartition returns them in any order; sorted places make ties independent of it.
        places = np.sort(np.argpartition(-keys, count - 1)[:count])
    return np.asarray(places[np.argsort(-keys[places], kind="stable")], np.int64)
