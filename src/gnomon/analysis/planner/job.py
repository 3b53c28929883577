"""The work of one step: prompts, responses, updates and copies of weights, without model and hardware."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from gnomon.analysis.plan import scoring_passes
from gnomon.core.errors import check_bounds
from gnomon.learner.coded_moments import MOMENT_BYTES
from gnomon.models.quantized import Kind
from gnomon.training.resolve import Resolved

_NORMAL = NormalDist()
_PANELS = 400
SPREAD = 0.6
"""Default sigma of a response's log length: one response in a hundred is four times as long as the median."""


@dataclass(frozen=True)
class Lengths:
    """Log-normal tokens of a response, cut at ``longest``.

    Attributes:
        mean: Mean after the cut.
        longest: Most tokens of a response.
        sigma: Standard deviation of the logarithm.

    Raises:
        ConfigError: If no such distribution has that mean.
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
        """The median before the cut, found by bisection because the mean after the cut grows with the median."""
        low, high = 1e-6, 1e3
        for _ in range(80):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._cut_mean(middle * self.longest) < self.mean else (low, middle)
        return low * self.longest

    def of(self, uniform: float) -> int:
        """Return the length at a quantile in (0, 1), at least 1.

        >>> Lengths(100, 400, sigma=0).of(0.9)
        100
        """
        if self.sigma == 0:
            return round(self.mean)
        drawn = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12)))
        return max(1, min(self.longest, round(drawn)))

    def alive(self, tokens: float) -> float:
        """Return the share of responses with more than ``tokens``."""
        if tokens >= self.longest:
            return 0.0
        if self.sigma == 0:
            return float(tokens < self.mean)
        return 1 - _NORMAL.cdf(math.log(max(tokens, 1e-9) / self.median) / self.sigma)

    def longest_of(self, answers: int) -> int:
        """Return the approximate length of the longest of so many responses."""
        return self.of(1 - 0.56 / max(answers, 1))

    def _cut_mean(self, median: float) -> float:
        if self.sigma == 0:
            return min(median, self.longest)
        # E[min(X, L)] = E[X; X < L] + L P(X >= L), of a log-normal.
        z = math.log(self.longest / median) / self.sigma
        whole = median * math.exp(self.sigma**2 / 2) * _NORMAL.cdf(z - self.sigma)
        return whole + self.longest * (1 - _NORMAL.cdf(z))


@dataclass(frozen=True)
class PlannedJob:
    """The work of one step.

    Attributes:
        prompts: Prompts of a step.
        generations: Responses per prompt.
        prompt: Tokens of a prompt.
        answers: Tokens of a response.
        staleness: Bound in steps, as in `RolloutScheduler`.
        slack: Steps, as in `RolloutScheduler`.
        is_dropping: Whether late rollouts are dropped.
        epochs: Epochs of the policy's updates.
        minibatches: Minibatches of an epoch.
        scored: Forward passes over a step's tokens, without the passes of training.
        rank: Rank of the adapters, 0 for full weights.
        base: How the frozen weights beneath adapters are quantized, None if they are not.
        moment_bytes: Bytes of a weight's two moments while it trains.
        has_reference: Whether a frozen copy of the first weights is kept.
        has_critic: Whether the critic is a separate network.
        has_average: Whether an average of the weights is kept.
        is_undone: Whether the state is copied before a step, so that the step can be undone.
        item: Bytes of a number in the computing precision.
        is_offloaded: Whether shards and moments lie in the machine's memory.
        micro: Tokens of a pass, 0 to choose them.
        concurrent: Most responses that an engine decodes at once.
        graders: Grading processes.
        is_broadcast: Whether weights go from device to device (`cluster.transfer`).
        is_sleeping: Whether engines release their weights while the learners of the same devices work.
    """

    prompts: int
    generations: int
    prompt: float
    answers: Lengths
    staleness: int = 0
    slack: int = 0
    is_dropping: bool = False
    epochs: int = 1
    minibatches: int = 1
    scored: int = 0
    rank: int = 0
    base: Kind | None = None
    moment_bytes: float = 8.0
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
    is_sleeping: bool = False

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.generations

    @property
    def answered(self) -> float:
        """Tokens of all responses."""
        return self.rows * self.answers.mean

    @property
    def computed(self) -> float:
        """Tokens of one pass; a prompt counts once for all its responses."""
        return self.prompts * self.prompt + self.answered

    @property
    def longest(self) -> float:
        """Tokens of the longest row."""
        return self.prompt + self.answers.longest

    @property
    def pairs(self) -> float:
        """Pairs of a token and an earlier one in all rows, which attention computes; a prompt counts once."""
        # The mean of squared lengths is twice the integral of s P(length > s); midpoint rule.
        step = self.answers.longest / _PANELS
        places = [(n + 0.5) * step for n in range(_PANELS)]
        squares = 2 * step * sum(place * self.answers.alive(place) for place in places)
        prompts = self.prompts * self.prompt**2 / 2
        return prompts + self.rows * (self.answers.mean * self.prompt + squares / 2)


def job_of(resolved: Resolved, prompt: float, answer: float | None = None) -> PlannedJob:
    """Return the work of an experiment's step.

    Args:
        resolved: The experiment.
        prompt: Mean tokens of a prompt.
        answer: Mean tokens of a response; None for half the longest.

    Raises:
        ConfigError: If responses cannot have that mean.
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
        scored=scoring_passes(algorithm),
        rank=experiment.lora.rank if experiment.lora else 0,
        base=experiment.lora.quantized if experiment.lora else None,
        moment_bytes=2 * MOMENT_BYTES if plan.optimizer.moments == "8bit" else 8.0,
        has_reference="reference" in algorithm.needs
        and (experiment.lora is None or bool(algorithm.reference.teachers)),
        has_critic=critic is not None and critic.trunk == "separate",
        has_average=algorithm.proximal is not None,
        is_undone=algorithm.updates_repeatedly,
        item=4 if plan.precision == "fp32" else 2,
        is_offloaded=plan.offload,
        micro=plan.max_tokens_per_micro_batch or 0,
        concurrent=experiment.engine.max_concurrent,
        graders=experiment.grading.workers * experiment.cluster.graders,
        is_broadcast=experiment.cluster.is_broadcasting,
        is_sleeping=experiment.engine.sleeps,
    )
