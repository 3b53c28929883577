"""A weight and a low-rank sum beside it, merged to the same bits on every machine."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from gnomon.types import Adapted, Snapshot

_EXACT_BITS = 53
_FRACTION_BITS, _BIAS = 52, 1023
_FLOAT_BITS = 24
_BLOCK = 1 << 20


def merged(weight: Adapted) -> Tensor:
    """Return W + scale * up @ down, computed in float32 and given in W's precision and on its device.

    **The same bits on every processor, with any number of threads.** A product of matrices in floating point has the
    bits of the order in which a kernel sums, and of half of all float32 numbers the last one differs between two CPUs.
    So each row of ``up`` and each column of ``down`` is first rounded to whole multiples of a power of two, of so few
    bits that every product, and every sum of ``rank`` of them, is a whole number below 2^53: float64 adds those without
    rounding, in any order. What follows is element by element: times the scale, rounded to float32, added to W.

    A row or column keeps 24 bits of its largest number up to rank 32, and one less for every fourfold rank: no more is
    lost than float32 itself does, next to the largest. Numbers that are not finite make the whole of it NaN.
    Source: exact products by splitting are Ozaki et al. 2012 (Numer. Algorithms 59), here with one slice; that it makes
    adapters travel alone and be proved is ours.
    """
    here = weight.base.device
    # Apple's GPUs have no float64.
    there = torch.device("cpu") if here.type == "mps" else here
    up, down = (t.detach().to(there, torch.float64) for t in (weight.up, weight.down))
    if not bool(up.isfinite().all() & down.isfinite().all()):
        return torch.full_like(weight.base, math.nan)
    bits = min(_FLOAT_BITS, (_EXACT_BITS - math.ceil(math.log2(max(1, up.shape[1])))) // 2)
    up, down = _whole(up, 1, bits), _whole(down, 0, bits)
    if weight.is_transposed:
        up, down = down.T, up.T
    result = torch.empty_like(weight.base)
    # So much that float64 stays in the cache of a CPU; a GPU has it done at once.
    rows = max(1, _BLOCK // max(1, down.shape[1])) if there.type == "cpu" else max(1, up.shape[0])
    for left, base, place in zip(up.split(rows), weight.base.detach().split(rows), result.split(rows), strict=True):
        # The sign of a zero would be the kernel's; plus zero there is none below it.
        update = (left @ down).mul_(weight.scale).add_(0.0).float().to(here)
        place.copy_(update.add_(base))
    return result


def whole(named: Iterable[tuple[str, Tensor | Adapted]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as a tensor."""
    for name, weight in named:
        yield name, merged(weight) if isinstance(weight, Adapted) else weight


def snapshot_of(version: int, parts: Callable[[], Iterator[tuple[str, Tensor | Adapted]]]) -> Snapshot:
    """Return the weights that ``parts`` yields whenever it is called, merged or not as whoever reads them likes."""
    return Snapshot(version, lambda: whole(parts()), parts=parts)


def _whole(matrix: Tensor, axis: int, bits: int) -> Tensor:
    """Return ``matrix`` with each line along ``axis`` rounded to whole multiples of a power of two, below 2^``bits``.

    The largest magnitude of a line lies in [2^(e-1), 2^e), so that multiples of 2^(e-bits) are at most 2^bits of them.
    """
    exponent = torch.frexp(matrix.abs().amax(axis, keepdim=True)).exponent
    # Powers of two by their bits: other ways to them round, or underflow, on some device.
    unit = ((exponent.long() - bits + _BIAS) << _FRACTION_BITS).view(torch.float64)
    return (matrix / unit).round_().mul_(unit)
