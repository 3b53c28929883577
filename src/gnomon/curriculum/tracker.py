"""A persistent value for every task: SPO's baseline, and what its curriculum goes by."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.curriculum.base import Indices
from gnomon.curriculum.forgetting import Forgetting
from gnomon.curriculum.rates import Rewards, places, posterior_rate, read_rates, write_rates
from gnomon.curriculum.roster import Roster
from gnomon.errors import ConfigError
from gnomon.metrics import Mean, Metrics
from gnomon.types import Group, State


class ValueTracker:
    """The success rate of each task under the current policy, from the rewards of past visits.

    For binary rewards the posterior mean of a Beta distribution whose counts fade:

        alpha <- rho alpha + r,  beta <- rho beta + 1 - r,  v = alpha / (alpha + beta),  n_eff = alpha + beta

    which is the same as a moving average with a step that shrinks as evidence grows:

        v <- v + (r - v) / (rho n_eff + 1),  n_eff <- rho n_eff + 1

    It is kept in the second form, because that also serves rewards that are any real number. n_eff is alpha +
    beta; the paper's text prints alpha + beta + 1, with which the two forms are not the same.

    A task starts with v = 1/2 and n_eff = 2 ``prior``: a weak belief that one visit can move. (The public
    recipe without offline samples does the same; n_eff = N0 would need some eight visits to overcome a
    guess.) Rollouts (`initialize`) or a file (`load`) give a rate that is worth N0 = 1 / (1 - rho_min)
    observations. Read `baseline` before `observe`: a baseline must not contain the reward it is subtracted
    from.

    roster: the ids of the task set. forgetting: how old rewards fade. rewards: "binary" refuses any reward
    but 0 and 1; "continuous" takes every finite one. prior: pseudo-count for successes and for failures, >=
    0.
    Memory: 21 bytes a task, and 12 of the roster.
    Raises: ConfigError when ``prior`` is negative.
    Source: SPO, arXiv 2509.13232, section 3.1. That recipe keys by the prompt's text and saves nothing; we
    key by id and the tracker is `Stateful`.
    """

    def __init__(self, roster: Roster, forgetting: Forgetting, rewards: Rewards = "binary", prior: float = 0.5) -> None:
        if not prior >= 0:
            raise ConfigError(f"ValueTracker.prior must be >= 0, got {prior}")
        size = len(roster)
        self.roster = roster
        self._forgetting = forgetting
        self._rewards: Rewards = rewards
        self._prior = prior
        self._value: NDArray[np.float64] = np.full(size, 0.5)
        self._n_eff: NDArray[np.float64] = np.full(size, 2.0 * prior)
        self._visits: NDArray[np.int32] = np.zeros(size, np.int32)
        self._is_known: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._find_floor()

    def __len__(self) -> int:
        return len(self.roster)

    @property
    def n_eff_floor(self) -> float:
        """A number that no task's n_eff is ever below: n -> rho n + 1 only climbs towards 1 / (1 - rho)."""
        return self._n_eff_floor

    def baseline(self, indices: Indices) -> NDArray[np.float64]:
        """Return v of these tasks: the expected reward of the current policy."""
        return self._value[np.asarray(indices, np.int64)]

    def n_eff(self, indices: Indices) -> NDArray[np.float64]:
        """Return the number of observations that each estimate is worth."""
        return self._n_eff[np.asarray(indices, np.int64)]

    def visits(self, indices: Indices) -> NDArray[np.int32]:
        """Return how many rewards each task has been observed with (initial rollouts not counted)."""
        return self._visits[np.asarray(indices, np.int64)]

    def counts(self, indices: Indices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the Beta counts (alpha, beta) of binary rewards."""
        value, n_eff = self.baseline(indices), self.n_eff(indices)
        return value * n_eff, (1 - value) * n_eff

    def initialize(self, groups: Sequence[Group]) -> None:
        """Start from rollouts made before training; a task of which none could be graded stays as it was.

        v = (s + prior) / (n0 + 2 prior) for binary rewards, the mean for others; n_eff = N0.
        Raises: ConfigError naming task and value for a reward that is not of the declared kind.
        """
        self._check(groups)
        for group in groups:
            if group.rewards:
                rate = posterior_rate(sum(group.rewards), len(group.rewards), self._rewards, self._prior)
                self._believe(self.roster.index(group.task.id), rate)
        self._find_floor()

    def load(self, path: Path) -> int:
        """Start from a JSON file, id to rate or to ``[successes, samples]``; return how many tasks it named.

        Ids of other tasks are passed over, tasks that it does not name keep their start.
        Raises: DatasetError when the file cannot be used, or names none of the tasks.
        """
        ours = places(read_rates(path, self._rewards, self._prior), self.roster, path)
        for index, rate in ours.items():
            self._believe(index, rate)
        self._find_floor()
        return len(ours)

    def export(self, path: Path, ids: Sequence[str]) -> None:
        """Write id to rate of every task that anything is known of, for `load` in another run.

        ids: those of the roster, in its order (it keeps their hashes only).
        Raises: ConfigError when they are others.
        """
        self.roster.check(Roster(ids).stamp(), "id list")
        write_rates(path, {ids[i]: float(self._value[i]) for i in np.flatnonzero(self._is_known).tolist()})

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Learn from the graded rollouts of a finished step, in their order; return what happened.

        drifts: task id to nats the policy moved since it last answered that task, from `Drift.measure`. A
        task
        that is not in it is on its first visit: drift 0. Further rollouts of a task in the same step were
        answered by the same policy, so their drift is 0 as well.
        Raises: ConfigError (nothing is learned then) naming task and value for a reward that is not of the
        declared kind; LearnerError for a drift that is negative or not a number.
        """
        self._check(groups)
        for drift in drifts.values():
            self._forgetting(drift)
        metrics = Metrics()
        seen: set[str] = set()
        for task_id, reward in _rewards(groups):
            drift = 0.0 if task_id in seen else drifts.get(task_id, 0.0)
            metrics += self._measured_update(self.roster.index(task_id), reward, drift)
            seen.add(task_id)
        return metrics

    def update(self, index: int, reward: float, drift: float) -> float:
        """Fold one reward into one task's value; return the rho it was done with."""
        rho = self._forgetting(drift)
        remembered = rho * self._n_eff[index]
        self._value[index] += (reward - self._value[index]) / (remembered + 1)
        self._n_eff[index] = remembered + 1
        self._visits[index] += 1
        self._is_known[index] = True
        return rho

    def state(self) -> State:
        """Return every task's value, n_eff and visits, and whose they are."""
        arrays: dict[str, NDArray[Any]] = {
            "value": self._value,
            "n_eff": self._n_eff,
            "visits": self._visits,
            "is_known": self._is_known,
        }
        return State({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, self.roster.stamp())

    def restore(self, state: State) -> None:
        """Become the tracker that returned ``state``.

        Raises: ConfigError when it tracked another task set.
        """
        self.roster.check(dict(state.values), "value tracker")
        self._value = state.tensors["value"].numpy().copy()
        self._n_eff = state.tensors["n_eff"].numpy().copy()
        self._visits = state.tensors["visits"].numpy().copy()
        self._is_known = state.tensors["is_known"].numpy().copy()
        self._find_floor()

    def _find_floor(self) -> None:
        self._n_eff_floor = min(float(self._n_eff.min()), self._forgetting.window)

    def _believe(self, index: int, rate: float) -> None:
        self._value[index] = rate
        self._n_eff[index] = self._forgetting.window
        self._is_known[index] = True

    def _measured_update(self, index: int, reward: float, drift: float) -> Metrics:
        error = reward - float(self._value[index])
        is_first = self._visits[index] == 0
        rho = self.update(index, reward, drift)
        bounds = (self._forgetting.rho_min, self._forgetting.rho_max)
        measures = {
            "tracker/rho_mean": Mean(rho, 1),
            "tracker/rho_clamped_fraction": Mean(float(rho in bounds), 1),
            "tracker/value_mean": Mean(float(self._value[index]), 1),
            "tracker/n_eff_mean": Mean(float(self._n_eff[index]), 1),
            "tracker/squared_error_mean": Mean(error * error, 1),
            "tracker/first_visit_fraction": Mean(float(is_first), 1),
        }
        if math.isfinite(drift) and not is_first:
            measures["tracker/drift_nats_mean"] = Mean(drift, 1)
        return Metrics.of(measures)

    def _check(self, groups: Sequence[Group]) -> None:
        for task_id, reward in _rewards(groups):
            if self._rewards == "binary" and reward not in (0, 1):
                raise ConfigError(
                    f"task {task_id!r} earned a reward of {reward}, but the tracker counts successes and "
                    'failures, so rewards must be 0 or 1; set rewards="continuous" to track any reward, '
                    "or let the reward function return 0 or 1"
                )
            if not math.isfinite(reward):
                raise ConfigError(f"task {task_id!r} earned a reward of {reward}, which has no mean")


def _rewards(groups: Sequence[Group]) -> Iterator[tuple[str, float]]:
    return ((group.task.id, reward) for group in groups for reward in group.rewards)
