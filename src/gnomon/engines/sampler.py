"""Draw one token a row from logits, by inverse transform of given uniforms."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.core.types import TopLogprobs
from gnomon.engines.base import Sampling
from gnomon.models.cpu.kernels import kernels_of

BLOCK = 64
_CANDIDATES = 512
_LOG2_E = math.log2(math.e)


def _exp_(exponents: Tensor) -> Tensor:
    """Replace ``exponents``, of any shape, by e to their power, in place, in float32 with relative error 1e-7 per unit.

    PyTorch's exp on a CPU is MKL's, which on other makers' CPUs takes twice as long as PyTorch's own exp2: 2.6 against
    1.3 ms for 64 rows of 49,152 (AMD EPYC, one thread).

    >>> import torch
    >>> _exp_(torch.tensor([-math.inf, 0.0])).tolist()
    [0.0, 1.0]
    """
    return exponents.mul_(_LOG2_E).exp2_() if exponents.device.type == "cpu" else exponents.exp_()


@dataclass(frozen=True)
class Draws:
    """What was drawn, one entry a row.

    tokens Int[R]; logprobs Float[R] under the distribution sampled from (tempered, truncated, renormalized);
    full_logprobs Float[R] under the tempered one without truncation and grammar. Without both, they are one tensor.
    """

    tokens: Tensor
    logprobs: Tensor
    full_logprobs: Tensor

    def listed(self) -> tuple[list[int], list[float], list[float]]:
        """Return the three as lists; from a GPU they come in one copy, each number as it is."""
        tokens, own, full = self.tokens, self.logprobs, self.full_logprobs
        # Three copies would wait for the GPU three times; token ids are exact in float64.
        if tokens.device.type != "cpu":
            tokens, own, full = torch.stack([tokens.double(), own.double(), full.double()]).cpu()
        return tokens.long().tolist(), own.tolist(), full.tolist()


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Draws:
    """Return one token a row: the smallest t with P(token <= t) > u.

    The vocabulary is summed in blocks of 64; u chooses a block, then a token in it: one pass over the logits and no
    sort, where ``torch.multinomial`` draws a random number for every entry (measured: 45 times slower).

    A token of probability zero (truncated, or so unlikely that exp underflows) is never drawn, at any u. A row with a
    NaN, or without a finite logit, gets NaN log-probabilities: the caller must refuse them.

    At temperature 0 the largest logit is taken, the lowest id of a tie. It would have probability 1, which says nothing
    of the model: both log-probabilities are those of temperature 1 without truncation.

    Args:
        logits: Float[R V], any precision; computed in float32. ``-inf`` forbids a token.
        uniforms: Float64[R] in [0, 1). Row r depends on ``logits[r]`` and ``uniforms[r]`` alone.
    """
    if sampling.is_greedy:
        # argmax takes the first of equal numbers.
        tokens = logits.argmax(dim=-1)
        own = logits.float().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        return Draws(tokens, own, own)
    kernels = None if sampling.is_truncated else kernels_of(logits)
    if kernels is not None:
        tokens, logprobs = kernels.sample(logits.contiguous(), uniforms.contiguous(), sampling.temperature)
        return Draws(tokens, logprobs, logprobs)
    wide = logits.float()
    # Shifted by the largest, so that exp cannot overflow; the shift cancels in every ratio.
    largest = wide.amax(dim=-1, keepdim=True)
    shifted = wide - largest
    if sampling.temperature != 1.0:
        shifted.div_(sampling.temperature)
    if not sampling.is_truncated:
        masses = _exp_(shifted)  # in place: at this size a new tensor costs more than the exponentials
        tokens, total = _invert(masses, uniforms)
        full = _tempered(wide, largest, tokens, sampling) - total.log()
        return Draws(tokens, full, full)
    masses = _exp_(shifted.clone())
    # `masses` stays whole: both totals, with and without truncation, come from it.
    tokens, kept_total = _invert(truncate(shifted, masses, sampling), uniforms)
    chosen = _tempered(wide, largest, tokens, sampling)
    return Draws(tokens, chosen - kept_total.log(), chosen - masses.sum(dim=-1).log())


def draw_allowed(logits: Tensor, uniforms: Tensor, sampling: Sampling, allowed: Tensor) -> Draws:
    """Return one token a row of those that a grammar allows, of which top-k, top-p and min-p then take their share.

    At temperature 0 both log-probabilities are those of `draw`, without the grammar.

    Args:
        logits: Float[R V], as in `draw`.
        uniforms: Float64[R], as in `draw`.
        allowed: Bool[R V], one at least in each row.
    """
    left = draw(torch.where(allowed.to(logits.device), logits, -math.inf), uniforms, sampling)
    # Any token and its log-probability give the sum over the vocabulary, which `draw` makes in one pass.
    whole = draw(logits, uniforms, replace(sampling, top_p=1.0, top_k=0, min_p=0.0))
    chosen, other = (logits.gather(1, drawn.tokens[:, None])[:, 0].float() for drawn in (left, whole))
    # log p(chosen) = log p(other) + (z_chosen - z_other) / T.
    full = whole.full_logprobs + (chosen - other) / (sampling.temperature or 1.0)
    return Draws(left.tokens, full if sampling.is_greedy else left.logprobs, full)


def likeliest(logits: Tensor, sampling: Sampling) -> TopLogprobs:
    """Return the ``sampling.top_logprobs`` likeliest tokens of each row, on the CPU; of the tempered distribution.

    Args:
        logits: Float[R V], any precision; computed in float32.
        sampling: Not truncated. 0 returns the whole vocabulary in the order of its ids.
    """
    wide = logits.float() / (sampling.temperature or 1.0)
    total = wide.logsumexp(dim=-1, keepdim=True)
    count, width = sampling.top_logprobs or wide.shape[1], wide.shape[1]
    if count >= width:
        return TopLogprobs(torch.arange(width, dtype=torch.int32).expand(wide.shape), (wide - total).cpu())
    values, tokens = wide.topk(count, dim=-1)
    return TopLogprobs(tokens.int().cpu(), (values - total).cpu())


def _tempered(logits: Tensor, largest: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    return ((logits.gather(1, tokens[:, None]) - largest) / sampling.temperature)[:, 0]


def truncate(shifted: Tensor, masses: Tensor, sampling: Sampling) -> Tensor:
    """Return ``masses`` with zeros where top-k, then top-p, then min-p remove a token; never a whole row.

    Top-p looks at what top-k left, renormalized; min-p compares with the likeliest token. Every cut is a threshold on
    the logit. Tokens that tie with the last kept one are therefore kept too, and the order of the vocabulary does not
    matter (transformers' top-k does the same; its top-p keeps the tied tokens that its sort put first).

    Args:
        shifted: Tempered logits minus their row's largest.
        masses: exp(shifted).
    """
    floor = torch.full_like(shifted[:, :1], -math.inf)
    if 0 < sampling.top_k < shifted.shape[1]:
        floor = shifted.topk(sampling.top_k, dim=-1).values[:, -1:]
    if sampling.top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(shifted, masses, floor, sampling.top_p))
    if sampling.min_p > 0:
        # Relative to the likeliest token, whose shifted logit is 0.
        floor = floor.clamp(min=math.log(sampling.min_p))
    return torch.where(shifted >= floor, masses, 0.0)


def _nucleus_floor(shifted: Tensor, masses: Tensor, floor: Tensor, top_p: float) -> Tensor:
    """Return the logit of the last token of the smallest likeliest set that holds ``top_p`` of the mass above floor.

    Only the likeliest few hundred are sorted, more when they do not hold enough: the same answer as a full sort.
    """
    left = torch.where(shifted >= floor, masses, 0.0)
    # Of what top-k left, not of 1: top-p looks at the renormalized rest.
    needed = top_p * left.sum(dim=-1, keepdim=True, dtype=torch.float64)
    width, count = shifted.shape[1], min(_CANDIDATES, shifted.shape[1])
    while True:
        candidates = shifted.topk(count, dim=-1).values
        held = torch.where(candidates >= floor, candidates.exp(), 0.0).double().cumsum(dim=-1)
        if count == width or bool((held[:, -1:] >= needed).all()):
            break
        count = min(8 * count, width)
    last = torch.searchsorted(held, needed).clamp_(max=count - 1)
    return candidates.gather(1, last)


def _invert(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index at which the cumulated masses pass u times their total, and the total; sums in float64."""
    rows, width = masses.shape
    whole = masses if width % BLOCK == 0 else functional.pad(masses, (0, -width % BLOCK))
    # (rows, blocks, 64)
    blocks = whole.view(rows, -1, BLOCK)
    # float64 from here on: in float32 the sum of 100,000 masses would round away the unlikely tokens.
    levels = blocks.sum(dim=-1).double().cumsum(dim=-1)
    block, rest = _pick(levels, uniforms.to(levels.device)[:, None])
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(dim=-1)
    token, _ = _pick(inner, rest)
    # Only a row of NaN can point past the end.
    return (block * BLOCK + token)[:, 0].clamp_(max=width - 1), levels[:, -1].float()


def _pick(levels: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry where cumulated ``levels`` pass ``fraction`` of the total, and how far into it that lies.

    u * total may round up to the total; the first entry that reaches the total is the last one with any mass.
    """
    total = levels[:, -1:].contiguous()
    target = fraction * total
    # right=True: a uniform of exactly a level's value belongs to the next entry, so entries without mass are never
    # drawn.
    passing = torch.searchsorted(levels, target, right=True)
    entry = torch.minimum(passing, torch.searchsorted(levels, total)).clamp_(max=levels.shape[1] - 1)
    below = torch.where(entry > 0, levels.gather(1, (entry - 1).clamp(min=0)), 0.0)
    mass = levels.gather(1, entry) - below
    return entry, ((target - below) / mass).clamp_(0.0, 1.0)
