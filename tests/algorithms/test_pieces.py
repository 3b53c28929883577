"""Single pieces at single points, with numbers that can be checked by hand."""

import math
import re
from dataclasses import MISSING, fields, replace

import pytest
import torch

from gnomon.algorithms import (
    CISPO,
    GRPO,
    NAMED,
    P3O,
    SPO,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    ConstantLength,
    Entropy,
    GeometricClip,
    Kl,
    MaskedIS,
    PolicyGradient,
    PositiveNll,
    Ratio,
    SigmoidGate,
    TokenMean,
    TruncatedIS,
    describe,
    summary,
)
from gnomon.algorithms.describe import NOTES
from gnomon.algorithms.pieces import slots
from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import ConfigError
from gnomon.testing import loss_and_gradient, make_batch

approx = pytest.approx


def one_token(surrogate: object, ratio: float, advantage: float) -> tuple[float, float]:
    """Return loss and d loss / d log current of one token."""
    batch = make_batch([1.0], [[1]], advantages=[[advantage]], proximal=[[-1.0]])
    algorithm = replace(GRPO, surrogate=surrogate)
    loss, gradient = loss_and_gradient(algorithm, batch, torch.tensor([[math.log(ratio) - 1]], dtype=torch.float64))
    return loss, float(gradient)


def test_clip_stops_pushing_once_the_ratio_is_out():
    """Above 1 + high with a positive advantage, the gradient is zero: -min(1.5 * 2, 1.2 * 2) = -2.4."""
    assert one_token(ClippedSurrogate(Clip(0.2, 0.2)), 1.5, 2.0) == approx((-2.4, 0.0))


def test_clip_pushes_back_what_went_the_wrong_way():
    """At ratio 1.5 with A = -2 nothing is clipped: loss 3, slope 3."""
    assert one_token(ClippedSurrogate(Clip(0.2, 0.2)), 1.5, -2.0) == approx((3.0, 3.0))


def test_a_dual_clip_bounds_what_a_bad_token_can_cost():
    """At ratio 5 with A = -2 and dual 3: 6 in place of 10, and no gradient."""
    assert one_token(ClippedSurrogate(Clip(0.2, 0.2), dual=3.0), 5.0, -2.0) == approx((6.0, 0.0))
    assert one_token(ClippedSurrogate(Clip(0.2, 0.2), dual=3.0), 2.0, -2.0) == approx((4.0, 4.0))


def test_a_low_of_one_has_no_lower_bound():
    """With low = 1 the ratio 0.001 is not clipped: A = -1 gives loss 0.001."""
    assert one_token(ClippedSurrogate(Clip(1.0, 0.2)), 0.001, -1.0) == approx((0.001, 0.001))


def test_a_capped_score_keeps_a_gradient():
    """Ratio 8, cap 5, A = 2: the slope is -10."""
    assert one_token(PolicyGradient(Cap(5.0)), 8.0, 2.0)[1] == approx(-10.0)


def test_a_soft_gate_has_the_slope_of_the_ratio_at_one():
    """At ratio 1 the slope is -A for both signs, at ratio 3 it has faded to 4 s (1 - s) 3 A, s = sigmoid(2)."""
    s = 1 / (1 + math.exp(-2))

    assert one_token(SigmoidGate(), 1.0, 2.0)[1] == approx(-2.0)
    assert one_token(SigmoidGate(), 1.0, -2.0)[1] == approx(2.0)
    assert one_token(SigmoidGate(), 3.0, 1.0)[1] == approx(-4 * s * (1 - s) * 3)


@pytest.mark.parametrize("estimator", ["k3", "k2_grad_k3", "unbiased"])
def test_a_bounded_kl_still_pushes_the_right_way(estimator: str):
    """At a log-ratio of -40, beyond the clamp, descent raises the token's probability: the slope is negative."""
    batch = make_batch([1.0], [[1]], behavior=[[-1.0]], reference=[[-1.0]], proximal=[[-1.0]], advantages=[[0.0]])
    algorithm = replace(GRPO, regularizers=(Kl("reference", 1.0, estimator),))

    loss, gradient = loss_and_gradient(algorithm, batch, torch.tensor([[-41.0]], dtype=torch.float64))

    assert math.isfinite(loss)
    assert float(gradient) < 0


def test_an_effective_size_that_is_no_number_is_never_trusted():
    """A ratio that overflows makes the whole step's loss not a number, so that the learner skips it."""
    batch = make_batch([1.0, 0.0], [[1], [1]], behavior=[[-800.0], [-1.0]])
    prepared = P3O.prepare(batch)

    loss, _ = loss_and_gradient(P3O, prepared, torch.tensor([[-1.0], [-1.0]], dtype=torch.float64))

    assert math.isnan(loss)


def test_entropy_is_rewarded():
    """Coefficient 0.1 and entropy 0.5 on each token give -0.05."""
    batch = make_batch([1.0], [[1, 1]], advantages=[[0.0, 0.0]], proximal=[[-1.0, -1.0]])
    algorithm = replace(GRPO, regularizers=(Entropy(0.1),))

    loss, gradient = loss_and_gradient(algorithm, batch, torch.full((1, 2), -1.0, dtype=torch.float64))

    assert loss == approx(-0.05)
    assert gradient.tolist() == [approx([0.025, 0.025])]


def test_imitation_divides_by_tokens_of_correct_responses():
    """Three tokens of two correct responses, -log p = 1 each, coefficient 0.1: 0.1 in all, 0 for the wrong one."""
    batch = make_batch([1.0, 0.0, 0.5], [[1, 1], [1, 1], [1]], advantages=[[0.0] * 2] * 3, proximal=[[-1.0] * 2] * 3)
    algorithm = replace(GRPO, regularizers=(PositiveNll(0.1),))

    loss, gradient = loss_and_gradient(algorithm, batch, torch.full((3, 2), -1.0, dtype=torch.float64))

    assert loss == approx(0.1)
    assert gradient[1].tolist() == [0.0, 0.0]
    assert float(gradient.sum()) == approx(-0.1)


def test_terms_at_coefficient_zero_cost_no_row():
    """A KL, entropy or imitation of 0 keeps no dead row alive and needs no scores."""
    batch = make_batch([1.0, 1.0], [[1], [1]])
    terms = (Kl(coefficient=0.0), Entropy(0.0), PositiveNll(0.0))
    algorithm = replace(GRPO, regularizers=terms)
    weighed = algorithm.weigh(algorithm.prepare(batch))

    assert algorithm.live_rows(weighed).tolist() == [False, False]
    assert algorithm.loss(batch.behavior, batch.behavior, weighed, Statistics()).total == 0


def test_a_missing_reference_is_named():
    """A KL loss without a reference says which log-probabilities are missing."""
    algorithm = replace(GRPO, regularizers=(Kl(coefficient=0.1),))
    batch = make_batch([1.0, 0.0], [[1], [1]])

    with pytest.raises(ConfigError, match="needs 'reference' log-probabilities"):
        loss_and_gradient(algorithm, algorithm.prepare(batch), batch.behavior)


def test_token_mean_by_group_counts_each_prompt_once():
    """Groups of 3 and 1 tokens: 1/6 for each of the three, 1/2 for the other."""
    batch = make_batch([1.0, 0.0, 1.0], [[1, 1], [1], [1]], [5, 5, 9])

    weights = TokenMean("group")(batch.mask, batch.group)

    assert weights.tolist() == [approx([1 / 6, 1 / 6]), approx([1 / 6, 0]), approx([1 / 2, 0])]


def test_an_empty_group_is_no_group():
    """A prompt whose responses are all masked counts for nothing."""
    batch = make_batch([1.0, 0.0], [[1, 1], [0]], [0, 1])

    assert TokenMean("group")(batch.mask, batch.group).tolist() == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(0.0, 0.2), "Clip.low must be > 0, got 0"),
        (lambda: Clip(0.2, 0.0), "Clip.high must be > 0, got 0"),
        (lambda: Cap(0.0), "Cap.cap must be > 0"),
        (lambda: Cap(1.0, 2.0), r"Cap.floor must be in \[0, 1.0\], got 2.0"),
        (lambda: SigmoidGate(0.0), "SigmoidGate.positive must be > 0"),
        (lambda: SigmoidGate(1.0, -1.0), "SigmoidGate.negative must be > 0"),
        (lambda: GeometricClip(0.0), "GeometricClip.epsilon must be > 0"),
        (lambda: TruncatedIS(0.0), "TruncatedIS.cap must be > 0"),
        (lambda: MaskedIS(2.0, 1.0), "MaskedIS needs 0 <= low < high"),
        (lambda: Kl(coefficient=-1.0), "Kl.coefficient must be >= 0"),
        (lambda: PositiveNll(-1.0), "PositiveNll.coefficient must be >= 0"),
        (lambda: ConstantLength(0), "ConstantLength.length must be at least 1"),
        (lambda: Ratio(clamp=0.0), "Ratio.clamp must be > 0"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str):
    """Each field says its range and the value."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_presets_are_called_by_their_name():
    """The table's keys are the names, and each says its paper and, where one is needed, how it differs."""
    assert all(name == preset.name and preset.paper for name, preset in NAMED.items())
    assert set(NOTES) == set(NAMED)


@pytest.mark.parametrize("preset", NAMED.values(), ids=lambda a: a.name)
def test_descriptions_say_everything(preset: Algorithm):
    """Name, paper, every piece, and every note, within 100 columns."""
    text = describe(preset)
    joined = " ".join(text.split())

    assert max(map(len, text.splitlines())) <= 100
    assert preset.paper in joined
    assert " ".join(repr(preset.surrogate).split()) in joined
    assert all(note in joined for note in NOTES[preset.name])
    assert preset.name in summary()


def test_a_user_algorithm_is_described_without_notes():
    """Notes belong to presets; another name has none."""
    assert "where it differs" not in describe(replace(CISPO, name="mine"))


def test_the_papers_settings():
    """SPO: eight updates, 0.05, clip-higher; GRPO: a mean over responses and a clip of 0.2 on both sides."""
    assert (SPO.updates.total, SPO.sampler.epsilon) == (8, 0.05)
    assert SPO.surrogate == ClippedSurrogate(Clip(0.2, 0.28))
    assert GRPO.surrogate == ClippedSurrogate(Clip(0.2, 0.2))


@pytest.mark.parametrize("value", ["0", None, [1], math.nan, -math.inf, 10**400], ids=lambda value: str(value)[:4])
def test_what_is_no_number_is_refused_with_the_field(value: object):
    """Every piece that has numbers is made, and judged in its composition, or names the field; it never breaks."""
    made, said = 0, []
    for piece in {cls for fitting in slots().values() for cls in fitting.values()}:
        has_needs = any(f.init and (f.default, f.default_factory) == (MISSING, MISSING) for f in fields(piece))
        for name in (f.name for f in fields(piece) if f.init and f.type in (int, float) and not has_needs):
            made += 1
            try:
                piece(**{name: value})
            except ConfigError as error:
                said.append((name, str(error)))

    assert made > 80
    assert [each for name, each in said if not re.search(rf"\b{name}\b", each)] == []
