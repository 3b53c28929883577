"""Accumulate gradients in float32 outside of autograd.

A dense gradient of an embedding is as large as the embedding, although a micro-batch touches few rows. A tied head has
such a gradient too, and autograd keeps one until the other arrives, from one end of a backward pass to the other. Both
are the largest tensors of a small model. If a weight has a `GradientSum`, backward passes add their parts to it and
give autograd no gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gnomon.models.cpu.kernels import kernels_of

_BLOCK = 2**20
_LARGE = 2**23
"""Numbers of a sum whose memory stays."""


def add(total: Tensor, addend: Tensor) -> None:
    """Add ``addend`` to ``total`` Float32, in place; the same numbers as ``total += addend``.

    torch first converts the whole addend to float32, through memory. On a CPU this function works in blocks that stay
    in the cache: a third of the time for a head of 28 million weights.
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
            # The master's gradient itself: the optimizer finds the sum there, and nothing is copied at the end of the
            # step.
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
    # On the weight, so that a backward pass finds it from the tensor that it has.
    vars(weight)["gradient_sum"] = found
    return found


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum of a weight's gradients; None if autograd accumulates them."""
    found: GradientSum | None = getattr(weight, "gradient_sum", None)
    return found


def add_gradient(total: Tensor, is_new: bool, gradient: Tensor, inputs: Tensor) -> None:
    """Add gradient Float[R N] transposed times inputs Float[R M] to ``total`` Float32[N M], which ``is_new``: empty."""
    kernels = kernels_of(gradient)
    if kernels is not None and kernels.may_add_gradient(*inputs.shape, len(total)):
        kernels.add_gradient_([total], is_new, gradient.contiguous(), inputs.contiguous())
    elif is_new:
        total.copy_(gradient.T @ inputs)
    else:
        add(total, gradient.T @ inputs)


def weight_gradients(
    gradient: Tensor, inputs: Tensor, sizes: Sequence[int], sums: Sequence[GradientSum | None]
) -> Sequence[Tensor | None]:
    """Return the gradients of weights Float[N M], from gradient Float[R, sum of N] and inputs Float[R M].

    With matrix registers they are added to their sums in float32 instead, if all have one, and None is returned for
    each: no gradient is rounded on its way, or goes through memory twice.

    Args:
        gradient: Of the weights' products side by side.
        inputs: What all were multiplied with.
        sizes: N of each weight.
        sums: Of each weight.
    """
    kernels, totals = kernels_of(gradient), [total for total in sums if total is not None]
    if kernels is None or len(totals) < len(sums) or not kernels.may_add_gradient(*inputs.shape, *sizes):
        parts: Sequence[Tensor] = (gradient.T @ inputs).split(list(sizes))
        return parts
    begun = [total.begin() for total in totals]
    # The kernel writes or adds to all sums alike, so where some are new and some not, the new ones begin at zero.
    is_new = all(new for _, new in begun)
    for total, new in begun:
        if new and not is_new:
            total.zero_()
    kernels.add_gradient_([total for total, _ in begun], is_new, gradient.contiguous(), inputs.contiguous())
    return [None] * len(sums)
