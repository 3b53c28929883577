"""Several algorithms on one experiment at equal cost: what the runs say together, and how sure one may be of it.

The same questions in the same order, the same budget of generated tokens (or seconds, or steps), several seeds. What
comes out is a `Comparison`: curves, final scores with intervals, every pair with a corrected p-value, and what it cost.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.analysis.compare.records import Cost, Trained, Unit
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.statistics import (
    POWER,
    RESAMPLES,
    SIGNIFICANCE,
    Interval,
    holm,
    mean_interval,
    paired_difference,
    wilson_interval,
)
from gnomon.core.statistics.intervals import span

# What scores over seeds and prompts, both drawn at random, let one say about a mean and about a difference.
#
# Another run of the same algorithm has another seed, another test of the same skill has other prompts; a claim about an
# algorithm is a claim about both. The rows of a table of scores are seeds, its columns prompts, the same for every
# seed.

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_LARGEST_DF = 1000.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)


@dataclass(frozen=True)
class Contrast:
    """The second mean minus the first, over the same seeds and prompts.

    interval: 95%. p_value: of a test that takes seeds and prompts as drawn at random, see `contrast`; with one seed of
    prompts alone, and `is_about_models` then: it says nothing about another seed. seed_variance, prompt_variance:
    squared standard errors of the mean, from seeds and from prompts. df: degrees of freedom of Student's t.
    """

    mean: float
    interval: Interval
    p_value: float
    seeds: int
    prompts: int
    seed_variance: float
    prompt_variance: float
    df: float

    @property
    def is_about_models(self) -> bool:
        """Whether one seed alone was run, so that two models were compared, and not two algorithms."""
        return self.seeds < 2

    @property
    def detectable(self) -> float:
        """The smallest true difference that a comparison of this size finds 4 times in 5, at 5% uncorrected."""
        spread = math.sqrt(self.seed_variance + self.prompt_variance)
        return (student_quantile(1 - SIGNIFICANCE / 2, self.df) + _NORMAL.inv_cdf(POWER)) * spread

    def seeds_needed(self, difference: float) -> int | None:
        """Return about how many seeds, on these prompts, find a true difference 4 times in 5; None if none do.

        The error from prompts is taken to stay as it is, though what they and the seeds do together shrinks as well.
        None also where one seed was run: how seeds differ is not known then.
        """
        left = _target(difference) - self.prompt_variance
        if left <= 0 or self.is_about_models:
            return None
        return max(2, math.ceil(self.seeds * self.seed_variance / left))

    def prompts_needed(self, difference: float) -> int:
        """Return about how many prompts it takes at least to find a true difference 4 times in 5."""
        return max(self.prompts, math.ceil(self.prompts * self.prompt_variance / _target(difference)))


def mean_over(scores: Floats, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return an interval of the mean of ``scores`` [seeds, prompts]: a hierarchical bootstrap.

    Each resample draws as many seeds as there are, with replacement, and as many prompts, the same for all seeds drawn.
    Few values vary too little when they are drawn from themselves, so what the choice of seeds does is stretched by
    t sqrt(n / (n - 1)) / z, Student's t for n - 1 degrees of freedom against the normal z: with seeds alone and many of
    them nothing changes, with 3 it is 2.7 times as wide. That is ours. With one seed nothing is known of seeds, and the
    interval is of prompts alone. Scores in [0, 1] give an interval in [0, 1]; where all prompts have the same mean over
    seeds, as when nothing was ever right, it is no narrower than Wilson's for so many prompts: resampled, they say that
    nothing varies.
    Source: two-way resampling, Owen 2007, arXiv 0712.1111 (the pigeonhole bootstrap).

    Raises: ConfigError unless there is a score for each of at least one seed and one prompt.
    """
    seeds, prompts = _shape(scores)
    if seeds == 1:
        return mean_interval([float(v) for v in scores[0]], confidence, seed)
    random = np.random.default_rng(seed)
    by_seed = scores.mean(axis=1)
    center = float(by_seed.mean())
    drawn_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    drawn_prompts = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples) / prompts
    of_seeds = stretch(seeds, confidence) * (drawn_seeds @ (by_seed - center))
    of_prompts = (drawn_seeds * (drawn_prompts @ (scores - by_seed[:, None]).T)).sum(axis=1)
    low, high = np.quantile(center + of_seeds + of_prompts, [(1 - confidence) / 2, (1 + confidence) / 2])
    if scores.min() >= 0 and scores.max() <= 1:
        low, high = max(0.0, low), min(1.0, high)
        if bool(np.isclose(scores.mean(axis=0), center, rtol=0, atol=1e-12).all()):
            unseen = wilson_interval(min(center, 1.0) * prompts, prompts, confidence)
            low, high = min(low, unseen.low), max(high, unseen.high)
    return Interval(min(float(low), center), max(float(high), center))


def stretch(seeds: int, confidence: float = 0.95) -> float:
    """Return by how much resampled means of so many seeds are too close together.

    >>> round(stretch(3), 2), round(stretch(100), 2)
    (2.69, 1.02)
    """
    upper = 0.5 + confidence / 2
    return student_quantile(upper, seeds - 1) / _NORMAL.inv_cdf(upper) * math.sqrt(seeds / (seeds - 1))


def contrast(first: Floats, second: Floats) -> Contrast:
    """Return how ``second`` differs from ``first``, both [seeds, prompts] of the same seeds and prompts.

    With d the differences, a = var(means over prompts) / seeds and b = var(means over seeds) / prompts, the statistic
    is mean(d)^2 / (a + b), held against Student's t squared with (a + b)^2 / (a^2 / (seeds - 1) + b^2 / (prompts - 1))
    degrees of freedom: min F', which counts what seeds and prompts do together twice and so errs towards "cannot be
    told apart". The p-value is never below that of the sign-flip test over prompts, which holds however the differences
    are distributed. Interval: mean ± t e with e = sqrt(a + b), or, where the sign-flip test decides, the larger e that
    makes Student's t say its p-value: so 0 is in the interval exactly if p is above 5%. Of scores in [0, 1] it is cut
    at -1 and 1. It is of this pair alone: Holm's correction of p-values does not widen it.
    Source: Clark 1973, J. Verbal Learning and Verbal Behavior 12, 335-359 (min F'); Satterthwaite 1946 (degrees).

    Raises: ConfigError unless both have the same shape.
    """
    if first.shape != second.shape:
        raise ConfigError(f"a contrast needs the same seeds and prompts twice, got {first.shape} and {second.shape}")
    seeds, prompts = _shape(first)
    by_prompt = paired_difference(first.mean(axis=0).tolist(), second.mean(axis=0).tolist())
    gains = second - first
    mean = float(gains.mean())
    of_seeds = float(gains.mean(axis=1).var(ddof=1)) / seeds if seeds > 1 else 0.0
    of_prompts = float(gains.mean(axis=0).var(ddof=1)) / prompts if prompts > 1 else 0.0
    if seeds == 1:
        found = (by_prompt.interval, by_prompt.p_value)
        return Contrast(mean, *found, seeds, prompts, of_seeds, of_prompts, max(1.0, prompts - 1.0))
    total = of_seeds + of_prompts
    df = _degrees(of_seeds, seeds, of_prompts, prompts)
    if total == 0:
        found = (by_prompt.interval, by_prompt.p_value)
    else:
        p_value = max(student_p(mean / math.sqrt(total), df), by_prompt.p_value)
        low, high = span(np.concatenate([first.ravel(), second.ravel()]))
        found = (_interval(mean, math.sqrt(total), df, p_value, high - low), p_value)
    return Contrast(mean, *found, seeds, prompts, of_seeds, of_prompts, df)


def _interval(mean: float, error: float, df: float, p_value: float, width: float) -> Interval:
    """Return the interval that goes with a p-value; error: at least the standard error; width: of what a score is."""
    if p_value > student_p(mean / error, df):
        t = student_quantile(1 - p_value / 2, df)
        error = max(error, abs(mean) / t) if t * width > abs(mean) / 1e6 else math.inf
    half = student_quantile(1 - SIGNIFICANCE / 2, df) * error
    low, high = mean - half, mean + half
    if p_value > SIGNIFICANCE:  # rounding aside it holds 0 already
        low, high = min(low, 0.0), max(high, 0.0)
    return Interval(max(low, -width), min(high, width))


def student_p(t: float, df: float) -> float:
    """Return how often Student's t is as far from 0 as this, two-sided; ``df`` of 1 or more need not be whole.

    With t = sqrt(df) tan(angle) the density is cos(angle)^(df - 1), integrated by Gauss and Legendre's rule; above
    1,000 degrees the normal distribution's.

    >>> round(student_p(4.303, 2), 3), round(student_p(2.228, 10), 3)
    (0.05, 0.05)
    """
    if df > _LARGEST_DF:
        return 2 * (1 - _NORMAL.cdf(abs(t)))
    angle = math.atan(abs(t) / math.sqrt(df))
    return min(1.0, _cosine_power(angle, df) / _cosine_power(0.0, df))


def student_quantile(chance: float, df: float) -> float:
    """Return the t above 0 that is exceeded with the probability 1 - ``chance``.

    >>> round(student_quantile(0.975, 2), 2), round(student_quantile(0.975, 1), 1)
    (4.3, 12.7)
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > 2 * (1 - chance) else (low, middle)
    return (low + high) / 2


def _cosine_power(start: float, df: float) -> float:
    half = (math.pi / 2 - start) / 2
    angles = start + half * (_NODES + 1)
    return float(half * (_WEIGHTS * np.cos(angles) ** (df - 1)).sum())


def _degrees(of_seeds: float, seeds: int, of_prompts: float, prompts: int) -> float:
    parts = [(of_seeds, seeds - 1), (of_prompts, prompts - 1)]
    below = sum(variance**2 / count for variance, count in parts if count)
    return (of_seeds + of_prompts) ** 2 / below if below else float(seeds - 1)


def _target(difference: float) -> float:
    """Return the squared standard error at which a true difference is found 4 times in 5."""
    return (difference / (_NORMAL.inv_cdf(1 - SIGNIFICANCE / 2) + _NORMAL.inv_cdf(POWER))) ** 2


def _shape(scores: Floats) -> tuple[int, int]:
    if scores.ndim != 2 or 0 in scores.shape or not bool(np.isfinite(scores).all()):
        raise ConfigError(f"scores are a finite number for each seed and prompt, got the shape {scores.shape}")
    return int(scores.shape[0]), int(scores.shape[1])


def band(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lowest and highest over seeds: what was seen, which is no interval of what may come.

    >>> band([0.2, 0.5, 0.2])
    (0.3, 0.2, 0.5)
    """
    return round(sum(values) / len(values), 12), min(values), max(values)


# Were the runs asked the same questions in the same order? Looked up in what they recorded, not assumed.
#
# A curriculum of shuffled epochs is a fixed row of questions that depends on the seed alone. Algorithms that ask
# several
# answers a question walk along it more slowly: with 8 answers a question 64 answers are 8 questions, with one they are
# 64. "The same order" therefore means that the shorter row is the beginning of the longer one. Two things may stand
# otherwise in it, and both are told: where an epoch ends within a step, a question that the step holds already is put
# off to the next; and groups that dynamic sampling refused are recorded after those that were kept.


@dataclass(frozen=True)
class RunOrder:
    """What two runs of one seed have in common in what they asked.

    verdict: "same", question by question; "same but for the ends of epochs"; "same, step by step" where only the set of
    questions that were asked up to the end of each step can be compared; "other"; "unknown" without recorded rollouts,
    or where both refused groups.
    questions: that were compared.
    """

    first: str
    second: str
    seed: int
    verdict: str
    questions: int

    @property
    def is_same(self) -> bool:
        """Whether the questions were the same, in the sense that the verdict says."""
        return self.verdict.startswith("same")


def order_of(first: Trained, second: Trained, epoch: int) -> RunOrder:
    """Return whether two runs of one seed asked the same questions in the same order. epoch: training questions."""
    one, other = ([task for step in run.asked for task in step] for run in (first, second))
    count = min(len(one), len(other))
    if not count:
        verdict = "unknown"
    elif one[:count] == other[:count]:
        verdict = "same"
    elif _are_ends(one[:count], other[:count], epoch, _largest(first, second)):
        verdict = "same but for the ends of epochs"
    elif first.is_filtered and second.is_filtered:
        verdict = "unknown"
    elif (first.is_filtered or second.is_filtered) and _are_sets(first, second):
        verdict = "same, step by step"
    else:
        verdict = "other"
    return RunOrder(first.algorithm, second.algorithm, first.seed, verdict, count)


def _largest(*runs: Trained) -> int:
    return max(len(step) for run in runs for step in run.asked)


def _are_ends(one: Sequence[str], other: Sequence[str], epoch: int, step: int) -> bool:
    """Whether each question comes within a step of where the other row has it, and those that move do so at an end.

    The last step of the rows is left out: what is put off from it comes behind their end.
    """
    left, right = _visits(one), _visits(other)
    for visit, place in left.items():
        found = right.get(visit, place + len(one))
        is_end = abs(place - max(1, round(place / epoch)) * epoch) <= 2 * step
        is_far = abs(place - found) > step and min(place, found) < len(one) - step
        if place != found and (not is_end or is_far):
            return False
    return True


def _visits(row: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return where each question stands for the first, the second, and every further time."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], int] = {}
    for place, task in enumerate(row):
        found[task, seen[task]] = place
        seen[task] += 1
    return found


def _are_sets(first: Trained, second: Trained) -> bool:
    """Whether at the end of each step of the one that refused, it had asked what the row of the other begins with."""
    filtered, plain = (first, second) if first.is_filtered else (second, first)
    row = [task for step in plain.asked for task in step]
    asked: Counter[str] = Counter()
    ends = list(accumulate(len(step) for step in filtered.asked))
    for step, end in zip(filtered.asked, ends, strict=True):
        asked.update(step)
        if end <= len(row) and asked != Counter(row[:end]):
            return False
    return bool(ends) and ends[0] <= len(row)


_BINS = 24


@dataclass(frozen=True)
class Band:
    """A point of a curve: mean, lowest and highest over seeds, after so many tokens (the mean over seeds)."""

    tokens: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Ranking:
    """How one algorithm did.

    seeds: that finished. score: mean over seeds and prompts at the end; interval: of it, see `mean_over`. by_seed: the
    score of each. curve: held-out scores on the way; rewards: training rewards, of the questions that the algorithm
    asked, which need not be those of another. cost: mean over seeds.
    """

    name: str
    seeds: tuple[int, ...]
    score: float
    interval: Interval
    by_seed: tuple[float, ...]
    curve: tuple[Band, ...]
    rewards: tuple[Band, ...]
    cost: Cost


@dataclass(frozen=True)
class Pairing:
    """Two algorithms on the seeds that both finished. corrected: the p-value, by Holm for the number of pairs."""

    first: str
    second: str
    contrast: Contrast
    corrected: float

    @property
    def is_noise(self) -> bool:
        """Whether the two cannot be told apart."""
        return self.corrected > SIGNIFICANCE


@dataclass(frozen=True)
class ComparedSetting:
    """What the runs share. limit: in words; unit, amount: the same in numbers. epoch: questions that are trained on.

    uniform: the algorithms that take questions in the order of the shuffled epochs. marks: evaluations on the way.
    penalized: the algorithms whose training rewards are less a penalty on length that others do not have.
    """

    experiment: str
    model: str
    task: str
    limit: str
    unit: Unit
    amount: float
    epoch: int
    uniform: tuple[str, ...]
    marks: int
    samples: int
    penalized: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What the runs say together. prompts: held-out ones that every run answered. failures: of runs, in words."""

    setting: ComparedSetting
    prompts: int
    standings: tuple[Ranking, ...]
    pairings: tuple[Pairing, ...]
    orders: tuple[RunOrder, ...]
    failures: str = ""

    @property
    def seeds(self) -> int:
        """The most seeds that an algorithm finished."""
        return max(len(standing.seeds) for standing in self.standings)

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object."""
        pairings = [
            {
                **asdict(p),
                "is_noise": p.is_noise,
                "detectable": p.contrast.detectable,
                "is_about_models_alone": p.contrast.is_about_models,
            }
            for p in self.pairings
        ]
        return {**asdict(self), "format": "gnomon-comparison/1", "pairings": pairings}


def summarize(setting: ComparedSetting, runs: Sequence[Trained], failures: str = "") -> Comparison:
    """Return what finished runs say together, in the order in which their algorithms come.

    Raises: DatasetError when they share no held-out prompt.
    """
    names = list(dict.fromkeys(run.algorithm for run in runs))
    by_name = {name: {run.seed: run for run in runs if run.algorithm == name} for name in names}
    prompts = sorted(set.intersection(*(set(run.scores) for run in runs))) if runs else []
    if not prompts:
        raise DatasetError("the runs share no held-out prompt that each of them answered, so they cannot be compared")
    pairs = []
    for first, second in combinations(names, 2):
        both = sorted(by_name[first].keys() & by_name[second].keys())
        if both:
            tables = [_table([by_name[name][seed] for seed in both], prompts) for name in (first, second)]
            pairs.append((first, second, contrast(*tables)))
    corrected = holm([found.p_value for _, _, found in pairs])
    return Comparison(
        setting=setting,
        prompts=len(prompts),
        standings=tuple(_ranking(name, by_name[name], prompts, setting) for name in names),
        pairings=tuple(Pairing(*pair, p) for pair, p in zip(pairs, corrected, strict=True)),
        orders=tuple(_orders(by_name, setting)),
        failures=failures,
    )


def _ranking(name: str, by_seed: Mapping[int, Trained], prompts: Sequence[str], setting: ComparedSetting) -> Ranking:
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    table = _table(runs, prompts)
    return Ranking(
        name=name,
        seeds=tuple(run.seed for run in runs),
        score=float(table.mean()),
        interval=mean_over(table),
        by_seed=tuple(float(v) for v in table.mean(axis=1)),
        curve=tuple(_curve(runs, setting)),
        rewards=tuple(_rewards(runs)),
        cost=Cost.mean([run.cost for run in runs]),
    )


def _table(runs: Sequence[Trained], prompts: Sequence[str]) -> Floats:
    return np.array([[run.scores[prompt] for prompt in prompts] for run in runs], dtype=np.float64)


def _curve(runs: Sequence[Trained], setting: ComparedSetting) -> list[Band]:
    """Return the scores at the same shares of the budget: of each run the first evaluation after it was spent."""
    marks = [setting.amount * number / setting.marks for number in range(1, setting.marks + 1)]
    rows = [[run.points[0] for run in runs], *([run.at(mark, setting.unit) for run in runs] for mark in marks)]
    found = [Band(sum(p.tokens for p in row) / len(row), *band([p.score for p in row])) for row in rows]
    # Where one step passed several marks, they share an evaluation.
    return [found[0], *(b for a, b in pairwise(found) if b.tokens > a.tokens)]


def _rewards(runs: Sequence[Trained]) -> list[Band]:
    """Return the training rewards, averaged within equal stretches of tokens."""
    most = max((tokens for run in runs for tokens, _ in run.rewards), default=0.0)
    bins: list[Band] = []
    for number in range(_BINS):
        low, high = most * number / _BINS, most * (number + 1) / _BINS
        inside = [[reward for tokens, reward in run.rewards if low < tokens <= high] for run in runs]
        means = [sum(rewards) / len(rewards) for rewards in inside if rewards]
        if means:
            bins.append(Band((low + high) / 2, *band(means)))
    return bins


def _orders(by_name: Mapping[str, Mapping[int, Trained]], setting: ComparedSetting) -> list[RunOrder]:
    """Return for each seed how the questions of the first algorithm of shuffled epochs agree with each other one's."""
    uniform = [name for name in by_name if name in setting.uniform]
    return [
        order_of(by_name[uniform[0]][seed], by_name[name][seed], setting.epoch)
        for name in uniform[1:]
        for seed in sorted(by_name[uniform[0]].keys() & by_name[name].keys())
    ]
