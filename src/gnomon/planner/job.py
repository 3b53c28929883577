"""What one step asks for and trains on: an experiment without its model, its tasks and its machine."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from gnomon.algorithms import Algorithm
from gnomon.analysis.plan import passes
from gnomon.core.errors import check_bounds
from gnomon.training.resolve import Resolved

_NORMAL = NormalDist()
_PANELS = 400
SPREAD = 0.6
"""Sigma of an answer's log length where nothing else is known: one in a hundred is four times the median."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of an answer: log-normal with this ``mean`` once it is cut at ``longest``. sigma: of the logarithm.

    Raises: ConfigError when no such distribution has that mean.
    """

    mean: float
    longest: int
    sigma: float = SPREAD

    def __post_init__(self) -> None:
        check_bounds(
            "lengths",
            self,
            mean=(1 <= self.mean <= self.longest, f"from 1 to longest = {self.longest} tokens"),
            sigma=(self.sigma >= 0, ">= 0"),
        )

    @cached_property
    def median(self) -> float:
        """The median before the cut, found by halving: the cut mean grows with it."""
        low, high = 1e-6, 1e3
        for _ in range(80):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._cut_mean(middle * self.longest) < self.mean else (low, middle)
        return low * self.longest

    def of(self, uniform: float) -> int:
        """Return the length at this quantile, at least 1.

        >>> Lengths(100, 400, sigma=0).of(0.9)
        100
        """
        if self.sigma == 0:
            return round(self.mean)
        drawn = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12)))
        return max(1, min(self.longest, round(drawn)))

    def alive(self, tokens: float) -> float:
        """Return the share of answers that have more than ``tokens``."""
        if tokens >= self.longest:
            return 0.0
        if self.sigma == 0:
            return float(tokens < self.mean)
        return 1 - _NORMAL.cdf(math.log(max(tokens, 1e-9) / self.median) / self.sigma)

    def longest_of(self, answers: int) -> int:
        """Return about how long the longest of so many is."""
        return self.of(1 - 0.56 / max(answers, 1))

    def _cut_mean(self, median: float) -> float:
        if self.sigma == 0:
            return min(median, self.longest)
        # E[min(X, L)] = E[X; X < L] + L P(X >= L), of a log-normal.
        z = math.log(self.longest / median) / self.sigma
        whole = median * math.exp(self.sigma**2 / 2) * _NORMAL.cdf(z - self.sigma)
        return whole + self.longest * (1 - _NORMAL.cdf(z))


@dataclass(frozen=True)
class MeasuredLengths:
    """Tokens of answers that were given: the same questions as `Lengths`, answered by counting."""

    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(self.lengths)

    def of(self, uniform: float) -> int:
        """Return the length at this quantile.

        >>> MeasuredLengths((3, 1, 2)).of(0.5)
        2
        """
        return sorted(self.lengths)[min(len(self.lengths) - 1, int(uniform * len(self.lengths)))]

    def alive(self, tokens: float) -> float:
        """Return the share of answers that have more than ``tokens``."""
        return sum(length > tokens for length in self.lengths) / len(self.lengths)

    def longest_of(self, answers: int) -> int:
        """Return how long the longest is."""
        return self.longest


@dataclass(frozen=True)
class PlannedJob:
    """One step.

    prompts, generations: asked, and answers to each. prompt: tokens of one. answers: tokens of one. staleness, slack:
    steps, as `RolloutScheduler` has them; is_dropping: what would be too late. epochs, minibatches: of the policy's
    updates. scored: forward passes over what was answered, beside training's own. rank: of adapters, 0 for all weights.
    has_reference: a frozen copy of the first weights. has_critic: a network of its own. has_average: of the weights.
    is_undone: a step makes several updates, so that the state is copied before it. item: bytes of a number that
    computes. is_offloaded: parts and moments in the machine's memory. micro: tokens of a pass, 0 to choose them.
    concurrent: answers that an engine decodes at once, at most. graders: processes that judge. is_broadcast: weights go
    from device to device (`cluster.transfer`).
    """

    prompts: int
    generations: int
    prompt: float
    answers: Lengths | MeasuredLengths
    staleness: int = 0
    slack: int = 0
    is_dropping: bool = False
    epochs: int = 1
    minibatches: int = 1
    scored: int = 0
    rank: int = 0
    has_reference: bool = False
    has_critic: bool = False
    has_average: bool = False
    is_undone: bool = False
    item: int = 2
    is_offloaded: bool = False
    micro: int = 0
    concurrent: int = 256
    graders: int = 64
    is_broadcast: bool = False

    @property
    def rows(self) -> int:
        """Answers."""
        return self.prompts * self.generations

    @property
    def answered(self) -> float:
        """Tokens of all answers."""
        return self.rows * self.answers.mean

    @property
    def computed(self) -> float:
        """Tokens that one pass computes: each prompt once for its answers."""
        return self.prompts * self.prompt + self.answered

    @property
    def longest(self) -> float:
        """Tokens of the longest row."""
        return self.prompt + self.answers.longest

    @property
    def pairs(self) -> float:
        """Pairs of a token and one before it, of all rows: what attention computes. Prompts once for their answers."""
        squares = _mean_square(self.answers)
        prompts = self.prompts * self.prompt**2 / 2
        return prompts + self.rows * (self.answers.mean * self.prompt + squares / 2)


def job_of(resolved: Resolved, prompt: float, answer: float | None = None) -> PlannedJob:
    """Return an experiment's step, for prompts of ``prompt`` tokens and answers of ``answer``, half the budget if None.

    Raises: ConfigError when answers cannot have that mean.
    """
    experiment = resolved.experiment
    algorithm, longest = experiment.algorithm, experiment.sampling.max_completion_length
    critic, plan = algorithm.critic, experiment.learner
    return PlannedJob(
        prompts=experiment.prompts_per_step,
        generations=algorithm.num_generations,
        prompt=prompt,
        answers=Lengths(max(1.0, longest / 2) if answer is None else answer, longest),
        staleness=experiment.staleness_bound,
        slack=experiment.staleness.slack,
        is_dropping=experiment.staleness.stragglers == "drop",
        epochs=algorithm.updates.epochs,
        minibatches=algorithm.updates.minibatches,
        scored=_scored(algorithm),
        rank=experiment.lora.rank if experiment.lora else 0,
        has_reference="reference" in algorithm.needs and experiment.lora is None,
        has_critic=critic is not None and critic.trunk == "separate",
        has_average=algorithm.proximal is not None,
        is_undone=algorithm.updates_repeatedly,
        item=4 if plan.precision == "fp32" else 2,
        is_offloaded=plan.offload,
        micro=plan.max_tokens_per_micro_batch or 0,
        concurrent=experiment.engine.max_concurrent,
        graders=experiment.grading.workers * experiment.cluster.graders,
        is_broadcast=experiment.cluster.is_broadcasting,
    )


def _scored(algorithm: Algorithm) -> int:
    """Return forward passes of the learner over a step's tokens, beside the three of each training pass."""
    critic = algorithm.critic
    trained = algorithm.updates.epochs + (critic.updates.epochs if critic else 0)
    return passes(algorithm) - 1 - 3 * trained


def _mean_square(answers: Lengths | MeasuredLengths) -> float:
    """Return the mean of squared lengths: twice the integral of s P(X > s), by the midpoint rule."""
    step = answers.longest / _PANELS
    return 2 * step * sum((n + 0.5) * step * answers.alive((n + 0.5) * step) for n in range(_PANELS))
