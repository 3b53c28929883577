"""An experiment, put onto hardware."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from gnomon.config.experiment import parse_override
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STORE, EnginePlan
from gnomon.learner.sections import LearnerPlan
from gnomon.planner.efficiencies import PUBLISHED, Efficiencies
from gnomon.planner.hardware import Hardware, hardware_of
from gnomon.planner.job import PlannedJob, job_of
from gnomon.planner.shapes import ModelShape, shape_of
from gnomon.training.resolve import Resolved

_MOST_DEVICES = 100_000
_CHOSEN = {
    "learner.processes": LearnerPlan().processes,
    "learner.gradient_checkpointing": LearnerPlan().gradient_checkpointing,
    "engine.count": EnginePlan().count,
    "engine.tensor_parallel": EnginePlan().tensor_parallel,
}
"""What a plan sets, and what it is where nobody did."""


@dataclass(frozen=True)
class Deployment:
    """What is to run, and on what. shape, hardware, job: see there. reached: efficiencies. devices: in all."""

    shape: ModelShape
    hardware: Hardware
    job: PlannedJob
    reached: Efficiencies
    devices: int


def place_of(
    resolved: Resolved, hardware: str, devices: int, prompt_tokens: float, answer_tokens: float | None
) -> Deployment:
    """Return an experiment on ``devices`` of that hardware, for prompts and answers of so many tokens on average.

    Raises: ConfigError naming what is not known, or cannot be meant; ModelError as `check_model` does.
    """
    experiment, found = resolved.experiment, hardware_of(hardware)
    if not 2 <= devices <= _MOST_DEVICES:
        raise ConfigError(
            f"--gpus {devices}: learners and engines have devices of their own, so that is 2 at least and "
            f"{_MOST_DEVICES:,} at most; of one GPU `gnomon plan` on its machine says more"
        )
    if devices > found.node and devices % found.node:
        raise ConfigError(f"--gpus {devices}: a node has {found.node}, so above that a multiple of {found.node}")
    longest = experiment.sampling.max_completion_length
    if not 0 < prompt_tokens < math.inf:
        raise ConfigError(f"--prompt-tokens {prompt_tokens:g} must be above 0")
    if answer_tokens is not None and not 1 <= answer_tokens <= longest:
        raise ConfigError(
            f"--answer-tokens {answer_tokens:g} must be from 1 to {longest}, the most that an answer may have "
            "(sampling.max_completion_length)"
        )
    job, shape = job_of(resolved, prompt_tokens, answer_tokens), shape_of(experiment.model)
    if job.is_broadcast and (why := broadcast_refused(shape, job)):
        raise ConfigError(
            f"cluster.transfer = '{experiment.cluster.transfer}' cannot be had with {why}; set cluster.transfer = "
            f"'{STORE}'"
        )
    return Deployment(shape, found, job, PUBLISHED, devices)


def broadcast_refused(shape: ModelShape, job: PlannedJob) -> str:
    """Return what keeps weights from going from device to device (`staging`), in words; "" where nothing does."""
    return "adapters" if job.rank else "a mixture of experts" if shape.experts else ""


def passed_over(resolved: Resolved, overrides: Sequence[str] = ()) -> str:
    """Return in one sentence which settings were given that a plan chooses itself; "" where there are none."""
    named = {parse_override(override)[0] for override in overrides}
    values = {key: attrgetter(key)(resolved.experiment) for key in _CHOSEN}
    given = [
        f"{key} = {str(values[key]).lower()}" for key, usual in _CHOSEN.items() if key in named or values[key] != usual
    ]
    if not given:
        return ""
    said = " and ".join(given)
    return f"The plan chooses how the GPUs are parted, so it passes over {said}; what it chose is under Set."
