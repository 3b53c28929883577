"""Rules about the critic and the value tracker."""

from dataclasses import dataclass
from typing import ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, has_risen, mean
from gnomon.diagnosis.rule import Alarm, percent, remedy

EXPLAINED = "critic/explained_variance"


@dataclass(frozen=True)
class CriticExplains:
    """A critic that predicts returns no better than a constant.

    Reads 1 - Var(return - V) / Var(return) on new batches. A young critic may be poor: the rule warns if two windows
    bring no improvement, and is severe if a constant would be clearly better.

    Attributes:
        window: Steps.
        warning: Explained variance.
        nothing: Explained variance.

    References:
        rlprobe 0.1.0 (.2, 0 for 10 steps); value pretraining is decisive, VC-PPO, arXiv 2503.01491.
    """

    name: ClassVar[str] = "critic-explains-nothing"
    window: int = 10
    warning: float = 0.2
    nothing: float = -0.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare two windows."""
        points = history.latest(EXPLAINED, 2 * self.window)
        if not points:
            return None
        before, now = points[: self.window], points[self.window :]
        if mean(now) >= self.warning or has_risen(before, now) or has_risen(history.first(EXPLAINED, self.window), now):
            return None
        spread = history.mean("rollout/reward_std", self.window) or 0.0
        if spread == 0:
            return None
        return Alarm(
            "severe" if mean(now) < self.nothing else "warning",
            now[0][0],
            f"the critic explains {mean(now):.2f} of the returns' variance and does not get better "
            f"({mean(before):.2f} in the {self.window} steps before)",
            {"explained_variance": mean(now), "before": mean(before)},
            *remedy(self.name),
        )


@dataclass(frozen=True)
class TrackerStarves:
    """Tracked success rates that have too few visits or predict nothing.

    Starved: almost every prompt is new, so its rate is a guess. Useless: the squared error of the tracked value is no
    smaller than the variance of the rewards, which a constant would reach.

    Attributes:
        window: Steps.
        first_visits: Share.
        error: Factor on the rewards' variance.

    References:
        Ours; SPO, arXiv 2509.13232, samples each prompt 8 times before training for this reason.
    """

    name: ClassVar[str] = "tracker-starves"
    window: int = 10
    first_visits: float = 0.8
    error: float = 1.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check visits, then errors."""
        visits = history.latest("tracker/first_visit_fraction", self.window)
        wrong, spread = history.mean("tracker/squared_error_mean", self.window), self._variance(history)
        is_starved = bool(visits) and facts.initial == "prior" and mean(visits) >= self.first_visits
        is_useless = bool(facts.initial) and wrong is not None and spread > 0 and wrong > self.error * spread
        if not is_starved and not is_useless:
            return None
        points = visits or history.latest("tracker/squared_error_mean", self.window)
        evidence = {"rewards_variance": spread} | ({"squared_error": wrong} if wrong is not None else {})
        said = f"{percent(mean(visits))} of prompts are asked for the first time" if is_starved else ""
        if is_useless and wrong is not None:
            ratio = f"the tracked rates are {wrong / spread:.1f} times as wrong as one constant would be"
            said = f"{said}; {ratio}" if said else ratio
        return Alarm(
            "warning",
            points[0][0],
            said,
            evidence | ({"first_visits": mean(visits)} if visits else {}),
            *remedy(self.name),
        )

    def _variance(self, history: History) -> float:
        return (history.mean("rollout/reward_std", self.window) or 0.0) ** 2
