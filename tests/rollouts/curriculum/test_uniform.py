from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError
from gnomon.rollouts.curriculum.samplers import UniformCurriculum


@given(size=st.integers(1, 12), counts=st.lists(st.integers(0, 12), max_size=30), seed=st.integers(0, 5))
def test_no_take_repeats_a_task(size: int, counts: list[int], seed: int):
    """Even across epoch borders a take of at most ``size`` tasks holds no task twice."""
    curriculum = UniformCurriculum(size, seed)

    for count in counts:
        taken = curriculum.take(min(count, size))
        assert len(set(taken)) == len(taken) == min(count, size)


@given(size=st.integers(1, 12), counts=st.lists(st.integers(0, 30), max_size=30), seed=st.integers(0, 5))
def test_every_task_is_asked_equally_often(size: int, counts: list[int], seed: int):
    """Passing over a task only delays it: at any time no task is two visits ahead of another."""
    curriculum = UniformCurriculum(size, seed)
    asked: Counter[int] = Counter(dict.fromkeys(range(size), 0))

    for count in counts:
        asked.update(curriculum.take(count))
        assert max(asked.values()) - min(asked.values()) <= (1 if count > size else 2)
        assert set(asked) == set(range(size))


def test_an_epoch_holds_every_task_once():
    """Takes that divide the size give permutations, another one each epoch."""
    curriculum = UniformCurriculum(size=100, seed=3)
    epochs = [curriculum.take(50) + curriculum.take(50) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_depends_on_seed_and_epoch_alone():
    """How an epoch is cut into takes changes nothing as long as none crosses its end."""
    whole, halves = UniformCurriculum(10, seed=1), UniformCurriculum(10, seed=1)

    assert whole.take(10) + whole.take(10) == [task for _ in range(4) for task in halves.take(5)]
    assert UniformCurriculum(10, seed=2).take(10) != UniformCurriculum(10, seed=1).take(10)


def test_more_than_all_tasks_are_whole_rounds():
    """Asking 7 of 3 tasks repeats, but evenly."""
    assert sorted(Counter(UniformCurriculum(3, seed=0).take(7)).values()) == [2, 2, 3]


@given(
    size=st.integers(1, 12),
    before=st.lists(st.integers(0, 12), max_size=10),
    after=st.lists(st.integers(0, 12), max_size=10),
)
def test_resuming_equals_going_on(size: int, before: list[int], after: list[int]):
    """A fresh curriculum that restores the state takes what the first one would have."""
    first, second = UniformCurriculum(size, seed=0), UniformCurriculum(size, seed=0)
    for count in before:
        first.take(count)

    second.restore(first.state())

    assert [second.take(count) for count in after] == [first.take(count) for count in after]


def test_the_state_is_tiny():
    """A position among a million tasks takes three values and no tensor."""
    curriculum = UniformCurriculum(1_000_000, seed=0)
    curriculum.take(10)

    state = curriculum.state()

    assert not state.tensors
    assert state.values == {"epoch": 0, "position": 10, "passed_over": []}


def test_an_empty_set_is_refused():
    """Nothing can be taken from no tasks."""
    with pytest.raises(ConfigError, match="at least one task, got size 0"):
        UniformCurriculum(0, seed=0)
