"""An experiment together with the hardware that it would run on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from gnomon.analysis.planner.hardware import PUBLISHED, Efficiencies, Hardware, hardware_of
from gnomon.analysis.planner.job import PlannedJob, job_of
from gnomon.analysis.planner.shapes import ModelShape, shape_of
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STORE, EngineConfig
from gnomon.learner.sections import LearnerConfig
from gnomon.training.resolve import Resolved

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
