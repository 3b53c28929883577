"""Reference values of the critic family, of P3O's two anchors and of A*-PO's regression."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms.test_golden import FIXTURE, GOLDEN, approx, close, exact, fixture, run
from torch import Tensor

from gnomon.algorithms import (
    A_STAR_PO,
    GRPO,
    P3O_TWO_ANCHOR,
    VAPO,
    Capped,
    CriticConfig,
    DivergenceMask,
    EssKl,
    Fixed,
    Gae,
    LengthAdaptive,
    LengthSigmoid,
    MaskedIS,
    OffPolicyMask,
    RejectionSampling,
    SelfImitation,
    TokenMean,
    TruncatedIS,
    Whitened,
    measure_values,
)
from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import ConfigError
from gnomon.testing import loss_and_gradient, make_batch

GAE = GOLDEN["gae"]
NONE = Statistics()


def valued(**more: Any) -> Any:
    """Return the reference's sequences with its values."""
    return fixture(values=FIXTURE["values"], **more)


def advantages(piece: Any, batch: Any) -> Tensor:
    """Return the advantages of a piece."""
    return piece(batch)[0]


@pytest.mark.parametrize(
    ("piece", "key"),
    [
        (Gae(Fixed(1.0)), "lam1_adv"),
        (Gae(Fixed(0.95)), "lam095_adv"),
        (Gae(Fixed(0.0)), "lam0_adv"),
        (Whitened(Gae(Fixed(0.95))), "whitened_lam095_population"),
        (Whitened(Gae(Fixed(0.95)), ddof=1), "whitened_lam095_bessel"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_generalized_advantages(piece: Any, key: str):
    """Lambda 1, 0.95 and 0, and both whitenings."""
    close(advantages(piece, valued()), GAE[key], atol=1e-12)


def test_targets_have_a_lambda_of_their_own():
    """A value lambda of 1 aims at the return whatever the policy's lambda is, and whitening leaves targets alone."""
    for piece in (Gae(Fixed(0.3)), Whitened(Gae(LengthAdaptive()))):
        _, returns = piece(valued())
        assert returns is not None
        close(returns, GAE["lam1_returns"], atol=1e-12)


def test_tool_output_is_skipped():
    """A hole of masked tokens carries value and advantage across; what stands there is never read."""
    mask = torch.tensor(GAE["tool_hole_mask"]).bool()
    values = torch.where(mask, torch.tensor(FIXTURE["values"], dtype=torch.float64), math.nan)
    batch = make_batch(FIXTURE["rewards"], GAE["tool_hole_mask"], FIXTURE["gid"], values=values.tolist())

    close(advantages(Gae(Fixed(0.95)), batch), GAE["tool_hole_lam095_adv"], atol=1e-12)


def test_a_truncated_response_may_go_on_in_the_critics_word():
    """With truncation = "value" the second response, cut off, ends in 0.3; with "terminal" in 0."""
    expected = GAE["truncated_seq1_bootstrap_0p3_lam095"]
    batch = valued(is_truncated=[False, True, False, False])
    batch = batch.with_fields(bootstrap=torch.tensor([9.0, 0.3, 9.0, 9.0], dtype=torch.float64))
    found, returns = Gae(Fixed(0.95), value_lambda=0.95, truncation="value")(batch)

    close(found, expected["adv"], atol=1e-12)
    assert returns is not None
    close(returns, expected["returns"], atol=1e-12)
    close(advantages(Gae(Fixed(0.95)), batch), GAE["lam095_adv"], atol=1e-12)
    with pytest.raises(ConfigError, match="truncation = 'terminal'"):
        Gae(truncation="value")(valued())


def test_lambda_by_length():
    """The table of 1 - 1 / (alpha length), which is 0 up to 20 tokens; and alpha 1 on the short fixture."""
    assert LengthAdaptive(0.05)(torch.tensor([1, 10, 20, 21, 40, 100, 200, 400, 1000, 4000, 20000])).tolist() == approx(
        [0, 0, 0, 1 / 21, 0.5, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999], abs=1e-12
    )
    assert LengthAdaptive(0.05).shortest == 21
    close(advantages(Gae(LengthAdaptive(1.0)), valued()), GAE["length_adaptive_alpha_1"]["adv"], atol=1e-12)


def test_lambda_by_length_among_others():
    """The review's sigmoid of a batch of 200, 1000, 4000 and 8000 tokens, with the sample's deviation."""
    found = LengthSigmoid(0.3, 0.95)(torch.tensor([200, 1000, 4000, 8000]))

    assert found.tolist() == approx([0.49096365, 0.52283895, 0.65707717, 0.81401581], abs=1e-8)


def test_the_value_loss():
    """Half the mean squared error over tokens, and its clipped form."""
    now = torch.tensor(GAE["vf_new"], dtype=torch.float64)
    batch = Gae(Fixed(1.0))(valued())[1]
    cut = valued().with_fields(returns=batch)
    cut = cut.with_fields(weights=TokenMean()(cut.mask, cut.group))

    assert float(CriticConfig().loss(now, cut)[0]) == approx(GAE["value_loss_unclipped"], **exact)
    assert float(CriticConfig(clip=0.2).loss(now, cut)[0]) == approx(GAE["value_loss_clip_0p2"], **exact)


def test_explained_variance():
    """One minus the variance of the error over that of the return."""
    batch = valued()
    prepared = batch.with_fields(returns=Gae(Fixed(1.0))(batch)[1])

    assert measure_values(prepared)["critic/explained_variance"] == approx(GAE["explained_variance"], **exact)


def test_vapo():
    """Value and gradient of the whole loss, imitation over its own tokens included."""
    expected = GOLDEN["vapo"]
    algorithm = replace(VAPO, advantage=Gae(LengthAdaptive(1.0)))
    loss, gradient, _ = run(algorithm, valued())

    assert loss == approx(expected["loss"], **exact)
    close(gradient, expected["dloss_dlp"])


def test_self_imitation():
    """The mean over trained tokens of -(R - V)_+ log current; the critic's part is one-sided."""
    expected = GOLDEN["sil"]
    algorithm = replace(VAPO, advantage=Gae(Fixed(1.0)), regularizers=(SelfImitation(1.0),))
    lp = torch.tensor(FIXTURE["lp"], dtype=torch.float64)
    weighed = algorithm.weigh(algorithm.prepare(valued()))
    values = torch.tensor(FIXTURE["values"], dtype=torch.float64)

    assert algorithm.loss(lp, lp, weighed, NONE).parts["self_imitation"] == approx(expected["policy_loss"], **exact)
    assert float(CriticConfig().loss(values, weighed, one_sided=True)[0]) == approx(expected["value_loss"], **exact)


def test_two_anchors():
    """P3O between behavior and proximal, with the reference code's estimator."""
    expected = GOLDEN["p4o_mixture_anchor"]
    algorithm = replace(P3O_TWO_ANCHOR, regularizers=(EssKl("k3", "mixture"),))
    batch = fixture(proximal="prox")
    lp = torch.tensor(FIXTURE["lp"], dtype=torch.float64)
    statistics = algorithm.statistics(lp, batch)

    assert statistics.behavior.value == approx(expected["ess_b"], **exact)
    assert statistics.proximal.value == approx(expected["ess_prox"], **exact)
    assert run(algorithm, batch)[0] == approx(expected["loss"], **exact)


def test_regression_to_the_advantage():
    """A*-PO on two responses: 1e-3 times the log-ratio to the reference against r - V*."""
    expected = GOLDEN["a_star_po"]
    batch = make_batch(
        expected["outcome"],
        [[1, 1], [1, 1]],
        [0, 1],
        baseline=[expected["v_star"]] * 2,
        reference=[[x / 2] * 2 for x in expected["seq_ref_logp"]],
    )
    current = torch.tensor([[x / 4, 3 * x / 4] for x in expected["seq_logp"]], dtype=torch.float64)
    prepared = A_STAR_PO.prepare(batch)
    loss, gradient = loss_and_gradient(A_STAR_PO, prepared, current)
    gaps = [(1 - expected["v_star"]) - 1e-3 * 0.5, (0 - expected["v_star"]) + 1e-3 * 1.0]

    assert loss == approx(expected["loss"], **exact)
    close(gradient, [[-2e-3 * gap / 2] * 2 for gap in gaps], atol=1e-12)


def test_a_regression_is_not_dead_where_the_advantage_is_zero():
    """At r = V* the loss still pulls to the reference, so the row is computed."""
    batch = make_batch([1.0], [[1]], baseline=[1.0], reference=[[-2.0]])
    weighed = A_STAR_PO.weigh(A_STAR_PO.prepare(batch))

    assert A_STAR_PO.live_rows(weighed).tolist() == [True]
    _, gradient = loss_and_gradient(A_STAR_PO, weighed, torch.tensor([[-1.0]], dtype=torch.float64))
    assert float(gradient) == approx(2 * 1e-6 * 1.0)


def factor(correction: Any, proximal: list[list[float]], current: list[list[float]], rewards: list[float]) -> Any:
    """Return the factors that a correction gives two responses whose behavior is -1 everywhere."""
    algorithm = replace(GRPO, correction=correction)
    batch = algorithm.prepare(make_batch(rewards, [[1] * len(row) for row in proximal], proximal=proximal))
    lp = torch.tensor(current, dtype=torch.float64)
    found, _ = correction(algorithm.view(lp, lp, algorithm.weigh(batch), NONE))
    return found.tolist()


def test_filters_of_whole_responses():
    """By the geometric mean of proximal / behavior: e^0.5 lies within [0.5, 2]; tokens may stick out."""
    rows = [[-1.5, 0.5], [-1.0, 1.0]]

    assert factor(RejectionSampling(0.5, 2.0), rows, rows, [1.0, 0.0]) == [[1, 1], [0, 0]]
    assert factor(RejectionSampling(0.5, 2.0, level="token"), rows, rows, [1.0, 0.0]) == [[1, 0], [1, 0]]
    assert factor(TruncatedIS(1.2, level="geometric"), rows, rows, [1.0, 0.0]) == [[1.2, 1.2], [1.2, 1.2]]


def test_what_was_pushed_far_down_is_not_pushed_further():
    """A mean fall of 0.6 nats is left out if the advantage is negative and the bound lower; else it stays."""
    current = [[-1.6, -1.6], [-1.6, -1.6]]

    assert factor(OffPolicyMask(0.5), current, current, [1.0, 0.0]) == [[1, 1], [0, 0]]
    assert factor(OffPolicyMask(0.7), current, current, [1.0, 0.0]) == [[1, 1], [1, 1]]


def test_a_difference_of_probabilities_spares_rare_tokens():
    """From e^-1 = 0.368 to e^-0.1 = 0.905 is 0.54 apart; to e^-3 = 0.05 it is 0.32."""
    current = [[-0.1, -3.0], [-1.0, -1.0]]

    assert factor(DivergenceMask("tv", 0.3), current, current, [1.0, 0.0]) == [[0, 0], [1, 1]]
    assert factor(DivergenceMask("tv", 0.4), current, current, [1.0, 0.0]) == [[0, 1], [1, 1]]


def test_the_whole_ratio_is_capped():
    """current / behavior = e^3 is brought down to 10 by a factor of 10 / e^2 beside current / proximal = e^2."""
    found = factor(Capped(10.0), [[0.0], [-1.0]], [[2.0], [-1.0]], [1.0, 0.0])

    assert found[0] == [approx(10 / math.exp(2))]
    assert found[1] == [1.0]


def test_masks_and_weights_agree_within_the_band():
    """IcePop weighs what a filter of the same band keeps."""
    rows = [[-1.2, -0.7], [-1.0, 1.0]]
    kept, weighed = (
        factor(c, rows, rows, [1.0, 0.0]) for c in (RejectionSampling(0.5, 2.0, "token"), MaskedIS(0.5, 2.0))
    )

    assert [[w > 0 for w in row] for row in weighed] == [[k == 1 for k in row] for row in kept]
