"""What must hold for single pieces, whatever the batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import Drawn, drawn, few, on_policy, same

from gnomon.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    P3O,
    P3O_TWO_ANCHOR,
    Cap,
    Capped,
    Clip,
    ClippedSurrogate,
    DivergenceMask,
    GroupRelative,
    LeaveOneOut,
    MaskedIS,
    OffPolicyMask,
    OptimalBaseline,
    PolicyGradient,
    RejectionSampling,
    Returns,
    SequenceMean,
    TokenMean,
    TrackedBaseline,
    TruncatedIS,
    Whitened,
)
from gnomon.algorithms.protocols import Advantage, Correction
from gnomon.algorithms.ratios import Statistics
from gnomon.core.metrics import EffectiveSize
from gnomon.testing import loss_and_gradient, make_batch

approx = pytest.approx


@few
@given(drawn(), st.floats(-3, 3))
def test_effective_size_is_a_fraction_and_has_no_scale(d: Drawn, shift: float):
    """1/n <= e <= 1; a shift of all log-ratios leaves e; equal ratios give 1, and the leash is then exactly 0 (P8)."""
    size = P3O.statistics(d.current, d.batch).behavior
    count = max(int(size.count), 1)

    assert 1 / count - 1e-12 <= size.value <= 1 + 1e-12
    assert P3O.statistics(d.current + shift, d.batch).behavior.value == approx(size.value, rel=1e-10)
    assert P3O.statistics(d.batch.behavior, d.batch).behavior.value == 1.0
    for algorithm in (P3O, P3O_TWO_ANCHOR):
        weighed = algorithm.weigh(algorithm.prepare(on_policy(d.batch)))
        behavior = weighed.behavior.clone().requires_grad_()
        loss = algorithm.loss(behavior, -behavior, weighed, algorithm.statistics(behavior, weighed))
        alone = replace(algorithm, regularizers=())
        _, free = loss_and_gradient(alone, weighed, weighed.behavior)

        assert loss.parts["ess_kl"] == 0
        assert torch.equal(torch.autograd.grad(loss.total, behavior)[0], free)


@few
@given(st.integers(1, 8), st.integers(0, 8), st.floats(0.01, 100))
def test_effective_size_counts_the_ratios_that_matter(alive: int, dead: int, ratio: float):
    """Of n ratios, k equal ones and the rest 0, e is k / n (P8)."""
    size = EffectiveSize.of([ratio] * alive + [0.0] * dead)

    assert size.value == approx(alive / (alive + dead), rel=1e-12)


@few
@given(drawn())
def test_group_estimators_relate(d: Drawn):
    """RLOO is G / (G - 1) Dr. GRPO; OPO is Dr. GRPO at equal lengths, and its token sum is 0 in every group (P12)."""
    graded = d.batch.is_graded
    centered = GroupRelative(scale="none").center(d.batch)
    size = torch.stack([(graded & (d.batch.group == g)).sum() for g in d.batch.group]).double()[:, None]
    factor = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
    same(LeaveOneOut().center(d.batch), factor * centered, 1e-12)

    opo = OptimalBaseline().center(d.batch)
    for g in d.batch.group.unique():
        rows = d.batch.group == g
        assert float(opo[rows].sum()) == approx(0, abs=1e-12)
    square = d.batch.with_fields(mask=graded[:, None].expand_as(d.batch.mask))
    same(OptimalBaseline().center(square), GroupRelative(scale="none").center(square), 1e-12)


@few
@given(drawn(), st.floats(-10, 10), st.floats(0.1, 10))
def test_group_advantages_ignore_shift_and_scale_of_rewards(d: Drawn, shift: float, scale: float):
    """A constant added to all rewards changes nothing, nor does a factor at epsilon 0; sums a group are 0 (P13)."""
    square = d.batch.with_fields(mask=d.batch.is_graded[:, None].expand_as(d.batch.mask))
    piece = GroupRelative(epsilon=0.0)
    advantages, _ = piece(square)
    moved, _ = piece(square.with_fields(rewards=square.rewards * scale + shift))

    same(moved, advantages, 1e-9)
    for g in square.group.unique():
        assert float(advantages[square.group == g, 0].sum()) == approx(0, abs=1e-12)


@pytest.mark.parametrize("piece", [GroupRelative(epsilon=0.0), GroupRelative(scale="none"), LeaveOneOut()], ids=repr)
@few
@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 9))
def test_equal_rewards_are_exactly_zero_in_single_precision(piece: Advantage, reward: float, size: int):
    """Whatever the reward and however it rounds, a group that agrees has advantage 0, also without an epsilon (P13)."""
    batch = make_batch([reward] * size + [reward + 1], [[1]] * (size + 1), [0] * size + [1], dtype=torch.float32)

    assert not bool(piece(batch)[0].any())


@few
@given(drawn())
def test_a_wider_clip_clips_less_and_is_never_optimistic(d: Drawn):
    """A wider band never clips more, and each token's loss is at least that of the plain ratio (P15, P16)."""
    batch = GRPO.weigh(GRPO.prepare(d.batch))
    fractions = []
    for width in (0.05, 0.1, 0.2, 0.4):
        view = GRPO.view(d.current, d.current, batch, Statistics())
        loss, metrics = ClippedSurrogate(Clip(width, width))(view)
        fractions.append(metrics["loss/clipped_fraction"])
        plain = -view.advantages * view.log_ratio.exp()

        assert bool((loss >= plain - 1e-15).all())
        dual, _ = ClippedSurrogate(Clip(width, width), dual=3.0)(view)
        assert bool((dual <= torch.maximum(loss, torch.zeros(()))).all())
        assert bool((dual[view.advantages < 0] <= (-3 * view.advantages)[view.advantages < 0] + 1e-15).all())

    assert fractions == sorted(fractions, reverse=True)


@few
@given(drawn())
def test_a_cap_that_never_acts_has_the_gradient_of_the_plain_ratio(d: Drawn):
    """CISPO without a cap has the gradient of -r A (P17)."""
    batch = CISPO.prepare(d.batch)
    _, capped = loss_and_gradient(replace(CISPO, surrogate=PolicyGradient(Cap(float("inf")))), batch, d.current)
    _, plain = loss_and_gradient(replace(CISPO, surrogate=ClippedSurrogate(Clip(1e9, 1e9))), batch, d.current)

    same(capped, plain, 1e-12)


LEVELS = ("token", "sequence", "geometric")
OF_PROXIMAL = [piece(level=level) for piece in (TruncatedIS, MaskedIS, RejectionSampling) for level in LEVELS]
OF_CURRENT = [
    Capped(),
    OffPolicyMask(),
    DivergenceMask(),
    DivergenceMask("kl", 0.01, "sequence"),
    DivergenceMask("kl", 0.01, side="outward"),
]


@pytest.mark.parametrize("correction", [*OF_PROXIMAL, *OF_CURRENT], ids=repr)
@few
@given(drawn())
def test_without_a_mismatch_corrections_do_nothing(correction: Correction, d: Drawn):
    """Where behavior is proximal, and current for those that look at it, loss and gradient keep every bit (P18)."""
    batch = DAPO.prepare(d.batch.with_fields(proximal=d.batch.behavior))
    current = d.batch.behavior if correction in OF_CURRENT else d.current
    loss, gradient = loss_and_gradient(DAPO, batch, current)
    corrected, other = loss_and_gradient(replace(DAPO, correction=correction), batch, current)

    assert corrected == loss
    assert torch.equal(other, gradient)


@few
@given(drawn(), st.floats(0.1, 5), st.floats(-2, 2))
def test_whitened_advantages_have_mean_zero_and_variance_one(d: Drawn, scale: float, shift: float):
    """Over tokens for `Whitened`, sequences for `TrackedBaseline`; affine changes of rewards change nothing (P28)."""
    piece = Whitened(Returns(), epsilon=1e-16)
    values = piece(d.batch)[0][d.batch.mask]
    inner = Returns().center(d.batch)[d.batch.mask]
    if len(inner) and float(inner.max() - inner.min()) > 0.1:
        assert float(values.mean()) == approx(0, abs=1e-9)
        assert float(values.std(correction=0)) == approx(1, abs=1e-9)
        moved = d.batch.with_fields(rewards=d.batch.rewards * scale + shift)
        same(piece(moved)[0][d.batch.mask], values, 1e-6)

    square = d.batch.with_fields(mask=d.batch.is_graded[:, None].expand_as(d.batch.mask))
    raw, final = TrackedBaseline(normalize=False)(square)[0], TrackedBaseline(epsilon=0.0)(square)[0]
    rows = square.is_graded
    if int(rows.sum()) > 1:
        assert float(final[rows, 0].mean()) == approx(0, abs=1e-9)
        assert float(final[rows, 0].std()) == approx(1, abs=1e-9)
        same(final[rows, 0], (raw[rows, 0] - raw[rows, 0].mean()) / raw[rows, 0].std(), 1e-9)


@few
@given(drawn())
def test_a_tracked_baseline_ignores_other_prompts_rewards(d: Drawn):
    """Before whitening, a response's advantage depends on its own reward and baseline only."""
    piece = TrackedBaseline(normalize=False)
    first = piece(d.batch)[0][0]
    others = d.batch.rewards.clone()
    others[1:] = 1 - others[1:]

    assert torch.equal(piece(d.batch.with_fields(rewards=others))[0][0], first)


@few
@given(drawn())
def test_means_weigh_one_in_all(d: Drawn):
    """Token and sequence means have weights that sum to one, whenever a token is trained."""
    total = 1.0 if bool(d.batch.mask.any()) else 0.0
    for aggregate in (TokenMean(), TokenMean("group"), SequenceMean()):
        weights = aggregate(d.batch.mask, d.batch.group)

        assert float(weights.sum()) == approx(total)
        assert not bool(weights[~d.batch.mask].any())
