"""The metrics that a run has recorded so far: the first and the latest values of each."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

FIRST, LATEST = 40, 80
LARGEST = 1e100
REWARD = "rollout/reward_mean"

Point = tuple[int, float]
"""Step and value."""


class History:
    """Metrics step by step, in bounded memory. A step costs one append per metric.

    Values that are not finite or above `LARGEST` are dropped.

    Attributes:
        rewards: Mean reward of every step.
        peak: First step with the highest mean reward.
        evaluations: Rows of held-out scores in order.
    """

    def __init__(self) -> None:
        self.step = 0
        self.steps = 0
        self.rewards: list[Point] = []
        self.peak: Point | None = None
        self.evaluations: list[Mapping[str, Any]] = []
        # Cumulative sums of the rewards: the mean of any window is a difference of two sums.
        self._sums = [0.0]
        self._first: dict[str, list[Point]] = {}
        self._latest: dict[str, deque[Point]] = {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the metrics of the next step."""
        self.step, self.steps = step, self.steps + 1
        for name, value in values.items():
            # Written as "not <=" so that NaN is dropped too.
            if type(value) not in (int, float) or not abs(value) <= LARGEST:
                continue
            point = (step, float(value))
            if name not in self._latest:
                self._first[name], self._latest[name] = [], deque(maxlen=LATEST)
            # The start of a run is kept for comparisons, the middle is forgotten.
            if len(self._first[name]) < FIRST:
                self._first[name].append(point)
            self._latest[name].append(point)
            if name == REWARD:
                self.rewards.append(point)
                self._sums.append(self._sums[-1] + point[1])
                self.peak = point if self.peak is None or point[1] > self.peak[1] else self.peak

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Return the metrics with this prefix and suffix."""
        return [name for name in self._latest if name.startswith(prefix) and name.endswith(suffix)]

    def latest(self, name: str, count: int) -> list[Point]:
        """Return the last ``count`` values (at most `LATEST`), or none if fewer are recent.

        "Recent" means the last 2 ``count`` steps: a metric that the run no longer measures is ignored.
        """
        column = self._latest.get(name)
        if column is None or not 0 < count <= len(column):
            return []
        # From the right end, since a deque has no slices.
        points = list(islice(reversed(column), count))[::-1]
        return points if points[0][0] > self.step - 2 * count else []

    def first(self, name: str, count: int) -> list[Point]:
        """Return the first ``count`` values (at most `FIRST`), or fewer if there are fewer."""
        return self._first.get(name, [])[:count]

    def best_rewards(self, window: int) -> list[Point]:
        """Return the ``window`` successive rewards with the highest mean that end before the last ``window`` rewards.

        The result is empty if there are too few rewards. A long run is searched at about two hundred positions.
        """
        before = len(self.rewards) - window
        # Steps of half a window, or larger ones where that would be more than 200 positions.
        ends = range(window, before + 1, max(window // 2, before // 200, 1))
        end = max(ends, key=lambda place: self._sums[place] - self._sums[place - window], default=0)
        return self.rewards[max(0, end - window) : end]

    def mean(self, name: str, count: int) -> float | None:
        """Return the mean of the last ``count`` values; None if there are fewer."""
        points = self.latest(name, count)
        return mean(points) if points else None


def values(points: Sequence[Point]) -> list[float]:
    """Return the values without steps."""
    return [value for _, value in points]


def mean(points: Sequence[Point]) -> float:
    """Return the mean of the values; 0 without values."""
    return sum(value for _, value in points) / len(points) if points else 0.0


def median(points: Sequence[Point]) -> float:
    """Return the median of the values; 0 without values."""
    return statistics.median(values(points)) if points else 0.0


def error(points: Sequence[Point]) -> float:
    """Return the standard error of the mean for independent steps; 0 for fewer than two values."""
    if len(points) < 2:
        return 0.0
    level = mean(points)
    # `statistics.stdev` computes with fractions and took a third of all rules' time.
    variance = sum((value - level) ** 2 for _, value in points) / (len(points) - 1)
    return math.sqrt(variance / len(points))


def slope(points: Sequence[Point]) -> float:
    """Return the least-squares slope of the values per step.

    >>> slope([(1, 0.0), (2, 2.0), (3, 4.0)])
    2.0
    """
    steps, level = sum(step for step, _ in points) / max(len(points), 1), mean(points)
    spread = sum((step - steps) ** 2 for step, _ in points)
    return sum((step - steps) * (value - level) for step, value in points) / spread if spread else 0.0


def has_risen(before: Sequence[Point], after: Sequence[Point], errors: float = 2.0) -> bool:
    """Whether the mean of ``after`` exceeds the mean of ``before`` by more than ``errors`` standard errors of both."""
    noise = math.hypot(error(before), error(after))
    return mean(after) - mean(before) > max(errors * noise, 1e-9)


def is_learning(history: History, window: int, errors: float = 2.0) -> bool:
    """Whether the mean reward of the last ``window`` steps exceeds that of the first by ``errors`` standard errors.

    Overlapping windows count as learning, because a finding needs two separate windows.
    """
    if len(history.rewards) < 2 * window:
        return True
    return has_risen(history.rewards[:window], history.rewards[-window:], errors)


def is_rising(history: History, window: int) -> bool:
    """Whether the mean reward of the last ``window`` steps exceeds that of those before: the policy gets better now.

    A run of fewer steps is cut in halves.
    """
    count = min(window, len(history.rewards) // 2)
    return count > 1 and has_risen(history.rewards[-2 * count : -count], history.rewards[-count:])
