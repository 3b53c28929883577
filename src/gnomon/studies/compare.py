"""Several algorithms on one experiment at equal cost: what the runs say together, and how sure one may be of it.

The same questions in the same order, the same budget of generated tokens (or seconds, or steps), several seeds. What
comes out is a `Comparison`: curves, final scores with intervals, every pair with a corrected p-value, and what it cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from gnomon.errors import DatasetError
from gnomon.statistics import SIGNIFICANCE, Interval, holm
from gnomon.studies.compare_order import Order, order_of
from gnomon.studies.compare_runs import Cost, Trained, Unit
from gnomon.studies.compare_statistics import Contrast, Floats, band, contrast, mean_over

_BINS = 24


@dataclass(frozen=True)
class Band:
    """A point of a curve: mean, lowest and highest over seeds, after so many tokens (the mean over seeds)."""

    tokens: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
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
class Setting:
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

    setting: Setting
    prompts: int
    standings: tuple[Standing, ...]
    pairings: tuple[Pairing, ...]
    orders: tuple[Order, ...]
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


def summarize(setting: Setting, runs: Sequence[Trained], failures: str = "") -> Comparison:
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
        standings=tuple(_standing(name, by_name[name], prompts, setting) for name in names),
        pairings=tuple(Pairing(*pair, p) for pair, p in zip(pairs, corrected, strict=True)),
        orders=tuple(_orders(by_name, setting)),
        failures=failures,
    )


def _standing(name: str, by_seed: Mapping[int, Trained], prompts: Sequence[str], setting: Setting) -> Standing:
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    table = _table(runs, prompts)
    return Standing(
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


def _curve(runs: Sequence[Trained], setting: Setting) -> list[Band]:
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


def _orders(by_name: Mapping[str, Mapping[int, Trained]], setting: Setting) -> list[Order]:
    """Return for each seed how the questions of the first algorithm of shuffled epochs agree with each other one's."""
    uniform = [name for name in by_name if name in setting.uniform]
    return [
        order_of(by_name[uniform[0]][seed], by_name[name][seed], setting.epoch)
        for name in uniform[1:]
        for seed in sorted(by_name[uniform[0]].keys() & by_name[name].keys())
    ]
