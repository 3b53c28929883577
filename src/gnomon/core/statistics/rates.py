"""What k samples of a prompt amount to: their mean, the chance that one is right, and what their majority says."""

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError

Floats = NDArray[np.float64]

# Of a chance that is summed in float64; its error is below 1e-13 for up to 128 samples.
_DECIMALS = 12


def avg_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Return the mean over prompts of the mean over their samples; every prompt counts the same.

    Raises:
        ConfigError: There are no prompts, or a prompt has no samples.

    >>> avg_at_k([[1, 0], [1, 1, 1]])
    0.75
    """
    if not scores or any(len(row) == 0 for row in scores):
        raise ConfigError("avg@k needs at least one prompt, and one sample for each prompt")
    return sum(sum(row) / len(row) for row in scores) / len(scores)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without replacement, hold a correct one, c being correct.

    1 - C(n - c, k) / C(n, k): unbiased, where 1 - (1 - c/n)^k is too low. 1 when fewer than k are wrong.

    Raises:
        ConfigError: 0 <= c <= n or 1 <= k <= n does not hold: with fewer than k samples there is no unbiased estimate.

    Source: Chen et al. 2021, arXiv 2107.03374, section 2.1, eq. 1.

    >>> pass_at_k(16, 5, 1)
    0.3125
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigError(f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples, got {n=}, {c=}, {k=}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int | None = None) -> float:
    """Return the score of the commonest answer among k of the n samples, on average over all choices of k.

    Without ``k`` all samples vote, which is the majority as one run of k = n samples shows it. Fewer than n have no
    single majority; the mean over every choice of k is to maj@k what `pass_at_k` is to pass@k: unbiased. Answers that
    tie share the credit: the mean of their scores, which is what drawing one of them gives on average. ``None`` is no
    answer and has no vote; without any vote the score is 0. Equal answers that were scored differently count with their
    mean.

    Chosen one by one with probability p = k/n, all choices that happen to have k samples are equally likely. So the
    chance that an answer wins with j votes is the coefficient of x^(k-j) in the product, over the other answers, of
    sum_{i<j} P(i chosen) x^i + u P(j chosen) x^j, divided by the chance of k in all; u in [0, 1] is the winner's lot
    among those that tie, and the integral over u (exact by Gauss's rule, for a polynomial) is its share of the credit.
    The sum is rounded to 12 decimals, so that what is certain is 1 and not a hair less.

    Raises:
        ConfigError: The numbers of scores and answers differ, there are none, or 1 <= k <= n does not hold.

    Source: ours; ties as a random choice among the tied, where verl takes the first that it met.

    >>> maj_at_k(["4", "5", "4"], [1.0, 0.0, 1.0]), maj_at_k(["4", "5"], [1.0, 0.0])
    (1.0, 0.5)
    >>> round(maj_at_k(["4", "5", "4"], [1.0, 0.0, 1.0], 2), 12)  # of the three pairs one is unanimous, two tie
    0.666666666667
    """
    if not answers or len(answers) != len(scores):
        raise ConfigError(f"maj@k needs one score per answer, got {len(answers)} answers and {len(scores)} scores")
    votes: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(float(score))
    n = len(answers)
    if k is not None and not 1 <= k <= n:
        raise ConfigError(f"maj@k needs 1 <= k <= samples, got k={k} of {n}")
    if k is None or k == n:
        return _majority(list(votes.values()))
    blank = n - sum(map(len, votes.values()))
    counts = tuple(sorted(map(len, votes.values())))
    means = ((len(v), sum(v) / len(v)) for v in votes.values())
    return round(sum(mean * _share(own, counts, blank, k) for own, mean in means if mean), _DECIMALS)


def degenerate_probability(success_rate: float, samples: int) -> float:
    """Return the chance that all samples of a prompt are right or all are wrong: a group that teaches nothing.

    p^G + (1 - p)^G, for independent samples of one success rate.
    Source: SPO, arXiv 2509.13232 (the cost of groups).

    >>> round(degenerate_probability(0.1, 8), 8)
    0.43046722
    """
    return success_rate**samples + (1 - success_rate) ** samples


def draws_until_mixed(success_rate: float) -> float:
    """Return how many samples of a prompt it takes on average until both a right and a wrong one were drawn.

    1 / (p (1 - p)) - 1; infinite where all samples are alike.
    Source: SPO, arXiv 2509.13232 (the cost of dynamic sampling).

    >>> round(draws_until_mixed(0.1), 8)
    10.11111111
    """
    spread = success_rate * (1 - success_rate)
    return 1 / spread - 1 if spread > 0 else math.inf


def _majority(votes: Sequence[Sequence[float]]) -> float:
    most = max(map(len, votes), default=0)
    winners = [sum(v) / len(v) for v in votes if len(v) == most]
    return sum(winners) / len(winners) if winners else 0.0


@lru_cache(maxsize=4096)
def _share(own: int, counts: tuple[int, ...], blank: int, k: int) -> float:
    """Return the expected share of the win of an answer that ``own`` samples gave when k vote, blank ones in vain."""
    n = sum(counts) + blank
    others = list(counts)
    others.remove(own)
    total = 0.0
    for votes in range(1, min(own, k) + 1):
        # At most (k - votes) // votes others can tie: the degree in u of what is integrated.
        lots, weights = np.polynomial.legendre.leggauss((k - votes) // votes // 2 + 1)
        lots, weights = (lots + 1) / 2, weights / 2
        product = np.zeros((len(lots), k - votes + 1))
        product[:, : blank + 1] = _chosen(blank, k / n)[: k - votes + 1]
        for other in others:
            product = _times(product, _chosen(other, k / n), votes, lots)
        total += float(_chosen(own, k / n)[votes] * (weights @ product[:, -1]))
    return total / float(_chosen(n, k / n)[k])


def _times(product: Floats, chances: Floats, votes: int, lots: Floats) -> Floats:
    """Return the product with an answer that has fewer votes, or as many and a worse lot."""
    width = product.shape[1]
    result = np.zeros_like(product)
    for i in range(min(len(chances) - 1, votes, width - 1) + 1):
        factor = chances[i] * (lots[:, None] if i == votes else 1.0)
        result[:, i:] += factor * product[:, : width - i]
    return result


@lru_cache(maxsize=1024)
def _chosen(count: int, p: float) -> Floats:
    """Return the chances that 0, 1, ... of ``count`` samples are chosen, each with probability 0 < p < 1."""
    i = np.arange(count + 1)
    ways, choices = [0.0], 1
    for j in range(count):
        choices = choices * (count - j) // (j + 1)
        ways.append(math.log(choices))
    chances: Floats = np.exp(np.array(ways) + i * math.log(p) + (count - i) * math.log1p(-p))
    return chances
