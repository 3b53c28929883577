"""Decoding on a CPU without the model's own code, in as few operations as its weights allow.

A third of a small model's step on a CPU is spent between operations and in many small ones. The common architecture
(Llama, Mistral, Qwen2, Qwen3: norm, attention with rotary positions, norm, gated feed-forward) is written out here.
    Linear
layers with one input become one product, the residual is added inside a product, values that all layers share are
computed once per step, and the operations between products are one C function each if the `kernels` exist.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from gnomon.models.cpu.grouped_kv_cache import GroupedKVCache, PrefixGroups
from gnomon.models.cpu.kernels import Kernels, kernels_of
from gnomon.models.cpu.packed_linear import Product
from gnomon.models.decoder import AlignedDecoder
from gnomon.models.kv_cache import AlignedLayer
from gnomon.models.llama_like import has_inner_norms, is_silu

_ROWS_STEP = 4


class FusedDecoder(AlignedDecoder):
    """`AlignedDecoder` for a model that `is_standard`; prompts go through the model itself.

    Roundings are the model's own with three exceptions: both residuals and their addends round once and not twice,
    and so do the two halves of a rotation. Rows are computed in multiples of 4, because each new shape costs the
    CPU's kernels milliseconds once and 0.1 MiB of memory that is never freed.

    Copies of the weights are made at the first step after `forget` and take as much memory as the weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model
        self._kernels = kernels_of(next(model.parameters()))
        self._lanes = self._cache = GroupedKVCache(
            len(DynamicCache(config=model.config).layers), thins=not self._kernels
        )
        self._network: _Network | None = None

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token per row and return the next logits."""
        if self._network is None:
            self._network = _Network(self._model, self._kernels)
        count, rows = len(tokens), round_rows(len(tokens))
        layout = self._lanes.before_step(room, rows)
        ids = torch.tensor([*tokens, *[0] * (rows - count)])
        logits = self._network(ids, layout, self._lanes.layers)[:count]
        self._forward.calls += 1
        self._forward.tokens += count
        self._lanes.after_step()
        self._trace.extend(None)
        return logits

    def forget(self) -> None:
        """Drop the kept prompts, and the copies of the weights."""
        super().forget()
        self._network = None

    def rest(self) -> None:
        """Free the copies of the weights, and the cache."""
        super().rest()
        self._network = None


class _Network:
    """A standard model's current weights, and one position of R rows through them."""

    def __init__(self, model: Any, kernels: Kernels | None) -> None:
        body = model.model
        self._kernels = kernels
        self._embedding = body.embed_tokens.weight.detach()
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer, kernels) for layer in body.layers]
        self._norm = _Norm([body.norm], kernels)
        self._head = Product([model.lm_head])

    def __call__(self, ids: Tensor, layout: PrefixGroups, cache: Sequence[AlignedLayer]) -> Tensor:
        """Return the logits Float[R V] after ``ids`` Int[R]."""
        states = functional.embedding(ids, self._embedding)
        turn = self._rotary(states, layout.positions)
        look: _Look = (
            _Masked(layout, turn, self._layers[0].group)
            if self._kernels is None
            else _Native(self._kernels, layout, turn)
        )
        for layer, kept in zip(self._layers, cache, strict=True):
            states = layer(states, look, kept)
        return self._head(self._norm(states))


class _Layer:
    """One layer."""

    def __init__(self, layer: Any, kernels: Kernels | None) -> None:
        attention, feed = layer.self_attn, layer.mlp
        self._size = size = int(attention.head_dim)
        self._heads, self._shared = (p.out_features // size for p in (attention.q_proj, attention.k_proj))
        self.group = self._heads // self._shared
        self._scale = float(attention.scaling)
        self._before = _Norm([layer.input_layernorm], kernels)
        self._between = _Norm([layer.post_attention_layernorm], kernels)
        norms = (
            [attention.q_norm] * self._heads + [attention.k_norm] * self._shared if has_inner_norms(attention) else []
        )
        self._inside = _Norm(norms, kernels) if norms else None
        self._attend = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._join = Product([attention.o_proj])
        self._open = Product([feed.gate_proj, feed.up_proj])
        self._activation: Callable[[Tensor], Tensor] = feed.act_fn
        self._gate = kernels.gate if kernels is not None and is_silu(feed.act_fn) else self._gated
        self._close = Product([feed.down_proj])

    def __call__(self, states: Tensor, look: "_Look", kept: AlignedLayer) -> Tensor:
        """Return the layer's output for ``states`` Float[R W]."""
        made = self._attend(self._before(states)).view(states.shape[0], -1, self._size)
        if self._inside is not None:
            self._inside.heads_(made)
        mixed = look(made, self._shared, self._scale, kept)
        states = self._join.plus(mixed, states)
        return self._close.plus(self._gate(self._open(self._between(states))), states)

    def _gated(self, opened: Tensor) -> Tensor:
        gate, up = opened.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


class _Look(Protocol):
    """How a step's queries read the cache."""

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write keys and values of ``made`` Float[R H + 2K D], K heads each, and return the output Float[R H * D]."""


class _Native:
    """Each row reads only its own columns."""

    def __init__(self, kernels: Kernels, layout: PrefixGroups, turn: tuple[Tensor, Tensor]) -> None:
        self._kernels, self._layout = kernels, layout
        self._angles = (turn[0].flatten(0, -2).contiguous(), turn[1].flatten(0, -2).contiguous())

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write and look; see `_Look`."""
        like = made[:1, :shared].transpose(0, 1)[None]
        buffers = kept.buffers(like, like)
        return self._kernels.attend(made, self._angles, self._layout.rows, buffers, self._layout.width, scale)


class _Masked:
    """Blocks read all columns, and a mask excludes the columns of other rows."""

    def __init__(self, layout: PrefixGroups, turn: tuple[Tensor, Tensor], group: int) -> None:
        cos, sin = turn
        self._layout, self._cos = layout, cos
        self._sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
        mask = torch.zeros(layout.hidden.shape, dtype=cos.dtype).masked_fill_(layout.hidden, -torch.inf)
        self._mask = mask.repeat_interleave(group, dim=1)[:, None]

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write and look; see `_Look`."""
        layout, heads = self._layout, made.shape[1] - 2 * shared
        turned, values = rotated(made[:, : heads + shared], self._cos, self._sin), made[:, heads + shared :]
        if layout.order is not None:
            turned, values = turned.index_select(0, layout.order), values.index_select(0, layout.order)
        queries, keys = turned.view(layout.blocks, -1, heads + shared, made.shape[2]).split([heads, shared], dim=2)
        keys, values = keys.transpose(1, 2), values.unflatten(0, (layout.blocks, -1)).transpose(1, 2)
        key_buffer, value_buffer = kept.buffers(keys, values)
        key_buffer[: layout.blocks, :, layout.written] = keys
        value_buffer[: layout.blocks, :, layout.written] = values
        mixed = functional.scaled_dot_product_attention(
            queries.unflatten(2, (shared, -1)).transpose(1, 2).flatten(2, 3),
            key_buffer[: layout.blocks, :, layout.columns],
            value_buffer[: layout.blocks, :, layout.columns],
            attn_mask=self._mask,
            scale=scale,
        )
        by_lane = mixed.unflatten(2, (-1, heads // shared)).permute(0, 2, 1, 3, 4)
        found: Tensor = by_lane.reshape(-1, heads * made.shape[2])
        return found if layout.lane_order is None else found.index_select(0, layout.lane_order)


class _Norm:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + epsilon) * weight.

    Statistics are float32 and rounded as the model rounds them: after normalizing and after weighting. Several modules
    normalize one head each, the first heads of a row.
    """

    def __init__(self, modules: Sequence[Any], kernels: Kernels | None) -> None:
        weights = [module.weight.detach() for module in modules]
        self._weight = weights[0] if len(weights) == 1 else torch.stack(weights)
        self._share = 1 / weights[0].shape[-1]
        self._epsilon = float(modules[0].variance_epsilon)
        self._added = torch.tensor(self._epsilon, dtype=torch.float32)
        self._kernels = kernels

    def __call__(self, states: Tensor) -> Tensor:
        """Return ``states`` Float[R W] normalized."""
        return (
            self._plain(states) if self._kernels is None else self._kernels.norm(states, self._weight, self._epsilon)[0]
        )

    def heads_(self, made: Tensor) -> None:
        """Normalize the first heads of ``made`` Float[R M D], one per module, in place."""
        if self._kernels is not None:
            self._kernels.norm_heads_(made, self._weight, self._epsilon)
        else:
            turned = made[:, : len(self._weight)]
            turned.copy_(self._plain(turned))

    def _plain(self, states: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._added, size, size, value=self._share).rsqrt_()
        return torch.mul(states, factor, out=torch.empty_like(states)).mul_(self._weight)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``states`` Float[R H D] rotated: the halves (x, y) become (x cos - y sin, y cos + x sin).

    cos Float[R 1 D]; sin Float[R 1 D] with its first half negated.
    """
    half = states.shape[-1] // 2
    swapped = torch.cat((states[..., half:], states[..., :half]), dim=-1)
    return (states * cos).addcmul_(swapped, sin)


def round_rows(rows: int) -> int:
    """Return the rows that a step of ``rows`` computes.

    >>> [round_rows(n) for n in (1, 16, 17)]
    [4, 16, 20]
    """
    return -(-rows // _ROWS_STEP) * _ROWS_STEP
