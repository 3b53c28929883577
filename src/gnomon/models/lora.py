"""Low-rank adapters through peft, and the plain weights that they amount to."""

import copy
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnomon.core.errors import ConfigError, ModelError, unknown
from gnomon.core.optional import import_optional
from gnomon.core.tensor_files import write_tensors
from gnomon.core.types import Adapted, Snapshot
from gnomon.models.adapter_config import ADAPTER_WEIGHTS, BASE_KEY, PEFT_PREFIX, LoraConfig, adapter_tensors
from gnomon.models.quantized import kind_of, layers_of
from gnomon.models.token_strings import first_line

# A weight and a low-rank sum beside it, merged to the same bits on every machine.

_EXACT_BITS = 53
_FRACTION_BITS, _BIAS = 52, 1023
_FLOAT_BITS = 24
_BLOCK = 1 << 20


def merged(weight: Adapted) -> Tensor:
    """Return W + scale * up @ down, computed in float32 and given in W's precision and on its device.

    **The same bits on every processor, with any number of threads.** A product of matrices in floating point has the
    bits of the order in which a kernel sums, and of half of all float32 numbers the last one differs between two CPUs.
    So each row of ``up`` and each column of ``down`` is first rounded to whole multiples of a power of two, of so few
    bits that every product, and every sum of ``rank`` of them, is a whole number below 2^53: float64 adds those without
    rounding, in any order. What follows is element by element: times the scale, rounded to float32, added to W.

    A row or column keeps 24 bits of its largest number up to rank 32, and one less for every fourfold rank: no more is
    lost than float32 itself does, next to the largest. Numbers that are not finite make the whole of it NaN.
    Source: exact products by splitting are Ozaki et al. 2012 (Numer. Algorithms 59), here with one slice; that it makes
    adapters travel alone and be proved is ours.
    """
    here = weight.base.device
    # Apple's GPUs have no float64.
    there = torch.device("cpu") if here.type == "mps" else here
    up, down = (t.detach().to(there, torch.float64) for t in (weight.up, weight.down))
    if not bool(up.isfinite().all() & down.isfinite().all()):
        return torch.full_like(weight.base, math.nan)
    # A product of two numbers of b bits has 2 b, and a sum of r products log2(r) more: 2 b + log2(r) <= 53.
    bits = min(_FLOAT_BITS, (_EXACT_BITS - math.ceil(math.log2(max(1, up.shape[1])))) // 2)
    # up: (outputs, rank), a unit for each row; down: (rank, inputs), a unit for each column.
    up, down = _whole(up, 1, bits), _whole(down, 0, bits)
    if weight.is_transposed:
        up, down = down.T, up.T
    result = torch.empty_like(weight.base)
    # So much that float64 stays in the cache of a CPU; a GPU has it done at once.
    rows = max(1, _BLOCK // max(1, down.shape[1])) if there.type == "cpu" else max(1, up.shape[0])
    for left, base, place in zip(up.split(rows), weight.base.detach().split(rows), result.split(rows), strict=True):
        # The sign of a zero would be the kernel's; plus zero there is none below it.
        update = (left @ down).mul_(weight.scale).add_(0.0).float().to(here)
        place.copy_(update.add_(base))
    return result


def whole(named: Iterable[tuple[str, Tensor | Adapted]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as a tensor, and keep none of them meanwhile."""
    return map(_merged_pair, named)


def _merged_pair(pair: tuple[str, Tensor | Adapted]) -> tuple[str, Tensor]:
    name, weight = pair
    return name, merged(weight) if isinstance(weight, Adapted) else weight


def snapshot_of(version: int, parts: Callable[[], Iterator[tuple[str, Tensor | Adapted]]]) -> Snapshot:
    """Return the weights that ``parts`` yields whenever it is called, merged or not as the reader chooses."""
    return Snapshot(version, lambda: whole(parts()), parts=parts)


def _whole(matrix: Tensor, axis: int, bits: int) -> Tensor:
    """Return ``matrix`` with each line along ``axis`` rounded to whole multiples of a power of two, below 2^``bits``.

    The largest magnitude of a line lies in [2^(e-1), 2^e), so that multiples of 2^(e-bits) are at most 2^bits of them.
    """
    exponent = torch.frexp(matrix.abs().amax(axis, keepdim=True)).exponent
    # Powers of two by their bits: other ways to them round, or underflow, on some device.
    unit = ((exponent.long() - bits + _BIAS) << _FRACTION_BITS).view(torch.float64)
    return (matrix / unit).round_().mul_(unit)


_ADAPTER = "default"
_FUSED = ("out_proj", "x_proj", "dt_proj")
_PROBED_TOKENS = 16


def adapt(model: nn.Module, plan: LoraConfig, base: str | None = None) -> nn.Module:
    """Put adapters into ``model`` in place, freeze everything else, and return it.

    B starts at zero, so the adapted model is the plain one until the first update; A is drawn from torch's default
    generator, which the caller seeds. With ``plan.adapter`` both are that adapter's. "all-linear" leaves out layers
    that cannot be adapted (`misfits`) and layers that no pass calls.

    Args:
        model: The plain model.
        plan: Rank, scale and targets.
        base: The model's name in the config of a saved adapter.

    Raises:
        ConfigError: If peft is missing, no module has a target's name, or one that has cannot be adapted.
    """
    peft = import_optional("peft", "lora", f"lora.rank = {plan.rank}")
    check_targets(model, plan)
    check_adapter(model, plan)
    targets = list(plan.targets) if isinstance(plan.targets, tuple) else plan.targets
    left_out = [*misfits(model), *_unused(model)] if plan.is_everything else []
    settings: Any = peft.LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        target_modules=targets,
        exclude_modules=left_out or None,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base,
    )
    model.requires_grad_(False)
    with warnings.catch_warnings():
        # GPT-2's layers are stored transposed; peft sees it, sets the switch itself, and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        # Experts are one tensor a layer; peft translates "all-linear" for them, and says which layers have none.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        try:
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"lora.targets = {plan.targets!r}: peft cannot adapt these in a {type(model).__name__} "
                f"({first_line(error)}); those that fit: {_fitting(model)}"
            ) from error
    for name, parameter in model.named_parameters():
        # peft makes adapters in the model's precision, in which a step of 1e-6 would round away.
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    if plan.adapter is not None:
        _read_into(model, Path(plan.adapter))
    return model


# Adapters in folders, in peft's form.


def _saved_name(name: str) -> str:
    """Return the name that peft saves an adapter's weight under."""
    return f"{PEFT_PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}"


def adapter_writer(model: Any, tensors: Mapping[str, Tensor]) -> Callable[[Path], None] | None:
    """Return what writes a model's adapters in peft's form into a folder, later and in any thread.

    Args:
        model: As `adapt` returned it.
        tensors: The adapters' weights by the model's names.

    Returns:
        The writer; None where an adapter changes a stack of experts, for which peft's form differs by version.
    """
    # A wrapper around a wrapper: peft's way to adapt two stacked tensors of one module.
    if any(".base_layer.lora_" in name for name in tensors):
        return None
    config = copy.deepcopy(model.peft_config[_ADAPTER])
    # As peft saves an adapter: a loader does not train by default.
    config.inference_mode = True
    named = {_saved_name(name): tensor.cpu() for name, tensor in tensors.items()}
    trained_on = {"format": "pt", BASE_KEY: kind_of(model) or "unquantized"}

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # safetensors writes several texts of a header in any order, and a checkpoint's bytes are a run's.
        write_tensors(folder / ADAPTER_WEIGHTS, named, trained_on)
        config.save_pretrained(folder)

    return write


def _read_into(model: nn.Module, folder: Path) -> None:
    """Give the adapters of a model the weights of a folder, whose shapes `check_adapter` compares.

    Raises:
        ModelError: If they are those of other layers.
    """
    own = {_saved_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name}
    found = adapter_tensors(folder)
    _check_names(found, own, folder)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def _check_names(found: Iterable[str], asked: Iterable[str], folder: object) -> None:
    held, wanted = set(found), set(asked)
    if wrong := sorted(held ^ wanted):
        does, ask = ("holds", "do not ask") if wrong[0] in held else ("lacks", "ask")
        raise ModelError(
            f"the adapter '{folder}' {does} {wrong[0].removeprefix(PEFT_PREFIX)}, and lora.targets {ask} for it (the "
            f"first of {len(wrong)}); copy the "
            "adapter again, or leave lora.targets out"
        )


def check_adapter(model: nn.Module, plan: LoraConfig) -> None:
    """Refuse an adapter that does not fit ``model``, by names and shapes, before any weight of that is read.

    Raises:
        ModelError: The message names the first difference.
    """
    if plan.adapter is None:
        return
    found, modules = adapter_tensors(Path(plan.adapter)), dict(model.named_modules())
    for name, tensor in found.items():
        place, _, which = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if which not in ("A.weight", "B.weight"):
            raise ModelError(
                f"the adapter '{plan.adapter}' holds {name.removeprefix(PEFT_PREFIX)}, which is no plain adapter of a "
                "linear layer; merge it into its base model (peft: merge_and_unload) and give that folder"
            )
        weight = getattr(modules.get(place), "weight", None)
        sides = [] if weight is None else list(weight.shape)
        # GPT-2's Conv1D stores (inputs, outputs).
        if weight is not None and any(_is_conv1d(kind) for kind in type(modules[place]).__mro__):
            sides.reverse()
        # A norm has one axis, a convolution three: no adapter of a linear layer fits them.
        rows, columns = sides if len(sides) == 2 else (0, 0)
        if tuple(tensor.shape) != ((plan.rank, columns) if which == "A.weight" else (rows, plan.rank)):
            raise ModelError(
                f"the adapter '{plan.adapter}' is not of this model: {name.removeprefix(PEFT_PREFIX)} is "
                f"{list(tensor.shape)}, and {place} {f'is {sides}' if weight is not None else 'is not there'}"
            )
    if isinstance(plan.targets, tuple):
        chosen = [n for n in modules if any(f".{n}".endswith(f".{target}") for target in plan.targets)]
        _check_names(found, (f"{PEFT_PREFIX}{n}.lora_{half}.weight" for n in chosen for half in "AB"), plan.adapter)


def misfits(model: nn.Module) -> dict[str, str]:
    """Return the linear layers that an adapter cannot change, by name, each with why.

    A layer with a forward pass of its own (a router that returns a pair) is no W x; and of a state-space layer, kernels
    that fuse it read the weights of all but its first product, past any adapter.
    """
    modules, found = dict(model.named_modules()), dict[str, str]()
    for name, module in modules.items():
        if not _is_linear(module):
            continue
        parent, _, last = name.rpartition(".")
        plain: Any = (
            nn.Linear if isinstance(module, nn.Linear) else next(c for c in type(module).__mro__ if _is_conv1d(c))
        )
        if type(module).forward is not plain.forward:
            found[name] = "computes in a way of its own"
        # Mamba's parameters; its fused kernels take these layers' weights as tensors.
        elif last in _FUSED and hasattr(modules[parent], "A_log") and hasattr(modules[parent], "D"):
            found[name] = "is read by kernels that pass an adapter by"
    return found


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or any(_is_conv1d(kind) for kind in type(module).__mro__)


def _unused(model: nn.Module) -> list[str]:
    """Return the linear layers that a short forward pass does not call in any layer: their weights are used otherwise.

    Of experts, those that these tokens did not choose have others beside them that were called.
    """
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    if not linear or any(parameter.device.type == "meta" for parameter in model.parameters()):
        return []
    called = set[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(_pattern(name))

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in linear.items()]
    network: Any = model
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            ids = torch.arange(_PROBED_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
            network(input_ids=ids % network.config.get_text_config().vocab_size, use_cache=False)
    except Exception:
        # A model that runs on another device only is not told from here.
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in linear if _pattern(name) not in called]


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _fitting(model: nn.Module) -> str:
    """Return the names of the linear layers that fit."""
    bad, network = misfits(model), cast(Any, model)
    head = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    fitting = {n for n, m in model.named_modules() if _is_linear(m) and n not in bad and m is not head}
    return ", ".join(sorted({name.rpartition(".")[2] for name in fitting})) or "none"


def check_targets(model: nn.Module, plan: LoraConfig) -> None:
    """Refuse targets that fit no module or none that can be adapted, and those whose weight another module has too.

    Raises:
        ConfigError: Naming ``lora.targets`` and what fits.
    """
    bad = misfits(model)
    if plan.is_everything:
        return
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for target in plan.targets:
        # peft's own rule for names of modules.
        chosen = [(n, m) for n, m in model.named_modules() if n == target or n.endswith(f".{target}")]
        if not chosen:
            names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise ConfigError(f"lora.targets: {unknown('module', target, names)}")
        for name, module in chosen:
            is_tied = any(uses[id(p)] > 1 for p in module.parameters(recurse=False))
            why = bad.get(name, "" if _has_matrix(module) else "has no matrix of its own that an adapter could change")
            if why:
                raise ConfigError(f"lora.targets: '{target}' ({name}) {why}; those that fit: {_fitting(model)}")
            if is_tied or isinstance(module, nn.Embedding):
                kind = "shares its weight with another module" if is_tied else "is an embedding"
                raise ConfigError(f"lora.targets: '{target}' ({name}) {kind}; choose linear layers")


def check_rank(model: nn.Module, plan: LoraConfig) -> str | None:
    """Refuse a rank that no weight of the targets can have.

    Args:
        model: The plain model; its weights are not read.
        plan: Its targets fit the model.

    Returns:
        A sentence where some of them have fewer rows or columns than the rank, else None.

    Raises:
        ConfigError: All of them have; the message has the largest rank that one can have.
    """
    network, bad = cast(Any, model), misfits(model)
    head = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    sides = {
        name: min(module.weight.shape)
        for name, module in model.named_modules()
        if _is_linear(module)
        and name not in bad
        and (module is not head if plan.is_everything else any(f".{name}".endswith(f".{t}") for t in plan.targets))
    }
    # B A has at most the rank of the smaller side of the weight.
    narrow = sorted({name.rpartition(".")[2] for name, side in sides.items() if side < plan.rank})
    if not narrow:
        return None
    most = max(sides.values())
    if plan.rank > most:
        raise ConfigError(
            f"lora.rank = {plan.rank} is above {most}, the rank that the largest weight of lora.targets has; set "
            f"lora.rank = {most} or less, or train all weights (without lora)"
        )
    return f"lora.rank = {plan.rank} is above the rank that {', '.join(narrow)} can have, whose adapters are wasteful"


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module computes with weights of its own, and is no convolution."""
    is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return not is_convolution and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that an optimizer may change: all of them, or the adapters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` in the names of the plain Hugging Face model, adapters merged; see `parts`.

    A merged weight is W + scale * B A computed in float32 and given in W's precision (`merged`).
    """
    return whole(parts(model))


def parts(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor | Adapted]]:
    """Yield weights in the names of the plain Hugging Face model, those with an adapter not merged yet.

    A weight without adapter is the live tensor itself, nothing copied; one of experts, whose adapters peft folds, comes
    merged. Weights that share memory (a tied head) come once, under the first name. Buffers that belong to the model's
    state come too. Quantized weights come dequantized.

    Args:
        names: Which, in this order; None is all.
    """
    found = sources(model)
    for name in found if names is None else names:
        yield name, found[name].read()


@dataclass(frozen=True)
class Source:
    """Where a weight of `parts` comes from.

    Attributes:
        held: Has its shape and type: a parameter, a buffer or a quantized layer.
        read: Returns the weight.
        is_folded: Whether it is computed from adapters of stacked experts.
    """

    held: Any
    read: Callable[[], Tensor | Adapted]
    is_folded: bool = False


def sources(model: nn.Module) -> dict[str, Source]:
    """Return where each weight of `parts` comes from; nothing is computed."""
    adapted = {_adapted_name(n, module): module for n, module in model.named_modules() if _has_adapter(module)}
    found: dict[str, Source] = {}

    def add(name: str, held: Any, read: Callable[[], Tensor]) -> None:
        layer = adapted.get(name)
        of_layer = read if layer is None else lambda: _adapted(layer, read())
        found[name] = Source(held, of_layer, hasattr(layer, "parameter_name"))

    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            add(plain_name(name), parameter, parameter.detach)
    for name, layer in layers_of(model):
        add(f"{plain_name(name)}.weight", layer, partial(getattr, layer, "weight"))
    # Buffers outside of the state (rotary tables) are computed from the config and belong to no file.
    kept = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in kept:
            add(plain_name(name), buffer, buffer.detach)
    return found


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
            # (experts, outputs, inputs): peft has one low-rank pair an expert, and gives their products stacked.
            stacked: Tensor = base.float() + layer.get_delta_weight(_ADAPTER).float()
            return stacked.to(weight.dtype)
    down, up = layer.lora_A[_ADAPTER].weight.detach(), layer.lora_B[_ADAPTER].weight.detach()
    # A Conv1D (GPT-2) stores its weight transposed.
    return Adapted(base, up, down, layer.scaling[_ADAPTER], layer.fan_in_fan_out)
