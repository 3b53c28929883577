"""A loss with a statistic of the whole step: P3O's cap, by the effective size of the good answers' ratios alone.

gnomon train tiny algorithm=examples/own_statistics.py:POSITIVE_CAP steps=3 algorithm.updates.minibatches=2
"""

from dataclasses import dataclass, replace

import torch

from gnomon.algorithms import GRPO, LossInputs, Ratio
from gnomon.core.metrics import EffectiveSize, Last, Metrics


@dataclass(frozen=True)
class CapByPositiveSize:
    """Policy gradient whose weight on tokens with a positive advantage is at most their ratios' effective size.

    P3O (arXiv 2605.12380) caps by the size of all ratios; here tokens of bad answers, whose ratios are pushed down, do
    not lower the cap of the good ones. ``terms`` names per-token terms; gnomon adds each up over all trained tokens of
    the step, however the step is cut, and hands the sums to the call.
    """

    def terms(self, view: LossInputs):
        """Return what the effective size is made of: number, sum and sum of squares of the ratios."""
        is_up = (view.advantages > 0).double()
        ratio = view.log_ratio.detach().double().exp()
        return {"up": is_up, "up_ratio": is_up * ratio, "up_square": is_up * ratio**2}

    def __call__(self, view: LossInputs):
        """Return the loss of each token, and the cap."""
        size = EffectiveSize(*(view.statistics.total(name) for name in ("up", "up_ratio", "up_square"))).value
        ratio = view.log_ratio.detach().exp()
        weight = torch.where(view.advantages > 0, ratio.clamp(max=size), ratio)
        return -view.advantages * weight * view.current, Metrics.of({"loss/positive_ess_fraction": Last(size)})


POSITIVE_CAP = replace(
    GRPO, name="positive_cap", paper="arXiv 2605.12380", ratio=Ratio(anchor="behavior"), surrogate=CapByPositiveSize()
)
