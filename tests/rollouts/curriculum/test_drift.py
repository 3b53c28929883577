import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError, LearnerError
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.drift import (
    AccumulatedDrift,
    Drift,
    NoDrift,
    RescoredDrift,
    ScoredAnswer,
    estimate_step_drift,
)

IDS = ["a", "b", "c"]


class Policy:
    """A scorer whose log-probability of every token is one number, and which remembers what it was asked."""

    def __init__(self, level: float = -1.0) -> None:
        self.level = level
        self.asked: list[ScoredAnswer] = []

    async def __call__(self, answers: Sequence[ScoredAnswer]) -> list[list[float]]:
        self.asked = list(answers)
        return [[self.level] * len(answer.response) for answer in answers]


def visit(drift: Drift, groups, policy: Policy | None = None) -> dict[str, float]:
    return dict(asyncio.run(drift.measure(groups, policy or Policy())))


def test_the_last_update_is_estimated_from_those_before_it():
    """Through (1, 1) and (2, 4) the best line from the origin has slope 9/5, so K = 3 updates moved 27/5."""
    assert estimate_step_drift([0.0, 1.0, 4.0]) == pytest.approx(27 / 5)


@given(slope=st.floats(0, 1), count=st.integers(2, 32))
def test_steady_drift_is_estimated_exactly(slope: float, count: int):
    """If m_k = slope k, then K updates moved slope K."""
    assert estimate_step_drift([slope * k for k in range(count)]) == pytest.approx(slope * count)


def test_one_update_a_step_measures_no_drift():
    """The only forward pass came before the only update; the message names the ways out."""
    with pytest.raises(ConfigError, match='at least 2 optimizer updates a step, got 1; set drift = "replayed"'):
        estimate_step_drift([0.0])


@pytest.mark.parametrize("broken", [math.nan, -0.1, math.inf])
def test_a_drift_that_is_not_finite_is_refused(broken: float):
    """It would stay in the total for ever."""
    with pytest.raises(LearnerError, match="must be finite and >= 0"):
        estimate_step_drift([0.0, broken])
    with pytest.raises(LearnerError, match="must be finite and >= 0"):
        AccumulatedDrift(TaskIndex(IDS)).add(broken)


def test_accumulated_drift_is_what_was_added_since_the_last_visit(group):
    """a is visited after steps 1 and 3, so it sees 0.25 + 0.5; b only ever once."""
    drift = AccumulatedDrift(TaskIndex(IDS))
    drift.add(1.0)
    assert visit(drift, [group("a", [1.0])]) == {}
    drift.add(0.25)
    assert visit(drift, [group("b", [1.0])]) == {}
    drift.add(0.5)
    assert visit(drift, [group("a", [1.0])]) == {"a": 0.75}
    assert visit(drift, [group("a", [1.0])]) == {"a": 0.0}


def test_recording_adds_the_steps_estimate():
    """0, 0.25 leads to 0.5 after the second update."""
    drift = AccumulatedDrift(TaskIndex(IDS))
    drift.record([0.0, 0.25])

    assert drift.total == 0.5


@pytest.mark.parametrize("kind", [AccumulatedDrift, RescoredDrift])
def test_a_visit_without_a_reward_is_none(kind, group):
    """Nothing was observed, so drift goes on from the visit before it."""
    drift = kind(TaskIndex(IDS))
    policy = Policy(level=-1.0)
    visit(drift, [group("a", [1.0])], policy)
    policy.level = -1.5
    drift.record([0.0, 0.25])
    assert visit(drift, [group("a", [None])], policy) == {}
    policy.level = -2.0
    drift.record([0.0, 0.25])

    assert visit(drift, [group("a", [1.0])], policy) == {"a": 1.0}


def test_replayed_drift_compares_the_previous_response_then_and_now(group):
    """Log-probabilities of a's first response went from -1 to -1.25; b has no previous response."""
    drift, policy = RescoredDrift(TaskIndex(IDS)), Policy(-1.0)
    first = [group("a", [1.0], response=(5, 6))]
    assert visit(drift, first, policy) == {}
    assert policy.asked == [ScoredAnswer((1, 2), (5, 6), (True, True))]

    policy.level = -1.25
    second = [group("a", [0.0], response=(7, 8, 9)), group("b", [0.0], response=(4,))]
    assert visit(drift, second, policy) == {"a": 0.25}
    assert [answer.response for answer in policy.asked] == [(5, 6), (7, 8, 9), (4,)]
    assert drift.stored_tokens == 4


def test_replayed_drift_is_zero_while_the_policy_stands_still(group):
    """Even when the scores are no float32 numbers: both sides were rounded alike."""
    drift, policy = RescoredDrift(TaskIndex(IDS)), Policy(-0.1)
    visit(drift, [group("a", [1.0])], policy)

    assert visit(drift, [group("a", [1.0])], policy) == {"a": 0.0}


def test_drift_is_a_mean_of_absolute_values_over_trained_tokens(group):
    """Changes +0.5, -0.25 and, on a tool's token, 100: (0.5 + 0.25) / 2; they do not cancel."""
    scores = {0: [-1.0, -1.0, 0.0], 1: [-0.5, -1.25, 100.0]}

    async def score(answers: Sequence[ScoredAnswer]) -> list[list[float]]:
        return [scores[step] for _ in answers]

    drift = RescoredDrift(TaskIndex(IDS))
    groups = [group("a", [1.0], mask=(True, True, False))]
    step = 0
    asyncio.run(drift.measure(groups, score))
    step = 1

    assert asyncio.run(drift.measure(groups, score)) == {"a": 0.375}


def test_the_last_graded_rollout_is_kept(group):
    """Of four rollouts in two groups of one task, the last two of which are an error and all tool output."""
    drift, policy = RescoredDrift(TaskIndex(IDS)), Policy()
    groups = [
        group("a", [1.0], response=(3,)),
        group("a", [0.0], response=(4, 4)),
        group("a", [None], response=(5, 5, 5)),
        group("a", [0.0], response=(6,), mask=(False,)),
    ]
    visit(drift, groups, policy)

    assert drift.pending(groups) == {"a": ScoredAnswer((1, 2), (4, 4), (True, True))}


def test_memory_is_bounded_and_what_was_dropped_forgets_most(group):
    """With room for 6 tokens, the third response of 3 tokens drops the one that was visited first."""
    drift = RescoredDrift(TaskIndex(IDS), capacity_tokens=6)
    for task_id in "abc":
        visit(drift, [group(task_id, [1.0])])
        assert drift.stored_tokens <= 6
    assert len(drift) == 2

    assert visit(drift, [group("a", [1.0]), group("c", [1.0])]) == {"a": math.inf, "c": 0.0}
    assert visit(drift, [group("a", [1.0])]) == {"a": 0.0}


@pytest.mark.parametrize(
    ("scored", "message"),
    [
        ([[-1.0, -1.0]], "scoring 1 responses gave 1 rows of .2. numbers for .3. tokens"),
        ([], "scoring 1 responses gave 0 rows"),
        ([[-1.0, math.nan, -1.0]], "is not finite under the new weights"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scored, message: str, group):
    """The stored responses stay as they were."""

    async def score(answers: Sequence[ScoredAnswer]) -> list[list[float]]:
        return scored

    drift = RescoredDrift(TaskIndex(IDS))
    with pytest.raises(LearnerError, match=message):
        asyncio.run(drift.measure([group("a", [1.0])], score))

    assert len(drift) == 0


@pytest.mark.parametrize("kind", [AccumulatedDrift, lambda task_index: RescoredDrift(task_index, capacity_tokens=9)])
def test_resuming_equals_going_on(kind, group):
    """A fresh drift that restores the state reports the same drifts from then on, dropped tasks included."""
    ids = [f"t{i}" for i in range(8)]
    first, second = kind(TaskIndex(ids)), kind(TaskIndex(ids))
    policy = Policy()

    def step(drift: Drift, k: int) -> dict[str, float]:
        policy.level = -1 - 0.1 * k
        drift.record([0.0, 0.01 * k])
        groups = [group(ids[(3 * k + j) % 8], [1.0], response=tuple(range(k % 3 + 1))) for j in range(2)]
        return visit(drift, groups, policy)

    for k in range(12):
        step(first, k)
    second.restore(first.state())

    assert [step(second, k) for k in range(12, 30)] == [step(first, k) for k in range(12, 30)]


@pytest.mark.parametrize("kind", [AccumulatedDrift, RescoredDrift])
def test_an_untouched_drift_can_be_saved(kind, group):
    """No visit yet: the state is of no responses."""
    drift = kind(TaskIndex(IDS))
    drift.restore(drift.state())

    assert visit(drift, [group("a", [1.0])]) == {}


@pytest.mark.parametrize("kind", [AccumulatedDrift, RescoredDrift])
def test_a_checkpoint_of_other_tasks_is_refused(kind):
    """Indices would point at other prompts."""
    with pytest.raises(ConfigError, match="drift belongs to another task set: it has 2 tasks"):
        kind(TaskIndex(IDS)).restore(kind(TaskIndex(["a", "b"])).state())


def test_unmeasured_drift_costs_nothing(group):
    """It knows no task and scores none, and any number of updates will do."""
    drift = NoDrift()
    drift.record([0.0])
    drift.restore(drift.state())

    assert visit(drift, [group("a", [1.0])]) == {}


def test_a_cap_below_one_token_is_refused():
    """Nothing could ever be kept."""
    with pytest.raises(ConfigError, match="capacity_tokens must be at least 1, got 0"):
        RescoredDrift(TaskIndex(IDS), capacity_tokens=0)


def test_steps_that_measured_nothing_are_counted_as_what_is_known_of_them():
    """No update moves nothing; a single one moves as far as one of the latest measured step: 0.25 of 1.0 in four."""
    drift = AccumulatedDrift(TaskIndex(["a"]))

    drift.record([])
    drift.record([0.0])
    assert drift.total == 0.0

    drift.record([0.0, 0.25, 0.5, 0.75])
    drift.record([])
    drift.record([0.0])
    assert drift.total == pytest.approx(1.25)
