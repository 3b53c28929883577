"""Low-rank adapters through peft, and the plain weights that they amount to."""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnomon.errors import ConfigError, unknown
from gnomon.models.merging import whole
from gnomon.types import Adapted

ALL_LINEAR = "all-linear"
_ADAPTER = "default"


@dataclass(frozen=True)
class LoraPlan:
    """Train W + (alpha / rank) B A with W frozen, instead of W.

    rank: columns of B, > 0; 8 to 32 is common in reinforcement learning.
    alpha: > 0; the update is scaled by alpha / rank, so that the rank can change at one learning rate.
    targets: "all-linear" (every linear layer but the head) or names of modules ("q_proj", "v_proj").
    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.

    >>> LoraPlan(rank=8, alpha=16).scale
    2.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank <= 0 or self.alpha <= 0:
            raise ConfigError(f"lora: rank and alpha must be > 0, got rank={self.rank}, alpha={self.alpha}")
        if not self.targets or (isinstance(self.targets, str) and self.targets != ALL_LINEAR):
            raise ConfigError(f"lora: targets must be '{ALL_LINEAR}' or a list of module names, got {self.targets!r}")

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def check_lora(plan: LoraPlan | None) -> None:
    """Raise ConfigError when ``plan`` needs a package that is not installed."""
    if plan is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"lora.rank = {plan.rank} needs a package that is not installed; run: pip install peft")


def adapt(model: nn.Module, plan: LoraPlan) -> nn.Module:
    """Put adapters into ``model`` in place, freeze everything else, and return it.

    B starts at zero, so the adapted model is the plain one until the first update; A is drawn from torch's
    default generator, which the caller seeds.
    Raises: ConfigError when peft is missing or no module has a target's name.
    """
    check_lora(plan)
    import peft

    _check_targets(model, plan)
    targets = list(plan.targets) if isinstance(plan.targets, tuple) else plan.targets
    settings: Any = peft.LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    model.requires_grad_(False)
    with warnings.catch_warnings():
        # GPT-2's layers are stored transposed; peft sees it, sets the switch itself, and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        # Experts are one tensor a layer; peft translates "all-linear" for them, and says which layers have none.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model


def _check_targets(model: nn.Module, plan: LoraPlan) -> None:
    """Refuse targets that fit no module, and those whose merged weight would change another module's too."""
    if plan.targets == ALL_LINEAR:
        return
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for target in plan.targets:
        chosen = [(n, m) for n, m in model.named_modules() if n == target or n.endswith(f".{target}")]
        if not chosen:
            names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise ConfigError(f"lora.targets: {unknown('module', target, names)}")
        for name, module in chosen:
            is_tied = any(uses[id(p)] > 1 for p in module.parameters(recurse=False))
            if is_tied or isinstance(module, nn.Embedding):
                kind = "shares its weight with another module" if is_tied else "is an embedding"
                raise ConfigError(f"lora.targets: '{target}' ({name}) {kind}; choose linear layers")


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that an optimizer may change: all of them, or the adapters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def merged_tensors(
    model: nn.Module, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` in the names of the plain Hugging Face model, adapters merged; see `parts`.

    A merged weight is W + scale * B A computed in float32 and given in W's precision (`merging.merged`).
    """
    return whole(parts(model, is_wanted))


def parts(
    model: nn.Module, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | Adapted]]:
    """Yield weights in the names of the plain Hugging Face model, those with an adapter not merged yet.

    A weight without adapter is the live tensor itself, nothing copied; one of experts, whose adapters peft folds, comes
    merged. Weights that share memory (a tied head) come once, under the first name. Buffers that belong to the model's
    state come too. Of names that are not wanted nothing is computed.
    """
    adapted = {_adapted_name(n, module): module for n, module in model.named_modules() if _has_adapter(module)}
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if "lora_" in name or not is_wanted(plain):
            continue
        yield plain, _adapted(adapted[plain], parameter) if plain in adapted else parameter.detach()
    kept = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in kept and is_wanted(plain_name(name)):
            yield plain_name(name), buffer


def plain_name(name: str) -> str:
    """Return the name of a weight or module in the plain model; experts have a wrapper around a wrapper."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _adapted_name(name: str, layer: Any) -> str:
    """Return the plain name of the weight that the adapter at ``name`` changes."""
    from peft.tuners.lora.layer import ParamWrapper

    return f"{plain_name(name)}.{layer.parameter_name if isinstance(layer, ParamWrapper) else 'weight'}"


def _has_adapter(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return "lora_A" in children and "base_layer" in children


def _adapted(layer: Any, weight: Tensor) -> Tensor | Adapted:
    from peft.tuners.lora.layer import ParamWrapper

    base = weight.detach()
    if isinstance(layer, ParamWrapper):
        with torch.no_grad():
            stacked: Tensor = base.float() + layer.get_delta_weight(_ADAPTER).float()
            return stacked.to(weight.dtype)
    down, up = layer.lora_A[_ADAPTER].weight.detach(), layer.lora_B[_ADAPTER].weight.detach()
    # A Conv1D (GPT-2) stores its weight transposed.
    return Adapted(base, up, down, layer.scaling[_ADAPTER], layer.fan_in_fan_out)
