import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError, DatasetError, LearnerError
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.drift import AccumulatedDrift
from gnomon.rollouts.curriculum.tracker import DecayRule, Rewards, ValueTracker

PAPER = DecayRule(0.875, 0.96, 0.06)
GOLDEN = vectors()["spo"]
IDS = ["a", "b", "c", "d"]

drifts = st.one_of(st.floats(0, 1), st.just(math.inf))
outcomes = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), drifts), max_size=40)


def tracker(ids=IDS, forgetting: DecayRule = PAPER, rewards: Rewards = "binary", prior: float = 0.5):
    return ValueTracker(TaskIndex(ids), forgetting, rewards, prior)


def initialized(group, prior: float = 0.5) -> ValueTracker:
    """Return the tracker of four tasks that succeeded 0, 2, 5 and 8 times in 8."""
    tracked = tracker(prior=prior)
    tracked.initialize([group(i, [1.0] * s + [0.0] * (8 - s)) for i, s in zip(IDS, (0, 2, 5, 8), strict=True)])
    return tracked


def test_forgetting_follows_the_reference():
    """rho = 2^(-D / 0.06), clipped to [0.875, 0.96]: D = 0, .002, .01, .06, .5."""
    assert [PAPER(d) for d in GOLDEN["D"]] == pytest.approx(GOLDEN["rho_clamped"], abs=1e-12)
    assert PAPER(math.inf) == 0.875
    assert PAPER.window == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.9, 0.8), "0 < rho_min <= rho_max < 1, got 0.9, 0.8"),
        ((0.9, 1.0), "rho_max < 1"),
        ((0.8, 0.9, 0.0), "d_half must be > 0, got 0.0"),
    ],
)
def test_forgetting_refuses_what_cannot_be_meant(arguments, message):
    """rho of 1 never forgets, and 0 nats cannot halve anything."""
    with pytest.raises(ConfigError, match=message):
        DecayRule(*arguments)


def test_initial_samples_give_jeffreys_rates_worth_eight_visits(group):
    """(s + 1/2) / 9 for s = 0, 2, 5, 8 of 8, and N0 = 1 / (1 - 0.875) = 8."""
    tracked = initialized(group)
    alpha, beta = tracked.counts(range(4))

    assert tracked.baseline(range(4)).tolist() == pytest.approx([0.5 / 9, 2.5 / 9, 5.5 / 9, 8.5 / 9], abs=1e-12)
    assert alpha.tolist() == pytest.approx(GOLDEN["alpha0_code"], abs=1e-12)
    assert beta.tolist() == pytest.approx(GOLDEN["beta0_code"], abs=1e-12)
    assert tracked.n_eff(range(4)).tolist() == pytest.approx([8.0] * 4)


def test_a_prior_of_zero_is_the_papers_plain_mean(group):
    """Then 0 of 8 is exactly 0, and 8 of 8 exactly 1."""
    assert initialized(group, prior=0.0).baseline(range(4)).tolist() == GOLDEN["v0_paper"]


def test_without_samples_a_task_starts_at_one_half_and_learns_fast():
    """alpha = beta = 1/2 as in the public recipe; one success with rho 0.96: 1.48 / 1.96."""
    tracked = tracker()
    tracked.update(0, 1.0, drift=0.0)

    assert tracked.baseline([0, 1]).tolist() == pytest.approx([1.48 / 1.96, 0.5])
    assert tracked.n_eff([0, 1]).tolist() == pytest.approx([1.96, 1.0])


def test_the_update_trace_follows_the_reference(group):
    """From 2 of 8: (D, r) = (0, 1), (0.004, 0), (0.02, 1)."""
    tracked = initialized(group)
    for step in GOLDEN["update_trace"]:
        assert tracked.baseline([1])[0] == pytest.approx(step["v_before"], abs=1e-12)

        tracked.observe([group("b", [step["reward"]])], {"b": step["D"]})

        alpha, beta = tracked.counts([1])
        assert (alpha[0], beta[0]) == pytest.approx((step["alpha"], step["beta"]), abs=1e-12)
        assert tracked.baseline([1])[0] == pytest.approx(step["v_after"], abs=1e-12)
        assert tracked.n_eff([1])[0] == pytest.approx(step["n_eff"], abs=1e-12)


@given(history=outcomes)
def test_fading_beta_counts_are_an_adaptive_moving_average(history):
    """alpha <- rho alpha + r, beta <- rho beta + 1 - r, written out, gives the tracker's v and n_eff (P9)."""
    tracked = tracker()
    alpha = beta = 0.5
    for reward, drift in history:
        rho = tracked.update(0, reward, drift)
        alpha, beta = rho * alpha + reward, rho * beta + 1 - reward

    assert tracked.counts([0])[0][0] == pytest.approx(alpha, abs=1e-12)
    assert tracked.counts([0])[1][0] == pytest.approx(beta, abs=1e-12)
    assert tracked.baseline([0])[0] == pytest.approx(alpha / (alpha + beta), abs=1e-12)


@given(history=outcomes, successes=st.integers(0, 8))
def test_values_stay_rates(history, successes: int, group):
    """v in [0, 1], alpha and beta >= 0, and n_eff between its floor and the longest window, 25."""
    tracked = tracker(prior=0.0)
    tracked.initialize([group(i, [1.0] * successes + [0.0] * (8 - successes)) for i in IDS])
    for reward, drift in history:
        tracked.update(0, reward, drift)
        alpha, beta = tracked.counts([0])
        assert 0 <= tracked.baseline([0])[0] <= 1
        assert alpha[0] >= 0
        assert beta[0] >= 0
        assert tracked.n_eff_floor * (1 - 1e-12) <= tracked.n_eff([0])[0] <= 25 + 1e-9


@pytest.mark.parametrize(("drift", "window"), [(0.0, 25.0), (math.inf, 8.0), (0.01, 1 / (1 - PAPER(0.01)))])
def test_the_window_tends_to_one_over_one_minus_rho(drift: float, window: float):
    """After many visits at a constant drift, n_eff has settled."""
    tracked = tracker()
    for _ in range(1000):
        tracked.update(0, 1.0, drift)

    assert tracked.n_eff([0])[0] == pytest.approx(window, abs=1e-9)


@given(
    history=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0]), drifts), max_size=30),
    data=st.data(),
)
def test_the_order_among_distinct_tasks_is_irrelevant(history, data):
    """Interleaving the tasks' rewards in any way leaves every value the same to the last bit."""
    one, other = tracker(), tracker()
    order = data.draw(st.permutations(range(len(history))))
    # stable: each task's own rewards keep their order, tasks follow one another as they come up in ``order``
    turn = {task: place for place, task in reversed(list(enumerate(history[i][0] for i in order)))}
    for task, reward, drift in history:
        one.update(task, reward, drift)
    for task, reward, drift in sorted(history, key=lambda visit: turn[visit[0]]):
        other.update(task, reward, drift)

    assert one.baseline(range(4)).tolist() == other.baseline(range(4)).tolist()


def test_rollouts_of_one_step_are_observed_one_after_the_other(group):
    """Only the first fades by the drift: the policy did not move between answers to one question."""
    together, apart = initialized(group), initialized(group)
    together.observe([group("b", [1.0, 0.0]), group("b", [1.0])], {"b": 0.01})
    for reward, drift in ((1.0, 0.01), (0.0, 0.0), (1.0, 0.0)):
        apart.update(1, reward, drift)

    assert together.baseline(range(4)).tolist() == apart.baseline(range(4)).tolist()
    assert together.visits(range(4)).tolist() == [0, 3, 0, 0]


def test_an_error_is_no_reward(group):
    """Rollouts that could not be graded change nothing, neither before training nor in it."""
    tracked = initialized(group)
    before = tracked.state()
    tracked.initialize([group("a", [None])])
    metrics = tracked.observe([group("a", [None, None])], {})

    assert all(np.array_equal(before.tensors[k], v) for k, v in tracked.state().tensors.items())
    assert metrics.values() == {}


def test_binary_rewards_must_be_zero_or_one(group):
    """The message names task and value and says how to track other rewards; nothing was learned before it."""
    tracked = tracker()
    with pytest.raises(ConfigError, match=r"task 'b' earned a reward of 0.5, .* set rewards=\"continuous\""):
        tracked.observe([group("a", [1.0]), group("b", [0.5])], {})

    assert tracked.visits(range(4)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_continuous_rewards_must_be_finite(reward: float, group):
    """One reward that is not a number would stay in the mean for ever."""
    with pytest.raises(ConfigError, match=r"task 'a' earned a reward of (nan|inf), which has no mean"):
        tracker(rewards="continuous").observe([group("a", [reward])], {})


@given(history=st.lists(st.tuples(st.floats(-1e3, 1e3), drifts), min_size=1, max_size=30))
def test_continuous_rewards_are_a_weighted_mean(history):
    """v = sum of rewards weighted by what of each is remembered, over the weights; n <- rho n + 1."""
    tracked = tracker(rewards="continuous")
    total, weight = 0.5, 1.0
    for reward, drift in history:
        rho = tracked.update(0, reward, drift)
        total, weight = rho * total + reward, rho * weight + 1

    assert tracked.baseline([0])[0] == pytest.approx(total / weight, abs=1e-9)
    assert tracked.n_eff([0])[0] == pytest.approx(weight, abs=1e-12)


def test_continuous_samples_start_at_their_mean(group):
    """A pseudo-count has no scale there: (-2 + 4) / 2 = 1."""
    tracked = tracker(rewards="continuous")
    tracked.initialize([group("a", [-2.0, 4.0])])

    assert tracked.baseline([0])[0] == 1.0


@pytest.mark.parametrize("drift", [-0.1, math.nan])
def test_a_drift_that_is_none_is_refused_before_anything_is_learned(drift: float, group):
    """Silence would turn a broken forward pass into a broken table."""
    tracked = tracker()
    with pytest.raises(LearnerError, match=r"policy drift must be >= 0 nats, got (-0.1|nan)"):
        tracked.observe([group("a", [1.0]), group("b", [1.0])], {"b": drift})

    assert tracked.visits(range(4)).tolist() == [0, 0, 0, 0]


def test_observing_says_what_happened(group):
    """Two first visits at rho 0.96, without drift, and one that forgets 0.875: mean rho (0.96 * 2 + 0.875) / 3."""
    tracked = tracker()
    tracked.observe([group("a", [1.0])], {})
    metrics = tracked.observe([group("a", [1.0]), group("b", [0.0]), group("c", [0.0])], {"a": 0.5})

    assert metrics["tracker/rho_mean"] == pytest.approx((0.96 * 2 + 0.875) / 3)
    assert metrics["tracker/rho_clamped_fraction"] == 1.0
    assert metrics["tracker/first_visit_fraction"] == pytest.approx(2 / 3)
    assert metrics["tracker/drift_nats_mean"] == 0.5


def test_resuming_equals_going_on(group):
    """A fresh tracker that restores the state has the same values to the last bit, now and later."""
    first, second = initialized(group), tracker()
    first.observe([group("a", [1.0]), group("c", [0.0, 1.0])], {"a": 0.003})
    second.restore(first.state())
    for each in (first, second):
        each.observe([group("a", [0.0]), group("d", [1.0])], {"a": 0.007})

    assert second.baseline(range(4)).tolist() == first.baseline(range(4)).tolist()
    assert second.n_eff(range(4)).tolist() == first.n_eff(range(4)).tolist()
    assert second.visits(range(4)).tolist() == first.visits(range(4)).tolist()
    assert second.n_eff_floor == first.n_eff_floor


def test_a_state_does_not_change_with_the_tracker(group):
    """What was saved stays what it was while training goes on."""
    tracked = tracker()
    state = tracked.state()
    tracked.observe([group("a", [1.0])], {})

    assert state.tensors["value"].tolist() == [0.5] * 4


def test_a_checkpoint_of_other_tasks_is_refused():
    """The message says how many tasks each has and what to do."""
    with pytest.raises(ConfigError, match="value tracker belongs to another task set: it has 2 tasks"):
        tracker().restore(tracker(ids=["a", "b"]).state())


def test_rates_travel_by_id(tmp_path: Path, group):
    """An exported file gives another task set the rates of the ids that they share, and no others."""
    path = tmp_path / "rates.json"
    first = initialized(group)
    first.export(path, IDS)

    second = tracker(ids=["new", "d", "b"])

    assert second.load(path) == 2
    assert second.baseline([1, 2]).tolist() == first.baseline([3, 1]).tolist()
    assert second.n_eff(range(3)).tolist() == pytest.approx([1.0, 8.0, 8.0])


def test_only_what_is_known_is_exported(tmp_path: Path, group):
    """A task that nothing was observed of is no rate of one half."""
    tracked = tracker()
    tracked.observe([group("b", [1.0])], {})
    tracked.export(tmp_path / "rates.json", IDS)

    assert list(json.loads((tmp_path / "rates.json").read_text())) == ["b"]
    with pytest.raises(ConfigError, match="id list belongs to another task set"):
        tracked.export(tmp_path / "rates.json", IDS[::-1])


def test_an_exported_file_is_replaced_at_once(tmp_path: Path, group):
    """Whoever reads it while it is written has the whole of what was there, and nothing else is left behind."""
    path = tmp_path / "rates.json"
    path.write_text("what was there")
    with path.open() as reader:
        initialized(group).export(path, IDS)

        assert reader.read() == "what was there"
    assert list(json.loads(path.read_text())) == IDS
    assert [each.name for each in tmp_path.iterdir()] == ["rates.json"]


def test_a_file_may_hold_rates_or_counts(tmp_path: Path):
    """A rate is taken as it is; 2 of 8 gets the prior: 2.5 / 9."""
    path = tmp_path / "rates.json"
    path.write_text('{"a": 0.75, "b": [2, 8]}')
    tracked = tracker()
    tracked.load(path)

    assert tracked.baseline([0, 1]).tolist() == pytest.approx([0.75, 2.5 / 9])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1.5}',
            r"1 entries that are neither a rate \(in \[0, 1\]\) nor \[successes, samples\]: 'a': 1.5",
        ),
        (
            '{"a": [9, 8], "b": 0.5, "c": [0, 0], "d": true}',
            r"3 entries .*: 'a': \[9, 8\]; 'c': \[0, 0\]; 'd': true",
        ),
        ('{"x": 0.5}', "none of the 1 ids in .*, such as 'x' is one of the 4 tasks"),
        ("{}", "none of the 0 ids"),
        ("[0.5]", "must hold one JSON object, task id to rate, but holds a list"),
        ("{", "success rates cannot be read from"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path):
    """Wrong entries are listed together, before any task was changed."""
    path = tmp_path / "rates.json"
    path.write_text(text)
    tracked = tracker()
    with pytest.raises(DatasetError, match=message):
        tracked.load(path)

    assert tracked.baseline(range(4)).tolist() == [0.5] * 4


def test_a_missing_file_is_named(tmp_path: Path):
    """The path is in the message."""
    with pytest.raises(DatasetError, match=r"success rates cannot be read from .*nowhere\.json"):
        tracker().load(tmp_path / "nowhere.json")


def test_a_task_costs_at_most_64_bytes():
    """Values, visits and flags, the roster and accumulated drift: 21 + 12 + 8 bytes."""
    tracked = tracker()
    arrays = [t.element_size() for t in tracked.state().tensors.values()]

    assert sum(arrays) == 21
    assert tracked.task_index._sorted.itemsize + tracked.task_index._order.itemsize == 12
    assert AccumulatedDrift(tracked.task_index).state().tensors["total_at_visit"].element_size() == 8
