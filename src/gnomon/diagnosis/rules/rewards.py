"""Rules about rewards: components, errors, and trends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gnomon.core.types import Group
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, Point, error, has_risen, mean, values
from gnomon.diagnosis.rule import Alarm, Shown, everybody, graded, one_a_prompt, percent, remedy

ERRORS, ENTROPY = "rollout/error_fraction", "loss/entropy_nats"


@dataclass(frozen=True)
class DominantPart:
    """A component of the reward, other than the first, decides almost all of it.

    The share of a component is weight * Cov(component, reward) / Var(reward), among responses to the same prompt if a
    prompt has several, which is what advantages depend on. Shares add up to 1. The first component counts as the main
    objective.

    Attributes:
        window: Steps.
        warning: Share.
        severe: Share.

    References:
        rldoctor 0.2.0 (.70, .90).
    """

    name: ClassVar[str] = "dominant-part"
    window: int = 8
    warning: float = 0.7
    severe: float = 0.9

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the largest share, without the first component."""
        paid = {name: weight for name, weight in facts.weights.items() if weight}
        shares = {
            name: weight * share
            for name, weight in paid.items()
            if (share := history.mean(f"reward/{name}_leverage", self.window)) is not None
        }
        first = next(iter(facts.weights), "")
        others = {name: share for name, share in shares.items() if name != first}
        if len(paid) < 2 or not others:
            return None
        largest = max(others, key=lambda name: others[name])
        severity = graded(others[largest], self.warning, self.severe)
        solved = history.mean(f"reward/{first}_mean", self.window) or 0.0
        if severity is None or solved >= 0.95:
            return None
        points = history.latest(f"reward/{largest}_leverage", self.window)
        return Alarm(
            severity,
            points[0][0],
            f"'{largest}' decides {percent(others[largest])} of what rewards differ by, '{first}' "
            f"{percent(max(0.0, shares.get(first, 0.0)))} (its mean is {solved:.3g})",
            {f"{name}_share": share for name, share in shares.items()} | {f"{first}_mean": solved},
            *remedy(self.name, largest=largest, first=first),
            everybody,
        )


@dataclass(frozen=True)
class ConstantPart:
    """A component of the reward that is the same for every response and so teaches nothing.

    Attributes:
        window: Steps. A component that is constantly 1 is a note, because it may have been learned.

    References:
        rldoctor 0.2.0 (reward composition).
    """

    name: ClassVar[str] = "constant-part"
    window: int = 15

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Find components without variance."""
        constant: dict[str, float] = {}
        since = 0
        for name, weight in facts.weights.items():
            spread = history.latest(f"reward/{name}_std", self.window)
            level = history.latest(f"reward/{name}_mean", self.window)
            is_same = bool(level) and max(values(level)) - min(values(level)) < 1e-9
            if weight and spread and is_same and all(value < 1e-9 for value in values(spread)):
                constant[name], since = mean(level), spread[0][0]
        if not constant:
            return None
        said = ", ".join(f"'{name}' is {value:.3g}" for name, value in constant.items())
        return Alarm(
            "note" if all(value == 1 for value in constant.values()) else "warning",
            since,
            f"{said} for every answer of the last {self.window} steps",
            {f"{name}_mean": value for name, value in constant.items()},
            *remedy(self.name),
            one_a_prompt,
        )


@dataclass(frozen=True)
class FormIgnored:
    """All responses with the right form get the same reward, although the responses differ.

    Forms are the usual marks of an answer: the end of a thought, ``<answer>``, a box, ``####``, a fenced program. A
    reward that does not find the mark, or does not read its content, grades all of them alike.

    Attributes:
        window: Steps.
        least: Share of responses with a mark. A constant reward of 1 is a note, because it may have been learned.

    References:
        Ours; huggingface/trl#2897 and #6966.
    """

    name: ClassVar[str] = "form-unseen"
    window: int = 8
    least: float = 0.3

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Find marked responses whose rewards do not differ within or between steps."""
        share = history.mean("rollout/marked_fraction", self.window)
        level = history.latest("rollout/marked_reward_mean", self.window)
        spread = history.latest("rollout/marked_reward_std", self.window)
        if share is None or share < self.least or not level or not spread:
            return None
        if max(values(spread)) > 1e-9 or max(values(level)) - min(values(level)) > 1e-9:
            return None
        return Alarm(
            "note" if mean(level) == 1 else "warning",
            level[0][0],
            f"every answer of the right form ({percent(share)} of all) earned {mean(level):.3g} in the last "
            f"{self.window} steps, whatever it says",
            {"marked": share, "reward": mean(level)},
            *remedy(self.name),
            one_a_prompt,
        )


@dataclass(frozen=True)
class VerifierErrors:
    """Responses that could not be graded.

    An error is not a zero reward and trains nothing, but groups become smaller, and errors are seldom random.

    Attributes:
        window: Steps.
        warning: Share.
        severe: Share.

    References:
        The share that ends a run is ``grading.max_error_fraction`` (.2); severe is half of it.
    """

    name: ClassVar[str] = "verifier-errors"
    window: int = 8
    warning: float = 0.01
    severe: float = 0.1

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the share of the last steps."""
        points = history.latest(ERRORS, self.window)
        severity = graded(mean(points), self.warning, self.severe) if points else None
        if severity is None:
            return None
        steps = sum(value > 0 for value in values(points))
        return Alarm(
            severity,
            next(step for step, value in points if value > 0),
            f"{percent(mean(points))} of answers could not be judged, in {steps} of the last {self.window} steps",
            {"errors": mean(points), "steps_with_errors": steps},
            *remedy(self.name),
            _failed,
        )


@dataclass(frozen=True)
class RewardFalls:
    """The reward has been higher before.

    The mean of the last window is lower than that of the best window by ``share`` of it and by more than ``errors``
    standard errors of both. Or at most ``dead`` of the best single step's reward is left, if that reward was ``least``
    or more: one update that is too large can end a run.

    Attributes:
        window: Steps.

    References:
        Ours; plateau and collapse of rldoctor 0.2.0.
    """

    name: ClassVar[str] = "reward-falls"
    window: int = 8
    share: float = 0.4
    errors: float = 3.0
    dead: float = 0.05
    least: float = 0.2

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare with the best window and with the best step so far."""
        last = history.rewards[-self.window :]
        if len(history.rewards) <= self.window:
            return None
        best = self._window(history, last) or self._step(history.peak, last)
        if not best:
            return None
        steps = f"step {best[0][0]}" if len(best) == 1 else f"steps {best[0][0]} to {best[-1][0]}"
        return Alarm(
            "severe",
            last[0][0],
            f"the reward fell from {mean(best):.3g} ({steps}) to {mean(last):.3g}",
            {"reward": mean(last), "best": mean(best)},
            *remedy(self.name, step=best[-1][0]),
            one_a_prompt,
        )

    def _window(self, history: History, last: list[Point]) -> list[Point]:
        """Return the best window if the last window is far below it."""
        best = history.best_rewards(self.window)
        fallen = mean(best) - mean(last)
        noise = (error(best) ** 2 + error(last) ** 2) ** 0.5
        is_far = mean(best) > 0 and fallen >= max(self.share * mean(best), self.errors * noise)
        return best if is_far else []

    def _step(self, peak: Point | None, last: list[Point]) -> list[Point]:
        is_dead = peak is not None and peak[1] >= self.least and mean(last) <= self.dead * peak[1]
        return [peak] if peak is not None and is_dead else []


@dataclass(frozen=True)
class NotLearning:
    """The reward does not rise, and most responses have no advantage.

    Attributes:
        least: Steps before the first finding.
        idle: Share of responses without an advantage.
        solved: Mean reward above which the rule is silent.

    References:
        Ours; plateau of rldoctor 0.2.0.
    """

    name: ClassVar[str] = "not-learning"
    least: int = 24
    idle: float = 0.5
    solved: float = 0.9

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare the first and the last third of the run."""
        points = history.rewards
        if len(points) < self.least:
            return None
        third = min(len(points) // 3, 50)
        first, last = points[:third], points[-third:]
        idle = history.mean("advantage/exact_zero_fraction", 10)
        if mean(last) >= self.solved or idle is None or idle < self.idle or has_risen(first, last):
            return None
        return Alarm(
            "warning",
            first[0][0],
            f"the reward has not risen: {mean(first):.3g} in the first {third} steps, {mean(last):.3g} in the last; "
            f"{percent(idle)} of answers have no advantage",
            {"reward": mean(last), "at_first": mean(first), "answers_without_advantage": idle},
            *remedy(self.name),
            one_a_prompt,
        )


@dataclass(frozen=True)
class NothingMoves:
    """Neither reward nor entropy has changed since the start, although responses have advantages.

    Attributes:
        least: Steps before the first finding.
        errors: Standard errors that count as no change.
        change: Share of the entropy that counts as no change.
        idle: Share of responses without an advantage, above which `NotLearning` applies.

    References:
        Ours.
    """

    name: ClassVar[str] = "nothing-moves"
    least: int = 30
    errors: float = 2.0
    change: float = 0.1
    idle: float = 0.5

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Compare the first and the last third of the run, at most 40 steps each."""
        third = min(len(history.rewards) // 3, 40)
        idle = history.mean("advantage/exact_zero_fraction", 10)
        now, before = history.latest(ENTROPY, third), history.first(ENTROPY, third)
        if len(history.rewards) < self.least or not now or not before or idle is None or idle >= self.idle:
            return None
        first, last = history.rewards[:third], history.rewards[-third:]
        moved = abs(mean(now) - mean(before))
        is_other = moved > self.errors * math.hypot(error(now), error(before)) or moved > self.change * mean(before)
        if is_other or has_risen(first, last, self.errors) or has_risen(last, first, self.errors):
            return None
        return Alarm(
            "warning",
            first[0][0],
            f"nothing moves: the reward went from {mean(first):.3g} to {mean(last):.3g} and the entropy from "
            f"{mean(before):.3g} to {mean(now):.3g} nats in {history.step} steps, both within noise",
            {"reward": mean(last), "reward_at_first": mean(first), "entropy_nats": mean(now)},
            *remedy(self.name),
        )


def _failed(groups: Sequence[Group]) -> Shown:
    return [shown for shown in everybody(groups) if shown[1].grade.error is not None]
