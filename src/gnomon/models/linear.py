"""Which weights multiply activations: the matrices that low-precision engines round."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from gnomon.models.lora import plain_name


def input_axes(model: nn.Module) -> Mapping[str, int]:
    """Return the names of the weights of linear layers, as a snapshot has them, each with the axis of its inputs.

    Those between embedding and head: attention, feed-forward, and experts, of which a mixture keeps one tensor
    [experts, outputs, inputs] a layer. Left out are the embedding and the head (often one tensor; an error there
    reaches every logit directly), norms and biases (no matrices, and next to nothing of the memory), and routers (a
    flipped choice of experts is no small error). Engines with low-precision weights keep the same ones.
    """
    whole: Any = model
    head = whole.get_output_embeddings()
    ends = {id(p) for end in (head, whole.get_input_embeddings()) if end is not None for p in end.parameters()}
    return {
        plain_name(f"{name}.{own}" if name else own): axis
        for name, module in model.named_modules()
        for own, axis in _matrices(module)
        if id(module.get_parameter(own)) not in ends and "lora_" not in name
    }


def _matrices(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the matrices that are a module's own, by name, and the axis of their inputs."""
    if isinstance(module, nn.Linear):
        yield "weight", -1
    elif isinstance(module, Conv1D):
        yield "weight", 0
    elif not isinstance(module, nn.Conv1d):
        # Experts: one tensor of three axes; some architectures store it [experts, inputs, outputs] and say so.
        axis = 1 if vars(module).get("is_transposed", False) else -1
        yield from ((name, axis) for name, own in module.named_parameters(recurse=False) if own.ndim == 3)
