"""Made batches, and the loss and the gradient on them: what laws and trials of pieces are made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon.algorithms.algorithm import Algorithm
from gnomon.types import Batch

Rows = Sequence[Sequence[float]]
_PER_TOKEN = ("behavior", "full_behavior", "proximal", "reference", "values", "advantages", "returns", "weights")
_PER_ROW = ("baseline", "bootstrap")


def make_batch(
    rewards: Sequence[float | None],
    mask: Sequence[Sequence[int | bool]],
    group: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Batch:
    """Return a valid batch from lists; each prompt is one token.

    rewards: one a row; None is a response that could not be graded, and its mask becomes false. mask: one list a row;
    shorter rows are padded. group: all rows are one group when it is left out.
    more: behavior (-1 when left out), full_behavior (behavior), proximal, reference, values, advantages, returns,
    weights as lists of rows; baseline, bootstrap, version, is_truncated as lists; temperature.

    >>> batch = make_batch([1.0, None], [[1, 1], [1]])
    >>> batch.mask.tolist(), batch.is_graded.tolist()
    ([[True, True], [False, False]], [True, False])
    """
    rows, width = len(rewards), max((len(row) for row in mask), default=0)
    graded = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
    lengths = torch.tensor([len(row) for row in mask], dtype=torch.long)
    per_token = {name: _padded(more.pop(name), width, dtype) for name in _PER_TOKEN if name in more}
    behavior = per_token.pop("behavior", torch.full((rows, width), -1.0, dtype=dtype))
    per_row = {name: torch.tensor(more.pop(name), dtype=dtype) for name in _PER_ROW if name in more}
    batch = Batch(
        tokens=torch.zeros((rows, 1 + width), dtype=torch.long),
        prompt_lengths=torch.ones(rows, dtype=torch.long),
        lengths=lengths,
        mask=_padded(mask, width, torch.bool) & graded[:, None],
        rewards=torch.tensor([r or 0.0 for r in rewards], dtype=dtype),
        is_graded=graded,
        is_truncated=torch.tensor(more.pop("is_truncated", [False] * rows), dtype=torch.bool),
        group=torch.tensor([0] * rows if group is None else group, dtype=torch.long),
        version=torch.tensor(more.pop("version", [0] * rows), dtype=torch.long),
        behavior=behavior,
        full_behavior=per_token.pop("full_behavior", behavior),
    )
    return batch.with_fields(**per_token, **per_row, **more)


def loss_and_gradient(
    algorithm: Algorithm, minibatch: Batch, current: Tensor, cuts: Iterable[Sequence[int]] | None = None
) -> tuple[float, Tensor]:
    """Return the loss of one optimizer step and d loss / d current Float[B T], summed over ``cuts`` of its rows.

    minibatch: prepared, not weighed. The entropy that pieces see is -current / 2, so that its gradient counts too.
    """
    weighed = algorithm.weigh(minibatch)
    statistics = algorithm.statistics(current, weighed)
    total, gradient = 0.0, torch.zeros_like(current)
    for rows in [range(len(weighed))] if cuts is None else cuts:
        where = torch.tensor(list(rows), dtype=torch.long)
        leaf = current.detach()[where].requires_grad_()
        loss = algorithm.loss(leaf, -leaf / 2, weighed.rows(where), statistics)
        (slope,) = torch.autograd.grad(loss.total, leaf)
        total += float(loss.total.detach())
        gradient[where] = slope
    return total, gradient


def _padded(rows: Sequence[Sequence[Any]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype).reshape(len(rows), width)
