"""Settings of low-rank adapters, and the settings of an adapter's folder. No torch."""

import json
import math
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open

from gnomon.core.atomic_files import read_plain, read_plain_text
from gnomon.core.errors import ConfigError, ModelError, bounded, unknown
from gnomon.core.optional import Tensor

Kind = Literal["nf4", "int8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
@bounded("lora", rank="at least 1", alpha="> 0 and finite")
class LoraConfig:
    """Train W + (alpha / rank) B A with W frozen, instead of W.

    Attributes:
        rank: Number of columns of B, above 0; 8 to 32 is common in reinforcement learning.
        alpha: Above 0. The update is scaled by alpha / rank, so that the rank can change at one learning rate.
        targets: "all-linear" (every linear layer but the head), or names of modules such as ("q_proj", "v_proj").
        adapter: Folder of an adapter in peft's form that training begins with; its rank, alpha and targets count. None
            begins with the model itself.
        base: How the frozen weights between embedding and head are stored: "unquantized" in the precision that
            computes, "nf4" in 4.5 bits a weight (QLoRA), "int8" in 8, and dequantized a layer at a time. What is
            trained, published and saved is then the policy on that base.

    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.

    >>> LoraConfig(rank=8, alpha=16).scale
    2.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    adapter: str | None = None
    base: Literal["unquantized", "nf4", "int8"] = "unquantized"

    def __post_init__(self) -> None:
        if self.base not in ("unquantized", *KINDS):
            raise ConfigError(f"lora: {unknown('base', self.base, ['unquantized', *KINDS])}")
        if not self.targets or (isinstance(self.targets, str) and self.targets != ALL_LINEAR):
            raise ConfigError(f"lora: targets must be '{ALL_LINEAR}' or a list of module names, got {self.targets!r}")

    @property
    def is_everything(self) -> bool:
        """Whether every linear layer that fits is adapted."""
        return self.targets == ALL_LINEAR

    @property
    def quantized(self) -> Kind | None:
        """How frozen weights are quantized; None if they are not."""
        return None if self.base == "unquantized" else self.base

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
BASE_KEY = "gnomon.lora.base"
_PLAIN_ONLY = {
    "use_dora": "DoRA", "rank_pattern": "ranks that differ by module", "alpha_pattern": "alphas that differ by module",
    "modules_to_save": "whole modules beside the adapter", "target_parameters": "adapters of parameters",
    "trainable_token_indices": "trained tokens", "lora_bias": "biases in the adapter",
    "layer_replication": "copied layers", "alora_invocation_tokens": "an adapter that begins at a token (aLoRA)",
}  # fmt: skip
_PLAIN_TOO = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "inference_mode", "fan_in_fan_out",
    "init_lora_weights", "auto_mapping", "use_rslora", "megatron_config", "runtime_config", "ensure_weight_tying",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
}  # fmt: skip
"""Settings of peft that choose modules, or how an adapter began and was trained, and not what it computes."""


ADAPTER_FOLDER = "adapter"
"""Where a checkpoint has its adapter beside the merged model."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return os.path.isfile(folder / _CONFIG) and not os.path.isfile(folder / "config.json")


def read_adapter_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the base model that an adapter in peft's form names, and the settings of `LoraConfig` that fit it.

    One that was trained here on quantized weights says so in its file of weights, and ``base`` is among the settings.

    Raises:
        ModelError: It is no plain LoRA adapter in safetensors.
    """
    try:
        config = json.loads(read_plain_text(folder / _CONFIG))
        kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
        targets, base = config["target_modules"], config.get("base_model_name_or_path")
        are_names = not isinstance(targets, list) or all(isinstance(name, str) for name in targets)
        asked = {
            "r": (type(rank) is int and 0 < rank < 2**31, "a whole number above 0"),
            "lora_alpha": (type(alpha) in (int, float) and 0 < alpha < 2**63, "a number above 0"),
            "base_model_name_or_path": (base is None or isinstance(base, str), "a name"),
            "target_modules": (are_names, "names of modules"),
        }
        wrong = [
            f"{name} is {repr(config.get(name))[:40]}, and should be {what}"
            for name, (holds, what) in asked.items()
            if not holds
        ]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{folder / _CONFIG}' is no adapter's config: {error!r}") from error
    if wrong:
        raise ModelError(f"'{folder / _CONFIG}': {'; '.join(wrong)}")
    # Anything that changes what an adapter computes is refused; a setting that peft adds later is taken for one if it
    # is switched on.
    special = [said for key, said in _PLAIN_ONLY.items() if config.get(key)]
    others = config.keys() - _PLAIN_ONLY.keys() - _PLAIN_TOO
    special += [f"{key} = {str(config[key])[:40]}" for key in sorted(others) if _is_a_way(config[key])]
    special += [f"an adapter of kind {kind}"] if kind != "LORA" else []
    special += [f"bias = {config.get('bias')!r}"] if config.get("bias", "none") != "none" else []
    begun = config.get("init_lora_weights", True)
    if begun not in (True, False, "gaussian"):
        special.append(f"init_lora_weights = {begun!r}, which changes the base")
    if special:
        raise ModelError(
            f"the adapter '{folder}' has {', '.join(special)}, and plain LoRA adapters are read; merge it into its "
            "base model (peft: merge_and_unload) and give that folder"
        )
    # rsLoRA scales by alpha / sqrt(rank); this alpha gives the same factor as alpha / rank.
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    # A pattern, or modules chosen by layer, become the list of the modules that the file has weights for.
    if not isinstance(targets, list) or config.get("exclude_modules") or config.get("layers_to_transform") is not None:
        targets = sorted({key.rpartition(".lora_")[0].removeprefix(PEFT_PREFIX) for key in adapter_tensors(folder)})
    settings = {"rank": rank, "alpha": alpha, "targets": sorted(targets), "adapter": str(folder)}
    trained_on = _trained_on(folder)
    return base or "", settings if trained_on is None else {**settings, "base": trained_on}


def _is_a_way(value: object) -> bool:
    """Whether a setting of peft switches a way of computing on; numbers and texts are parameters of such ways."""
    return value is True or (isinstance(value, list | dict) and bool(value))


def _trained_on(folder: Path) -> str | None:
    """Return what the frozen weights were stored as where an adapter was trained; None where its file does not say."""
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            found = (file.metadata() or {}).get(BASE_KEY)
    except (OSError, SafetensorError):
        # What reads the tensors says what is wrong with the file.
        return None
    return found if found in ("unquantized", *KINDS) else None


def other_base(plan: LoraConfig) -> str | None:
    """Return a sentence where an adapter was trained on a base that is stored in another way than ``plan.base``."""
    trained_on = None if plan.adapter is None else _trained_on(Path(plan.adapter))
    if trained_on in (None, plan.base):
        return None
    return (
        f"lora.base = '{plan.base}', and the adapter '{plan.adapter}' was trained on a base stored as '{trained_on}': "
        f"it is another policy; lora.base = '{trained_on}' is the one that was trained"
    )


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights of an adapter.

    Raises:
        ModelError: If they cannot be read or are not finite.
    """
    try:
        found: dict[str, Tensor] = import_module("safetensors.torch").load(read_plain(folder / ADAPTER_WEIGHTS))
    except FileNotFoundError as error:
        raise ModelError(f"the adapter '{folder}' has no {ADAPTER_WEIGHTS}; save it with safetensors") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"'{folder / ADAPTER_WEIGHTS}' cannot be read: {error}") from error
    wrong = [name for name, tensor in found.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ModelError(f"the adapter '{folder}' has weights that are not finite: {', '.join(wrong[:3])}")
    return found
