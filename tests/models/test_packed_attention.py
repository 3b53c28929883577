"""Kernels of attention over packed rows: one and the same attention, whatever computes it, and what each computes."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from gnomon.core.errors import ConfigError
from gnomon.models.cpu.prefix_attention import Alteration, PrefixLayout, Span
from gnomon.models.logprobs import TokenScorer
from gnomon.models.packed_attention import (
    VARIABLE,
    block_mask,
    dense_mask,
    distance,
    kernel_for,
    row_edges,
    visible_pairs,
    works,
)

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "Granite": {},
    "Qwen3Moe": EXPERTS,
    "Gemma3": WINDOWED | {"final_logit_softcapping": None},
    "Olmo3": WINDOWED,
    "Mistral": {"sliding_window": 4},
    "Phi3": {"sliding_window": 3},
    "Gemma2": WINDOWED | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None},
    "GptOss": WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention as plain operations, with gradients: torch refuses those on a CPU by a check of devices."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # seconds a call otherwise
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        yield


def layout_of(shape: list[tuple[int, list[int]]], padding: int = 3) -> PrefixLayout:
    """Return prompts and responses of these lengths one behind another, then padding."""
    spans, first = [], 0
    for prompt, lengths in shape:
        starts = [first + prompt + sum(lengths[:n]) for n in range(len(lengths))]
        spans.append(Span(first, prompt, list(zip(starts, lengths, strict=True))))
        first += prompt + sum(lengths)
    return PrefixLayout(spans, first + padding)


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 70), max_size=4)), min_size=1, max_size=3)


@given(SHAPES, st.none() | st.integers(1, 80), st.sampled_from([1, 16, 128]))
@settings(deadline=None, max_examples=60)
def test_visible_pairs_are_those_of_the_mask(shape, window, size):
    """Each block's count is the number of true places of the dense mask in it, whatever lengths and window."""
    layout = layout_of(shape)
    mask = dense_mask(layout, 1, window)[0, 0]
    missing = -len(mask) % size
    blocks = torch.nn.functional.pad(mask, (0, missing, 0, missing)).unflatten(1, (-1, size)).unflatten(0, (-1, size))

    assert torch.equal(visible_pairs(layout, window, size).long(), blocks.sum((1, 3)))


def test_a_window_counts_positions_of_the_sequence():
    """Prompt 0 1 2, answers 3 4 and 3 4: with a window of 3, token 3 sees 1, 2 and itself; token 4 sees 2, 3 and 4."""
    seen = dense_mask(layout_of([(3, [2, 2])], padding=0), 1, 3)[0, 0].int()

    assert seen[3].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert seen[4].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert seen[6].tolist() == [0, 0, 1, 0, 0, 1, 1]


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
ALTERED = {
    "plain": Alteration(), "narrow": Alteration(2), "window": Alteration(60), "wide window": Alteration(200),
    "bounded": Alteration(softcap=0.7), "sinks": Alteration(60, sinks=SINKS), "all": Alteration(60, 2.0, SINKS),
}  # fmt: skip


@pytest.mark.parametrize("altered", ALTERED.values(), ids=ALTERED)
@pytest.mark.parametrize("kernel", ["branches", "flex"])
@pytest.mark.usefixtures("eager_flex")
def test_a_kernel_is_attention_with_a_dense_mask(kernel, altered):
    """Result and gradients of queries, keys, values and sinks are the reference's to 1e-5 of their length."""
    assert distance(kernel, CPU, torch.float32, (4, 2, 16), altered) < 1e-5


@pytest.mark.usefixtures("eager_flex")
def test_a_wrong_mask_is_far_from_the_reference(monkeypatch):
    """What a trial must find: answers that see one another, or keys one position beyond, are 1e-2 and more apart."""
    right = PrefixLayout.sight

    def shifted(layout: PrefixLayout, window: int | None = None) -> Any:
        own, low, end = right(layout, window)
        return (own - 1).clamp(min=0), low, end

    monkeypatch.setattr(PrefixLayout, "sight", lambda *a: right(*a) if a[0].kernel == "dense" else shifted(*a))

    assert distance("flex", CPU, torch.float32, (4, 2, 16)) > 0.05


def test_block_masks_are_what_torch_makes_of_the_mask():
    """Partial and whole blocks equal those that `create_block_mask` finds by looking at every pair."""
    layout = layout_of([(200, [130, 300]), (90, [40])], padding=70)
    mask = dense_mask(layout, 1)[0, 0]
    ours = block_mask(layout)
    theirs = flex_attention.create_block_mask(
        lambda b, h, q, k: mask[q, k], None, None, layout.positions, layout.positions, device="cpu"
    )

    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert ours.sparsity() == theirs.sparsity()


def test_a_kernel_that_fails_its_trial_is_said_and_not_used():
    """FlexAttention has no gradients on a CPU: the trial meets torch's error and a warning has it, each time."""
    for _ in range(2):
        with pytest.warns(
            RuntimeWarning, match=r"flex attention is not used on cpu: NotImplementedError.*GNOMON_ATTENTION"
        ):
            assert not works("flex", CPU, torch.float32, (2, 2, 16))
    assert not works("varlen", CPU, torch.bfloat16, (2, 2, 16))


def test_the_kernel_is_chosen_in_one_place(monkeypatch):
    """By the device, unless the environment says which; another word is refused with those that there are."""
    assert kernel_for(CPU) == "branches"
    monkeypatch.setenv(VARIABLE, "dense")
    assert kernel_for(CPU) == "dense"
    monkeypatch.setenv(VARIABLE, "flash")
    with pytest.raises(ConfigError, match="GNOMON_ATTENTION must be 'auto' or one of branches, flex, dense, got 'fl"):
        kernel_for(CPU)


def test_rows_that_share_nothing_are_told_by_their_edges():
    """Two rows of 5 and 4, three of padding: they begin at 0 and 5, padding at 9, the longest is 5."""
    layout = layout_of([(3, [2]), (4, [])])

    edges, longest = row_edges(layout)
    assert (edges.tolist(), longest) == ([0, 5, 9, 12], 5)
    assert not layout.is_shared
    assert layout_of([(3, [2, 1])]).is_shared


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Six rows, two prompts of nine and two tokens and one of its own; answers of one to twelve tokens."""
    tokens = torch.randint(3, 96, (6, 21), generator=torch.Generator().manual_seed(1))
    prompts = torch.tensor([9, 9, 2, 9, 2, 5])
    for row in (1, 3):
        tokens[row, :9] = tokens[0, :9]
    tokens[4, :2] = tokens[2, :2]
    mask = torch.arange(12) < torch.tensor([12, 1, 7, 5, 10, 4])[:, None]
    return tokens, prompts, mask


@pytest.mark.parametrize("kernel", ["branches", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("eager_flex")
def test_shared_prompts_change_no_number_of_a_model(family, kernel, monkeypatch):
    """Log-probabilities and every gradient are those of rows of their own, with and without windows and experts."""
    monkeypatch.setenv(VARIABLE, kernel)
    found = []
    for shares in (True, False):
        torch.manual_seed(0)
        config = getattr(hf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(
            **SHAPE | FAMILIES[family]
        )
        eager = {"attn_implementation": "eager"} if family in ("Gemma2", "GptOss") else {}
        model = hf.AutoModelForCausalLM.from_config(config, **eager).eval()
        for name, sinks in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(sinks)
        scorer = TokenScorer(model)
        assert scorer.shares_prompts
        assert scorer.is_row_packed(99) == (kernel == "flex")
        scorer.shares_prompts = shares
        scores = scorer(*rows(), temperature=0.7)
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
        found.append((scores, [p.grad for p in model.parameters() if p.grad is not None]))

    (shared, shared_gradients), (plain, plain_gradients) = found
    assert torch.allclose(shared.logprobs, plain.logprobs, atol=1e-5)
    for ours, theirs in zip(shared_gradients, plain_gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
