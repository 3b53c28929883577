"""Each rule on numbers for which what it should say can be worked out; runs in which it happened are in `test_runs`."""

import math
from collections.abc import Sequence

import pytest
from tests.diagnosis.rows import history

from gnomon.core.errors import ConfigError
from gnomon.diagnosis.catalog import RULES, chosen
from gnomon.diagnosis.facts import Facts
from gnomon.diagnosis.history import History
from gnomon.diagnosis.rule import Alarm
from gnomon.diagnosis.rules.policy import (
    Clipping,
    CriticExplains,
    EffectiveSampleSize,
    EngineMismatch,
    EntropyCollapse,
    GradientNorm,
    HeldOutGap,
    HeldOutLoss,
    RefusedSteps,
    Throughput,
    TrackerStarves,
    WeightsNotArrived,
)
from gnomon.diagnosis.rules.rewards import (
    AllRight,
    AllWrong,
    ConstantPart,
    DegenerateGroups,
    DominantPart,
    Duplicates,
    FormIgnored,
    LengthReward,
    NothingMoves,
    NotLearning,
    Repetition,
    RewardFalls,
    Truncation,
    VerifierErrors,
    ZeroGradient,
)

FACTS = Facts(steps=100, generations=8, prompts=8)


def severity(alarm: Alarm | None) -> str | None:
    return None if alarm is None else alarm.severity


def degenerate(share: float, expected: float, rewards: list[float]) -> History:
    return history(
        rollout__degenerate_group_fraction=[share] * len(rewards),
        rollout__all_equal_best_fraction=0.25 * share,
        rollout__all_equal_zero_fraction=0.75 * share,
        rollout__all_right_expected_fraction=expected / 2,
        rollout__all_wrong_expected_fraction=expected / 2,
        rollout__reward_mean=rewards,
    )


def test_degenerate_groups_are_split_and_held_against_what_is_expected():
    """80% of groups, a quarter of them all right: 20% and 60%; 70% are expected, so the prompts are hard."""
    found = DegenerateGroups()(degenerate(0.8, 0.7, [0.3] * 20), FACTS)

    assert found is not None
    assert found.severity == "severe"
    assert found.evidence == pytest.approx({"degenerate": 0.8, "all_right": 0.2, "all_wrong": 0.6, "expected": 0.7})
    assert "20% all right, 60% all wrong; success rates alone explain 70%" in found.summary
    assert "too hard" in found.meaning


def test_degenerate_groups_of_a_policy_that_learns_are_a_note():
    """The same shares with a reward that rose from .1 to .3 are explained, so no fault; with one that stays half of all
    are a warning, .4 nothing. What success rates do not explain stays a warning whether it learns or not.
    """
    assert severity(DegenerateGroups()(degenerate(0.8, 0.7, [0.1] * 10 + [0.3] * 10), FACTS)) == "note"
    assert severity(DegenerateGroups()(degenerate(0.8, 0.3, [0.1] * 10 + [0.3] * 10), FACTS)) == "warning"
    assert severity(DegenerateGroups()(degenerate(0.5, 0.45, [0.3] * 20), FACTS)) == "warning"
    assert DegenerateGroups()(degenerate(0.4, 0.38, [0.3] * 20), FACTS) is None
    assert DegenerateGroups()(degenerate(0.8, 0.7, [0.3] * 20), Facts(generations=1)) is None


def test_more_degenerate_groups_than_rates_explain_is_a_finding_of_its_own():
    """40% where 10% are expected: of 80 groups the error is sqrt(.1 * .9 / 80) = .034, and .3 is nine of them."""
    found = DegenerateGroups()(degenerate(0.4, 0.1, [0.3] * 20), FACTS)

    assert severity(found) == "warning"
    assert found is not None
    assert "agree more often" in found.meaning


def test_all_wrong():
    """Severe at 97% of groups without a right answer, or with a reward of exactly 0; 90% is a warning, 85% none."""

    def at(share: float, reward: float, facts: Facts = FACTS) -> str | None:
        columns = {"rollout__all_equal_zero_fraction": [share] * 20, "rollout__reward_mean": reward}
        return severity(AllWrong()(history(**columns), facts))

    assert at(1.0, 0.0) == "severe"
    assert at(0.98, 0.004) == "severe"
    assert at(0.92, 0.01) == "warning"
    assert at(0.85, 0.02) is None
    assert at(0.96, 0.04, Facts(generations=1)) == "warning"
    assert at(0.93, 0.07, Facts(generations=1)) is None


@pytest.mark.parametrize(
    ("wrong", "rewards", "prompts", "found"),
    [
        ([1.0] * 3, [0.0] * 3, 16, "warning"),
        ([1.0] * 7, [0.0] * 7, 16, "warning"),
        ([1.0] * 2, [0.0] * 2, 16, None),
        ([1.0, 1.0, 0.9], [0.0, 0.0, 0.01], 16, None),
        ([1.0] * 3, [0.0, 0.0, -0.1], 16, None),
        ([1.0] * 3, [0.0] * 3, 2, None),
        ([1.0] * 8, [0.0] * 8, 16, "severe"),
    ],
)
def test_a_reward_that_never_gives_is_told_of_after_three_steps(
    wrong: list[float], rewards: list[float], prompts: int, found: str | None
):
    """Of a hundred answers at least; a run that is too short for the window ends with a word."""
    begun = history(rollout__all_equal_zero_fraction=wrong, rollout__reward_mean=rewards)

    assert severity(AllWrong()(begun, Facts(generations=8, prompts=prompts))) == found


def test_all_right_from_the_start_is_severe_and_later_a_note():
    """A run that begins with 100% of groups all right was for nothing; one that gets there is done."""
    began = history(rollout__all_equal_best_fraction=[1.0] * 10)
    learned = history(rollout__all_equal_best_fraction=[0.1] * 8 + [1.0] * 8)

    assert severity(AllRight()(began, FACTS)) == "severe"
    assert severity(AllRight()(learned, FACTS)) == "note"
    assert AllRight()(history(rollout__all_equal_best_fraction=[0.9] * 10), FACTS) is None


@pytest.mark.parametrize(("zeros", "expected"), [(3, None), (4, "warning"), (7, "severe")])
def test_steps_without_a_gradient_are_counted(zeros, expected):
    """Of the last ten steps, four are a warning and seven severe."""
    steps = history(learner__gradient_norm=[1.0] * 10 + [0.0] * zeros + [1.0] * (10 - zeros))

    assert severity(ZeroGradient()(steps, FACTS)) == expected


def test_entropy_that_is_gone_without_a_better_reward_is_severe():
    """From 2 nats to 0.1, 5%: severe where the reward stays, a warning where it rose, nothing where all is solved."""
    fall = [2.0] * 10 + [0.1] * 10
    columns = {"loss__entropy_nats": fall}

    assert severity(EntropyCollapse()(history(rollout__reward_mean=[0.3] * 20, **columns), FACTS)) == "severe"
    rising = [0.1] * 10 + [0.5] * 10
    assert severity(EntropyCollapse()(history(rollout__reward_mean=rising, **columns), FACTS)) == "warning"
    solved = [0.1] * 10 + [0.95] * 10
    assert EntropyCollapse()(history(rollout__reward_mean=solved, **columns), FACTS) is None


def test_what_a_policy_that_gets_better_does_is_no_finding():
    """While the reward rises, within ten steps: entropy that falls by a tenth a step, groups that are all right, and
    spikes of the gradient norm. When it has risen and stays, the first two are notes and the third is a warning.
    """
    rises, stays = [0.1 + 0.02 * step for step in range(30)], [0.1] * 10 + [0.6] * 20
    falls = [3.0 * 0.95**step for step in range(30)]
    usual = [0.9, 1.0, 1.1] * 6 + [1.0] * 9 + [4.0] * 3
    right = {"rollout__degenerate_group_fraction": 0.7, "rollout__all_equal_best_fraction": 0.7}
    expected = {"rollout__all_right_expected_fraction": 0.65, "rollout__all_wrong_expected_fraction": 0.0}
    seen = {"loss__entropy_nats": falls, "learner__gradient_norm": usual, **right, **expected}
    rules = (EntropyCollapse(), DegenerateGroups(), GradientNorm())

    for reward, said in ((rises, [None] * 3), (stays, ["note", "note", "warning"])):
        assert [severity(rule(history(rollout__reward_mean=reward, **seen), FACTS)) for rule in rules] == said
    assert severity(DegenerateGroups()(degenerate(0.8, 0.7, rises), FACTS)) == "note"


def test_entropy_is_projected_to_the_end_of_the_run():
    """It loses 5% a step and is at 3 * .95^20 = 1.08 after 21 of 100: at that rate 3 * .95^20 * .95^79 = .019 remain.

    The last three have a mean of 3 * .95^19 = 1.13. After 24 steps it would be at 1.13 * .95^3 = .97, above a tenth of
    the first three.
    """
    columns = {"loss__entropy_nats": [3.0 * 0.95**step for step in range(21)], "rollout__reward_mean": 0.3}
    found = EntropyCollapse()(history(**columns), FACTS)

    assert severity(found) == "warning"
    assert found is not None
    assert found.evidence["log_slope_a_step"] == pytest.approx(math.log(0.95))
    assert found.evidence["projected_nats"] == pytest.approx(1.1334 * 0.95**79, rel=1e-3)
    assert EntropyCollapse()(history(**columns), Facts(steps=24)) is None


def test_spikes_of_the_gradient_norm():
    """Around a median of 1 with a MAD of .1 the limit is max(1 + 8 * .148, 3) = 3: three values of 4 are a warning."""
    usual = [0.9, 1.0, 1.1] * 8

    assert severity(GradientNorm()(history(learner__gradient_norm=[*usual, *[1.0] * 7, 4.0, 4.0, 4.0]), FACTS))
    assert GradientNorm()(history(learner__gradient_norm=[*usual, *[1.0] * 8, 4.0, 4.0]), FACTS) is None
    assert severity(GradientNorm()(history(learner__gradient_norm=[*usual, *[11.0] * 10]), FACTS)) == "severe"


BANDED = Facts(steps=100, generations=8, updates=4, has_band=True)


def clipping(
    clipped: float, outside: float, low: float, facts: Facts = BANDED, rewards: Sequence[float] = (0.3,) * 20
) -> Alarm | None:
    columns = {
        "rollout__reward_mean": rewards,
        "loss__clipped_fraction": [clipped] * 20,
        "loss__out_of_band_fraction": outside,
        "loss__clipped_low_fraction": low,
        "loss__clipped_high_fraction": clipped - low,
    }
    return Clipping()(history(**columns), facts)


def test_clipping():
    """20% of tokens are a warning, 40% severe; 70% outside of at most 75% is a band that never opens."""
    assert severity(clipping(0.1, 0.15, 0.05)) is None
    assert severity(clipping(0.25, 0.3, 0.12)) == "warning"
    assert severity(clipping(0.45, 0.5, 0.2)) == "severe"
    shut = clipping(0.3, 0.7, 0.15)
    assert severity(shut) == "severe"
    assert shut is not None
    assert "never opens" in shut.summary
    assert severity(clipping(0.45, 0.7, 0.2, rewards=[0.1] * 10 + [0.5] * 10)) == "warning"


def test_a_clip_that_is_lopsided_or_idle_is_a_note():
    """15% clipped, three quarters on one side; or no ratio outside of the band in twenty steps."""
    lopsided, idle = clipping(0.15, 0.2, 0.12), clipping(0.0, 0.0, 0.0)

    assert severity(lopsided) == "note"
    assert lopsided is not None
    assert "trust.low" in lopsided.advice[0]
    assert severity(idle) == "note"
    assert idle is not None
    assert "never binds" in idle.summary


def test_a_clip_says_nothing_where_no_ratio_can_leave_it():
    """With one update on fresh samples every ratio is 1; without a band there is nothing to leave."""
    assert clipping(0.0, 0.0, 0.0, Facts(updates=1, has_band=True)) is None
    one_sided = history(loss__clipped_fraction=[0.9] * 20, loss__out_of_band_fraction=0.9, rollout__reward_mean=0.3)
    assert Clipping()(one_sided, Facts(updates=4)) is None


@pytest.mark.parametrize(("share", "expected"), [(0.6, None), (0.45, "warning"), (0.2, "severe")])
def test_effective_sample_size(share, expected):
    """Below a half a warning, below 0.3 severe; the lower of both columns counts."""
    made = history(mismatch__ess_fraction=[share] * 5, loss__ess_fraction=0.9)

    assert severity(EffectiveSampleSize()(made, FACTS)) == expected


def test_mismatch_names_its_largest_part():
    """0.05 nats where there were none is a warning, a constant 0.05 only if rounding makes it; 0.2 is always severe."""
    grown = history(
        mismatch__k3_nats=[0.0] * 3 + [0.05] * 5, mismatch__staleness_abs_nats=0.2, mismatch__engine_abs_nats=0.1
    )
    found = EngineMismatch()(grown, FACTS)

    assert severity(found) == "warning"
    assert found is not None
    assert "most of it by staleness" in found.summary
    assert "max_staleness" in found.advice[0]
    assert EngineMismatch()(history(mismatch__k3_nats=[0.05] * 8), FACTS) is None
    rounded = history(mismatch__k3_nats=[0.05] * 8, mismatch__precision_abs_nats=0.1)
    assert severity(EngineMismatch()(rounded, FACTS)) == "warning"
    assert severity(EngineMismatch()(history(mismatch__k3_nats=[0.2] * 8), FACTS)) == "severe"


def test_weights_that_stay_behind_show_as_a_gap_that_grows():
    """From a millionth to 0.02 nats is severe; 0.02 from the start is rounding; a canary beyond its limit is severe."""
    grown = [1e-6, 1e-6, *[0.02] * 6]

    assert severity(WeightsNotArrived()(history(mismatch__engine_abs_nats=grown), FACTS)) == "severe"
    assert WeightsNotArrived()(history(mismatch__engine_abs_nats=[0.02] * 8), FACTS) is None
    canary = history(arrival__canary_abs_mean_nats=[0.5], arrival__canary_allowed_nats=0.1)
    assert severity(WeightsNotArrived()(canary, FACTS)) == "severe"


def test_refused_steps():
    """One is a warning, two of twenty are severe."""
    assert severity(RefusedSteps()(history(learner__refused_steps=[0, 0, 1]), FACTS)) == "warning"
    assert severity(RefusedSteps()(history(learner__refused_steps=[0, 1, 1]), FACTS)) == "severe"
    assert RefusedSteps()(history(learner__refused_steps=[0, 0]), FACTS) is None


def lengths(now: float, correlation: float, truncated: float = 0.0) -> History:
    return history(
        rollout__length_tokens_mean=[10.0] * 6 + [now] * 6,
        rollout__length_reward_correlation=correlation,
        rollout__truncated_fraction=truncated,
    )


def test_length_and_reward():
    """Half as long again and a correlation of .7 is a warning; of .95 severe, whatever the growth; of .5 nothing."""
    assert severity(LengthReward()(lengths(15.0, 0.7), FACTS)) == "warning"
    assert severity(LengthReward()(lengths(10.0, 0.95), FACTS)) == "severe"
    assert LengthReward()(lengths(15.0, 0.5), FACTS) is None
    assert LengthReward()(lengths(12.0, 0.7), FACTS) is None
    shorter = LengthReward()(lengths(6.0, -0.7), FACTS)
    assert severity(shorter) == "warning"
    assert shorter is not None
    assert "shorter answers earn more" in shorter.summary


def cut_off(share: float, complete: float | None, truncated: float = 0.0, now: float = 0.1) -> Alarm | None:
    columns: dict[str, float | list[float]] = {
        "rollout__truncated_fraction": [share] * 20,
        "rollout__reward_mean": [0.1] * 10 + [now] * 10,
        "rollout__truncated_reward_mean": truncated,
        "rollout__reward_std": 0.4,
    }
    return Truncation()(
        history(**columns, **({} if complete is None else {"rollout__complete_reward_mean": complete})), FACTS
    )


def test_truncation_is_a_fault_where_it_costs_something():
    """60% cut off that earn 0 where others earn 0.8 is severe; that earn as much, nothing.

    With no other to compare with it is a warning while the reward stays where it was, and a note when it has risen.
    """
    assert severity(cut_off(0.6, 0.8)) == "severe"
    assert severity(cut_off(0.2, 0.8)) == "warning"
    assert severity(cut_off(0.06, 0.8)) == "note"
    assert cut_off(0.6, 0.8, 0.75) is None
    assert severity(cut_off(1.0, None)) == "warning"
    assert severity(cut_off(0.99, 1.0)) == "warning"
    assert severity(cut_off(0.99, 1.0, now=0.4)) == "note"


def test_repetition_must_be_new():
    """40% repeated where 5% were is severe, 20% a warning, 40% from the start nothing."""
    assert severity(Repetition()(history(rollout__repetition_fraction=[0.05] * 5 + [0.4] * 5), FACTS)) == "severe"
    assert severity(Repetition()(history(rollout__repetition_fraction=[0.05] * 5 + [0.2] * 5), FACTS)) == "warning"
    assert Repetition()(history(rollout__repetition_fraction=[0.4] * 10), FACTS) is None


def test_copies_beyond_chance():
    """All alike where chance makes 30% is severe, 45% a warning (15% beyond); 95% where chance makes 94% is nothing."""

    def at(copies: float, chance: float) -> str | None:
        columns = {"rollout__duplicate_pair_fraction": [copies] * 5}
        return severity(Duplicates()(history(rollout__duplicate_pair_expected_fraction=chance, **columns), FACTS))

    assert at(1.0, 0.3) == "severe"
    assert at(0.45, 0.3) == "warning"
    assert at(0.95, 0.94) is None


def test_a_part_that_dominates():
    """Of weights .1 and 1 with leverages 1 and .9, the second has 90% of the variance; the first may be the larger."""
    facts = Facts(weights={"answer": 0.1, "tidy": 1.0})
    columns = {"reward__answer_leverage": [1.0] * 8, "reward__answer_mean": 0.2}
    found = DominantPart()(history(reward__tidy_leverage=0.9, **columns), facts)

    assert severity(found) == "severe"
    assert found is not None
    assert "'tidy' decides 90%" in found.summary
    assert (
        DominantPart()(history(reward__tidy_leverage=0.9, **columns), Facts(weights={"tidy": 1.0, "answer": 0.1}))
        is None
    )


def test_a_penalty_for_long_answers_that_dominates():
    """It is no reward of the table, and neither is a task's own: with 90% of the variance it is severe for both."""
    columns = {"reward__answer_leverage": [0.1] * 8, "reward__answer_mean": 0.2, "reward__overlong_leverage": 0.9}
    for facts in (Facts(weights={"answer": 1.0}), Facts()):
        found = DominantPart()(history(**columns), facts)

        assert severity(found) == "severe"
        assert found is not None
        assert "'overlong' decides 90% of what rewards differ by, 'answer' 10%" in found.summary
        assert "sampling.max_completion_length" in found.advice[0]
    few = {**columns, "reward__overlong_leverage": 0.3}
    assert DominantPart()(history(**few), Facts(weights={"answer": 1.0})) is None


@pytest.mark.parametrize("task", ["gsm8k", "math", "dapo-17k", "deepscaler"])
def test_the_parts_of_a_published_set_are_known_without_a_table(task: str):
    """A set has its own score and a share of its form of weight 0: the penalty beside both is seen, the form is not."""
    facts = Facts.of({"task": {"kind": "published", "set": task}})
    first, *others = facts.weights
    form = {f"reward__{name}_leverage": 0.9 for name in others}
    columns = {f"reward__{first}_leverage": [0.1] * 8, f"reward__{first}_mean": 0.2, **form}

    assert (facts.weights[first], {facts.weights[name] for name in others} - {0.0}) == (1.0, set())
    assert severity(DominantPart()(history(reward__overlong_leverage=0.9, **columns), facts)) == "severe"
    assert DominantPart()(history(reward__overlong_leverage=0.1, **columns), facts) is None


def test_rewards_of_a_table_go_before_the_sets_own():
    """Named rewards replace those of the set."""
    table = {"task": {"set": "gsm8k"}, "rewards": [{"name": "mine", "weight": 0.5}]}

    assert Facts.of(table).weights == {"mine": 0.5}
    assert Facts.of({"task": {"set": "none"}}).weights == {}


def test_what_is_measured_beside_a_judge_is_no_constant_part():
    """A judge of one's own costs nothing, in every answer; a reward that is called so is a part like others."""
    columns = {f"reward__quality_{end}_{kind}": [0.0] * 15 for end in ("cost", "tokens") for kind in ("std", "mean")}
    judged = {**columns, "reward__quality_std": 0.3, "reward__quality_mean": 0.5}

    assert ConstantPart()(history(**judged), Facts(weights={"quality": 1.0})) is None
    assert ConstantPart()(history(**judged), Facts()) is None
    assert ConstantPart()(history(**judged), Facts(weights={"quality": 1.0, "quality_cost": 1.0})) is not None
    assert ConstantPart()(history(**columns), Facts()) is not None


def test_a_part_that_is_constant():
    """Fifteen steps of 0 for every answer are a warning, of 1 a note; a part without weight is nobody's business."""
    facts = Facts(weights={"answer": 1.0, "loud": 0.5})

    def at(level: float, weights: Facts = facts) -> str | None:
        columns = {"reward__loud_std": [0.0] * 15, "reward__answer_std": 0.4, "reward__answer_mean": 0.3}
        return severity(ConstantPart()(history(reward__loud_mean=level, **columns), weights))

    assert at(0.0) == "warning"
    assert at(1.0) == "note"
    assert at(0.0, Facts(weights={"answer": 1.0, "loud": 0.0})) is None


@pytest.mark.parametrize("weights", [{}, {"answer": 1.0}, {"other": 1.0}])
def test_a_constant_part_of_a_tasks_own_reward(weights: dict[str, float]):
    """A task's own reward is in no table; its parts are those that were measured. An unused penalty is none."""
    columns = {"reward__own_std": [0.0] * 15, "reward__answer_std": 0.4, "reward__answer_mean": 0.3}
    penalty = {"reward__overlong_std": 0.0, "reward__overlong_mean": 0.0}
    found = ConstantPart()(history(reward__own_mean=0.25, **columns, **penalty), Facts(weights=weights))

    assert severity(found) == "warning"
    assert found is not None
    assert "'own' is 0.25 for every answer" in found.summary
    assert "overlong" not in found.summary
    penalty["reward__overlong_mean"] = -0.5
    found = ConstantPart()(history(reward__own_mean=0.25, **columns, **penalty), Facts(weights=weights))
    assert found is not None
    assert "'overlong' is -0.5" in found.summary


def test_answers_of_the_right_form_that_all_earn_the_same():
    """Eight steps of 0 for every marked answer are a warning, of 1 a note; other rewards or few marks are nothing."""

    def at(level: float | list[float], share: float = 0.8, spread: float = 0.0) -> str | None:
        levels = level if isinstance(level, list) else [level] * 8
        columns = {"rollout__marked_reward_mean": levels, "rollout__marked_reward_std": spread}
        return severity(FormIgnored()(history(rollout__marked_fraction=share, **columns), FACTS))

    assert at(0.0) == "warning"
    assert at(0.5) == "warning"
    assert at(1.0) == "note"
    assert at(0.0, share=0.2) is None
    assert at(0.0, spread=0.1) is None
    assert at([0.0] * 7 + [1.0]) is None
    assert at([0.0] * 7) is None
    assert FormIgnored()(history(rollout__reward_mean=[0.0] * 8), FACTS) is None


def test_verifier_errors():
    """5% are a warning, 10% severe; the first step of the window with one is where it began."""
    found = VerifierErrors()(history(rollout__error_fraction=[0.0] * 4 + [0.1] * 4), FACTS)

    assert severity(found) == "warning"
    assert found is not None
    assert found.since == 5
    assert severity(VerifierErrors()(history(rollout__error_fraction=[0.1] * 8), FACTS)) == "severe"
    assert VerifierErrors()(history(rollout__error_fraction=[0.0] * 8), FACTS) is None


def test_a_reward_that_falls():
    """From .5 to .2 is a fall by 60% of the best window, to .4 it is none; one step of .5 and then nothing is one."""
    assert severity(RewardFalls()(history(rollout__reward_mean=[0.5] * 10 + [0.2] * 10), FACTS)) == "severe"
    assert RewardFalls()(history(rollout__reward_mean=[0.5] * 10 + [0.4] * 10), FACTS) is None
    assert severity(RewardFalls()(history(rollout__reward_mean=[0.5] + [0.0] * 8), FACTS)) == "severe"
    assert RewardFalls()(history(rollout__reward_mean=[0.1] + [0.0] * 8), FACTS) is None


def test_a_reward_that_stays():
    """Flat for 24 steps with 60% of answers idle is a warning; with 40% idle, or with a rise, it is not."""

    def at(rewards: list[float], idle: float) -> str | None:
        columns = {"rollout__reward_mean": rewards, "advantage__exact_zero_fraction": idle}
        return severity(NotLearning()(history(**columns), FACTS))

    flat = [0.3, 0.32] * 12
    assert at(flat, 0.6) == "warning"
    assert at(flat, 0.4) is None
    assert at([0.1] * 12 + [0.3] * 12, 0.6) is None


def test_a_policy_that_does_not_move():
    """Reward and entropy alternate around the same means for thirty steps: a warning, but not if either has moved."""

    def at(rewards: list[float], entropies: list[float]) -> str | None:
        columns = {"rollout__reward_mean": rewards, "loss__entropy_nats": entropies}
        return severity(NothingMoves()(history(advantage__exact_zero_fraction=0.1, **columns), FACTS))

    flat, certain = [0.3, 0.4] * 15, [1.0, 1.1] * 15
    assert at(flat, certain) == "warning"
    assert at([0.3, 0.4] * 10 + [0.6, 0.7] * 5, certain) is None
    assert at(flat, [1.0, 1.1] * 10 + [0.8, 0.7] * 5) is None


def test_a_critic_that_explains_nothing():
    """Twenty steps at -.5 are severe, at 0 or .1 a warning; one that goes from -1 to -.1 gets better."""

    def at(explained: list[float]) -> str | None:
        columns = {"critic__explained_variance": explained, "rollout__reward_std": 0.4}
        return severity(CriticExplains()(history(**columns), FACTS))

    assert at([-0.5] * 20) == "severe"
    assert at([0.0] * 20) == "warning"
    assert at([0.1] * 20) == "warning"
    assert at([-1.0] * 10 + [-0.1] * 10) is None
    assert at([0.5] * 20) is None


def test_a_tracker_that_starves():
    """90% of first visits with guessed rates, or an error of 1.5 times the variance of the rewards (.5^2)."""

    def at(first: float, wrong: float, initial: str) -> str | None:
        columns = {"tracker__first_visit_fraction": [first] * 10, "tracker__squared_error_mean": wrong}
        return severity(TrackerStarves()(history(rollout__reward_std=0.5, **columns), Facts(initial=initial)))

    assert at(0.9, 0.2, "prior") == "warning"
    assert at(0.9, 0.2, "samples") is None
    assert at(0.1, 0.375, "samples") == "warning"


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([2.0, 1.0, 0.9], None), ([2.0, 1.0, 1.02], None), ([2.0, 1.0, 1.1], "warning"), ([2.0, 1.0, 2.1], "severe"),
        ([2.0], None), ([], None), ([1.0, 1.1], "severe"), ([None, 1.0], None),
    ],
)  # fmt: skip
def test_a_held_out_loss_that_rises(losses: list[float | None], found: str | None):
    """3% above the lowest is a warning, above that of the model before training it is severe; none is no loss."""
    history = History()
    history.evaluations += [{"step": 10 * n, "loss_nats": loss} for n, loss in enumerate(losses)]
    alarm = HeldOutLoss()(history, FACTS)

    assert severity(alarm) == found
    if alarm is not None:
        assert alarm.since == 10 * losses.index(min(loss for loss in losses if loss is not None))


def evaluated(held_out: float, high: float) -> History:
    made = history(rollout__reward_mean=[0.2] * 6 + [0.8] * 6)
    made.evaluations += [
        {"step": step, "scores": {"reward": {"mean": mean, "low": 0.0, "high": top}}}
        for step, mean, top in ((0, 0.2, 0.3), (12, held_out, high))
    ]
    return made


def test_training_that_held_out_questions_do_not_confirm():
    """.8 in training and at most .4 held out is a gap of half: severe if the held-out reward stayed at .2."""
    assert severity(HeldOutGap()(evaluated(0.2, 0.4), FACTS)) == "severe"
    assert severity(HeldOutGap()(evaluated(0.5, 0.6), FACTS)) == "warning"
    assert HeldOutGap()(evaluated(0.6, 0.75), FACTS) is None


def test_steps_that_slow_down_name_their_stage():
    """1 s to 2 s is a warning, to 4 s severe; not if twice as many tokens came; a note if other stages took 2 s too, or
    one of the steps was as fast as before.
    """

    def at(seconds: float, tokens: float = 100.0, others: float = 0.9, fastest: float = 0.0) -> Alarm | None:
        columns = {
            "time__step_seconds": [1.0] * 10 + [seconds] * 5 + [fastest or seconds],
            "tokens__generated": [100.0] * 10 + [tokens] * 6,
            "time__grade_seconds": [0.1] * 10 + [seconds - others] * 6,
        }
        return Throughput()(history(**columns), FACTS)

    found = at(2.0)
    assert severity(found) == "warning"
    assert found is not None
    assert "most of it in 'grade' (+1 s)" in found.summary
    assert severity(at(4.0)) == "severe"
    assert severity(at(4.0, others=2.0)) == "note"
    assert severity(at(4.0, fastest=1.1)) == "note"
    assert at(2.0, 200.0) is None
    assert at(1.2) is None


def test_every_rule_says_nothing_of_nothing():
    """A run without metrics, or with one step of none, has no findings."""
    for rule in RULES.values():
        assert rule(History(), Facts()) is None
        assert rule(history(step=[1.0] * 40), Facts()) is None


def test_rules_are_chosen_by_name():
    """Names choose, names with a minus leave out, and another name is refused with the nearest one."""
    assert [rule.name for rule in chosen(["-" + name for name in RULES if name != "mismatch"])] == ["mismatch"]
    with pytest.raises(ConfigError, match="unknown rule 'all-worng'; did you mean 'all-wrong'"):
        chosen(["all-worng"])
