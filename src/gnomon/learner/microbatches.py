"""Rows of a minibatch to micro-batches that fit a token budget."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.types import Batch

_RESPONSE_FIELDS = (
    "mask", "behavior", "full_behavior", "proximal", "reference", "values", "advantages", "returns",
    "weights",
)  # fmt: skip
_SEQUENCE_FIELDS = ("tokens", "routing", "free_routing")


def cut_rows(lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Return positions of ``lengths`` in cuts of at most ``max_tokens`` padded tokens, rows times longest.

    Longest first, so that a cut holds rows of nearly one length (little padding) and a run that will not
    fit into memory fails at once. Rows of one group stay together, since they share their prompt. Every position comes
    exactly once; a row above the budget goes alone. Equal lengths keep their order, so the same lengths are always cut
    alike.

    >>> cut_rows([3, 9, 4, 2, 20], max_tokens=12)
    [[4], [1], [2, 0, 3]]
    >>> cut_rows([3, 9, 4, 2], max_tokens=18, groups=[0, 0, 1, 1])
    [[1, 0], [2, 3]]
    """
    group_of = range(len(lengths)) if groups is None else groups
    longest_of: dict[int, int] = {}
    for group, length in zip(group_of, lengths, strict=True):
        longest_of[group] = max(length, longest_of.get(group, 0))
    order = sorted(range(len(lengths)), key=lambda p: (-longest_of[group_of[p]], group_of[p], -lengths[p]))
    cuts: list[list[int]] = []
    longest = 0
    for position in order:
        longest = max(longest, lengths[position])
        if cuts and (len(cuts[-1]) + 1) * longest <= max_tokens:
            cuts[-1].append(position)
            continue
        cuts.append([position])
        longest = lengths[position]
    return cuts


def micro_batches(batch: Batch, rows: Tensor, max_tokens: int) -> list[tuple[Tensor, Batch]]:
    """Return ``rows`` Int[N] of ``batch`` in cuts: which rows, and those trimmed to the longest of them."""
    cuts = cut_rows(batch.lengths[rows].tolist(), max_tokens, batch.group[rows].tolist())
    indices = [rows[torch.tensor(cut)] for cut in cuts]
    return [(index, trim(batch.rows(index))) for index in indices]


def trim(batch: Batch) -> Batch:
    """Return the batch without the columns in which every row has ended."""
    sequence = int(batch.lengths.max())
    response = int((batch.lengths - batch.prompt_lengths).max())
    cut: dict[str, Any] = {
        f.name: value[:, :response]
        for f in fields(batch)
        if f.name in _RESPONSE_FIELDS and (value := vars(batch)[f.name]) is not None
    }
    own = {name: weights[:, :response] for name, weights in batch.own_weights.items()}
    cut |= {name: vars(batch)[name][:, :sequence] for name in _SEQUENCE_FIELDS if vars(batch)[name] is not None}
    return replace(batch, **cut, own_weights=own)


def move(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on ``device``."""
    moved: dict[str, Any] = {
        f.name: v.to(device) for f in fields(batch) if isinstance(v := vars(batch)[f.name], Tensor)
    }
    own = {name: weights.to(device) for name, weights in batch.own_weights.items()}
    return replace(batch, **moved, own_weights=own)
