"""Groups to batches: what errors, truncation and padding become."""

from dataclasses import replace

import pytest
import torch

from gnomon.core.errors import ConfigError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.rollouts.collate import HintedPrompts, collate


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

    batch = collate(groups, 1.0, baseline=lambda task: {"t": 0.25}[task.id])

    assert batch.baseline is not None
    assert torch.equal(batch.baseline, torch.tensor([0.25], dtype=torch.float64))


def test_each_part_of_the_reward_has_its_column():
    """In the order of the weights; a part that did not apply, and all of an error, are NaN and no 0."""
    grades = (Grade(2.5, {"short": 1.0, "right": 1.0}), Grade(0.5, {"short": 1.0}), Grade(None, error="hung"))
    group = Group(Task("t", (7, 8), ""), tuple(rollout((1,), grade) for grade in grades))

    batch = collate([group], 1.0, weights=(("right", 2.0), ("short", 0.5)))

    assert (batch.components, batch.component_weights) == (("right", "short"), (2.0, 0.5))
    assert batch.component_rewards is not None
    assert torch.equal(batch.component_rewards.nan_to_num(-1), torch.tensor([[1.0, 1.0], [-1, 1], [-1, -1]]).double())
    assert collate([group], 1.0).component_rewards is None


def test_answers_keep_what_they_earned_and_what_they_answered():
    """Two conversations and an answer: turn, state and reward of each token.

    The conversations begin with one prompt and are told 9 and 8; a reply belongs to the answer after it. The single
    answer is a turn of its own, to the same prompt. What could not be graded earned nothing.
    """
    first = replace(
        rollout((1, 2, 9, 3), Grade(1.5)), mask=(True, True, False, True), turn_ends=(2, 4), turn_rewards=(0.5, 1.0)
    )
    second = replace(
        rollout((1, 8, 3), Grade(None, error="hung")), mask=(True, False, True), turn_ends=(1, 3), turn_rewards=(1.0, 1)
    )
    group = Group(Task("t", (7, 8), ""), (first, second, rollout((4, 5), Grade(2.0))))

    batch = collate([group], 1.0)

    assert batch.turn is not None
    assert batch.turn.tolist() == [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert batch.state is not None
    assert batch.state.tolist() == [[0, 0, 1, 1], [0, 2, 2, 0], [0, 0, 0, 0]]
    assert batch.step_rewards is not None
    assert batch.step_rewards.tolist() == [[0.0, 0.5, 0.0, 1.0], [0.0] * 4, [0.0, 2.0, 0.0, 0.0]]


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
    with pytest.raises(ConfigError, match="task_ids has 2 entries, expected 4, one for each row"):
        batch.with_fields(task_ids=("a", "b"))


def test_a_hint_shows_the_best_other_answer_that_succeeded():
    """Rewards 0.5, 1, none, 2: all see answer 3 but itself, which sees answer 1; nobody where the best is below 3.

    A hint that does not fit beside its response is not asked, and one without a sibling is the same for each.
    """
    grades = (Grade(0.5), Grade(1.0), Grade(None, error="hung"), Grade(2.0))
    rollouts = [replace(rollout((1,) * (n + 1), grade), text="abcd"[n]) for n, grade in enumerate(grades)]
    group = Group(Task("t", (7, 8), "", hint=((5,), (6, 6))), tuple(rollouts))
    plain = replace(group, task=replace(group.task, hint=((5, 6),)))

    def asked(group: Group, success: float, context: int | None = None) -> list[tuple[int, ...]]:
        return HintedPrompts(lambda text: [ord(text)], success, context)(group)

    best, second = (5, ord("d"), 6, 6), (5, ord("b"), 6, 6)
    assert asked(group, 1.0) == [best, best, best, second]
    assert asked(group, 2.0) == [best, best, best, ()]
    assert asked(group, 3.0) == [()] * 4
    assert asked(group, 1.0, context=6) == [best, best, (), ()]
    assert asked(plain, 9.0) == [(5, 6)] * 4
    batch = collate([group], 1.0, hinted=HintedPrompts(lambda text: [ord(text)], 2.0))
    assert batch.hints is not None
    assert batch.hints.tolist() == [[*best]] * 3 + [[0] * 4]
    assert batch.is_taught.tolist() == [True, True, True, False]
