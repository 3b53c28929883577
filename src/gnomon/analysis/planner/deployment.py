"""An experiment together with the hardware that it would run on, and the work of one step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import NormalDist

from gnomon.analysis.plan import scoring_passes
from gnomon.analysis.planner.hardware import PUBLISHED, Efficiencies, Hardware, hardware_of
from gnomon.analysis.planner.shapes import ModelShape, shape_of
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError, check_bounds
from gnomon.core.sections import STORE, EngineConfig
from gnomon.learner.optimizer import MOMENT_BYTES
from gnomon.learner.sections import LearnerConfig
from gnomon.models.adapter_config import Kind
from gnomon.training.resolve import Resolved

# The work of one step: prompts, responses, updates and copies of weights, without model and hardware.

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
        # As multiples of the longest response, halved on a logarithmic scale: 80 halvings are beyond float64's digits.
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
        # A draw of exactly 0 or 1 has no finite quantile.
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
        # The mean of the largest of n draws lies near the quantile 1 - exp(-0.577) / n: that of the Gumbel
        # distribution, to which maxima tend.
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
        # Nothing is known of the lengths before a run, so half the longest is assumed and the text says so.
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
        # Adapters make the frozen base its own reference; teachers are other networks and take memory of their own.
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


_MOST_DEVICES = 100_000
_CHOSEN = {
    "learner.processes": LearnerConfig().processes,
    "learner.gradient_checkpointing": LearnerConfig().gradient_checkpointing,
    "engine.count": EngineConfig().count,
    "engine.tensor_parallel": EngineConfig().tensor_parallel,
}
"""The settings that the planner chooses, with their defaults."""


@dataclass(frozen=True)
class Deployment:
    """An experiment on hardware.

    Attributes:
        reached: Efficiencies of the hardware.
        devices: Devices in all.
    """

    shape: ModelShape
    hardware: Hardware
    job: PlannedJob
    reached: Efficiencies
    devices: int

    @property
    def is_shared(self) -> bool:
        """Whether devices learn and answer in turn: one, with gnomon's own engine on the learner's weights, or all,
        each with an engine that sleeps meanwhile.
        """
        return self.devices == 1 or self.job.is_sleeping

    @property
    def libraries(self) -> float:
        """Bytes of a device that the libraries of its processes take."""
        return self.reached.libraries * (1 + self.job.is_sleeping)


def place_of(
    resolved: Resolved, hardware: str, devices: int, prompt_tokens: float, answer_tokens: float | None
) -> Deployment:
    """Put an experiment onto hardware.

    Args:
        resolved: The experiment.
        hardware: Name of an accelerator.
        devices: Devices in all; above one node a multiple of a node's devices.
        prompt_tokens: Mean tokens of a prompt.
        answer_tokens: Mean tokens of a response; None for half the longest.

    Raises:
        ConfigError: If the hardware is unknown or a number is out of range.
        ModelError: As `check_model` does.
    """
    experiment, found = resolved.experiment, hardware_of(hardware)
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"--gpus {devices}: give from 1 to {_MOST_DEVICES:,}")
    if devices == 1 and experiment.staleness_bound and not experiment.engine.sleeps:
        raise ConfigError(
            f"--gpus 1: one GPU answers and learns in turn, and max_staleness = {experiment.max_staleness} lets one "
            "overtake the other; set max_staleness = 0 or engine.sleeps = true, or give --gpus 2"
        )
    if experiment.engine.sleeps and devices == 1 and not experiment.learner.offload:
        raise ConfigError(
            "--gpus 1: with engine.sleeps the engine has weights of its own to release, and here it answers with the "
            "learner's; leave engine.sleeps out, or set learner.offload = true"
        )
    # Every formula between nodes assumes whole nodes.
    if devices > found.node and devices % found.node:
        raise ConfigError(f"--gpus {devices}: a node has {found.node}; give a multiple of {found.node} for more nodes")
    longest = experiment.sampling.max_completion_length
    if not 0 < prompt_tokens < math.inf:
        raise ConfigError(f"--prompt-tokens {prompt_tokens:g} must be above 0")
    if answer_tokens is not None and not 1 <= answer_tokens <= longest:
        raise ConfigError(
            f"--answer-tokens {answer_tokens:g} must be from 1 to {longest}, the longest response "
            "(sampling.max_completion_length)"
        )
    job, shape = job_of(resolved, prompt_tokens, answer_tokens), shape_of(experiment.model)
    # Quantization replaces linear layers one by one, which experts stacked in one tensor are not.
    if job.base is not None and shape.experts:
        raise ConfigError(
            f"lora.base = '{job.base}' stores linear layers in fewer bits, and the experts of {shape.name} are one "
            "tensor a layer; leave lora.base out"
        )
    if job.is_broadcast and (why := broadcast_refused(shape, job)):
        raise ConfigError(
            f"cluster.transfer = '{experiment.cluster.transfer}' cannot be had with {why}; set cluster.transfer = "
            f"'{STORE}'"
        )
    return Deployment(shape, found, job, PUBLISHED, devices)


def broadcast_refused(shape: ModelShape, job: PlannedJob) -> str:
    """Return the reason why weights cannot go from device to device; "" if they can."""
    return "adapters" if job.rank else "a mixture of experts" if shape.experts else ""


def passed_over(resolved: Resolved, overrides: Sequence[str] = ()) -> str:
    """Return a sentence about given settings that the planner overrides; "" if there are none."""
    named = {parse_override(override)[0] for override in overrides}
    values = {key: attrgetter(key)(resolved.experiment) for key in _CHOSEN}
    given = " and ".join(
        f"{key} = {str(values[key]).lower()}" for key, usual in _CHOSEN.items() if key in named or values[key] != usual
    )
    return f"The plan divides the GPUs itself and ignores {given}; the line Set shows its choice." if given else ""
