"""Log-probabilities and entropies of chosen tokens from hidden states, without holding all logits.

With z = (W h + b) / temperature, lse = log sum exp z and p = exp(z - lse):

    logprob = z[token] - lse                 d logprob / dz = onehot - p
    entropy = lse - sum p z                  d entropy / dz = -p (log p + entropy)

A row needs a few numbers of its V logits. Logits are computed in chunks of rows and reduced. The backward pass computes
them again, for all rows and a part of the vocabulary at a time, so the gradient of each weight of the head is one
product and not a sum over chunks. This costs one more product and saves V floats per token. If all rows fit into one
chunk, their logits are kept for the backward pass: no more memory at a time, and one product of four saved. Logits that
a model bounds (b tanh(z / b)) have the slope 1 - (logit / b)^2 more.

The same pass gives the KL to a distribution q of which the likeliest tokens are known. With f = log p - log q of each
of these, and of all others together (f'), KL = sum p f:

    d KL / dz = p (f - KL)

Where all others together have less than a millionth, they count as a millionth.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gnomon.core.types import TopLogprobs
from gnomon.models.cpu.gradient_sum import add_gradient, sum_of
from gnomon.models.cpu.kernels import kernels_of
from gnomon.models.device import memory_of, round_up
from gnomon.models.fused_layers import fused

_CACHED = 1 << 19
"""Logits that passes go over one after another: 2 MiB in float32."""
_LEAST_COLUMNS = 64
# Sizes of chunks, see `chunk_for`.
_CHUNK_TOKENS = 256
_CHUNK_BYTES = 64 * 2**20
_CHUNK_TOKENS_GPU = 8192
_CHUNK_SHARE = 64
_REST = 1e-6
"""Least probability of all other tokens together: below it, 1 - sum p is rounding."""
_RAREST = -100.0
"""Log-probabilities below it are probabilities of 0 in float32."""

_Found = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of each row the largest logit, the sum of exp(logit - largest), the target's log-probability, and the entropy."""
_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Targets, largest, sum and entropy of each row, and the gradients of log-probability and entropy."""


def chosen_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each row, Float32[N], with gradients.

    Products run in the precision of ``hidden`` and ``head`` with float32 sums; everything after them is float32.
    Without ``with_entropy`` the second result is zeros and costs nothing. The gradient of an unused entropy is never
    computed.

    Args:
        hidden: Float[N d].
        head: Linear layer with V outputs.
        targets: Int[N].
        temperature: Above 0.
        chunk_tokens: Rows whose logits exist at one time.
        with_entropy: Whether to compute entropies.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(head.weight)
    >>> logprob, entropy = chosen_logprobs(torch.zeros(1, 2), head, torch.tensor([0]), 1.0, 256, True)
    >>> round(logprob.item(), 6), round(entropy.item(), 6)
    (-0.693147, 0.693147)
    """
    return scored(hidden, head, targets, (temperature, chunk_tokens, with_entropy))[:2]


def scored(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    settings: tuple[float, int, bool],
    top: TopLogprobs | None = None,
    bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `chosen_logprobs` does, and KL(row || the distribution that ``top`` is of), Float32[N].

    Args:
        hidden: Float[N d].
        head: Linear layer with V outputs.
        targets: Int[N].
        settings: temperature, chunk_tokens and with_entropy of `chosen_logprobs`.
        top: Int[N K] and Float[N K], a row for each of ``hidden``; K = V is the whole distribution. None: zeros.
        bound: b of logits b tanh(z / b), z = W h + bias, before the temperature; None for none.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(head.weight)
    >>> top = TopLogprobs(torch.tensor([[0, 1]]), torch.tensor([[0.8, 0.2]]).log())
    >>> round(scored(torch.zeros(1, 2), head, torch.tensor([0]), (1.0, 256, True), top)[2].item(), 6)
    0.223144
    """
    count = len(hidden)
    # Rows are padded, for on a CPU each new shape of a low-precision product costs time once and memory for good.
    missing = round_up(count, head.weight) - count
    ids, logprobs = (None, None) if top is None else top
    if missing:
        hidden, targets = functional.pad(hidden, (0, 0, 0, missing)), functional.pad(targets, (0, missing))
        ids, logprobs = (x if x is None else functional.pad(x, (0, 0, 0, missing)) for x in (ids, logprobs))
    found: tuple[Tensor, Tensor, Tensor] = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, (targets, ids, logprobs), (*settings, bound)
    )
    return found[0][:count], found[1][:count], found[2][:count]


def likeliest(
    hidden: Tensor,
    head: nn.Linear,
    temperature: float,
    chunk_tokens: int,
    kept: tuple[int, int],
    bound: float | None = None,
) -> TopLogprobs:
    """Return the likeliest tokens of each row of ``hidden`` Float[N d]; without a gradient.

    Args:
        hidden: As `chosen_logprobs` has it, like the three that follow.
        kept: How many, and among how many of the first tokens.
        bound: See `scored`.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(head.weight)
    >>> likeliest(torch.tensor([[0.0, 0.6931472]]), head, 1.0, 256, (1, 2)).tokens.tolist()
    [[1]]
    """
    count, among = kept
    found = [
        (_bounded(head(hidden[chunk]), bound).float() / temperature).log_softmax(-1)[:, :among].topk(count, -1)
        for chunk in _chunks(len(hidden), chunk_tokens)
    ]
    values, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopLogprobs(tokens.int(), values)


def divergence(own: Tensor, other: Tensor, is_whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(own || other) of each row, and what its slope is made of; differentiable.

    Args:
        own: Log-probabilities Float[N K] of K tokens.
        other: Of the same tokens, under the other distribution.
        is_whole: Whether there are no other tokens.

    Returns:
        sum p f, Float[N]; f of all other tokens together, Float[N], 0 where there are none; p (f - that), Float[N K].
    """
    own, other = own.clamp(min=_RAREST), other.clamp(min=_RAREST)
    p, f = own.exp(), own - other
    if is_whole:
        left = rest = torch.zeros_like(p[:, 0])
    else:
        # Where the known tokens have all of the mass, 1 - sum p is rounding and its logarithm is anything.
        left = (1 - p.sum(1)).clamp(min=_REST)
        rest = left.log() - (1 - other.exp().sum(1)).clamp(min=_REST).log()
    return (p * f).sum(1) + left * rest, rest, p * (f - rest[:, None])


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: tuple[Tensor, Tensor | None, Tensor | None],
        settings: tuple[float, int, bool, float | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature, chunk_tokens, with_entropy, bound = settings
        targets, ids, others = asked
        largest, total, logprobs = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        entropy, kl, rest = (torch.zeros_like(largest) for _ in range(3))
        pushes = None if others is None else torch.empty_like(others, dtype=torch.float32)
        is_kept = len(hidden) <= chunk_tokens and any(ctx.needs_input_grad)
        ctx.kept = None
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits = _bounded(functional.linear(hidden[chunk], weight, bias), bound)
            found = (largest[chunk], total[chunk], logprobs[chunk], entropy[chunk] if with_entropy else None)
            # Looked up first: what follows may write over the logits.
            own = None if ids is None else logits.gather(1, ids[chunk].long()).float() / temperature
            _reduce(logits, targets[chunk], found, temperature)
            if own is not None and others is not None and pushes is not None:
                # (rows, K) logits less the log of the sum: log-probabilities.
                own -= (largest[chunk] + total[chunk].log())[:, None]
                is_whole = own.shape[1] >= len(weight)
                kl[chunk], rest[chunk], pushes[chunk] = divergence(own, others[chunk], is_whole)
            if is_kept:
                ctx.kept = logits
        ctx.settings, ctx.sum = settings, sum_of(weight)
        ctx.set_materialize_grads(False)
        # A few numbers a row instead of V logits; from largest and total the backward pass makes the probabilities
        # again.
        ctx.save_for_backward(hidden, weight, bias, targets, largest, total, entropy, kl - rest, ids, pushes)
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_logprob: Tensor | None, to_entropy: Tensor | None, to_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, largest, total, entropy, turn, ids, pushes = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy, bound = ctx.settings
        if to_logprob is None:
            to_logprob = torch.zeros_like(entropy)
        further = None
        if to_kl is not None and ids is not None:
            # p (f' - KL) is as the slope of a log-probability, but for the target's own 1, which is taken back.
            to_logprob = to_logprob + to_kl * turn
            values = torch.cat([-(to_kl * turn)[:, None], to_kl[:, None] * pushes], 1).div_(temperature)
            further = (torch.cat([targets[:, None], ids.long()], 1), values)
        to_entropy = to_entropy.contiguous() if with_entropy and to_entropy is not None else None
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        added, is_new = ctx.sum.begin() if for_weight and ctx.sum is not None else (None, True)
        d_weight = torch.empty_like(weight) if for_weight and added is None else None
        d_bias = torch.empty_like(bias) if for_bias else None
        # Used up below: a second backward pass makes them again.
        kept, ctx.kept = ctx.kept, None
        parts = _chunks(len(weight), len(weight) if kept is not None else _columns(hidden, weight, chunk_tokens))
        # Of several parts a sum in float32, whatever the products' precision.
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if for_hidden and len(parts) > 1 else None
        given = (targets, largest, total, entropy, to_logprob.contiguous(), to_entropy)
        for part in parts:
            own = None if bias is None else bias[part]
            slopes = _bounded(functional.linear(hidden, weight[part], own), bound) if kept is None else kept
            flattened = None if bound is None else (slopes / bound).square_().neg_().add_(1)
            _turn_into_slopes(slopes, part.start, given, temperature)
            if further is not None:
                _add_at(slopes, part.start, *further)
            if flattened is not None:
                slopes *= flattened
            if d_bias is not None:
                d_bias[part] = slopes.sum(0, dtype=torch.float32)
            # (W, rows) times (rows, d): the gradient of W rows of the head, complete, since all rows of the batch are
            # here.
            if d_weight is not None:
                torch.mm(slopes.T, hidden, out=d_weight[part])
            elif added is not None:
                add_gradient(added[part], is_new, slopes, hidden)
            if for_hidden:
                product = slopes @ weight[part]
                # (rows, d): each part of the vocabulary adds its share.
                d_hidden = product if d_hidden is None else d_hidden.add_(product)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None


def _bounded(logits: Tensor, bound: float | None) -> Tensor:
    """Return b tanh(z / b), written over the logits z."""
    return logits if bound is None else logits.div_(bound).tanh_().mul_(bound)


def _reduce(logits: Tensor, targets: Tensor, found: _Found, temperature: float) -> None:
    """Write the results of rows of ``logits`` into ``found``."""
    kernels = kernels_of(logits)
    if kernels is not None:
        kernels.head(logits, targets, found, temperature)
        return
    results = fused(_results, logits.device)
    for rows in _blocks(logits):
        made = results(logits[rows], targets[rows], temperature, found[3] is not None)
        for place, each in zip(found, made, strict=True):
            if place is not None:
                place[rows] = each


def _results(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> _Found:
    # Float32 before anything else: exp and log of bfloat16 would leave two or three digits.
    wide = logits.float() / temperature
    largest = wide.amax(1)
    shifted = wide - largest[:, None]
    masses = shifted.exp()
    total = masses.sum(1)
    normalizer = total.log()
    logprob = shifted.gather(1, targets[:, None])[:, 0] - normalizer
    entropy = normalizer - (masses * shifted).sum(1) / total if with_entropy else None
    return largest, total, logprob, entropy


def _turn_into_slopes(logits: Tensor, first: int, given: _Given, temperature: float) -> None:
    """Turn ``logits`` of the tokens from ``first`` on into their gradient, in place."""
    kernels = kernels_of(logits)
    if kernels is not None:
        kernels.head_back_(logits, first, given, temperature)
        return
    slopes, to_entropy = fused(_slopes, logits.device), given[5]
    for rows in _blocks(logits):
        targets, *others = (each[rows, None] for each in given[:5])
        pull = None if to_entropy is None else to_entropy[rows, None]
        slopes(logits[rows], targets - first, others, pull, temperature)


def _slopes(
    logits: Tensor, places: Tensor, given: Sequence[Tensor], to_entropy: Tensor | None, temperature: float
) -> None:
    largest, total, entropy, g = given
    shifted = logits.float() / temperature - largest
    pull = g if to_entropy is None else g + to_entropy * (shifted - total.log() + entropy)
    is_here = places == torch.arange(logits.shape[1], device=logits.device)
    logits.copy_((torch.where(is_here, g, 0.0) - shifted.exp() / total * pull) / temperature)


def _add_at(slopes: Tensor, first: int, tokens: Tensor, values: Tensor) -> None:
    """Add ``values`` Float[N K] at ``tokens`` Int[N K] to the slopes Float[N W] of the tokens from ``first`` on."""
    places = tokens - first
    is_here = (places >= 0) & (places < slopes.shape[1])
    # Tokens of other parts of the vocabulary add 0 to a column at the edge.
    slopes.scatter_add_(1, places.clamp_(0, slopes.shape[1] - 1), torch.where(is_here, values, 0.0).to(slopes.dtype))


def chunk_for(device: torch.device, vocabulary: int, itemsize: int = 4) -> int:
    """Return the number of tokens whose logits exist at one time: 64 MiB of them on a CPU and at least 256.

    On a CPU a micro-batch of a small model fits, and its logits are kept. A GPU needs many rows per product; there one
    float32 chunk takes at most a 64th of the memory. The gradient of the head's weight is accumulated once per chunk,
    which at a vocabulary of 150,000 moves gigabytes.

    Args:
        device: Where the logits are.
        vocabulary: Logits of a token.
        itemsize: Bytes of a logit, on a CPU.
    """
    if device.type != "cuda":
        return max(_CHUNK_TOKENS, _CHUNK_BYTES // (itemsize * vocabulary))
    return min(_CHUNK_TOKENS_GPU, max(_CHUNK_TOKENS, memory_of(device) // (_CHUNK_SHARE * 4 * vocabulary)))


def _blocks(logits: Tensor) -> list[slice]:
    """Return slices of rows that passes process at a time in float32, small enough for a CPU's cache."""
    return _chunks(len(logits), max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits))


def _columns(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> int:
    """Return the number of tokens whose logits are computed for all rows at a time, no more than in a chunk."""
    return max(_LEAST_COLUMNS, chunk_tokens * len(weight) // len(hidden) // _LEAST_COLUMNS * _LEAST_COLUMNS)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
