"""A transformers model, called with the arguments that its own signature has."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.models.routing import Routing, routed


class Forward:
    """Calls a transformers model with the arguments that its signature has."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = frozenset(inspect.signature(model.forward).parameters)
        self.device = next(model.parameters()).device
        self.cache_name = "cache_params" if "cache_params" in self.names else "past_key_values"
        self.records = False
        self.experts: Tensor | None = None
        self.calls = 0

    def __call__(self, ids: Tensor, keep: int | Tensor = 1, **arguments: Any) -> Any:
        """Return the model's output; logits for the last position, or for those in ``keep``, where it can choose.

        With ``records`` on, ``experts`` Int16[R T L K] are then those of ``ids``, None if the model is dense.
        """
        if "logits_to_keep" in self.names:
            arguments["logits_to_keep"] = keep
        known = {name: _on(value, self.device) for name, value in arguments.items() if name in self.names}
        with routed(self.model, Routing() if self.records else None) as recorder:
            output = self.model(input_ids=ids.to(self.device), **known)
        self.calls += 1
        self.experts = None if recorder is None else recorder.experts(*ids.shape)
        return output


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
