"""Hidden states to log-probabilities and entropies of chosen tokens, without ever holding all logits.

With z = (W h + b) / temperature, lse = log sum exp z and p = exp(z - lse):

    logprob = z[token] - lse                 d logprob / dz = onehot - p
    entropy = lse - sum p z                  d entropy / dz = -p (log p + entropy)

A row needs a few numbers of its V logits and nothing else, so they are made chunk by chunk, reduced, and
made again in the backward pass. That costs one more product with the head and saves V floats a token. Rows that fit
into one chunk keep theirs for the backward pass: no more memory at a time, and one product of four saved.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gnomon.models.device import memory_of, token_multiple
from gnomon.models.sums import add

_CACHED_ROWS = 16
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
        normalizer = torch.empty(len(hidden), device=hidden.device)
        logprobs, entropy = torch.empty_like(normalizer), torch.zeros_like(normalizer)
        is_kept = len(hidden) <= chunk_tokens and any(ctx.needs_input_grad)
        ctx.kept = None
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits = _logits(hidden[chunk], weight, bias, temperature)
            chosen = logits.gather(1, targets[chunk, None])[:, 0]
            largest = logits.amax(1, keepdim=True)
            logits -= largest
            total, product = _reduce(logits, with_entropy, is_kept)
            if product is not None:
                entropy[chunk] = total.log() - product / total
            normalizer[chunk] = largest[:, 0] + total.log()
            logprobs[chunk] = chosen - normalizer[chunk]
            if is_kept:
                ctx.kept = logits, total.log()
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprob: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy = ctx.settings
        if to_logprob is None:
            to_logprob = torch.zeros_like(normalizer)
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
            if kept is None:
                slope = _logits(hidden[chunk], weight, bias, temperature).sub_(normalizer[chunk, None])
            else:
                slope = kept[0].sub_(kept[1][:, None])
            g = to_logprob[chunk, None]
            if to_entropy is None:
                slope.exp_().mul_(-g)
            else:
                _slope_with_entropy(slope, g, to_entropy[chunk, None], entropy[chunk, None])
            slope.scatter_add_(1, targets[chunk, None], g)
            if temperature != 1.0:
                slope /= temperature
            if d_bias is not None:
                d_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(slope, weight, out=d_hidden[chunk])
            if d_weight is not None:
                _add_product(d_weight, slope.T, hidden[chunk])
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _reduce(logits: Tensor, with_entropy: bool, is_kept: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sums over the vocabulary of exp z and, for the entropy, of z exp z.

    ``logits`` z are used up unless ``is_kept``, or the entropy is wanted.
    """
    if not with_entropy and not is_kept:
        return logits.exp_().sum(1), None
    totals, products = [], []
    for block in logits.split(_block(logits)):
        unnormalized = block.exp()
        totals.append(unnormalized.sum(1))
        if with_entropy:
            products.append(torch.linalg.vecdot(unnormalized, block))
    return torch.cat(totals), torch.cat(products) if with_entropy else None


def _slope_with_entropy(log_policy: Tensor, g: Tensor, g_entropy: Tensor, entropy: Tensor) -> None:
    """Turn log p into -p (g + g_entropy (log p + entropy)), in place."""
    shift = (g_entropy * entropy).add_(g)
    size = _block(log_policy)
    for slope, of_entropy, added in zip(*(t.split(size) for t in (log_policy, g_entropy, shift)), strict=True):
        policy = slope.exp()
        slope.mul_(of_entropy).add_(added).mul_(policy).neg_()


def chunk_for(device: torch.device, vocabulary: int) -> int:
    """Return how many tokens' logits to hold at a time: 256 on a CPU, more on a GPU, whose products need many rows.

    There one chunk in float32 takes at most a 64th of the memory. The gradient of the head's weight is added up once a
    chunk, which at a vocabulary of 150,000 moves gigabytes.
    """
    if device.type != "cuda":
        return _CHUNK_TOKENS
    return min(_CHUNK_TOKENS_GPU, max(_CHUNK_TOKENS, memory_of(device) // (_CHUNK_SHARE * 4 * vocabulary)))


def _block(logits: Tensor) -> int:
    """Return how many rows to take at a time where passes go over one buffer: on a CPU few enough for its cache.

    That saves a second buffer of the chunk's size as well.
    """
    return _CACHED_ROWS if logits.device.type == "cpu" else len(logits)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    add(total, left @ right)
