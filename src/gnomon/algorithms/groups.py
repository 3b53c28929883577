"""Sums over the graded rows of one group, given back to each of its rows. Always in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.types import Batch


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, and which rows count.

    index Int[B]: group of each row, numbered from 0. counted Bool[B]: rows that enter statistics; errors do
    not.
    Why float64: six equal rewards 0.3 in float32 have a computed deviation of 1e-8 and, divided by it, an
    advantage.
    """

    index: Tensor
    counted: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Groups":
        """Return the groups of ``batch`` with its graded rows."""
        return cls(torch.unique(batch.group, return_inverse=True)[1], batch.is_graded)

    def total(self, values: Tensor) -> Tensor:
        """Return Float64[B]: the sum of ``values`` over the counted rows of each row's group."""
        kept = torch.where(self.counted, values.double(), 0.0)
        return self._empty(0.0).index_add(0, self.index, kept)[self.index]

    @property
    def size(self) -> Tensor:
        """Float64[B]: counted rows in each row's group."""
        return self.total(torch.ones(len(self.index), dtype=torch.float64))

    def mean(self, values: Tensor) -> Tensor:
        """Return Float64[B]: the group's mean; 0 for a group without counted rows."""
        return self.total(values) / self.size.clamp(min=1)

    def deviation(self, values: Tensor, ddof: int) -> Tensor:
        """Return Float64[B]: the group's standard deviation; 0 where fewer than ``ddof`` + 1 rows count."""
        squares = self.total((values.double() - self.mean(values)).square())
        return (squares / (self.size - ddof).clamp(min=1)).sqrt()

    def differ(self, values: Tensor) -> Tensor:
        """Return Bool[B]: whether the group's counted values are not all equal, compared as they are."""
        exact = values.double()
        high = torch.where(self.counted, exact, -torch.inf)
        low = torch.where(self.counted, exact, torch.inf)
        largest = self._empty(-torch.inf).scatter_reduce(0, self.index, high, "amax")
        smallest = self._empty(torch.inf).scatter_reduce(0, self.index, low, "amin")
        return (largest > smallest)[self.index]

    def _empty(self, value: float) -> Tensor:
        count = int(self.index.max()) + 1 if len(self.index) else 0
        return torch.full((count,), value, dtype=torch.float64)
