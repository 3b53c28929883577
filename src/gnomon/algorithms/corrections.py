"""A factor for the gap between the policy that sampled and the one that the step began with.

w = proximal / behavior: different engines for the same weights, or weights that are several steps apart. The factor
has no gradient, multiplies the surrogate and nothing else, and never changes a denominator: dropped tokens keep
counting, so the kept ones are not amplified.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnomon.algorithms.protocols import LossInputs, PieceResult
from gnomon.algorithms.ratios import average, fraction, masked
from gnomon.core.errors import ConfigError, check_bounds
from gnomon.core.metrics import EffectiveSize, Max, Metrics

Level = Literal["token", "sequence", "geometric"]
CLAMP = 20.0


@dataclass(frozen=True)
class TruncatedIS:
    """min(w, cap): truncated importance sampling (TIS).

    Attributes:
        cap: > 0, dimensionless.
        level: "token"; "sequence", the product over the response's trained tokens; "geometric", their geometric mean,
            which is no importance weight but a measure of how far the two are apart.

    Source: truncated importance sampling for rollout engines, Yao et al. 2025; decoupled PPO, arXiv 2110.00641, with
    the cap that implementations put on it (2 to 5).
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_bounds("TruncatedIS", self, cap=(self.cap > 0, "> 0"))

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was truncated."""
        weight = mismatch_weight(view, self.level)
        factor = weight.clamp(max=self.cap)
        measured = {"mismatch/truncated_fraction": fraction(weight > self.cap, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


@dataclass(frozen=True)
class MaskedIS:
    """w where it lies in [low, high], else 0: masked importance sampling; IcePop on tokens, MIS on sequences.

    Attributes:
        low, high: Dimensionless, 0 <= low < high; low = 0 is no lower bound.
        level: As in `TruncatedIS`.

    Source: IcePop (0.5, 5.0); MIS with (0, 3.0), level="sequence", is TRL's default.
    """

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"MaskedIS needs 0 <= low < high, got low={self.low}, high={self.high}")

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        weight = mismatch_weight(view, self.level)
        kept = (weight >= self.low) & (weight <= self.high)
        factor = torch.where(kept, weight, 0.0)
        measured = {"mismatch/masked_fraction": fraction(~kept, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


@dataclass(frozen=True)
class RejectionSampling:
    """1 where w lies in [low, high], else 0: tokens or responses that are too far off are left out, others untouched.

    Attributes:
        low, high: Dimensionless, 0 <= low < high.
        level: As in `TruncatedIS`; "geometric" is the usual one.

    Source: geometric rejection of rollout engines' mismatch (verl's ``seq_mean_k1``, bounds on w itself).
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "geometric"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"RejectionSampling needs 0 <= low < high, got low={self.low}, high={self.high}")

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        weight = mismatch_weight(view, self.level)
        kept = (weight >= self.low) & (weight <= self.high)
        measured = {"mismatch/rejected_fraction": fraction(~kept, view.batch.mask)}
        return kept.to(weight.dtype), Metrics.of(measured)


@dataclass(frozen=True)
class OffPolicyMask:
    """0 for a response of negative advantage that the current policy left far behind, else 1.

    Left behind: mean over tokens of log behavior - log current above ``threshold``. What is already unlikely teaches
    nothing by being pushed down further.

    Attributes:
        threshold: Mean log-ratio over the response's tokens, in nats.

    Source: DeepSeek-V3.2, off-policy sequence masking; 0.5 is TRL's suggestion.
    """

    threshold: float = 0.5

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        mask = view.batch.mask
        gap = masked(view.batch.behavior.detach() - view.current.detach(), mask).sum(1, keepdim=True)
        is_far = gap / mask.sum(1, keepdim=True).clamp(min=1) > self.threshold
        dropped = is_far & (view.advantages < 0)
        measured = {"mismatch/masked_fraction": fraction(dropped, mask)}
        return (~dropped).to(view.current.dtype), Metrics.of(measured)


@dataclass(frozen=True)
class ProbabilityMask:
    """0 for a token whose probability under current and behavior differs by more than ``threshold``, else 1.

    A ratio judges rare tokens by their rarity; a difference of probabilities judges by what the policy really does.

    Attributes:
        threshold: In (0, 1].

    Source: probability-difference masks of prime-rl, whose default is 0.3.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        check_bounds("ProbabilityMask", self, threshold=(0 < self.threshold <= 1, "in (0, 1]"))

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        mask = view.batch.mask
        now, then = masked(view.current.detach(), mask).exp(), masked(view.batch.behavior.detach(), mask).exp()
        dropped = (now - then).abs() > self.threshold
        return (~dropped).to(now.dtype), Metrics.of({"mismatch/masked_fraction": fraction(dropped, mask)})


@dataclass(frozen=True)
class Capped:
    """w, lowered where current / behavior would exceed ``cap``: the whole ratio is bounded, its gradient is not.

    min(w, cap / r), with r = current / proximal.

    Attributes:
        cap: > 0, dimensionless.

    Source: Hilton et al., arXiv 2110.00641, whose code bounds current / behavior at 100.
    """

    cap: float = 100.0

    def __post_init__(self) -> None:
        check_bounds("Capped", self, cap=(self.cap > 0, "> 0"))

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was lowered."""
        weight = mismatch_weight(view, "token")
        ratio = masked(view.current.detach() - view.proximal, view.batch.mask).clamp(-CLAMP, CLAMP).exp()
        factor = torch.minimum(weight, self.cap / ratio)
        measured = {"mismatch/truncated_fraction": fraction(factor < weight, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


def mismatch_weight(view: LossInputs, level: Level) -> Tensor:
    """Return proximal / behavior Float[B T], 1 where masked; the logarithm is bounded to +-20 before exp."""
    gap = masked(view.proximal - view.batch.behavior.detach(), view.batch.mask)
    if level != "token":
        whole = gap.sum(1, keepdim=True)
        if level == "geometric":
            whole = whole / view.batch.mask.sum(1, keepdim=True).clamp(min=1)
        gap = masked(whole.expand_as(gap), view.batch.mask)
    return gap.clamp(-CLAMP, CLAMP).exp()


def _measure(weight: Tensor, factor: Tensor, view: LossInputs) -> Metrics:
    mask = view.batch.mask
    if not bool(mask.any()):
        return Metrics()
    used = factor[mask].double()
    size = EffectiveSize(len(used), float(used.sum()), float(used.square().sum()), 0.0)
    return Metrics.of(
        {
            "mismatch/weight_mean": average(weight, mask),
            "mismatch/weight_max": Max(float(weight[mask].max())),
            "mismatch/weight_ess_fraction": size,
        }
    )
