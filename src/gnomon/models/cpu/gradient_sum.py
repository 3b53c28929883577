"""Sums in float32 of what is in lower precision, and gradients that go where they are added up.

A dense gradient of an embedding has as many numbers as the embedding, of which a micro-batch touches some rows; a head
that is the same weight has such a gradient too, and autograd keeps it until the other has come, from one end of a
backward pass to the other. Both are the largest tensors of a small model. Where a weight has a `GradientSum`, whoever
makes its gradient in parts adds those to it and gives autograd none.
"""

import torch
from torch import Tensor, nn

_BLOCK = 2**20
_LARGE = 2**23
"""Numbers of a sum whose memory stays."""


def add(total: Tensor, addend: Tensor) -> None:
    """Add ``addend`` to ``total`` Float32, in place; the same numbers as ``total += addend``.

    torch makes the whole addend float32 first, through memory and back. On a CPU it is done a block at a time here,
    which stays in the cache: a third of the time for a head of 28 million weights.
    """
    is_plain = type(total) is type(addend) is Tensor and total.device.type == addend.device.type == "cpu"
    if addend.dtype == total.dtype or not is_plain or not (total.is_contiguous() and addend.is_contiguous()):
        total += addend
        return
    buffer = torch.empty(min(_BLOCK, total.numel()), dtype=total.dtype)
    for part, more in zip(total.view(-1).split(_BLOCK), addend.view(-1).split(_BLOCK), strict=True):
        part += buffer[: len(more)].copy_(more)


class GradientSum:
    """Where the gradient of a weight is added up over a step: the ``grad`` of its float32 master, or its own.

    master: has the weight's shape; may be the weight. The memory of a large sum stays from step to step: a hundred
    megabytes in one piece are seldom free in the middle of a backward pass.
    """

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master
        self._kept: Tensor | None = None

    def begin(self) -> tuple[Tensor, bool]:
        """Return the sum, and whether it is new: then it holds nothing yet, and every part has to be written."""
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
        """Add ``addend`` Float[N d] to the rows ``index`` Int[N], which may come several times."""
        total, is_new = self.begin()
        if is_new:
            total.zero_()
        total.index_add_(0, index, addend.to(total.dtype))


def add_up(weight: nn.Parameter, master: nn.Parameter) -> GradientSum:
    """Let the gradients of ``weight`` be added up in ``master.grad`` by whoever makes them in parts; return the sum."""
    found = GradientSum(master)
    vars(weight)["gradient_sum"] = found
    return found


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return where the gradients of ``weight`` are added up; None where autograd does it."""
    found: GradientSum | None = getattr(weight, "gradient_sum", None)
    return found
