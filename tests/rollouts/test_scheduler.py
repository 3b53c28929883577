"""Who is late, who may overtake, and where every rollout ends: on a virtual clock."""

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollouts.timed import UPDATE_SECONDS, Digit, Questions, TimedEngine, stream_of, train, virtually

from gnomon.core.errors import ConfigError
from gnomon.core.types import Group, Snapshot, State
from gnomon.engines.base import Sampling
from gnomon.engines.pool import EnginePool
from gnomon.rollouts.curriculum.samplers import UniformCurriculum
from gnomon.rollouts.metrics import measure_stream
from gnomon.rollouts.rollout import Rollouter, RolloutTimer
from gnomon.rollouts.scheduler import InflightGroup, RolloutBatch, RolloutScheduler, choose


def heavy_tail(seed: int) -> Callable[[int, int], float]:
    """Return latencies from 0.3 seconds up to many updates, a few of them very long: fixed by seed and key."""
    return lambda index, key: 0.3 * random.Random(seed * 7919 + key).paretovariate(0.9)


def keys(groups: tuple[Group, ...]) -> list[int]:
    return [r.response[0] for g in groups for r in g.rollouts]


def slots_of(*ready: tuple[int, bool]) -> list[InflightGroup]:
    """Return slots in asked order, of (clock, is it ready)."""
    made = [InflightGroup(i, 0, i, RolloutTimer(), turn=i, clock=clock) for i, (clock, _) in enumerate(ready)]
    for slot, (_, is_ready) in zip(made, ready, strict=True):
        slot.status = "kept" if is_ready else "asked"
    return made


def test_a_full_stream_trains_on_what_was_asked_first():
    """With two steps' slots full at bound 1, the two of clock 0 are due now or the four cannot all be in time."""
    slots = slots_of((0, True), (0, False), (1, True), (1, True))

    assert choose(slots, 2, clock=1, bound=1, is_waiting=True) is None
    assert choose(slots, 2, clock=1, bound=1, is_waiting=False) == [slots[0], slots[2]]


def test_an_empty_slot_lets_one_overtake():
    """At bound 2 and clock 1, three slots for steps of one: who was asked at 0 may still come at 2, so 1 overtakes."""
    slots = slots_of((0, False), (1, True))

    assert choose(slots, 1, clock=1, bound=2, is_waiting=True) == [slots[1]]
    assert choose(slots, 1, clock=2, bound=2, is_waiting=True) is None


rules = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 3),
        "generations": st.integers(1, 2),
        "max_staleness": st.integers(0, 3),
        "stragglers": st.sampled_from(["wait", "drop"]),
        "max_attempts": st.integers(1, 3),
    }
)


@settings(max_examples=60)
@given(rule=rules, slack=st.integers(0, 3), seed=st.integers(0, 10**6), hardness=st.integers(0, 3))
def test_every_rollout_ends_in_exactly_one_way(rule: dict[str, int], slack: int, seed: int, hardness: int):
    """Trained once, refused, surplus, stale or pending; none older than the bound; steps in asked order."""
    bound, each = rule["max_staleness"], rule["generations"]
    engine = TimedEngine(heavy_tail(seed))

    def is_kept(group: Group) -> bool:
        return group.rollouts[0].response[0] // 10 % 4 >= hardness

    stream = stream_of(engine, **rule, slack=min(slack, bound), is_kept=is_kept)

    async def walk() -> tuple[list[RolloutBatch], State, int]:
        rounds: list[RolloutBatch] = []
        async with stream:
            for step in range(6):
                finished = await stream.next_batch()
                state = stream.state()
                for _ in range(4):  # what was asked reaches the engine; no time passes
                    await asyncio.sleep(0)
                asked = len(engine.asked)
                rounds.append(finished)
                ages = [step - r.oldest_version for g in finished.groups for r in g.rollouts]
                assert max(ages) <= bound
                await asyncio.sleep(1.0)
                engine.version = step + 1
        return rounds, state, asked

    rounds, state, asked = virtually(walk())
    ended = [key for finished in rounds for key in keys(finished.generated)]
    stale = sum(finished.cancelled for finished in rounds)
    pending = each * len(state.values["pending"])
    order = {key: place for place, (_, key, _) in enumerate(engine.asked)}

    assert len(order) == len(engine.asked)
    assert len(set(ended)) == len(ended)
    assert len(ended) + stale + pending == asked
    for finished in rounds:
        assert [order[k] for k in keys(finished.groups)] == sorted(order[k] for k in keys(finished.groups))
        counted = measure_stream(finished)
        wasted = ("refused", "surplus", "distrusted")
        assert sum(counted[f"stream/{name}_rollouts"] for name in wasted) == len(keys(finished.wasted))
        assert counted["stream/stale_rollouts"] == finished.cancelled
        assert rule["stragglers"] == "drop" or (finished.cancelled, finished.late) == (0, ())
        if hardness == 0:
            assert len(finished.groups) == rule["prompts"]


@settings(max_examples=40)
@given(prompts=st.integers(1, 4), attempts=st.integers(1, 4), seed=st.integers(0, 10**6), hardness=st.integers(0, 4))
def test_at_staleness_0_nothing_depends_on_timing(prompts: int, attempts: int, seed: int, hardness: int):
    """Groups, draws and order are those of rounds of attempts, written out here, whatever the latencies."""

    def is_kept(group: Group) -> bool:
        return group.rollouts[0].response[0] // 10 % 4 >= hardness

    def answers(seconds: Callable[[int, int], float]) -> list[tuple[list[int], list[int]]]:
        engine = TimedEngine(seconds)
        stream = stream_of(engine, prompts, 2, is_kept=is_kept, max_attempts=attempts)
        return [(keys(r.groups), keys(r.filtered)) for r in virtually(train(stream, engine, 3))]

    async def written_out() -> list[tuple[list[int], list[int]]]:
        curriculum, tasks, found = UniformCurriculum(1000, seed=0), Questions(), []
        rollouter = Rollouter(TimedEngine(lambda *_: 0.0), Digit(), lambda ids: str(ids[0]), Sampling(), 2, seed=0)
        for number in range(3):
            kept: list[Group] = []
            dropped: list[Group] = []
            for attempt in range(attempts):
                for index in curriculum.take(prompts - len(kept)):
                    group = await rollouter.run_group(tasks[index], number + attempt * 2**40, RolloutTimer())
                    (kept if is_kept(group) else dropped).append(group)
                if len(kept) == prompts:
                    break
            if not kept:
                kept, dropped = dropped[:prompts], dropped[prompts:]
            found.append((keys(tuple(kept)), keys(tuple(dropped))))
        return found

    assert answers(heavy_tail(seed)) == answers(lambda *_: 0.0) == virtually(written_out())


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_slow_generation_makes_every_answer_as_old_as_the_bound(bound: int):
    """When an answer takes as long as twenty updates, what is trained on is exactly ``bound`` steps old."""
    engine = TimedEngine(lambda index, key: 20.0)
    rounds = virtually(train(stream_of(engine, 2, max_staleness=bound), engine, bound + 4))
    ages = [{n - r.oldest_version for g in finished.groups for r in g.rollouts} for n, finished in enumerate(rounds)]

    assert ages[bound:] == [{bound}] * 4


def seconds_for(steps: int, latency: Callable[[int, int], float], **settings: object) -> float:
    async def walk() -> float:
        engine = TimedEngine(latency)
        await train(stream_of(engine, 4, **settings), engine, steps)
        return asyncio.get_running_loop().time()

    return virtually(walk())


def test_asking_ahead_hides_what_an_update_takes():
    """Answers of 1 s and updates of 1 s: 10 steps take 20 s one after the other, and 1 + 10 s when they overlap."""
    assert seconds_for(10, lambda *_: 1.0) == pytest.approx(20.0)
    assert seconds_for(10, lambda *_: 1.0, max_staleness=1) == pytest.approx(11.0)


def test_a_straggler_is_overtaken_until_its_time_is_over():
    """An answer of 2.8 s among answers of 0.5 s, asked at 1.5 s: two steps later it is late by 0.8 s, three later not.

    A bound of 3 with slack 1 has as many prompts on their way as a bound of 2, and waits for nobody here.
    """
    slow = UniformCurriculum(1000, seed=0).take(13)[12]

    def latency(index: int, key: int) -> float:
        return 2.8 if index == slow else 0.5

    assert seconds_for(8, latency, max_staleness=2) == pytest.approx(0.5 + 8.0 + 0.8)
    assert seconds_for(8, latency, max_staleness=3, slack=1) == pytest.approx(0.5 + 8.0)
    assert seconds_for(8, latency, max_staleness=2, stragglers="drop") == pytest.approx(0.5 + 8.0)


def test_a_dropped_straggler_is_withdrawn_and_counted_once():
    """An answer that never comes: the engine is told to stop, two rollouts are stale, and every step is whole."""
    slow = UniformCurriculum(1000, seed=0).take(1)[0]
    engine = TimedEngine(lambda index, key: 1e5 if index == slow else 0.5)
    stream = stream_of(engine, 4, 2, max_staleness=1, stragglers="drop")

    async def walk() -> tuple[list[RolloutBatch], list[int]]:
        rounds = await train(stream, engine, 5)
        return rounds, engine.withdrawn.copy()

    rounds, withdrawn = virtually(walk())
    assert [finished.cancelled for finished in rounds] == [0, 2, 0, 0, 0]
    assert [len(finished.groups) for finished in rounds] == [4] * 5
    assert withdrawn[:2] == [key for index, key, _ in engine.asked if index == slow]


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_finishes_when_its_step_is_full_is_surplus(is_refused: bool):
    """Of three prompts of one step each the two slow ones finish together, both due: one is trained on, one left over.

    What the filter refused is counted as refused instead: a rollout has one cause.
    """
    slow = UniformCurriculum(1000, seed=0).take(2)
    engine = TimedEngine(lambda index, key: 2.5 if index in slow else 0.5)

    def is_kept(group: Group) -> bool:
        return not (is_refused and group.task.id == f"q{slow[1]}")

    stream = stream_of(engine, 1, max_staleness=2, stragglers="drop", is_kept=is_kept)
    rounds = virtually(train(stream, engine, 3))

    assert [[group.task.id for group in finished.late] for finished in rounds[:2]] == [[], []]
    left_over = rounds[2].filtered if is_refused else rounds[2].late
    assert [group.task.id for group in left_over] == [f"q{slow[1]}"]
    assert [group.task.id for group in rounds[2].groups] == [f"q{slow[0]}"]
    assert len(rounds[2].wasted) == 1


def test_a_refused_group_is_replaced_at_once_where_asking_overlaps():
    """With one of four prompts slow, another that was refused is asked again at 1 s at staleness 1, at 9 s at 0."""
    slow, refused = UniformCurriculum(1000, seed=0).take(2)

    def replaced_at(staleness: int) -> float:
        times: list[float] = []

        def latency(index: int, key: int) -> float:
            times.append(asyncio.get_running_loop().time())
            return 9.0 if index == slow else 1.0

        def is_kept(group: Group) -> bool:
            return group.task.id != f"q{refused}"

        engine = TimedEngine(latency)
        stream = stream_of(engine, 4, max_staleness=staleness, is_kept=is_kept, max_attempts=3)
        virtually(train(stream, engine, 1))
        return times[4 * (staleness + 1)]

    assert replaced_at(0) == pytest.approx(9.0)
    assert replaced_at(1) == pytest.approx(1.0)


def test_what_was_on_its_way_is_asked_again_with_the_same_draws():
    """Unfinished, finished and replaced prompts alike: after a restart the same keys, before any new prompt."""

    def is_kept(group: Group) -> bool:
        return group.rollouts[0].response[0] % 3 > 0

    rule = {"max_staleness": 3, "slack": 1, "is_kept": is_kept, "max_attempts": 5}

    async def interrupted() -> tuple[set[int], list[int], int]:
        engine = TimedEngine(heavy_tail(3))
        stream = stream_of(engine, 3, **rule)
        async with stream:
            rounds = [await stream.next_batch() for _ in range(3)]
            state, seen = stream.state(), stream.curriculum.state()
            ended = {key for finished in rounds for key in keys(finished.generated)}
            for _ in range(4):
                await asyncio.sleep(0)
            on_their_way = {key for _, key, _ in engine.asked} - ended
        again = TimedEngine(heavy_tail(3), version=3)
        resumed = stream_of(again, 3, **rule)
        resumed.restore(state)
        resumed.curriculum.restore(seen)
        async with resumed:
            number = (await resumed.next_batch()).number
        return on_their_way, [key for _, key, _ in again.asked], number

    on_their_way, asked, number = virtually(interrupted())
    assert len(on_their_way) == 6
    assert set(asked[:6]) == on_their_way
    assert number == 3


def test_no_two_answers_share_their_draws():
    """Two tasks, asked over and over in the same round one by one: every answer has a key of its own."""
    engine = TimedEngine(heavy_tail(5))
    stream = stream_of(engine, 2, max_staleness=1, is_kept=lambda group: False, max_attempts=6)
    stream.curriculum = UniformCurriculum(2, seed=0)
    virtually(train(stream, engine, 3))
    asked = [key for _, key, _ in engine.asked]

    assert len(asked) >= 36
    assert len(set(asked)) == len(asked)


def test_a_failure_to_ask_ends_the_step_at_once():
    """An engine's error is raised by `take` while other answers are still on their way, and those are withdrawn."""

    broken = UniformCurriculum(1000, seed=0).take(2)[1]

    def latency(index: int, key: int) -> float:
        if index == broken:
            raise RuntimeError("the engine broke")
        return 1e5

    engine = TimedEngine(latency)
    with pytest.raises(RuntimeError, match="the engine broke"):
        virtually(train(stream_of(engine, 4, max_staleness=2), engine, 1))
    assert len(engine.withdrawn) > 0


@pytest.mark.parametrize("slack", [-1, 2])
def test_slack_is_no_more_than_the_bound(slack: int):
    """Fewer prompts than one step's cannot be on their way."""
    with pytest.raises(ConfigError, match="slack must be from 0 to max_staleness = 1 steps"):
        stream_of(TimedEngine(lambda *_: 0.0), 1, max_staleness=1, slack=slack)


def test_a_step_of_refused_groups_is_never_empty():
    """With a filter that refuses all, each step trains on as many groups as it has places, at any staleness."""
    for bound in (0, 2):
        engine = TimedEngine(heavy_tail(1))
        stream: RolloutScheduler = stream_of(
            engine, 3, max_staleness=bound, is_kept=lambda group: False, max_attempts=2
        )
        assert [len(finished.groups) for finished in virtually(train(stream, engine, 4))] == [3] * 4


def test_who_is_withdrawn_is_no_fault_of_an_engine():
    """Of two engines one answer in eight takes ten times their timeout, and is dropped after a step or two.

    Nobody is lost, nothing is asked again elsewhere, and each withdrawn answer was told so by its engine.
    """
    engines = {name: TimedEngine(lambda index, key: 50.0 if key % 8 == 0 else 0.4) for name in ("a", "b")}
    pool = EnginePool(engines, timeout_seconds=5.0)
    rounds: list[RolloutBatch] = []

    async def walk() -> int:
        await pool.load(Snapshot(0, lambda: iter(())))
        async with stream_of(pool, 8, max_staleness=1, stragglers="drop") as stream:
            for step in range(20):
                rounds.append(await stream.next_batch())
                await asyncio.sleep(UPDATE_SECONDS)
                await pool.load(Snapshot(step + 1, lambda: iter(())))
            return sum(len(engine.withdrawn) for engine in engines.values())

    withdrawn = virtually(walk())
    assert withdrawn == sum(round_.cancelled for round_ in rounds) > 10
    assert pool.metrics().values() == {
        "engines/alive": 2,
        "engines/lost": 0,
        "engines/returned": 0,
        "engines/asked_again": 0,
    }
    assert all(len(round_.groups) == 8 for round_ in rounds)
