"""What the pieces of an algorithm are: what each is given, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch

Need = Literal["proximal", "reference", "values", "routing"]
PieceResult = tuple[Tensor, Metrics]


@dataclass(frozen=True)
class LossInputs:
    """What a piece may see of one cut.

    batch: the cut, weights filled. current Float[B T]: log-probabilities with a gradient. entropy Float[B T]:
    of the tempered policy, with a gradient. proximal Float[B T]: scored before the
    step, or ``current`` detached on the first inner step, where they are the same policy. log_ratio Float[B
    T]: of the algorithm's `Ratio`, 0 where masked. statistics: in the algorithm's scope, detached.
    """

    batch: Batch
    current: Tensor
    entropy: Tensor
    proximal: Tensor
    log_ratio: Tensor
    statistics: Statistics

    @property
    def advantages(self) -> Tensor:
        """Float[B T]; raises ConfigError if `prepare` was not called."""
        if self.batch.advantages is None:
            raise ConfigError("the batch has no advantages: call algorithm.prepare(batch) first")
        return self.batch.advantages.detach()


class Advantage(Protocol):
    """Rewards to advantages Float[B T] (and returns for a critic, or None), on the whole rollout batch."""

    @property
    def needs(self) -> frozenset[Need]:
        """What must be scored first."""
        ...

    @property
    def minimum_generations(self) -> int:
        """Fewest rollouts a prompt with which the estimate means something."""
        ...

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages before any scale Float[B T]: reward less what was expected, in rewards."""
        ...

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages and returns."""
        ...


class Surrogate(Protocol):
    """Ratio and advantage to a per-token loss Float[B T]."""

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token, and what was measured on the way."""
        ...


class Correction(Protocol):
    """A detached factor Float[B T] for the gap between proximal and behavior."""

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token, and what was measured on the way."""
        ...


class Regularizer(Protocol):
    """A term added to the loss, its coefficient included."""

    @property
    def name(self) -> str:
        """Its name in metrics: ``loss/NAME``."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What must be scored first."""
        ...

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return its weights Float[B T] on a whole minibatch; ``default`` are the algorithm's own."""
        ...

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token Float[B T]."""
        ...


class Aggregate(Protocol):
    """Mask Bool[B T] (and groups Int[B]) of a whole minibatch to weights Float[B T]."""

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return the weight of each token."""
        ...


@dataclass(frozen=True)
class Loss:
    """The loss of one cut: ``total`` has the gradient; parts sum to it; metrics merge over cuts."""

    total: Tensor
    parts: Mapping[str, float]
    metrics: Metrics
