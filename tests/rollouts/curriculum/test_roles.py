"""Averages of roles: worked out by hand, apart from each other, and the same after a restart."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.algorithms import RAE, REINFORCE, InRole, Returns, Where
from gnomon.core.errors import ConfigError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.rollouts.collate import collate
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.rollouts.curriculum.tracker import RoleValues
from gnomon.training.build_data import build_curriculum

TASKS = [Task(name, (1,), "", {"role": role}) for name, role in (("a", "white"), ("b", "black"), ("c", "white"))]


def group(task: Task, *rewards: float | None) -> Group:
    """Return a group with these rewards; None could not be graded."""
    grades = [Grade(reward, error="hung" if reward is None else None) for reward in rewards]
    return Group(
        task, tuple(Rollout(task.id, (1,), (2,), (True,), (-1.0,), (-1.0,), "", g, 0, 0, "stop") for g in grades)
    )


def values(decay: float = 0.5) -> RoleValues:
    """Return averages at the start."""
    return RoleValues(TaskIndex([task.id for task in TASKS]), decay)


def averages(tracked: RoleValues, *tasks: Task) -> list[float]:
    """Return the values of the tasks' roles."""
    return [tracked.value(task) for task in tasks]


def test_an_average_moves_with_every_rollout_of_its_role():
    """From 0 by half of the way each: white 1, 0 then 1 on another task, 0.5, 0.25, 0.625; black -1: -0.5."""
    tracked = values()
    tracked.observe([group(TASKS[0], 1.0, None, 0.0), group(TASKS[1], -1.0), group(TASKS[2], 1.0)], {})

    assert averages(tracked, *TASKS) == [0.625, -0.5, 0.625]


def test_resuming_equals_going_on():
    """A state restored elsewhere goes on as the one that it was taken of; another task set is refused."""
    tracked, other = values(), values()
    tracked.observe([group(TASKS[0], 1.0)], {})
    other.restore(tracked.state())
    for each in (tracked, other):
        each.observe([group(TASKS[2], 0.25), group(TASKS[1], 0.5)], {})

    assert averages(other, *TASKS[:2]) == averages(tracked, *TASKS[:2]) == [0.375, 0.25]
    with pytest.raises(ConfigError, match="averages of roles belongs to another task set"):
        RoleValues(TaskIndex(["x"]), 0.5).restore(tracked.state())
    with pytest.raises(ConfigError, match="begin at 0"):
        tracked.load(Path("values.json"))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_no_average_is_infinite(bad: float):
    """Rewards are finite, so averages of them are."""
    tracked = values()
    state = tracked.state()

    with pytest.raises(ValueError, match="no average of rewards is that"):
        tracked.restore(replace(state, values={**state.values, "averages": {"white": bad}}))


def test_a_run_keeps_an_average_for_each_role_and_tells_rows_apart():
    """The preset's tracker is one of roles; a batch carries them; who asks for a role that no task has is refused."""
    chosen = build_curriculum(RAE, TASKS, 0)  # type: ignore[arg-type]
    assert isinstance(chosen.tracker, RoleValues)
    assert collate([group(TASKS[0], 1.0), group(TASKS[1], 0.0)], 1.0).role == ("white", "black")

    asking = replace(REINFORCE, advantage=Where(InRole("white"), Returns(), Returns(gamma=0.5)))
    build_curriculum(asking, TASKS, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"asks for roles \(InRole\), and no task has one"):
        build_curriculum(asking, [Task("a", (1,), "")], 0)  # type: ignore[arg-type]
