"""Prompts computed once for all of their responses: the same numbers, for less."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from gnomon.models import backbone
from gnomon.models.logprobs import TokenScorer
from gnomon.models.packed_attention import dense_mask
from gnomon.models.prefix import crossing_tokens, number_prompts, pack, pieces
from gnomon.models.tiny import tiny_model


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five rows, two prompts of three and two tokens; responses of one to four tokens, one with a hole."""
    tokens = torch.tensor(
        [
            [9, 8, 7, 1, 2, 3, 4],
            [9, 8, 7, 5, 0, 0, 0],
            [6, 5, 1, 2, 0, 0, 0],
            [9, 8, 7, 2, 3, 0, 0],
            [6, 5, 4, 4, 4, 0, 0],
        ]
    )
    prompts = torch.tensor([3, 3, 2, 3, 2])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    return tokens, prompts, mask


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-6), (torch.float32, 3e-6)], ids=str)
def test_shared_prompts_change_no_number(dtype, off):
    """Log-probabilities, entropies and every gradient equal those of rows of their own.

    In float64 to 1e-6, since the head adds up in float32. In float32 the two ways round each on their own: on some
    processors their gradients are 1.4e-6 of the largest apart, and as far from those of float64.
    """
    found = []
    for shares in (True, False):
        model = tiny_model(0).to(dtype)
        scorer = TokenScorer(model)
        assert scorer.shares_prompts
        scorer.shares_prompts = shares
        scores = scorer(*rows(), temperature=0.7)
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
        found.append((scores, [p.grad for p in model.parameters()]))

    (shared, shared_gradients), (plain, plain_gradients) = found
    assert torch.allclose(shared.logprobs, plain.logprobs, atol=1e-6)
    assert torch.allclose(shared.entropy, plain.entropy, atol=1e-6)
    for ours, theirs in zip(shared_gradients, plain_gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=off * float(theirs.abs().max()))
    assert shared.computed < plain.computed


def test_a_token_sees_its_prompt_and_its_own_response_only():
    """Changing one response changes no score of the others."""
    tokens, prompts, mask = rows()
    scorer = TokenScorer(tiny_model(0))
    with torch.no_grad():
        before = scorer(tokens, prompts, mask).logprobs
        tokens[0, 3:] = torch.tensor([30, 31, 32, 33])
        after = scorer(tokens, prompts, mask).logprobs

    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize(("is_told", "count"), [(True, 0), (False, 1)])
def test_all_layers_share_one_mask(monkeypatch, is_told, count):
    """What a forward pass keeps has no mask of the packed rows where attention is told how they branch, else one."""
    monkeypatch.setattr(backbone, "attends_by_branches", lambda _: is_told)
    monkeypatch.setattr(backbone, "can_fuse", lambda _: False)
    model = tiny_model(0)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        TokenScorer(model)(*rows())
    # The prompt of three has answers of 4, 1 and 2 of which the last token is not needed: 3 + 3 + 0 + 1.
    masks = [tensor for tensor in kept.values() if tensor.shape[-2:] == (7, 7)]

    assert model.config.num_hidden_layers == 2
    assert len(masks) == count


def test_rows_with_prompts_of_their_own_are_not_packed():
    """Without two rows of one prompt there is nothing to share, and the faster causal attention is used."""
    tokens, prompts, _ = rows()

    assert pack(tokens[1:3], prompts[1:3], torch.tensor([4, 4])) is None


def test_in_one_row_nothing_is_padded_but_its_end():
    """A written out body computes prompts with their responses one behind another, each token at its own position."""
    tokens, prompts, _ = rows()
    ends = torch.tensor([7, 4, 4, 5, 5])
    packed = pack(tokens, prompts, ends, lambda count: -(-count // 8) * 8, is_one_row=True)

    assert packed is not None
    assert packed.tokens.tolist() == [[9, 8, 7, 1, 2, 3, 4, 5, 2, 3, 6, 5, 1, 2, 4, 4, 4, *[0] * 7]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 3, 4, 0, 1, 2, 3, 2, 3, 4, *[0] * 7]]
    where, columns = torch.nonzero(packed.is_placed, as_tuple=True)
    assert torch.equal(packed.tokens.view(-1)[packed.index(where, columns)], tokens[where, columns])


def test_what_all_prompts_begin_with_lies_there_once():
    """9 8 begins three different prompts, one of which it is; a token lies at its own position behind it."""
    tokens = torch.tensor([[9, 8, 7, 1, 2], [9, 8, 5, 6, 3], [9, 8, 4, 0, 0], [9, 8, 7, 2, 0]])
    prompts, ends = torch.tensor([3, 4, 2, 3]), torch.tensor([5, 5, 3, 4])
    packed = pack(tokens, prompts, ends, is_one_row=True, has_stem=True)

    assert packed is not None
    assert packed.tokens.tolist() == [[9, 8, 7, 1, 2, 2, 5, 6, 3, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 3, 2, 3, 4, 2]]
    assert packed.branches.table[2] == 2
    where, columns = torch.nonzero(packed.is_placed, as_tuple=True)
    assert torch.equal(packed.tokens.view(-1)[packed.index(where, columns)], tokens[where, columns])


@pytest.mark.parametrize(("prompts", "answers"), [(1, 3), (2, 1), (5, 3), (20, 1)])
def test_a_common_beginning_changes_no_number(prompts, answers):
    """Scores and gradients equal those of rows of their own, and no token of the beginning is computed twice: 20
    prompts are more than the kernel has parts.
    """
    model = tiny_model(0)
    scorer, generator = TokenScorer(model), torch.Generator().manual_seed(prompts)
    if not scorer.shares_beginnings():
        pytest.skip("the kernels were not compiled")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(3, 200, (prompts * answers, 30), generator=generator)
    tokens[:, :11] = tokens[0, :11]
    tokens[:, 11] = torch.arange(prompts).repeat_interleave(answers)
    tokens[:, 12:15] = tokens[::answers, 12:15].repeat_interleave(answers, 0)
    lengths, mask = torch.full((len(tokens),), 15), torch.rand(len(tokens), 15, generator=generator) < 0.8
    found = []
    for shares in (True, False):
        scorer.shares_prompts = shares
        model.zero_grad()
        scores = scorer(tokens, lengths, mask)
        (scores.logprobs * scores.entropy).sum().backward()
        found.append((scores, [p.grad.clone() for p in model.parameters()]))

    (shared, ours), (plain, theirs) = found
    ends = (mask * torch.arange(15)).amax(1).sum()
    assert shared.computed == 11 + 4 * prompts + ends if prompts > 1 else shared.computed == 15 + ends
    assert torch.allclose(shared.logprobs, plain.logprobs, atol=1e-6)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.allclose(own, other, rtol=0, atol=3e-6 * float(other.abs().max()))


@pytest.mark.parametrize("is_one_row", [False, True])
def test_how_positions_attend_is_one_thing_in_two_forms(is_one_row):
    """The dense mask says what the branches of the same rows say, wherever prompts and responses lie."""
    tokens, prompts, _ = rows()
    packed = pack(tokens, prompts, torch.tensor([7, 4, 4, 5, 5]), lambda count: -(-count // 4) * 4, is_one_row)
    assert packed is not None
    count, length = packed.tokens.shape
    seen = torch.eye(count * length, dtype=torch.bool)
    for block in packed.branches.blocks:
        for queries, keys, is_query, bias in zip(
            block.queries, block.keys, block.is_query, block.bias.squeeze(1), strict=True
        ):
            for query, looks in zip(queries[is_query], bias[is_query] == 0, strict=True):
                seen[query, keys[looks]] = True

    dense = torch.block_diag(*dense_mask(packed.branches, count).squeeze(1))
    assert torch.equal(seen, dense.bool())


@pytest.mark.parametrize(("longest", "is_packed"), [(4, True), (3, False)])
def test_rows_that_share_nothing_lie_in_one_row_unless_they_are_long(monkeypatch, longest, is_packed, way):
    """Long ones are left to attention that lays out no square, such as the one in C; shared prompts are packed."""
    monkeypatch.setattr(backbone, "_LONGEST", longest)
    tokens, prompts, _ = rows()
    body = backbone.Backbone(tiny_model(0))

    assert (body.pack(tokens[1:3], prompts[1:3], torch.tensor([4, 4])) is not None) == (is_packed or way == "native")
    assert body.pack(tokens, prompts, torch.tensor([7, 4, 4, 5, 5])) is not None


@pytest.mark.parametrize("architecture", ["sliding window", "state space"])
def test_models_that_cannot_be_packed_say_so(architecture: str):
    """A window or a recurrent state makes packed rows wrong, so such models compute every row whole."""
    if architecture == "state space":
        config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
        model = MambaForCausalLM(config).eval()
    else:
        model = Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                sliding_window=4,
            )
        ).eval()

    assert not TokenScorer(model).shares_prompts


def cost(prompt: int, responses: list[int], rows: list[list[int]], crossing: float) -> float:
    lengths = [prompt + sum(responses[position] for position in row) for row in rows]
    return sum(length + length**2 / crossing for length in lengths)


@given(
    st.integers(1, 600),
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.integers(1, 4000),
    st.sampled_from([50.0, 500.0, 2304.0, 1e9]),
)
def test_pieces_are_a_partition_within_the_limit(prompt, responses, limit, crossing):
    """Every response is in exactly one packed row, and a row is within the limit or holds one response."""
    rows = pieces(prompt, responses, limit, crossing)

    assert sorted(position for row in rows for position in row) == list(range(len(responses)))
    for row in rows:
        assert len(row) == 1 or prompt + sum(responses[position] for position in row) <= limit


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.sampled_from([20.0, 100.0, 500.0]),
)
def test_pieces_cost_little_more_than_the_cheapest_way(prompt, responses, crossing):
    """Over all ways to share out the responses, the cost of the pieces is within a tenth of the least."""
    found = cost(prompt, responses, pieces(prompt, responses, 10**9, crossing), crossing)
    least = float("inf")
    for owners in product(range(len(responses)), repeat=len(responses)):
        if len(responses) > 5 or any(owner > number for number, owner in enumerate(owners)):
            continue
        rows = [[p for p, owner in enumerate(owners) if owner == row] for row in set(owners)]
        least = min(least, cost(prompt, responses, rows, crossing))

    assert found <= 1.1 * least


def test_long_responses_are_not_packed_together():
    """8 answers of 1,000 tokens to a prompt of 50, width 576: attention over 8,050 would cost 3.5 times all else.

    One row of 8,050: 8,050 + 8,050^2 / 2,304 = 36,176; eight of 1,050: 8 x (1,050 + 479) = 12,228.
    """
    crossing = crossing_tokens(576)

    assert len(pieces(50, [1000] * 8, 10**6, crossing)) == 8
    # A long prompt is worth more: 2 x (3,024 + 3,969) = 13,986 beside 15,979 in one row and 20,256 in eight.
    assert len(pieces(1024, [500] * 8, 10**6, crossing)) == 2
    assert len(pieces(50, [32] * 8, 10**6, crossing)) == 1


def test_prompts_are_numbered_by_their_tokens():
    """Rows have one number exactly when they have one prompt: 9 8 7 and 6 5."""
    tokens, prompts, _ = rows()

    assert number_prompts(tokens, prompts) == ([0, 0, 1, 0, 1], 0)
