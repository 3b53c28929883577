"""Ways to run a model for one pass and leave it as it was."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnomon.models.lora import plain_name
from gnomon.models.routing import Resumed

# Which experts every position of every row that is being decoded went to, piece by piece.


class Trace:
    """A piece Int16[n L K] for each forward pass that a row took part in; None where nothing was recorded.

    Rows are in slots as in `Decoder`.
    """

    def __init__(self) -> None:
        self._rows: list[list[Tensor | None]] = []

    def join(self, rows: int) -> None:
        """Append rows that have not been through the model."""
        self._rows += [[] for _ in range(rows)]

    def extend(self, pieces: Sequence[Tensor | None] | Tensor | None, first: int = 0) -> None:
        """Add a piece to each row from slot ``first`` on, in slot order; None adds nothing known to any."""
        rows = self._rows[first:]
        for row, piece in zip(rows, [None] * len(rows) if pieces is None else pieces, strict=True):
            row.append(piece)

    def is_new(self, slot: int) -> bool:
        """Whether the row has not been through the model."""
        return not self._rows[slot]

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        self._rows[slot] = self._rows[-1]
        self._rows.pop()

    def of(self, slot: int) -> Tensor | None:
        """Return all of a row's pieces as one, on the CPU; None when one is not known."""
        pieces = [piece for piece in self._rows[slot] if piece is not None]
        return torch.cat(pieces).cpu() if pieces and len(pieces) == len(self._rows[slot]) else None


def has_adapters(model: nn.Module) -> bool:
    """Whether low-rank adapters were put into the model."""
    return any("lora_" in name for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run the model as it was before adapters were put in; nothing is copied."""
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
    """Run the model with a snapshot's ``tensors`` in place of its own, adapters off.

    Nothing is written: each parameter points at other memory inside the block, and at its own again after it, so the
    weights are bit for bit what they were. Nobody else may use the module meanwhile.
    """
    own = {plain_name(name): t for name, t in (*model.named_parameters(), *model.named_buffers())}
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, tensor in tensors:
            kept.append((own[name], own[name].data))
            own[name].data = tensor.to(own[name])
        with without_adapters(model) if has_adapters(model) else nullcontext():
            yield
    finally:
        for mine, memory in kept:
            mine.data = memory


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers' architectures are stacked from; none where they are not marked as such."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep only each layer's input for the backward pass, which then computes the layer again.

    Memory for activations falls to about one layer's, for one more forward pass. Transformers' own switch
    works in training mode only, where dropout would be drawn twice and make ratios noise; this works in
    eval mode, and engines that use the same module between passes never see it. Experts that are replayed in the
    forward pass are replayed when it is repeated, also after the block of `routing.replaying` has ended.
    """
    layers = layers_of(model)
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(again, context_fn=partial(_routed_again, layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recomputing` is at work on this layer."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _routed_again(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), Resumed(layer)
