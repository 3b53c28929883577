"""A value for every task that is estimated once and then left alone: A*-PO's baseline."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.curriculum.base import Indices
from gnomon.curriculum.rates import places, read_values
from gnomon.curriculum.roster import Roster
from gnomon.errors import ConfigError
from gnomon.metrics import Mean, Metrics
from gnomon.types import Group, State


class FixedValues:
    """V*(x), what the best policy within reach of the initial one earns on each task.

    V*(x) = beta log mean exp(r / beta), over rollouts of the initial policy. It is the maximum over policies of
    expected reward less beta times the KL to the initial policy.

    Nothing that is observed changes it: ``tracker/squared_error_mean`` says how the table ages as the policy moves
    away from where it was estimated. A task that could not be graded, or that a file does not name, has the mean
    of those that are known, and 0 while none is.

    roster: the ids of the task set. beta: > 0, in rewards. Memory: 8 bytes a task, and 12 of the roster.
    Raises: ConfigError when ``beta`` is not positive.
    Source: A*-PO, arXiv 2505.20686, section 3, stage 1.
    """

    def __init__(self, roster: Roster, beta: float) -> None:
        if not beta > 0:
            raise ConfigError(f"FixedValues.beta must be > 0, got {beta}")
        self.roster = roster
        self._beta = beta
        # not a number: not known
        self._value: NDArray[np.float64] = np.full(len(roster), math.nan)
        self._elsewhere = 0.0

    def __len__(self) -> int:
        return len(self.roster)

    def baseline(self, indices: Indices) -> NDArray[np.float64]:
        """Return V* of these tasks."""
        values = self._value[np.asarray(indices, np.int64)]
        return np.where(np.isnan(values), self._elsewhere, values)

    def initialize(self, groups: Sequence[Group]) -> None:
        """Estimate V* from rollouts made before training; a task of which none could be graded stays as it was.

        Raises: ConfigError naming the task whose reward is not finite.
        """
        estimates: dict[int, float] = {}
        for group in groups:
            if not all(math.isfinite(reward) for reward in group.rewards):
                raise ConfigError(f"task {group.task.id!r} earned the rewards {group.rewards}, which have no V*")
            if group.rewards:
                estimates[self.roster.index(group.task.id)] = optimal_value(group.rewards, self._beta)
        self._believe(estimates)

    def load(self, path: Path) -> int:
        """Start from a JSON file, id to V*; return how many tasks it named. Ids of other tasks are passed over.

        Raises: DatasetError when the file cannot be used, or names none of the tasks.
        """
        ours = places(read_values(path), self.roster, path)
        self._believe(ours)
        return len(ours)

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Change nothing; return how far the rewards of a finished step were from the values."""
        metrics = Metrics()
        for group in groups:
            value = float(self.baseline([self.roster.index(group.task.id)])[0])
            squared = sum((reward - value) ** 2 for reward in group.rewards)
            count = len(group.rewards)
            measures = {
                "tracker/value_mean": Mean(value * count, count),
                "tracker/squared_error_mean": Mean(squared, count),
            }
            metrics += Metrics.of(measures)
        return metrics

    def state(self) -> State:
        """Return every task's value, not a number where none is known, and whose they are."""
        return State({"value": torch.from_numpy(self._value.copy())}, self.roster.stamp())

    def restore(self, state: State) -> None:
        """Become the values that returned ``state``.

        Raises: ConfigError when they are of another task set.
        """
        self.roster.check(dict(state.values), "table of optimal values")
        self._value = state.tensors["value"].numpy().copy()
        self._believe({})

    def _believe(self, values: Mapping[int, float]) -> None:
        for index, value in values.items():
            self._value[index] = value
        known = self._value[~np.isnan(self._value)]
        self._elsewhere = float(known.mean()) if known.size else 0.0


def optimal_value(rewards: Sequence[float], beta: float) -> float:
    """Return beta log mean exp(r / beta), from the largest reward down, so that no exponential overflows.

    It lies between the mean, its limit for a large ``beta``, and the largest reward, its limit for a small one.

    >>> round(optimal_value([1, 0, 0, 1, 0, 0, 0, 0], beta=0.5), 8)
    0.4772293
    """
    best = max(rewards)
    # expm1 and log1p keep the digits that a large beta leaves of exp(r / beta)
    below = math.fsum(math.expm1((reward - best) / beta) for reward in rewards) / len(rewards)
    return best + beta * math.log1p(below)
