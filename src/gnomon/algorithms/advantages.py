"""Rewards to advantages: how much better a response was than expected.

Everything is computed in float64 on the whole rollout batch, before it is cut. Responses that could not be
graded (`Batch.is_graded` false) enter no statistic and get advantage 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gnomon.algorithms.protocols import Advantage, Composed, Need
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError, GradingError, bounded
from gnomon.core.optional import Tensor, torch
from gnomon.core.types import Batch

__all__ = [
    "Accepted", "ConstantAdvantage", "GroupRelative", "LeaveOneOut", "MarginalBest", "OptimalBaseline",
    "TrackedBaseline", "Whitened",
]  # fmt: skip


Found = tuple[Tensor, Tensor | None]
"""Advantages, and the critic's targets."""


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, and which rows count. Sums are over the counted rows of a group, in float64.

    In float32 six equal rewards of 0.3 have a computed deviation of 1e-8 and, divided by it, an advantage.

    Attributes:
        index (Int[B]): Group of each row, numbered from 0.
        counted (Bool[B]): Rows that enter statistics; errors do not.
    """

    index: Tensor
    counted: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Groups":
        """Return the groups of ``batch`` with its graded rows."""
        return cls(torch.unique(batch.group, return_inverse=True)[1], batch.is_graded)

    def total(self, values: Tensor) -> Tensor:
        """Return Float64[B]: the sum of ``values`` over the counted rows of each row's group."""
        # where, and not a product: an error's reward may be NaN.
        kept = torch.where(self.counted, values.double(), 0.0)
        return self._empty(0.0).index_add(0, self.index, kept)[self.index]

    @property
    def size(self) -> Tensor:
        """Float64[B]: counted rows in each row's group."""
        return self.total(torch.ones(len(self.index), dtype=torch.float64))

    def mean(self, values: Tensor) -> Tensor:
        """Return Float64[B]: the group's mean; 0 for a group without counted rows."""
        return self.total(values) / self.size.clamp(min=1)

    def deviation(self, values: Tensor, ddof: int) -> Tensor:
        """Return Float64[B]: the group's standard deviation; 0 where fewer than ``ddof`` + 1 rows count."""
        squares = self.total((values.double() - self.mean(values)).square())
        return (squares / (self.size - ddof).clamp(min=1)).sqrt()

    def differ(self, values: Tensor) -> Tensor:
        """Return Bool[B]: whether the group's counted values are not all equal, compared as they are."""
        exact = values.double()
        high = torch.where(self.counted, exact, -torch.inf)
        low = torch.where(self.counted, exact, torch.inf)
        largest = self._empty(-torch.inf).scatter_reduce(0, self.index, high, "amax")
        smallest = self._empty(torch.inf).scatter_reduce(0, self.index, low, "amin")
        return (largest > smallest)[self.index]

    def has_before(self, values: Tensor) -> Tensor:
        """Return Bool[B]: whether another counted row of the group has a larger value, or the same and comes first."""
        # (rows, rows): column j is a counted row of the same group.
        same = (self.index[:, None] == self.index) & self.counted
        place = torch.arange(len(values))
        # (rows, rows): column j comes before row i.
        is_before = (values > values[:, None]) | ((values == values[:, None]) & (place < place[:, None]))
        return (same & is_before).any(1)

    def _empty(self, value: float) -> Tensor:
        count = int(self.index.max()) + 1 if len(self.index) else 0
        return torch.full((count,), value, dtype=torch.float64)


Singleton = Literal["zero", "raw", "error"]


@dataclass(frozen=True)
@bounded(epsilon=">= 0", kl=">= 0")
class GroupRelative(Advantage):
    """Reward minus the mean of its group, divided by a standard deviation.

    A_i = (r_i - mean_group) / (std + epsilon). A group whose rewards are all equal gets exactly 0, decided by max ==
    min and never by a computed deviation.

    Attributes:
        scale: "group" divides by the group's deviation (GRPO), "batch" by that of all rewards (Lite PPO), "none" not at
            all (Dr. GRPO: dividing gives very easy and very hard prompts more weight), "mean" by the group's mean
            reward: for rewards of 0 and 1 the gradient is that of log pass rate (MaxRL); 0 where the mean is not above
            0.
        ddof: 1 for the sample deviation (every library), 0 for the population's.
        epsilon: >= 0, in rewards.
        singleton: When one response of a group could be graded: advantage 0, its raw reward, or GradingError.
        kl: >= 0, rewards per nat: r is then the reward less kl sum_t (log proximal - log reference).

    Source: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; MaxRL, arXiv 2602.02710.
    """

    scale: Literal["group", "batch", "none", "mean"] = "group"
    ddof: Literal[0, 1] = 1
    epsilon: float = 1e-6
    singleton: Singleton = "zero"
    kl: float = 0.0
    minimum_generations: ClassVar[int] = 2

    @property
    def needs(self) -> frozenset[Need]:
        """The reference, when the distance to it is part of the reward."""
        return kl_needs(self.kl)

    def center(self, batch: Batch) -> Tensor:
        """Return r - mean Float64[B T]."""
        return spread(self._centered(batch), batch)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T]."""
        groups, rewards = Groups.of(batch), penalized(batch, self.kl)
        centered = self._centered(batch)
        # A group of one has no deviation; what ``singleton`` said stays as it is.
        if self.scale == "group":
            scaled = centered / (groups.deviation(rewards, self.ddof) + self.epsilon)
            centered = torch.where(groups.size == 1, centered, scaled)
        if self.scale == "mean":
            mean = groups.mean(rewards)
            scaled = torch.where(mean > 0, centered / (mean + self.epsilon), 0.0)
            centered = torch.where(groups.size == 1, centered, scaled)
        if self.scale == "batch":
            centered = centered / (_deviation(rewards[batch.is_graded], self.ddof) + self.epsilon)
        # 0 / 0 with epsilon = 0: a degenerate group, or a batch of equal rewards.
        return spread(torch.where(centered.isfinite(), centered, 0.0), batch).to(batch.behavior.dtype), None

    def _centered(self, batch: Batch) -> Tensor:
        groups, rewards = Groups.of(batch), penalized(batch, self.kl)
        centered = torch.where(groups.differ(rewards), rewards - groups.mean(rewards), 0.0)
        return _settle_singletons(centered, rewards, groups, self.singleton)


@dataclass(frozen=True)
class ConstantAdvantage(Advantage):
    """The same on each trained token, whatever the reward: what was chosen to be imitated or distilled is.

    0 for an answer of which the reference policy has nothing to say (`ReferencePolicy.prompt`).

    Attributes:
        value: In rewards.
    """

    value: float = 1.0
    reads_rewards: ClassVar[bool] = False

    def center(self, batch: Batch) -> Tensor:
        """Return the value Float64[B T]."""
        return spread(torch.full((len(batch),), self.value).double() * batch.is_taught, batch)


@dataclass(frozen=True)
class Accepted(Advantage):
    """The same for every response that was good enough, and 0 for the others: their likelihood is raised.

    On a token of an accepted response A = N / N_accepted, of all trained tokens of the batch, so that with `TokenMean`
    the loss is the mean negative log-likelihood of accepted tokens.

    Attributes:
        above: Rewards greater than this are accepted.
        best: Accept of each group the first of its best responses alone.

    Source: ReST-EM, arXiv 2312.06585; with ``best``, RAFT, arXiv 2304.06767.
    """

    above: float = 0.0
    best: bool = False

    @property
    def minimum_generations(self) -> int:
        """2 where the best of a group is meant."""
        return 1 + self.best

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]."""
        accepted = batch.is_graded & (batch.rewards > self.above)
        if self.best:
            # Only accepted responses compete for the first place.
            groups = Groups(Groups.of(batch).index, accepted)
            accepted &= ~groups.has_before(batch.rewards)
        tokens = batch.mask.sum(1).double()
        # Undoes TokenMean's division by all tokens, so that the loss is a mean over accepted ones.
        scale = tokens.sum() / (tokens * accepted).sum().clamp(min=1)
        return spread(scale * accepted, batch)


@dataclass(frozen=True)
@bounded(kl=">= 0")
class LeaveOneOut(Advantage):
    """Reward minus the mean of the *other* responses of its group.

    A_i = x_i - mean_{j != i} x_j = (x_i - mean) G / (G - 1), unbiased because the baseline does not contain x_i. x = r
    - kl sum_t (log proximal - log reference): with ``kl`` > 0 the distance to the reference is part of the reward and
    has no gradient of its own.

    Attributes:
        kl: >= 0, rewards per nat.
        singleton: As in `GroupRelative`.

    Source: RLOO, arXiv 2402.14740; the default penalty of its preset is TRL's.
    """

    kl: float = 0.0
    singleton: Singleton = "zero"
    minimum_generations: ClassVar[int] = 2

    @property
    def needs(self) -> frozenset[Need]:
        """The reference, when the distance to it is part of the reward."""
        return kl_needs(self.kl)

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        groups = Groups.of(batch)
        shaped = penalized(batch, self.kl)
        # 1 for a group of one, whose quotient `_settle_singletons` replaces.
        rest = (groups.size - 1).clamp(min=1)
        others = (groups.total(shaped) - shaped) / rest
        # The difference of equal rewards would be rounding, and any scale would blow it up.
        centered = torch.where(groups.differ(shaped), shaped - others, 0.0)
        return spread(_settle_singletons(centered, shaped, groups, self.singleton), batch)


@dataclass(frozen=True)
@bounded(k="at least 2")
class MarginalBest(Advantage):
    """How much a response raises the best of k: the gradient of pass@k, where the best reward of k responses counts.

    A_i = mean over all sets S of k - 1 others of (max of S and i - max of S), 0 for the best of no such set.
    Never negative: only what would be missed is pushed up.

    Attributes:
        k: Responses of which the best counts, at least 2; none for all of the group, where the best alone gets its lead
            over the second.

    Source: Tang et al., Optimizing language models for inference time objectives, arXiv 2503.19595; its leave-one-out
    estimate is k = none, the mean over all subsets is ours.
    """

    k: int | None = None

    @property
    def minimum_generations(self) -> int:
        """k, or 2."""
        return self.k or 2

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        rewards, found = batch.rewards.double(), torch.zeros(len(batch), dtype=torch.float64)
        for group in batch.group.unique():
            rows = ((batch.group == group) & batch.is_graded).nonzero()[:, 0]
            count, k = len(rows), min(self.k or len(rows), len(rows))
            if count < 2:
                continue
            sorted_rewards, order = rewards[rows].sort()
            # The m-th smallest of the others is the best of k - 1 drawn from them in comb(m - 1, k - 2) sets.
            sets = [math.comb(place, k - 2) / math.comb(count - 1, k - 1) for place in range(count)]
            # (i, m): by how much response i is better than the m-th smallest, 0 where it is not.
            lead = (sorted_rewards[:, None] - sorted_rewards).clamp(min=0.0)
            found[rows[order]] = lead @ torch.tensor(sets, dtype=torch.float64)
        return spread(found, batch)


@dataclass(frozen=True)
class OptimalBaseline(Advantage):
    """Reward minus the mean of its group weighted by length, the baseline of least variance on policy.

    A_i = r_i - sum_j l_j r_j / sum_j l_j, with l the trained tokens, because the squared gradient of a
    response grows with its length. Token sums of each group are 0; equal lengths give Dr. GRPO. Equal rewards
    give exactly 0.

    Source: OPO, arXiv 2505.23585.
    """

    minimum_generations: ClassVar[int] = 2

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages in Float64[B T]; there is no scale."""
        groups, rewards = Groups.of(batch), batch.rewards.double()
        lengths = batch.mask.sum(1).double()
        # A group whose responses have no trained token has the baseline 0 and trains nothing.
        baseline = groups.total(lengths * rewards) / groups.total(lengths).clamp(min=1)
        return spread(torch.where(groups.differ(rewards), rewards - baseline, 0.0), batch)


@dataclass(frozen=True)
@bounded(epsilon=">= 0")
class TrackedBaseline(Advantage):
    """Reward minus the success rate tracked for its prompt *before* this response: no group is needed.

    A_i = r_i - v(prompt), and with ``normalize`` (A - mean) / (std + epsilon) over the graded responses of the whole
    rollout batch. All A equal: exactly 0. One graded response has no deviation: its A is kept.

    Attributes:
        ddof: 1 for the sample deviation (the recipe's), 0 for the population's.
        epsilon: >= 0, the recipe's 1e-8.

    Source: SPO, arXiv 2509.13232; ddof and epsilon of its recipe.
    """

    normalize: bool = True
    ddof: Literal[0, 1] = 1
    epsilon: float = 1e-8

    def center(self, batch: Batch) -> Tensor:
        """Return r - v Float64[B T]."""
        return spread(self._centered(batch), batch)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T]."""
        centered = self._centered(batch)
        graded = centered[batch.is_graded]
        if self.normalize and len(graded) > 1:
            scaled = (centered - graded.mean()) / (_deviation(graded, self.ddof) + self.epsilon)
            centered = scaled if bool(graded.max() > graded.min()) else torch.zeros_like(centered)
        return spread(centered, batch).to(batch.behavior.dtype), None

    def _centered(self, batch: Batch) -> Tensor:
        if batch.baseline is None:
            raise ConfigError(
                "TrackedBaseline needs the tracked value of each prompt (Batch.baseline); collate the batch with a "
                "tracker's baseline, or give 'baseline' for every sequence of a recorded batch"
            )
        return batch.rewards.double() - batch.baseline.double()


class Modified(Composed):
    """An advantage that changes the numbers of another one, ``of``."""

    of: Advantage

    @property
    def parts(self) -> Mapping[str, Advantage]:
        """The advantage inside."""
        return {"of": self.of}


@dataclass(frozen=True)
@bounded(epsilon="> 0")
class Whitened(Modified):
    """Another advantage, shifted and scaled to mean 0 and variance 1 over all trained tokens of the batch.

    (A - mean) / sqrt(var + epsilon). Long responses weigh more, for they have more tokens. One distinct value: exactly
    0.

    Attributes:
        of: The advantage; one that is scaled already is refused.
        epsilon: > 0, the square of an advantage.
        ddof: 0 for the population's variance (OpenRLHF), 1 for the sample's (verl).
        skip_degenerate: Leave groups of two or more equal rewards, and those smaller than the advantage inside needs,
            out of mean and variance and keep them at 0; otherwise subtracting the mean makes their zeros push.

    Source: REINFORCE++, arXiv 2501.03262; skip_degenerate is ours.
    """

    of: Advantage
    ddof: Literal[0, 1] = 0
    epsilon: float = 1e-8
    skip_degenerate: bool = False

    def center(self, batch: Batch) -> Tensor:
        """Return the centered advantage inside, Float64[B T]."""
        return self.of.center(batch)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages Float[B T]."""
        inner, returns = exactly(self.of, batch)
        counted = batch.is_graded
        if self.skip_degenerate:
            groups = Groups.of(batch)
            # A group too small for the baseline inside says nothing either.
            natural = (groups.size < 2) & (self.of.minimum_generations < 2)
            counted = counted & (groups.differ(batch.rewards) | natural)
        tokens = batch.mask & counted[:, None]
        values = inner[tokens]
        whitened = torch.zeros_like(inner)
        if len(values) > 0 and bool(values.max() > values.min()):
            variance = _deviation(values, self.ddof).square()
            whitened = torch.where(tokens, (inner - values.mean()) / (variance + self.epsilon).sqrt(), 0.0)
        return rounded(whitened, returns, batch)


def exactly(advantage: Advantage, batch: Batch) -> Found:
    """Return advantages and returns in float64, whatever the batch's own precision."""
    advantages, returns = advantage(batch.with_fields(behavior=batch.behavior.double()))
    return advantages.double(), returns


def rounded(advantages: Tensor, returns: Tensor | None, batch: Batch) -> Found:
    """Return both in the batch's own precision."""
    dtype = batch.behavior.dtype
    return advantages.to(dtype), None if returns is None else returns.to(dtype)


def spread(per_sequence: Tensor, batch: Batch) -> Tensor:
    """Return Float64[B T]: each graded response's value on each of its trained tokens, 0 elsewhere."""
    return torch.where(batch.mask & batch.is_graded[:, None], per_sequence[:, None], 0.0)


def penalized(batch: Batch, kl: float) -> Tensor:
    """Return Float64[B]: rewards less the penalty of all their tokens."""
    return batch.rewards.double() - kl_penalty(batch, kl).sum(1)


def kl_penalty(batch: Batch, coefficient: float) -> Tensor:
    """Return Float64[B T]: coefficient (log proximal - log reference), 0 where masked; zeros when it is 0.

    Raises:
        ConfigError: The policies were not scored.
    """
    if coefficient == 0:
        return torch.zeros(batch.mask.shape, dtype=torch.float64)
    if batch.reference is None or batch.proximal is None:
        missing = "reference" if batch.reference is None else "proximal"
        raise ConfigError(f"a KL to the reference in the reward needs '{missing}' log-probabilities")
    # A row of which the reference was not asked has no distance to it.
    mask = batch.mask & batch.is_taught[:, None]
    return coefficient * masked(batch.proximal.double() - batch.reference.double(), mask)


def _settle_singletons(centered: Tensor, rewards: Tensor, groups: Groups, rule: Singleton) -> Tensor:
    # The one graded response of its group.
    alone = (groups.size == 1) & groups.counted
    if rule == "error" and bool(alone.any()):
        raise GradingError(
            f"{int(alone.sum())} groups have one graded response, which is its own mean; set "
            "advantage.singleton = 'zero' to train nothing on them, or look at the grading errors"
        )
    return torch.where(alone, rewards if rule == "raw" else 0.0, centered)


def _deviation(values: Tensor, ddof: int) -> Tensor:
    # Written out, since torch.var is NaN for one value, and 0 is meant.
    squares = (values - values.mean()).square().sum() if len(values) else values.sum()
    return (squares / max(len(values) - ddof, 1)).sqrt()


def kl_needs(coefficient: float) -> frozenset[Need]:
    """Return what `kl_penalty` must have scored."""
    return frozenset({"proximal", "reference"}) if coefficient > 0 else frozenset()
