import pytest

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.rollouts.curriculum.base import TaskIndex

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
