"""Self-imitation as an algorithm: the likelihood of good earlier responses, of any policy."""

from dataclasses import dataclass
from typing import ClassVar

from gnomon.algorithms.advantages import ConstantAdvantage, spread
from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.critic import CriticConfig
from gnomon.algorithms.loss_aggregation import TokenMean
from gnomon.algorithms.protocols import Advantage, Need
from gnomon.algorithms.ratio_bounds import Unbounded
from gnomon.algorithms.ratios import Ratio
from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.algorithms.surrogates import PolicyGradient
from gnomon.core.errors import ConfigError
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch


@dataclass(frozen=True)
class PositiveAdvantage(Advantage):
    """How much better it went than the critic expects by now, on each trained token: (R - V)_+, never below 0.

    R is the response's reward on every token (no discount). It is 0 where the policy has caught up, so that what was
    imitated enough is left alone. Returns are R, for the critic's one-sided loss.

    Source: Self-Imitation Learning, Oh et al. 2018, arXiv 1806.05635, eq. 2 and 3.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    def center(self, batch: Batch) -> Tensor:
        """Return (R - V)_+ Float64[B T].

        Raises:
            ConfigError: The values were not scored.
        """
        if batch.values is None:
            raise ConfigError(
                "PositiveAdvantage compares rewards with a critic's values; score the batch for 'values' first"
            )
        gap = batch.rewards.double()[:, None] - batch.values.detach().double()
        return torch.where(batch.mask & batch.is_graded[:, None], gap.clamp(min=0.0), 0.0)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages and returns Float[B T]."""
        dtype = batch.behavior.dtype
        return self.center(batch).to(dtype), spread(batch.rewards.double(), batch).to(dtype)


def imitation(plan: SelfImitationBuffer, critic: CriticConfig | None = None) -> Algorithm:
    """Return the algorithm of replayed responses: the mean over their tokens of -w log current.

    w = 1, or (R - V)_+ with ``plan.weigh = "surplus"``. The ratio is to the proximal policy, which is the current one
    in a single update, so it is 1 and no importance weight enters: what sampled a response does not matter.

    Args:
        critic: The run's critic, which "surplus" compares with and trains.

    Raises:
        ConfigError: ``plan.weigh`` is "surplus" and there is no critic.
    """
    is_surplus = plan.weigh == "surplus"
    return Algorithm(
        name="self-imitation",
        paper="Self-Imitation Learning, Oh et al. 2018, arXiv 1806.05635",
        advantage=PositiveAdvantage() if is_surplus else ConstantAdvantage(),
        ratio=Ratio(),
        surrogate=PolicyGradient(Unbounded()),
        aggregate=TokenMean(),
        num_generations=1,
        critic=critic if is_surplus else None,
    )
