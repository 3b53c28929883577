"""A model below its head: from tokens to hidden states, by the fastest way that gives the model's own numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import ModelError
from gnomon.models.attention import OWN, attends_by_branches, rotary_edge
from gnomon.models.cpu.fused_forward import body_states, kept_per_token, lay_side_by_side
from gnomon.models.cpu.kernels import kernels_of
from gnomon.models.cpu.prefix_attention import PrefixLayout, Span
from gnomon.models.device import round_up
from gnomon.models.forward import accepted, body_of, checked_arguments, takes_more
from gnomon.models.fused_layers import use_own_layers
from gnomon.models.llama_like import beginning, is_standard
from gnomon.models.packed_attention import BLOCK, dense_mask, kernel_for, works
from gnomon.models.prefix import Packed, pack, windows

_RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-8}
"""Of the largest hidden state, a layer."""
_RELATIVE_ROUGH = 0.1
"""Of a response's hidden states, in length: two ways through SmolLM2's 30 layers of bfloat16 are 0.01 to 0.02 apart, a
wrong mask or position 0.15 to 0.29."""
_LONGEST = 2048
"""Tokens of a row whose attention may be laid out as a square; where none is `native`, longer ones go through SDPA."""
_ROWS, _PROMPT = ((3, 5, 7, 11, 13, 17), (3, 5, 7, 11, 19, 23)), 4
"""What a model is tried on: two rows with one prompt."""
_TRIED_TOKENS = 32


class Backbone:
    """The hidden states of one model, equal to the model's own up to rounding.

    Padding is on the right and the model is causal. No position that is read depends on padding, so no mask is needed.

    Args:
        model: A transformers model in eval mode. Its attention is replaced (`use_own_layers`), and on a CPU weights
            that multiply the same numbers become parts of one tensor (`lay_side_by_side`).
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._edge = rotary_edge(model.config)
        use_own_layers(self._model)
        self._is_told = attends_by_branches(model) and takes_more(body_of(model))
        self._is_tried = can_fuse(self._model) and _reproduces(body_of(self._model))
        if self._is_tried:
            lay_side_by_side(body_of(self._model))

    def plain(self, tokens: Tensor) -> Tensor:
        """Return the hidden states Float[B S' d] of ``tokens`` Int[B S], where S' is S rounded up."""
        tokens = nn.functional.pad(tokens, (0, self._rounded(tokens.shape[1]) - tokens.shape[1]))
        # Without the kernel in C, attention of the fused pass lays out a square of each row, and SDPA does not.
        if self._is_written() and not self._is_long(tokens.shape[1]):
            return _alone(body_of(self._model), tokens)
        return own_states(self._model, tokens)

    def pack(self, tokens: Tensor, prompt_lengths: Tensor, ends: Tensor) -> Packed | None:
        """Return rows that compute each prompt once, in this model's best form; None to keep the rows as they are.

        With the fused forward pass, or FlexAttention, all rows form one row, so nothing is computed for padding, and
        with the kernel in C what all prompts begin with is computed once. Then rows without a shared prompt gain too,
        unless they are long where attention lays out a square.

        Args:
            tokens: Int[B S].
            prompt_lengths: Int[B].
            ends: Int[B], see `prefix.pack`.
        """
        in_line = (self._is_written() or self._is_flexible(), self.shares_beginnings())
        found = pack(tokens.cpu(), prompt_lengths.cpu(), ends.cpu(), self._packed_length, *in_line)
        is_alone = found is not None and len(found.spans) == len(tokens)
        return None if is_alone and self._is_long(int(ends.max())) else found

    def packed(self, packed: Packed, device: torch.device) -> Tensor:
        """Return the hidden states Float[N L d] of packed rows.

        A body that hands on what it does not name takes the branches. For others there is a mask of 0 and -inf in the
        model's precision, one copy for all layers: from a boolean one every layer would make its own copy and keep it
        for the backward pass.
        """
        body = body_of(self._model)
        if self._is_written():
            return body_states(body, packed.tokens, packed.positions, packed.branches)
        dtype = next(body.parameters()).dtype
        told: dict[str, Any] = {}
        if self._is_told:
            # A mask of four axes is handed on as it is, so none is made of the positions; ours does not look at it.
            added = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
            told["branches"] = packed.branches.on(device, self._kernel(packed.branches.is_shared))
        else:
            mask = dense_mask(packed.branches, len(packed.tokens)).to(device)
            added = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
        arguments = {
            "position_ids": packed.positions.to(device),
            "attention_mask": added,
            "use_cache": False,
        }
        known = checked_arguments(body, accepted(body), arguments)
        hidden: Tensor = body(input_ids=packed.tokens.to(device), **known, **told).last_hidden_state
        if self._is_told and len(packed.branches.windows) < self._layers():
            raise ModelError("a layer's attention was not told how packed rows branch")
        return hidden

    def is_row_packed(self, longest: int) -> bool:
        """Whether packed rows with at most ``longest`` tokens form one row."""
        return (self._is_written() and not self._is_long(longest)) or self._is_flexible()

    def shares_beginnings(self) -> bool:
        """Whether what all prompts of a packed row begin with is computed once."""
        return self._is_written() and kernels_of(next(self._model.parameters())) is not None

    def can_share(self) -> bool:
        """Whether packed rows give the same hidden states as separate rows, found by a trial.

        Models with a state instead of attention cannot be packed; those with attention windows only where each layer's
        attention is told its own.
        """
        embedding = self._model.get_input_embeddings().weight
        tokens, packed = _tried(len(embedding), self._packed_length)
        seen = windows(self._model)
        # GPT-Neo has a mask of its own, no wider than its positions, and a packed row may be longer.
        has_own_mask = any(buffer.ndim == 4 for buffer in self._model.buffers())
        if packed is None or has_own_mask or seen is None:
            return False
        if self._is_told and not self._agrees(tokens, packed):
            self._is_told = False
        is_told_windows = self._is_told and packed.branches.windows[: len(seen)] == seen
        # A trial of a few tokens is shorter than any window, so windows have to be told and counted instead.
        return is_told_windows if any(seen) else self._is_told or self._agrees(tokens, packed)

    def _agrees(self, tokens: Tensor, packed: Packed) -> bool:
        with torch.no_grad():
            own = self.plain(tokens.to(next(self._model.parameters()).device))[:, : tokens.shape[1]]
            try:
                shared = self.packed(packed, own.device)
            except (ModelError, RuntimeError, ValueError, TypeError, IndexError):
                return False
        # In low precision only responses are compared: the prompt's positions are computed alike in both ways.
        return _is_close(shared[packed.rows, packed.columns], own, _PROMPT, self._layers())

    def _layers(self) -> int:
        return int(self._model.config.get_text_config().num_hidden_layers)

    def _kernel(self, is_shared: bool) -> str:
        """Return the kernel for packed rows; beside FlexAttention, rows that share nothing may have a faster one."""
        if not self._is_flexible():
            return "branches"
        return "varlen" if not is_shared and works("varlen", *self._place()) else "flex"

    def _is_flexible(self) -> bool:
        """Whether packed rows lie in one row, whose blocks FlexAttention is told."""
        device = next(self._model.parameters()).device
        if not self._is_told or kernel_for(device) != "flex":
            return False
        return device.type == "cpu" or works("flex", *self._place())

    def _place(self) -> tuple[torch.device, torch.dtype, tuple[int, int, int]]:
        """Return where and in what precision the model computes, its heads of queries and of keys, and their size."""
        weight, config = next(self._model.parameters()), self._model.config.get_text_config()
        heads = int(config.num_attention_heads)
        stated = (vars(config).get("num_key_value_heads"), vars(config).get("head_dim"))
        return weight.device, weight.dtype, (heads, stated[0] or heads, stated[1] or config.hidden_size // heads)

    def _rounded(self, count: int) -> int:
        rounded = round_up(count, next(self._model.parameters()))
        # Padding beyond it would give every row another rotary table.
        return self._edge if self._edge is not None and count <= self._edge < rounded else rounded

    def _packed_length(self, count: int) -> int:
        if not self._is_flexible():
            return self._rounded(count)
        # Whole blocks, and few different lengths: a kernel is compiled again for some of them.
        multiple = max(BLOCK, 1 << count.bit_length() - 1 >> 5)
        return -(-count // multiple) * multiple

    def _is_long(self, tokens: int) -> bool:
        is_square = kernels_of(next(self._model.parameters())) is None and not self._is_flexible()
        return tokens > _LONGEST and is_square

    def _is_written(self) -> bool:
        """Whether the model is as it was at the trial: not sharded, without adapters, without recomputed layers."""
        is_asked = kernel_for(next(self._model.parameters()).device) == "branches"
        return self._is_tried and is_asked and can_fuse(self._model)


def own_states(model: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states Float[B S d] of ``tokens`` Int[B S] by the model's own code."""
    body = body_of(model)
    known = checked_arguments(body, accepted(body), {"use_cache": False})
    hidden: Tensor = body(input_ids=tokens, **known).last_hidden_state
    return hidden


def can_fuse(model: Any) -> bool:
    """Whether a backbone may use `body_states`; a user's choice of eager attention is kept."""
    body = body_of(model)
    is_sdpa = body is not model and body.config._attn_implementation in (OWN, "sdpa")
    return is_sdpa and is_standard(body)


def kept_for_backward(model: Any) -> int:
    """Return the numbers per token that `body_states` keeps for the backward pass; 0 if it is not used."""
    return kept_per_token(body_of(model)) if can_fuse(model) else 0


def _reproduces(body: Any) -> bool:
    """Whether `body_states` gives the numbers of the backbone's first layers in float32, alone and packed."""
    # Two layers in float32 prove the formulas; all layers in bfloat16 would differ by rounding as much as by a small
    # fault.
    first = beginning(body, _TRIED_TOKENS)
    tokens, packed = _tried(first.config.vocab_size)
    with torch.no_grad():
        own = first(input_ids=tokens, use_cache=False).last_hidden_state
        alone = _alone(first, tokens)
        if packed is None:
            return _is_close(alone, own, 0)
        shared = body_states(first, packed.tokens, packed.positions, packed.branches)
    return _is_close(alone, own, 0) and _is_close(shared[packed.rows, packed.columns], own, 0)


def _tried(vocabulary: int, rounded: Callable[[int], int] = int) -> tuple[Tensor, Packed | None]:
    """Return the rows of a trial, Int[2 S], and the same rows packed."""
    tokens = torch.tensor(_ROWS) % vocabulary
    return tokens, pack(tokens, torch.full((2,), _PROMPT), torch.full((2,), tokens.shape[1]), rounded)


def _alone(body: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states of separate rows by `body_states`."""
    rows, length = tokens.shape
    branches = PrefixLayout([Span(row * length, length, []) for row in range(rows)], rows * length)
    return body_states(body, tokens, torch.arange(length).expand(rows, -1), branches)


def _is_close(found: Tensor, own: Tensor, prompt: int, layers: int = 1) -> bool:
    found, exact = found.float(), own.float()
    if own.dtype not in _RELATIVE:
        found, exact = found[:, prompt:], exact[:, prompt:]
        return bool(((found - exact).norm(dim=-1) <= _RELATIVE_ROUGH * exact.norm(dim=-1)).all())
    return bool(((found - exact).abs() <= layers * _RELATIVE[own.dtype] * exact.abs().max()).all())
