"""Numbers over trained tokens: fractions, averages, and what one optimizer step says about itself beforehand."""

from dataclasses import dataclass

from torch import Tensor

from gnomon.algorithms.ratios import masked
from gnomon.metrics import EffectiveSize, Mean


def fraction(condition: Tensor, mask: Tensor) -> Mean:
    """Return the fraction of trained tokens for which ``condition`` Bool[B T] holds."""
    return Mean(float((condition & mask).sum()), float(mask.sum()))


def average(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of ``values`` Float[B T] over trained tokens."""
    return Mean(float(masked(values.detach(), mask).sum()), float(mask.sum()))


@dataclass(frozen=True)
class Statistics:
    """Effective sizes of the current policy's ratios, over all trained tokens of an optimizer step.

    behavior: of current / behavior. proximal: of current / proximal. They are sums, so those of cuts and ranks add up.
    """

    behavior: EffectiveSize = EffectiveSize()
    proximal: EffectiveSize = EffectiveSize()

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.behavior + other.behavior, self.proximal + other.proximal)
