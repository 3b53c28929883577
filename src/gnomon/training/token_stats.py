"""Log-probabilities and entropies of each token, for a few rollouts of some steps."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from gnomon.core.metrics import Mean, Metrics
from gnomon.core.types import Batch
from gnomon.learner.base import Learner
from gnomon.records.token_records import TokenStats


@dataclass(frozen=True)
class NoTokenProbe:
    """No-op: return nothing and compute nothing."""

    async def probe(self, batch: Batch, step: int) -> tuple[TokenStats | None, Metrics]:
        """Return nothing."""
        return None, Metrics()


@dataclass(frozen=True)
class SampledTokenProbe:
    """Computes log-probability and entropy of each token of a few answers, in a pass of their own without gradient.

    A step with one update never scores its answers before it, and of an answer whose group is alike it computes nothing
    at all; but those are among the ones that a person reads.

    Attributes:
        most: Answers of one step, and no more than one in ``one_in`` of those that are trained, but one at least.
        every: Steps between looks, the first and the ``last`` one (from 0) are looked at; a report shows a handful of
            answers from a whole run, and what nobody reads should cost nothing: less than a hundredth of the time
            (docs/report.md).
    """

    learner: Learner
    most: int
    every: int = 8
    one_in: int = 8

    async def probe(self, batch: Batch, step: int) -> tuple[TokenStats | None, Metrics]:
        """Look at the best, the worst, the most surprising, and the first answers."""
        began = time.perf_counter()
        rows = [] if step % self.every else telling_rows(batch, self.most, self.one_in)
        if not rows:
            return None, Metrics()
        logprobs, entropy = await self.learner.look(batch.rows(rows))
        seconds = time.perf_counter() - began
        return TokenStats(tuple(rows), logprobs, entropy), Metrics.of({"time/glimpse_seconds": Mean(seconds, 1)})


TokenProbe = SampledTokenProbe | NoTokenProbe
"""What the training loop calls for statistics of single tokens."""


def telling_rows(batch: Batch, most: int, one_in: int = 1) -> list[int]:
    """Return the numbers of the rows that a report would show first, in turn: best, worst, most surprising, first.

    Of each kind one answer to each question comes before a second one to any. A function of the batch alone.
    """
    rows = (batch.mask.any(1) & batch.is_graded).nonzero()[:, 0].tolist()
    rewards, groups = batch.rewards.tolist(), batch.group.tolist()
    expected = _means(rows, rewards, groups) if batch.baseline is None else dict(enumerate(batch.baseline.tolist()))
    orders = (
        sorted(rows, key=lambda row: -rewards[row]),
        sorted(rows, key=lambda row: rewards[row]),
        sorted(rows, key=lambda row: -abs(rewards[row] - expected[row])),
        rows,
    )
    in_turn = chain.from_iterable(zip_longest(*(_varied(order, groups) for order in orders)))
    chosen = list(dict.fromkeys(row for row in in_turn if row is not None))
    return chosen[: min(most, max(1, len(rows) // one_in))]


def _means(rows: Sequence[int], rewards: Sequence[float], groups: Sequence[int]) -> dict[int, float]:
    """Return for each row the mean reward of its group."""
    members: dict[int, list[float]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(rewards[row])
    return {row: sum(members[groups[row]]) / len(members[groups[row]]) for row in rows}


def _varied(rows: Sequence[int], groups: Sequence[int]) -> Iterator[int]:
    firsts = {groups[row]: row for row in reversed(rows)}
    among = set(firsts.values())
    yield from (row for row in rows if row in among)
    yield from (row for row in rows if row not in among)
