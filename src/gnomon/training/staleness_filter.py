"""What a step still trusts: groups that were kept, and that are too far from the policy that they would train."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.protocols import Need
from gnomon.algorithms.ratios import masked
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import EffectiveSize, Metrics
from gnomon.core.types import Batch
from gnomon.rollouts.scheduler import RolloutBatch, RolloutScheduler

# exp(20) is 5e8: one such token already outweighs every batch, and the square still fits a float64.
_CLAMP = 20.0
"""Nats that a log ratio counts at most, either way: beyond it exp says nothing but "far"."""


@dataclass(frozen=True)
class NoFilter:
    """No filter: whatever the bound on staleness lets through is trained on."""

    needs: Set[Need] = frozenset()

    def apply(self, finished: RolloutBatch, batch: Batch, version: int) -> tuple[RolloutBatch, Batch, Metrics]:
        """Remove nothing."""
        return finished, batch, Metrics()


@dataclass(frozen=True)
class EssFilter:
    """Train on a batch of effective sample size ``floor`` at least, and ask as far ahead as that allows.

        ESS = (sum w)^2 / (n sum w^2),  w = exp(proximal - behavior) of each trained token

    It is the share of the n tokens that would say as much if the policy itself had sampled them. Below the floor whole
    groups go, one after the other, each time the one without which the rest has the largest ESS; of equals the one of
    older weights. That is not the group of the lowest own ESS: weights that are all 10 agree with each other and spoil
    the batch. Nor is it the oldest: an old answer that the policy would still give is as good as a new one. The choice
    depends on ratios and on no reward. The last group always stays, so that no step is empty.

    What is removed was paid for, so the stream is told: a batch of age a with an ESS below the floor lets it ask a - 1
    steps ahead from now on, one above (1 + floor) / 2 lets it ask a + 1, and between the two nothing changes. The age
    that was measured, rather than what was last allowed, makes it wait for the effect of each change.

    Fixed bounds count steps, which says nothing about how far these went.

    Source: ours. ESS of a whole batch as trust: P3O, arXiv 2605.12380, eq. 11.

    Attributes:
        floor: The smallest effective sample size of a batch, as a share of its tokens, in (0, 1).
        stream: Whose ``slack`` is set.
        algorithm: Says which tokens are trained on.

    Raises:
        ConfigError: If the floor is outside (0, 1).
    """

    floor: float
    stream: RolloutScheduler
    algorithm: Algorithm
    needs: Set[Need] = frozenset({"proximal"})

    def __post_init__(self) -> None:
        if not 0 < self.floor < 1:
            raise ConfigError(f"the floor of the effective sample size must be above 0 and below 1, got {self.floor}")

    def apply(self, finished: RolloutBatch, batch: Batch, version: int) -> tuple[RolloutBatch, Batch, Metrics]:
        """Return what is left, ``stream/ess_fraction`` of what was offered and ``stream/admitted_ess_fraction``."""
        trained = self.algorithm.trained(batch)
        sizes = _sizes(trained)
        offered = _total(sizes)
        # By what was offered: what is left has an ESS above the floor, whatever was asked too early.
        if offered.count:
            self._ask_ahead(offered.value, version - int(batch.version[trained.mask.any(1)].min()))
        ages = [version - min(r.oldest_version for r in group.rollouts) for group in finished.groups]
        stays = admitted(sizes, ages, self.floor)
        left = _total([sizes[place] for place in stays])
        measured = Metrics.of({"stream/ess_fraction": offered, "stream/admitted_ess_fraction": left})
        if len(stays) == len(sizes):
            return finished, batch, measured
        goes = [group for place, group in enumerate(finished.groups) if place not in set(stays)]
        kept = tuple(finished.groups[place] for place in stays)
        return replace(finished, groups=kept, off_policy=tuple(goes)), _of_groups(batch, stays), measured

    def _ask_ahead(self, ess: float, age: int) -> None:
        most = self.stream.max_staleness
        # The measured age, not the slack of now: a change takes effect only when prompts asked under it arrive.
        if ess < self.floor:
            self.stream.slack = most - max(0, min(age, most) - 1)
        elif ess > (1 + self.floor) / 2:
            self.stream.slack = most - min(age + 1, most)


StalenessFilter = EssFilter | NoFilter
"""What the training loop asks of a staleness filter, or of none."""


def admitted(sizes: Sequence[EffectiveSize], ages: Sequence[int], floor: float) -> list[int]:
    """Return the places of the groups that stay, in their order.

    Groups without a trained token weigh nothing; they stay, and cannot be the last one.

    Args:
        ages: Ages in steps.

    >>> even, wild = EffectiveSize.of([1.0, 1.0]), EffectiveSize.of([30.0, 0.1])
    >>> admitted([even, wild, even], [0, 0, 0], floor=0.5)
    [0, 2]
    """
    # Greedy, since the best subset would need exponentially many trials; each round recomputes the ESS of every
    # remainder from the three sums of its groups.
    stays = list(range(len(sizes)))
    while _total([sizes[place] for place in stays]).value < floor:
        # Removing a group without trained tokens would change nothing and end in a loop.
        counted = [place for place in stays if sizes[place].count]
        if len(counted) < 2:
            break

        def rest(out: int) -> tuple[float, int]:
            # The second number breaks ties in favor of removing older weights.
            return _total([sizes[place] for place in stays if place != out]).value, ages[out]

        stays.remove(max(counted, key=rest))
    return stays


def _sizes(batch: Batch) -> list[EffectiveSize]:
    """Return the three sums of each group, of which those of any set of groups are sums again."""
    assert batch.proximal is not None, "scoring comes first"
    log_ratio = masked(batch.proximal.double() - batch.behavior.double(), batch.mask)
    ratio = masked(log_ratio.clamp(-_CLAMP, _CLAMP).exp(), batch.mask)
    rows = torch.stack([batch.mask.sum(1).double(), ratio.sum(1), ratio.square().sum(1)], 1)
    # Group ids count from 0 in a batch, so they are also the places of the groups.
    groups = int(batch.group.max()) + 1
    sums = torch.zeros(groups, 3, dtype=torch.float64).index_add_(0, batch.group, rows)
    return [EffectiveSize(*row) for row in sums.tolist()]


def _total(sizes: Sequence[EffectiveSize]) -> EffectiveSize:
    return sum(sizes, EffectiveSize())


def _of_groups(batch: Batch, places: Sequence[int]) -> Batch:
    """Return the rows of these groups, with groups counted from 0 again."""
    # -1 marks a group that was removed; the others are renumbered without gaps, as `Batch.group` requires.
    number = torch.full((int(batch.group.max()) + 1,), -1)
    number[list(places)] = torch.arange(len(places))
    rows = (number[batch.group] >= 0).nonzero()[:, 0]
    left = batch.rows(rows)
    return left.with_fields(group=number[left.group])
