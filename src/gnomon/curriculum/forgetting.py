"""How much of what was observed still counts, given how far the policy has moved."""

import math
from dataclasses import dataclass

from gnomon.errors import ConfigError, LearnerError


@dataclass(frozen=True)
class Forgetting:
    """The factor rho by which everything observed so far is discounted before the next reward counts as 1.

    rho = clip(2^(-drift / d_half), rho_min, rho_max)

    A policy that moved by ``d_half`` has forgotten half. At a constant rho the effective number of
    observations tends to 1 / (1 - rho): a window of 8 at 0.875, of 25 at 0.96. The upper bound keeps the
    window finite while the policy stands still, the lower one keeps the estimate usable while it races.

    rho_min, rho_max: in (0, 1). d_half: > 0, nats of mean absolute log-probability change; its 0.06 means
    nothing for another divergence (a k3 estimate is about 100 times smaller). Between the bounds drift
    matters only from 0.0035 to 0.0116 nats.
    Raises: ConfigError when these do not hold.
    Source: SPO, arXiv 2509.13232, section 3.1; d_half and the divergence from its public recipe.

    >>> Forgetting(0.875, 0.96, 0.06)(0.01)
    0.8908987181403393
    """

    rho_min: float
    rho_max: float
    d_half: float = 0.06

    def __post_init__(self) -> None:
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ConfigError(f"Forgetting needs 0 < rho_min <= rho_max < 1, got {self.rho_min}, {self.rho_max}")
        if not self.d_half > 0:
            raise ConfigError(f"Forgetting.d_half must be > 0, got {self.d_half}")

    @classmethod
    def constant(cls, rho: float) -> "Forgetting":
        """Return the forgetting that is ``rho`` whatever the drift.

        >>> Forgetting.constant(0.875)(0.0)
        0.875
        """
        return cls(rho, rho)

    @property
    def window(self) -> float:
        """N0 = 1 / (1 - rho_min): the effective observations that an estimate from rollouts starts with.

        It is where n_eff would settle at the fastest forgetting, so early updates neither jump nor stall.
        """
        return 1 / (1 - self.rho_min)

    def __call__(self, drift: float) -> float:
        """Return rho after the policy moved by ``drift`` nats since it last answered; infinity forgets most.

        Raises: LearnerError when ``drift`` is negative or not a number.
        """
        if math.isnan(drift) or drift < 0:
            raise LearnerError(f"policy drift must be >= 0 nats, got {drift}; were the log-probabilities finite?")
        return min(max(float(2.0 ** (-drift / self.d_half)), self.rho_min), self.rho_max)
