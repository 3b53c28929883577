"""Rules about the difference between the policy that answered and the policy that is trained."""

from dataclasses import dataclass
from typing import ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, mean, median, values
from gnomon.diagnosis.rule import Alarm, graded, percent, remedy

K3, ENGINE, GAP = "mismatch/k3_nats", "mismatch/engine_abs_nats", "mismatch/logprob_abs_mean_nats"
CANARY, ALLOWED = "arrival/canary_abs_mean_nats", "arrival/canary_allowed_nats"
PARTS = ("staleness", "truncation", "engine", "precision")


@dataclass(frozen=True)
class EffectiveSampleSize:
    """The effective sample size of a step's tokens, as a fraction.

    ``mismatch/ess_fraction``, before the first update, shows stale or different engines. ``loss/ess_fraction``, over
    all updates, also shows the step's own updates.

    Attributes:
        window: Steps.
        warning: ESS below this value.
        severe: ESS below this value.

    References:
        verl's documentation on rollout correction (0.3); ESS predicts collapse, arXiv 2602.17616.
    """

    name: ClassVar[str] = "effective-sample-size"
    window: int = 5
    warning: float = 0.5
    severe: float = 0.3

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the lower of the two."""
        columns = ("mismatch/ess_fraction", "loss/ess_fraction")
        found = {name: points for name in columns if (points := history.latest(name, self.window))}
        if not found:
            return None
        low = min(found, key=lambda name: mean(found[name]))
        share = mean(found[low])
        severity = graded(1 - share, 1 - self.warning, 1 - self.severe)
        if severity is None:
            return None
        before = mean(found[columns[0]]) if columns[0] in found else 1.0
        stale = history.mean("stream/staleness_steps_mean", self.window) or 0.0
        is_engine = before < self.warning
        return Alarm(
            severity,
            found[low][0][0],
            f"the effective sample size is {percent(share)} of the tokens"
            + (
                f" ({percent(before)} before the first update, at a mean age of {stale:.1f} steps)" if is_engine else ""
            ),
            {"ess": share, "ess_before_updates": before, "staleness_steps": stale},
            *remedy(self.name if is_engine else "effective-sample-size.updates"),
        )


@dataclass(frozen=True)
class EngineMismatch:
    """The engine's log-probabilities differ from the learner's: KL(behavior, proximal) by the k3 estimator.

    The user chose truncated sampling and staleness, so the rule compares these with the first steps. Differences of
    arithmetic were not chosen.

    Attributes:
        window: Steps.
        baseline: Steps.
        warning: Nats per token, and ``times`` the baseline unless the engine's arithmetic or rounding is the largest
            part.
        severe: Nats per token.

    References:
        verl's documentation on rollout correction (0.1; 0.0004 to 0.01 are usual); a small mismatch alone can end a
            run,
        arXiv 2605.14220. The parts are ours (`training.mismatch`).
    """

    name: ClassVar[str] = "mismatch"
    window: int = 5
    baseline: int = 3
    warning: float = 0.01
    times: float = 3.0
    severe: float = 0.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the last steps, and name the largest part."""
        points, began = history.latest(K3, self.window), mean(history.first(K3, self.baseline))
        if not points:
            return None
        now = mean(points)
        parts = {p: history.mean(f"mismatch/{p}_abs_nats", self.window) for p in PARTS}
        known = {part: value for part, value in parts.items() if value is not None}
        largest = max(known, key=lambda part: known[part], default="")
        is_fault = largest in ("engine", "precision")
        severity = graded(now, self.warning if is_fault else max(self.warning, self.times * began), self.severe)
        if severity is None:
            return None
        return Alarm(
            severity,
            points[0][0],
            f"engine and learner are {now:.3g} nats a token apart"
            + (f", most of it by {largest} ({known[largest]:.3g} nats)" if largest else ""),
            {"k3_nats": now, "at_first_nats": began, **{f"{part}_nats": value for part, value in known.items()}},
            *remedy(f"mismatch.{largest}" if largest else self.name),
        )


@dataclass(frozen=True)
class WeightsNotArrived:
    """An engine that answers with other weights than the run sent.

    Either the canary of a weight sync differs by more than its tolerance, or the engine's log-probabilities of its own
    responses move away from the learner's. Rounding errors do not grow from step to step; outdated weights do.

    Attributes:
        window: Steps.
        baseline: Steps, of which the smallest value counts.
        least: Nats per token.
        times: Factor on the baseline.

    References:
        Ours.
    """

    name: ClassVar[str] = "weights-not-arrived"
    window: int = 5
    baseline: int = 2
    least: float = 0.01
    times: float = 10.0

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the canary, then the growth of the difference."""
        said, allowed = history.latest(CANARY, 1), history.latest(ALLOWED, 1)
        if said and allowed and said[0][1] > allowed[0][1]:
            return self._alarm(said[0][0], said[0][1], allowed[0][1], "12 fixed tokens, of which {0:.3g} is allowed")
        is_fresh = history.mean("stream/staleness_steps_mean", self.window) == 0
        name = ENGINE if history.latest(ENGINE, self.window) else GAP if is_fresh else ""
        points, began = history.latest(name, self.window), min(values(history.first(name, self.baseline)), default=0.0)
        if not points or points[0][0] <= self.baseline:
            return None
        now = median(points)
        if now < self.least or now < self.times * began:
            return None
        return self._alarm(points[0][0], now, began, "its own answers, where {0:.3g} was the difference at first")

    def _alarm(self, since: int, apart: float, other: float, where: str) -> Alarm:
        return Alarm(
            "severe",
            since,
            f"the engine is {apart:.3g} nats a token from the learner on {where.format(other)}",
            {"apart_nats": apart, "compared_with_nats": other},
            *remedy(self.name),
        )


@dataclass(frozen=True)
class RefusedSteps:
    """Steps that were undone because a number was not finite.

    Attributes:
        window: Steps.
        severe: Such steps.

    References:
        Ours; see docs/reliability.md.
    """

    name: ClassVar[str] = "not-finite"
    window: int = 20
    severe: int = 2

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Count the undone steps."""
        points = [p for p in history.latest("learner/refused_steps", min(self.window, history.steps)) if p[1] > 0]
        if not points:
            return None
        return Alarm(
            "severe" if len(points) >= self.severe else "warning",
            points[0][0],
            f"{len(points)} of the last {min(self.window, history.steps)} steps met a number that is not finite, and "
            "changed nothing",
            {"refused_steps": len(points)},
            *remedy(self.name),
        )
