"""Call a transformers model with the arguments of its own signature, so that no argument is lost.

A transformers model ignores unknown arguments in ``**kwargs``. A cache under the name of another version would be
ignored silently. So every argument is looked up in the signature first.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gnomon.core.errors import ModelError
from gnomon.models.routing import Routing, routed

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What a model's cache is called: "cache" since transformers 5.24, one of the others before."""
_ONLY_SPARE = frozenset({"use_cache", "logits_to_keep"})
"""Arguments without which a model computes the same and more of it: left out where a model has none."""


def accepted(module: nn.Module) -> frozenset[str]:
    """Return the argument names of a module's ``forward``."""
    kinds = inspect.signature(module.forward).parameters.values()
    return frozenset(p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def body_of(model: Any) -> Any:
    """Return the model below its head; the model itself where it has none.

    transformers' Llama 4 says that its text model with its head is its decoder.
    """
    body = model.get_decoder()
    has_head = body is model or getattr(body, "get_output_embeddings", lambda: None)() is not None
    inner = dict(body.named_children()).get("model") if has_head else None
    return body if inner is None else inner


def ends_of(model: Any) -> Iterator[nn.Module]:
    """Yield a model's embedding and head, those that it has."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return (end for end in found if end is not None)


def cache_name(names: frozenset[str]) -> str | None:
    """Return the cache's name among these arguments; None if the model takes no cache.

    >>> cache_name(frozenset({"input_ids", "cache"})), cache_name(frozenset({"input_ids"}))
    ('cache', None)
    """
    return next((name for name in CACHE_NAMES if name in names), None)


def checked_arguments(module: nn.Module, names: frozenset[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to pass to a module with these argument names.

    Raises:
        ModelError: If the module lacks an argument that changes its result.
    """
    lost = sorted(arguments.keys() - names - _ONLY_SPARE)
    if lost:
        raise ModelError(
            f"{type(module).__name__}.forward of transformers {transformers.__version__} takes no argument "
            f"{', '.join(repr(name) for name in lost)}, so it would be lost; it takes {', '.join(sorted(names))}"
        )
    # Some models read use_cache from **kwargs without naming it.
    known = names | {"use_cache"} if takes_more(module) else names
    return {name: value for name, value in arguments.items() if name in known}


def takes_more(module: nn.Module) -> bool:
    """Whether a module takes arguments that it does not name, as newer transformers models do for their layers."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())


class Forward:
    """Calls a transformers model with the arguments of its signature."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = accepted(model)
        self.device = next(model.parameters()).device
        self.cache_name = cache_name(self.names)
        self.records = False
        self.experts: Tensor | None = None
        self.calls = self.tokens = 0

    def __call__(self, ids: Tensor, keep: int | Tensor = 1, cache: Any = None, **arguments: Any) -> Any:
        """Return the model's output, with logits of the last position, or of ``keep`` if the model can choose.

        The cache is passed by the model's own name for it. With ``records`` on, ``experts`` Int16[R T L K] are those of
        ``ids``, or None for a dense model.

        Raises:
            ModelError: If the model lacks an argument.
        """
        if cache is not None:
            # Without a known name the newest one is passed, so that `checked_arguments` refuses it by name.
            arguments[self.cache_name or CACHE_NAMES[0]] = cache
        known = checked_arguments(self.model, self.names, arguments | {"logits_to_keep": keep})
        placed = {name: _on(value, self.device) for name, value in known.items()}
        with routed(self.model, Routing() if self.records else None) as recorder:
            output = self.model(input_ids=ids.to(self.device), **placed)
        self.calls += 1
        self.experts = None if recorder is None else recorder.experts(*ids.shape)
        return output

    def cache_of(self, output: Any) -> Any:
        """Return the cache of an output.

        Raises:
            ModelError: If there is none.
        """
        found = None if self.cache_name is None else output.get(self.cache_name)
        if found is None:
            raise ModelError(f"{type(self.model).__name__} gives back no cache")
        return found


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
