"""The learner's configuration. No torch."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gnomon.core.errors import ConfigError, bounded, check_bounds

_LEAST_BYTES = 2**28
_STATE_BYTES = 16
"""Of a parameter: master, gradient and both moments in float32; a rounded copy comes on top."""
DEVICE_SHARE = 8
"""One part in so many of a GPU's memory is for activations, and of the bytes of training on a CPU."""
# Multiples of the model's width that one layer keeps of a token for its backward pass.
_KEPT = 24
_LEAST_TOKENS = 256


@dataclass(frozen=True)
@bounded(
    "learner.optimizer",
    learning_rate="> 0 and finite",
    warmup_steps="0 or more steps, and finite",
    final_fraction="in [0, 1]",
    betas="in [0, 1)",
    epsilon="> 0 and finite",
    weight_decay=">= 0 and finite",
    max_gradient_norm="> 0 (inf never clips)",
)
class OptimizerConfig:
    """Settings of AdamW and the schedule of its learning rate.

    The rate is a function of the *training step* alone (`learning_rate_at`). All optimizer updates of one step share
    it, a skipped update shifts nothing, and a resumed run needs no schedule state.

    Attributes:
        learning_rate: Rate at the end of the warm-up, above 0. 1e-6 suits full training, about ten times that LoRA.
        schedule: "constant", or "linear" or "cosine" down to ``final_fraction`` of the rate after the last step.
        warmup_steps: Training steps of a linear rise, 0 or more; below 1 the share of all steps, rounded up. The first
            step already has a rate above 0.
        final_fraction: Share of the rate that is left after the last step, in [0, 1].
        betas: Decay rates of Adam's two moments, each in [0, 1).
        epsilon: Term that is added to the root of the second moment, above 0.
        weight_decay: Decoupled weight decay, 0 or more. It applies to matrices only (embeddings included), so that
            biases and norms are never pulled to zero.
        moments: "float32", or "8bit" for 2 bytes a trained weight instead of 8 while it trains; checkpoints have
            float32 in both, and go on with either.
        max_gradient_norm: Norm to which a longer gradient is scaled down, above 0; ``inf`` never clips.

    Raises:
        ConfigError: Some values are out of range; the message names all of them.

    Source: AdamW, arXiv 1711.05101, algorithm 2.

    >>> plan = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2)
    >>> [plan.learning_rate_at(step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int | float = 0
    final_fraction: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    moments: Literal["float32", "8bit"] = "float32"

    def __post_init__(self) -> None:
        check_bounds(
            "learner.optimizer",
            self,
            schedule=(self.schedule in ("constant", "linear", "cosine"), "constant, linear or cosine"),
            warmup_steps=(
                0 <= self.warmup_steps < 1 or self.warmup_steps == int(self.warmup_steps) >= 1,
                "a number of steps, or their share below 1",
            ),
            moments=(self.moments in ("float32", "8bit"), "float32 or 8bit"),
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the rate of training step ``step`` of ``steps``, counted from 0.

        With s steps after a warm-up of w: linear 1 - (step - w) / s, cosine (1 + cos(pi (step - w) / s)) /
        2, of the way from ``final_fraction`` to 1. Steps after the last one keep its floor.
        """
        # Rounded up, as in transformers' warmup_ratio.
        rise = math.ceil(self.warmup_steps * steps) if self.warmup_steps < 1 else self.warmup_steps
        if step < rise:
            # Step 0 learns too: a rate of 0 would waste its rollouts.
            return self.learning_rate * (step + 1) / rise
        done = min((step - rise) / max(steps - rise, 1), 1.0)
        shapes = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        left = shapes[self.schedule]
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * left)


@dataclass(frozen=True)
@bounded(
    "learner",
    max_tokens_per_micro_batch="at least 1 token",
    temperature="above 0 and finite",
    processes="at least 1",
)
class LearnerConfig:
    """How the model is trained. Only ``optimizer`` and ``precision`` change a result beyond rounding.

    Attributes:
        optimizer: The optimizer and the schedule of its learning rate.
        precision: Number format of the weights that compute: "fp32", "bf16" with float32 master weights, or "auto", the
            faster one on this machine; the run card says which one it was.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass, above 0. Padding counts, and a prompt
            that answers share counts once. Memory grows with it. A longer sequence has a pass of its own. None chooses
            by the model's size, and allows four times as many for answers that share a long prompt.
        gradient_checkpointing: Whether the backward pass computes each layer again instead of keeping its activations.
        processes: Number of processes that hold a part of the model each and make every step together (FSDP2): CPU
            processes, or one per GPU; 1 is this process. See docs/scaling.md.
        offload: Whether parts, gradients and moments stay in the machine's memory and visit the GPU when they are
            needed. With one process, that process is a separate one.
        temperature: Divisor of the logits at which the learner scores every policy, above 0; none takes that of
            ``sampling``. Another one makes the answers off-policy on purpose, by a known amount: what sampled them is
            not what the ratio takes for it (P3O's study of temperatures).

    Raises:
        ConfigError: A number is out of range.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    max_tokens_per_micro_batch: int | None = None
    gradient_checkpointing: bool = False
    processes: int = 1
    offload: bool = False
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"learner.precision must be auto, fp32 or bf16, got '{self.precision}'")

    @property
    def is_sharded(self) -> bool:
        """Whether processes of their own hold the model, rather than this one."""
        return self.processes > 1 or self.offload


def token_budget(kept: int, item_bytes: int, parameters: int, available: int = 0) -> int:
    """Return how many tokens of a micro-batch keep the planned bytes for the backward pass, at least 256.

    Those are ``available``, or without it an eighth of what weights, gradients and moments take, and at least a quarter
    of a GiB. On a CPU more tokens make products hardly faster, and one more micro-batch costs adding its gradients up:
    4% of the fixed work's update, where a quarter instead of an eighth costs 0.13 GiB.

    Fewer than 256 tokens would make products slow.

    Args:
        kept: Numbers of a token that are kept, each of ``item_bytes``.

    >>> token_budget(kept_numbers(layers=30, width=576), item_bytes=4, parameters=10**9)
    1205
    """
    # A model that computes in less than float32 holds its rounded weights beside the masters.
    state = _STATE_BYTES + (item_bytes if item_bytes < 4 else 0)
    budget = available or max(_LEAST_BYTES, state * parameters // DEVICE_SHARE)
    return max(_LEAST_TOKENS, budget // (kept * item_bytes))


def kept_numbers(layers: int, width: int) -> int:
    """Return about how many numbers of a token a model's own code keeps for the backward pass.

    A layer of width d keeps 24 d: 10 d around attention and norms, and four times the inner width of the feed-forward
    part, which is 2.7 to 4 d. (Measured: 20.8 d for SmolLM2, 1.44 MB a token in float32.)
    """
    return _KEPT * layers * width
