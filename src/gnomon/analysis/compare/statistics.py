"""The statistics of a comparison: several algorithms on one experiment at equal cost.

The runs ask the same prompts in the same order, with the same budget of generated tokens (or seconds, or steps) and
several seeds. The result is a `Comparison`: curves, final scores with intervals, every pair with a corrected p-value,
and costs.

Another run of the same algorithm has another seed, and another test of the same skill has other prompts. A claim about
an algorithm is a claim about both, so tables of scores are [seeds, prompts] and both axes count as drawn at random.
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
    span,
    student_p,
    student_quantile,
    wilson_interval,
)

Floats = NDArray[np.float64]

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Contrast:
    """The second mean minus the first, over the same seeds and prompts.

    Attributes:
        interval: 95%.
        p_value: Of the test in `contrast`. With one seed the test is over prompts alone and says nothing about other
            seeds.
        seed_variance: Squared standard error of the mean from seeds.
        prompt_variance: Squared standard error of the mean from prompts.
        df: Degrees of freedom of Student's t.
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
        """Whether only one seed was run, so that the contrast compares two models and not two algorithms."""
        return self.seeds < 2

    @property
    def detectable(self) -> float:
        """The smallest true difference that a comparison of this size detects at 80% power, at 5% uncorrected."""
        # (t for 5% on two sides + z for 80% on one) standard errors: the usual formula for the power of a t test.
        spread = math.sqrt(self.seed_variance + self.prompt_variance)
        return (student_quantile(SIGNIFICANCE, self.df) + _NORMAL.inv_cdf(POWER)) * spread

    def seeds_needed(self, difference: float) -> int | None:
        """Return the approximate seeds that detect a true difference at 80% power on these prompts; None if none do.

        The estimate keeps the error from prompts, although the interaction of prompts and seeds shrinks as well. With
        one seed the variance between seeds is unknown, and the result is None.
        """
        # More seeds shrink only their own part of the error. If the
        # prompts' part alone is too large, no number of seeds is enough.
        left = _target(difference) - self.prompt_variance
        if left <= 0 or self.is_about_models:
            return None
        return max(2, math.ceil(self.seeds * self.seed_variance / left))

    def prompts_needed(self, difference: float) -> int:
        """Return the approximate least number of prompts that detect a true difference at 80% power."""
        return max(self.prompts, math.ceil(self.prompts * self.prompt_variance / _target(difference)))


def mean_over(scores: Floats, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return an interval of the mean score by a hierarchical bootstrap.

    Each resample draws seeds and prompts with replacement, the same prompts for all drawn seeds. Few values vary too
    little when they are resampled, so the effect of the seeds is stretched by t sqrt(n / (n - 1)) / z, Student's t for
    n - 1 degrees of freedom against the normal z: 2.7 times as wide with 3 seeds, unchanged with many. The stretch is
    ours. With one seed, the interval is over prompts alone. Scores in [0, 1] give an interval in [0, 1]. If all prompts
    have the same mean over seeds, for example when every answer was wrong, resampling finds no variance, and the
    interval is at least as wide as Wilson's for so many prompts.

    Args:
        scores: [seeds, prompts].
        confidence: In (0, 1).
        resamples: Bootstrap samples.
        seed: Of the bootstrap.

    Raises:
        ConfigError: Without a finite score for each of at least one seed and one prompt.

    References:
        Owen 2007, arXiv 0712.1111 (the pigeonhole bootstrap).
    """
    seeds, prompts = _shape(scores)
    if seeds == 1:
        return mean_interval([float(v) for v in scores[0]], confidence, seed)
    random = np.random.default_rng(seed)
    by_seed = scores.mean(axis=1)
    center = float(by_seed.mean())
    # Weights instead of indices: a resample of the rows is a vector of how often each was drawn, (resamples, seeds).
    drawn_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    drawn_prompts = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples) / prompts
    # The resampled mean is w' X v. It is split at the row means into the part of the seeds,
    # which is stretched, and the part of the prompts within the drawn seeds, which is not.
    of_seeds = stretch(seeds, confidence) * (drawn_seeds @ (by_seed - center))
    # (resamples, prompts) @ (prompts, seeds), then the weighted sum over seeds: (resamples,).
    of_prompts = (drawn_seeds * (drawn_prompts @ (scores - by_seed[:, None]).T)).sum(axis=1)
    low, high = np.quantile(center + of_seeds + of_prompts, [(1 - confidence) / 2, (1 + confidence) / 2])
    if scores.min() >= 0 and scores.max() <= 1:
        # Scores in [0, 1] have means there; the stretch knows nothing of that bound.
        low, high = max(0.0, low), min(1.0, high)
        # Every resample of equal prompts is the same, which is no proof that other prompts would be.
        if bool(np.isclose(scores.mean(axis=0), center, rtol=0, atol=1e-12).all()):
            none_seen = wilson_interval(min(center, 1.0) * prompts, prompts, confidence)
            low, high = min(low, none_seen.low), max(high, none_seen.high)
    return Interval(min(float(low), center), max(float(high), center))


def stretch(seeds: int, confidence: float = 0.95) -> float:
    """Return the factor by which the resampled means of so many seeds are too close together.

    >>> round(stretch(3), 2), round(stretch(100), 2)
    (2.69, 1.02)
    """
    normal = _NORMAL.inv_cdf(0.5 + confidence / 2)
    return student_quantile(1 - confidence, seeds - 1) / normal * math.sqrt(seeds / (seeds - 1))


def contrast(first: Floats, second: Floats) -> Contrast:
    """Test whether ``second`` differs from ``first``.

    With d the differences, a = var(means over prompts) / seeds and b = var(means over seeds) / prompts, the statistic
    is mean(d)^2 / (a + b). It is compared with Student's t squared with (a + b)^2 / (a^2 / (seeds - 1) + b^2 / (prompts
    - 1)) degrees of freedom. This is min F', which counts the interaction of seeds and prompts twice and so errs
    towards "cannot be told apart". The p-value is never below that of the sign-flip test over prompts, which holds for
    any distribution of the differences. The interval is mean ± t e with e = sqrt(a + b); if the sign-flip test decides,
    e is the larger value for which Student's t gives its p-value. So the interval holds 0 exactly if p is above 5%.
    Scores in [0, 1] cut the interval at -1 and 1. The interval is of this pair alone: Holm's correction of p-values
    does not widen it.

    Args:
        first: [seeds, prompts].
        second: [seeds, prompts], with the same seeds and prompts.

    Raises:
        ConfigError: If the shapes differ.

    References:
        Clark 1973, J. Verbal Learning and Verbal Behavior 12, 335-359 (min F'); Satterthwaite 1946 (degrees of
        freedom).
    """
    if first.shape != second.shape:
        raise ConfigError(f"a contrast needs the same seeds and prompts twice, got {first.shape} and {second.shape}")
    seeds, prompts = _shape(first)
    # With one seed this test over prompts is the whole answer; with several its p-value is a lower bound for min F'.
    by_prompt = paired_difference(first.mean(axis=0).tolist(), second.mean(axis=0).tolist())
    gains = second - first
    mean = float(gains.mean())
    # a and b of the docstring: squared standard errors of the mean from seeds and from prompts.
    of_seeds = float(gains.mean(axis=1).var(ddof=1)) / seeds if seeds > 1 else 0.0
    of_prompts = float(gains.mean(axis=0).var(ddof=1)) / prompts if prompts > 1 else 0.0
    total = of_seeds + of_prompts
    df = max(1.0, prompts - 1.0) if seeds == 1 else _degrees(of_seeds, seeds, of_prompts, prompts)
    interval, p_value = by_prompt.interval, by_prompt.p_value
    if seeds > 1 and total > 0:
        # Student's t assumes normal means. Where few prompts differ it
        # would be too sure, and the sign-flip test is exact.
        p_value = max(student_p(mean / math.sqrt(total), df), p_value)
        low, high = span(np.concatenate([first.ravel(), second.ravel()]))
        interval = _interval(mean, math.sqrt(total), df, p_value, high - low)
    return Contrast(mean, interval, p_value, seeds, prompts, of_seeds, of_prompts, df)


def unpaired(first: Floats, second: Floats) -> Contrast | None:
    """Test whether ``second`` differs from ``first`` where runs and prompts of the two have nothing in common.

    With var(means of runs) / runs and var(means of prompts) / prompts of either side added to e^2, mean / e has
    Student's t with Satterthwaite's degrees. With one prompt (a run's mean alone) this is Welch's test over runs;
    with one run a side it is one over prompts, and says nothing about other runs.

    Args:
        first: [runs, prompts].
        second: [runs, prompts], of its own numbers of both.

    Returns:
        The contrast; None where one side is a single number, of which nobody can say how much it varies.

    References:
        Welch 1947, Biometrika 34, 28-35; Satterthwaite 1946.
    """
    # A side with one run and one prompt is a single number without any spread.
    shapes = [_shape(table) for table in (first, second)]
    if (1, 1) in shapes:
        return None
    runs, prompts = (min(counts) for counts in zip(*shapes, strict=True))
    parts = [
        (float(table.mean(axis=1 - axis).var(ddof=1)) / count, count - 1, axis)
        for table, shape in zip((first, second), shapes, strict=True)
        for axis, count in enumerate(shape)
        if count > 1
    ]
    # `parts` has (squared standard error, degrees of freedom,
    # axis) of each axis of each side that has more than one value.
    of_runs, of_prompts = (sum(variance for variance, _, of in parts if of == axis) for axis in (0, 1))
    mean, total = float(second.mean()) - float(first.mean()), of_runs + of_prompts
    # Satterthwaite: the degrees of freedom of a sum of independent variances.
    below = sum(variance**2 / count for variance, count, _ in parts)
    df = max(1.0, total**2 / below) if below else float(min(count for _, count, _ in parts))
    # Without any variance nothing is known of what was not seen.
    p_value = student_p(mean / math.sqrt(total), df) if total else 1.0
    half = student_quantile(SIGNIFICANCE, df) * math.sqrt(total) if total else math.inf
    most = 1.0 if span(np.concatenate([first.ravel(), second.ravel()])) == (0.0, 1.0) else math.inf
    interval = Interval(max(mean - half, -most), min(mean + half, most))
    return Contrast(mean, interval, p_value, runs, prompts, of_runs, of_prompts, df)


def _interval(mean: float, error: float, df: float, p_value: float, width: float) -> Interval:
    """Return the interval for a p-value; ``error`` is at least the standard error, ``width`` the range of a score."""
    if p_value > student_p(mean / error, df):
        # The sign-flip test was less sure than Student's t. The error is widened until
        # Student's t gives that p-value, so that interval and p-value tell the same story.
        t = student_quantile(p_value, df)
        # A p-value near 1 has a t near 0, and the quotient would overflow: such an interval is cut at the width anyway.
        error = max(error, abs(mean) / t) if t * width > abs(mean) / 1e6 else math.inf
    half = student_quantile(SIGNIFICANCE, df) * error
    low, high = mean - half, mean + half
    if p_value > SIGNIFICANCE:  # rounding aside it holds 0 already
        low, high = min(low, 0.0), max(high, 0.0)
    return Interval(max(low, -width), min(high, width))


def _degrees(of_seeds: float, seeds: int, of_prompts: float, prompts: int) -> float:
    parts = [(of_seeds, seeds - 1), (of_prompts, prompts - 1)]
    below = sum(variance**2 / count for variance, count in parts if count)
    return (of_seeds + of_prompts) ** 2 / below if below else float(seeds - 1)


def _target(difference: float) -> float:
    """Return the squared standard error at which a true difference is detected at 80% power."""
    return (difference / (_NORMAL.inv_cdf(1 - SIGNIFICANCE / 2) + _NORMAL.inv_cdf(POWER))) ** 2


def _shape(scores: Floats) -> tuple[int, int]:
    if scores.ndim != 2 or 0 in scores.shape or not bool(np.isfinite(scores).all()):
        raise ConfigError(f"scores are a finite number for each seed and prompt, got the shape {scores.shape}")
    return int(scores.shape[0]), int(scores.shape[1])


def band(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lowest and highest value over seeds. The range is no interval for future seeds.

    >>> band([0.2, 0.5, 0.2])
    (0.3, 0.2, 0.5)
    """
    return round(sum(values) / len(values), 12), min(values), max(values)


# The records show whether two runs asked the same prompts in the same order. Shuffled epochs give a sequence of prompts
# that depends on the seed alone. With several responses per prompt, an algorithm moves along the sequence more slowly,
# so "the same order" means that the shorter sequence begins the longer one. Two differences are allowed and reported:
# if an epoch ends within a step, a prompt that the step holds already moves to the next step; and groups that dynamic
# sampling removed are recorded after the kept groups.


@dataclass(frozen=True)
class RunOrder:
    """Whether two runs with one seed asked the same prompts.

    Attributes:
        verdict: "same", prompt by prompt; "same but for the ends of epochs"; "same, step by step" if only the sets of
            prompts up to the end of each step can be compared; "other"; "unknown" without recorded rollouts, or if both
            runs removed groups.
        questions: Compared prompts.
    """

    first: str
    second: str
    seed: int
    verdict: str
    questions: int

    @property
    def is_same(self) -> bool:
        """Whether the prompts were the same, in the sense of the verdict."""
        return self.verdict.startswith("same")


def order_of(first: Trained, second: Trained, epoch: int) -> RunOrder:
    """Compare the prompts of two runs with one seed. ``epoch`` is the number of training prompts."""
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
        # The order within a filtered step is lost, but the set of prompts up to each step's end is not.
        verdict = "same, step by step"
    else:
        verdict = "other"
    return RunOrder(first.algorithm, second.algorithm, first.seed, verdict, count)


def _largest(*runs: Trained) -> int:
    return max(len(step) for run in runs for step in run.asked)


def _are_ends(one: Sequence[str], other: Sequence[str], epoch: int, step: int) -> bool:
    """Whether each prompt is within a step of its position in the other sequence, and moves only at an epoch's end.

    The last step is left out, because prompts that it puts off come after the end of the sequence.
    """
    # A prompt occurs once an epoch, so a visit is identified by the prompt and how often it was asked before.
    left, right = _visits(one), _visits(other)
    for visit, place in left.items():
        # A visit that the other sequence lacks counts as far away.
        found = right.get(visit, place + len(one))
        # Within two steps of a multiple of the epoch: the prompt was
        # put off by one step, and its own step may straddle the end.
        is_end = abs(place - max(1, round(place / epoch)) * epoch) <= 2 * step
        is_far = abs(place - found) > step and min(place, found) < len(one) - step
        if place != found and (not is_end or is_far):
            return False
    return True


def _visits(row: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return the position of each prompt's first, second and every further visit."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], int] = {}
    for place, task in enumerate(row):
        found[task, seen[task]] = place
        seen[task] += 1
    return found


def _are_sets(first: Trained, second: Trained) -> bool:
    """Whether, at the end of each step, the run that removed groups had asked the first prompts of the other run."""
    filtered, plain = (first, second) if first.is_filtered else (second, first)
    row = [task for step in plain.asked for task in step]
    asked: Counter[str] = Counter()
    ends = list(accumulate(len(step) for step in filtered.asked))
    for step, end in zip(filtered.asked, ends, strict=True):
        asked.update(step)
        # Beyond the shorter run there is nothing to compare with.
        if end <= len(row) and asked != Counter(row[:end]):
            return False
    return bool(ends) and ends[0] <= len(row)


_BINS = 24


@dataclass(frozen=True)
class Band:
    """A point of a curve: mean, lowest and highest over seeds, at a mean number of tokens."""

    tokens: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Ranking:
    """The results of one algorithm.

    Attributes:
        seeds: Finished seeds.
        score: Mean over seeds and prompts at the end.
        interval: 95% interval of ``score``, see `mean_over`.
        by_seed: Score of each seed.
        curve: Held-out scores during training.
        rewards: Training rewards on the algorithm's own prompts, which can differ between algorithms.
        cost: Mean over seeds.
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
    """Two algorithms on the seeds that both finished. ``corrected`` is the p-value after Holm's correction."""

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
    """What all runs of a comparison share.

    Attributes:
        limit: The budget as text.
        unit: Unit of the budget.
        amount: The budget.
        epoch: Training prompts.
        uniform: Algorithms that take prompts in the order of shuffled epochs.
        marks: Evaluations during training.
        samples: Responses per held-out prompt.
        penalized: Algorithms with a length penalty on training rewards that others lack.
        supervised: Algorithms that train on the dataset's own answers, whose tokens nobody generated.
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
    supervised: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The results of all runs.

    Attributes:
        prompts: Held-out prompts that every run answered.
        failures: Description of failed runs.
    """

    setting: ComparedSetting
    prompts: int
    standings: tuple[Ranking, ...]
    pairings: tuple[Pairing, ...]
    orders: tuple[RunOrder, ...]
    failures: str = ""

    @property
    def seeds(self) -> int:
        """The largest number of finished seeds of an algorithm."""
        return max(len(ranked.seeds) for ranked in self.standings)

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
    """Compare finished runs; algorithms keep the order of ``runs``.

    Raises:
        DatasetError: If the runs share no held-out prompt.
    """
    names = list(dict.fromkeys(run.algorithm for run in runs))
    by_name = {name: {run.seed: run for run in runs if run.algorithm == name} for name in names}
    # A prompt whose grading failed in one run is left out of all, so that every mean is over the same prompts.
    prompts = sorted(set.intersection(*(set(run.scores) for run in runs))) if runs else []
    if not prompts:
        raise DatasetError("the runs share no held-out prompt that each of them answered, so they cannot be compared")
    pairs = []
    for first, second in combinations(names, 2):
        # A pair is compared on the seeds that both finished, or the seed's luck would count as the algorithm's.
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
    """Return the scores at equal shares of the budget: for each run, the first evaluation after the share was spent."""
    marks = [setting.amount * number / setting.marks for number in range(1, setting.marks + 1)]
    rows = [[run.points[0] for run in runs], *([run.at(mark, setting.unit) for run in runs] for mark in marks)]
    found = [Band(sum(p.tokens for p in row) / len(row), *band([p.score for p in row])) for row in rows]
    # If one step passes several marks, the marks share an evaluation.
    return [found[0], *(b for a, b in pairwise(found) if b.tokens > a.tokens)]


def _rewards(runs: Sequence[Trained]) -> list[Band]:
    """Return the training rewards, averaged over equal ranges of tokens."""
    most = max((tokens for run in runs for tokens, _ in run.rewards), default=0.0)
    bins: list[Band] = []
    for number in range(_BINS):
        # Runs step at other numbers of tokens, so their rewards meet only in ranges.
        low, high = most * number / _BINS, most * (number + 1) / _BINS
        inside = [[reward for tokens, reward in run.rewards if low < tokens <= high] for run in runs]
        means = [sum(rewards) / len(rewards) for rewards in inside if rewards]
        if means:
            bins.append(Band((low + high) / 2, *band(means)))
    return bins


def _orders(by_name: Mapping[str, Mapping[int, Trained]], setting: ComparedSetting) -> list[RunOrder]:
    """Compare the prompts of the first algorithm with shuffled epochs to those of each other one, by seed."""
    # Algorithms that choose their prompts are meant to ask others, so only shuffled epochs are held to one order.
    uniform = [name for name in by_name if name in setting.uniform]
    return [
        order_of(by_name[uniform[0]][seed], by_name[name][seed], setting.epoch)
        for name in uniform[1:]
        for seed in sorted(by_name[uniform[0]].keys() & by_name[name].keys())
    ]
