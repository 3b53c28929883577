"""The learner's configuration."""

from dataclasses import dataclass, field
from typing import Literal

from gnomon.errors import ConfigError
from gnomon.learner.optimizer import OptimizerPlan


@dataclass(frozen=True)
class LearnerPlan:
    """How the model is trained. Only ``optimizer`` and ``precision`` change a result beyond rounding.

    precision: of the weights that compute: "fp32", "bf16" with float32 masters, or "auto", whichever is
        faster on the machine (`resolve_precision`; the answer belongs in the run's card).
    max_tokens_per_micro_batch: padded tokens, prompt and response, that one forward and backward pass may
        hold, > 0; memory grows with it. A longer sequence goes alone.
    gradient_checkpointing: compute each layer again in the backward pass instead of keeping its activations.
    Raises: ConfigError when a number is out of range.
    """

    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    max_tokens_per_micro_batch: int = 2048
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens_per_micro_batch < 1:
            raise ConfigError(f"learner.max_tokens_per_micro_batch must be > 0, got {self.max_tokens_per_micro_batch}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"learner.precision must be auto, fp32 or bf16, got '{self.precision}'")
