from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gnomon.algorithms import GRPO
from gnomon.core.errors import LearnerError
from gnomon.core.types import Batch
from gnomon.learner.forward import ForwardRunner, PromptRows, Sharing, cut_rows, micro_batches, shard_rows, trim
from gnomon.learner.sections import LearnerConfig, kept_numbers, token_budget
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tiny import TinyConfig, tiny_model

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=9)), min_size=1, max_size=6
)
BUDGETS = st.integers(1, 400)
CROSSINGS = st.sampled_from([30.0, 300.0, 1e9])


def shared(groups: list[tuple[int, list[int]]], crossing: float, longest: int) -> tuple[list[int], PromptRows]:
    """Return the lengths of all rows, groups interleaved nowhere, and what they share."""
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    numbers = [number for number, (_, responses) in enumerate(groups) for _ in responses]
    prompts = [prompt for prompt, responses in groups for _ in responses]
    return lengths, PromptRows(numbers, prompts, Sharing(crossing, longest))


def computed(cut: list[int], lengths: list[int], prompts: PromptRows) -> tuple[int, int]:
    """Return how many packed rows a cut has, and how long the longest of them is, as `prefix.pack` makes them."""
    packed: dict[int, int] = {}
    for row in cut:
        number = prompts.numbers[row]
        packed.setdefault(number, prompts.lengths[row])
        packed[number] += lengths[row] - prompts.lengths[row]
    return len(packed), max(packed.values())


def batch_of(prompts: int, prompt_length: int, responses: list[list[int]], vocabulary: int = 259) -> Batch:
    """Return rows of ``prompts`` random prompts with responses of these lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([length for group in responses for length in group])
    group = torch.arange(prompts).repeat_interleave(torch.tensor([len(g) for g in responses]))
    width = int(lengths.max())
    tokens = torch.randint(0, vocabulary, (len(lengths), prompt_length + width), generator=generator)
    tokens[:, :prompt_length] = tokens[:prompts, :prompt_length][group]
    mask = torch.arange(width) < lengths[:, None]
    size = len(lengths)
    return Batch(
        tokens=tokens,
        prompt_lengths=torch.full((size,), prompt_length),
        lengths=prompt_length + lengths,
        mask=mask,
        rewards=torch.zeros(size).double(),
        is_graded=torch.ones(size, dtype=torch.bool),
        is_truncated=torch.zeros(size, dtype=torch.bool),
        group=group,
        version=torch.zeros(size, dtype=torch.long),
        behavior=torch.zeros(mask.shape),
        full_behavior=torch.zeros(mask.shape),
    )


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


@given(LENGTHS, st.integers(1, 120), st.integers(1, 4), st.integers(1, 3))
def test_segments_of_a_rollout_are_computed_together(lengths, budget, size, ranks):
    """In one process and one cut, in order; no cut of several rollouts is above the budget."""
    rollouts = [n // size for n in range(len(lengths))]
    hands = shard_rows(lengths, ranks, rollouts=rollouts)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    for hand in hands:
        cuts = cut_rows([lengths[n] for n in hand], budget, rollouts=[rollouts[n] for n in hand])
        assert sorted(row for cut in cuts for row in cut) == list(range(len(hand)))
        for cut in cuts:
            whole = {rollouts[hand[n]] for n in cut}
            assert sorted(hand[n] for n in cut) == [n for n, rollout in enumerate(rollouts) if rollout in whole]
            assert all(cut.index(n) < cut.index(n + 1) for n in cut if n + 1 in cut and rollouts[hand[n]] in whole
                       and rollouts[hand[n]] == rollouts[hand[n + 1]])  # fmt: skip
            assert len(cut) * max(lengths[hand[n]] for n in cut) <= budget or len(whole) == 1


@given(LENGTHS, st.integers(1, 120))
def test_no_two_neighboring_cuts_could_be_one(lengths, budget):
    """The next cut's first row would not have fitted."""
    cuts = cut_rows(lengths, budget)

    for cut in cuts[:-1]:
        assert (len(cut) + 1) * lengths[cut[0]] > budget


def test_rows_are_cut_longest_first_and_equal_ones_in_order():
    """Lengths 5 7 5 2 7 in cuts of 14: the sevens (2 x 7), then the fives (2 x 5, a third row would be 15), then 2."""
    assert cut_rows([5, 7, 5, 2, 7], 14) == [[1, 4], [0, 2], [3]]


@given(GROUPS, BUDGETS, CROSSINGS)
def test_every_row_of_shared_prompts_is_cut_exactly_once(groups, budget, crossing):
    """The cuts are a partition of the rows also where prompts are shared, and the same one every time."""
    lengths, prompts = shared(groups, crossing, budget)

    cuts = cut_rows(lengths, budget, prompts)

    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    assert cut_rows(lengths, budget, prompts) == cuts


@given(GROUPS, BUDGETS, CROSSINGS)
def test_no_cut_of_packed_rows_is_above_the_budget_unless_it_is_one_row(groups, budget, crossing):
    """Packed rows times the longest of them is within the budget; only one row of the batch alone is not."""
    lengths, prompts = shared(groups, crossing, budget)

    for cut in cut_rows(lengths, budget, prompts):
        rows, longest = computed(cut, lengths, prompts)
        assert rows * longest <= budget or len(cut) == 1


@example([(2, [0, 0])], 1, 30.0)
@given(GROUPS, BUDGETS, CROSSINGS)
def test_cuts_of_packed_rows_come_longest_first(groups, budget, crossing):
    """The first cut holds the longest packed row, so what will not fit into memory fails at once."""
    lengths, prompts = shared(groups, crossing, budget)
    longest = [computed(cut, lengths, prompts)[1] for cut in cut_rows(lengths, budget, prompts)]

    assert longest == sorted(longest, reverse=True)


def length_of(cut: list[int], lengths: list[int], prompts: PromptRows) -> int:
    """Return how many tokens a cut computes where packed rows lie in line."""
    own = {prompts.numbers[row]: prompts.lengths[row] for row in cut}
    return sum(own.values()) + sum(lengths[row] - prompts.lengths[row] for row in cut)


@given(GROUPS, BUDGETS, CROSSINGS)
def test_rows_in_line_are_cut_evenly(groups, budget, crossing):
    """A partition of the rows, the same every time, the fullest cut first, none above the budget but one row alone.

    Two cuts are apart by no more than the longest packed row.
    """
    lengths, prompts = shared(groups, crossing, budget)
    prompts = replace(prompts, sharing=replace(prompts.sharing, is_in_line=True))
    cuts = cut_rows(lengths, budget, prompts)
    loads = [length_of(cut, lengths, prompts) for cut in cuts]
    packed = cut_rows(lengths, 1, prompts)

    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    assert cut_rows(lengths, budget, prompts) == cuts
    assert loads == sorted(loads, reverse=True)
    assert all(load <= budget or len(cut) == 1 for load, cut in zip(loads, cuts, strict=True))
    assert len(cuts) <= len(packed)


def test_rows_in_line_count_what_they_are():
    """Four groups of 90, 60, 50 and 40 in a budget of 120: two cuts of 130 and 110 do not fit, 90, 90 and 60 do.

    Padded to the longest they would be four cuts.
    """
    lengths, prompts = shared([(10, [40, 40]), (10, [25, 25]), (10, [20, 20]), (10, [15, 15])], 1e9, 120)
    in_line = replace(prompts, sharing=replace(prompts.sharing, is_in_line=True))

    assert [length_of(cut, lengths, prompts) for cut in cut_rows(lengths, 120, in_line)] == [90, 90, 60]
    assert [length_of(cut, lengths, prompts) for cut in cut_rows(lengths, 240, in_line)] == [240]
    assert [length_of(cut, lengths, prompts) for cut in cut_rows(lengths, 130, in_line)] == [130, 110]
    assert [length_of(cut, lengths, prompts) for cut in cut_rows(lengths, 120, prompts)] == [90, 110, 40]


@given(st.integers(1, 200), st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 600))
def test_without_the_cost_of_attention_a_group_within_the_budget_stays_whole(prompt, responses, budget):
    """One prompt, one cut, if prompt and responses fit; otherwise more."""
    lengths, prompts = shared([(prompt, responses)], 1e9, budget)
    cuts = cut_rows(lengths, budget, prompts)

    assert (len(cuts) == 1) == (prompt + sum(responses) <= budget or len(responses) == 1)


def test_a_group_of_a_long_prompt_is_computed_once():
    """A prompt of 512 and 8 answers of 64: 1,024 tokens in one cut of 2,048; padded rows were three cuts, 4,608."""
    lengths, prompts = shared([(512, [64] * 8)], 2304.0, 2048)

    assert cut_rows(lengths, 2048, prompts) == [list(range(8))]
    assert [len(cut) for cut in cut_rows(lengths, 2048)] == [3, 3, 2]


def test_a_group_above_the_limit_is_spread_evenly():
    """A limit of 900 holds 6 answers of 64, 512 + 6 x 64 = 896: eight make two rows of four."""
    lengths, prompts = shared([(512, [64] * 8)], 2304.0, 900)

    assert [len(cut) for cut in cut_rows(lengths, 900, prompts)] == [4, 4]


def test_a_packed_row_above_the_budget_goes_alone():
    """With a limit of 1,200 tokens on a budget of 600, the row of 1,024 is one cut; short rows share the next."""
    lengths, prompts = shared([(512, [64] * 8), (50, [30] * 8), (50, [30] * 8)], 2304.0, 1200)

    assert [len(cut) for cut in cut_rows(lengths, 600, prompts)] == [8, 16]


@pytest.mark.parametrize("budget", [60, 150, 10_000])
def test_what_is_counted_is_what_is_computed(budget):
    """The scorer computes at most what was counted: all but the last token of each response, which predicts nothing."""
    batch = batch_of(3, 20, [[5, 9, 2, 7], [4, 4, 4, 12], [11, 3]])
    model = tiny_model(0, TinyConfig(width=64))
    scorer = TokenScorer(model)
    lengths = batch.lengths.tolist()
    prompts = PromptRows(batch.group.tolist(), [20] * 10, Sharing(256.0, budget))

    for index, cut in micro_batches(batch, torch.arange(10), budget, prompts.sharing):
        rows, longest = computed(index.tolist(), lengths, prompts)
        scored = scorer(cut.tokens, cut.prompt_lengths, cut.mask).computed
        assert rows * (longest - len(index)) <= scored <= rows * longest <= budget
        assert sorted(cut.group.tolist()) == cut.group[cut.group.argsort()].tolist()


@pytest.mark.parametrize(("budget", "cuts"), [(40, 5), (64, 2), (1000, 1)])
def test_a_common_beginning_counts_once_in_a_cut(budget, cuts):
    """Ten prompts of 24 tokens that begin with the same 20, one answer of 4 each: 20 and 10 times 8, in cuts of at most
    40 (two rows each), 64 (five) or all of them; row by row they would be 10 cuts of 40. Nothing that is computed was
    not counted.
    """
    batch = batch_of(10, 24, [[4]] * 10)
    tokens = batch.tokens.clone()
    tokens[:, :20] = tokens[0, :20]
    tokens[:, 20] = torch.arange(10)
    model = tiny_model(0, TinyConfig(width=64))
    scorer = TokenScorer(model)
    if not scorer.shares_beginnings():
        pytest.skip("the kernels were not compiled")
    runner = ForwardRunner(LearnerConfig(max_tokens_per_micro_batch=budget), model)
    found = list(runner.cuts(batch.with_fields(tokens=tokens), torch.arange(10), scorer))

    assert len(found) == cuts
    assert sorted(row for index, _ in found for row in index.tolist()) == list(range(10))
    for index, cut in found:
        computed = scorer(cut.tokens, cut.prompt_lengths, cut.mask).computed
        assert computed == 20 + 7 * len(index) <= budget


def test_rows_of_a_group_with_prompts_of_their_own_share_nothing():
    """What counts is the prompt and not the group: two rows of one group that begin differently are two rows."""
    batch = batch_of(1, 6, [[4, 4]])
    sharing = Sharing(crossing=256.0, longest=14)
    other = batch.tokens.clone()
    other[1, 2] += 1

    assert len(micro_batches(batch, torch.arange(2), 14, sharing)) == 1
    assert len(micro_batches(batch.with_fields(tokens=other), torch.arange(2), 14, sharing)) == 2


def test_a_budget_that_was_not_set_stretches_for_a_long_prompt():
    """A prompt of 300 with 8 answers of 64: once, unless the user's own budget of 512 forbids it."""
    batch = batch_of(1, 300, [[64] * 8])
    model = tiny_model(0, TinyConfig(width=512, heads=8))
    chosen, own = (
        list(
            ForwardRunner(LearnerConfig(max_tokens_per_micro_batch=budget), model).cuts(
                batch, torch.arange(8), TokenScorer(model)
            )
        )
        for budget in (None, 512)
    )

    assert [len(index) for index, _ in chosen] == [8]
    assert [len(index) for index, _ in own] == [3, 3, 2]


@pytest.mark.parametrize("token", [-1, 259, 10**6, 2**40])
def test_a_token_beyond_the_vocabulary_is_said_before_it_is_looked_up(token: int):
    """Whoever gave it: a forged checkpoint's kept answers ended in an error of the table of embeddings."""
    batch = batch_of(1, 20, [[4] * 4])
    tokens = batch.tokens.long()
    tokens[3, 2] = token
    model = tiny_model(0)
    passes = ForwardRunner(LearnerConfig(), model)

    with pytest.raises(LearnerError, match=rf"tokens from .*{token}.* the model's vocabulary has 259"):
        list(passes.cuts(batch.with_fields(tokens=tokens), torch.arange(4), TokenScorer(model)))


def test_replayed_routing_counts_rows_whole():
    """Rows may disagree about the experts of their prompt and then share nothing, so they count as if they did not."""
    batch = batch_of(1, 20, [[4] * 4])
    routed = batch.with_fields(routing=torch.zeros((*batch.tokens.shape, 2, 1), dtype=torch.int16))
    model = tiny_model(0)
    passes, scorer = ForwardRunner(LearnerConfig(max_tokens_per_micro_batch=48), model), TokenScorer(model)

    assert [len(index) for index, _ in passes.cuts(batch, torch.arange(4), scorer)] == [4]
    assert [len(index) for index, _ in passes.cuts(routed, torch.arange(4), scorer)] == [2, 2]


def test_a_larger_model_gets_more_memory_for_activations():
    """24 x 30 x 576 x 4 bytes a token are 1.66 MB: an eighth of 16 bytes for each of 10^9 weights holds 1,205 of them.

    In low precision a token keeps half as much, and a weight has 2 bytes more; a quarter of a GiB is always there.
    """
    assert token_budget(1000, 4, parameters=10**8) == 67_108
    assert token_budget(kept_numbers(30, 576), 4, parameters=10**9) == 1205
    assert token_budget(kept_numbers(30, 576), 2, parameters=10**9) == 2712
    assert token_budget(kept_numbers(100, 10_000), 4, parameters=10**9) == 256
    assert token_budget(kept_numbers(30, 576), 4, parameters=10**8, available=2**34) == 10_356


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
