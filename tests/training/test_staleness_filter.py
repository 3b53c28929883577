"""Which groups a step trusts, and how far ahead it lets the stream ask."""

import asyncio
import math
import re
import tomllib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rollouts.timed import TimedEngine, stream_of

from gnomon.algorithms.presets import GRPO
from gnomon.analysis.plan import make_plan
from gnomon.config.experiment import from_table, load, to_toml
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import EffectiveSize
from gnomon.core.types import Batch, Grade, Group, Rollout, Task
from gnomon.models.size import model_size
from gnomon.rollouts.collate import collate
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch, RolloutScheduler
from gnomon.training.build_data import questions
from gnomon.training.resolve import Resolved
from gnomon.training.staleness_filter import EssFilter, NoFilter, admitted


def group_of(name: str, version: int, *lengths: int) -> Group:
    """Return a group of one rollout for each length, sampled with probability 1/e a token."""
    rollouts = (
        Rollout(name, (1,), (2,) * n, (True,) * n, (-1.0,) * n, (-1.0,) * n, "", Grade(1.0), version, version, "stop")
        for n in lengths
    )
    return Group(Task(name, (1,), name), tuple(rollouts))


def offered(*groups: tuple[Group, float]) -> tuple[RolloutBatch, Batch]:
    """Return a round and its scored batch; a group's tokens all have the given weight proximal / behavior."""
    batch = collate([group for group, _ in groups], 1.0)
    logs = torch.tensor([math.log(weight) for group, weight in groups for _ in group.rollouts])
    scored = batch.with_fields(proximal=torch.where(batch.mask, batch.behavior + logs[:, None], 7.0))
    return RolloutBatch(0, tuple(group for group, _ in groups), (), RolloutTimer()), scored


def stream(bound: int = 4, slack: int = 0) -> RolloutScheduler:
    return stream_of(TimedEngine(lambda *_: 0.0), 1, max_staleness=bound, slack=slack)


def test_the_group_that_spoils_the_batch_goes():
    """Weights 1, 1 and 9 a token: ESS = 11^2 / (3 * 83) = 0.486; without the last 1, without the first 100 / 164."""
    finished, batch = offered((group_of("a", 5, 1), 1.0), (group_of("b", 3, 1), 1.0), (group_of("c", 4, 1), 9.0))
    left, rest, measured = EssFilter(0.5, stream(), GRPO).apply(finished, batch, version=5)

    assert measured["stream/ess_fraction"] == pytest.approx(121 / 249)
    assert measured["stream/admitted_ess_fraction"] == pytest.approx(1.0)
    assert [group.task.id for group in left.groups] == ["a", "b"]
    assert [group.task.id for group in left.off_policy] == ["c"]
    assert rest.group.tolist() == [0, 1]


def test_of_equals_the_older_one_goes():
    """Weights 1, 1, 50, 50: without either 1 the ESS is 101^2 / (3 * 5001) = 0.68, so the older of the two goes."""
    sizes = [EffectiveSize.of([weight]) for weight in (1.0, 1.0, 50.0, 50.0)]

    assert admitted(sizes, [1, 2, 3, 4], floor=0.6) == [0, 2, 3]
    assert admitted(sizes, [2, 1, 3, 4], floor=0.6) == [1, 2, 3]


def test_old_answers_that_the_policy_would_still_give_stay():
    """Ten steps old, and weights of 1: nothing is removed, the round and the batch are the very same objects."""
    finished, batch = offered((group_of("a", 0, 3, 1), 1.0), (group_of("b", 0, 2), 1.0))
    left, rest, _ = EssFilter(0.9, stream(), GRPO).apply(finished, batch, version=10)

    assert left is finished
    assert rest is batch


def test_whole_groups_go_and_rows_keep_their_tokens():
    """The middle group of three goes with both of its rows; the others keep theirs, counted from 0 without a gap."""
    first, middle, last = group_of("a", 0, 3, 2), group_of("b", 0, 4, 4), group_of("c", 0, 1, 2)
    finished, batch = offered((first, 1.0), (middle, 40.0), (last, 1.0))
    left, rest, _ = EssFilter(0.7, stream(), GRPO).apply(finished, batch, version=1)

    assert left.groups == (first, last)
    assert rest.group.tolist() == [0, 0, 1, 1]
    assert rest.mask.sum(1).tolist() == [3, 2, 1, 2]
    assert left.generated == (first, last, middle)


@pytest.mark.parametrize("left_out", ["truncated", "failed", "not the policy's own"])
def test_only_tokens_that_train_count(left_out: str):
    """A row of weight 50 and of age 10 that trains nothing spoils no batch, and holds no prompt back."""
    far = group_of("b", 0, 2, 2)
    (row,) = (
        replace(far.rollouts[1], **changes)
        for name, changes in {
            "truncated": {"stop": "length"},
            "failed": {"grade": Grade(None, error="its judge is away")},
            "not the policy's own": {"mask": (False, False)},
        }.items()
        if name == left_out
    )
    finished, batch = offered((group_of("a", 9, 1, 1), 1.0), (replace(far, rollouts=(row, row)), 1.0))
    batch = batch.with_fields(proximal=batch.proximal + math.log(50) * (batch.group == 1)[:, None])
    asking = stream(bound=4, slack=3)
    left, rest, measured = EssFilter(0.9, asking, replace(GRPO, mask_truncated=True)).apply(finished, batch, version=10)

    assert (left, rest) == (finished, batch)
    assert measured["stream/ess_fraction"] == pytest.approx(1.0)
    assert asking.slack == 2  # from an age of 1, a step more


@pytest.mark.parametrize("masks", [False, True])
def test_truncated_answers_count_where_they_are_trained_on(masks: bool):
    """Weights 1, 1 and 9: the truncated answer of weight 9 goes, unless ``mask_truncated`` leaves it out anyway."""
    third = group_of("c", 5, 1)
    third = replace(third, rollouts=tuple(replace(rollout, stop="length") for rollout in third.rollouts))
    finished, batch = offered((group_of("a", 5, 1), 1.0), (group_of("b", 5, 1), 1.0), (third, 9.0))
    left, _, measured = EssFilter(0.5, stream(), replace(GRPO, mask_truncated=masks)).apply(finished, batch, version=5)

    assert measured["stream/ess_fraction"] == pytest.approx(1.0 if masks else 121 / 249)
    assert [group.task.id for group in left.groups] == ["a", "b", "c"][: 2 + masks]


def test_one_group_always_stays():
    """Two weights of one group that disagree for ever: ESS is near 1/2, the floor 0.99, and it is trained on."""
    assert admitted([EffectiveSize.of([1.0, 1e-9]), EffectiveSize()], [0, 0], floor=0.99) == [0, 1]


@given(
    st.lists(st.lists(st.floats(1e-6, 1e6), max_size=4), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
    st.integers(0, 10**6),
)
def test_what_is_left_is_trusted_or_is_alone(weights: list[list[float]], floor: float, seed: int):
    """The ESS of the rest reaches the floor unless one group is left; a trusted batch is left whole."""
    sizes = [EffectiveSize.of(group) for group in weights]
    stays = admitted(sizes, [seed % (place + 2) for place in range(len(sizes))], floor)
    counted = [place for place in stays if weights[place]]
    whole = EffectiveSize.of([w for group in weights for w in group])
    rest = EffectiveSize.of([w for place in stays for w in weights[place]])

    assert stays == sorted(stays)
    assert rest.value >= floor * (1 - 1e-9) or len(counted) == 1
    assert whole.value < floor or len(stays) == len(sizes)
    assert all(place in stays for place, group in enumerate(weights) if not group)


@pytest.mark.parametrize(
    ("weight", "age", "ahead"), [(1.0, 2, 3), (1.0, 9, 4), (5.0, 3, 3), (50.0, 3, 2), (50.0, 0, 0)]
)
def test_asking_ahead_follows_what_was_measured(weight: float, age: int, ahead: int):
    """Trusted: a step more than the age that was; below the floor: a step less; between: as before (3); in [0, 4].

    Two tokens of weights 1 and 5: ESS = 36 / 52 = 0.69, between 0.5 and 0.75; of 1 and 50: 0.52 of two, so three.
    """
    asking = stream(bound=4, slack=1)
    pairs = [(group_of("a", 10 - age, 1), 1.0), (group_of("b", 10, 1), 1.0), (group_of("c", 10, 1), weight)]
    if weight == 5.0:
        pairs = pairs[:1] + pairs[2:]
    EssFilter(0.5, asking, GRPO).apply(*offered(*pairs), version=10)

    assert asking.max_staleness - asking.slack == ahead


def test_how_far_ahead_was_asked_survives_a_restart():
    """A restored stream has the slack that was measured, not the one that it was built with."""
    before, after = stream(4, 3), stream(4, 3)
    before.slack = 1
    after.restore(before.state())

    assert after.slack == 1


def test_less_asked_ahead_empties_the_queue():
    """From 4 steps ahead to none: the next takes ask nothing until only the step's own prompt is on its way."""
    asking = stream(bound=4)

    async def walk() -> list[int]:
        left = []
        async with asking:
            for step in range(6):
                finished = await asking.next_batch()
                left.append(finished.in_flight + finished.finished)
                asking.slack = 4 if step == 0 else asking.slack
        return left

    assert asyncio.run(walk()) == [4, 3, 2, 1, 0, 0]


def test_without_admission_nothing_is_scored_and_nothing_removed():
    """A fixed bound costs no pass of its own."""
    finished, batch = offered((group_of("a", 0, 1), 1.0), (group_of("b", 0, 1), 1e6))

    assert NoFilter().needs == frozenset()
    assert NoFilter().apply(finished, batch, 9)[:2] == (finished, batch)


@pytest.mark.parametrize("floor", [0.0, 1.0, -1.0, math.nan])
def test_a_floor_is_a_fraction(floor: float):
    """0 would trust anything and 1 nothing that rounding touched."""
    with pytest.raises(ConfigError, match="must be above 0 and below 1"):
        EssFilter(floor, stream(), GRPO)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["max_staleness=often"], "max_staleness = 'often': should be .*'measured'"),
        (["max_staleness=1.5"], "max_staleness = 1.5: should be a whole number or 'measured'"),
        (["max_staleness=2", "staleness.slack=3"], "staleness.slack must be from 0 to max_staleness = 2 steps, got 3"),
        (["staleness.slack=1"], "staleness.slack must be from 0 to max_staleness = 0 steps"),
        (["staleness.slack=-1"], "staleness.slack must be 0 or more"),
        (["max_staleness=measured", "staleness.slack=1"], "staleness.slack is set by what is measured"),
        (["max_staleness=measured", "staleness.ess_floor=1.0"], "ess_floor must be above 0 and below 1, got 1.0"),
        (["max_staleness=measured", "staleness.limit=0"], "staleness.limit must be at least 1 step, got 0"),
        (["max_staleness=measured", "staleness.limit=5000"], "set staleness.limit = 1024 or less"),
        (["max_staleness=2", "staleness.stragglers=kill"], "staleness.stragglers = 'kill': should be 'wait' or 'drop'"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], said: str):
    """Each message names the key, the value and what would do, before anything is loaded."""
    with pytest.raises(ConfigError, match=said):
        load("tiny", overrides)


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        ([], "on-policy", "Staleness:"),
        (["max_staleness=1"], "The prompts of 2 steps are on their way at once. A step waits for", "overtaken"),
        (["max_staleness=3", "staleness.slack=1"], "prompts of 3 steps .* usually 1 step fresher", "dropped"),
        (["max_staleness=3", "staleness.stragglers=drop"], "are dropped, which favors short ones", "A step waits"),
        (["max_staleness=measured"], "and 8 steps is the most .* scored, which costs one more pass", "usually"),
        (["max_staleness=measured", "algorithm.updates.minibatches=2"], "the rest has 0.5 of its tokens", "more pass"),
    ],
)
def test_the_plan_says_what_may_be_stale(overrides: list[str], said: str, unsaid: str):
    """`gnomon plan` says in words how far ahead is asked, and what becomes of who is late."""
    experiment = load("tiny", overrides).experiment
    whole = " ".join(make_plan(Resolved(experiment), questions(experiment), model_size("tiny")).sentences)

    assert re.search(said, whole)
    assert unsaid not in whole


def test_a_measured_bound_is_in_the_record():
    """The record of an experiment says "measured", and reads back as the same experiment."""
    experiment = load("tiny", ["max_staleness=measured", "staleness.limit=3"]).experiment

    assert from_table(tomllib.loads(to_toml(experiment))).experiment == experiment
    assert experiment.staleness_bound == 3
