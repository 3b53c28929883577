"""What may be concluded from samples: rates, intervals, and differences with the chance that they are noise.

Held-out accuracy is a mean over *prompts* of a mean over samples. Prompts are what differs between two draws of a
test set, so every interval and every test here is over prompts, never over single samples.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import ConfigError

# What k samples of a prompt amount to: their mean, the chance that one is right, and what their majority says.

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
    # Exact integers; a product of ratios of floats would lose digits for large n.
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
    # Samples without an answer are drawn like any other, and vote for nobody.
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
        # (quadrature points, votes of the others): row u is the polynomial in x for one lot of the winner.
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
    # Exact binomials, turned into logarithms one by one: the factorials themselves leave float64 at 171.
    for j in range(count):
        choices = choices * (count - j) // (j + 1)
        ways.append(math.log(choices))
    chances: Floats = np.exp(np.array(ways) + i * math.log(p) + (count - i) * math.log1p(-p))
    return chances


# Intervals that hold a rate or a mean over prompts with a stated confidence.

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
    return macro_interval([values], confidence)


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


def macro_interval(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
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
        random = np.random.default_rng(0)
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
    # An upper end is found by doubling, and then halved until float64 has nothing in between.
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
    # (resamples of a block, prompts), averaged over prompts.
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


# Two results on the same prompts: their difference, the chance that it is noise, and how many prompts would tell.

SIGNIFICANCE = 0.05
"""A p-value up to this is called beyond noise; two-sided."""
POWER = 0.8
"""The chance of finding a difference that is there which `prompts_needed` asks for."""
_DISTANCE = NormalDist().inv_cdf(1 - SIGNIFICANCE / 2) + NormalDist().inv_cdf(POWER)
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
        """The smallest true difference that so many prompts detect at 80% power."""
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
        finds = f"Minimum detectable difference at 80% power: {self.detectable:.3f}"
        needed = self.prompts_needed
        if needed is None:
            return f"{finds}."
        if needed <= self.prompts:
            return f"{finds}; the p-value is near the limit, and another {self.prompts} prompts would settle it."
        return f"{finds}; {abs(self.mean):.3f} takes about {needed:,} prompts."


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
    # The test decides, and the interval is made to agree with it:
    # a reader must never see an interval without 0 called noise.
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


def prompts_needed(mean: float, spread: float) -> int | None:
    """Return how many prompts detect a difference of ``mean`` at 5% with a probability of 80%.

    n = ((z_0.975 + z_0.8) spread / mean)^2, at least 6: below that no sign-flip test reaches 5%.

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
    return max(FEWEST, math.ceil((_DISTANCE * spread / mean) ** 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons, in the order given: each may be held against 5% by itself.

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
    # The running maximum keeps the order: a larger p-value never gets a smaller corrected one.
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


def _constant(gains: Floats, confidence: float, width: float) -> Interval | None:
    """Return the interval of gains that are all one number, None of others; width: of what a score can be."""
    common = float(gains[0])
    if not bool((gains == common).all()):
        return None
    none_seen = wilson_interval(0, len(gains), confidence).high
    return Interval(common - none_seen * (width + common), common + none_seen * (width - common))


def _subset_means(gains: Floats, resamples: int, random: np.random.Generator) -> Floats:
    """Return the means of random subsets, sorted; NaN, at the end, for empty ones."""
    means = []
    for size in blocks(resamples, len(gains)):
        # (resamples of a block, prompts) of 0 and 1; the product adds up the chosen gains of each row.
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
        # Row c has the bits of c as its signs: every pattern once.
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
    # All gains as multiples of 1/unit, and then of the largest
    # step that they share, so that the table of sums is short.
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
    # One coin after the other: t grows by `size` with probability one half.
    for size in sizes[sizes > 0]:
        halved = chances / 2
        chances = halved.copy()
        chances[size:] += halved[: total + 1 - size]
    sums = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chances[sums >= observed].sum()))
