"""Accumulate gradients in float32 outside of autograd.

A dense gradient of an embedding is as large as the embedding, although a micro-batch touches few rows. A tied head has
such a gradient too, and autograd keeps one until the other arrives, from one end of a backward pass to the other. Both
    are
the largest tensors of a small model. If a weight has a `GradientSum`, backward passes add their parts to it and give
autograd no gradient.
"""

import torch
from torch import Tensor, nn

_BLOCK = 2**20
_LARGE = 2**23
"""Numbers of a sum whose memory stays."""


def add(total: Tensor, addend: Tensor) -> None:
    """Add ``addend`` to ``total`` Float32, in place; the same numbers as ``total += addend``.

    torch first converts the whole addend to float32, through memory. On a CPU this function works in blocks that stay
        in the
    cache: a third of the time for a head of 28 million weights.
    """
    is_plain = type(total) is type(addend) is Tensor and total.device.type == addend.device.type == "cpu"
    if addend.dtype == total.dtype or not is_plain or not (total.is_contiguous() and addend.is_contiguous()):
        total += addend
        return
    buffer = torch.empty(min(_BLOCK, total.numel()), dtype=total.dtype)
    for part, more in zip(total.view(-1).split(_BLOCK), addend.view(-1).split(_BLOCK), strict=True):
        part += buffer[: len(more)].copy_(more)


class GradientSum:
    """The accumulated gradient of a weight over a step: the ``grad`` of its float32 master, or its own.

    A large sum keeps its memory from step to step, because a hundred megabytes in one piece are seldom free in the
    middle of a backward pass.

    Args:
        master: Has the weight's shape; may be the weight.
    """

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master
        self._kept: Tensor | None = None

    def begin(self) -> tuple[Tensor, bool]:
        """Return the sum, and whether it is new: a new sum holds no numbers yet, and every part has to be written."""
        found, is_new = self._master.grad, self._master.grad is None
        if found is None:
            found = self._kept if self._kept is not None else torch.empty_like(self._master, requires_grad=False)
            self._kept = found if found.numel() >= _LARGE else None
            self._master.grad = found
        return found, is_new

    def add(self, addend: Tensor) -> None:
        """Add a gradient of the whole weight."""
        total, is_new = self.begin()
        if is_new:
            total.copy_(addend)
        else:
            add(total, addend)

    def add_rows(self, index: Tensor, addend: Tensor) -> None:
        """Add ``addend`` Float[N d] to the rows ``index`` Int[N], which may repeat."""
        total, is_new = self.begin()
        if is_new:
            total.zero_()
        total.index_add_(0, index, addend.to(total.dtype))


def add_up(weight: nn.Parameter, master: nn.Parameter) -> GradientSum:
    """Accumulate gradients of ``weight`` in ``master.grad`` and return the sum."""
    found = GradientSum(master)
    vars(weight)["gradient_sum"] = found
    return found


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum of a weight's gradients; None if autograd accumulates them."""
    found: GradientSum | None = getattr(weight, "gradient_sum", None)
    return found
