"""Edges of the advantage pieces, and what is measured of them."""

from dataclasses import replace

import pytest
import torch

from gnomon.algorithms import (
    GRPO,
    SPO,
    GroupRelative,
    LeaveOneOut,
    OptimalBaseline,
    Returns,
    TrackedBaseline,
    Whitened,
    measure_advantages,
)
from gnomon.core.errors import ConfigError, GradingError
from gnomon.testing import make_batch

approx = pytest.approx


def test_ungraded_responses_enter_no_statistic():
    """Of (1, error, 0) the mean is 1/2 and the deviation 0.7071; the error gets 0 and leaves the mask."""
    batch = make_batch([1.0, None, 0.0], [[1], [1], [1]])

    advantages, _ = GroupRelative(epsilon=0.0)(batch)

    assert advantages[:, 0].tolist() == approx([0.5**0.5, 0, -(0.5**0.5)])
    assert LeaveOneOut()(batch)[0][:, 0].tolist() == [1.0, 0.0, -1.0]
    assert OptimalBaseline()(batch)[0][:, 0].tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_graded_response(scale: str):
    """Zero by default, the raw reward of 0.5 when asked for, an error when asked for."""
    batch = make_batch([0.5, None, 1.0, 0.0], [[1]] * 4, [0, 0, 1, 1])

    zero = GroupRelative(scale)(batch)[0]
    assert zero[0, 0] == 0
    assert zero[2, 0] > 0
    assert GroupRelative("group", singleton="raw")(batch)[0][0, 0] == 0.5
    with pytest.raises(GradingError, match="1 groups have one graded response"):
        GroupRelative(scale, singleton="error")(batch)


def test_batch_scale_without_spread_is_zero():
    """Equal rewards everywhere and epsilon 0 give 0, not 0 / 0."""
    batch = make_batch([1.0, 1.0], [[1], [1]])

    assert GroupRelative("batch", epsilon=0.0)(batch)[0].tolist() == [[0.0], [0.0]]


def test_tracked_edges():
    """Equal advantages are exactly 0, one response keeps its own, and an error stays out of both."""
    same = make_batch([1.0, 0.5, None], [[1]] * 3, [0, 1, 2], baseline=[0.75, 0.25, 0.9])
    one = make_batch([1.0, None], [[1, 1], [1]], [0, 1], baseline=[0.25, 0.5])

    assert TrackedBaseline()(same)[0].tolist() == [[0.0], [0.0], [0.0]]
    assert TrackedBaseline()(one)[0].tolist() == [[0.75, 0.75], [0.0, 0.0]]


def test_tracked_whitening_is_over_sequences():
    """A long response counts once: A = (1/2, -1/2) whitens to +-0.7071 whatever the lengths."""
    batch = make_batch([1.0, 0.0], [[1, 1, 1, 1], [1]], [0, 1], baseline=[0.5, 0.5])

    assert TrackedBaseline()(batch)[0][:, 0].tolist() == approx([0.5**0.5, -(0.5**0.5)], rel=1e-7)


def test_equal_up_to_rounding_is_not_blown_up():
    """0.3 - 0.1 and 0.4 - 0.2 differ by 3e-17; whitened they stay below 1e-8."""
    batch = make_batch([0.3, 0.4], [[1], [1]], [0, 1], baseline=[0.1, 0.2])

    assert float(TrackedBaseline()(batch)[0].abs().max()) < 1e-8


def test_a_missing_baseline_is_named():
    """Without tracked values the message says where they come from."""
    with pytest.raises(ConfigError, match=r"TrackedBaseline needs the tracked value .* \(Batch.baseline\)"):
        SPO.prepare(make_batch([1.0], [[1]]))


def test_a_missing_reference_is_named():
    """A KL in the reward needs both policies."""
    with pytest.raises(ConfigError, match="needs 'reference'"):
        Returns(kl=0.1)(make_batch([1.0], [[1]]))
    with pytest.raises(ConfigError, match="needs 'proximal'"):
        LeaveOneOut(kl=0.1)(make_batch([1.0, 0.0], [[1], [1]], reference=[[0.0], [0.0]]))


def test_returns_skip_holes_and_end_on_the_last_trained_token():
    """Reward 1 with gamma 1/2 over trained tokens (1, 1, hole, 1, hole): 1/4, 1/2, 0, 1, 0."""
    batch = make_batch([1.0, 2.0], [[1, 1, 0, 1, 0], [0, 0]], [0, 1])

    assert Returns(gamma=0.5)(batch)[0].tolist() == [[0.25, 0.5, 0.0, 1.0, 0.0], [0.0] * 5]


def test_returns_less_the_batch_mean():
    """Rewards 1 and 0 and an error: the mean is 1/2."""
    batch = make_batch([1.0, 0.0, None], [[1], [1], [1]], [0, 1, 2])

    assert Returns(baseline="batch")(batch)[0].tolist() == [[0.5], [-0.5], [0.0]]


def test_a_kl_in_the_reward_counts_in_the_group():
    """x = r - kl sum d: (1 - 0.5 * 1, 0 - 0.5 * (-1)) = (0.5, 0.5), so no response is better."""
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], proximal=[[-1.0, -1.0], [-2.0]], reference=[[-1.5, -1.5], [-1.0]])

    assert LeaveOneOut(kl=0.5)(batch)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_degenerate_groups_do_not_push_when_whitened():
    """Groups (1, 0) and (1, 1): with the option the second is left out of mean and variance, and 0."""
    batch = make_batch([1.0, 0.0, 1.0, 1.0], [[1, 1], [1], [1], [1]], [0, 0, 1, 1])
    inner = GroupRelative(scale="none")

    kept, _ = Whitened(inner, skip_degenerate=True)(batch)
    plain, _ = Whitened(inner)(batch)

    # Tokens (1/2, 1/2, -1/2): mean 1/6, deviation sqrt(2)/3.
    assert kept[:, 0].tolist() == approx([0.5**0.5, -(2**0.5), 0, 0], rel=1e-6)
    assert plain[2, 0] < 0


def test_advantages_have_the_dtype_of_the_batch():
    """Computed in float64, returned in the batch's float32."""
    batch = make_batch([1.0, 0.0], [[1], [1]], dtype=torch.float32, baseline=[0.5, 0.25])

    for piece in (GroupRelative(), LeaveOneOut(), OptimalBaseline(), Returns(), TrackedBaseline(), Whitened(Returns())):
        assert piece(batch)[0].dtype == torch.float32


def test_measured_advantages_of_a_tracked_baseline():
    """r - v = (0.01, 0.5, -0.00005): two within 0.02, one within 0.0001, and whitened none is exactly 0."""
    batch = make_batch([1.0, 1.0, 0.0], [[1], [1, 1], [1]], range(3), baseline=[0.99, 0.5, 0.00005])

    measured = measure_advantages(SPO, SPO.prepare(batch)).values()

    assert measured["advantage/near_zero_fraction"] == approx(2 / 3)
    assert measured["advantage/negligible_fraction"] == approx(1 / 3)
    assert measured["advantage/exact_zero_fraction"] == 0
    assert measured["advantage/mean"] == approx((0.01 + 0.5 - 0.00005) / 3)
    assert measured["advantage/std"] == approx(0.23331, abs=1e-4)


def test_measured_advantages_of_groups():
    """One of two groups is degenerate: half of the responses train nothing; errors are not counted."""
    batch = make_batch([1.0, 0.0, 1.0, 1.0, None], [[1]] * 5, [0, 0, 1, 1, 1])

    measured = measure_advantages(GRPO, GRPO.prepare(batch)).values()

    assert measured["advantage/exact_zero_fraction"] == 0.5
    assert measured["advantage/abs_max"] == 0.5


def test_truncated_responses_leave_the_loss_and_stay_in_the_statistics():
    """With mask_truncated the group's mean still counts the truncated response's reward."""
    batch = make_batch([1.0, 0.0], [[1], [1]], is_truncated=[False, True])

    prepared = replace(GRPO, mask_truncated=True).prepare(batch)

    assert prepared.mask.tolist() == [[True], [False]]
    assert prepared.advantages is not None
    assert prepared.advantages[:, 0].tolist() == approx([0.5**0.5, 0.0], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupRelative(epsilon=-1.0), "GroupRelative.epsilon must be >= 0"),
        (lambda: TrackedBaseline(epsilon=-1.0), "TrackedBaseline.epsilon must be >= 0"),
        (lambda: Returns(gamma=-0.1), r"Returns.gamma must be in \[0, 1\]"),
        (lambda: Returns(kl=-1.0), "Returns.kl must be >= 0"),
        (lambda: LeaveOneOut(kl=-1.0), "LeaveOneOut.kl must be >= 0"),
        (lambda: Whitened(Returns(), epsilon=0.0), "Whitened.epsilon must be > 0"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str):
    """Each field says its range and the value."""
    with pytest.raises(ConfigError, match=message):
        make()
