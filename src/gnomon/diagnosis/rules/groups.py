"""Rules about degenerate groups and steps without a gradient."""

from dataclasses import dataclass
from typing import ClassVar

from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History, is_learning, is_rising, mean
from gnomon.diagnosis.rule import Alarm, graded, one_a_prompt, percent, remedy

DEGENERATE = "rollout/degenerate_group_fraction"
ALL_RIGHT, ALL_WRONG = "rollout/all_equal_best_fraction", "rollout/all_equal_zero_fraction"
EXPECTED_RIGHT, EXPECTED_WRONG = "rollout/all_right_expected_fraction", "rollout/all_wrong_expected_fraction"
TAUGHT_NOTHING = "advantage/exact_zero_fraction"


@dataclass(frozen=True)
class DegenerateGroups:
    """Groups with equal rewards, from which a group baseline gets no gradient.

    The share is split into all right (too easy) and all wrong (too hard), and compared with the share that the prompts'
    success rates explain, E[p^G + (1 - p)^G]. A larger share means that the responses of a group depend on each other.
    Where the reward has risen, the explained share is only a note, because the policy learns from the other groups.
    While it rises, groups that are all right are none: they are what it has learned.

    Attributes:
        window: Steps.
        warning: Share.
        severe: Share.
        excess: Factor on the expected share.
        errors: Standard errors above the expected share.

    References:
        Thresholds of rldoctor 0.2.0 (.50, .75); p^G + (1 - p)^G, SPO, arXiv 2509.13232; the excess is ours, after
        rlvr-audit's idea.
    """

    name: ClassVar[str] = "degenerate-groups"
    window: int = 10
    warning: float = 0.5
    severe: float = 0.75
    excess: float = 1.25
    errors: float = 4.0

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the share of the last steps."""
        points = history.latest(DEGENERATE, self.window)
        if facts.generations < 2 or not points:
            return None
        share = mean(points)
        right, wrong = history.mean(ALL_RIGHT, self.window) or 0.0, history.mean(ALL_WRONG, self.window) or 0.0
        evidence = {"degenerate": share, "all_right": right, "all_wrong": wrong}
        expected = self._expected(history)
        said = ""
        if expected is not None:
            evidence["expected"] = expected
            said = f"; success rates alone explain {percent(expected)}"
        severity = graded(share, self.warning, self.severe)
        is_excess = expected is not None and self._is_excess(share, expected, facts)
        if severity is None and not is_excess:
            return None
        if right > wrong and not is_excess and is_rising(history, self.window):
            return None
        if severity is not None and is_learning(history, self.window):
            severity = "warning" if is_excess else "note"
        return Alarm(
            severity or "warning",
            points[0][0],
            f"{percent(share)} of groups teach nothing: {percent(right)} all right, {percent(wrong)} all wrong{said}",
            evidence,
            *remedy(f"degenerate-groups.{'alike' if is_excess else 'easy' if right > wrong else 'hard'}"),
            one_a_prompt,
        )

    def _expected(self, history: History) -> float | None:
        right, wrong = history.mean(EXPECTED_RIGHT, self.window), history.mean(EXPECTED_WRONG, self.window)
        return None if right is None or wrong is None else right + wrong

    def _is_excess(self, share: float, expected: float, facts: Facts) -> bool:
        noise = (expected * (1 - expected) / (facts.prompts * self.window)) ** 0.5
        return share > self.excess * expected and share - expected > self.errors * noise and share > 0.1


@dataclass(frozen=True)
class AllWrong:
    """Almost no response earns a reward.

    Severe only if the reward does not rise within two windows, because an untrained model starts this way. A reward or
    an environment that has given nothing at all is told of after the first steps.

    Attributes:
        window: Steps.
        first: Steps at the start of a run in which no answer at all earned anything.
        least: Answers in these steps.
        warning: Share of groups (of responses, with one per prompt) with reward 0.
        severe: Likewise.

    References:
        Ours; 0.083 as the success rate below which a start with 8 rollouts is doubtful, arXiv 2606.18487.
    """

    name: ClassVar[str] = "all-wrong"
    window: int = 8
    first: int = 3
    least: int = 100
    warning: float = 0.9
    severe: float = 0.97

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the share of the last steps."""
        points = history.latest(ALL_WRONG, self.window)
        if not points:
            return self._from_the_start(history, facts)
        share = mean(points)
        single = 0.05 / (1 - self.warning) if facts.generations < 2 else 1.0
        severity = graded(share, 1 - single * (1 - self.warning), self.severe)
        reward = history.mean("rollout/reward_mean", self.window) or 0.0
        if severity is None or reward > 1 - self.warning:
            return None
        if severity == "severe" and reward > 0 and is_learning(history, self.window):
            severity = "warning"
        what = "groups have no right answer" if facts.generations > 1 else "answers earn nothing"
        return Alarm(
            severity,
            points[0][0],
            f"{percent(share)} of {what}; the mean reward of the last {self.window} steps is {reward:.3g}",
            {"all_wrong": share, "reward": reward},
            *remedy(self.name),
            one_a_prompt,
        )

    def _from_the_start(self, history: History, facts: Facts) -> Alarm | None:
        """Look at the first steps alone."""
        began = history.first(ALL_WRONG, self.window)
        answers = facts.prompts * facts.generations * len(began)
        earned = [*(1 - value for _, value in began), *(value for _, value in history.rewards)]
        if len(began) < self.first or answers < self.least or any(earned):
            return None
        return Alarm(
            "warning",
            began[0][0],
            f"not one of {answers:,} answers has earned anything in the first {len(began)} steps",
            {"all_wrong": 1.0, "reward": 0.0},
            *remedy("all-wrong.start"),
            one_a_prompt,
        )


@dataclass(frozen=True)
class AllRight:
    """Almost every response is right, so little is left to learn.

    Severe if the run began this way, because all of it was wasted. Later it is a note: the run is done.

    Attributes:
        window: Steps.
        share: Of groups (of responses, with one per prompt) with reward 1.

    References:
        Ours; the split of rldoctor 0.2.0.
    """

    name: ClassVar[str] = "all-right"
    window: int = 8
    share: float = 0.95

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Check the last steps and the first steps."""
        points = history.latest(ALL_RIGHT, self.window)
        if not points or mean(points) < self.share:
            return None
        began = mean(history.first(ALL_RIGHT, self.window))
        is_from_start = began >= self.share
        return Alarm(
            "severe" if is_from_start else "note",
            points[0][0],
            f"{percent(mean(points))} of prompts are answered right every time"
            + (f", as from the first steps on ({percent(began)})" if is_from_start else "; it was learned in this run"),
            {"all_right": mean(points), "all_right_at_first": began},
            *remedy(self.name if is_from_start else "all-right.learned"),
            one_a_prompt,
        )


@dataclass(frozen=True)
class ZeroGradient:
    """Steps without any effect, because no response had an advantage.

    Attributes:
        window: Steps.
        warning: Share of steps with a gradient of exactly 0.
        severe: Likewise.

    References:
        rldoctor 0.2.0 (.40, .70).
    """

    name: ClassVar[str] = "zero-gradient"
    window: int = 10
    warning: float = 0.4
    severe: float = 0.7

    def __call__(self, history: History, facts: Facts) -> Alarm | None:
        """Count the steps of the window with gradient 0."""
        points = history.latest("learner/gradient_norm", self.window)
        if not points:
            return None
        share = sum(value == 0 for _, value in points) / len(points)
        severity = graded(share, self.warning, self.severe)
        if severity is None:
            return None
        idle = history.mean(TAUGHT_NOTHING, self.window)
        return Alarm(
            severity,
            points[0][0],
            f"{percent(share)} of the last {self.window} steps had a gradient of exactly 0",
            {"zero_steps": share} | ({} if idle is None else {"answers_without_advantage": idle}),
            *remedy(self.name),
            one_a_prompt,
        )
