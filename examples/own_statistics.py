"""A statistic of the whole step: P3O's cap (arXiv 2605.12380), by the effective size of the good answers' ratios alone.

gnomon train tiny algorithm=examples/own_statistics.py:POSITIVE_CAP steps=3 algorithm.updates.minibatches=2
"""

from dataclasses import dataclass, replace

from gnomon.algorithms import GRPO, Ratio
from gnomon.core.metrics import EffectiveSize, Last, Metrics


@dataclass(frozen=True)
class CapByPositiveSize:
    """Policy gradient whose weight where the advantage is positive is at most those ratios' effective size."""

    def terms(self, view):
        """Return terms of each token by name; gnomon adds each up over the step, however it is cut."""
        is_up, ratio = (view.advantages > 0).double(), view.log_ratio.detach().double().exp()
        return {"up": is_up, "up_ratio": is_up * ratio, "up_square": is_up * ratio**2}

    def __call__(self, view):
        """Return the loss of each token, and the cap."""
        size = EffectiveSize(*(view.statistics.total(name) for name in ("up", "up_ratio", "up_square"))).value
        ratio = view.log_ratio.detach().exp()
        weight = ratio.clamp(max=size).where(view.advantages > 0, ratio)
        return -view.advantages * weight * view.current, Metrics.of({"loss/positive_ess_fraction": Last(size)})


POSITIVE_CAP = replace(GRPO, name="positive_cap", ratio=Ratio(anchor="behavior"), surrogate=CapByPositiveSize())
