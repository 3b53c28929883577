"""Reference values of every formula, made by an independent float64 program, and gradients by finite differences."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import (
    CISPO,
    DAPO,
    DR_GRPO,
    GDPO,
    GIGPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LUFFY,
    P3O,
    PRESETS,
    SAPO,
    SRFT,
    Accepted,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    ConstantLength,
    EssKl,
    Fixed,
    Gae,
    GeometricClip,
    GroupRelative,
    Kl,
    LeaveOneOut,
    MaskedIS,
    OptimalBaseline,
    PolicyGradient,
    PositiveNll,
    Ratio,
    Returns,
    ReverseKl,
    SequenceMean,
    SequenceSum,
    StateRelative,
    TokenMean,
    TrackedBaseline,
    TruncatedIS,
    Whitened,
)
from gnomon.algorithms.ratios import Statistics
from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import EffectiveSize, Metrics
from gnomon.core.types import GIVEN, Batch
from gnomon.testing import loss_and_gradient, make_batch

approx = pytest.approx

GOLDEN: dict[str, Any] = vectors()
FIXTURE = GOLDEN["fixture"]
exact = {"rel": 1e-10, "abs": 1e-14}


def test_gdpo_normalizes_each_reward_then_the_sum():
    """Two prompts of two answers of one token, rewards right and short with weights 1 and 1/2.

    Right is (1, 0) and (1, 1), short is (0, 1) and (1, 0). In a group of two the deviation of 0 and 1 is 1 / sqrt(2),
    so each that differs has z = +-0.70711: right gives (0.70711, -0.70711) and (0, 0), short half of (-0.70711,
    0.70711) and of (0.70711, -0.70711). The sums are (0.35355, -0.35355) twice: mean 0, sample deviation 0.35355
    sqrt(4 / 3) = 0.40825, so A = +-0.86603. On policy the loss is -mean A = 0, and the slope of a token -A / 4.
    """
    batch = make_batch(
        [1.0, 0.5, 1.5, 1.0],
        [[1]] * 4,
        [0, 0, 1, 1],
        component_rewards=[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]],
        components=("right", "short"),
        component_weights=(1.0, 0.5),
    )
    loss, gradient = loss_and_gradient(GDPO, GDPO.prepare(batch), batch.behavior)

    # Three deviations have 1e-6 added.
    assert loss == approx(0.0, abs=1e-12)
    assert gradient.flatten().tolist() == approx([-0.2165064, 0.2165064, -0.2165064, 0.2165064], abs=3e-6)


CONVERSATIONS = make_batch(
    [1.0, 0.0],
    [[1, 0, 1], [1, 0, 1]],
    turn=[[0, 1, 1], [0, 1, 1]],
    state=[[0, 1, 1], [0, 2, 2]],
    step_rewards=[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]],
)
"""Two conversations of two answers of a token; they part after the first answer, and the second is worth 1 or 0."""


def test_gigpo_adds_what_each_answer_was_worth_in_its_state():
    """The first conversation earned 1, the second 0: z = +-0.70711 for each token.

    Discounted by 0.95, the first answers are worth 0.95 and 0 in one state: +-0.70711 again. The second ones are alone
    in their states: 0. So A is (1.41421, 0.70711) and its negative, and the slope of a token on policy is -A / 4.
    """
    loss, gradient = loss_and_gradient(GIGPO, GIGPO.prepare(CONVERSATIONS), CONVERSATIONS.behavior)

    # Deviations have 1e-6 added.
    assert loss == approx(0.0, abs=1e-12)
    assert gradient.tolist()[0] == approx([-0.3535534, 0.0, -0.1767767], abs=2e-6)
    assert gradient.tolist()[1] == approx([0.3535534, 0.0, 0.1767767], abs=2e-6)


def test_answers_alone_in_their_states_say_nothing_and_turns_need_states():
    """Without equal states only what is alone is left, exactly 0; turns without states are refused."""
    apart = CONVERSATIONS.with_fields(state=torch.tensor([[0, 1, 1], [2, 3, 3]]))

    assert not bool(StateRelative()(apart)[0].any())
    with pytest.raises(ConfigError, match="has turns without states"):
        StateRelative()(CONVERSATIONS.with_fields(state=None))
    alone = CONVERSATIONS.with_fields(turn=None, state=None)
    assert StateRelative(1.0)(alone)[0].tolist() == GroupRelative()(alone)[0].tolist()


def test_returns_and_gae_over_answers():
    """Answers of two tokens with rewards 1 and 2, values 1/2 and 1 before them; gamma = lambda = 1/2.

    Errors: 2 - 1 = 1, and 1 + 1/2 * 1 - 1/2 = 1. Advantages 1, and 1 + 1/4 * 1 = 1.25; with a value lambda of 1, 1 and
    1.5, so targets 2 and 2. Returns: 2, and 1 + 1/2 * 2 = 2. Every token of an answer has its number; other values are
    not read.
    """
    batch = make_batch(
        [3.0],
        [[1, 1, 0, 1, 1]],
        turn=[[0, 0, 1, 1, 1]],
        step_rewards=[[0.0, 1.0, 0.0, 0.0, 2.0]],
        values=[[0.5, 7.0, 7.0, 1.0, 7.0]],
    )
    advantages, targets = Gae(Fixed(0.5), 1.0, 0.5, over="turn")(batch)

    assert advantages.tolist() == [[1.25, 1.25, 0.0, 1.0, 1.0]]
    assert targets is not None
    assert targets.tolist() == [[2.0, 2.0, 0.0, 2.0, 2.0]]
    assert Returns(0.5, over="turn").center(batch).tolist() == [[2.0, 2.0, 0.0, 2.0, 2.0]]


def test_a_reward_counts_from_where_it_was_earned():
    """Rewards 1 and 2 at the second and last of four tokens: later tokens have no part in the first."""
    batch = make_batch([3.0], [[1, 1, 1, 1]], step_rewards=[[0.0, 1.0, 0.0, 2.0]])

    assert Returns().center(batch).tolist() == [[3.0, 3.0, 2.0, 2.0]]
    assert Returns().center(batch.with_fields(step_rewards=None)).tolist() == [[3.0] * 4]
    assert Returns(baseline="batch").center(batch).tolist() == [[0.0, 0.0, -1.0, -1.0]]


def fixture(behavior: str = "old", proximal: str = "old", **more: Any) -> Batch:
    """Return the four sequences of the reference, by the names of its arrays."""
    return make_batch(
        FIXTURE["rewards"],
        FIXTURE["mask"],
        FIXTURE["gid"],
        behavior=FIXTURE[behavior],
        proximal=FIXTURE[proximal],
        reference=FIXTURE["ref"],
        **more,
    )


def run(algorithm: Algorithm, batch: Batch, current: Any = FIXTURE["lp"]) -> tuple[float, Tensor, Metrics]:
    """Return loss, gradient and metrics of one step on ``batch``."""
    lp = torch.tensor(current, dtype=torch.float64)
    prepared = algorithm.prepare(batch)
    weighed = algorithm.weigh(prepared)
    metrics = algorithm.loss(lp, -lp, weighed, algorithm.statistics(lp, weighed)).metrics
    return *loss_and_gradient(algorithm, prepared, lp), metrics


def close(actual: Tensor, expected: Any, atol: float = 1e-7) -> None:
    """Assert equality with an array whose gradients are finite differences (1e-9) or analytic."""
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=atol)


def per_sequence(piece: Any, batch: Batch) -> list[float]:
    """Return the advantage on each sequence's first token."""
    advantages, returns = piece(batch)
    assert returns is None
    return [float(x) for x in advantages[:, 0]]


def groups() -> Batch:
    """Return six responses in two groups, with the lengths of the reference."""
    g = GOLDEN["group_advantages"]
    return make_batch(g["rewards"], [[1] * int(n) for n in g["lengths"]], g["group"])


@pytest.mark.parametrize(
    ("piece", "key"),
    [
        (GroupRelative(), "grpo_unbiased_eps1e6"),
        (GroupRelative(epsilon=1e-4), "grpo_unbiased_eps1e4"),
        (GroupRelative(ddof=0), "grpo_biased_eps1e6"),
        (GroupRelative(scale="none"), "dr_grpo"),
        (LeaveOneOut(), "rloo"),
        (OptimalBaseline(), "opo"),
        (GroupRelative(scale="batch", epsilon=1e-4), "lite_ppo_batch_std_unbiased_eps1e4"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_group_advantages(piece: Any, key: str):
    """Each group estimator gives the reference's advantages."""
    assert per_sequence(piece, groups()) == approx(GOLDEN["group_advantages"][key], **exact)


def test_a_degenerate_group_is_exactly_zero_in_float32_too():
    """Six rewards of 0.3 in float32: a computed deviation gives 0.89, comparing them gives 0."""
    trap = GOLDEN["group_advantages"]["float32_false_signal"]
    batch = make_batch(trap["rewards"], [[1]] * 6, dtype=torch.float32)

    for piece in (GroupRelative(epsilon=1e-9), GroupRelative(epsilon=0.0), LeaveOneOut(), OptimalBaseline()):
        assert per_sequence(piece, batch) == trap["exact"]


@pytest.mark.parametrize(
    ("aggregate", "key"),
    [
        (TokenMean(), "token_mean"),
        (SequenceMean(), "seq_mean_token_mean"),
        (SequenceSum(), "seq_mean_token_sum"),
        (ConstantLength(8), "seq_mean_token_sum_norm"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_aggregation(aggregate: Any, key: str):
    """Each aggregate gives the reference's mean, and 0 when everything is masked."""
    batch, losses = fixture(), torch.tensor(GOLDEN["aggregation"]["token_losses"], dtype=torch.float64)

    assert float((aggregate(batch.mask, batch.group) * losses).sum()) == approx(GOLDEN["aggregation"][key], **exact)
    assert float(aggregate(torch.zeros_like(batch.mask), batch.group).sum()) == GOLDEN["all_masked"][key] == 0


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (GRPO, "grpo_eps0.2_seqmean"),
        (replace(GRPO, regularizers=(Kl("reference", 0.04, "k3"),)), "grpo_eps0.2_seqmean_klref0.04"),
        (DAPO, "dapo_0.2_0.28_tokenmean"),
        (replace(DAPO, surrogate=ClippedSurrogate(Clip(0.2, 0.28), dual=1.3)), "dapo_dualclip_c1.3_tokenmean"),
        (replace(DR_GRPO, aggregate=ConstantLength(6)), "dr_grpo_horizon6"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_clip_family(algorithm: Algorithm, key: str):
    """Loss, gradient and every clip fraction of the PPO-clip family."""
    expected = GOLDEN["clip_family"][key]
    loss, gradient, metrics = run(algorithm, fixture())

    assert loss == approx(expected["loss"], **exact)
    close(gradient, expected["dloss_dlp"])
    assert metrics["loss/clipped_fraction"] == approx(expected["clip_frac"], **exact)
    assert metrics["loss/clipped_low_fraction"] == approx(expected["clip_frac_low"], **exact)
    assert metrics["loss/clipped_high_fraction"] == approx(expected["clip_frac_high"], **exact)
    assert metrics["loss/out_of_band_fraction"] == approx(expected["out_of_range_frac"], **exact)
    assert metrics["loss/kl_proximal_nats"] == approx(expected["approx_kl_k1"], **exact)


def test_sequence_ratio_on_a_small_shift():
    """GSPO: value, gradient, clipped tokens; its token form is the same for one advantage a sequence."""
    expected = GOLDEN["gspo"]
    for algorithm in (GSPO, GSPO_TOKEN):
        loss, gradient, metrics = run(algorithm, fixture(), expected["lp"])

        assert loss == approx(expected["loss"], **exact)
        close(gradient, expected["dloss_dlp"], atol=1e-12)
        assert metrics["loss/clipped_fraction"] == approx(expected["clip_frac_tokens"], **exact)


def test_sequence_ratios_on_a_large_shift():
    """The geometric mean and the product of the ratios; without a clip the loss of the first."""
    batch, lp = fixture(), torch.tensor(FIXTURE["lp"], dtype=torch.float64)
    for level, key in (("sequence", "big_shift_seq_ratio"), ("sequence_product", "big_shift_product_ratio")):
        ratio = Ratio(level=level)(lp, batch.behavior, batch.mask)[:, 0].exp()

        assert ratio.tolist() == approx(GOLDEN["gspo"][key], **exact)

    wide = replace(GSPO, surrogate=ClippedSurrogate(Clip(0.2, 0.2)))
    assert run(wide, batch)[0] == approx(GOLDEN["gspo"]["big_shift_loss_eps_0p2"], **exact)


def test_the_token_form_takes_an_advantage_for_each_token():
    """GSPO-token with a ramped advantage clips and pushes each token by its own sign."""
    expected = GOLDEN["gspo"]["token_variant_ramped_advantage"]
    ramp = torch.tensor(expected["advantage"], dtype=torch.float64)
    prepared = fixture().with_fields(advantages=ramp)
    lp = torch.tensor(GOLDEN["gspo"]["lp"], dtype=torch.float64)

    loss, gradient = loss_and_gradient(GSPO_TOKEN, prepared, lp)

    assert loss == approx(expected["loss"], **exact)
    close(gradient, expected["dloss_dlp"], atol=1e-12)


@pytest.mark.parametrize(
    ("trust", "key"),
    [
        (Cap(1.28), "paper_upper_only_cap_1p28"),
        (Cap(1.28, 0.8), "two_sided_0p8_1p28"),
        (Cap(5.0), "absolute_cap_5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_capped_score(trust: Cap, key: str):
    """CISPO: value, gradient and capped tokens."""
    expected = GOLDEN["cispo"][key]
    loss, gradient, metrics = run(replace(CISPO, surrogate=PolicyGradient(trust)), fixture())

    assert loss == approx(expected["loss"], **exact)
    close(gradient, expected["dloss_dlp"], atol=1e-12)
    assert metrics["loss/capped_fraction"] == approx(expected["capped_frac"], **exact)


@pytest.mark.parametrize(("estimator", "key"), [("k3", ""), ("unbiased", "rho_kl_variant")])
def test_effective_size_and_its_leash(estimator: Any, key: str):
    """P3O: the effective size, the capped tokens, both KL estimators, value and gradient."""
    expected = GOLDEN["p3o"]
    variant = expected[key] if key else expected
    algorithm = replace(P3O, regularizers=(EssKl(estimator),))
    loss, gradient, metrics = run(algorithm, fixture())

    assert metrics["loss/ess_fraction"] == approx(expected["ess_whole_batch"], **exact)
    assert metrics["loss/capped_fraction"] == approx(expected["cap_hit_frac"], **exact)
    assert loss == approx(variant["loss"], **exact)
    close(gradient, variant["dloss_dlp"], atol=1e-12)
    assert EffectiveSize.of(expected["toy_ratios"]).value == approx(expected["toy_ess"], **exact)


def test_on_policy_p3o_is_reinforce():
    """At ratio one e = 1, the KL is 0, and the gradient is the reference's."""
    _, gradient, metrics = run(P3O, fixture(), FIXTURE["old"])

    assert metrics["loss/ess_fraction"] == 1.0
    close(gradient, GOLDEN["p3o"]["on_policy"]["dloss_dlp"], atol=1e-12)
    close(gradient, GOLDEN["clip_family"]["on_policy_gradient_tokenmean"], atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k2_grad_k3"])
def test_kl_estimators_at_points(estimator: Any):
    """Value and slope of each estimator at ratios 1/4 to 4; the default has k3's value and k2's slope."""
    table = GOLDEN["kl_estimators_pointwise"]
    ratios = torch.tensor([table["ratio_pi_over_ref"]], dtype=torch.float64)
    mask = [[1] * 5]
    batch = make_batch([0.0], mask, reference=[[-3.0] * 5], behavior=[[-3.0] * 5], proximal=[[-3.0] * 5])
    algorithm = replace(CISPO, advantage=Returns(), num_generations=1, regularizers=(Kl("reference", 1.0, estimator),))
    value, slope = ("k3", "k2") if estimator == "k2_grad_k3" else (estimator, estimator)

    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), ratios.log() - 3)

    assert loss * 5 == approx(sum(table[value]), **exact)
    assert (gradient[0] * 5).tolist() == approx(table["d" + slope], **exact)


@pytest.mark.parametrize(
    ("sampled", "estimator", "key"),
    [
        ("b", "unbiased", "grad_rho_form_sampled_from_b"),
        ("b", "k3", "grad_k3_sampled_from_b"),
        ("pi", "k3", "grad_k3_sampled_from_pi"),
        ("pi", "k2", "grad_k2_sampled_from_pi"),
        ("pi", "k2_grad_k3", "grad_k2_sampled_from_pi"),
        ("pi", "k1", "grad_k1_sampled_from_pi"),
    ],
)
def test_expected_gradients_of_the_kl_estimators(sampled: str, estimator: Any, key: str):
    """Over three outcomes weighed by who sampled them, only some estimators have the gradient of KL(pi || b)."""
    table = GOLDEN["kl_estimators_categorical"]
    logits = torch.tensor(table["pi"], dtype=torch.float64).log().requires_grad_()
    current = torch.log_softmax(logits, 0)[:, None]
    b = torch.tensor(table["b"], dtype=torch.float64).log()[:, None]
    batch = make_batch([0.0] * 3, [[1]] * 3, behavior=b.tolist(), reference=b.tolist())
    algorithm = replace(CISPO, regularizers=(Kl("reference", 1.0, estimator),))
    weighed = algorithm.weigh(algorithm.prepare(batch))
    term, _ = algorithm.regularizers[0](algorithm.view(current, current, weighed, Statistics()))

    (gradient,) = torch.autograd.grad((torch.tensor(table[sampled], dtype=torch.float64) * term[:, 0]).sum(), logits)

    close(gradient, table[key], atol=1e-12)
    if estimator == "unbiased":
        assert float((b.exp() * term.detach()).sum()) == approx(table["kl_pi_b"], **exact)
        close(gradient, table["grad_kl_pi_b"], atol=1e-12)


def test_decoupled_ppo():
    """A ratio against proximal times proximal / behavior, with and without a cap; at equal policies plain PPO."""
    expected = GOLDEN["decoupled_ppo"]
    base = replace(DAPO, surrogate=ClippedSurrogate(Clip(0.1, 0.1)))
    free = replace(base, correction=TruncatedIS(cap=float("inf")))
    loss, gradient, metrics = run(free, fixture(proximal="prox"))

    assert loss == approx(expected["loss"], **exact)
    close(gradient, expected["dloss_dlp"])
    assert metrics["loss/clipped_fraction"] == approx(expected["clip_frac"], **exact)
    assert run(free, fixture())[0] == approx(expected["plain_ppo"], **exact)
    capped, _, metrics = run(replace(base, correction=TruncatedIS(cap=1.1)), fixture(proximal="prox"))
    assert capped == approx(expected["loss_cap_1p1"], **exact)
    assert metrics["mismatch/truncated_fraction"] == approx(expected["cap_frac_1p1"], **exact)


@pytest.mark.parametrize(
    ("correction", "key", "metric"),
    [
        (TruncatedIS(cap=2.0), "tis_token_C2", "truncated"),
        (MaskedIS(0.5, 2.0), "icepop_0p5_2", "masked"),
        (MaskedIS(0.5, 5.0), "icepop_0p5_5", "masked"),
        (TruncatedIS(cap=1.2, level="sequence"), "tis_seq_C1p2", ""),
        (MaskedIS(0.8, 1.25, level="sequence"), "mis_seq_0p8_1p25", ""),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mismatch_corrections(correction: Any, key: str, metric: str):
    """TIS, IcePop and MIS on tokens and sequences; dropped tokens stay in the denominator."""
    expected = GOLDEN["mismatch"][key]
    loss, _, metrics = run(replace(DAPO, correction=correction), fixture(behavior="rollout"))

    assert loss == approx(expected["loss"], **exact)
    if metric:
        assert metrics[f"mismatch/{metric}_fraction"] == approx(expected[f"{metric}_frac"], **exact)


def test_soft_gate():
    """SAPO: value and gradient, with its own temperatures for both signs."""
    loss, gradient, metrics = run(SAPO, fixture())

    assert loss == approx(GOLDEN["sapo"]["loss"], **exact)
    close(gradient, GOLDEN["sapo"]["dloss_dlp"])
    assert metrics["loss/clipped_fraction"] == 0


def test_geometric_clip():
    """GMPO: nothing clips at 0.4; at 0.2 value and gradient are the reference's."""
    expected = GOLDEN["gmpo"]
    loss, gradient, _ = run(replace(GMPO, surrogate=GeometricClip(0.2)), fixture())

    assert run(GMPO, fixture())[0] == approx(expected["loss_eps_log_0p4"], **exact)
    assert loss == approx(expected["loss_eps_log_0p2"], **exact)
    close(gradient, expected["dloss_dlp_0p2"])


def test_reinforce_pp():
    """Returns with the KL in the reward, both whitenings, the baseline variant, and its k2 loss."""
    expected, batch = GOLDEN["reinforce_pp"], fixture(proximal="old")
    returns = Returns(kl=0.1)
    centered = GroupRelative(scale="none")

    close(returns(batch)[0], expected["returns"], atol=1e-12)
    close(Whitened(returns)(batch)[0], expected["adv_population"], atol=1e-12)
    close(Whitened(returns, ddof=1)(batch)[0], expected["adv_bessel"], atol=1e-12)
    close(centered(batch)[0], expected["baseline_variant_raw"], atol=1e-12)
    close(Whitened(centered)(batch)[0], expected["baseline_variant_population"], atol=1e-12)


def test_k2_to_the_reference():
    """The KL loss of REINFORCE++-baseline at coefficient 1, on the reference's arrays."""
    algorithm = replace(PRESETS["reinforce-pp-baseline"], regularizers=(Kl("reference", 1.0, "k2"),))
    lp = torch.tensor(FIXTURE["lp"], dtype=torch.float64)
    weighed = algorithm.weigh(algorithm.prepare(fixture()))

    parts = algorithm.loss(lp, lp, weighed, Statistics()).parts

    assert parts["kl_reference"] == approx(GOLDEN["reinforce_pp"]["k2_loss_vs_ref"], **exact)


def test_tracked_advantages():
    """SPO: reward minus the tracked value, whitened over the batch with either deviation."""
    expected = GOLDEN["spo"]
    batch = make_batch(expected["rewards"], [[1]] * 4, range(4), baseline=expected["v0_code_jeffreys"])

    assert per_sequence(TrackedBaseline(normalize=False), batch) == approx(expected["raw_advantage"], **exact)
    assert per_sequence(TrackedBaseline(), batch) == approx(expected["adv_sample_std"], **exact)
    assert per_sequence(TrackedBaseline(ddof=0), batch) == approx(expected["adv_population_std"], rel=2e-8)


def test_positive_nll():
    """VAPO's imitation term divides by the tokens of correct responses only."""
    algorithm = replace(GRPO, regularizers=(PositiveNll(1.0),))
    lp = torch.tensor(FIXTURE["lp"], dtype=torch.float64)
    weighed = algorithm.weigh(algorithm.prepare(fixture()))

    parts = algorithm.loss(lp, lp, weighed, Statistics()).parts

    assert parts["positive_nll"] == approx(GOLDEN["vapo"]["nll_loss"], **exact)


def test_distillation_pays_each_token_its_own_gap():
    """Gaps -0.5, 1, 0.25 of trained tokens 0, 2, 3: at gamma 0 those; at 1 what follows too, 0.75, 1.25, 0.25.

    At gamma 0.5: 0.25 -> 0.25; 1 + 0.125 = 1.125; -0.5 + 0.5625 = 0.0625. A row that was not graded gets 0.
    """
    mask = [[True, False, True, True], [True]]
    proximal, reference = [[-1.0, -9.0, -2.0, -0.75], [-1.0]], [[-1.5, -1.0, -1.0, -0.5], [-0.1]]
    batch = make_batch([0.0, None], mask, [0, 0], proximal=proximal, reference=reference)

    for gamma, expected in ((0.0, [-0.5, 0, 1.0, 0.25]), (0.5, [0.0625, 0, 1.125, 0.25]), (1.0, [0.75, 0, 1.25, 0.25])):
        assert ReverseKl(2.0, gamma).center(batch).tolist() == [approx([2 * x for x in expected], **exact), [0.0] * 4]
        assert Returns(gamma, kl=1.0).center(batch)[0].tolist() == approx(expected, **exact)


def test_accepted_answers_are_learned_alone():
    """Lengths 1, 2, 1, 2 with rewards 1, 0, 1, 1 in one group and none in the other: 6 tokens, 4 of them accepted.

    All: A = 6/4 on answers 0, 2 and 3. Best alone: answer 0, the first of the equals, A = 6/1. The loss is the mean
    negative log-likelihood of accepted tokens: (1 + 1 + 2 + 3) / 4 and 1.
    """
    mask = [[True], [True, True], [True], [True, True]]
    batch = make_batch([1.0, 0.0, 1.0, 1.0], mask, [0, 0, 0, 0])
    current = torch.tensor([[-1.0, 0.0], [-5.0, -5.0], [-1.0, 0.0], [-2.0, -3.0]], dtype=torch.float64)

    for piece, rows, loss in ((Accepted(), [0, 2, 3], 7 / 4), (Accepted(best=True), [0], 1.0), (Accepted(2.0), [], 0)):
        algorithm = replace(PRESETS["reinforce"], advantage=piece, num_generations=4)
        prepared = algorithm.prepare(batch)
        assert prepared.advantages is not None
        assert prepared.advantages.any(1).nonzero()[:, 0].tolist() == rows
        assert loss_and_gradient(algorithm, prepared, current)[0] == approx(loss, **exact)


def test_given_answers_are_shaped_and_kept_out_of_the_mismatch():
    """Row 1 is given, p = 0.1 and 0.4, A = -2 of its group: 2 p / (p + 0.1) is 1 and 1.6; row 0 keeps PPO's -2 r.

    Mean over three tokens with r = 1: (-2 + 1 + 1.6) / 3. d f / d log p = p gamma / (p + gamma)^2: 0.25 and 0.16.
    """
    batch = make_batch([3.0, -1.0], [[True], [True, True]], [0, 0], behavior=[[-0.5], [0.0, 0.0]])
    proximal = torch.tensor([[-0.5, 0.0], [-9.0, -9.0]], dtype=torch.float64)
    batch = LUFFY.prepare(batch.with_fields(version=torch.tensor([0, GIVEN]), proximal=proximal))
    current = torch.tensor([[-0.5, 0.0], [math.log(0.1), math.log(0.4)]], dtype=torch.float64)

    loss, gradient = loss_and_gradient(LUFFY, batch, current)
    measured = LUFFY.loss(current, -current, LUFFY.weigh(batch), Statistics()).metrics

    assert loss == approx(0.6 / 3, **exact)
    assert gradient.tolist() == [approx([-2 / 3, 0], **exact), approx([2 * 0.25 / 3, 2 * 0.16 / 3], **exact)]
    assert measured["loss/given_fraction"] == approx(2 / 3)
    assert measured["mismatch/ess_fraction"] == 1
    assert LUFFY.statistics(current, batch).behavior.value == 1


def test_given_answers_are_imitated_where_the_policy_is_sure():
    """Entropies 0 and ln 2: weights 1 and 0.5 of -log p = 1 and 3, over 2 given tokens: 0.5 (1 + 1.5) / 2."""
    batch = make_batch([1.0, 1.0], [[True], [True, True]], [0, 0]).with_fields(version=torch.tensor([0, GIVEN]))
    current = torch.tensor([[-1.0, 0.0], [-1.0, -3.0]], dtype=torch.float64)
    entropy = torch.tensor([[9.0, 9.0], [0.0, math.log(2)]], dtype=torch.float64)
    weighed = SRFT.weigh(SRFT.prepare(batch))

    found = SRFT.loss(current, entropy, weighed, Statistics())

    assert found.parts["given_nll"] == approx(0.5 * 2.5 / 2, **exact)
