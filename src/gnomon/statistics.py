"""What may be concluded from samples: rates, intervals, and differences with the chance that they are noise.

Held-out accuracy is a mean over *prompts* of a mean over samples. Prompts are what differs between two draws of a
test set, so every interval here resamples prompts, never single samples.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import ConfigError

Floats = NDArray[np.float64]

# Resampled values held at once: 8 MB, whatever the number of prompts.
_BLOCK = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A range that holds the true value with the stated confidence.

    >>> Interval(0.1, 0.3).overlaps(Interval(0.25, 0.5)), 0.2 in Interval(0.1, 0.3)
    (True, True)
    """

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def overlaps(self, other: "Interval") -> bool:
        """Whether one value could be in both."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """The second mean minus the first, prompt by prompt.

    interval: of the difference. p_value: how often labels swapped at random give a difference as large, two-sided.
    """

    mean: float
    interval: Interval
    p_value: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds zero, so that the sign is not known."""
        return 0.0 in self.interval


def avg_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Return the mean over prompts of the mean over their samples; every prompt counts the same.

    >>> avg_at_k([[1, 0], [1, 1, 1]])
    0.75

    Raises: ConfigError without prompts, or for a prompt without samples.
    """
    if not scores or any(len(row) == 0 for row in scores):
        raise ConfigError("avg@k needs at least one prompt, and one sample for each prompt")
    return sum(sum(row) / len(row) for row in scores) / len(scores)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without replacement, hold a correct one, c being correct.

    1 - C(n - c, k) / C(n, k): unbiased, where 1 - (1 - c/n)^k is too low. 1 when fewer than k are wrong.
    Source: Chen et al. 2021, arXiv 2107.03374, section 2.1, eq. 1.

    >>> pass_at_k(16, 5, 1)
    0.3125

    Raises: ConfigError unless 0 <= c <= n and 1 <= k <= n: with fewer than k samples there is no unbiased estimate.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigError(f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples, got {n=}, {c=}, {k=}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


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


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Return the score of the commonest answer, k being the number of answers.

    Answers that tie share the credit: the mean of their scores, which is what drawing one of them gives on average.
    ``None`` is no answer and has no vote; without any vote the score is 0. Equal answers that were scored differently
    count with their mean.

    >>> maj_at_k(["4", "5", "4"], [1.0, 0.0, 1.0]), maj_at_k(["4", "5"], [1.0, 0.0])
    (1.0, 0.5)

    Raises: ConfigError unless there are as many scores as answers, and at least one.
    """
    if not answers or len(answers) != len(scores):
        raise ConfigError(f"maj@k needs one score per answer, got {len(answers)} answers and {len(scores)} scores")
    votes: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(float(score))
    most = max((len(v) for v in votes.values()), default=0)
    winners = [sum(v) / len(v) for v in votes.values() if len(v) == most]
    return sum(winners) / len(winners) if winners else 0.0


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a rate.

    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Unlike p ± z sqrt(p(1-p)/n) it has a width at 0 and at 1
    and stays in [0, 1]. Without trials it is [0, 1].
    Source: Wilson 1927, J. Am. Stat. Assoc. 22, 209-212.

    >>> str(wilson_interval(0, 10))
    '[0.000, 0.278]'
    """
    _check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise ConfigError(f"successes must be in [0, trials], got {successes} of {trials}")
    if trials == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p, scale = successes / trials, 1 + z * z / trials
    center = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    # At the ends the formula is exact only up to rounding: 0 of n must contain 0.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == trials else min(1.0, center + half)
    return Interval(low, high)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the percentile bootstrap interval of the mean of ``values``, one per prompt.

    Deterministic: the same values, seed and resamples give the same interval. Values that are all equal give no width,
    which claims too much: `mean_interval` covers that case.
    Source: Efron and Tibshirani 1993, chapter 13.
    Raises: ConfigError without values, or when one is not finite.
    """
    _check_confidence(confidence)
    means = _resampled_means(_finite(values), resamples, np.random.default_rng(seed))
    return _percentiles(means, confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return an interval of the mean that is honest at the ends.

    Wilson's where every value is 0 or 1, and where all values are one number in [0, 1] (no value in [0, 1] varies more
    than a coin of that mean, so it is at least as wide as needed); the bootstrap otherwise.

    >>> str(mean_interval([0.0] * 200))
    '[0.000, 0.019]'
    """
    listed = _finite(values)
    is_coin = bool(np.isin(listed, (0.0, 1.0)).all())
    is_constant = bool((listed == listed[0]).all()) and 0.0 <= float(listed[0]) <= 1.0
    if is_coin or is_constant:
        return wilson_interval(min(float(listed.mean()), 1.0) * len(listed), len(listed), confidence)
    return bootstrap_interval(values, confidence, seed=seed)


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return mean(second) - mean(first) over the same prompts in the same order.

    Pairing removes what makes one prompt harder than another, so a smaller gain can be told from noise. The interval
    is a bootstrap over prompts; the p-value a sign-flip permutation test, exact when 2^n <= resamples, otherwise
    (1 + as large) / (1 + resamples), which is never 0.
    Source: Fisher 1935 (randomization test); Phipson and Smyth 2010, arXiv 1603.05766 (the added one).

    >>> round(paired_difference([0, 0, 0], [1, 1, 1]).p_value, 3)
    0.25

    Raises: ConfigError unless both have the same length, at least 1, and are finite.
    """
    _check_confidence(confidence)
    if len(first) != len(second):
        raise ConfigError(f"a paired difference needs the same prompts twice, got {len(first)} and {len(second)}")
    gains = _finite(second) - _finite(first)
    random = np.random.default_rng(seed)
    interval = _percentiles(_resampled_means(gains, resamples, random), confidence)
    return Difference(float(gains.mean()), interval, _sign_flip(gains, resamples, random))


def _sign_flip(gains: Floats, resamples: int, random: np.random.Generator) -> float:
    count, observed = len(gains), abs(float(gains.sum()))
    # Sums of the same numbers in another order differ by rounding; without slack a tie would be lost.
    bar = observed - 1e-12 * max(1.0, float(np.abs(gains).sum()))
    if count < 63 and 2**count <= resamples:
        codes = np.arange(2**count, dtype=np.int64)[:, None]
        signs = 1 - 2 * ((codes >> np.arange(count)) & 1)
        return float((np.abs(signs @ gains) >= bar).mean())
    hits = 0
    for size in _blocks(resamples, count):
        signs = 1 - 2 * random.integers(0, 2, size=(size, count), dtype=np.int8)
        hits += int((np.abs(signs @ gains) >= bar).sum())
    return (1 + hits) / (1 + resamples)


def _resampled_means(values: Floats, resamples: int, random: np.random.Generator) -> Floats:
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}")
    count = len(values)
    blocks = [values[random.integers(0, count, size=(size, count))].mean(axis=1) for size in _blocks(resamples, count)]
    return np.concatenate(blocks)


def _blocks(resamples: int, count: int) -> list[int]:
    size = max(1, _BLOCK // count)
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def _percentiles(means: Floats, confidence: float) -> Interval:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def _finite(values: Sequence[float]) -> Floats:
    listed = np.asarray(values, dtype=np.float64)
    if listed.ndim != 1 or len(listed) == 0 or not bool(np.isfinite(listed).all()):
        raise ConfigError(f"an interval needs a list of at least one finite number, got {list(values)[:5]}")
    return listed


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1, such as 0.95, got {confidence}")
