"""An advantage of one's own: reward less the median of its group, which one lucky answer does not move.

gnomon train tiny algorithm=examples/own_advantage.py:MEDIAN steps=3
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gnomon.algorithms import GRPO
from gnomon.algorithms.protocols import Advantage


@dataclass(frozen=True)
class AboveMedian(Advantage):
    """A_i = r_i - median of the group; of an even number of answers the lower one of the two in the middle."""

    minimum_generations: ClassVar[int] = 2

    def center(self, batch):
        """Return Float64[B T]; what could not be graded enters no median and has advantage 0."""
        same = (batch.group[:, None] == batch.group) & batch.is_graded
        median = torch.where(same, batch.rewards.double(), torch.nan).nanmedian(1).values
        counted = batch.mask & batch.is_graded[:, None]
        return torch.where(counted, (batch.rewards.double() - median)[:, None], 0.0)


MEDIAN = replace(GRPO, name="median", paper="ours", advantage=AboveMedian())
