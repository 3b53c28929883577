import json
from dataclasses import replace

import pytest
from tests.rollouts.curriculum.conftest import MakeGroup

from gnomon.algorithms import PRESETS
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import State, Stateful, Task
from gnomon.records.checkpoints import check_form
from gnomon.rollouts.curriculum.base import TaskIndex
from gnomon.training.build_data import PromptChoice, build_curriculum

IDS = ["sum-3", "sum-1", "Zürich", "", "sum-2"]


def test_a_roster_finds_every_id_where_it_stands():
    """The index is the place in the task set's own order, whatever the ids are."""
    task_index = TaskIndex(IDS)

    assert task_index.indices(IDS).tolist() == [0, 1, 2, 3, 4]
    assert task_index.find("sum-4") is None


def test_ids_must_be_unique():
    """Two tasks with one id would share a success rate: both places are named."""
    with pytest.raises(DatasetError, match="1 task ids are not unique, first at indices 0 and 2"):
        TaskIndex(["a", "b", "a"])


def test_an_empty_task_set_is_refused():
    """Without tasks there is nothing to draw."""
    with pytest.raises(DatasetError, match="the task set is empty"):
        TaskIndex([])


def test_an_unknown_id_is_named():
    """A group of a task that is not in the set is a mistake, not a new entry."""
    with pytest.raises(DatasetError, match="'x' is not in the task set of 5 tasks"):
        TaskIndex(IDS).index("x")


@pytest.mark.parametrize("other", [IDS[:-1], IDS[::-1], [*IDS[:-1], "sum-9"], ["sum-3s", "um-1", *IDS[2:]]])
def test_the_fingerprint_tells_task_sets_apart(other: list[str]):
    """Fewer tasks, another order, one other id and ids cut elsewhere are all another task set."""
    with pytest.raises(ConfigError, match="the saved tracker belongs to another task set: it has 5 tasks"):
        TaskIndex(other).check(TaskIndex(IDS).identity(), "tracker")


def parts_of(chosen: PromptChoice) -> dict[str, Stateful]:
    """Return what has a state in a checkpoint."""
    named = {"curriculum": chosen.curriculum, "tracker": chosen.tracker, "drift": chosen.drift, "replay": chosen.replay}
    return {name: part for name, part in named.items() if part is not None}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_step_leaves_is_what_a_resumed_run_accepts(preset: str, group: MakeGroup):
    """A part of a run that begins anew takes every state that it writes after steps, and goes on from it."""
    tasks = [Task(str(number), (1, 2), "", {"role": "white"} if number % 2 else {}) for number in range(12)]
    chosen, new = (build_curriculum(PRESETS[preset], tasks, 0) for _ in "ab")  # type: ignore[arg-type]
    for _ in range(3):
        made = [replace(group(tasks[n].id, (1.0, 0.0, None)), task=tasks[n]) for n in chosen.curriculum.take(4)]
        chosen.curriculum.observe(made)
        if chosen.tracker is not None:
            chosen.tracker.observe(made, {each.task.id: 0.01 for each in made})

    begun = parts_of(new)
    for name, part in parts_of(chosen).items():
        saved = part.state()
        read = State(saved.tensors, json.loads(json.dumps(saved.values)))
        check_form(read, begun[name].state())
        begun[name].restore(read)
        assert begun[name].state().values == saved.values
    assert new.curriculum.take(6) == chosen.curriculum.take(6)
