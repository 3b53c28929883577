"""Rules about rewards: components, errors and trends, groups without a difference, and the answers' texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gnomon.core.types import OVERLONG, Group
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.finding import Severity
from gnomon.diagnosis.history import History, Point, error, has_risen, is_learning, is_rising, mean, values
from gnomon.diagnosis.rule import Alarm, Shown, alarm, graded, one_a_prompt, percent, select_all
from gnomon.diagnosis.text_metrics import repetition
from gnomon.rewards.judge import MEASURES

ERRORS, ENTROPY = "rollout/error_fraction", "loss/entropy_nats"


@dataclass(frozen=True)
class DominantPart:
    """A component of the reward, other than the first, decides almost all of it.

    The share of a component is weight * Cov(component, reward) / Var(reward), among responses to the same prompt if a
    prompt has several, which is what advantages depend on. Shares add up to 1. The first component counts as the main
    objective. The algorithm's penalty for long responses is a component of weight 1, the last.

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
        measured = [name[len("reward/") : -len("_leverage")] for name in history.names("reward/", "_leverage")]
        # A generator's or an environment's own reward is in no table; beside the penalty it is the only one that is
        # sure to be paid.
        own = [name for name in measured if name != OVERLONG]
        weights = facts.weights or (dict.fromkeys(own, 1.0) if len(own) == 1 else {})
        # Parts of weight 0 are measured and decide nothing.
        paid = {name: weight for name, weight in weights.items() if weight}
        paid |= {OVERLONG: 1.0} if OVERLONG in measured else {}
        shares = {
            name: weight * share
            for name, weight in paid.items()
            if (share := history.mean(f"reward/{name}_leverage", self.window)) is not None
        }
        first = next(iter(weights), "")
        others = {name: share for name, share in shares.items() if name != first}
        if len(paid) < 2 or not others:
            return None
        largest = max(others, key=lambda name: others[name])
        severity = graded(others[largest], self.warning, self.severe)
        solved = history.mean(f"reward/{first}_mean", self.window) or 0.0
        # Where the main objective is solved, something else must decide.
        if severity is None or solved >= 0.95:
            return None
        since = history.latest(f"reward/{largest}_leverage", self.window)[0][0]
        evidence = {f"{name}_share": share for name, share in shares.items()} | {f"{first}_mean": solved}
        parts = {"most": others[largest], "rest": max(0.0, shares.get(first, 0.0)), "solved": solved}
        key = "dominant-part.overlong" if largest == OVERLONG else self.name
        return alarm(severity, since, key, evidence, select_all, largest=largest, first=first, **parts)


@dataclass(frozen=True)
class ConstantPart:
    """A component of the reward that is the same for every response and so teaches nothing.

    Components are those that were measured: a task's own reward is in no table. A penalty for long responses that
    nothing earned is as it should be, and what is measured beside a judge's grade (its cost) is no component.

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
        measured = [name[len("reward/") : -len("_std")] for name in history.names("reward/", "_std")]
        unpaid = {part + measure for part in measured for measure in MEASURES}
        for name in dict.fromkeys((*facts.weights, *measured)):
            spread = history.latest(f"reward/{name}_std", self.window)
            level = history.latest(f"reward/{name}_mean", self.window)
            is_same = bool(level) and max(values(level)) - min(values(level)) < 1e-9
            is_idle = name == OVERLONG and mean(level) == 0
            if (
                facts.weights.get(name, 0.0 if name in unpaid else 1.0)
                and spread
                and is_same
                and not is_idle
                and all(value < 1e-9 for value in values(spread))
            ):
                constant[name], since = mean(level), spread[0][0]
        if not constant:
            return None
        said = ", ".join(f"'{name}' is {value:.3g}" for name, value in constant.items())
        evidence = {f"{name}_mean": value for name, value in constant.items()}
        severity: Severity = "note" if all(value == 1 for value in constant.values()) else "warning"
        return alarm(severity, since, self.name, evidence, one_a_prompt, said=said, window=self.window)


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
        severity: Severity = "note" if mean(level) == 1 else "warning"
        evidence = {"marked": share, "reward": mean(level)}
        return alarm(severity, level[0][0], self.name, evidence, one_a_prompt, window=self.window)


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
        failed = [step for step, value in points if value > 0]
        evidence = {"errors": mean(points), "steps_with_errors": len(failed)}
        return alarm(severity, failed[0], self.name, evidence, _failed, window=self.window)


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
        evidence = {"reward": mean(last), "best": mean(best)}
        return alarm("severe", last[0][0], self.name, evidence, one_a_prompt, step=best[-1][0], steps=steps)

    def _window(self, history: History, last: list[Point]) -> list[Point]:
        """Return the best window if the last window is far below it."""
        best = history.best_rewards(self.window)
        fallen = mean(best) - mean(last)
        # Of independent steps; the best window was chosen as the best, hence 3 errors and not 2.
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
        # At most 50 steps, so that a late stop of learning in a long run is seen.
        third = min(len(points) // 3, 50)
        first, last = points[:third], points[-third:]
        idle = history.mean("advantage/exact_zero_fraction", 10)
        if mean(last) >= self.solved or idle is None or idle < self.idle or has_risen(first, last):
            return None
        evidence = {"reward": mean(last), "at_first": mean(first), "answers_without_advantage": idle}
        return alarm("warning", first[0][0], self.name, evidence, one_a_prompt, third=third)


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
        # Either beyond noise, or by a tenth of the entropy, counts as movement.
        is_other = moved > self.errors * math.hypot(error(now), error(before)) or moved > self.change * mean(before)
        if is_other or has_risen(first, last, self.errors) or has_risen(last, first, self.errors):
            return None
        evidence = {"reward": mean(last), "reward_at_first": mean(first), "entropy_nats": mean(now)}
        return alarm("warning", first[0][0], self.name, evidence, before=mean(before), step=history.step)


def _failed(groups: Sequence[Group]) -> Shown:
    return [shown for shown in select_all(groups) if shown[1].grade.error is not None]


# Rules about degenerate groups and steps without a gradient.

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
        key = f"degenerate-groups.{'alike' if is_excess else 'easy' if right > wrong else 'hard'}"
        return alarm(severity or "warning", points[0][0], key, evidence, one_a_prompt, said=said)

    def _expected(self, history: History) -> float | None:
        right, wrong = history.mean(EXPECTED_RIGHT, self.window), history.mean(EXPECTED_WRONG, self.window)
        return None if right is None or wrong is None else right + wrong

    def _is_excess(self, share: float, expected: float, facts: Facts) -> bool:
        # Standard error of a share over all groups of the window.
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
        # With one answer a prompt most prompts may be unsolved in a healthy run, so the bound is 95% and not 90%.
        single = 0.05 / (1 - self.warning) if facts.generations < 2 else 1.0
        severity = graded(share, 1 - single * (1 - self.warning), self.severe)
        reward = history.mean("rollout/reward_mean", self.window) or 0.0
        if severity is None or reward > 1 - self.warning:
            return None
        if severity == "severe" and reward > 0 and is_learning(history, self.window):
            severity = "warning"
        what = "groups have no right answer" if facts.generations > 1 else "answers earn nothing"
        evidence = {"all_wrong": share, "reward": reward}
        return alarm(severity, points[0][0], self.name, evidence, one_a_prompt, what=what, window=self.window)

    def _from_the_start(self, history: History, facts: Facts) -> Alarm | None:
        """Look at the first steps alone."""
        began = history.first(ALL_WRONG, self.window)
        answers = facts.prompts * facts.generations * len(began)
        # Any reward in any step ends this special case.
        earned = [*(1 - value for _, value in began), *(value for _, value in history.rewards)]
        if len(began) < self.first or answers < self.least or any(earned):
            return None
        evidence, counts = {"all_wrong": 1.0, "reward": 0.0}, {"answers": answers, "steps": len(began)}
        return alarm("warning", began[0][0], "all-wrong.start", evidence, one_a_prompt, **counts)


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
        evidence = {"all_right": mean(points), "all_right_at_first": began}
        severity: Severity = "severe" if began >= self.share else "note"
        key = self.name if severity == "severe" else "all-right.learned"
        return alarm(severity, points[0][0], key, evidence, one_a_prompt)


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
        evidence = {"zero_steps": share} | ({} if idle is None else {"answers_without_advantage": idle})
        return alarm(severity, points[0][0], self.name, evidence, one_a_prompt, window=self.window)


# Rules about the responses: length, repetition, copies and truncation.

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
        # Growth and correlation together, or a correlation that nothing else explains.
        is_longer = goes_with >= self.correlation and (times >= self.growth or goes_with >= self.alone)
        is_shorter = goes_with <= -self.correlation and (times <= 1 / self.growth or goes_with <= -self.alone)
        if not (is_longer or is_shorter):
            return None
        cut = history.mean(TRUNCATED, self.window) or 0.0
        began_cut = mean(history.first(TRUNCATED, self.baseline))
        is_severe = abs(goes_with) >= self.alone or (is_longer and cut >= began_cut + self.truncated)
        what = "longer" if is_longer else "shorter"
        said = {"correlation": goes_with, "length_tokens": now, "at_first_tokens": began, "truncated": cut}
        severity: Severity = "severe" if is_severe else "warning"
        pick = _longest if is_longer else _shortest
        return alarm(severity, points[0][0], f"length-reward.{what}", said, pick, what=what)


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
        # 2.0 is a share that cannot be reached: without complete answers to compare with it is never severe.
        severity = graded(share, self.warning, self.severe if lost is not None else 2.0) or "note"
        if lost is None and is_learning(history, self.progress):
            severity = "note"
        said = f"; they earn {cut:.3g}, complete ones {complete:.3g}" if lost is not None else ""
        return alarm(
            severity,
            points[0][0],
            self.name,
            evidence,
            _truncated,
            budget=facts.budget,
            most=facts.budget or "the",
            said=said,
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
        # A model that repeated itself from the start has not become worse.
        if severity == "severe" and now < began + self.more:
            severity = "warning"
        return alarm(severity, points[0][0], self.name, {"repeated": now, "at_first": began}, _repetitive)


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
        return alarm(severity, points[0][0], self.name, {"copies": share, "chance": expected}, _copies)


def _longest(groups: Sequence[Group]) -> Shown:
    return sorted(select_all(groups), key=lambda shown: -len(shown[1].response))


def _shortest(groups: Sequence[Group]) -> Shown:
    return sorted(select_all(groups), key=lambda shown: len(shown[1].response))


def _truncated(groups: Sequence[Group]) -> Shown:
    return [shown for shown in select_all(groups) if shown[1].is_truncated]


def _repetitive(groups: Sequence[Group]) -> Shown:
    return sorted(select_all(groups), key=lambda shown: -(repetition(shown[1]) or 0.0))


def _copies(groups: Sequence[Group]) -> Shown:
    found = []
    for group in groups:
        responses = [rollout.response for rollout in group.rollouts]
        twice = [rollout for rollout in group.rollouts if responses.count(rollout.response) > 1]
        found += [(group, rollout) for rollout in twice[:2]]
    return found
