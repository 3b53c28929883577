"""Decoding on a CPU with none of the model's own code in a step: its weights, and as few operations as they allow.

Of a small model's step on a CPU a third is spent between the operations and in many small ones. The common architecture
(Llama, Mistral, Qwen2, Qwen3: norm, attention with rotary positions, norm, gated feed-forward) is written out here:
siblings multiply as one, the residual is added inside a product, and what all layers share is made once a step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from gnomon.models.cache import AlignedLayer
from gnomon.models.decoder import AlignedDecoder
from gnomon.models.lanes import LaneCache, Layout
from gnomon.models.packed import Product
from gnomon.models.standard import has_inner_norms

_ROWS_STEP = 4


class LeanDecoder(AlignedDecoder):
    """`AlignedDecoder` for a model that `is_standard`; prompts go through the model itself.

    Roundings are the model's own but for three: a residual and what is added to it round once, not twice, and so do
    the two halves of a rotation. Rows are computed in multiples of 4, because each new shape costs the CPU's kernels
    milliseconds once and memory that is not given back (0.1 MiB).

    The copies of the weights are made at the first step after `forget` and take as much memory as the weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model
        self._lanes = self._cache = LaneCache(len(DynamicCache(config=model.config).layers))
        self._network: _Network | None = None

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token a row and return the next logits."""
        if self._network is None:
            self._network = _Network(self._model)
        count, rows = len(tokens), round_rows(len(tokens))
        layout = self._lanes.before_step(room, rows)
        ids = torch.tensor([*tokens, *[0] * (rows - count)])
        logits = self._network(ids, layout, self._lanes.layers)[:count]
        self._forward.calls += 1
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
    """A standard model's weights of now, and one position of R rows through them."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embedding = body.embed_tokens.weight.detach()
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer) for layer in body.layers]
        self._norm = _Norm([body.norm])
        self._head = Product([model.lm_head])

    def __call__(self, ids: Tensor, layout: Layout, cache: Sequence[AlignedLayer]) -> Tensor:
        """Return the logits Float[R V] after ``ids`` Int[R]."""
        states = functional.embedding(ids, self._embedding)
        mask = torch.zeros(layout.hidden.shape, dtype=states.dtype).masked_fill_(layout.hidden, -torch.inf)
        mask = mask.repeat_interleave(self._layers[0].group, dim=1)[:, None]
        cos, sin = self._rotary(states, layout.places)
        sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
        for layer, kept in zip(self._layers, cache, strict=True):
            states = layer(states, (cos, sin), (layout, mask), kept)
        return self._head(self._norm(states))


class _Layer:
    """One layer."""

    def __init__(self, layer: Any) -> None:
        attention, feed = layer.self_attn, layer.mlp
        self._size = size = int(attention.head_dim)
        self._heads, self._shared = (p.out_features // size for p in (attention.q_proj, attention.k_proj))
        self.group = self._heads // self._shared
        self._scale = float(attention.scaling)
        self._before = _Norm([layer.input_layernorm])
        self._between = _Norm([layer.post_attention_layernorm])
        norms = (
            [attention.q_norm] * self._heads + [attention.k_norm] * self._shared if has_inner_norms(attention) else []
        )
        self._inside = _Norm(norms) if norms else None
        self._attend = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        # Attention's results lie in memory with the heads that share keys outside: the weights follow them.
        order = torch.arange(self._heads * size).view(self._shared, -1, size).transpose(0, 1).reshape(-1)
        self._join = Product([attention.o_proj], order)
        self._open = Product([feed.gate_proj, feed.up_proj])
        self._activation = feed.act_fn
        self._close = Product([feed.down_proj])

    def __call__(
        self, states: Tensor, turn: tuple[Tensor, Tensor], look: tuple[Layout, Tensor], kept: AlignedLayer
    ) -> Tensor:
        """Return what follows ``states`` Float[R W].

        turn: cosines and signed sines Float[R 1 D]. look: rows in blocks, and the mask Float[N 1 Q C] of their queries.
        """
        rows, heads = states.shape[0], self._heads
        made = self._attend(self._before(states)).view(rows, -1, self._size)
        turned, values = made[:, : heads + self._shared], made[:, heads + self._shared :]
        if self._inside is not None:
            turned = self._inside(turned)
        mixed = self._look(rotated(turned, *turn), values, *look, kept)
        states = self._join.plus(mixed, states)
        gate, up = self._open(self._between(states)).chunk(2, dim=-1)
        return self._close.plus(self._activation(gate).mul_(up), states)

    def _look(self, turned: Tensor, values: Tensor, layout: Layout, mask: Tensor, kept: AlignedLayer) -> Tensor:
        """Write keys and values, and return what each row's queries find."""
        if layout.rows is not None:
            turned, values = turned.index_select(0, layout.rows), values.index_select(0, layout.rows)
        queries, keys = turned.view(layout.blocks, -1, self._heads + self._shared, self._size).split(
            [self._heads, self._shared], dim=2
        )
        keys, values = keys.transpose(1, 2), values.unflatten(0, (layout.blocks, -1)).transpose(1, 2)
        key_buffer, value_buffer = kept.buffers(keys, values)
        key_buffer[: layout.blocks, :, layout.written] = keys
        value_buffer[: layout.blocks, :, layout.written] = values
        mixed = functional.scaled_dot_product_attention(
            queries.unflatten(2, (self._shared, -1)).transpose(1, 2).flatten(2, 3),
            key_buffer[: layout.blocks, :, layout.columns],
            value_buffer[: layout.blocks, :, layout.columns],
            attn_mask=mask,
            scale=self._scale,
        )
        found = mixed.transpose(1, 2).reshape(-1, self._heads * self._size)
        return found if layout.lanes is None else found.index_select(0, layout.lanes)


class _Norm:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + epsilon) * weight.

    Statistics in float32, rounded as the model rounds them: once normalized, once weighted. Several modules: one for
    each index of the axis before the last.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        weights = [module.weight.detach() for module in modules]
        self._weight = weights[0] if len(weights) == 1 else torch.stack(weights)
        self._share = 1 / weights[0].shape[-1]
        self._epsilon = torch.tensor(modules[0].variance_epsilon, dtype=torch.float32)

    def __call__(self, states: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._epsilon, size, size, value=self._share).rsqrt_()
        return torch.mul(states, factor, out=torch.empty_like(states)).mul_(self._weight)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``states`` Float[R H D] turned: the halves (x, y) become (x cos - y sin, y cos + x sin).

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
