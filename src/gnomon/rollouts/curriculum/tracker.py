"""A persistent value for every task: SPO's baseline, and what its curriculum goes by."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError, DatasetError, LearnerError
from gnomon.core.metrics import Mean, Metrics
from gnomon.core.types import Group, State, Task, role_of
from gnomon.rollouts.curriculum.base import Indices, KeptPrompts, TaskIndex

# Success rates in a JSON file, keyed by task id: what a tracker starts from and what it exports.

Rewards = Literal["binary", "continuous"]


def posterior_rate(total: float, samples: float, rewards: Rewards, prior: float) -> float:
    """Return the value of a task from rollouts that earned ``total`` in ``samples`` tries.

    Binary: (successes + prior) / (samples + 2 prior), so that 0 of 8 is rare rather than impossible
    (Jeffreys' 1/2: 1/18); prior 0 is the paper's plain mean. Continuous: the plain mean, for a pseudo-count
    has no scale there.

    >>> round(posterior_rate(2, 8, "binary", 0.5), 8), posterior_rate(2, 8, "continuous", 0.5)
    (0.27777778, 0.25)
    """
    if rewards == "continuous":
        return total / samples
    return (total + prior) / (samples + 2 * prior)


def read_rates(path: Path, rewards: Rewards, prior: float) -> dict[str, float]:
    """Return task id to value from a JSON object, id to a rate or to ``[successes, samples]``.

    A rate is taken as it is; counts get ``prior``.

    Raises:
        DatasetError: If the file is missing, is no JSON object, or holds entries that are neither; the message lists
            the first of these.
    """
    rates: dict[str, float] = {}
    wrong: list[str] = []
    for task_id, entry in _read(path).items():
        rate = _rate(entry, rewards, prior)
        if rate is None:
            wrong.append(f"{task_id!r}: {json.dumps(entry)[:60]}")
            continue
        rates[task_id] = rate
    if wrong:
        scale = "in [0, 1]" if rewards == "binary" else "finite"
        raise DatasetError(
            f"{path} has {len(wrong)} entries that are neither a rate ({scale}) nor [successes, samples]: "
            f"{'; '.join(wrong[:5])}"
        )
    return rates


def read_values(path: Path) -> dict[str, float]:
    """Return task id to value from a JSON object, id to any finite number.

    Raises:
        DatasetError: If the file is missing, is no JSON object, or holds anything else.
    """
    values = _read(path)
    wrong = [f"{task_id!r}: {json.dumps(entry)[:60]}" for task_id, entry in values.items() if not _is_number(entry)]
    if wrong:
        raise DatasetError(f"{path} has {len(wrong)} entries that are no finite number: {'; '.join(wrong[:5])}")
    return {task_id: float(entry) for task_id, entry in values.items()}


def places(values: Mapping[str, float], task_index: TaskIndex, path: Path) -> dict[int, float]:
    """Return index to value of the tasks that ``task_index`` knows; ids of other tasks are passed over.

    Raises:
        DatasetError: If it knows none.
    """
    named = {task_index.find(task_id): value for task_id, value in values.items()}
    ours = {index: value for index, value in named.items() if index is not None}
    if not ours:
        example = f", such as {next(iter(values))!r}" if values else ""
        raise DatasetError(
            f"none of the {len(values)} ids in {path}{example} is one of the {len(task_index)} tasks; "
            "tracker.initial needs the ids of this task set"
        )
    return ours


def write_rates(path: Path, rates: Mapping[str, float]) -> None:
    """Write task id to rate; `read_rates` returns the same numbers."""
    write_durably(path, (json.dumps(dict(rates), ensure_ascii=False, indent=0) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise DatasetError(f"success rates cannot be read from {path}: {problem}") from problem
    if not isinstance(content, dict):
        raise DatasetError(f"{path} must hold one JSON object, task id to rate, but holds a {type(content).__name__}")
    return content


def _rate(entry: Any, rewards: Rewards, prior: float) -> float | None:
    """Return the value that a file's entry means, or None if it means nothing."""
    if _is_number(entry):
        return float(entry) if rewards == "continuous" or 0 <= entry <= 1 else None
    if not (isinstance(entry, list) and len(entry) == 2 and all(_is_number(part) for part in entry)):
        return None
    total, samples = entry
    # [successes, samples], where successes may not exceed samples.
    if samples < 1 or (rewards == "binary" and not 0 <= total <= samples):
        return None
    return posterior_rate(total, samples, rewards, prior)


def _is_number(entry: Any) -> bool:
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        return False
    try:
        return math.isfinite(entry)
    except OverflowError:
        return False


# A value for every task that is estimated once and then left alone: A*-PO's baseline.


class FixedValues:
    """V*(x), what the best policy within reach of the initial one earns on each task.

    V*(x) = beta log mean exp(r / beta), over rollouts of the initial policy. It is the maximum over policies of
    expected reward less beta times the KL to the initial policy.

    Nothing that is observed changes it: ``tracker/squared_error_mean`` says how the table ages as the policy moves away
    from where it was estimated. A task that could not be graded, or that a file does not name, has the mean of those
    that are known, and 0 while none is.

    Source: A*-PO, arXiv 2505.20686, section 3, stage 1.

    Args:
        task_index: The ids of the task set.
        beta: > 0, in rewards.

    Memory: 8 bytes a task, and 12 of the task index.

    Raises:
        ConfigError: If ``beta`` is not positive.
    """

    def __init__(self, task_index: TaskIndex, beta: float) -> None:
        if not beta > 0:
            raise ConfigError(f"FixedValues.beta must be > 0, got {beta}")
        self.task_index = task_index
        self._beta = beta
        # not a number: not known
        self._value: NDArray[np.float64] = np.full(len(task_index), math.nan)
        self._elsewhere = 0.0

    def __len__(self) -> int:
        return len(self.task_index)

    def value(self, task: Task) -> float:
        """Return V* of a task."""
        return float(self.baseline([self.task_index.index(task.id)])[0])

    def baseline(self, indices: Indices) -> NDArray[np.float64]:
        """Return V* of these tasks."""
        values = self._value[np.asarray(indices, np.int64)]
        return np.where(np.isnan(values), self._elsewhere, values)

    def initialize(self, groups: Sequence[Group]) -> None:
        """Estimate V* from rollouts made before training; a task of which none could be graded stays as it was.

        Raises:
            ConfigError: Naming the task whose reward is not finite.
        """
        estimates: dict[int, float] = {}
        for group in groups:
            if not all(math.isfinite(reward) for reward in group.rewards):
                raise ConfigError(f"task {group.task.id!r} earned the rewards {group.rewards}, which have no V*")
            if group.rewards:
                estimates[self.task_index.index(group.task.id)] = optimal_value(group.rewards, self._beta)
        self._set_values(estimates)

    def load(self, path: Path) -> int:
        """Start from a JSON file, id to V*; return how many tasks it named. Ids of other tasks are passed over.

        Raises:
            DatasetError: If the file cannot be used, or names none of the tasks.
        """
        ours = places(read_values(path), self.task_index, path)
        self._set_values(ours)
        return len(ours)

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Change nothing; return how far the rewards of a finished step were from the values."""
        metrics = Metrics()
        for group in groups:
            value = self.value(group.task)
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
        return State({"value": torch.from_numpy(self._value.copy())}, self.task_index.identity())

    def restore(self, state: State) -> None:
        """Become the values that returned ``state``.

        Raises:
            ConfigError: If they are of another task set.
        """
        self.task_index.check(dict(state.values), "table of optimal values")
        if bool(state.tensors["value"].isinf().any()):
            raise ValueError("a value is infinite")
        self._value = state.tensors["value"].numpy().copy()
        self._set_values({})

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set; a new task has the value that it has now."""
        return kept.moved_rows(state, self.state())

    def _set_values(self, values: Mapping[int, float]) -> None:
        for index, value in values.items():
            self._value[index] = value
        # Tasks without an estimate have the mean of those with one.
        known = self._value[~np.isnan(self._value)]
        self._elsewhere = float(known.mean()) if known.size else 0.0


class RoleValues:
    """What the policy earned lately in the role of each task: b <- decay b + (1 - decay) r, 0 at first.

    Source: SPIRAL, arXiv 2506.24119; here a step's rewards are observed after all of them were compared.

    Args:
        task_index: The ids of the task set.
        decay: In (0, 1).
    """

    def __init__(self, task_index: TaskIndex, decay: float) -> None:
        self.task_index = task_index
        self._decay = decay
        self._averages: dict[str, float] = {}

    def value(self, task: Task) -> float:
        """Return the average of a task's role."""
        return self._averages.get(role_of(task), 0.0)

    def initialize(self, groups: Sequence[Group]) -> None:
        """Begin at 0, whatever was made before training."""

    def load(self, path: Path) -> int:
        """Refuse a file.

        Raises:
            ConfigError: Always: averages begin at 0.
        """
        raise ConfigError(f"averages of roles begin at 0, and are not read from {path}")

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Move each role's average by the rewards of its rollouts, one after the other."""
        metrics = Metrics()
        for group in groups:
            for reward in group.rewards:
                value = self.value(group.task)
                self._averages[role_of(group.task)] = self._decay * value + (1 - self._decay) * reward
                measures = {"tracker/value_mean": value, "tracker/squared_error_mean": (reward - value) ** 2}
                metrics += Metrics.of({name: Mean(number, 1) for name, number in measures.items()})
        return metrics

    def state(self) -> State:
        """Return the average of each role by its name, and whose they are."""
        return State({}, {**self.task_index.identity(), "averages": dict(self._averages)})

    def restore(self, state: State) -> None:
        """Become the averages that returned ``state``.

        Raises:
            ConfigError: If they are of another task set.
            ValueError: If one is no finite number.
        """
        self.task_index.check(dict(state.values), "averages of roles")
        found = {str(name): float(value) for name, value in state.values["averages"].items()}
        if not all(map(math.isfinite, found.values())):
            raise ValueError(f"averages is {str(found)[:60]}, and no average of rewards is that")
        self._averages = found

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return the averages as those of this task set; a new role begins at 0."""
        return State({}, {**self.task_index.identity(), "averages": state.values["averages"]})


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


# How much of what was observed still counts, given how far the policy has moved.


@dataclass(frozen=True)
class DecayRule:
    """The factor rho by which everything observed so far is discounted before the next reward counts as 1.

    rho = clip(2^(-drift / d_half), rho_min, rho_max)

    A policy that moved by ``d_half`` has forgotten half. At a constant rho the effective number of observations tends
    to 1 / (1 - rho): a window of 8 at 0.875, of 25 at 0.96. The upper bound keeps the window finite while the policy
    stands still, the lower one keeps the estimate usable while it races.

    Source: SPO, arXiv 2509.13232, section 3.1; d_half and the divergence from its public recipe.

    Attributes:
        rho_min: Smallest forgetting factor, in (0, 1).
        rho_max: Largest forgetting factor, in (0, 1).
        d_half: > 0, nats of mean absolute log-probability change; its 0.06 means nothing for another divergence (a k3
            estimate is about 100 times smaller). Between the bounds drift matters only from 0.0035 to 0.0116 nats.

    Raises:
        ConfigError: If these do not hold.

    >>> DecayRule(0.875, 0.96, 0.06)(0.01)
    0.8908987181403393
    """

    rho_min: float
    rho_max: float
    d_half: float = 0.06

    def __post_init__(self) -> None:
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ConfigError(f"DecayRule needs 0 < rho_min <= rho_max < 1, got {self.rho_min}, {self.rho_max}")
        if not self.d_half > 0:
            raise ConfigError(f"DecayRule.d_half must be > 0, got {self.d_half}")

    @classmethod
    def constant(cls, rho: float) -> "DecayRule":
        """Return the forgetting that is ``rho`` whatever the drift.

        >>> DecayRule.constant(0.875)(0.0)
        0.875
        """
        return cls(rho, rho)

    @property
    def window(self) -> float:
        """N0 = 1 / (1 - rho_min): the effective observations that an estimate from rollouts starts with.

        It is where n_eff would settle at the fastest forgetting, so early updates neither jump nor stall.
        """
        return 1 / (1 - self.rho_min)

    def __call__(self, drift: float) -> float:
        """Return rho after the policy moved by ``drift`` nats since it last answered; infinity forgets most.

        Raises:
            LearnerError: If ``drift`` is negative or not a number.
        """
        if math.isnan(drift) or drift < 0:
            raise LearnerError(f"policy drift must be >= 0 nats, got {drift}; were the log-probabilities finite?")
        return min(max(float(2.0 ** (-drift / self.d_half)), self.rho_min), self.rho_max)


class ValueTracker:
    """The success rate of each task under the current policy, from the rewards of past visits.

    For binary rewards the posterior mean of a Beta distribution whose counts fade:

        alpha <- rho alpha + r,  beta <- rho beta + 1 - r,  v = alpha / (alpha + beta),  n_eff = alpha + beta

    which is the same as a moving average with a step that shrinks as evidence grows:

        v <- v + (r - v) / (rho n_eff + 1),  n_eff <- rho n_eff + 1

    It is kept in the second form, because that also serves rewards that are any real number. n_eff is alpha + beta; the
    paper's text prints alpha + beta + 1, with which the two forms are not the same.

    A task starts with v = 1/2 and n_eff = 2 ``prior``: a weak belief that one visit can move. (The public recipe
    without offline samples does the same; n_eff = N0 would need some eight visits to overcome a guess.) Rollouts
    (`initialize`) or a file (`load`) give a rate that is worth N0 = 1 / (1 - rho_min) observations. Read `baseline`
    before `observe`: a baseline must not contain the reward it is subtracted from.

    Source: SPO, arXiv 2509.13232, section 3.1. That recipe keys by the prompt's text and saves nothing; we key by id
    and the tracker is `Stateful`.

    Args:
        task_index: The ids of the task set.
        forgetting: How old rewards fade.
        rewards: "binary" refuses any reward but 0 and 1; "continuous" takes every finite one.
        prior: Pseudo-count for successes and for failures, >= 0.

    Memory: 21 bytes a task, and 12 of the task index.

    Raises:
        ConfigError: If ``prior`` is negative.
    """

    def __init__(
        self, task_index: TaskIndex, forgetting: DecayRule, rewards: Rewards = "binary", prior: float = 0.5
    ) -> None:
        if not prior >= 0:
            raise ConfigError(f"ValueTracker.prior must be >= 0, got {prior}")
        size = len(task_index)
        self.task_index = task_index
        self._forgetting = forgetting
        self._rewards: Rewards = rewards
        self._prior = prior
        self._value: NDArray[np.float64] = np.full(size, 0.5)
        self._n_eff: NDArray[np.float64] = np.full(size, 2.0 * prior)
        self._visits: NDArray[np.int32] = np.zeros(size, np.int32)
        self._is_known: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._find_floor()

    def __len__(self) -> int:
        return len(self.task_index)

    @property
    def n_eff_floor(self) -> float:
        """A number that no task's n_eff is ever below: n -> rho n + 1 only climbs towards 1 / (1 - rho)."""
        return self._n_eff_floor

    def value(self, task: Task) -> float:
        """Return v of a task."""
        return float(self.baseline([self.task_index.index(task.id)])[0])

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

        Raises:
            ConfigError: Naming task and value for a reward that is not of the declared kind.
        """
        self._check(groups)
        for group in groups:
            if group.rewards:
                rate = posterior_rate(sum(group.rewards), len(group.rewards), self._rewards, self._prior)
                self._set_estimate(self.task_index.index(group.task.id), rate)
        self._find_floor()

    def load(self, path: Path) -> int:
        """Start from a JSON file, id to rate or to ``[successes, samples]``; return how many tasks it named.

        Ids of other tasks are passed over, tasks that it does not name keep their start.

        Raises:
            DatasetError: If the file cannot be used, or names none of the tasks.
        """
        ours = places(read_rates(path, self._rewards, self._prior), self.task_index, path)
        for index, rate in ours.items():
            self._set_estimate(index, rate)
        self._find_floor()
        return len(ours)

    def export(self, path: Path, ids: Sequence[str]) -> None:
        """Write id to rate of every task that anything is known of, for `load` in another run.

        Args:
            ids: Those of the task index, in its order (it keeps their hashes only).

        Raises:
            ConfigError: If they are others.
        """
        self.task_index.check(TaskIndex(ids).identity(), "id list")
        write_rates(path, {ids[i]: float(self._value[i]) for i in np.flatnonzero(self._is_known).tolist()})

    def observe(self, groups: Sequence[Group], drifts: Mapping[str, float]) -> Metrics:
        """Learn from the graded rollouts of a finished step, in their order; return what happened.

        Args:
            drifts: Task id to nats the policy moved since it last answered that task, from `Drift.measure`. A task that
                is not in it is on its first visit: drift 0. Further rollouts of a task in the same step were answered
                by the same policy, so their drift is 0 as well.

        Raises:
            ConfigError: If a reward is not of the declared kind; it names task and value, and nothing is learned.
            LearnerError: For a drift that is negative or not a number.
        """
        self._check(groups)
        # Raises for a bad drift before anything is learned.
        for drift in drifts.values():
            self._forgetting(drift)
        metrics = Metrics()
        seen: set[str] = set()
        for task_id, reward in _rewards(groups):
            drift = 0.0 if task_id in seen else drifts.get(task_id, 0.0)
            metrics += self._measured_update(self.task_index.index(task_id), reward, drift)
            seen.add(task_id)
        return metrics

    def update(self, index: int, reward: float, drift: float) -> float:
        """Fold one reward into one task's value; return the rho it was done with."""
        rho = self._forgetting(drift)
        # n_eff <- rho n_eff + 1; the old value has the weight rho n_eff of that.
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
        return State(
            {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, self.task_index.identity()
        )

    def restore(self, state: State) -> None:
        """Become the tracker that returned ``state``.

        Raises:
            ConfigError: If it tracked another task set.
        """
        self.task_index.check(dict(state.values), "value tracker")
        if bool((state.tensors["n_eff"] < 0).any()):
            raise ValueError("n_eff is below 0, and counts observations")
        self._value = state.tensors["value"].numpy().copy()
        self._n_eff = state.tensors["n_eff"].numpy().copy()
        self._visits = state.tensors["visits"].numpy().copy()
        self._is_known = state.tensors["is_known"].numpy().copy()
        self._find_floor()

    def moved(self, state: State, kept: KeptPrompts) -> State:
        """Return a state of a former task set as one of this set; a new task has the value that it has now."""
        return kept.moved_rows(state, self.state())

    def _find_floor(self) -> None:
        self._n_eff_floor = min(float(self._n_eff.min()), self._forgetting.window)

    def _set_estimate(self, index: int, rate: float) -> None:
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
