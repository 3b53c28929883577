"""The small plans of an experiment: plain values, each checked when it is made."""

from dataclasses import dataclass
from typing import Literal

from gnomon.errors import ConfigError


@dataclass(frozen=True)
class SamplingPlan:
    """How answers are drawn; see `engines.base.Sampling` for units.

    stop_ids: token ids that end an answer, beside the model's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_completion_length: int = 64
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EnginePlan:
    """Who answers. max_concurrent: answers decoded at once; memory for the KV cache grows with it."""

    kind: Literal["local"] = "local"
    max_concurrent: int = 64

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ConfigError(f"engine.max_concurrent must be at least 1, got {self.max_concurrent}")


@dataclass(frozen=True)
class CheckpointPlan:
    """When a run is saved. every: steps, 0 for the end alone. keep_last: newest checkpoints kept.

    keep_every: steps; checkpoints at its multiples stay for good, 0 for none.
    """

    every: int = 25
    keep_last: int = 2
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep_last < 1 or self.keep_every < 0:
            raise ConfigError(f"checkpoints needs every >= 0, keep_last >= 1 and keep_every >= 0, got {self}")


@dataclass(frozen=True)
class GradingPlan:
    """Where answers are judged.

    workers: processes. deadline_seconds: after which a sample's worker is killed and the sample is an error.
    memory_gib: address space that a worker may take beyond its imports, 0 for no limit. environment: names of further
    environment variables that rewards may read. max_error_fraction: in [0, 1), of the last 50 samples; more errors stop
    the run.
    """

    workers: int = 2
    deadline_seconds: float = 5.0
    memory_gib: float = 4.0
    environment: tuple[str, ...] = ()
    max_error_fraction: float = 0.2

    def __post_init__(self) -> None:
        is_right = self.workers >= 1 and self.deadline_seconds > 0 and self.memory_gib >= 0
        if not is_right or not 0 <= self.max_error_fraction < 1:
            raise ConfigError(
                "grading needs workers >= 1, deadline_seconds > 0, memory_gib >= 0 and max_error_fraction in [0, 1), "
                f"got {self}"
            )


@dataclass(frozen=True)
class RecordPlan:
    """What is written down beside metrics.

    rollouts: every graded rollout of every step. batches: every training batch, for later dissection.
    sinks: "tensorboard", "wandb", "trackio". aliases: add the names that TRL's and verl's dashboards expect.
    """

    rollouts: bool = True
    batches: bool = False
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    aliases: bool = False
