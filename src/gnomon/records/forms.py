"""States of a checkpoint that are well-formed and hold what no part of that kind writes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnomon.core.types import State

_LARGEST = 2**53


def check_form(saved: State, own: State | None) -> None:
    """Refuse a state whose values or tensors cannot be a part's.

    Args:
        own: A state of the part itself, whose types, shapes and lists the saved one must have; None where only what
            holds of every part is looked at: whole numbers from 0 to 2^53.

    Raises:
        ValueError: A value has another type, shape or range; the message names the value.
    """
    for name, value in saved.values.items():
        mine = None if own is None else own.values.get(name)
        _check_known(name, value, mine) if own is not None and name in own.values else _check_any(name, value)
    for name, tensor in own.tensors.items() if own is not None else ():
        if name in saved.tensors:
            _check_tensor(name, saved.tensors[name], tensor)


def _check_known(name: str, value: Any, own: Any) -> None:
    if isinstance(own, Mapping):
        _require(isinstance(value, Mapping) and value.keys() == own.keys(), name, value, f"an object of {sorted(own)}")
        for key in own:
            _check_known(f"{name}.{key}", value[key], own[key])
    elif isinstance(own, list):
        _require(isinstance(value, list), name, value, "a list")
        is_alike = len(value) == len(own)
        for place, inner in enumerate(value):
            where = f"{name}[{place}]"
            _check_known(where, inner, own[place]) if is_alike else _check_any(where, inner)
    elif own is None:
        _check_any(name, value, is_flat=True)
    elif isinstance(own, float):
        is_sound = type(value) in (int, float) and (math.isfinite(value) or not math.isfinite(own))
        _require(is_sound, name, value, "a finite number")
    elif type(own) is int:
        _require(type(value) is int and 0 <= value <= _LARGEST, name, value, "a whole number from 0 to 2^53")
    else:
        _require(type(value) is type(own), name, value, f"a {type(own).__name__}")


def _check_any(name: str, value: Any, is_flat: bool = False) -> None:
    if isinstance(value, Mapping | list):
        _require(not is_flat, name, value, "one value")
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            _check_any(f"{name}[{key}]", inner)
    elif type(value) is int:
        _require(0 <= value <= _LARGEST, name, value, "a whole number from 0 to 2^53")
    else:
        _require(type(value) is not bool or not is_flat, name, value, "a number or null")


def _check_tensor(name: str, tensor: Tensor, own: Tensor) -> None:
    # What is empty at the beginning grows.
    grows = own.dim() > 0 and own.shape[0] == 0
    found, asked = (tensor.shape[1:], own.shape[1:]) if grows else (tensor.shape, own.shape)
    if tensor.dtype != own.dtype or tensor.dim() != own.dim() or found != asked:
        raise ValueError(
            f"the tensor {name} is {tensor.dtype} of shape {list(tensor.shape)}, and should be {own.dtype} of shape "
            f"{['any', *asked] if grows else list(asked)}"
        )


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {repr(value)[:60]}, and should be {what}")
