"""A second device without a GPU: what lies on it is computed by the CPU, but must not meet what lies beside it.

PyTorch lets a Python program stand for a device. Its tensors say that they are on "second"; every operation looks where
its arguments are, refuses a mixture as CUDA does (but for numbers without dimensions and CPU indices, as there), and
computes on the values behind them. So a whole learner or engine runs on it, values and gradients included, and one
forgotten ``.to(device)`` is an error. A process has one such device from its first backward pass on, so this is run as
a program of its own: see `test_device.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "second"
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_COPIES = {"_copy_from", "_copy_from_and_resize"}


class Second(Tensor):
    """A tensor on the second device; ``inner`` holds its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Second":
        with torch.inference_mode(False):  # a wrapper cannot be an inference tensor; what it wraps may be one
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(NAME, 0),
            )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the values; torch reads the memory of a tensor without asking, and there is none here."""
        return self.detach().cpu().tolist()


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return nothing: autocast is asked about, and never on."""
        return []


def register() -> list[torch.library.Library]:
    """Make the device; it lives as long as what is returned."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    # Otherwise a module's parameters are replaced one by one, and tied ones come apart; on a GPU they stay together.
    torch.__future__.set_swap_module_params_on_conversion(True)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    copying = torch.library.Library("aten", "IMPL")
    copying.impl("_copy_from", _copy_from, "PrivateUse1")
    return [everything, copying]


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _compute(func, args, kwargs)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inner(target).copy_(_inner(source))
    return target


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Second) else value


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    if torch.is_inference_mode_enabled() and func._can_decompose():
        return func.decompose(*args, **kwargs)  # elsewhere torch does it
    if name == "copy_":
        return _copy_from(args[1], args[0])
    if name in _COPIES:
        return _copy_from(args[0], args[1])
    if name == "_local_scalar_dense":
        return args[0].inner.item()
    if name == "_to_copy":
        return _to_copy(func, args[0], dict(kwargs))
    _refuse_mixture(name, func, args, kwargs)
    return _on_second(func, args, kwargs)


def _to_copy(func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    target = torch.device(kwargs.pop("device", None) or source.device)
    copied: Tensor = func(_inner(source), **kwargs, device="cpu")
    return Second(copied) if target.type == NAME else copied


def _refuse_mixture(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    elsewhere = [t for t in tensors if not isinstance(t, Second) and t.dim() > 0]
    if name in _INDEXING and isinstance(args[0], Second):
        elsewhere = [t for t in elsewhere if not any(t is index for index in args[1])]
    if elsewhere and any(isinstance(t, Second) for t in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two, {NAME}:0 and cpu ({func})")


def _on_second(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flat, form = tree_flatten((args, kwargs))
    known = {id(t.inner): t for t in flat if isinstance(t, Second)}
    plain_args, plain_kwargs = tree_unflatten([_inner(value) for value in flat], form)
    device = plain_kwargs.pop("device", None)
    plain_kwargs.pop("pin_memory", None)
    if any(argument.name == "device" for argument in func._schema.arguments):
        plain_kwargs["device"] = "cpu"
    if func._schema.name == "aten::histc" and not plain_args[0].is_floating_point():
        plain_args = (plain_args[0].float(), *plain_args[1:])  # a GPU counts integers, the CPU does not
    answer = func(*plain_args, **plain_kwargs)
    is_here = device is None or torch.device(device).type == NAME

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_here:
            return value
        return known[id(value)] if id(value) in known else Second(value)

    make: Callable[[Any], Any] = wrapped
    return tree_map(make, answer)
