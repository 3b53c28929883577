"""Intervals that hold a rate or a mean over prompts with a stated confidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError

Floats = NDArray[np.float64]

RESAMPLES = 10_000
"""Resamples of a bootstrap, and draws of a test that cannot be counted out."""
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


def wilson_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a rate.

    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Unlike p ± z sqrt(p(1-p)/n) it has a width at 0 and at 1
    and stays in [0, 1]. Without trials it is [0, 1].

    Args:
        trials: Number of trials; a fraction is allowed, see `score_interval`.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22, 209-212.

    >>> str(wilson_interval(0, 10))
    '[0.000, 0.278]'
    """
    check_confidence(confidence)
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


def score_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of the mean of values in [0, 1], one per prompt, with their effective number.

    n_eff = q (1 - q) / v: as many 0-or-1 prompts would have a mean of the same variance. q and v are the mean and the
    squared standard error of the values and two more, a 0 and a 1. Without these two a sample that happens to hold none
    of the rare prompts says that nothing varies, which is how the bootstrap goes wrong there. n_eff is never less than
    the number of values plus 1.

    Raises:
        ConfigError: There are no values, or one is outside [0, 1].

    Source: Korn and Graubard 1998, Survey Methodology 24, 193-201 (the effective sample size in an interval of a
    proportion); Agresti and Caffo 2000, Am. Stat. 54, 280-288 (one success and one failure more); their combination is
    ours, measured in docs/evaluation.md.

    >>> str(score_interval([0.0, 0.25, 0.5, 0.75, 1.0] * 8))
    '[0.392, 0.608]'
    """
    listed = finite(values)
    if listed.min() < 0 or listed.max() > 1:
        raise ConfigError(
            f"a score interval needs values in [0, 1], got {float(listed.min())} to {float(listed.max())}"
        )
    more = np.concatenate([listed, (0.0, 1.0)])
    center = float(more.mean())
    effective = center * (1 - center) / (float(more.var(ddof=1)) / len(more))
    return wilson_interval(min(float(listed.mean()), 1.0) * effective, effective, confidence)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the percentile bootstrap interval of the mean of ``values``, one per prompt.

    Deterministic: the same values, seed and resamples give the same interval. Values that are all equal give no width,
    which claims too much; few values, or rare ones, too little. Of values in [0, 1] `score_interval` is better;
    docs/evaluation.md says how often each held the true mean.

    Raises:
        ConfigError: There are no values, or one is not finite.

    Source: Efron and Tibshirani 1993, chapter 13.
    """
    check_confidence(confidence)
    means = resampled_means(finite(values), resamples, np.random.default_rng(seed))
    return percentiles(means, confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return an interval of the mean that is honest at the ends.

    Wilson's where every value is 0 or 1, and where all values are one number in [0, 1] (no value in [0, 1] varies more
    than a coin of that mean, so it is at least as wide as needed); `score_interval` of other values in [0, 1]; the
    bootstrap of values that leave it. Beyond [0, 1] all values being one number is no width: nothing bounds the others.

    >>> str(mean_interval([0.0] * 200))
    '[0.000, 0.019]'
    """
    listed = finite(values)
    if listed.min() < 0 or listed.max() > 1:
        return bootstrap_interval(values, confidence, seed=seed)
    is_coin = bool(np.isin(listed, (0.0, 1.0)).all())
    if is_coin or bool((listed == listed[0]).all()):
        return wilson_interval(min(float(listed.mean()), 1.0) * len(listed), len(listed), confidence)
    return score_interval(values, confidence)


def macro_interval(groups: Sequence[Sequence[float]], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return an interval of the mean of the groups' means, each group counting the same whatever its size.

    Groups are drawn apart: v = sum of v_g / K^2 with v_g as in `score_interval`, and Wilson's interval is taken with
    the effective number q (1 - q) / v, q the mean of the groups' means, each with its two values more. Values that
    leave [0, 1] are resampled within their group. One group gives `score_interval`.

    Raises:
        ConfigError: There is no group, or one without values.

    >>> values = [0.0, 0.25, 0.5, 0.75, 1.0] * 8
    >>> str(macro_interval([values])), str(macro_interval([values, values]))
    ('[0.392, 0.608]', '[0.423, 0.577]')
    """
    listed = [finite(values) for values in groups]
    if not listed:
        raise ConfigError("a macro average needs at least one group of values")
    if any(values.min() < 0 or values.max() > 1 for values in listed):
        check_confidence(confidence)
        random = np.random.default_rng(seed)
        drawn = [resampled_means(values, RESAMPLES, random) for values in listed]
        return percentiles(np.mean(drawn, axis=0), confidence)
    more = [np.concatenate([values, (0.0, 1.0)]) for values in listed]
    center = float(np.mean([values.mean() for values in more]))
    variance = sum(float(values.var(ddof=1)) / len(values) for values in more) / len(more) ** 2
    effective = center * (1 - center) / variance
    mean = float(np.mean([values.mean() for values in listed]))
    return wilson_interval(min(mean, 1.0) * effective, effective, confidence)


def student_p(t: float, df: float) -> float:
    """Return the two-sided p-value of Student's t.

    It is the regularized incomplete beta function I_x(df/2, 1/2) with x = df / (df + t^2): Lentz's continued fraction
    of I_x or of 1 - I_(1-x), whichever converges. Right to 1e-9 of itself for df from 1 to 1e6, also where it is tiny.

    Args:
        t: The statistic.
        df: Degrees of freedom, at least 1; need not be an integer.

    Source: Abramowitz and Stegun 1964, 26.5.8 and 26.7.1; Lentz 1976, Appl. Opt. 15, 668-671.

    >>> round(student_p(4.303, 2), 3), round(student_p(2.228, 10), 3), f"{student_p(5.0, 1001):.4g}"
    (0.05, 0.05, '6.766e-07')
    """
    a, square = df / 2, t * t
    if square == 0:
        return 1.0
    # ln of x^a (1 - x)^(1/2) / B(a, 1/2); the ratio of gamma functions by its series where they are too large to divide
    half = math.lgamma(a + 0.5) - math.lgamma(a) if a < 100 else math.log(a) / 2 - 1 / (8 * a) + 1 / (192 * a**3)
    front = math.exp(half - math.log(math.pi) / 2 - a * math.log1p(square / df) - math.log1p(df / square) / 2)
    x = 1 / (1 + square / df)
    if x < (a + 1) / (a + 2.5):
        return min(1.0, front * _beta_fraction(x, a, 0.5) / a)
    return max(0.0, 1 - front * _beta_fraction(1 / (1 + df / square), 0.5, a) / 0.5)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of I_x(a, b) / (x^a (1 - x)^b / (a B(a, b)))."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 100_000):
        before = value
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            value *= c * d
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return value


def student_quantile(p_value: float, df: float) -> float:
    """Return the t > 0 that Student's t exceeds, on either side together, with probability ``p_value``.

    By the p-value and not by 1 - p/2, which is 1 where a p-value is tiny.

    >>> round(student_quantile(0.05, 2), 2), round(student_quantile(0.05, 1), 1), f"{student_quantile(1e-12, 1):.4g}"
    (4.3, 12.7, '6.366e+11')
    """
    if not 0 < p_value <= 1:
        raise ConfigError(f"a p-value is above 0 and at most 1, got {p_value}")
    low, high = 0.0, 1.0
    while student_p(high, df) > p_value:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_p(middle, df) > p_value else (low, middle)
    return middle


def span(values: Floats) -> tuple[float, float]:
    """Return what such values can be: [0, 1] where all are in it, else from the lowest to the highest seen."""
    low, high = float(values.min()), float(values.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def resampled_means(values: Floats, resamples: int, random: np.random.Generator) -> Floats:
    """Return the means of ``resamples`` draws with replacement of as many values as there are."""
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}")
    count = len(values)
    drawn = [values[random.integers(0, count, size=(size, count))].mean(axis=1) for size in blocks(resamples, count)]
    return np.concatenate(drawn)


def blocks(resamples: int, count: int) -> list[int]:
    """Return how many resamples of ``count`` values to hold at once, adding up to ``resamples``."""
    size = max(1, _BLOCK // count)
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def percentiles(means: Floats, confidence: float) -> Interval:
    """Return the central range that holds a share of ``confidence`` of the means."""
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def finite(values: Sequence[float]) -> Floats:
    """Return the values as an array.

    Raises:
        ConfigError: There are no values, or one is not finite.
    """
    listed = np.asarray(values, dtype=np.float64)
    if listed.ndim != 1 or len(listed) == 0 or not bool(np.isfinite(listed).all()):
        raise ConfigError(f"an interval needs a list of at least one finite number, got {list(values)[:5]}")
    return listed


def check_confidence(confidence: float) -> None:
    """Raise ConfigError unless ``confidence`` is a probability short of certainty."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1, such as 0.95, got {confidence}")
