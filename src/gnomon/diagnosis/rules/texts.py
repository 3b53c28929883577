"""Rules about the responses: length, repetition, copies and truncation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gnomon.core.types import Group
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, is_learning, mean
from gnomon.diagnosis.rule import Alarm, Shown, everybody, graded, percent, remedy
from gnomon.diagnosis.text_metrics import repetition

LENGTH, CORRELATION = "rollout/length_tokens_mean", "rollout/length_reward_correlation"
TRUNCATED = "rollout/truncated_fraction"
REPEATED = "rollout/repetition_fraction"
COPIES, EXPECTED = "rollout/duplicate_pair_fraction", "rollout/duplicate_pair_expected_fraction"


@dataclass(frozen=True)
class LengthReward:
    """Responses become longer (or shorter), and the reward depends on their length.

    The correlation is among responses to the same prompt if a prompt has several. Severe if the rank correlation is
    nearly 1, or if the growth ends at the length limit.

    Attributes:
        baseline: Steps.
        window: Steps.
        growth: Factor on the mean length.
        correlation: Rank correlation.
        alone: Rank correlation that leaves no other explanation.
        truncated: Share of truncated responses.

    References:
        rldoctor 0.2.0 (+50%, 0.6, truncation .15); alone is ours.
    """

    name: ClassVar[str] = "length-reward"
    baseline: int = 5
    window: int = 6
    growth: float = 1.5
    correlation: float = 0.6
    alone: float = 0.9
    truncated: float = 0.15

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare lengths with the first steps, and rewards with lengths."""
        points, paid = history.latest(LENGTH, self.window), history.latest(CORRELATION, self.window)
        began = mean(history.first(LENGTH, self.baseline))
        if not points or not paid or began <= 0 or history.steps < self.baseline + self.window:
            return None
        now, goes_with = mean(points), mean(paid)
        times = now / began
        is_longer = goes_with >= self.correlation and (times >= self.growth or goes_with >= self.alone)
        is_shorter = goes_with <= -self.correlation and (times <= 1 / self.growth or goes_with <= -self.alone)
        if not (is_longer or is_shorter):
            return None
        cut = history.mean(TRUNCATED, self.window) or 0.0
        began_cut = mean(history.first(TRUNCATED, self.baseline))
        is_severe = abs(goes_with) >= self.alone or (is_longer and cut >= began_cut + self.truncated)
        what = "longer" if is_longer else "shorter"
        return Alarm(
            "severe" if is_severe else "warning",
            points[0][0],
            f"{what} answers earn more (rank correlation {goes_with:.2f}); the mean length went from {began:.1f} to "
            f"{now:.1f} tokens",
            {"correlation": goes_with, "length_tokens": now, "at_first_tokens": began, "truncated": cut},
            *remedy(f"length-reward.{what}"),
            _longest if is_longer else _shortest,
        )


@dataclass(frozen=True)
class Truncation:
    """Responses that the length limit cut off, if truncation costs reward.

    Truncation is read from the stop reason of a response, never from a tensor's width. Truncated responses that earn as
    much as others are no problem.

    Attributes:
        window: Steps.
        note: Share.
        warning: Share.
        severe: Share.
        cost: Lost reward of truncated responses, in standard deviations of the reward.
        few: Share of complete responses below which there is no comparison: at most a warning, and a note if the reward
            has risen over ``progress`` steps, because truncated responses earn rewards then.
        progress: Steps.

    References:
        rldoctor 0.2.0 (.05, .15), rlprobe 0.1.0 (.5: starved); verl#7817; the cost is ours.
    """

    name: ClassVar[str] = "truncation"
    window: int = 5
    note: float = 0.05
    warning: float = 0.15
    severe: float = 0.5
    cost: float = 0.25
    few: float = 0.05
    progress: int = 10

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the share, and the rewards of truncated and complete responses."""
        points = history.latest(TRUNCATED, self.window)
        if not points or mean(points) < self.note:
            return None
        share = mean(points)
        complete = history.mean("rollout/complete_reward_mean", self.window)
        cut = history.mean("rollout/truncated_reward_mean", self.window)
        deviation = history.mean("rollout/reward_std", self.window) or 0.0
        evidence = {"truncated": share}
        lost = None
        if complete is not None and cut is not None and share <= 1 - self.few:
            lost = complete - cut
            evidence |= {"complete_reward": complete, "truncated_reward": cut}
        if lost is not None and lost <= self.cost * deviation:
            return None
        severity = graded(share, self.warning, self.severe if lost is not None else 2.0) or "note"
        if lost is None and is_learning(history, self.progress):
            severity = "note"
        said = f"; they earn {cut:.3g}, complete ones {complete:.3g}" if lost is not None else ""
        return Alarm(
            severity,
            points[0][0],
            f"{percent(share)} of answers are cut off at {facts.budget or 'the'} tokens{said}",
            evidence,
            *remedy(self.name, budget=facts.budget),
            _truncated,
        )


@dataclass(frozen=True)
class Repetition:
    """Responses that repeat themselves: the share of 4-grams that occurred before in the same response.

    Attributes:
        baseline: Steps.
        window: Steps.
        warning: Share.
        severe: Share.
        times: Factor on the baseline.
        more: Difference from the baseline.

    References:
        rlprobe 0.1.0 (.15 rising, .30).
    """

    name: ClassVar[str] = "repetition"
    baseline: int = 5
    window: int = 5
    warning: float = 0.15
    severe: float = 0.3
    times: float = 1.5
    more: float = 0.15

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare with the first steps."""
        points, began = history.latest(REPEATED, self.window), mean(history.first(REPEATED, self.baseline))
        if not points or history.steps < self.baseline + self.window:
            return None
        now = mean(points)
        severity = graded(now, self.warning, self.severe)
        if severity is None or now < self.times * began:
            return None
        if severity == "severe" and now < began + self.more:
            severity = "warning"
        return Alarm(
            severity,
            points[0][0],
            f"{percent(now)} of runs of four tokens are repeated within an answer, {percent(began)} at first",
            {"repeated": now, "at_first": began},
            *remedy(self.name),
            _repetitive,
        )


@dataclass(frozen=True)
class Duplicates:
    """Identical responses in a group, more often than by chance.

    The chance is known: two independent draws are equal with probability E[p(response)], which the responses' own
    log-probabilities estimate. A certain policy repeats itself legitimately; an engine that draws twice alike does not.

    Attributes:
        window: Steps.
        warning: Share of pairs beyond chance.
        severe: Share of pairs beyond chance.

    References:
        After an idea of rlvr-audit; the estimate of chance is ours.
    """

    name: ClassVar[str] = "duplicate-rollouts"
    window: int = 5
    warning: float = 0.1
    severe: float = 0.5

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare copies with chance."""
        points, expected = history.latest(COPIES, self.window), history.mean(EXPECTED, self.window)
        if not points or expected is None:
            return None
        share = mean(points)
        severity = graded(share - expected, self.warning, self.severe)
        if severity is None:
            return None
        return Alarm(
            severity,
            points[0][0],
            f"{percent(share)} of pairs of answers to one prompt are the same tokens, where chance makes "
            f"{percent(expected)}",
            {"copies": share, "chance": expected},
            *remedy(self.name),
            _copies,
        )


def _longest(groups: Sequence[Group]) -> Shown:
    return sorted(everybody(groups), key=lambda shown: -len(shown[1].response))


def _shortest(groups: Sequence[Group]) -> Shown:
    return sorted(everybody(groups), key=lambda shown: len(shown[1].response))


def _truncated(groups: Sequence[Group]) -> Shown:
    return [shown for shown in everybody(groups) if shown[1].is_truncated]


def _repetitive(groups: Sequence[Group]) -> Shown:
    return sorted(everybody(groups), key=lambda shown: -(repetition(shown[1]) or 0.0))


def _copies(groups: Sequence[Group]) -> Shown:
    found = []
    for group in groups:
        responses = [rollout.response for rollout in group.rollouts]
        twice = [rollout for rollout in group.rollouts if responses.count(rollout.response) > 1]
        found += [(group, rollout) for rollout in twice[:2]]
    return found
