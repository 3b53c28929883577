"""Rows dealt out to processes: each to one, as evenly as rows allow, in as many passes everywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.learner.forward import PromptRows, Sharing, cut_rows, micro_batches, shard_rows

lengths = st.lists(st.integers(1, 60), max_size=30)


@given(lengths, st.integers(1, 5))
def test_every_row_is_dealt_to_one_process(lengths: list[int], ranks: int):
    """None is lost, none is computed twice."""
    hands = shard_rows(lengths, ranks)

    assert len(hands) == ranks
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))


@given(lengths, st.integers(1, 5))
def test_nobody_has_more_than_a_row_above_the_mean(lengths: list[int], ranks: int):
    """Whoever gets a row had the fewest tokens then, which is at most the mean of the end."""
    loads = [sum(lengths[row] for row in hand) for hand in shard_rows(lengths, ranks)]

    assert max(loads) <= sum(lengths) / ranks + max(lengths, default=0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=20), st.integers(1, 4))
def test_rows_of_one_prompt_are_dealt_like_others(rows: list[tuple[int, int]], ranks: int):
    """Every row once, whatever they share; the same every time."""
    prompts = PromptRows([number for number, _ in rows], [5] * len(rows), Sharing(100.0, 64))
    lengths = [5 + length for _, length in rows]
    hands = shard_rows(lengths, ranks, prompts)

    assert sorted(row for hand in hands for row in hand) == list(range(len(rows)))
    assert hands == shard_rows(lengths, ranks, prompts)


def test_a_group_larger_than_a_share_is_parted():
    """Eight answers to one prompt keep two processes busy; two groups of four stay whole."""
    one = PromptRows([0] * 8, [10] * 8, Sharing(1e6, 1000))
    two = PromptRows([0] * 4 + [1] * 4, [10] * 8, Sharing(1e6, 1000))

    assert [len(hand) for hand in shard_rows([20] * 8, 2, one)] == [4, 4]
    assert shard_rows([20] * 8, 2, two) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_one_process_has_the_rows_in_their_order():
    """So that its cuts are what they always were."""
    assert shard_rows([3, 9, 4], 1) == [[0, 1, 2]]


@pytest.mark.parametrize("ranks", [2, 3, 9])
@pytest.mark.parametrize("budget", [8, 20, 1000])
def test_every_process_makes_as_many_passes(ranks: int, budget: int, make_batch):
    """Rows of all processes are those of the batch; where a process has fewer cuts, empty ones follow."""
    batch = make_batch(1, 3, 3)
    live = torch.arange(9)[:-1]
    found = [micro_batches(batch, live, budget, place=(rank, ranks)) for rank in range(ranks)]

    assert len({len(cuts) for cuts in found}) == 1
    assert sorted(int(row) for cuts in found for index, _ in cuts for row in index) == live.tolist()
    empty = [cut for cuts in found for index, cut in cuts if len(index) == 0]
    assert ranks < 9 or empty
    for cut in empty:
        assert (tuple(cut.tokens.shape), cut.mask.tolist()) == ((1, 2), [[True]])


def test_without_a_row_nobody_makes_a_pass(make_batch):
    """A minibatch in which nothing is trained has no cut in any process."""
    assert micro_batches(make_batch(), torch.arange(0), 10, place=(1, 2)) == []


def test_one_of_one_has_the_cuts_of_a_process_alone(make_batch):
    """The same rows in the same order."""
    batch = make_batch(1, 3, 3)
    cuts = cut_rows(batch.lengths.tolist(), 30)

    assert [index.tolist() for index, _ in micro_batches(batch, torch.arange(9), 30)] == cuts
