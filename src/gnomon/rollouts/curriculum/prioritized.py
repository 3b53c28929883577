"""Prompts by how uncertain their outcome is: SPO's curriculum."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Group, State
from gnomon.rollouts.curriculum.base import Indices, KeptPrompts, philox
from gnomon.rollouts.curriculum.tracker import ValueTracker

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
            lowest = math.ceil((1 - share) * 2**32) if share < 1 else 0
            found, uniforms = self._candidates(lowest)
            keys = gumbel_keys(self.weights(found), uniforms)
            if found.size >= count:
                best = _top(keys, count)
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
        places = np.sort(np.argpartition(-keys, count - 1)[:count])
    return np.asarray(places[np.argsort(-keys[places], kind="stable")], np.int64)
