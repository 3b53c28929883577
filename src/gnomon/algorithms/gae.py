"""Advantages from a critic: generalized advantage estimation, and how far it trusts the critic.

    delta_t  = x_t + gamma V_{t+1} - V_t
    A_t      = delta_t + gamma lambda A_{t+1}
    V_target = A^(value lambda) + V

lambda 1 is the return minus the value, whatever the critic says in between; lambda 0 believes the critic's next word.
V_t is the value of the state *before* token t; after the last token it is 0, or what `Gae.truncation` says.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from gnomon.algorithms.advantages import check_kl, kl_needs, token_rewards
from gnomon.algorithms.protocols import Need
from gnomon.algorithms.ratios import masked
from gnomon.errors import ConfigError
from gnomon.types import Batch


class LambdaRule(Protocol):
    """Lengths of responses to lambdas."""

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return Float64[B] in [0, 1] for ``lengths`` Int[B], trained tokens of each response."""
        ...


@dataclass(frozen=True)
class Fixed:
    """One lambda for every response.

    value: in [0, 1].
    Source: GAE, arXiv 1506.02438; 0.95 with a value lambda of 1 is VC-PPO's, arXiv 2503.01491.
    """

    value: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise ConfigError(f"Fixed.value, a lambda, must be in [0, 1], got {self.value}")

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the value for each response."""
        return torch.full(lengths.shape, self.value, dtype=torch.float64)


@dataclass(frozen=True)
class LengthAdaptive:
    """lambda = 1 - 1 / (alpha length), at least 0: a horizon that is a fixed share of the response.

    The sum of the weights that a token gives to later errors, 1 / (1 - lambda), is alpha length. Made for long
    responses: at 1 / alpha tokens or fewer (20 by default) lambda would be negative and is 0, one-step differences of
    values that say nothing of the reward except at the last token. Raise ``alpha`` for short answers: alpha = 1 gives
    10 tokens lambda 0.9. ``advantage/lambda_floored_fraction`` counts them.

    alpha: > 0, a share of the response.
    Source: VAPO, arXiv 2504.05118, section 4.2; the bound at 0 is ours, as the paper's responses are long.

    >>> LengthAdaptive(0.05)(torch.tensor([10, 100, 1000])).tolist()
    [0.0, 0.8, 0.98]
    """

    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"LengthAdaptive.alpha must be > 0, got {self.alpha}")

    @property
    def shortest(self) -> int:
        """The shortest response, in tokens, that gets a lambda above 0."""
        return math.floor(1 / self.alpha) + 1

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return a lambda for each response."""
        return (1 - 1 / (self.alpha * lengths.double().clamp(min=1))).clamp(min=0.0)


@dataclass(frozen=True)
class LengthSigmoid:
    """lambda from how long a response is beside the others of its batch, between ``low`` and ``high``.

    low + (high - low) sigmoid((length - mean) / deviation), with the mean and the sample deviation (at least 1 token)
    of the batch. A response's advantages then depend on the others' lengths.

    low, high: 0 <= low <= high <= 1.
    Source: a review of VAPO, its eq. 6 and code; the paper's own is `LengthAdaptive`.
    """

    low: float = 0.3
    high: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ConfigError(f"LengthSigmoid needs 0 <= low <= high <= 1, got {self.low}, {self.high}")

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return a lambda for each response; those without a trained token enter no statistic."""
        tokens = lengths.double()
        counted = tokens[tokens > 0]
        if len(counted) == 0:
            return torch.full_like(tokens, self.low)
        deviation = counted.std() if len(counted) > 1 else torch.zeros(())
        place = (tokens - counted.mean()) / deviation.clamp(min=1.0)
        return self.low + (self.high - self.low) * place.sigmoid()


@dataclass(frozen=True)
class Gae:
    """The discounted sum of the critic's errors from each token on, and what the critic should have said.

    Only trained tokens are steps: tool output is skipped, its values unread. The reward stands on the last trained
    token. Advantages and targets may use different lambdas: long sums for the targets, so that the reward reaches
    early tokens, shorter ones for the policy, so that it is not noisy ("decoupled").

    policy_lambda: of the advantages. value_lambda: of the targets, in [0, 1]; 1 is the return itself.
    gamma: in (0, 1]. kl: >= 0, rewards per nat of log proximal - log reference, taken from every token's reward.
    truncation: the value after the last token of a response that ran out of budget: "terminal" is 0, right for
        verifiers that call it a failure; "value" is what the critic says (`Batch.bootstrap`), for rewards that would
        have gone on.
    Source: GAE, arXiv 1506.02438; two lambdas, VC-PPO, arXiv 2503.01491.
    """

    policy_lambda: LambdaRule = field(default=Fixed(0.95))
    value_lambda: float = 1.0
    gamma: float = 1.0
    kl: float = 0.0
    truncation: Literal["terminal", "value"] = "terminal"

    def __post_init__(self) -> None:
        check_kl("Gae", self.kl)
        if not 0 <= self.value_lambda <= 1:
            raise ConfigError(f"Gae.value_lambda must be in [0, 1], got {self.value_lambda}")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"Gae.gamma must be in (0, 1], got {self.gamma}")

    @property
    def needs(self) -> frozenset[Need]:
        """Values; and the reference, when the distance to it is part of the reward."""
        return frozenset[Need]({"values"}) | kl_needs(self.kl)

    @property
    def minimum_generations(self) -> int:
        """One: the critic is the baseline."""
        return 1

    def lambdas(self, batch: Batch) -> Tensor:
        """Return the policy's lambda of each response, Float64[B]."""
        return self.policy_lambda(batch.mask.sum(1))

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        return self._advantages(batch, self.lambdas(batch))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T], and the critic's targets."""
        advantages = self.center(batch)
        longer = torch.full((len(batch),), self.value_lambda, dtype=torch.float64)
        values = masked(_values(batch), batch.mask & batch.is_graded[:, None])
        returns = self._advantages(batch, longer) + values
        return advantages.to(batch.behavior.dtype), returns.to(batch.behavior.dtype)

    def _advantages(self, batch: Batch, lambdas: Tensor) -> Tensor:
        """Return the discounted sums of errors Float64[B T], 0 where masked and for what could not be graded."""
        mask = batch.mask & batch.is_graded[:, None]
        rewards, values = token_rewards(batch, batch.rewards.double(), self.kl), masked(_values(batch), mask)
        following = torch.zeros(len(batch), dtype=torch.float64)
        if self.truncation == "value":
            if batch.bootstrap is None:
                raise ConfigError(
                    "truncation = 'value' needs the value after each response's last token (Batch.bootstrap, "
                    "'bootstrap' of a recorded sequence); score 'values' first, or set truncation = 'terminal'"
                )
            following = torch.where(batch.is_truncated & batch.is_graded, batch.bootstrap.double(), 0.0)
        advantage = torch.zeros(len(batch), dtype=torch.float64)
        result = torch.zeros_like(values)
        for t in range(batch.width - 1, -1, -1):
            is_step = mask[:, t]
            error = rewards[:, t] + self.gamma * following - values[:, t]
            advantage = torch.where(is_step, error + self.gamma * lambdas * advantage, advantage)
            following = torch.where(is_step, values[:, t], following)
            result[:, t] = torch.where(is_step, advantage, 0.0)
        return result


def _values(batch: Batch) -> Tensor:
    if batch.values is None:
        raise ConfigError("Gae needs the critic's 'values'; give the algorithm a critic, or the batch its values")
    return batch.values.double()
