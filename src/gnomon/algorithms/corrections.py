"""A factor for the gap between the policy that sampled and the one that the step began with.

w = proximal / behavior: different engines for the same weights, or weights that are several steps apart. The factor
has no gradient, multiplies the surrogate and nothing else, and never changes a denominator: dropped tokens keep
counting, so the kept ones are not amplified.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gnomon.algorithms.protocols import LossInputs, PieceResult
from gnomon.algorithms.ratios import average, fraction, masked, threshold
from gnomon.core.errors import ConfigError, bounded, check_bounds
from gnomon.core.metrics import EffectiveSize, Max, Metrics
from gnomon.core.optional import Tensor, torch

__all__ = [
    "Capped", "CovarianceMask", "DivergenceMask", "EntropyMask", "FutureInfluence", "MaskedIS", "OffPolicyMask",
    "RejectionSampling", "SecondMomentMask", "TruncatedIS",
]  # fmt: skip

Level = Literal["token", "sequence", "geometric"]
# exp(20) is 5e8: far beyond every cap, and without overflow.
CLAMP = 20.0


@dataclass(frozen=True)
@bounded(cap="> 0")
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

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was truncated."""
        weight = mismatch_weight(view, self.level)
        factor = weight.clamp(max=self.cap)
        measured = {"mismatch/truncated_fraction": fraction(weight > self.cap, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


def _check_band(low: float, high: float, piece: str) -> None:
    if not 0 <= low <= 1 <= high or low == high:
        raise ConfigError(
            f"{piece} needs 0 <= low < high with 1 between them, the weight of a token on which both policies agree; "
            f"got low={low}, high={high}"
        )


@dataclass(frozen=True)
@bounded(low=">= 0", high="> 0")
class MaskedIS:
    """w where it lies in [low, high], else 0: masked importance sampling; IcePop on tokens, MIS on sequences.

    Attributes:
        low, high: Dimensionless, 0 <= low < high, 1 between them; low = 0 is no lower bound.
        level: As in `TruncatedIS`.

    Source: IcePop (0.5, 5.0); MIS with (0, 3.0), level="sequence", is TRL's default.
    """

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"

    def __post_init__(self) -> None:
        _check_band(self.low, self.high, "MaskedIS")

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        weight = mismatch_weight(view, self.level)
        kept = (weight >= self.low) & (weight <= self.high)
        factor = torch.where(kept, weight, 0.0)
        measured = {"mismatch/masked_fraction": fraction(~kept, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


@dataclass(frozen=True)
@bounded(low=">= 0", high="> 0")
class RejectionSampling:
    """1 where w lies in [low, high], else 0: tokens or responses that are too far off are left out, others untouched.

    Attributes:
        low, high: Dimensionless, 0 <= low < high, 1 between them.
        level: As in `TruncatedIS`; "geometric" is the usual one.

    Source: geometric rejection of rollout engines' mismatch (verl's ``seq_mean_k1``, bounds on w itself).
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "geometric"
    is_filter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_band(self.low, self.high, "RejectionSampling")

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
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        mask = view.batch.mask
        # (rows, 1): mean of log behavior - log current over the response.
        gap = masked(view.behavior - view.current.detach(), mask).sum(1, keepdim=True)
        is_far = gap / mask.sum(1, keepdim=True).clamp(min=1) > self.threshold
        dropped = is_far & (view.advantages < 0)
        measured = {"mismatch/masked_fraction": fraction(dropped, mask)}
        return (~dropped).to(view.current.dtype), Metrics.of(measured)


@dataclass(frozen=True)
@bounded(threshold="> 0")
class DivergenceMask:
    """0 for a token, or a response, whose probability under current is too far from that under behavior, else 1.

    The divergence is between two outcomes, this token and any other: with p its probability under behavior and q under
    current,

        tv = |p - q|
        kl = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    A ratio judges rare tokens by their rarity; a divergence judges by what the policy really does.

    Attributes:
        divergence: "tv" or "kl".
        threshold: > 0, the largest divergence that is kept: a probability (at most 1) for "tv", nats for "kl".
        level: "token"; "sequence" judges a response by the mean over its trained tokens.
        side: "both"; "outward" drops only tokens that their advantage pushes further away, as the clip of PPO does.

    Source: DPPO, arXiv 2602.04879, its binary approximations ("outward"); IPO of prime-rl ("tv", both sides, 0.3);
    FlashREINFORCE, Hu et al. 2026 ("kl" of sequences, both sides).
    """

    divergence: Literal["tv", "kl"] = "tv"
    threshold: float = 0.3
    level: Literal["token", "sequence"] = "token"
    side: Literal["both", "outward"] = "both"
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fits = 0 < self.threshold <= 1 or (self.divergence == "kl" and self.threshold > 0)
        check_bounds("DivergenceMask", self, threshold=(fits, "in (0, 1]" if self.divergence == "tv" else "> 0"))

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        mask = view.batch.mask
        now, then = masked(view.current.detach(), mask), masked(view.behavior, mask)
        distance = (now.exp() - then.exp()).abs() if self.divergence == "tv" else binary_kl(then, now)
        if self.level == "sequence":
            mean = masked(distance, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            distance = mean.expand_as(now)
        dropped = distance > self.threshold
        if self.side == "outward":
            # Outward: the probability already moved where the advantage pushes it.
            dropped = dropped & ((now > then) == (view.advantages > 0))
        return (~dropped).to(now.dtype), Metrics.of({"mismatch/masked_fraction": fraction(dropped, mask)})


@dataclass(frozen=True)
@bounded(share="in (0, 1]")
class EntropyMask:
    """1 for the tokens of the step at which the policy is least decided, else 0: only forks in the road are trained.

    Attributes:
        share: In (0, 1], of the step's trained tokens those of highest entropy, at least one.

    Source: Beyond the 80/20 rule, arXiv 2506.01939 (0.2).
    """

    share: float = 0.2
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False
    reads_behavior: ClassVar[bool] = False
    reads_entropy: ClassVar[bool] = True

    def terms(self, view: LossInputs) -> Mapping[str, Tensor]:
        """Return each token's entropy, in nats."""
        return {"entropy_mask": view.entropy.detach()}

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and the entropy from which tokens are kept."""
        values = view.statistics.values("entropy_mask")
        # Of the whole step, so a cut keeps the same tokens.
        edge = threshold(values, len(values) - max(int(self.share * len(values)), 1))
        kept = view.entropy.detach() >= edge
        measured = {"loss/masked_fraction": fraction(~kept, view.batch.mask)}
        return kept.to(view.current.dtype), Metrics.of(measured)


@dataclass(frozen=True)
@bounded(budget="> 0")
class SecondMomentMask:
    """0 for the tokens of the step that moved furthest outward, until the others' mean squared log-ratio is small.

    Looked at are tokens that their advantage pushes further away from behavior: A > 0 and r > 1, or A < 0 and r < 1, r
    = current / behavior. The largest (log r)^2 are left out until the mean of the rest is at most ``budget``. Where
    nothing is far off nothing is left out, however many small steps a clip would have stopped.

    Attributes:
        budget: > 0, nats squared.

    Source: M2PO, arXiv 2510.01161 (0.04).
    """

    budget: float = 0.04
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False

    def terms(self, view: LossInputs) -> Mapping[str, Tensor]:
        """Return the squared log-ratio of tokens that are pushed outward; NaN for others."""
        shift = masked(view.current.detach().double() - view.behavior.double(), view.batch.mask)
        return {"second_moment": torch.where(view.advantages * shift > 0, shift.square(), torch.nan)}

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        values = view.statistics.values("second_moment")
        outward = values[~values.isnan()].sort().values
        # Sorted ascending, so the running mean grows: the largest prefix within the budget is kept.
        means = outward.cumsum(0) / torch.arange(1, len(outward) + 1, dtype=torch.float64)
        edge = threshold(outward, int((means <= self.budget).sum()))
        # NaN > edge is False: tokens that are not pushed outward are never dropped.
        dropped = self.terms(view)["second_moment"] > edge
        measured = {"mismatch/masked_fraction": fraction(dropped, view.batch.mask)}
        return (~dropped).to(view.current.dtype), Metrics.of(measured)


@dataclass(frozen=True)
@bounded(share="in (0, 1]")
class CovarianceMask:
    """0 for a few tokens drawn among those whose covariance of log-probability and advantage is high, else 1.

    c = (A - mean A) (log current - mean log current), means over the step's trained tokens. Tokens with a high c take
    the entropy away. They are drawn by a hash of what was sampled: log-probability and place.

    Attributes:
        share: In (0, 1], of the step's trained tokens as many are drawn, at least one.
        low, high: Covariances between which tokens are drawn, rewards times nats.

    Source: Clip-Cov, arXiv 2505.22617; 2e-4, 1 and 5 of its code, which draws from a generator.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        is_between = self.low < self.high
        check_bounds("CovarianceMask", self, low=(is_between, "below high"))

    def terms(self, view: LossInputs) -> Mapping[str, Tensor]:
        """Return what covariances are made of, and the number that each token drew in [0, 1)."""
        draw = hashed(view.batch.behavior.detach(), view.batch.mask.cumsum(1))
        return {**covariance_terms(view, "covariance_mask"), "covariance_draw": draw}

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was 0."""
        listed, own = ((self.low < c) & (c < self.high) for c in covariances(view, "covariance_mask"))
        drawn = view.statistics.values("covariance_draw")[listed]
        edge = threshold(drawn, max(int(self.share * len(listed)), 1))
        dropped = own & (self.terms(view)["covariance_draw"] <= edge)
        measured = {"loss/masked_fraction": fraction(dropped, view.batch.mask)}
        return (~dropped).to(view.current.dtype), Metrics.of(measured)


@dataclass(frozen=True)
@bounded(half_life="> 0", low="in (0, 1]", high=">= 1", outlier="> 1")
class FutureInfluence:
    """Weigh a token by how far the policy moved along with all that followed it.

    f_t = exp(sum_{k >= t} gamma^(k - t) d_k), bounded to [low, high], with d the algorithm's log-ratio, 0 where the
    ratio exceeds ``outlier``, and gamma = 2^(-1 / half_life). Only trained tokens are steps. In a step's first update f
    is 1.

    Attributes:
        half_life: > 0, tokens after which a later token counts half.
        low, high: 0 < low <= 1 <= high, dimensionless.
        outlier: > 1, the largest ratio that enters the sum.

    Source: FIPO, arXiv 2603.19835; the numbers are those of its 32B recipe.
    """

    half_life: float = 32.0
    low: float = 1.0
    high: float = 1.2
    outlier: float = 10.0
    is_filter: ClassVar[bool] = True
    reads_proximal: ClassVar[bool] = False
    reads_behavior: ClassVar[bool] = False

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and its mean."""
        mask, shift = view.batch.mask, view.log_ratio.detach()
        kept = masked(shift, mask & (shift <= math.log(self.outlier)))
        gamma, following = 2 ** (-1 / self.half_life), shift.new_zeros(len(shift))
        future = torch.zeros_like(shift)
        # Backwards: f of a token is its own shift plus the discounted sum of what follows.
        for t in range(shift.shape[1] - 1, -1, -1):
            following = torch.where(mask[:, t], kept[:, t] + gamma * following, following)
            future[:, t] = following
        factor = masked(future, mask).clamp(math.log(self.low), math.log(self.high)).exp()
        return factor, Metrics.of({"loss/influence_mean": average(factor, mask)})


@dataclass(frozen=True)
@bounded(cap="> 0")
class Capped:
    """w, lowered where current / behavior would exceed ``cap``: the whole ratio is bounded, its gradient is not.

    min(w, cap / r), with r = current / proximal.

    Attributes:
        cap: > 0, dimensionless.

    Source: Hilton et al., arXiv 2110.00641, whose code bounds current / behavior at 100.
    """

    cap: float = 100.0

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and how often it was lowered."""
        weight = mismatch_weight(view, "token")
        ratio = masked(view.current.detach() - view.proximal, view.batch.mask).clamp(-CLAMP, CLAMP).exp()
        factor = torch.minimum(weight, self.cap / ratio)
        measured = {"mismatch/truncated_fraction": fraction(factor < weight, view.batch.mask)}
        return factor, Metrics.of(measured) + _measure(weight, factor, view)


def binary_kl(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one || other) of two outcomes, a token and any other, from its log-probabilities, in nats.

    Probabilities are at most 1 - 1e-12, so that what is certain under both has divergence 0.
    """
    # 1 - p would be 0, and its logarithm minus infinity.
    one, other = one.double().clamp(max=-1e-12), other.double().clamp(max=-1e-12)
    rest, others_rest = (-torch.expm1(one)).log(), (-torch.expm1(other)).log()
    return one.exp() * (one - other) + rest.exp() * (rest - others_rest)


def covariance_terms(view: LossInputs, piece: str) -> dict[str, Tensor]:
    """Return what the covariances of a step's tokens are made of, under names of ``piece``."""
    return {f"{piece}_advantage": view.advantages, f"{piece}_logprob": view.current.detach()}


def covariances(view: LossInputs, piece: str) -> tuple[Tensor, Tensor]:
    """Return (A - mean A) (log current - mean log current): of the step's tokens Float64[N], of these Float64[B T]."""
    names = (f"{piece}_advantage", f"{piece}_logprob")
    means = [view.statistics.mean(name) for name in names]
    listed = [view.statistics.values(name) for name in names]
    own = [view.advantages.double(), view.current.detach().double()]
    step, here = ((a - means[0]) * (logprob - means[1]) for a, logprob in (listed, own))
    return step, here


def hashed(values: Tensor, place: Tensor) -> Tensor:
    """Return a number in [0, 1) for each token, Float64[B T], by the bits of its value and its place (splitmix64)."""
    # The constants are splitmix64's, written as signed integers; & with a mask makes >> a logical shift.
    bits = values.double().view(torch.int64) + place * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ (bits >> shift & (1 << 64 - shift) - 1)) * factor
    bits = bits ^ (bits >> 31 & (1 << 33) - 1)
    return (bits >> 11 & (1 << 53) - 1).double() / (1 << 53)


def mismatch_weight(view: LossInputs, level: Level) -> Tensor:
    """Return proximal / behavior Float[B T], 1 where masked or given; the logarithm is bounded to +-20 before exp."""
    gap = masked(view.proximal - view.behavior, view.batch.mask)
    if level != "token":
        whole = gap.sum(1, keepdim=True)
        if level == "geometric":
            whole = whole / view.batch.mask.sum(1, keepdim=True).clamp(min=1)
        gap = masked(whole.expand_as(gap), view.batch.mask)
    return gap.clamp(-CLAMP, CLAMP).exp()


def _measure(weight: Tensor, factor: Tensor, view: LossInputs) -> Metrics:
    mask = view.batch.mask & ~view.batch.is_given[:, None]
    if not bool(mask.any()):
        return Metrics()
    # The effective size of the factors as they are used, so a filter lowers it.
    used = factor[mask].double()
    size = EffectiveSize(len(used), float(used.sum()), float(used.square().sum()), 0.0)
    return Metrics.of(
        {
            "mismatch/weight_mean": average(weight, mask),
            "mismatch/weight_max": Max(float(weight[mask].max())),
            "mismatch/weight_ess_fraction": size,
        }
    )
