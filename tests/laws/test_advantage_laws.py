"""What must hold for advantages that are made of advantages, whatever the batch."""

import functools
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import Drawn, drawn, few, same, size_of

from gnomon.algorithms import (
    GRPO,
    PPO,
    AdvantageSum,
    ConstantAdvantage,
    Gae,
    GroupRelative,
    InRole,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    PerReward,
    Requires,
    Returns,
    RewardAtLeast,
    Scaled,
    StateRelative,
    TrackedBaseline,
    Where,
    Whitened,
)
from gnomon.algorithms.composition import Composition
from gnomon.algorithms.protocols import Advantage, parts_of
from gnomon.core.errors import ConfigError, GradingError
from gnomon.testing import loss_and_gradient

PLAIN: tuple[Advantage, ...] = (
    GroupRelative(),
    GroupRelative(scale="none"),
    LeaveOneOut(),
    OptimalBaseline(),
    Returns(),
    Gae(),
    Whitened(Returns()),
    PerReward(),
    Normalized(Returns(), over="group"),
)
one_of = st.sampled_from(PLAIN)
rewards_only = st.sampled_from([piece for piece in PLAIN if "values" not in piece.needs])
factors = st.sampled_from([-2.0, 0.0, 0.5, 3.0])


@few
@given(drawn(), rewards_only, one_of, factors, factors)
def test_sums_and_multiples_are_linear(d: Drawn, first: Advantage, second: Advantage, a: float, b: float):
    """The advantage of a sum of multiples is that sum, scaled or centered; a factor leaves a critic's targets (P32)."""
    both = AdvantageSum((Scaled(first, a), Scaled(second, b)))
    found, targets = both(d.batch)

    same(found, a * first(d.batch)[0] + b * second(d.batch)[0])
    same(both.center(d.batch), a * first.center(d.batch) + b * second.center(d.batch))
    expected = second(d.batch)[1]
    assert (targets is None) == (expected is None)
    if targets is not None and expected is not None:
        same(targets, expected)


@few
@given(drawn(), rewards_only, one_of, st.sampled_from([0.0, 0.25, 1.0]), st.booleans())
def test_a_choice_has_each_advantage_where_it_is_chosen(
    d: Drawn, first: Advantage, second: Advantage, value: float, by_component: bool
):
    """Each token has the advantage of its side, whose statistics are of the whole batch (P32)."""
    condition = RewardAtLeast(value, "b" if by_component else "")
    found, _ = Where(condition, first, second)(d.batch)
    rewards = d.batch.component_rewards[:, 1] if by_component else d.batch.rewards  # type: ignore[index]
    holds = (rewards >= value)[:, None]

    same(found, torch.where(holds, first(d.batch)[0], second(d.batch)[0]))
    same(Where(condition, first, first)(d.batch)[0], first(d.batch)[0])


@few
@given(drawn(), one_of, st.sampled_from(["group", "batch"]))
def test_normal_forms_have_mean_zero_and_deviation_one(d: Drawn, inner: Advantage, over: str):
    """Over the responses of each group, or of the batch; equal ones have exactly 0, and scale and sign stay out."""
    normal = Normalized(inner, over, epsilon=0.0)  # type: ignore[arg-type]
    advantages, _ = normal(d.batch)
    counts = d.batch.mask.sum(1)
    means = advantages.sum(1) / counts.clamp(min=1)
    groups = d.batch.group if over == "group" else torch.zeros_like(d.batch.group)
    for group in groups.unique():
        own = means[(groups == group) & (counts > 0)]
        if bool((own == 0).all()):
            continue
        same(own.mean(), torch.zeros((), dtype=torch.float64), 1e-6)
        same(own.std(), torch.ones((), dtype=torch.float64), 1e-6)
    same(Normalized(Scaled(inner, 8.0), over, epsilon=0.0)(d.batch)[0], advantages)  # type: ignore[arg-type]
    same(Normalized(Scaled(inner, -8.0), over, epsilon=0.0)(d.batch)[0], -advantages)  # type: ignore[arg-type]


@few
@given(drawn(), one_of)
def test_a_length_normal_form_divides_by_the_length(d: Drawn, inner: Advantage):
    """The sum over a response is the mean of what is inside."""
    counts = d.batch.mask.sum(1).clamp(min=1)

    same(Normalized(inner, "length")(d.batch)[0] * counts[:, None], inner(d.batch)[0])


SCALED = (
    PerReward(),
    AdvantageSum((GroupRelative(), Scaled(Returns(), 0.5))),
    Where(RewardAtLeast(1.0), GroupRelative(), Returns()),
    Normalized(Returns(), "length"),
    StateRelative(),
)


@few
@given(drawn(), st.sampled_from(SCALED))
def test_whitening_keeps_the_scales_inside(d: Drawn, inner: Advantage):
    """What is whitened are the advantages as they are: of GDPO's published code each reward's own deviation stays."""
    values = inner(d.batch)[0][d.batch.mask & d.batch.is_graded[:, None]]
    found = Whitened(inner)(d.batch)[0][d.batch.mask & d.batch.is_graded[:, None]]

    if len(values) and values.max() - values.min() > 1e-6:
        same(found, (values - values.mean()) / (values.var(correction=0) + 1e-8).sqrt(), 1e-6)


@few
@given(drawn(all_graded=True))
def test_each_reward_by_itself_without_a_scale_is_the_weighted_sum(d: Drawn):
    """A mean is linear, so what is only centered may be weighed before or after (P32)."""
    assert d.batch.component_rewards is not None
    total = d.batch.component_rewards @ torch.tensor(d.batch.component_weights, dtype=torch.float64)
    for inner in (GroupRelative(scale="none"), LeaveOneOut(), OptimalBaseline(), Returns()):
        same(PerReward(inner)(d.batch)[0], inner(d.batch.with_fields(rewards=total))[0], 1e-9)


@few
@given(drawn(), st.sampled_from([0.25, 1.0, 2.0]))
def test_a_required_reward_gates_another(d: Drawn, at_least: float):
    """Elsewhere the gated reward is 0 before any statistic, and the batch is not changed."""
    assert d.batch.component_rewards is not None
    first, second = d.batch.component_rewards.clone().unbind(1)
    gated = torch.stack([torch.where(second >= at_least, first, 0.0), second], 1)
    expected = PerReward()(d.batch.with_fields(component_rewards=gated))[0]
    given_requirement = PerReward(requires=(Requires("a", "b", at_least),))

    same(given_requirement(d.batch)[0], expected)
    # Of two requirements both must hold, whichever stands first.
    for order in ((at_least, -math.inf), (-math.inf, at_least)):
        both = tuple(Requires("a", "b", each) for each in order)
        same(PerReward(requires=both)(d.batch)[0], expected)
    same(d.batch.component_rewards[:, 0], first)


@few
@given(drawn())
def test_a_missing_reward_is_an_error_and_no_zero(d: Drawn):
    """It names the reward and how many responses lack it; what could not be graded lacks everything and is no error."""
    assert d.batch.component_rewards is not None
    rewards = d.batch.component_rewards.clone()
    rewards[:, 1] = torch.nan
    batch = d.batch.with_fields(component_rewards=rewards)
    if bool(batch.is_graded.any()):
        with pytest.raises(GradingError, match="the reward 'b' did not apply to"):
            PerReward()(batch)
    rewards = torch.where(batch.is_graded[:, None], d.batch.component_rewards, torch.nan)
    same(PerReward()(batch.with_fields(component_rewards=rewards))[0], PerReward()(d.batch)[0])


LEAVES = (GroupRelative(scale="none"), LeaveOneOut(), OptimalBaseline(), Returns(), PerReward(), StateRelative())


def composed(inner: st.SearchStrategy[Advantage]) -> st.SearchStrategy[Advantage]:
    """Return sums, multiples, choices and normal forms of what is inside; epsilon keeps rounding from growing."""
    return st.one_of(
        st.tuples(inner, inner).map(AdvantageSum),
        st.builds(Scaled, inner, factors),
        st.builds(Where, st.builds(RewardAtLeast, st.just(0.25), st.sampled_from(["", "b"])), inner, inner),
        st.builds(Normalized, inner, st.sampled_from(["group", "batch", "length"]), st.just(0.1)),
    )


nested = st.recursive(st.sampled_from(LEAVES), composed, max_leaves=8)


@few
@given(drawn(), nested, st.randoms(use_true_random=False))
def test_whatever_is_composed_keeps_the_laws(d: Drawn, advantage: Advantage, random: Random):
    """Nested at random it needs what its parts need; cuts, order and what is masked change nothing (P32)."""
    inside = [part for _, part in parts_of(advantage)]
    conditions = {need for part in inside if isinstance(part, Where) for need in part.condition.needs}
    assert advantage.needs == conditions.union(*(part.needs for part in inside))
    assert advantage.minimum_generations == max(part.minimum_generations for part in inside)

    algorithm = Composition("nested", "", advantage, GRPO.ratio, GRPO.surrogate, GRPO.aggregate)
    batch = algorithm.prepare(d.batch)
    loss, gradient = loss_and_gradient(algorithm, batch, d.current)
    cut_loss, cut = loss_and_gradient(algorithm, batch, d.current, d.cuts)
    assert cut_loss == pytest.approx(loss, abs=1e-12 * size_of(loss, gradient, d.current))
    same(cut, gradient, 1e-12)

    order = torch.tensor(sorted(range(len(d.batch)), key=lambda _: random.random()))
    turned = algorithm.prepare(d.batch.rows(order)).advantages
    assert batch.advantages is not None
    assert turned is not None
    same(turned, batch.advantages[order], 1e-9)
    spoiled = torch.where(d.batch.mask, d.batch.behavior, torch.nan)
    beside = algorithm.prepare(d.batch.with_fields(behavior=spoiled, proximal=spoiled, values=spoiled))
    assert torch.equal(beside.advantages, batch.advantages)


def test_needs_and_sizes_of_groups_follow_from_the_parts():
    """A sum reads what its terms read; a choice what its condition reads too; the largest group is what all need."""
    chosen = Where(RewardAtLeast(1.0, "right"), Gae(kl=0.1), Scaled(PerReward(), 2.0))
    both = AdvantageSum((Returns(), chosen))

    assert both.needs == {"values", "reference", "proximal", "component_rewards"}
    assert (both.minimum_generations, AdvantageSum((Returns(),)).minimum_generations) == (2, 1)
    assert Where(InRole("white"), Returns(), Returns()).needs == {"role"}
    assert Normalized(Returns(), over="group").minimum_generations == 2


def test_what_cannot_be_composed_is_refused():
    """Two critics, a critic or a penalty within each reward, no term, and what is scaled twice; each with a remedy."""
    with pytest.raises(ConfigError, match="Gae and Gae each have targets for the critic"):
        AdvantageSum((Gae(), Scaled(Gae(), 2.0).of))
    with pytest.raises(ConfigError, match="each have targets"):
        Where(RewardAtLeast(), Gae(), Scaled(Gae(), 2.0))
    with pytest.raises(ConfigError, match="PerReward takes an advantage of one reward, and Gae reads values"):
        PerReward(Gae())
    with pytest.raises(ConfigError, match=r"GroupRelative reads reference.*AdvantageSum"):
        PerReward(GroupRelative(kl=0.1))
    with pytest.raises(ConfigError, match="TrackedBaseline reads the tracked value"):
        PerReward(TrackedBaseline())
    with pytest.raises(ConfigError, match="ConstantAdvantage reads no reward"):
        PerReward(ConstantAdvantage())
    with pytest.raises(ConfigError, match="'a' would count where it was earned itself; name another"):
        Requires("a", "a")
    for terms in ((), GroupRelative()):
        with pytest.raises(ConfigError, match="AdvantageSum has no term"):
            AdvantageSum(terms)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"advantage.terms.0 `builtins:str` has no needs"):
        replace(GRPO, advantage=AdvantageSum(("a", "b")))  # type: ignore[arg-type]
    endless = functools.reduce(lambda inner, _: Scaled(inner, 1.0), range(3000), GroupRelative())
    with pytest.raises(ConfigError, match="its pieces are nested too deeply"):
        replace(GRPO, advantage=endless)
    twice = AdvantageSum((Returns(), Normalized(GroupRelative(), over="group")))
    with pytest.raises(ConfigError, match=r"scales twice; set algorithm.advantage.terms.1.of.scale = \"none\" or"):
        replace(GRPO, advantage=twice)
    lost = Whitened(Scaled(Returns(), -2.0))
    with pytest.raises(ConfigError, match=r'no effect; set algorithm.advantage = {piece = "Scaled", .*factor = -2.0}$'):
        replace(GRPO, advantage=lost)
    with pytest.raises(ConfigError, match="equal numbers become 0"):
        replace(GRPO, advantage=Normalized(ConstantAdvantage()))
    with pytest.raises(ConfigError, match=r'no effect; set algorithm.advantage = .*of = .*"Returns".*factor = 6.0}$'):
        replace(GRPO, advantage=Normalized(Scaled(Scaled(Returns(), 2.0), 3.0)))
    deep: Advantage = Returns()
    for _ in range(10):
        deep = Normalized(deep, over="length")
    with pytest.raises(ConfigError, match=r'^[^;]* twice over the same scales twice; set algorithm.advantage.of = "R'):
        replace(GRPO, advantage=deep)
    for nothing in (Scaled(Returns(), 0.0), AdvantageSum((Scaled(Returns(), 0.0), ConstantAdvantage(0.0)))):
        with pytest.raises(ConfigError, match=r"always 0 teaches nothing; set algorithm.advantage"):
            replace(GRPO, advantage=nothing)
    with pytest.raises(ConfigError, match="reads the values of a critic, and there is none"):
        replace(GRPO, advantage=Scaled(Gae(), 2.0))
    replace(PPO, advantage=Scaled(Gae(), 2.0))
