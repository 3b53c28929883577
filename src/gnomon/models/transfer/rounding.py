"""Weights rounded to few bits before they are sent, so that any engine answers as a low-precision one would."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gnomon.core.types import Snapshot

Kind = Literal["fp8", "int8", "int4"]
LEVELS: Mapping[str, int] = {"int8": 127, "int4": 7}
_FP8_MAX = 448.0
_DROPPED_BITS = 0xFF
_TINIEST = 2.0**-100
_CACHED = 1 << 16


def rounded(snapshot: Snapshot, kind: Kind, axes: Mapping[str, int]) -> Snapshot:
    """Return the snapshot with some of its matrices rounded and put back into the precision that they came in.

    An engine needs to know nothing of it, and computes in its own precision: what is simulated is the choice of
    weights, which decides what is sampled, and not the speed. The learner's tensors are not touched, each is rounded
    when it is read, and one rounded copy exists at a time.

    Args:
        axes: Name to the axis over which a matrix's inputs run; each output channel has a scale of its own. Weights
            that are not named travel as they are: see `cpu.packed_linear.input_axes` for which and why.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in snapshot.tensors():
            yield name, round_matrix(tensor, kind, axes[name]) if name in axes else tensor

    return Snapshot(snapshot.version, tensors)


def round_matrix(weights: Tensor, kind: Kind, axis: int = -1) -> Tensor:
    """Return ``weights``, at least two axes of them, rounded for each channel; ``axis`` is that of its inputs."""
    # (..., inputs) becomes (channels, inputs): one row a channel, which has its own scale.
    moved = weights.detach().movedim(axis, -1)
    channels = moved.reshape(-1, moved.shape[-1])
    result = torch.empty_like(channels)
    # On a CPU a few channels at a time: what is computed on the way stays in the cache.
    at_once = max(1, _CACHED // max(1, channels.shape[1])) if weights.device.type == "cpu" else max(1, len(channels))
    for given, place in zip(channels.split(at_once), result.split(at_once), strict=True):
        place.copy_(ROUNDINGS[kind](given.float()))
    return result.view(moved.shape).movedim(-1, axis).contiguous()


def fp8(channels: Tensor) -> Tensor:
    """Return the nearest numbers that fp8 (e4m3: 4 bits of exponent, 3 of fraction) has, scaled for each row.

    The scale is the power of two that brings the channel's largest magnitude into (224, 448], 448 being the format's
    largest number. Of w with scale s the error is at most |w| / 16, or s / 1024 near zero. A power of two, as in the
    microscaling formats, and not max / 448: a format that floats loses nothing by it but the last of its 15 binary
    orders of range, and it makes rounding idempotent and exact in bfloat16, so that nothing else is mixed into what is
    measured.
    Source: Micikevicius et al. 2022, arXiv 2209.05433 (e4m3); per-channel scales are usual in engines.
    """
    fraction, exponent = torch.frexp(_largest(channels) / _FP8_MAX)
    # The number is fraction * 2^exponent with fraction in [1/2, 1): exactly 1/2 needs one power less.
    scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
    # Adding 1.5 * 2^23 units and subtracting it again leaves whole units: here the format's least step, 2^-9.
    # 1.5 * 2^23 steps of 2^-9.
    shift = scale * (1.5 * 2**14)
    small = (channels + shift).sub_(shift)
    # Rounding half to even at the 4th significant bit is an addition to the float's own bits.
    bits = channels.view(torch.int32)
    normal = ((bits >> 20) & 1).add_(bits).add_(0x7FFFF).bitwise_and_(~0xFFFFF).view(torch.float32)
    return torch.where(channels.abs() < scale * 2**-6, small, normal)


def integers(channels: Tensor, levels: int) -> Tensor:
    """Return the nearest of the 2 ``levels`` + 1 evenly spaced numbers from -max to max of each row.

    w becomes round(w / s) s with s = max / levels; symmetric, so that zero stays zero, and ties go to even. The scale
    is rounded up to 16 significant bits, so that every product is exact in float32 and rounding idempotent there; in
    bfloat16 the result is rounded once more. The error is at most s / 2.
    Source: the symmetric scheme of Jacob et al. 2018, arXiv 1712.05877, section 2.1, by channel.
    """
    scale = _largest(channels) / levels
    scale = ((scale.view(torch.int32) + _DROPPED_BITS) & ~_DROPPED_BITS).view(torch.float32)
    return (channels / scale).round_().mul_(scale)


def _largest(channels: Tensor) -> Tensor:
    # A channel of zeros has any scale; one that is nearly so would have a scale that underflows.
    return channels.abs().amax(-1, keepdim=True).clamp_(min=_TINIEST)


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fp8": fp8,
    "int8": partial(integers, levels=LEVELS["int8"]),
    "int4": partial(integers, levels=LEVELS["int4"]),
}
"""Float32 channels [n, inputs] to the rounded ones."""
