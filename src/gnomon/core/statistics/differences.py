"""Two results on the same prompts: their difference, the chance that it is noise, and how many prompts would tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError
from gnomon.core.statistics.intervals import (
    RESAMPLES,
    Floats,
    Interval,
    blocks,
    check_confidence,
    finite,
    span,
    wilson_interval,
)

SIGNIFICANCE = 0.05
"""A p-value up to this is called beyond noise; two-sided."""
POWER = 0.8
"""The chance of finding a difference that is there which `prompts_needed` asks for."""
FEWEST = 6
"""With fewer prompts no sign-flip test reaches 5%: 2 / 2^5 > 0.05 >= 2 / 2^6."""
MCNEMAR, SIGN_FLIP = "McNemar's exact test", "exact sign-flip test"
# A mean over k samples is a multiple of 1/k; so are differences of two such means of some common k.
_LARGEST_DENOMINATOR = 4096
_MOST_COUNTED = 200_000_000


@dataclass(frozen=True)
class Difference:
    """The second mean minus the first, prompt by prompt.

    Attributes:
        first, second: The two means over the shared prompts.
        interval: 95% of the difference: those that the same test would not call beyond noise, so it holds 0 whenever
            the difference `is_noise`.
        p_value: How often labels swapped at random within prompts give a difference as large, two-sided; ``test`` says
            by which test. It decides whether the difference `is_noise`; the interval says how large the difference may
            be.
        spread: Standard deviation of a prompt's difference.
        prompts: Number of prompts that were paired.
        left_out: Number of prompts that only one side has.
        samples: Answers a prompt on each side, in words, where they are not the same number.
    """

    mean: float
    interval: Interval
    p_value: float
    first: float
    second: float
    spread: float
    prompts: int
    test: str
    left_out: int = 0
    samples: str = ""

    @property
    def is_noise(self) -> bool:
        """Whether swapped labels give as large a difference in more than 5 of 100 cases."""
        return self.p_value > SIGNIFICANCE

    @property
    def prompts_needed(self) -> int | None:
        """Prompts that would find the difference seen, were it the true one; None when none was seen."""
        return prompts_needed(self.mean, self.spread)

    @property
    def detectable(self) -> float:
        """The smallest true difference that so many prompts find 4 times in 5."""
        return _DISTANCE * self.spread / math.sqrt(self.prompts)

    @property
    def words(self) -> str:
        """One or two sentences: the numbers, whether they are beyond noise, and what would settle it if not."""
        numbers = (
            f"{self.first:.3f} to {self.second:.3f}, a difference of {self.mean:+.3f} {self.interval} over "
            f"{self.prompts} shared prompts ({in_words(self.p_value)}, {self.test})"
        )
        if not self.is_noise:
            return f"{numbers}: beyond noise{self._next_to}."
        return f"{numbers}: within noise{self._next_to}. {self._advice}"

    @property
    def _next_to(self) -> str:
        uneven = f" ({self.samples} answers a prompt)" if self.samples else ""
        if not self.left_out:
            return uneven
        return f"{uneven} ({self.left_out} prompts that only one of the two answered are left out)"

    @property
    def _advice(self) -> str:
        if self.spread == 0 and self.mean == 0:
            return "The two did equally well on every prompt; more prompts, or samples, may still tell them apart."
        if self.prompts < FEWEST:
            return f"Fewer than {FEWEST} prompts settle nothing, however large the difference; ask more."
        finds = f"So many prompts find a true difference of {self.detectable:.3f} or more 4 times in 5"
        needed = self.prompts_needed
        if needed is None:
            return f"{finds}."
        if needed <= self.prompts:
            return f"{finds}; the p-value is near the limit, and another {self.prompts} prompts would settle it."
        return f"{finds}; one of {abs(self.mean):.3f} takes about {needed:,} prompts."


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    limits: tuple[float, float] | None = None,
) -> Difference:
    """Return mean(second) - mean(first) over the same prompts in the same order.

    Pairing removes what makes one prompt harder than another, so a smaller gain can be told from noise. The p-value is
    that of the sign-flip permutation test over prompts: were the two alike, each prompt's difference could as well have
    had the other sign. It needs no normal distribution and no equal variances. Where scores are means of 0 or 1, or of
    other multiples of one step, all 2^n patterns of signs are counted out (a convolution over prompts), so the p-value
    is exact for any number of prompts. With one 0-or-1 sample a prompt this is McNemar's exact test, the binomial test
    of the prompts on which the two disagree. Other scores are counted out while 2^n <= resamples; beyond that the
    p-value is (1 + as large) / (1 + resamples), never 0. The interval is the same test turned round: the differences d
    that it would not reject were they taken off every prompt. Its ends are percentiles of the means of random subsets
    of the prompts, each in or out by a coin: a pattern of signs that minuses the subset M makes the sum of (gain - d)
    as large exactly if mean(M) <= d. The empty subset has no mean and ends at what is possible at all, so with fewer
    than 6 prompts that is the interval.

    Differences that are all one number d have an interval of some width: with Wilson's u for 0 of n, at most a share u
    of prompts differs from what was seen, and with w = highest - lowest it is [d - u (w + d), d + u (w - d)], widened
    to 0 where the test does not reject.

    Args:
        limits: Lowest and highest that a score can be, which says what is possible; None takes [0, 1] where all scores
            are in it, else the lowest and highest seen.

    Raises:
        ConfigError: The two differ in length, are empty, or hold a number that is not finite.

    Source: Fisher 1935 (randomization test); McNemar 1947, Psychometrika 12, 153-157; Phipson and Smyth 2010, arXiv
    1603.05766 (the added one); Hartigan 1969, J. Am. Stat. Assoc. 64, 1303-1317 (subset means as typical values).

    >>> round(paired_difference([0, 0, 0], [1, 1, 1]).p_value, 3)
    0.25
    """
    check_confidence(confidence)
    if len(first) != len(second):
        raise ConfigError(f"a paired difference needs the same prompts twice, got {len(first)} and {len(second)}")
    before, after = finite(first), finite(second)
    gains, random = after - before, np.random.default_rng(seed)
    low, high = span(np.concatenate([before, after])) if limits is None else limits
    is_binary = bool(np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all())
    p_value, test = _sign_flip(gains, resamples, random, is_binary)
    interval = _constant(gains, confidence, high - low)
    is_noise = p_value > 1 - confidence
    if interval is None:
        interval = _not_rejected(_subset_means(gains, resamples, random), gains, confidence, high - low)
        interval = interval if is_noise else _without_zero(interval, gains)
    return Difference(
        mean=float(gains.mean()),
        interval=_with_zero(interval, float(gains.mean())) if is_noise else interval,
        p_value=p_value,
        first=float(before.mean()),
        second=float(after.mean()),
        spread=float(gains.std(ddof=1)) if len(gains) > 1 else 0.0,
        prompts=len(gains),
        test=test,
    )


def prompts_needed(mean: float, spread: float, power: float = POWER, significance: float = SIGNIFICANCE) -> int | None:
    """Return how many prompts find a true difference of ``mean`` with the probability ``power``.

    n = ((z_(1 - significance / 2) + z_power) spread / mean)^2, at least 6: below that no sign-flip test reaches 5%.

    Args:
        spread: Standard deviation over prompts of a prompt's difference, at the samples a prompt that it was measured
            with; more samples make it smaller.

    Returns:
        The number of prompts; None for a mean of 0, which no number of prompts tells from 0.

    Source: the normal approximation of a paired test's power, such as Miller 2024, arXiv 2411.00640, section 5.

    >>> prompts_needed(0.05, 0.5)
    785
    """
    if mean == 0:
        return None
    distance = NormalDist().inv_cdf(1 - significance / 2) + NormalDist().inv_cdf(power)
    return max(FEWEST, math.ceil((distance * spread / mean) ** 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the order given: each may be held against 5% by itself.

    The i-th smallest of m (from 0) becomes the largest of (m - j) p_j over j <= i, at most 1. The chance of one false
    finding or more is then 5% at most, however the comparisons depend on each other; never less powerful than
    Bonferroni's m p.

    Raises:
        ConfigError: A value is no probability.

    Source: Holm 1979, Scand. J. Statist. 6, 65-70.

    >>> [round(p, 10) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ConfigError(f"p-values are in [0, 1], got {list(p_values)}")
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def in_words(p_value: float) -> str:
    """Return a p-value as it is written.

    >>> in_words(0.00004), in_words(0.25)
    ('p < 0.001', 'p = 0.250')
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


_DISTANCE = NormalDist().inv_cdf(1 - SIGNIFICANCE / 2) + NormalDist().inv_cdf(POWER)


def _constant(gains: Floats, confidence: float, width: float) -> Interval | None:
    """Return the interval of gains that are all one number, None of others; width: of what a score can be."""
    common = float(gains[0])
    if not bool((gains == common).all()):
        return None
    unseen = wilson_interval(0, len(gains), confidence).high
    return Interval(common - unseen * (width + common), common + unseen * (width - common))


def _subset_means(gains: Floats, resamples: int, random: np.random.Generator) -> Floats:
    """Return the means of random subsets, sorted; NaN, at the end, for empty ones."""
    means = []
    for size in blocks(resamples, len(gains)):
        chosen = random.integers(0, 2, size=(size, len(gains)), dtype=np.int8)
        with np.errstate(invalid="ignore"):
            means.append((chosen @ gains) / chosen.sum(axis=1))
    return np.sort(np.concatenate(means))


def _not_rejected(means: Floats, gains: Floats, confidence: float, width: float) -> Interval:
    """Return the differences that the sign-flip test would not reject; width: of what a score can be."""
    tail, empty = (1 - confidence) / 2, 0.5 ** len(gains)
    known = means[~np.isnan(means)]
    if empty > tail or len(known) == 0:
        return Interval(-width, width)
    # The empty subset lies beyond either end: its 2^-n of the tail is spent already.
    inner = (tail - empty) / (1 - empty)
    low, high = np.quantile(known, [inner, 1 - inner])
    return Interval(float(low), float(high))


def _with_zero(interval: Interval, mean: float) -> Interval:
    """Return the interval, reaching 0: drawn subsets may miss by a hair what the test counted out."""
    return Interval(min(interval.low, 0.0, mean), max(interval.high, 0.0, mean))


def _without_zero(interval: Interval, gains: Floats) -> Interval:
    """Return the interval, ending short of 0 on the side of no gain, by less than one prompt's smallest part of it."""
    mean, least = float(gains.mean()), float(np.abs(gains[gains != 0]).min()) / len(gains)
    if mean > 0:
        return Interval(max(interval.low, min(least, mean)), interval.high)
    return Interval(interval.low, min(interval.high, max(-least, mean)))


def _sign_flip(gains: Floats, resamples: int, random: np.random.Generator, is_binary: bool) -> tuple[float, str]:
    """Return the p-value and the test's name; is_binary: whether all scores are 0 or 1."""
    steps = _steps(gains)
    if steps is not None:
        return _counted(steps), MCNEMAR if is_binary else SIGN_FLIP
    count, observed = len(gains), abs(float(gains.sum()))
    # Sums of the same numbers in another order differ by rounding; without slack a tie would be lost.
    bar = observed - 1e-12 * max(1.0, float(np.abs(gains).sum()))
    if count < 63 and 2**count <= resamples:
        codes = np.arange(2**count, dtype=np.int64)[:, None]
        signs = 1 - 2 * ((codes >> np.arange(count)) & 1)
        return float((np.abs(signs @ gains) >= bar).mean()), SIGN_FLIP
    hits = 0
    for size in blocks(resamples, count):
        signs = 1 - 2 * random.integers(0, 2, size=(size, count), dtype=np.int8)
        hits += int((np.abs(signs @ gains) >= bar).sum())
    return (1 + hits) / (1 + resamples), f"sign-flip test, {resamples:,} draws"


def _steps(gains: Floats) -> NDArray[np.int64] | None:
    """Return the gains as whole multiples of one step; None where there is none, or too many to count."""
    distinct = {float(g): Fraction(float(g)).limit_denominator(_LARGEST_DENOMINATOR) for g in np.unique(gains)}
    if any(abs(float(near) - gain) > 1e-12 for gain, near in distinct.items()):
        return None
    unit = math.lcm(*(near.denominator for near in distinct.values()))
    whole = {gain: int(near * unit) for gain, near in distinct.items()}
    shared = math.gcd(*whole.values()) or 1
    total = sum(abs(whole[float(g)]) // shared for g in gains)
    if total * len(gains) > _MOST_COUNTED:
        return None
    return np.array([whole[float(g)] // shared for g in gains], dtype=np.int64)


def _counted(steps: NDArray[np.int64]) -> float:
    """Return the share of all patterns of signs whose sum is as far from 0 as the observed one.

    The sum of signed steps is 2 t - S, where t is the sum of those with a plus and S of all sizes: the distribution of
    t is a convolution of coins.
    """
    sizes = np.abs(steps)
    total, observed = int(sizes.sum()), abs(int(steps.sum()))
    chances = np.zeros(total + 1)
    chances[0] = 1.0
    for size in sizes[sizes > 0]:
        halved = chances / 2
        chances = halved.copy()
        chances[size:] += halved[: total + 1 - size]
    sums = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chances[sums >= observed].sum()))
