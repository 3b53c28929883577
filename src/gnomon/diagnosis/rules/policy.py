"""Rules about the policy: entropy, gradient norm, and clipping."""

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, is_learning, is_rising, mean, median, slope, values
from gnomon.diagnosis.rule import Alarm, graded, one_a_prompt, percent, remedy

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
        rate = slope([(step, math.log(max(value, _LEAST))) for step, value in points])
        left = max(0, facts.steps - history.step)
        projected = now * math.exp(min(0.0, rate) * left)
        is_gone, will_be = now < self.floor * began, projected < self.floor * began and now < (1 - self.lost) * began
        is_solved = (history.mean("rollout/reward_mean", self.latest) or 0.0) >= self.solved
        if not (is_gone or will_be) or is_solved:
            return None
        if not is_gone and is_rising(history, self.window):
            return None
        learns = is_learning(history, self.window)
        is_severe = is_gone and not learns
        gone = f"{now:.3g} nats of {began:.3g} at first ({percent(now / began)})"
        return Alarm(
            "severe" if is_severe else "note" if learns and not is_gone else "warning",
            points[0][0],
            f"entropy is down to {gone}"
            + ("" if is_gone else f", and would be near {projected:.2g} after the remaining {left} steps"),
            {"entropy_nats": now, "at_first_nats": began, "log_slope_a_step": rate, "projected_nats": projected},
            *remedy("entropy-collapse.severe" if is_severe else self.name),
            one_a_prompt,
        )


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
        return Alarm(
            "severe" if is_severe else "warning",
            (high or points)[0][0],
            f"the gradient norm is {now:.3g} where {usual:.3g} was usual; {len(high)} of the last {self.window} steps "
            f"are above {limit:.3g}",
            {"gradient_norm": now, "usual": usual, "limit": limit, "spikes": len(high)},
            *remedy(self.name),
        )


@dataclass(frozen=True)
class Clipping:
    """A clip that stops too many tokens, almost all tokens, or no token.

    Only for surrogates with a clip, and only if a step makes several updates or rollouts are stale: with one update on
    fresh rollouts every ratio is 1. If almost all tokens of later updates are outside the band, only the first update
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
        points = history.latest(CLIPPED, self.window)
        if not facts.has_band or not points or (facts.updates < 2 and facts.bound == 0):
            return None
        clipped, outside = mean(points), history.mean(OUTSIDE, self.window) or 0.0
        movable = 1.0 if facts.bound else 1 - 1 / facts.updates
        evidence = {"clipped": clipped, "outside": outside, "share_that_can_be_outside": movable}
        is_stuck = not is_learning(history, self.progress, errors=0.0)
        if outside >= self.shut * movable:
            return Alarm(
                "severe" if is_stuck else "warning",
                points[0][0],
                f"the clip never opens: {percent(outside)} of tokens are outside of the band, of at most "
                f"{percent(movable)}",
                evidence,
                *remedy("clip-fraction.shut"),
            )
        severity = graded(clipped, self.warning, self.severe)
        low, high = history.mean(CLIPPED_LOW, self.window) or 0.0, history.mean(CLIPPED_HIGH, self.window) or 0.0
        sides = {**evidence, "clipped_low": low, "clipped_high": high}
        if severity is not None:
            return Alarm(
                severity if is_stuck else "warning",
                points[0][0],
                f"{percent(clipped)} of tokens are clipped ({percent(low)} below, {percent(high)} above)",
                sides,
                *remedy(self.name),
            )
        return self._silent(history, sides, (low, high))

    def _silent(self, history: History, evidence: dict[str, float], sides: tuple[float, float]) -> Alarm | None:
        points = history.latest(CLIPPED, self.window)
        if sum(sides) >= self.least and max(sides) >= self.asymmetry * min(sides):
            side, key = ("below", "low") if sides[0] > sides[1] else ("above", "high")
            return Alarm(
                "note",
                points[0][0],
                f"tokens are clipped {side} the band {max(sides) / max(min(sides), 1e-6):.1f} times as often as on its "
                "other side",
                evidence,
                *remedy("clip-fraction.side", side=key),
            )
        unused = history.latest(OUTSIDE, self.idle)
        if unused and all(value == 0 for value in values(unused)):
            return Alarm(
                "note",
                unused[0][0],
                f"the clip never binds: no ratio left the band in {self.idle} steps",
                evidence,
                *remedy("clip-fraction.idle"),
            )
        return None
