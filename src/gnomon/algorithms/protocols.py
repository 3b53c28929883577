"""The protocols of an algorithm's pieces: what each piece gets and returns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from gnomon.algorithms.ratios import Statistics
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.core.optional import Tensor
from gnomon.core.types import Batch

Need = Literal[
    "proximal", "sharpened", "reference", "values", "routing", "teacher", "component_rewards", "turn", "state", "role"
]
"""Fields of a batch that a piece may read: the first six are scored, the others come with the rollouts."""
PieceResult = tuple[Tensor, Metrics]


@dataclass(frozen=True)
class LossInputs:
    """What a piece sees of one cut.

    Attributes:
        batch: The cut, with its weights.
        current: Log-probabilities of the current policy, Float[B T], in nats, with a gradient.
        entropy: Entropy of the tempered policy, Float[B T], in nats, with a gradient.
        proximal: Log-probabilities of the proximal policy, Float[B T]. In a step's first update these may be
            ``current`` without its gradient, since both are the same policy then.
        log_ratio: Log-ratio of the algorithm's `Ratio`, Float[B T], 0 where masked.
        statistics: Effective sample sizes in the algorithm's scope, and the sums that pieces asked for.
        anchor_kl: KL(current || anchor) over the distributions of each token, Float[B T], in nats, with a gradient; the
            anchor is behavior or the reference, as the piece asked (`EssKl`, `Distillation`), None where none did.
    """

    batch: Batch
    current: Tensor
    entropy: Tensor
    proximal: Tensor
    log_ratio: Tensor
    statistics: Statistics
    anchor_kl: Tensor | None = None

    @property
    def advantages(self) -> Tensor:
        """Advantages Float[B T], without a gradient.

        Raises:
            ConfigError: `Composition.prepare` was not called.
        """
        if self.batch.advantages is None:
            raise ConfigError("the batch has no advantages: call algorithm.prepare(batch) first")
        return self.batch.advantages.detach()

    @property
    def behavior(self) -> Tensor:
        """Log-probabilities of behavior Float[B T], without a gradient; of a given response those of proximal.

        Nobody sampled such a response, so nothing is far from who did. The zeros that stand for its behavior would let
        a correction take the demonstration away, and a KL to behavior make it certain.
        """
        return self.batch.behavior.detach().where(~self.batch.is_given[:, None], self.proximal.detach())


@runtime_checkable
class SummedTerms(Protocol):
    """What a surrogate, correction or regularizer has that needs statistics of the whole step, of its own making.

    Its terms are collected over the trained tokens of the algorithm's scope before the loss of the first cut:
    ``view.statistics.total(NAME)`` and ``.mean(NAME)`` are their sum and mean, and ``.values(NAME)`` has each token's,
    from which thresholds and quantiles are made (`threshold`). They are the same however the rows are cut, so a loss
    that reads them keeps the law of cuts. With a true ``reads_entropy`` beside, ``terms`` may read ``view.entropy``.
    """

    def terms(self, view: LossInputs) -> Mapping[str, Tensor]:
        """Return the terms by name, Float[B T] each, without a gradient.

        Args:
            view: Rows of the step. ``entropy`` is not known (NaN) without ``reads_entropy``, ``statistics`` are empty.
        """


class Advantage(Protocol):
    """An advantage estimator: rewards to advantages, on the whole rollout batch.

    A class that inherits from this protocol must define `center` only. The defaults fit an estimator that reads
    rewards alone, compares no responses, has no scale and teaches no critic.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What the learner must score first; by default nothing."""
        return frozenset()

    @property
    def minimum_generations(self) -> int:
        """Smallest number of rollouts of a prompt with which the estimate means something; by default 1."""
        return 1

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards decide; by default they do. A distance to a teacher needs none."""
        return True

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages before any scale.

        Args:
            batch: The scored rollout batch, with its groups whole.

        Returns:
            Float64[B T], in rewards: the reward minus what was expected.
        """

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages and returns.

        Args:
            batch: The scored rollout batch, with its groups whole.

        Returns:
            The advantages Float[B T], and the critic's targets Float[B T] or None.
        """
        return self.center(batch).to(batch.behavior.dtype), None


class Composed(Advantage):
    """An advantage that is made of others: what it needs and refuses follows from its parts."""

    @property
    def parts(self) -> Mapping[str, Advantage]:
        """The advantages inside by the place where they stand, such as "of" or "terms.0"."""
        raise NotImplementedError

    @property
    def components(self) -> frozenset[str]:
        """Names of the rewards that it reads by name, without those of its parts."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Need]:
        """Those of the parts."""
        return frozenset[Need]().union(*(part.needs for part in self.parts.values()))

    @property
    def minimum_generations(self) -> int:
        """The largest of the parts'."""
        return max(part.minimum_generations for part in self.parts.values())


def parts_of(advantage: Advantage, place: str = "advantage") -> Iterator[tuple[str, Advantage]]:
    """Yield an advantage and all advantages inside, each with its place below an algorithm, the outermost first."""
    yield place, advantage
    if isinstance(advantage, Composed):
        for name, part in advantage.parts.items():
            yield from parts_of(part, f"{place}.{name}")


class Surrogate(Protocol):
    """A surrogate: ratio and advantage to a loss for each token."""

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the loss of each token Float[B T], and metrics."""


class Correction(Protocol):
    """A correction: a factor for the mismatch between the proximal policy and behavior."""

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor of each token Float[B T] without a gradient, and metrics."""


class Regularizer(Protocol):
    """A regularizer: a term that is added to the loss. The term includes its coefficient.

    A class that inherits from this protocol must define `name` and the call.
    """

    @property
    def name(self) -> str:
        """Name in metrics: ``loss/NAME``."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the learner must score first; by default nothing."""
        return frozenset()

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return the weights of the term's tokens.

        Args:
            batch: A whole minibatch.
            default: The algorithm's weights, Float[B T].

        Returns:
            Float[B T]; by default the algorithm's weights.
        """
        return default

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the term of each token Float[B T], and metrics."""


class Aggregate(Protocol):
    """A loss aggregation: what each token of a minibatch counts."""

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return the weight of each token.

        Args:
            mask: Trained tokens of a whole minibatch, Bool[B T].
            group: Group of each row, Int[B].

        Returns:
            Float[B T].
        """


@dataclass(frozen=True)
class Loss:
    """The loss of one cut.

    Attributes:
        total: The loss, with its gradient.
        parts: Value of each term by name; they add up to ``total``.
        metrics: Metrics of the cut; those of several cuts merge.
    """

    total: Tensor
    parts: Mapping[str, float]
    metrics: Metrics
