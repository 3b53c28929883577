"""The operations between a layer's products, as one kernel each on a GPU: norms, rotary positions, gated activations.

transformers computes a norm in six passes over its input and rotary positions in ten; at a width of 1,024 they take
longer than the products. torch.compile makes one pass of each, forward and backward, from the model's own code, so
every architecture keeps its own formula. Only these small parts are compiled, for any size, which takes seconds at
first use; PyTorch keeps the results on disk.

Adapters are float32 parameters, and peft multiplies them in float32, without a GPU's tensor cores: two fifths of an
update of 8 billion weights. Here they are rounded to the precision of what they multiply, as every other weight is, and
their product is added in the same kernel; gradients arrive in float32.
"""

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.models.attention import use_own_attention
from gnomon.models.packed_attention import has_triton
from gnomon.models.slow import warn_slow

VARIABLE = "GNOMON_NATIVE"
_GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
_GATED_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
_ROTARY = "apply_rotary_pos_emb"
_ADAPTED = ("peft.tuners.lora.layer", "Linear")
_MOST_FORMS = 64
"""Compiled forms of one function: of each width, with and without gradient, for one row or one position."""


def use_own_layers(model: Any) -> None:
    """Let a model use gnomon's attention (`use_own_attention`), and on a GPU fused layers.

    On a GPU norms, rotary positions and gated activations are one kernel each, and adapters are computed in bf16.
    Elsewhere, without Triton, and with GNOMON_NATIVE=0 nothing changes; nor where the compiler fails, which is said.
    Sums have another order, and a product is rounded once: results are equal up to rounding.
    """
    use_own_attention(model)
    if _compiles(next(model.parameters()).device):
        fuse(model)


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of tensors on ``device`` as one kernel where `use_own_layers` does that, else as it is."""
    return _compiled(function) if _compiles(device) else function


@cache
def _compiles(device: torch.device) -> bool:
    if device.type != "cuda" or not has_triton() or os.environ.get(VARIABLE) == "0":
        return False
    try:
        given = torch.ones(2, 8, device=device, requires_grad=True)
        _compiled(nn.functional.silu)(given).sum().backward()
    except Exception as error:  # whatever a compiler or a driver raises
        why = f"{type(error).__name__}: {error}"[:300]
        warn_slow("kernel", "a fused norm", device=device, why=why, variable=VARIABLE)
        return False
    return True


def fuse(model: Any) -> None:
    """Replace the parts, on whatever device the model is; rotary positions of tensors on a GPU alone."""
    for module in model.modules():
        # A module that has a forward of its own was changed before, here or by a hook.
        made = None if "forward" in vars(module) else _fused(module)
        if made is not None:
            module.forward = MethodType(made, module)
    for file in {type(module).__module__ for module in model.modules()}:
        names = vars(sys.modules[file])
        if callable(own := names.get(_ROTARY)) and not isinstance(own, _Rotary):
            # A function of the model's file, not a module, so it is replaced in the file for all models of this class.
            names[_ROTARY] = _Rotary(own)


def _fused(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    kind: Any = type(module)
    if (kind.__module__, kind.__name__) == _ADAPTED:
        return _adapted
    if len(inspect.signature(kind.forward).parameters) != 2:
        return None  # it is told more than the hidden states, such as a norm's gate
    if kind.__name__.endswith("RMSNorm") and [name for name, _ in module.named_parameters()] == ["weight"]:
        return _norm(kind)
    parts = dict(module.named_children())
    is_gated = parts.keys() >= _GATED_PARTS and _GATED in inspect.getsource(kind)
    return _gated if is_gated and not list(parts["act_fn"].parameters()) else None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Beyond the limit torch runs the function as it is.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_FORMS)
    return torch.compile(function, dynamic=True)


@cache
def _norm(kind: Any) -> Callable[[Any, Tensor], Tensor]:
    own = _compiled(kind.forward)

    def forward(module: Any, hidden: Tensor) -> Tensor:
        # Of two axes, whatever comes: one compiled form for all shapes of a width.
        found: Tensor = own(module, hidden.reshape(-1, hidden.shape[-1]))
        return found.view(hidden.shape)

    return forward


def _gated(module: Any, hidden: Tensor) -> Tensor:
    product = _product(module.act_fn)
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    found: Tensor = module.down_proj(product(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))
    return found


_PRODUCTS: dict[type, Callable[[Tensor, Tensor], Tensor]] = {}


def _product(activation: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return act(gate) up, compiled once for all activations of one class."""
    kind = type(activation)
    if kind not in _PRODUCTS:
        _PRODUCTS[kind] = torch.compile(lambda gate, up: activation(gate) * up, dynamic=True)
    return _PRODUCTS[kind]


def _adapted(module: Any, hidden: Tensor) -> Tensor:
    names = [name for name in module.active_adapters if name in module.lora_A]
    # peft's own code computes what is not a plain, active, float32 adapter.
    is_whole = module.disable_adapters or module.merged or module.lora_variant
    if is_whole or any(module.lora_A[name].weight.dtype == hidden.dtype for name in names):
        whole: Tensor = type(module).forward(module, hidden)
        return whole
    found: Tensor = module.base_layer(hidden)
    shape, rows = found.shape, hidden.flatten(0, -2)
    found = found.flatten(0, -2)
    for name in names:
        down, up = (part[name].weight.to(hidden.dtype) for part in (module.lora_A, module.lora_B))
        found = torch.addmm(found, rows @ down.T, up.T, alpha=module.scaling[name])
    return found.view(shape)


class _Rotary:
    """A file's rotary positions: compiled for tensors on a GPU, as they are for others."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, query: Tensor, *others: Any, **named: Any) -> Any:
        return (_compiled(self._own) if query.is_cuda else self._own)(query, *others, **named)
