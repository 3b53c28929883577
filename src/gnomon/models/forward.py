"""A transformers model, called with the arguments that its own signature has; none is lost on the way.

A model of transformers swallows an argument that it does not know in ``**kwargs``. So a cache that is passed by a name
of another version is not there, and nothing says so. Here every argument is looked up in the signature first.
"""

import inspect
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
    """Return the arguments that a module's ``forward`` names."""
    kinds = inspect.signature(module.forward).parameters.values()
    return frozenset(p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def cache_name(names: frozenset[str]) -> str | None:
    """Return what a model that takes arguments of these names calls its cache; None where it takes none.

    >>> cache_name(frozenset({"input_ids", "cache"})), cache_name(frozenset({"input_ids"}))
    ('cache', None)
    """
    return next((name for name in CACHE_NAMES if name in names), None)


def checked_arguments(module: nn.Module, names: frozenset[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to pass to a module that takes those of ``names``.

    Raises: ModelError for one that the module does not take and that changes what it computes.
    """
    lost = sorted(arguments.keys() - names - _ONLY_SPARE)
    if lost:
        raise ModelError(
            f"{type(module).__name__}.forward of transformers {transformers.__version__} takes no argument "
            f"{', '.join(repr(name) for name in lost)}, so it would be lost; it takes {', '.join(sorted(names))}"
        )
    # Some models do not name use_cache and read it all the same, from their further arguments.
    known = names | {"use_cache"} if _takes_more(module) else names
    return {name: value for name, value in arguments.items() if name in known}


def _takes_more(module: nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())


class Forward:
    """Calls a transformers model with the arguments that its signature has.

    cache_name: what the model calls its cache; None where it takes none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = accepted(model)
        self.device = next(model.parameters()).device
        self.cache_name = cache_name(self.names)
        self.records = False
        self.experts: Tensor | None = None
        self.calls = 0

    def __call__(self, ids: Tensor, keep: int | Tensor = 1, cache: Any = None, **arguments: Any) -> Any:
        """Return the model's output; logits for the last position, or for those in ``keep``, where it can choose.

        cache: passed by the model's own name for it. With ``records`` on, ``experts`` Int16[R T L K] are then those of
        ``ids``, None if the model is dense.
        Raises: ModelError for an argument that the model does not take.
        """
        if cache is not None:
            arguments[self.cache_name or CACHE_NAMES[0]] = cache
        known = checked_arguments(self.model, self.names, arguments | {"logits_to_keep": keep})
        placed = {name: _on(value, self.device) for name, value in known.items()}
        with routed(self.model, Routing() if self.records else None) as recorder:
            output = self.model(input_ids=ids.to(self.device), **placed)
        self.calls += 1
        self.experts = None if recorder is None else recorder.experts(*ids.shape)
        return output

    def cache_of(self, output: Any) -> Any:
        """Return the cache that the model gave back. Raises: ModelError when it gave none."""
        found = None if self.cache_name is None else output.get(self.cache_name)
        if found is None:
            raise ModelError(f"{type(self.model).__name__} gives back no cache")
        return found


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
