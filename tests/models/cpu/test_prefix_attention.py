"""Attention that is told how packed rows branch: what SDPA with a dense mask gives, value and gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from gnomon.models.attention import OWN, attends_by_branches, use_own_attention
from gnomon.models.cpu import prefix_attention
from gnomon.models.cpu.prefix_attention import PrefixLayout, Span, branched_attention, rounded
from gnomon.models.device import round_up
from gnomon.models.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("way")

HEADS, SHARED, SIZE = 4, 2, 8
SPANS = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 70), max_size=4)), min_size=1, max_size=3)


def packed(shape: list[tuple[int, list[int]]]) -> tuple[list[Span], int]:
    """Return spans of prompts and responses of these lengths, and a width that leaves two positions of padding."""
    spans, width = [], max(prompt + sum(lengths) for prompt, lengths in shape) + 2
    for row, (prompt, lengths) in enumerate(shape):
        starts = [row * width + prompt + sum(lengths[:n]) for n in range(len(lengths))]
        spans.append(Span(row * width, prompt, list(zip(starts, lengths, strict=True))))
    return spans, width


def sees(spans: list[Span], width: int) -> torch.Tensor:
    """Return the dense mask Bool[N 1 L L]; padding sees itself."""
    mask = torch.eye(width, dtype=torch.bool).repeat(len(spans), 1, 1)
    for row, span in enumerate(spans):
        for start, length in [(span.first, span.prompt), *span.responses]:
            own = slice(start - row * width, start - row * width + length)
            mask[row, own, own] = torch.ones(length, length).tril().bool()
            if start > span.first:
                mask[row, own, : span.prompt] = True
    return mask[:, None]


def both(shape: list[tuple[int, list[int]]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return result and gradients of queries, keys and values, ours and dense SDPA's, padding as zeros."""
    spans, width = packed(shape)
    generator = torch.Generator().manual_seed(width)
    sizes = ((HEADS, SIZE), (SHARED, SIZE), (SHARED, SIZE), (HEADS, SIZE))
    drawn = [torch.randn(len(spans), n, width, d, generator=generator).to(dtype) for n, d in sizes]
    inside = torch.tensor(
        [[place < s.prompt + sum(n for _, n in s.responses) for place in range(width)] for s in spans]
    )
    weight = drawn[3].transpose(1, 2) * inside[:, :, None, None]

    def dense(*leaves: torch.Tensor) -> torch.Tensor:
        query, key, value = leaves
        wide = (each.repeat_interleave(HEADS // SHARED, 1) for each in (key, value))
        out = functional.scaled_dot_product_attention(query, *wide, attn_mask=sees(spans, width), scale=0.3)
        return out.transpose(1, 2) * inside[:, :, None, None]

    def ours(*leaves: torch.Tensor) -> torch.Tensor:
        made = torch.cat([each.transpose(1, 2) for each in leaves], 2).flatten(0, 1)
        return branched_attention(made, HEADS, PrefixLayout(spans, len(spans) * width), 0.3).view(
            len(spans), width, HEADS, SIZE
        )

    found = []
    for attend in (ours, dense):
        leaves = [each.clone().requires_grad_() for each in drawn[:3]]
        out = attend(*leaves)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    return found


@given(SPANS)
@settings(deadline=None, max_examples=40)
def test_it_is_attention_with_a_dense_mask(shape: list[tuple[int, list[int]]]):
    """Whatever the lengths: values and gradients to 1e-5 in float32, zeros for padding."""
    for ours, theirs in zip(*both(shape, torch.float32), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [1, 3000])
def test_long_responses_take_another_way_to_the_same_gradients(monkeypatch: Any, most: int):
    """One at a time, or through SDPA where one alone is too long to hold its scores."""
    shape = [(9, [40, 33, 2]), (30, [64])]
    expected = both(shape, torch.float32)[0]
    monkeypatch.setattr(prefix_attention, "_MOST_SCORES", most)

    for ours, theirs in zip(both(shape, torch.float32)[0], expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_low_precision_rounds_as_sdpa_does():
    """In bfloat16 values and gradients are within 3% of the float32 ones in length, as dense SDPA's are."""
    shape = [(12, [20, 31, 7]), (25, [40, 3])]
    exact = both(shape, torch.float32)[1]

    for way in both(shape, torch.bfloat16):
        for found, truth in zip(way, exact, strict=True):
            assert float((found.float() - truth).norm()) < 0.03 * float(truth.norm())


def test_lengths_are_rounded_to_few():
    """Up to 4,096 tokens there are 14 padded lengths, none more than half as long again above 64."""
    sizes = {rounded(n) for n in range(1, 4097)}

    assert len(sizes) == 14
    assert all(rounded(n) <= 1.5 * n for n in range(64, 4097))


def test_a_model_is_told_only_where_it_uses_our_attention():
    """Eager attention, which somebody asked for, stays what it is."""
    told, eager = tiny_model(0), tiny_model(0)
    eager.set_attn_implementation("eager")
    for model in (told, eager):
        use_own_attention(model)

    assert told.config._attn_implementation == OWN
    assert attends_by_branches(told)
    assert not attends_by_branches(eager)


def test_only_low_precision_on_a_processor_needs_few_shapes():
    """float32 products are made without a kernel for each shape; others have 32 shapes a doubling, and 3% more rows."""
    low, counts = torch.zeros(2, 2, dtype=torch.bfloat16), range(1, 8193)
    rounded = [round_up(count, low) for count in counts]

    assert [round_up(count, torch.zeros(2, 2)) for count in counts] == list(counts)
    assert len({found for found in rounded if found > 1024}) == 3 * 32
    assert all(count <= found <= count + max(31, count / 32) for count, found in zip(counts, rounded, strict=True))
    assert [round_up(found, low) for found in rounded] == rounded
    assert round_up(0, low) == 0
