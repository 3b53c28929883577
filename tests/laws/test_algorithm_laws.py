"""What must hold for every algorithm, whatever the batch."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.laws.batches import (
    Drawn,
    drawn,
    few,
    fewer,
    frozen,
    on_policy,
    presets,
    same,
    scored,
    segmented,
    size_of,
    valued,
)
from torch import Tensor

from gnomon.algorithms import (
    CISPO,
    DAPO,
    GIGPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LITE_PPO,
    LUFFY,
    NAMED,
    P3O,
    PPO,
    PRESETS,
    RAFT,
    SDFT,
    SDPO,
    SPO,
    SRFT,
    AdvantageSum,
    Algorithm,
    Clip,
    ClippedSurrogate,
    CovarianceMask,
    DivergenceMask,
    Entropy,
    EntropyMask,
    FutureInfluence,
    Gae,
    GroupRelative,
    Kl,
    MaskedIS,
    Normalized,
    OffPolicyMask,
    PerReward,
    PositiveNll,
    PreferenceLoss,
    Ratio,
    Regression,
    RejectionSampling,
    RewardAtLeast,
    Scaled,
    SecondMomentMask,
    StateRelative,
    TokenMean,
    TruncatedIS,
    Where,
)
from gnomon.algorithms.ratios import Statistics
from gnomon.core.metrics import Metrics
from gnomon.core.types import GIVEN
from gnomon.testing import loss_and_gradient, make_batch

approx = pytest.approx

EXTRAS = (
    replace(
        GRPO,
        name="grpo-with-everything",
        surrogate=ClippedSurrogate(Clip(), dual=1.5),
        correction=TruncatedIS(),
        regularizers=(
            Kl("reference", 0.1, "unbiased"),
            Kl("behavior", 0.1, "k3"),
            Entropy(0.01),
            PositiveNll(0.1),
        ),
    ),
    replace(DAPO, name="dapo-by-group", aggregate=TokenMean("group"), correction=MaskedIS()),
    replace(GRPO, name="rloo-product", ratio=Ratio(level="sequence_product"), correction=TruncatedIS(level="sequence")),
    replace(CISPO, name="cispo-kl", regularizers=(Kl("reference", 0.1),)),
    replace(GRPO, name="grpo-and-rewards", advantage=AdvantageSum((GroupRelative(), Scaled(PerReward(), 0.5)))),
    replace(
        PPO,
        name="ppo-or-grpo",
        advantage=Where(RewardAtLeast(0.5), Gae(), Normalized(GroupRelative(), over="batch")),
        num_generations=2,
    ),
)
ALL = (*NAMED.values(), *EXTRAS)
every = pytest.mark.parametrize("algorithm", ALL, ids=lambda a: a.name)


@every
@few
@given(drawn(wild=True))
def test_cutting_a_batch_changes_nothing(algorithm: Algorithm, d: Drawn):
    """Loss and gradient are the same whole and in micro-batches of unequal size, each back-propagated alone (P3)."""
    d = d.of(algorithm)
    batch = algorithm.prepare(d.batch)
    whole_loss, whole = loss_and_gradient(algorithm, batch, d.current)
    cut_loss, cut = loss_and_gradient(algorithm, batch, d.current, d.cuts)

    assert cut_loss == approx(whole_loss, abs=1e-12 * size_of(whole_loss, whole, d.current))
    same(cut, whole, 1e-12)


@every
@few
@given(drawn(wild=True), st.lists(st.integers(0, 5), min_size=16, max_size=16))
def test_a_conversation_cut_into_segments_has_the_gradient_of_the_whole(
    algorithm: Algorithm, d: Drawn, places: list[int]
):
    """Each response in two rows, wherever it is cut, whole and in micro-batches that keep the two together."""
    d = d.of(algorithm)
    whole_loss, whole = loss_and_gradient(algorithm, algorithm.prepare(d.batch), d.current)
    batch, current, source = segmented(d, places)
    cuts = [[row for r in cut for row in (2 * r, 2 * r + 1)] for cut in d.cuts]
    for cut in (None, cuts):
        loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), current, cut)

        assert loss == approx(whole_loss, abs=1e-12 * size_of(whole_loss, whole, d.current))
        same(gradient[source >= 0], whole.flatten()[source[source >= 0]], 1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        GIGPO,
        PPO,
        replace(PPO, name="ppo-by-turn", advantage=Gae(gamma=0.9, over="turn")),
        replace(GSPO_TOKEN, name="gspo-token-by-state", advantage=StateRelative()),
    ],
    ids=lambda a: a.name,
)
@few
@given(drawn(), st.lists(st.integers(0, 5), min_size=16, max_size=16), st.integers(1, 3))
def test_rewards_of_answers_survive_a_cut(algorithm: Algorithm, d: Drawn, places: list[int], answer: int):
    """The same where rewards are earned by answers, which a cut may part, and answers are compared by state."""
    place = torch.arange(d.batch.width).expand(d.batch.mask.shape)
    turn = place // answer
    steps = torch.where(d.batch.mask & (place % 2 == 0), 0.5, 0.0).double()
    talk = d.batch.with_fields(rewards=steps.sum(1), step_rewards=steps, turn=turn, state=turn % 2)
    test = replace(d, batch=talk)
    whole_loss, whole = loss_and_gradient(algorithm, algorithm.prepare(talk), d.current)
    batch, current, source = segmented(test, places)
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), current)

    assert loss == approx(whole_loss, abs=1e-12 * size_of(whole_loss, whole, d.current))
    same(gradient[source >= 0], whole.flatten()[source[source >= 0]], 1e-12)


@every
@few
@given(drawn(wild=True), st.integers(1, 3))
def test_ranks_add_up(algorithm: Algorithm, d: Drawn, rows: int):
    """Ranks that add up effective sizes, losses and metrics, one rank without a row, are one machine (P4)."""
    d = d.of(algorithm)
    weighed = algorithm.weigh(algorithm.prepare(d.batch))
    whole_loss, whole = loss_and_gradient(algorithm, algorithm.prepare(d.batch), d.current)
    ranks = [[cut[i : i + rows] for i in range(0, max(1, len(cut)), rows)] for cut in (*d.cuts, [])]
    halved = -d.current / 2
    measured = [algorithm.statistics(d.current[cut], weighed.rows(cut), halved[cut]) for cuts in ranks for cut in cuts]
    statistics = sum(measured, Statistics())
    loss, metrics = 0.0, Metrics()
    for cuts in ranks:
        for cut in cuts:
            part = algorithm.loss(d.current[cut], halved[cut], weighed.rows(cut), statistics, -d.current[cut] / 3)
            loss, metrics = loss + float(part.total), metrics + part.metrics
    whole_statistics = algorithm.statistics(d.current, weighed, halved)
    alone = algorithm.loss(d.current, halved, weighed, whole_statistics, -d.current / 3)

    assert loss == approx(whole_loss, abs=1e-12 * size_of(whole_loss, whole, d.current))
    assert statistics.behavior.value == approx(whole_statistics.behavior.value, rel=1e-12)
    assert metrics.values() == approx(alone.metrics.values(), rel=1e-9, abs=1e-9)


def test_effective_sizes_of_micro_batches_depend_on_the_cut():
    """With scope "micro_batch" P3O is, as its reference code, another loss for every cut; P3 fails by design."""
    batch = make_batch([1.0, 0.0], [[1], [1]], behavior=[[-1.0], [-1.0]])
    current = torch.tensor([[-1.0 + math.log(2)], [-1.0]], dtype=torch.float64)
    for scope, differs in (("step", False), ("lagged", False), ("micro_batch", True)):
        algorithm = replace(P3O, scope=scope)
        prepared = algorithm.prepare(batch)
        loss, gradient = loss_and_gradient(algorithm, prepared, current)
        cut_loss, cut = loss_and_gradient(algorithm, prepared, current, [[0], [1]])

        assert (abs(loss - cut_loss) > 0.01) is differs
        assert (float((gradient - cut).abs().max()) > 0.01) is differs


@every
@few
@given(drawn(wild=True), st.integers(1, 3), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_what_is_masked_never_matters(algorithm: Algorithm, d: Drawn, columns: int, junk: float):
    """More columns, and nan or infinity wherever the mask is false, change neither loss nor gradient (P1)."""
    d = d.of(algorithm)
    rows = len(d.batch)
    mask = torch.cat([d.batch.mask, torch.zeros(rows, columns, dtype=torch.bool)], 1)

    def spoiled(tensor: Tensor) -> Tensor:
        wider = torch.cat([tensor, torch.zeros(rows, columns, dtype=torch.float64)], 1)
        return torch.where(mask, wider, junk)

    proximal, reference = scored(d.batch)
    wide = d.batch.with_fields(
        mask=mask,
        tokens=torch.zeros(rows, 1 + mask.shape[1], dtype=torch.long),
        behavior=spoiled(d.batch.behavior),
        full_behavior=spoiled(d.batch.full_behavior),
        proximal=spoiled(proximal),
        reference=spoiled(reference),
        sharpened=None if d.batch.sharpened is None else spoiled(d.batch.sharpened),
        values=spoiled(valued(d.batch)),
    )
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(d.batch), d.current)
    wide_loss, wide_gradient = loss_and_gradient(algorithm, algorithm.prepare(wide), spoiled(d.current))

    assert wide_loss == approx(loss, abs=1e-12 * size_of(loss, gradient, d.current))
    same(wide_gradient[:, : d.batch.width], gradient, 1e-12)
    assert not bool(wide_gradient[~mask].any())


@every
@few
@given(drawn(wild=True), st.randoms(use_true_random=False))
def test_order_and_names_of_groups_never_matter(algorithm: Algorithm, d: Drawn, random: object):
    """Shuffling rows and renaming groups shuffles the gradient and nothing else (P2).

    Of equally good best answers RAFT takes the first, so its rewards all differ here.
    """
    d = d.of(algorithm)
    if algorithm is RAFT:
        d = replace(d, batch=d.batch.with_fields(rewards=d.batch.rewards + 0.01 * torch.arange(len(d.batch))))
    order = torch.tensor(sorted(range(len(d.batch)), key=lambda _: random.random()))
    shuffled = d.batch.rows(order)
    shuffled = shuffled.with_fields(group=1000 - 7 * shuffled.group)
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(d.batch), d.current)
    other_loss, other = loss_and_gradient(algorithm, algorithm.prepare(shuffled), d.current[order])

    assert other_loss == approx(loss, abs=1e-11 * size_of(loss, gradient, d.current))
    same(other, gradient[order], 1e-11)


@pytest.mark.parametrize("algorithm", presets(), ids=lambda a: a.name)
@few
@given(drawn())
def test_on_policy_every_algorithm_is_reinforce(algorithm: Algorithm, d: Drawn):
    """When all four policies are one, the gradient is minus weight times advantage on every token (P6).

    Imitation, VAPO's, comes on top and is left out here, and so is a choice of tokens. A*-PO regresses: its slope is 2
    beta (0 - A) over sequences.
    """
    if isinstance(algorithm.correction, EntropyMask | CovarianceMask):
        algorithm = replace(algorithm, correction=None)
    algorithm = replace(algorithm, regularizers=tuple(r for r in algorithm.regularizers if r.name != "positive_nll"))
    batch = algorithm.weigh(algorithm.prepare(on_policy(d.batch)))
    assert batch.weights is not None
    assert batch.advantages is not None
    expected = -batch.weights * batch.advantages
    if isinstance(algorithm.surrogate, Regression):
        expected = 2 * algorithm.surrogate.beta * expected * batch.mask.sum(1, keepdim=True)

    _, gradient = loss_and_gradient(algorithm, batch, batch.behavior)

    same(gradient, expected, 1e-12)


@few
@given(drawn())
def test_both_sequence_forms_agree(d: Drawn):
    """GSPO and GSPO-token have the same value and gradient when each sequence has one advantage (P7)."""
    batch = GSPO.prepare(d.batch)
    wide = ClippedSurrogate(Clip(0.1, 0.1))
    for one, other in ((GSPO, GSPO_TOKEN), (replace(GSPO, surrogate=wide), replace(GSPO_TOKEN, surrogate=wide))):
        loss, gradient = loss_and_gradient(one, batch, d.current)
        other_loss, other_gradient = loss_and_gradient(other, batch, d.current)

        assert other_loss == approx(loss, rel=1e-12, abs=1e-13)
        same(other_gradient, gradient, 1e-12)


@pytest.mark.parametrize(
    "name", ["grpo", "dr-grpo", "dapo", "decoupled-ppo", "gspo", "gspo-token", "gmpo", "sapo", "cispo", "opo"]
)
@few
@given(drawn(all_graded=True))
def test_a_degenerate_group_only_dilutes(name: str, d: Drawn):
    """A group of equal rewards has no gradient and is not live; it adds to the count that divides the others (P14)."""
    algorithm = PRESETS[name]
    first = d.batch.group == 0
    batch = d.batch.with_fields(rewards=torch.where(first, 0.25, d.batch.rewards))
    rest = torch.nonzero(~first).squeeze(1)
    counts_tokens = isinstance(algorithm.aggregate, TokenMean)
    size = batch.mask.sum(1).double() if counts_tokens else batch.mask.any(1).double()

    prepared = algorithm.prepare(batch)
    _, gradient = loss_and_gradient(algorithm, prepared, d.current)
    _, alone = loss_and_gradient(algorithm, algorithm.prepare(batch.rows(rest)), d.current[rest])

    assert not bool(gradient[first].any())
    assert not bool(algorithm.live_rows(algorithm.weigh(prepared))[first].any())
    same(gradient[rest], alone * float(size[rest].sum() / size.sum().clamp(min=1)), 1e-12)


@few
@given(drawn(all_graded=True))
def test_a_degenerate_group_turns_no_gradient_scaled_by_the_batch(d: Drawn):
    """Lite PPO divides by the deviation of all rewards: the others' direction stays, their length does not (P14)."""
    first = d.batch.group == 0
    batch = d.batch.with_fields(rewards=torch.where(first, 0.25, d.batch.rewards))
    rest = torch.nonzero(~first).squeeze(1)
    _, gradient = loss_and_gradient(LITE_PPO, LITE_PPO.prepare(batch), d.current)
    _, alone = loss_and_gradient(LITE_PPO, LITE_PPO.prepare(batch.rows(rest)), d.current[rest])

    assert not bool(gradient[first].any())
    assert bool(gradient.any()) is bool(alone.any())
    same(gradient[rest] * alone.norm(), alone * gradient.norm(), 1e-12)


@every
@few
@given(drawn())
def test_rows_that_are_not_live_have_no_gradient(algorithm: Algorithm, d: Drawn):
    """The learner may skip every row that `live_rows` leaves out."""
    d = d.of(algorithm)
    batch = algorithm.prepare(d.batch)
    _, gradient = loss_and_gradient(algorithm, batch, d.current)

    assert not bool(gradient[~algorithm.live_rows(algorithm.weigh(batch))].any())


@every
def test_no_gradient_reaches_anything_but_current(algorithm: Algorithm):
    """Policies, rewards, values and tracked values are constants of the loss, with all that is made of them (P19)."""
    shapes = {"rewards": (2,), "baseline": (2,), "bootstrap": (2,), "component_rewards": (2, 1)}
    numbers = {
        "behavior": -1.0,
        "proximal": -1.1,
        "reference": -1.2,
        "sharpened": -0.3,
        "values": 0.5,
        "rewards": 1.0,
        "bootstrap": 0.2,
    }
    constants = {
        name: torch.full(shapes.get(name, (2, 2)), value, dtype=torch.float64).requires_grad_()
        for name, value in {**numbers, "baseline": 0.3, "component_rewards": 1.0}.items()
    }
    slope = torch.tensor([1.0, 0.0], dtype=torch.float64)
    batch = make_batch([1.0, 0.0], [[1, 1], [1, 1]], is_truncated=[True, False])
    rewards = {"component_rewards": constants["component_rewards"] * slope[:, None], "components": ("a",)}
    rewards |= {"component_weights": (1.0,), "rewards": constants["rewards"] * slope}
    batch = batch.with_fields(**{**constants, **rewards})
    current = torch.full((2, 2), -1.05, dtype=torch.float64).requires_grad_()
    weighed = algorithm.weigh(algorithm.prepare(batch))
    statistics = algorithm.statistics(current, weighed, -current)
    loss = algorithm.loss(current, -current, weighed, statistics, -current)

    leaked = torch.autograd.grad(loss.total, list(constants.values()), allow_unused=True, retain_graph=True)
    (used,) = torch.autograd.grad(loss.total, [current])

    assert bool(used.any()) != algorithm.ranks_pairs
    for gradient in leaked:
        assert gradient is None or not bool(gradient.any())


@pytest.mark.parametrize("algorithm", NAMED.values(), ids=lambda a: a.name)
@fewer
@given(drawn(), st.integers(0, 99))
def test_the_gradient_is_the_slope_of_the_loss(algorithm: Algorithm, d: Drawn, seed: int):
    """Central differences agree with the gradient when effective sizes and detached weights stay what they were (P20).

    Two random directions an example; a drawn ratio lies on the corner of a clip with probability 0. The margin of a
    pair is what its loss is a function of: it comes as a sum over the step, and is not held.
    """
    d = d.of(algorithm)
    weighed = algorithm.weigh(algorithm.prepare(d.batch))
    statistics = algorithm.statistics(d.current, weighed, -d.current / 2)
    _, gradient = loss_and_gradient(algorithm, weighed, d.current)
    if algorithm.ranks_pairs:  # its loss is the critic's
        assert not bool(gradient.any())
        return
    still = frozen(algorithm, d.current, weighed, statistics)
    generator = torch.Generator().manual_seed(seed)

    def value(current: Tensor) -> float:
        moves = isinstance(algorithm.surrogate, PreferenceLoss)
        held = algorithm.statistics(current, weighed, -current / 2) if moves else statistics
        return float(still.loss(current, -current / 2, weighed, held, -current / 3).total)

    for _ in range(2):
        step = 1e-6 * torch.randn(d.current.shape, generator=generator, dtype=torch.float64)
        slope = (value(d.current + step) - value(d.current - step)) / 2e-6
        assert slope == approx(float((gradient * step).sum()) / 1e-6, abs=1e-7)


@every
def test_a_batch_without_trained_tokens_has_loss_and_gradient_zero(algorithm: Algorithm):
    """Everything masked, or nothing graded: 0, finite, no live row, and no metric that is not a number (P22)."""
    masks = [[1, 1], [1], [0, 0], [0]]
    rewards = {"component_rewards": [[1.0], [0.0]] * 2, "components": ("a",), "component_weights": (1.0,)}
    known = {"baseline": [0.5] * 4, "values": [[0.5] * 2] * 4, "sharpened": [[-0.5] * 2] * 4}
    batch = on_policy(make_batch([None, None, 1.0, 0.0], masks, [0, 0, 1, 1], **known, **rewards))
    prepared = algorithm.prepare(batch)
    loss, gradient = loss_and_gradient(algorithm, prepared, batch.behavior)
    weighed = algorithm.weigh(prepared)
    statistics = algorithm.statistics(batch.behavior, weighed, batch.behavior)
    metrics = algorithm.loss(batch.behavior, batch.behavior, weighed, statistics, -batch.behavior).metrics

    assert loss == 0
    assert not bool(gradient.any())
    assert not bool(algorithm.live_rows(weighed).any())
    assert all(value == value for value in metrics.values().values())


@every
@given(drawn(), st.integers(0, 99))
@settings(max_examples=5)
def test_minibatches_hold_every_row_once_an_epoch(algorithm: Algorithm, d: Drawn, seed: int):
    """Minibatches partition the rows, sizes differ by one at most, and the same seed cuts the same way."""
    d = d.of(algorithm)
    prepared = algorithm.prepare(d.batch.with_fields(version=torch.arange(len(d.batch))))
    cuts = algorithm.minibatches(prepared, seed)
    rows: Sequence[int] = [int(v) for cut in cuts for v in cut.version]
    again = [int(v) for cut in algorithm.minibatches(prepared, seed) for v in cut.version]

    assert sorted(rows) == sorted(list(range(len(d.batch))) * algorithm.updates.epochs)
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1
    assert rows == again


@pytest.mark.parametrize("algorithm", [SDFT, SDPO], ids=lambda a: a.name)
@few
@given(drawn(wild=True), st.lists(st.integers(0, 2), min_size=16, max_size=16))
def test_an_answer_that_the_teacher_says_nothing_of_has_no_gradient(algorithm: Algorithm, d: Drawn, asked: list[int]):
    """Rows without a prompt of the teacher's teach nothing; cuts and order of all rows change nothing."""
    batch = d.batch.with_fields(hint_lengths=torch.tensor(asked[: len(d.batch)]))
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), d.current)
    cut_loss, cut = loss_and_gradient(algorithm, algorithm.prepare(batch), d.current, d.cuts)
    turned = torch.arange(len(batch)).flip(0)
    _, other = loss_and_gradient(algorithm, algorithm.prepare(batch.rows(turned)), d.current[turned])

    assert not bool(gradient[~batch.is_taught].any())
    assert bool(gradient.any()) is bool(batch.mask[batch.is_taught].any())
    assert cut_loss == approx(loss, abs=1e-12 * size_of(loss, gradient, d.current))
    for found in (cut, other[turned]):
        same(found, gradient, 1e-11)


@pytest.mark.parametrize("algorithm", [LUFFY, SRFT], ids=lambda a: a.name)
@few
@given(drawn(wild=True), st.lists(st.booleans(), min_size=16, max_size=16))
def test_who_sampled_a_given_answer_never_matters(algorithm: Algorithm, d: Drawn, given_rows: list[bool]):
    """Beside given answers cuts and order change nothing, and their recorded log-probabilities neither (P33)."""
    is_given = torch.tensor(given_rows[: len(d.batch)])
    batch = d.batch.with_fields(version=torch.where(is_given, GIVEN, 0))
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), d.current)
    cut_loss, cut = loss_and_gradient(algorithm, algorithm.prepare(batch), d.current, d.cuts)
    turned = torch.arange(len(batch)).flip(0)
    _, other = loss_and_gradient(algorithm, algorithm.prepare(batch.rows(turned)), d.current[turned])
    proximal, _ = scored(batch)
    unknown = {"behavior": batch.behavior, "full_behavior": batch.full_behavior, "proximal": proximal}
    spoiled = batch.with_fields(**{n: torch.where(is_given[:, None], -1.0, p) for n, p in unknown.items()})
    _, same_there = loss_and_gradient(algorithm, algorithm.prepare(spoiled), d.current)

    assert cut_loss == approx(loss, abs=1e-12 * size_of(loss, gradient, d.current))
    for found in (cut, other[turned], same_there):
        same(found, gradient, 1e-11)


CORRECTIONS = (
    TruncatedIS(), TruncatedIS(level="sequence"), MaskedIS(), RejectionSampling(), OffPolicyMask(0.1), DivergenceMask(),
    DivergenceMask("kl", 0.1, "sequence"), DivergenceMask(side="outward"), SecondMomentMask(), FutureInfluence(),
)  # fmt: skip
LEASHES = (Kl("behavior", 0.1, "k1"), Kl("behavior", 0.1, "k3"), Kl("reference", 0.1, "unbiased"))


@pytest.mark.parametrize(
    "algorithm",
    [replace(preset, name=f"{preset.name} {piece}", **{slot: piece if slot == "correction" else (piece,)})
     for preset in (LUFFY, replace(GRPO, demonstrated=True))
     for slot, pieces in (("correction", CORRECTIONS), ("regularizers", LEASHES)) for piece in pieces],
    ids=lambda a: a.name,
)  # fmt: skip
@fewer
@given(drawn(), st.lists(st.booleans(), min_size=16, max_size=16))
def test_no_gap_to_a_sampler_is_corrected_where_nobody_sampled(algorithm: Algorithm, d: Drawn, given_rows: list[bool]):
    """A given answer trains as one whose sampler was the proximal policy, whatever stands for its log-probabilities."""
    is_given = torch.tensor(given_rows[: len(d.batch)])
    proximal, _ = scored(d.batch)
    batch = d.batch.with_fields(version=torch.where(is_given, GIVEN, 0))
    gradients = []
    for stands in (torch.zeros_like(proximal), torch.full_like(proximal, -3.0), proximal):
        behavior = torch.where(is_given[:, None], stands, batch.behavior)
        prepared = algorithm.prepare(batch.with_fields(behavior=behavior, full_behavior=behavior))
        gradients.append(loss_and_gradient(algorithm, prepared, d.current)[1])

    for found in gradients[1:]:
        same(found, gradients[0], 1e-11)


def test_spo_is_single_stream():
    """SPO asks one response a prompt and has no use for a group."""
    assert (SPO.num_generations, SPO.advantage.minimum_generations) == (1, 1)
