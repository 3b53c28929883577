"""Hidden states to log-probabilities and entropies of chosen tokens, without ever holding all logits.

With z = (W h + b) / temperature, lse = log sum exp z and p = exp(z - lse):

    logprob = z[token] - lse                 d logprob / dz = onehot - p
    entropy = lse - sum p z                  d entropy / dz = -p (log p + entropy)

A row needs a few numbers of its V logits and nothing else, so they are made chunk by chunk, reduced, and
made again in the backward pass. That costs one more product with the head and saves V floats a token. Rows that fit
into one chunk keep theirs for the backward pass: no more memory at a time, and one product of four saved.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gnomon.models.device import memory_of, token_multiple
from gnomon.models.exponential import exp_
from gnomon.models.sums import add

_CACHED = 1 << 19
"""Logits that passes go over one after another: 2 MiB in float32."""
_CHUNK_TOKENS = 256
_CHUNK_TOKENS_GPU = 8192
_CHUNK_SHARE = 64


def chosen_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each row, Float32[N], with gradients.

    hidden Float[N d]; targets Int[N]; chunk_tokens: rows whose logits exist at one time.
    The products run in the precision of ``hidden`` and ``head`` (which accumulate in float32); everything
    after them is float32. Without ``with_entropy`` the second result is zeros and costs nothing; the
    gradient of an entropy that nobody uses is never computed either.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(head.weight)
    >>> logprob, entropy = chosen_logprobs(torch.zeros(1, 2), head, torch.tensor([0]), 1.0, 256, True)
    >>> round(logprob.item(), 6), round(entropy.item(), 6)
    (-0.693147, 0.693147)
    """
    settings = (temperature, chunk_tokens, with_entropy)
    count = len(hidden)
    missing = -count % token_multiple(head.weight)
    if missing:
        hidden, targets = functional.pad(hidden, (0, 0, 0, missing)), functional.pad(targets, (0, missing))
    logprobs, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, settings
    )
    return logprobs[:count], entropy[:count]


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: tuple[float, int, bool],
    ) -> tuple[Tensor, Tensor]:
        temperature, chunk_tokens, with_entropy = settings
        largest = torch.empty(len(hidden), 1, device=hidden.device)
        total = torch.empty_like(largest)
        logprobs, entropy = torch.empty_like(largest[:, 0]), torch.zeros_like(largest[:, 0])
        is_kept = len(hidden) <= chunk_tokens and any(ctx.needs_input_grad)
        ctx.kept = None
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits = functional.linear(hidden[chunk], weight, bias)
            for part, rows in _blocks(logits, chunk):
                wide = _tempered(part.to(torch.float32, copy=is_kept), temperature)
                chosen = wide.gather(1, targets[rows, None])[:, 0]
                torch.amax(wide, 1, keepdim=True, out=largest[rows])
                wide -= largest[rows]
                masses = exp_(wide.clone() if with_entropy else wide)
                torch.sum(masses, 1, keepdim=True, out=total[rows])
                normalizer = total[rows, 0].log()
                if with_entropy:
                    entropy[rows] = normalizer - torch.linalg.vecdot(masses, wide) / total[rows, 0]
                logprobs[rows] = chosen - largest[rows, 0] - normalizer
            if is_kept:
                ctx.kept = logits
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, largest, total, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprob: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, largest, total, entropy = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy = ctx.settings
        if to_logprob is None:
            to_logprob = torch.zeros_like(entropy)
        if not with_entropy:
            to_entropy = None
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        # Summed over chunks in float32, whatever the products' precision.
        d_weight = torch.zeros(weight.shape, device=weight.device) if for_weight else None
        d_bias = torch.zeros(bias.shape, device=weight.device) if for_bias else None
        # Used up below: a second backward pass makes them again.
        kept, ctx.kept = ctx.kept, None
        for chunk in _chunks(len(hidden), chunk_tokens):
            # Turned into their own gradient, block by block.
            logits = functional.linear(hidden[chunk], weight, bias) if kept is None else kept
            for part, rows in _blocks(logits, chunk):
                slope = _tempered(part.float(), temperature).sub_(largest[rows])
                g = to_logprob[rows, None]
                if to_entropy is None:
                    exp_(slope).mul_(-g / total[rows])
                else:
                    _slope_with_entropy(slope, total[rows], g, to_entropy[rows, None], entropy[rows, None])
                slope.scatter_add_(1, targets[rows, None], g)
                _tempered(slope, temperature)
                if d_bias is not None:
                    d_bias += slope.sum(0)
                if slope.dtype != part.dtype:
                    part.copy_(slope)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[chunk])
            if d_weight is not None:
                _add_product(d_weight, logits.T, hidden[chunk])
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _slope_with_entropy(shifted: Tensor, total: Tensor, g: Tensor, g_entropy: Tensor, entropy: Tensor) -> None:
    """Turn x = log p + log total into -p (g + g_entropy (log p + entropy)), in place."""
    masses = exp_(shifted.clone())
    shifted.mul_(g_entropy).add_(g_entropy * (entropy - total.log()) + g).mul_(masses).mul_(-1 / total)


def _tempered(wide: Tensor, temperature: float) -> Tensor:
    return wide if temperature == 1.0 else wide.div_(temperature)


def chunk_for(device: torch.device, vocabulary: int) -> int:
    """Return how many tokens' logits to hold at a time: 256 on a CPU, more on a GPU, whose products need many rows.

    There one chunk in float32 takes at most a 64th of the memory. The gradient of the head's weight is added up once a
    chunk, which at a vocabulary of 150,000 moves gigabytes.
    """
    if device.type != "cuda":
        return _CHUNK_TOKENS
    return min(_CHUNK_TOKENS_GPU, max(_CHUNK_TOKENS, memory_of(device) // (_CHUNK_SHARE * 4 * vocabulary)))


def _blocks(logits: Tensor, chunk: slice) -> Iterator[tuple[Tensor, slice]]:
    """Yield the rows of a chunk's logits with their places, so many at a time as passes may go over in float32.

    On a CPU few enough for its cache.
    """
    size = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for first, part in zip(range(chunk.start, chunk.start + len(logits), size), logits.split(size), strict=True):
        yield part, slice(first, first + len(part))


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    add(total, left @ right)
