"""An experiment, put onto hardware."""

from dataclasses import dataclass

from gnomon.errors import ConfigError
from gnomon.experiment import Experiment
from gnomon.studies.capacity.efficiencies import PUBLISHED, Efficiencies
from gnomon.studies.capacity.hardware import Hardware, hardware_of
from gnomon.studies.capacity.job import Job, job_of
from gnomon.studies.capacity.shapes import Shape, shape_of

_MOST_DEVICES = 100_000


@dataclass(frozen=True)
class Place:
    """What is to run, and on what. shape, hardware, job: see there. reached: efficiencies. devices: in all."""

    shape: Shape
    hardware: Hardware
    job: Job
    reached: Efficiencies
    devices: int


def place_of(
    experiment: Experiment, hardware: str, devices: int, prompt_tokens: float, answer_tokens: float | None
) -> Place:
    """Return an experiment on ``devices`` of that hardware, for prompts and answers of so many tokens on average.

    Raises: ConfigError naming what is not known, or cannot be meant; ModelError as `check_model` does.
    """
    found = hardware_of(hardware)
    if not 2 <= devices <= _MOST_DEVICES:
        raise ConfigError(
            f"--gpus {devices}: learners and engines have devices of their own, so that is 2 at least and "
            f"{_MOST_DEVICES:,} at most; of one GPU `gnomon plan` on its machine says more"
        )
    if devices > found.node and devices % found.node:
        raise ConfigError(f"--gpus {devices}: a node has {found.node}, so above that a multiple of {found.node}")
    if prompt_tokens <= 0:
        raise ConfigError(f"--prompt-tokens {prompt_tokens:g} must be above 0")
    job = job_of(experiment, prompt_tokens, answer_tokens)
    return Place(shape_of(experiment.model), found, job, PUBLISHED, devices)
