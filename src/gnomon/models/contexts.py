"""Context managers that run a model in a special way and leave the model unchanged."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnomon.models import quantized
from gnomon.models.lora import plain_name
from gnomon.models.routing import Resumed

# Which experts every position of every row that is being decoded went to, piece by piece.


class Trace:
    """Expert choices of decoded rows: a piece Int16[n L K] per forward pass of a row, None if nothing was recorded.

    Rows are in slots as in `Decoder`.
    """

    def __init__(self) -> None:
        self._rows: list[list[Tensor | None]] = []

    def join(self, rows: int) -> None:
        """Append rows without any forward pass."""
        self._rows += [[] for _ in range(rows)]

    def extend(self, pieces: Sequence[Tensor | None] | Tensor | None, first: int = 0) -> None:
        """Append a piece to each row from slot ``first`` on, in slot order; None marks all these rows as unknown."""
        rows = self._rows[first:]
        for row, piece in zip(rows, [None] * len(rows) if pieces is None else pieces, strict=True):
            row.append(piece)

    def is_new(self, slot: int) -> bool:
        """Whether the row has had no forward pass."""
        return not self._rows[slot]

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        self._rows[slot] = self._rows[-1]
        self._rows.pop()

    def is_partial(self, slot: int) -> bool:
        """Whether some pieces of a row are known and others not: recording began while it was drawn."""
        return len({piece is None for piece in self._rows[slot]}) == 2

    def of(self, slot: int) -> Tensor | None:
        """Return a row's pieces as one tensor on the CPU; None if a piece is unknown."""
        pieces = [piece.cpu() for piece in self._rows[slot] if piece is not None]
        return torch.cat(pieces) if pieces and len(pieces) == len(self._rows[slot]) else None


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has low-rank adapters."""
    return any("lora_" in name for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run the model without its adapters; nothing is copied."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def with_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Run the model with a snapshot's ``tensors`` instead of its weights, without adapters.

    Parameters point to other memory inside the block and to their own again after the block, so the weights are
    unchanged to the bit. No other thread may use the module meanwhile.
    """
    own = {plain_name(name): t for name, t in (*model.named_parameters(), *model.named_buffers())}
    few = {f"{plain_name(name)}.weight": layer for name, layer in quantized.layers_of(model)}
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, tensor in tensors:
            if name in few:
                # A quantized layer has no parameter that could point elsewhere.
                few[name].lent = tensor.to(few[name].scales.device, few[name].dtype)
                continue
            # `.data` and not a copy: the parameter stays the same object, so hooks, ties and optimizers keep it.
            kept.append((own[name], own[name].data))
            own[name].data = tensor.to(own[name])
        with without_adapters(model) if has_adapters(model) else nullcontext():
            yield
    finally:
        for layer in few.values():
            layer.lent = None
        for mine, memory in kept:
            mine.data = memory


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers architecture; empty if they are not marked as layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep only each layer's input for the backward pass, which then computes the layer again.

    Memory for activations falls to about one layer's, for one more forward pass. transformers' own switch works in
    training mode only, where dropout is drawn twice and makes ratios noise. This one works in eval mode, and engines
    with the same module never see it between passes. Experts that are replayed in the forward pass are also replayed
    when the layer is computed again, after the block of `routing.replaying`.
    """
    layers = layers_of(model)
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(again, context_fn=partial(_routed_again, layer))
    try:
        yield
    finally:
        for layer in layers:
            # The class's own method shows again.
            del layer.forward


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recomputing` is active for this layer."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _routed_again(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), Resumed(layer)
