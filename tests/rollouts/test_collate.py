"""Groups to batches: what errors, truncation and padding become."""

from dataclasses import replace

import pytest
import torch

from gnomon.core.errors import ConfigError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.rollouts.collate import collate


def rollout(response: tuple[int, ...], grade: Grade, prompt: tuple[int, ...] = (7, 8)) -> Rollout:
    ones = (-1.0,) * len(response)
    return Rollout("t", prompt, response, (True,) * len(response), ones, ones, "", grade, 3, 3, "stop")


def test_an_errored_rollout_keeps_its_row_and_trains_nothing():
    """Its mask is empty and it is not graded, so it enters neither statistic nor loss; it is not a zero reward."""
    task = Task("t", (7, 8), "")
    group = Group(task, (rollout((1, 2), Grade(1.0)), rollout((3,), Grade(None, error="hung"))))

    batch = collate([group], temperature=1.0)

    assert batch.mask.tolist() == [[True, True], [False, False]]
    assert batch.is_graded.tolist() == [True, False]
    assert batch.tokens.tolist() == [[7, 8, 1, 2], [7, 8, 3, 0]]
    assert batch.lengths.tolist() == [4, 3]


def test_the_baseline_is_read_by_task_id():
    """Each row carries the value of its own task."""
    groups = [Group(Task("t", (7,), ""), (rollout((1,), Grade(1.0)),))]

    batch = collate(groups, 1.0, baseline={"t": 0.25}.__getitem__)

    assert batch.baseline is not None
    assert torch.equal(batch.baseline, torch.tensor([0.25], dtype=torch.float64))


def test_routings_are_padded_with_no_choice():
    """A shorter row, and a row of which no routing is known, have -1: routers choose freely there."""
    one, two = (rollout(tokens, Grade(1.0)) for tokens in ((1, 2), (3,)))
    known = replace(one, routing=torch.arange(4 * 2 * 2, dtype=torch.int16).view(4, 2, 2))
    short = replace(two, routing=torch.ones(3, 2, 2, dtype=torch.int16))

    batch = collate([Group(Task("t", (7, 8), ""), (known, short, two))], 1.0)

    assert batch.routing is not None
    assert torch.equal(batch.routing[0], known.routing)
    assert batch.routing[1].tolist() == [[[1, 1], [1, 1]]] * 3 + [[[-1, -1], [-1, -1]]]
    assert bool((batch.routing[2] == -1).all())
    assert collate([Group(Task("t", (7, 8), ""), (one, two))], 1.0).routing is None


def test_rows_keep_their_task_ids_through_every_cut():
    """Rows that are shuffled, repeated or dropped have the ids of their own tasks; another number of ids is refused."""
    groups = [
        Group(Task(name, (7,), ""), (replace(rollout((1,), Grade(1.0), (7,)), task_id=name),) * 2) for name in "ab"
    ]
    batch = collate(groups, 1.0)

    assert batch.task_ids == ("a", "a", "b", "b")
    assert batch.rows([3, 0, 3]).task_ids == ("b", "a", "b")
    assert batch.rows(torch.tensor([], dtype=torch.long)).task_ids == ()
    assert batch.rows([2, 1]).with_fields(temperature=0.5).task_ids == ("b", "a")
    with pytest.raises(ConfigError, match="task_ids has 2 ids, expected one for each of 4 rows"):
        batch.with_fields(task_ids=("a", "b"))
