"""Shuffled epochs without the prompts that are mastered: ScaleRL's no-positive-resampling."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gnomon.algorithms.sections import NoPositiveResampling
from gnomon.core.metrics import Last, Metrics
from gnomon.core.types import Group, State
from gnomon.rollouts.curriculum.base import KeptPrompts, TaskIndex
from gnomon.rollouts.curriculum.uniform import UniformCurriculum


class NoPositiveCurriculum:
    """Asks tasks in shuffled epochs, and a task no more once a visit passed often enough.

    The pass rate of a visit is the share of its graded responses whose reward is at least ``success``. A take looks at
    as many tasks as there are at most; the next ones are asked whether they were dropped or not, so that it always
    ends: when all tasks are mastered they come again, and ``sampler/dropped_fraction`` is 1. No take repeats a task
    (unless it asks for more than there are).

    Args:
        task_index: The ids of the task set.
        plan: When a task is mastered.
        seed: The run's seed.

    Memory: 1 byte a task, and 12 of the task index.
    """

    def __init__(self, task_index: TaskIndex, plan: NoPositiveResampling, seed: int) -> None:
        self._task_index = task_index
        self._plan = plan
        self._epochs = UniformCurriculum(len(task_index), seed)
        self._dropped: NDArray[np.bool_] = np.zeros(len(task_index), bool)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tasks; distinct if ``count`` is at most the number of tasks."""
        size = len(self._task_index)
        taken: list[int] = []
        looked_at = 0
        while len(taken) < count:
            index = self._epochs.draw(set(taken) if count <= size else set())
            if looked_at >= size or not self._dropped[index]:
                taken.append(index)
            looked_at += 1
        return taken

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Drop the tasks that these visits show to be mastered."""
        for group in groups:
            grades = [r.grade for r in group.rollouts if r.grade.reward is not None]
            passed = [(g.parts.get(self._plan.part, g.reward) or 0.0) >= self._plan.success for g in grades]
            if passed and sum(passed) / len(passed) >= self._plan.pass_rate:
                self._dropped[self._task_index.index(group.task.id)] = True
        return Metrics.of({"sampler/dropped_fraction": Last(float(self._dropped.mean()))})

    def state(self) -> State:
        """Return which tasks were dropped, and the place in the epoch."""
        values = {**self._task_index.identity(), "epochs": dict(self._epochs.state().values)}
        return State({"dropped": torch.from_numpy(self._dropped.copy())}, values)

    def restore(self, state: State) -> None:
        """Go on where the curriculum that returned ``state`` stood.

        Raises:
            ConfigError: If it was of another task set.
        """
        self._task_index.check(dict(state.values), "curriculum")
        self._epochs.restore(State(values=state.values["epochs"]))
        self._dropped = state.tensors["dropped"].numpy().copy()

    def moved(self, state: State, kept: KeptPrompts | None) -> State:
        """Return a state of a former task set as one of this set; a new task is not dropped."""
        if kept is None:
            return self.state()
        epochs = dict(self._epochs.moved(State(values=state.values["epochs"]), kept).values)
        dropped = kept.moved(state.tensors["dropped"], torch.from_numpy(self._dropped))
        return State({"dropped": dropped}, {**self._task_index.identity(), "epochs": epochs})
