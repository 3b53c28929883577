"""A factor for the gap between the policy that sampled and the one that the step began with.

w = proximal / behavior: different engines for the same weights, or weights that are several steps apart. The
factor has
no gradient, multiplies the surrogate and nothing else, and never changes a denominator: dropped tokens keep
counting, so the kept ones are not amplified.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnomon.algorithms.algorithm import LossView, PieceResult
from gnomon.algorithms.ratios import masked
from gnomon.algorithms.statistics import average, fraction
from gnomon.errors import ConfigError
from gnomon.metrics import EffectiveSize, Max, Metrics

Level = Literal["token", "sequence"]
CLAMP = 20.0


@dataclass(frozen=True)
class Truncated:
    """min(w, cap): truncated importance sampling (TIS).

    cap: > 0, dimensionless. level: "token", or "sequence", the product over the response's trained tokens.
    Source: truncated importance sampling for rollout engines, Yao et al. 2025; decoupled PPO, arXiv
    2110.00641, with the cap that implementations put on it (2 to 5).
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ConfigError(f"Truncated.cap must be > 0, got {self.cap}")

    def __call__(self, view: LossView) -> PieceResult:
        """Return the factor of each token, and how often it was truncated."""
        weight = mismatch_weight(view, self.level)
        factor = weight.clamp(max=self.cap)
        measured = {"mismatch/truncated_fraction": fraction(weight > self.cap, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


@dataclass(frozen=True)
class Masked:
    """w where it lies in [low, high], else 0: masked importance sampling; IcePop on tokens, MIS on sequences.

    low, high: dimensionless, 0 <= low < high; low = 0 is no lower bound. level: as in `Truncated`.
    Source: IcePop (0.5, 5.0); MIS with (0, 3.0), level="sequence", is TRL's default.
    """

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"Masked needs 0 <= low < high, got low={self.low}, high={self.high}")

    def __call__(self, view: LossView) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        weight = mismatch_weight(view, self.level)
        kept = (weight >= self.low) & (weight <= self.high)
        factor = torch.where(kept, weight, 0.0)
        measured = {"mismatch/masked_fraction": fraction(~kept, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


def mismatch_weight(view: LossView, level: Level) -> Tensor:
    """Return proximal / behavior Float[B T], 1 where masked; the logarithm is bounded to +-20 before exp."""
    gap = masked(view.proximal - view.batch.behavior.detach(), view.batch.mask)
    if level == "sequence":
        gap = masked(gap.sum(1, keepdim=True).expand_as(gap), view.batch.mask)
    return gap.clamp(-CLAMP, CLAMP).exp()


def _measure(weight: Tensor, factor: Tensor, view: LossView) -> Metrics:
    mask = view.batch.mask
    if not bool(mask.any()):
        return Metrics()
    used = factor[mask].double()
    return Metrics.of(
        {
            "mismatch/weight_mean": average(weight, mask),
            "mismatch/weight_max": Max(float(weight[mask].max())),
            "mismatch/ess_fraction": EffectiveSize(len(used), float(used.sum()), float(used.square().sum())),
        }
    )
