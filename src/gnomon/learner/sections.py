"""The learner's configuration."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gnomon.core.errors import ConfigError, bounded
from gnomon.learner.optimizer import OptimizerConfig
from gnomon.models.backbone import kept_for_backward
from gnomon.models.device import memory_of

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


def default_budget(model: Any, device: torch.device | None = None) -> int:
    """Return the tokens of a micro-batch for a causal language model on ``device``, or where it is: see `token_budget`.

    A GPU needs more tokens to be busy, and has a memory of its own: an eighth of it is for activations.
    """
    config, parameter = model.config.get_text_config(), next(model.parameters())
    # 0 on a CPU, whose memory other programs share: `token_budget` then goes by the size of the training state.
    available = memory_of(device or parameter.device) // DEVICE_SHARE
    size = sum(p.numel() for p in model.parameters())
    # The fused forward pass knows exactly what it keeps; a model's own code can only be estimated.
    kept = kept_for_backward(model) or kept_numbers(config.num_hidden_layers, config.hidden_size)
    return token_budget(kept, parameter.dtype.itemsize, size, available)
