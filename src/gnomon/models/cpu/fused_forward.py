"""A standard model's backbone on a CPU, with backward passes of its own.

The sums are those of the model's own code (Llama, Mistral, Qwen2, Qwen3; see `llama_like`) in fewer passes over memory,
which on a CPU cost as much as the products. Linear layers with one input become one product, a residual is added inside
a product, the operations between products are one C function each if the `kernels` exist, and values that are cheap to
compute again are not kept. With width d, H query and K key heads of size s, and inner width f, a layer keeps per token

    2 d + (2 H + 2 K) s + 2 f        SmolLM2: 10 d; its own code keeps 21 d

and, with native attention, two float32 numbers for each of the H query heads. Statistics of norms are float32 in both
directions. In low precision a residual and its addend round once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnomon.models.contexts import is_recomputed
from gnomon.models.cpu.gradient_sum import GradientSum, sum_of, weight_gradients
from gnomon.models.cpu.kernels import kernels_of
from gnomon.models.cpu.prefix_attention import PrefixLayout, branched_attention
from gnomon.models.llama_like import has_inner_norms, is_silu

Turn = tuple[Tensor, Tensor]
"""Cosines and sines Float[P s]."""


def body_states(body: Any, tokens: Tensor, positions: Tensor, branches: PrefixLayout) -> Tensor:
    """Return the hidden states Float[N L d] of packed rows, after the last norm.

    The embedding of the padding token gets no gradient, as in the model's own code: it may be all zeros, where a norm's
    slope is a thousand times that of any other row.

    Args:
        body: A backbone that `is_standard`.
        tokens: Int[N L].
        positions: Int[N L].
        branches: The layout of prompts and responses.
    """
    table = body.embed_tokens
    states = _embedded(tokens.flatten(), table)
    turn = _turn(body, states, positions)
    for layer in body.layers:
        given = (layer, states, turn, branches)
        if is_recomputed(layer) and torch.is_grad_enabled():
            states = checkpoint(_layer, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            states = _layer(*given)
    return normed(states, body.norm).view(*tokens.shape, -1)


def kept_per_token(body: Any) -> int:
    """Return the numbers per token that `body_states` keeps for the backward pass."""
    total, weight = 0, body.embed_tokens.weight
    of_query = 2 * 4 // weight.itemsize if kernels_of(weight) is not None else 0
    for layer in body.layers:
        attention, feed = layer.self_attn, layer.mlp
        queries, keys = attention.q_proj.out_features, attention.k_proj.out_features
        total += 2 * attention.q_proj.in_features + 2 * queries + 2 * keys + 2 * feed.gate_proj.out_features
        total += queries + keys if has_inner_norms(attention) else 0
        total += queries // attention.head_dim * of_query
    return total


def lay_side_by_side(body: Any) -> None:
    """Let the weights of linear layers with one input be parts of one tensor, so that no product has to join them:
    copying them took 4% of the fixed work's update and 8% of one of 400 tokens.

    Args:
        body: A backbone that `is_standard`, before anything but its modules holds its weights.
    """
    for layer in body.layers:
        for siblings in _families(layer):
            weights = [sibling.weight for sibling in siblings]
            parts = _stacked([weight.data for weight in weights]).split([len(weight) for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part


def _families(layer: Any) -> tuple[list[nn.Linear], list[nn.Linear]]:
    attention, feed = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [feed.gate_proj, feed.up_proj]


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return weights Float[N M] one above another: the memory that they are in, if it is so there."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        is_next = weight.storage_offset() == end and weight.is_contiguous()
        if not is_next or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(tuple(weights))
        end += weight.numel()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _layer(layer: Any, states: Tensor, turn: Turn, branches: PrefixLayout) -> Tensor:
    attention, feed = layer.self_attn, layer.mlp
    siblings, openings = _families(layer)
    # (positions, H + 2 K, size): heads of queries, of keys, of values.
    made = normed_product(states, layer.input_layernorm, siblings).unflatten(1, (-1, attention.head_dim))
    heads = attention.q_proj.out_features // attention.head_dim
    if has_inner_norms(attention):
        made = _normed_heads(made, attention, heads)
    made = _Turned.apply(made, *turn, heads + attention.k_proj.out_features // attention.head_dim)  # type: ignore[no-untyped-call]
    mixed = branched_attention(made, heads, branches, float(attention.scaling)).flatten(1)
    # The residual is added within the product, which rounds once.
    states = _Plus.apply(states, mixed, attention.o_proj.weight, attention.o_proj.bias)  # type: ignore[no-untyped-call]
    # (positions, 2 f): gate, then up.
    opened = normed_product(states, layer.post_attention_layernorm, openings)
    down = feed.down_proj
    closed: Tensor = _Gated.apply(states, opened, down.weight, down.bias, feed.act_fn)  # type: ignore[no-untyped-call]
    return closed


def _embedded(tokens: Tensor, table: Any) -> Tensor:
    """Return the rows Float[P d] of an embedding."""
    total = sum_of(table.weight)
    if total is None:
        return functional.embedding(tokens, table.weight, table.padding_idx)
    found: Tensor = _Embedded.apply(tokens, table.weight, table.padding_idx, total)  # type: ignore[no-untyped-call]
    return found


def normed(states: Tensor, norm: Any) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last axis of ``states``."""
    result: Tensor = _Normed.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return result


def normed_product(states: Tensor, norm: Any, layers: Sequence[nn.Linear]) -> Tensor:
    """Return the products of linear layers with one normalized input, side by side, Float[P outputs].

    Of the input, only ``states`` Float[P d] is kept.
    """
    has_bias = layers[0].bias is not None
    tensors = [layer.weight for layer in layers] + [layer.bias for layer in layers if has_bias]
    settings = (norm.variance_epsilon, len(layers))
    result: Tensor = _NormedProduct.apply(states, norm.weight, settings, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Embedded(torch.autograd.Function):
    """Rows of an embedding whose gradient goes into a `GradientSum`; the row of ``padding`` has none."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, padding: int | None, total: GradientSum) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.padding, ctx.total = padding, total
        return functional.embedding(tokens, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.padding is not None:
            is_read = tokens != ctx.padding
            tokens, gradient = tokens[is_read], gradient[is_read]
        ctx.total.add_rows(tokens, gradient)
        return None, None, None, None


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, scale: Tensor, epsilon: float) -> Tensor:
        result, factor = _norm(states, scale, epsilon)
        ctx.save_for_backward(states, scale, factor)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_through_norm(gradient, *ctx.saved_tensors)[:2], None


class _NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, scale: Tensor, settings: tuple[float, int], *tensors: Tensor) -> Tensor:
        epsilon, count = settings
        # Of the normalized input only the factor is kept, one number a row.
        given, factor = _norm(states, scale, epsilon)
        ctx.save_for_backward(states, scale, factor, *tensors)
        ctx.count, ctx.sums = count, [sum_of(weight) for weight in tensors[:count]]
        bias = torch.cat(tensors[count:]) if len(tensors) > count else None
        return functional.linear(given, _stacked(tensors[:count]), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, scale, factor, *tensors = ctx.saved_tensors
        weights = tensors[: ctx.count]
        sizes = [len(weight) for weight in weights]
        found: list[Tensor | None] = [None] * len(tensors)
        # The normalized input was not kept; it is made again where gradients of weights need it.
        is_wanted = any(ctx.needs_input_grad[3:])
        d_states, d_scale, given = _through_norm(gradient @ _stacked(weights), states, scale, factor, is_wanted)
        if given is not None:
            found[: ctx.count] = weight_gradients(gradient, given, sizes, ctx.sums)
            if len(tensors) > ctx.count:
                found[ctx.count :] = gradient.sum(0).split(sizes)
        return d_states, d_scale, None, *found


class _Turned(torch.autograd.Function):
    """Rotary positions: halves (x, y) of queries and keys become (x cos - y sin, y cos + x sin); values stay."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        return _turned(made, cos, sin, turned, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, ctx.turned, -1), None, None, None


class _Plus(torch.autograd.Function):
    """A linear layer's output for ``inputs``, added to ``states``."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sum = sum_of(weight)
        return _plus(states, inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        _, _, for_weight, for_bias = ctx.needs_input_grad
        d_weight = weight_gradients(gradient, inputs, [len(weight)], [ctx.sum])[0] if for_weight else None
        return gradient, gradient @ weight, d_weight, gradient.sum(0) if for_bias else None


class _Gated(torch.autograd.Function):
    """The end of a gated feed-forward part, added to ``states``: down(activation(gate) * up)."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, opened: Tensor, weight: Tensor, bias: Tensor | None, activation: nn.Module
    ) -> Tensor:
        ctx.save_for_backward(opened, weight)
        ctx.activation, ctx.sum = activation, sum_of(weight)
        return _plus(states, _gated(opened, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        opened, weight = ctx.saved_tensors
        _, _, for_weight, for_bias, _ = ctx.needs_input_grad
        product, d_opened = _through_gate(opened, gradient @ weight, ctx.activation)
        d_weight = weight_gradients(gradient, product, [len(weight)], [ctx.sum])[0] if for_weight else None
        return gradient, d_opened, d_weight, gradient.sum(0) if for_bias else None, None


def _norm(states: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x r scale, rounded as models do, and r = 1 / sqrt(mean(x^2) + epsilon), Float32[...], or float64's own."""
    kernels = kernels_of(states)
    if kernels is not None and scale.ndim == 1:
        return kernels.norm(states, scale, epsilon)
    kind = torch.promote_types(states.dtype, torch.float32)
    factor = (states.to(kind).square().mean(-1) + epsilon).rsqrt()
    return _times(states, factor).mul_(scale), factor


def _times(states: Tensor, factor: Tensor) -> Tensor:
    """Return the product, rounded once to the precision of ``states``."""
    return torch.mul(states, factor[..., None], out=torch.empty_like(states))


def _through_norm(
    gradient: Tensor, states: Tensor, scale: Tensor, factor: Tensor, again: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of states and scale from the gradient of `_norm`'s result and, with ``again``, the result.

    With u = x r and r = 1 / sqrt(mean(x^2) + epsilon):  dx = r (du - u mean(du u)).
    """
    kernels = kernels_of(states)
    if kernels is not None and scale.ndim == 1:
        found, d_scale, given = kernels.norm_back(gradient.contiguous(), states, factor, scale, again)
        return found, d_scale.to(scale.dtype), given
    unit, wide = _times(states, factor), factor[..., None]
    d_scale = (gradient * unit).flatten(0, -1 - scale.ndim).sum(0, dtype=factor.dtype).to(scale.dtype)
    d_unit = gradient * scale
    # mean(du u), in float32 whatever the states are.
    share = (d_unit * unit).mean(-1, keepdim=True, dtype=factor.dtype)
    d_states = (unit * share.neg_()).add_(d_unit).mul_(wide).to(unit.dtype)
    return d_states, d_scale, unit.mul_(scale) if again else None


def _gated(opened: Tensor, activation: nn.Module) -> Tensor:
    """Return activation(gate) * up of ``opened`` Float[P 2f]: gate, then up."""
    kernels = kernels_of(opened) if is_silu(activation) else None
    if kernels is not None:
        return kernels.gate(opened)
    gate, up = opened.chunk(2, dim=-1)
    result: Tensor = activation(gate) * up
    return result


def _through_gate(opened: Tensor, gradient: Tensor, activation: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the result of `_gated`, and the gradient of ``opened``; the given gradient is overwritten."""
    kernels = kernels_of(opened) if is_silu(activation) else None
    if kernels is not None:
        return kernels.gate_back(opened, gradient)
    gate, up = opened.detach().chunk(2, dim=-1)
    # An activation other than SiLU has its gradient from autograd, element by element.
    with torch.enable_grad():
        gate.requires_grad_()
        active = activation(gate)
    open_gate = active.detach()
    product = open_gate * up
    d_opened = torch.empty_like(opened)
    to_gate, to_up = d_opened.chunk(2, dim=-1)
    torch.mul(gradient, open_gate, out=to_up)
    to_gate.copy_(torch.autograd.grad(active, gate, gradient.mul_(up))[0])
    return product, d_opened


def _plus(states: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    total = torch.addmm(states, inputs, weight.T)
    return total if bias is None else total.add_(bias)


def _turn(body: Any, states: Tensor, positions: Tensor) -> Turn:
    cos, sin = body.rotary_emb(states, positions.reshape(1, -1))
    return cos[0].contiguous(), sin[0].contiguous()


def _turned(made: Tensor, cos: Tensor, sin: Tensor, turned: int, sign: int) -> Tensor:
    kernels = kernels_of(made)
    if kernels is not None:
        return kernels.turn(made.contiguous(), turned, cos, sin, sign)
    half = cos.shape[1] // 2
    given = made[:, :turned]
    result = torch.empty_like(made)
    # The backward pass is the rotation by the opposite angle: ``sign`` -1.
    swapped = torch.cat((-given[..., half:], given[..., :half]), dim=-1)
    torch.mul(given, cos[:, None], out=result[:, :turned]).addcmul_(swapped, sin[:, None], value=sign)
    result[:, turned:] = made[:, turned:]
    return result


def _normed_heads(made: Tensor, attention: Any, heads: int) -> Tensor:
    turned = heads + attention.k_proj.out_features // attention.head_dim
    queries, keys = attention.q_norm, attention.k_norm
    scale = torch.cat((queries.weight.expand(heads, -1), keys.weight.expand(turned - heads, -1)))
    own: Tensor = _Normed.apply(made[:, :turned], scale, queries.variance_epsilon)  # type: ignore[no-untyped-call]
    return torch.cat((own, made[:, turned:]), dim=1)
