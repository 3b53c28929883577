"""Rules about the policy: entropy, gradients, clips, trust in what is trained, values, held-out questions, pace."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.finding import Severity
from gnomon.diagnosis.history import (
    LARGEST,
    History,
    Point,
    has_risen,
    is_learning,
    is_rising,
    mean,
    median,
    slope,
    values,
)
from gnomon.diagnosis.rule import Alarm, alarm, graded, one_a_prompt

ENTROPY = "loss/entropy_nats"
GRADIENT = "learner/gradient_norm"
CLIPPED, OUTSIDE = "loss/clipped_fraction", "loss/out_of_band_fraction"
_LEAST = 1e-9
CLIPPED_LOW, CLIPPED_HIGH = "loss/clipped_low_fraction", "loss/clipped_high_fraction"


@dataclass(frozen=True)
class EntropyCollapse:
    """Entropy that is gone or will be gone.

    Below ``floor`` of its start: a warning, and severe while the reward has not risen, because the policy has become
    certain of something wrong. If the entropy would reach ``floor`` within the remaining steps and ``lost`` of the
    start is gone: a warning, a note if the reward has risen, because a learning policy becomes more certain, and
    nothing while it rises. The projection uses the relative rate of the last steps, because no learning run follows a
    straight line. There is no absolute floor: healthy runs lose three quarters of their entropy in the first steps.

    Attributes:
        start: First steps.
        window: Steps.
        latest: Last steps.
        floor: Share of the start.
        lost: Share of the start.
        solved: Mean reward above which low entropy is no problem.

    References:
        rldoctor 0.2.0; R = -a e^H + b, arXiv 2505.22617.
    """

    name: ClassVar[str] = "entropy-collapse"
    start: int = 3
    window: int = 10
    latest: int = 3
    floor: float = 0.1
    lost: float = 0.5
    solved: float = 0.8

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare with the first steps and project to the end of the run."""
        points, began = history.latest(ENTROPY, self.window), mean(history.first(ENTROPY, self.start))
        if not points or began <= 0:
            return None
        now = mean(points[-self.latest :])
        # In logarithms: entropy falls by a share of itself, so a straight line would reach 0 too early.
        rate = slope([(step, math.log(max(value, _LEAST))) for step, value in points])
        left = max(0, facts.steps - history.step)
        # A rising entropy is not projected upwards.
        projected = now * math.exp(min(0.0, rate) * left)
        is_gone, will_be = now < self.floor * began, projected < self.floor * began and now < (1 - self.lost) * began
        is_solved = (history.mean("rollout/reward_mean", self.latest) or 0.0) >= self.solved
        if not (is_gone or will_be) or is_solved:
            return None
        if not is_gone and is_rising(history, self.window):
            return None
        learns = is_learning(history, self.window)
        is_severe = is_gone and not learns
        severity: Severity = "severe" if is_severe else "note" if learns and not is_gone else "warning"
        key = "entropy-collapse.severe" if is_severe else "entropy-collapse.gone" if is_gone else self.name
        said = {"entropy_nats": now, "at_first_nats": began, "log_slope_a_step": rate, "projected_nats": projected}
        return alarm(severity, points[0][0], key, said, one_a_prompt, share=now / began, left=left)


@dataclass(frozen=True)
class GradientNorm:
    """Gradient norms far above those of the first steps: single spikes, or all of them.

    Spikes while the reward rises are none: of a policy that is nearly certain, a rare wrong answer has most of the
    gradient.

    A spike is more than ``sigmas`` times 1.4826 MAD above the median of the baseline, and more than ``times`` the
    median.

    Attributes:
        skipped: Steps before the baseline.
        baseline: Steps.
        window: Steps.
        spikes: Spikes within the window.
        sigmas: Robust standard deviations.
        times: Factor on the baseline's median.
        sustained: Last steps whose median is compared for ``severe``.
        severe: Factor on the baseline's median.

    References:
        rldoctor 0.2.0, rlprobe 0.1.0; ESS and gradient norm predict collapse, arXiv 2602.17616.
    """

    name: ClassVar[str] = "gradient-norm"
    skipped: int = 2
    baseline: int = 20
    window: int = 10
    spikes: int = 3
    sigmas: float = 8.0
    times: float = 3.0
    sustained: int = 5
    severe: float = 10.0

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare the last steps with the baseline."""
        points = history.latest(GRADIENT, self.window)
        earlier = [p for p in history.first(GRADIENT, self.skipped + self.baseline)[self.skipped :] if p[1] > 0]
        earlier = [p for p in earlier if not points or p[0] < points[0][0]]
        if not points or len(earlier) < 8:
            return None
        usual = median(earlier)
        spread = 1.4826 * statistics.median(abs(value - usual) for value in values(earlier))
        limit = max(usual + self.sigmas * spread, self.times * usual)
        high = [p for p in points if p[1] > limit]
        now = median(points[-self.sustained :])
        is_severe = now > self.severe * usual
        if not is_severe and (len(high) < self.spikes or is_rising(history, self.window)):
            return None
        evidence = {"gradient_norm": now, "usual": usual, "limit": limit, "spikes": len(high)}
        severity: Severity = "severe" if is_severe else "warning"
        return alarm(severity, (high or points)[0][0], self.name, evidence, window=self.window)


@dataclass(frozen=True)
class Clipping:
    """A clip that stops too many tokens, almost all tokens, or no token.

    Only for surrogates with a clip, which measure its two sides, whatever piece they are; and only if a step makes
    several updates, rollouts are stale, or a ratio has left the band: with one update on fresh rollouts every ratio to
    the proximal policy is 1. If almost all tokens of later updates are outside the band, only the first update
    of a step teaches anything. Severe only if the reward has not risen at all.

    Attributes:
        window: Steps.
        warning: Share of clipped tokens.
        severe: Share of clipped tokens.
        shut: Share of tokens outside, relative to the (1 - 1/updates) that can be outside.
        asymmetry: Ratio of the two sides.
        least: Clipped share from which the sides are compared.
        idle: Steps without a token outside.
        progress: Steps at both ends of the run whose rewards are compared.

    References:
        rldoctor 0.2.0 (.20, .40, asymmetry 3), rlprobe 0.1.0; shut and idle are ours.
    """

    name: ClassVar[str] = "clip-fraction"
    window: int = 6
    warning: float = 0.2
    severe: float = 0.4
    shut: float = 0.9
    asymmetry: float = 3.0
    least: float = 0.1
    idle: int = 20
    progress: int = 10

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the shares of the last steps."""
        has_band = facts.has_band or bool(history.latest(CLIPPED_LOW, self.window))
        points, outside = history.latest(CLIPPED, self.window), history.mean(OUTSIDE, self.window) or 0.0
        if not has_band or not points or (facts.updates < 2 and facts.bound == 0 and outside == 0):
            return None
        clipped = mean(points)
        # On fresh rollouts the first update of a step has ratio 1 everywhere, unless the proximal policy is another.
        movable = 1.0 if facts.bound or facts.updates < 2 else 1 - 1 / facts.updates
        evidence = {"clipped": clipped, "outside": outside, "share_that_can_be_outside": movable}
        is_stuck = not is_learning(history, self.progress, errors=0.0)
        if outside >= self.shut * movable:
            return alarm("severe" if is_stuck else "warning", points[0][0], "clip-fraction.shut", evidence)
        severity = graded(clipped, self.warning, self.severe)
        low, high = history.mean(CLIPPED_LOW, self.window) or 0.0, history.mean(CLIPPED_HIGH, self.window) or 0.0
        sides = {**evidence, "clipped_low": low, "clipped_high": high}
        if severity is not None:
            return alarm(severity if is_stuck else "warning", points[0][0], self.name, sides)
        return self._silent(history, sides, (low, high))

    def _silent(self, history: History, evidence: dict[str, float], sides: tuple[float, float]) -> Alarm | None:
        points = history.latest(CLIPPED, self.window)
        if sum(sides) >= self.least and max(sides) >= self.asymmetry * min(sides):
            side, key = ("below", "low") if sides[0] > sides[1] else ("above", "high")
            times = max(sides) / max(min(sides), 1e-6)
            return alarm("note", points[0][0], "clip-fraction.side", evidence, side=key, where=side, times=times)
        unused = history.latest(OUTSIDE, self.idle)
        if unused and all(value == 0 for value in values(unused)):
            return alarm("note", unused[0][0], "clip-fraction.idle", evidence, idle=self.idle)
        return None


# Rules about the difference between the policy that answered and the policy that is trained.

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
        key = self.name if before < self.warning else "effective-sample-size.updates"
        evidence = {"ess": share, "ess_before_updates": before, "staleness_steps": stale}
        return alarm(severity, found[low][0][0], key, evidence)


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
        run, arXiv 2605.14220. The parts are ours (`training.mismatch`).
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
        # These parts have no reason to be large at the start either, so they are not compared with it.
        is_fault = largest in ("engine", "precision")
        severity = graded(now, self.warning if is_fault else max(self.warning, self.times * began), self.severe)
        if severity is None:
            return None
        evidence = {"k3_nats": now, "at_first_nats": began, **{f"{part}_nats": value for part, value in known.items()}}
        key = f"mismatch.{largest}" if largest else self.name
        most = f", most of it by {largest} ({known[largest]:.3g} nats)" if largest else ""
        return alarm(severity, points[0][0], key, evidence, most=most)


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
            gap = {"apart_nats": said[0][1], "compared_with_nats": allowed[0][1]}
            return alarm("severe", said[0][0], "weights-not-arrived.canary", gap)
        is_fresh = history.mean("stream/staleness_steps_mean", self.window) == 0
        name = ENGINE if history.latest(ENGINE, self.window) else GAP if is_fresh else ""
        points, began = history.latest(name, self.window), min(values(history.first(name, self.baseline)), default=0.0)
        # The window must not overlap the steps that it is compared with.
        if not points or points[0][0] <= self.baseline:
            return None
        now = median(points)
        if now < self.least or now < self.times * began:
            return None
        return alarm("severe", points[0][0], self.name, {"apart_nats": now, "compared_with_nats": began})


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
        severity: Severity = "severe" if len(points) >= self.severe else "warning"
        window = min(self.window, history.steps)
        return alarm(severity, points[0][0], self.name, {"refused_steps": len(points)}, window=window)


# Rules about the critic and the value tracker.

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
        # With equal rewards there is nothing to explain.
        spread = history.mean("rollout/reward_std", self.window) or 0.0
        if spread == 0:
            return None
        severity: Severity = "severe" if mean(now) < self.nothing else "warning"
        evidence = {"explained_variance": mean(now), "before": mean(before)}
        return alarm(severity, now[0][0], self.name, evidence, window=self.window)


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
        evidence |= {"first_visits": mean(visits)} if visits else {}
        key = f"tracker-starves.{'both' if is_starved else 'useless'}" if is_useless else self.name
        times = wrong / spread if is_useless and wrong is not None else 0.0
        return alarm("warning", points[0][0], key, evidence, times=times)

    def _variance(self, history: History) -> float:
        return (history.mean("rollout/reward_std", self.window) or 0.0) ** 2


# The rules about held-out scores: rewards that they do not confirm, and a loss that rises.


@dataclass(frozen=True)
class HeldOutGap:
    """Training rewards that held-out prompts do not confirm.

    The gap is the mean training reward of the last steps minus the upper end of the held-out reward's 95% interval,
    divided by the training reward. So a lucky held-out set does not explain the gap. Severe if the training reward rose
    and the held-out reward did not. No finding if training asks harder prompts on purpose.

    Attributes:
        window: Steps before the evaluation.
        warning: Share of the training reward.
        severe: Share of the training reward.
        least: Smallest training reward.

    References:
        rldoctor 0.2.0 (.15, .30).
    """

    name: ClassVar[str] = "held-out-gap"
    window: int = 6
    warning: float = 0.15
    severe: float = 0.3
    least: float = 0.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the latest evaluation."""
        scored = [row for row in map(_score, history.evaluations) if row is not None]
        if not scored or scored[-1][0] < self.window:
            return None
        step, held_out, high = scored[-1]
        trained = self._trained(history, step)
        reward = mean(trained)
        if not trained or reward < self.least:
            return None
        # The upper end of the interval: the benefit of the doubt.
        gap = (reward - high) / reward
        if gap < self.warning:
            return None
        began = mean(history.rewards[: self.window])
        first = scored[0][1]
        is_higher, is_flat = reward - began > self.warning * reward, held_out - first < 0.25 * (reward - began)
        is_severe = gap >= self.severe and len(scored) > 1 and is_higher and is_flat
        said = {"training": reward, "held_out": held_out, "held_out_high": high, "held_out_at_first": first, "gap": gap}
        return alarm("severe" if is_severe else "warning", trained[0][0], self.name, said, step=step)

    def _trained(self, history: History, step: int) -> list[Point]:
        return [point for point in history.rewards[-10 * self.window :] if step - self.window < point[0] <= step]


@dataclass(frozen=True)
class HeldOutLoss:
    """A held-out loss that rises while the dataset's answers are trained on.

    All evaluations are of the same rows, so little of a difference is noise. Severe where the loss is above that of the
    model before training.

    Attributes:
        warning: Rise above the lowest loss, as a share of it.

    References:
        Ours.
    """

    name: ClassVar[str] = "held-out-loss"
    warning: float = 0.03

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the latest evaluation against the lowest and the first."""
        found = [(row["step"], float(row["loss_nats"])) for row in history.evaluations if _has_loss(row)]
        best = min(found, key=lambda point: point[1], default=None)
        if best is None or found[-1][1] <= (1 + self.warning) * best[1]:
            return None
        step, loss = found[-1]
        trained = history.mean("loss/policy", min(5, history.steps)) or 0.0
        said = {"loss": loss, "lowest": best[1], "lowest_step": best[0], "at_first": found[0][1], "training": trained}
        severity: Severity = "severe" if loss > found[0][1] else "warning"
        return alarm(severity, best[0], self.name, said, trained=f"{trained:.4g}", step=step)


def _has_loss(row: Mapping[str, Any]) -> bool:
    loss = row.get("loss_nats")
    return type(row.get("step")) is int and isinstance(loss, int | float) and abs(loss) <= LARGEST


def _score(row: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """Return step, mean and upper end of an evaluation's reward; None if the row is invalid."""
    scores = row.get("scores")
    found = scores.get("reward") if isinstance(scores, Mapping) else None
    if not isinstance(found, Mapping) or type(row.get("step")) is not int:
        return None
    numbers: tuple[Any, Any] = (found.get("mean"), found.get("high"))
    if any(type(number) not in (int, float) or not abs(number) <= LARGEST for number in numbers):
        return None
    return row["step"], float(numbers[0]), float(numbers[1])


# The rule about speed.

STEP, TOKENS = "time/step_seconds", "tokens/generated"
STAGES = ("generate", "grade", "score", "update", "publish", "track")


@dataclass(frozen=True)
class Throughput:
    """Steps that take longer and longer for the same tokens.

    Compares medians of the last and the first steps, per step and per generated token: longer responses may take
    longer, and shorter responses leave the fixed cost of a step. The finding names the stage that grew most. If the
    other stages grew by ``others`` times or more, or one of the last steps was as fast as ever, another program uses
    the machine, and the finding is only a note.

    Attributes:
        skipped: First steps, which warm up.
        baseline: Steps.
        window: Steps.
        warning: Factor.
        severe: Factor.
        seconds: Smallest growth of a step; smaller changes are noise of the machine.
        others: Factor.

    References:
        rlprobe 0.1.0 (1.4, 3).
    """

    name: ClassVar[str] = "throughput"
    skipped: int = 1
    baseline: int = 8
    window: int = 6
    warning: float = 1.4
    severe: float = 3.0
    seconds: float = 0.3
    others: float = 1.4

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare the medians."""
        points = history.latest(STEP, self.window)
        first = history.first(STEP, self.skipped + self.baseline)[self.skipped :]
        if not points or len(first) < self.baseline or points[0][0] <= first[-1][0]:
            return None
        usual, now = median(first), median(points)
        if usual <= 0 or now - usual < self.seconds:
            return None
        # Longer answers explain longer steps, and fewer tokens explain a higher price of each.
        times = min(now / usual, self._a_token(history, first))
        severity = graded(times, self.warning, self.severe)
        if severity is None:
            return None
        spent = {stage: self._spent(history, stage) for stage in STAGES}
        grown = {stage: after - before for stage, (before, after) in spent.items()}
        stage = max(grown, key=lambda name: grown[name])
        # If the other stages slowed down as much, the machine is busy, not the stage.
        rest = (now - spent[stage][1]) / max(usual - spent[stage][0], 1e-9)
        is_machine = rest >= self.others or min(values(points)) < self.warning * usual
        evidence = {"step_seconds": now, "usual_seconds": usual, "times": times, "times_of_other_stages": rest}
        told = (points[0][0], f"throughput.{stage}", evidence)
        found = alarm(severity, *told, stage=stage, more=grown[stage])
        if not is_machine:
            return found
        machine = alarm("note", points[0][0], "throughput.machine", evidence, stage=stage, more=grown[stage])
        return replace(machine, advice=(*machine.advice, *found.advice))

    def _a_token(self, history: History, first: list[Point]) -> float:
        tokens = dict(history.first(TOKENS, self.skipped + self.baseline))
        recent, seconds = dict(history.latest(TOKENS, self.window)), dict(history.latest(STEP, self.window))
        before = median([(step, value / tokens[step]) for step, value in first if tokens.get(step)])
        after = median([(step, value / recent[step]) for step, value in seconds.items() if recent.get(step)])
        return after / before if before else 0.0

    def _spent(self, history: History, stage: str) -> tuple[float, float]:
        """Return the median seconds of a stage in the first steps and in the last steps."""
        name = f"time/{stage}_seconds"
        first = history.first(name, self.skipped + self.baseline)[self.skipped :]
        return median(first), median(history.latest(name, self.window))
