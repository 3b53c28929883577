"""Bounds on the importance ratio: clips and caps."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import bounded, check_bounds
from gnomon.core.optional import Tensor

__all__ = ["Cap", "Clip", "EssCap", "GammaKernel", "Unbounded"]


class RatioBound(Protocol):
    """A bound on the ratio."""

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the bounded ratio; ``statistics`` are those of the algorithm's scope."""


@dataclass(frozen=True)
@bounded(low="> 0", high="> 0")
class Clip:
    """Bound the ratio to [1 - low, 1 + high].

    A larger ``high`` than ``low`` leaves rare tokens room to grow ("clip-higher").

    Attributes:
        low, high: Dimensionless, > 0. ``low`` >= 1 means no lower bound.

    Raises:
        ConfigError: A width is not positive.

    Source: PPO, arXiv 1707.06347, eq. 7; asymmetric form DAPO, arXiv 2503.14476, section 3.1.

    >>> import torch
    >>> Clip(0.2, 0.28)(torch.tensor([0.5, 1.0, 2.0]), Statistics())
    tensor([0.8000, 1.0000, 1.2800])
    """

    low: float = 0.2
    high: float = 0.2

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the clipped ratio."""
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True)
@bounded(cap="> 0", floor=">= 0")
class Cap:
    """Bound the ratio to [floor, cap], both absolute.

    Without a floor a token that became rare keeps its small weight; raising it would push it further than it came.

    Attributes:
        cap: > 0, dimensionless; the paper's 1 + epsilon_high.
        floor: In [0, cap]; 0 is the paper's.

    Source: CISPO, arXiv 2506.13585; the cap 5 is the only published value (ScaleRL).
    """

    cap: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        is_between = 0 <= self.floor <= self.cap
        check_bounds("Cap", self, floor=(is_between, f"in [0, {self.cap}]"))

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the capped ratio."""
        return ratio.clamp(self.floor, self.cap)


@dataclass(frozen=True)
class EssCap:
    """Cap the ratio at the effective sample size of the whole step, a fraction in [1/n, 1].

    min(r, e), e = (sum r)^2 / (n sum r^2) over all trained tokens of the optimizer step. Measured, not
    chosen: nothing to tune. On-policy tokens (r = 1) are scaled by e as well. A ratio that all tokens share
    cannot be seen by e.

    Attributes:
        of: "behavior", of current / behavior; "both", the smaller of that and the size of current / proximal. Needs
            Ratio(anchor="behavior").

    Source: P3O, arXiv 2605.12380; arXiv 1905.01756; "both" is its eq. 13 (P4O in the reference code). The scope is the
    step (`Algorithm.scope`), where its code takes a micro-batch.
    """

    of: Literal["behavior", "both"] = "behavior"
    reads_sizes: ClassVar[bool] = True

    @property
    def reads_both(self) -> bool:
        """Whether it looks at the proximal policy beside behavior."""
        return self.of == "both"

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the capped ratio; not a number when a ratio of the step was not finite."""
        return ratio.clamp(max=self.size(statistics))

    def size(self, statistics: Statistics) -> float:
        """Return e, in [1/n, 1]."""
        e = statistics.behavior.value
        return e if self.of == "behavior" else smallest(e, statistics.proximal.value)


@dataclass(frozen=True)
@bounded(power="> 0", decay="> 0")
class GammaKernel:
    """Fade a ratio W on both sides: W^power exp(decay (1 - W)), which is 1 at W = 1 and goes to 0 at 0 and infinity.

    It grows up to W = power / decay. Made for the ratio of a whole response, Ratio(level="sequence_product"), which no
    clip could bound without dropping most responses.

    Attributes:
        power: > 0, dimensionless; larger trusts small ratios less.
        decay: > 0, dimensionless; larger trusts large ratios less.

    Source: VESPO, arXiv 2602.10693, section 3.4; 2 and 3 for advantages >= 0, 3 and 2 for negative ones.
    """

    power: float = 2.0
    decay: float = 3.0

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the faded ratio."""
        return ratio**self.power * (self.decay * (1 - ratio)).exp()


@dataclass(frozen=True)
class Unbounded:
    """Believe every ratio."""

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return ``ratio``."""
        return ratio


def smallest(*sizes: float) -> float:
    """Return the smallest; not a number when one of them is none (``min`` would depend on their order)."""
    return math.nan if any(math.isnan(size) for size in sizes) else min(sizes)
