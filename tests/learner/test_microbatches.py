import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.algorithms import GRPO
from gnomon.learner.microbatches import cut_rows, micro_batches, trim

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 120))
def test_every_row_is_cut_exactly_once(lengths, budget):
    """The cuts are a partition of the rows."""
    cuts = cut_rows(lengths, budget)

    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 120))
def test_no_cut_is_above_the_budget_unless_it_is_one_row(lengths, budget):
    """Rows times longest is within the budget; only a row that is longer by itself is not."""
    for cut in cut_rows(lengths, budget):
        assert len(cut) * max(lengths[row] for row in cut) <= budget or len(cut) == 1


@given(LENGTHS, st.integers(1, 120))
def test_no_two_neighboring_cuts_could_be_one(lengths, budget):
    """The next cut's first row would not have fitted."""
    cuts = cut_rows(lengths, budget)

    for cut in cuts[:-1]:
        assert (len(cut) + 1) * lengths[cut[0]] > budget


def test_rows_are_cut_longest_first_and_equal_ones_in_order():
    """Lengths 5 7 5 2 7 in cuts of 14: the sevens (2 x 7), then the fives (2 x 5, a third row would be 15), then 2."""
    assert cut_rows([5, 7, 5, 2, 7], 14) == [[1, 4], [0, 2], [3]]


def test_a_cut_is_as_wide_as_its_longest_row(make_minibatch):
    """Each micro-batch has the fields of its rows, without the columns where all of them have ended."""
    batch = make_minibatch(GRPO)
    rows = torch.tensor([4, 1, 2])

    for index, cut in micro_batches(batch, rows, 12):
        responses = (batch.lengths - batch.prompt_lengths)[index]
        assert set(index.tolist()) <= {1, 2, 4}
        assert cut.tokens.shape == (len(index), int(batch.lengths[index].max()))
        assert cut.width == int(responses.max())
        assert torch.equal(cut.weights, batch.weights[index, : cut.width])
        assert torch.equal(cut.mask.sum(1), batch.mask[index].sum(1))


def test_trimming_leaves_a_batch_of_full_width_alone(make_batch):
    """Where some row fills every column there is nothing to trim."""
    batch = make_batch()
    longest = torch.cat([batch.lengths.argmax()[None], (batch.lengths - batch.prompt_lengths).argmax()[None]])
    full = batch.rows(longest)
    if full.tokens.shape[1] != int(full.lengths.max()):
        pytest.fail("the fixture's longest row should fill the batch")

    assert torch.equal(trim(full).tokens, full.tokens)
    assert trim(full).width == full.width
