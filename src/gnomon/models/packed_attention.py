"""Attention over packed rows on any device: the choice of the kernel, and its description of the rows.

| kernel | scores that it computes | where |
|---|---|---|
| branches | those needed (C), or answers padded to similar lengths | any device; C on a CPU |
| flex | blocks of 128 queries by 128 keys in which a pair is visible | a GPU with Triton |
| varlen | of rows that share no prompt, those needed up to the kernel's tiles | a GPU, half precision |
| dense | the whole square of each packed row, with a mask | any device; the reference |

With flex and varlen all rows of a micro-batch lie one behind another, and nothing is padded. FlexAttention is told
which blocks hold a visible pair and which are visible whole; both are counted from the interval that each position sees
(`PrefixLayout.sight`), so no mask of all pairs is ever made. A kernel other than "branches" is tried before its first
use, forward and backward, against SDPA with a dense mask.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.core.errors import ConfigError
from gnomon.models.cpu.prefix_attention import (
    Alteration,
    PrefixLayout,
    Span,
    altered_attention,
    branched_attention,
)
from gnomon.models.slow import warn_slow

Given = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""
VARIABLE = "GNOMON_ATTENTION"
KERNELS = ("branches", "flex", "dense")
BLOCK = 128
"""Queries and keys of a block of FlexAttention, which its kernels' tiles divide."""
AS_THEY_COME = Alteration()
_HALF = (torch.bfloat16, torch.float16)
_MOST_PAIRS = 1 << 24
"""Of positions and blocks that are looked at together: 64 MiB."""
_TRIED = (Span(0, 150, [(150, 40), (190, 200)]), Span(390, 7, [(397, 130)]))
_TRIED_POSITIONS = 530
_TRIED_WINDOW = 60
_OFF = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 2e-3, torch.float64: 1e-6}
"""Of the reference's length, what a kernel may differ by; a wrong mask is 0.1 and more."""


def kernel_for(device: torch.device) -> str:
    """Return the kernel for packed rows with shared prompts on ``device``, as the run card and `plan` name it.

    Raises:
        ConfigError: GNOMON_ATTENTION, which overrides the choice, names no kernel.

    >>> kernel_for(torch.device("cpu"))
    'branches'
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in ("auto", *KERNELS):
        raise ConfigError(f"{VARIABLE} must be 'auto' or one of {', '.join(KERNELS)}, got '{asked}'")
    if asked != "auto":
        return asked
    return "flex" if device.type == "cuda" and has_triton() else "branches"


@cache
def has_triton() -> bool:
    """Whether torch.compile can make kernels for a GPU."""
    return importlib.util.find_spec("triton") is not None


def works(kernel: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> bool:
    """Whether a kernel gives the reference's numbers on ``device``, found by one trial; every run is told why not.

    Args:
        heads: Heads of queries, of keys, and their size.
    """
    if kernel == "varlen" and (device.type != "cuda" or dtype not in _HALF or not has_varlen()):
        return False
    why = _fault(kernel, device, dtype, heads)
    if why:
        warn_slow("kernel", f"{kernel} attention", device=device, why=why, variable=VARIABLE)
    return not why


@cache
def _fault(kernel: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """Return why a kernel cannot be used; "" where it can."""
    try:
        # The first use may be in an engine's thread under inference mode, and the trial needs gradients.
        with torch.inference_mode(False), torch.enable_grad():
            # With and without a window: models have layers of both kinds.
            off = max(distance(kernel, device, dtype, heads, Alteration(w)) for w in (None, _TRIED_WINDOW))
        return f"it is {off:.2g} from the reference" if not off <= _OFF[dtype] else ""
    except Exception as error:  # whatever a compiler or a driver raises
        return f"{type(error).__name__}: {error}"[:300]


def distance(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    altered: Alteration = AS_THEY_COME,
) -> float:
    """Return how far a kernel is from a dense mask in float32: result and gradients, of their length.

    Args:
        heads: Heads of queries, of keys, and their size.
        altered: Of the scores; sinks have a gradient too.
    """
    # varlen knows no shared prompt.
    spans = _TRIED if kernel != "varlen" else _TRIED[1:]
    layout = PrefixLayout([*spans], _TRIED_POSITIONS)
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    drawn = [torch.randn(1, count, _TRIED_POSITIONS, heads[2], generator=generator).to(dtype) for count in counts]
    # Padding gives zeros in one kernel and itself in another.
    inside = torch.zeros(_TRIED_POSITIONS)
    for span in spans:
        inside[span.first : span.first + span.prompt + sum(length for _, length in span.responses)] = 1
    weight = drawn[3].float().transpose(1, 2) * inside[:, None, None]
    found = []
    sinks = [] if altered.sinks is None else [altered.sinks]
    for way, where, precision in (("dense", torch.device("cpu"), torch.float32), (kernel, device, dtype)):
        leaves = [each.to(where, precision).detach().requires_grad_() for each in (*drawn[:3], *sinks)]
        own = replace(altered, sinks=leaves[3]) if sinks else altered
        out = attend_packed((leaves[0], leaves[1], leaves[2]), layout.on(where, way), heads[2] ** -0.5, own)
        (out * weight.to(where, precision)).sum().backward()
        gradients = (each.grad.cpu().float() for each in leaves if each.grad is not None)
        found.append([out.detach().cpu().float() * inside[:, None, None], *gradients])
    # A gradient that should be zero is rounding: of a length of 1 at least.
    return max(float((ours - exact).norm() / exact.norm().clamp(min=1)) for exact, ours in zip(*found, strict=True))


def attend_packed(given: Given, layout: PrefixLayout, scale: float, altered: Alteration = AS_THEY_COME) -> Tensor:
    """Return the attention's output Float[N L H d] over N packed rows; padding gets any finite number.

    Args:
        given: Queries Float[N H L d], keys and values Float[N K L d], which H / K query heads share.
        layout: Of these N L positions, on their device; its kernel is one of the table above, and flex and varlen
            take one row.
        scale: Of the scores.
        altered: What else becomes of the scores.
    """
    kernel = "flex" if layout.kernel == "varlen" and not altered.is_plain else layout.kernel
    if kernel == "flex":
        return _flex(given, layout, scale, altered)
    if kernel == "varlen":
        return _varlen(given, layout, scale, altered.window)
    if kernel == "dense":
        return _dense(given, layout, scale, altered)
    rows, heads, length, size = given[0].shape
    # (N L, H + 2 K, d): queries, keys and values of a position side by side, as `branched_attention` takes them.
    made = torch.cat([each.transpose(1, 2) for each in given], dim=2).flatten(0, 1)
    if altered.is_plain:
        return branched_attention(made, heads, layout, scale, altered.window).view(rows, length, heads, size)
    return altered_attention(made, heads, layout, scale, altered).view(rows, length, heads, size)


def _dense(given: Given, layout: PrefixLayout, scale: float, altered: Alteration) -> Tensor:
    query, key, value = given
    rows, heads = query.shape[:2]
    mask = layout.once(("dense", altered.window), lambda: dense_mask(layout, rows, altered.window).to(query.device))
    # The reference copies keys for each query head: slow, and plain to see.
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    if altered.is_plain:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if altered.softcap is not None:
        scores = altered.softcap * torch.tanh(scores / altered.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if altered.sinks is not None:
        total = torch.logaddexp(total, altered.sinks[:, None, None].float())
    return ((scores - total).exp().to(value.dtype) @ value).transpose(1, 2)


def dense_mask(layout: PrefixLayout, rows: int, window: int | None = None) -> Tensor:
    """Return the layout as Bool[rows 1 L L] on the CPU, true where a position may look; padding sees itself."""
    own, low, end = (each.view(rows, 1, -1, 1) for each in layout.sight(window))
    here = torch.arange(layout.positions).view(rows, 1, -1)
    keys, queries = here[:, :, None], here[..., None]
    return ((own <= keys) & (keys <= queries)) | ((low <= keys) & (keys < end))


def visible_pairs(layout: PrefixLayout, window: int | None = None, size: int = BLOCK) -> Tensor:
    """Return the visible pairs in each block of ``size`` queries by ``size`` keys, Int[n n]; their sum is needed.

    Computed on the layout's device: a loop over blocks would take as long as a small model's attention.
    """
    missing = -layout.positions % size
    sight = (functional.pad(each, (0, missing)).int() for each in layout.sight(window))
    own, low, end = (each.to(layout.device) for each in sight)
    first = torch.arange(0, layout.positions, size, device=layout.device, dtype=torch.int32)
    beyond = torch.arange(1, len(own) + 1, device=layout.device, dtype=torch.int32)
    # Rows of padding behind the last position see nothing.
    beyond[layout.positions :] = 0
    many = max(1, _MOST_PAIRS // (size * len(first))) * size
    found = []
    parts = (each.split(many) for each in (own, beyond, low, end))
    for mine, here, low_part, end_part in zip(*parts, strict=True):
        seen = _overlap(mine, here, first, size).add_(_overlap(low_part, end_part, first, size))
        found.append(seen.view(-1, size, len(first)).sum(1))
    return torch.cat(found)


def _overlap(begin: Tensor, stop: Tensor, first: Tensor, size: int) -> Tensor:
    low = torch.maximum(begin[:, None], first)
    return torch.minimum(stop[:, None], first + size).sub_(low).clamp_(min=0)


def _flex(given: Given, layout: PrefixLayout, scale: float, altered: Alteration) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value = given
    settings: dict[str, Any] = {
        "block_mask": layout.once(("flex", altered.window), lambda: block_mask(layout, altered.window)),
        "score_mod": None if altered.softcap is None else _capped(altered.softcap),
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if altered.sinks is None:
        out = _flexible(query.device.type)(query, key, value, **settings)
    else:
        # The sink takes its share of the sum: 1 / (1 + exp(sink - lse)).
        out, of = _flexible(query.device.type)(query, key, value, **settings, return_aux=AuxRequest(lse=True))
        out = out * torch.sigmoid(of.lse - altered.sinks[:, None].float())[..., None].to(out.dtype)
    found: Tensor = out.transpose(1, 2)
    return found


@cache
def _capped(bound: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


def block_mask(layout: PrefixLayout, window: int | None = None) -> Any:
    """Return FlexAttention's mask of one packed row on the layout's device."""
    from torch.nn.attention.flex_attention import BlockMask

    own, low, end = (each.to(layout.device, torch.int32) for each in layout.sight(window))
    pairs = visible_pairs(layout, window)
    # The last blocks may be cut off; they are never visible whole, which costs nothing but a look at the mask.
    is_whole = pairs == BLOCK * BLOCK
    # Blocks that are visible whole are computed without looking at the mask.
    partly, whole = (_ordered(each) for each in ((pairs > 0) & ~is_whole, is_whole))

    def sees(batch: Tensor, head: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        is_own = (own[queries] <= keys) & (keys <= queries)
        return is_own | ((low[queries] <= keys) & (keys < end[queries]))

    return BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(layout.positions, layout.positions)
    )


def _ordered(is_there: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row of Bool[n n] are there, and all of them, those first: Int32[1 1 n (n)]."""
    # Stable, so that blocks are visited in their order in memory.
    order = is_there.int().argsort(dim=1, descending=True, stable=True)
    return is_there.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@cache
def _flexible(kind: str) -> Any:
    """Return FlexAttention, compiled on a GPU; elsewhere as plain operations that make all scores, for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if kind == "cuda" else flex_attention


@cache
def has_varlen() -> bool:
    """Whether this torch has variable-length attention with grouped heads and windows."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _varlen(given: Given, layout: PrefixLayout, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Computed once for all layers: their spans are the same.
    edges, longest = layout.once("varlen", lambda: row_edges(layout))
    query, key, value = (each[0].transpose(0, 1) for each in given)
    # varlen counts the positions before the query, of which it sees as many and itself.
    seen = (-1 if window is None else window - 1, 0)
    is_grouped = query.shape[1] != key.shape[1]
    out: Any = varlen_attn(
        query, key, value, edges, edges, longest, longest, scale=scale, window_size=seen, enable_gqa=is_grouped
    )
    found: Tensor = out[None]
    return found


def row_edges(layout: PrefixLayout) -> tuple[Tensor, int]:
    """Return where rows that share no prompt begin and end, Int32[rows + 1], and the longest; padding is one more."""
    ends = [span.first + span.prompt + sum(length for _, length in span.responses) for span in layout.spans]
    edges = torch.tensor([0, *ends, *[layout.positions] * (ends[-1] < layout.positions)])
    return edges.to(layout.device, torch.int32), int(edges.diff().max())
