"""Linear layers for a few rows at a time: weights in the layout of the CPU's kernels, one product per input."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from gnomon.models.cpu.kernels import Kernels, kernels_of
from gnomon.models.forward import ends_of
from gnomon.models.lora import plain_name
from gnomon.models.quantized import QuantizedLinear

# Which weights multiply activations: the matrices that low-precision engines round.


def input_axes(model: nn.Module) -> Mapping[str, int]:
    """Return the weights of linear layers by snapshot name, each with the axis of its inputs.

    These are the layers between embedding and head: attention, feed-forward, and experts, which a mixture stores as one
    tensor [experts, outputs, inputs] per layer. Left out are the embedding and the head (often one tensor; its errors
    reach every logit directly), norms and biases (no matrices, and almost no memory), and routers (another choice of
    experts is no small error). Engines with low-precision weights leave out the same.
    """
    ends = {id(p) for end in ends_of(model) for p in end.parameters()}
    return {
        plain_name(f"{name}.{own}" if name else own): axis
        for name, module in model.named_modules()
        for own, axis in _matrices(module)
        if id(module._parameters.get(own)) not in ends and "lora_" not in name
    }


def _matrices(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield a module's own matrices by name, with the axis of their inputs."""
    if isinstance(module, nn.Linear | QuantizedLinear):
        yield "weight", -1
    elif isinstance(module, Conv1D):
        yield "weight", 0
    elif not isinstance(module, nn.Conv1d):
        # Experts: one tensor of three axes; some architectures store it [experts, inputs, outputs] and say so.
        axis = 1 if vars(module).get("is_transposed", False) else -1
        yield from ((name, axis) for name, own in module.named_parameters(recurse=False) if own.ndim == 3)


# Weights of the smallest layer that is packed; rows of the largest product that uses the copies; the share of the
# machine's memory that copies may take; rows that oneDNN lays a weight out for.
_LEAST_WEIGHTS = 1 << 16
_MOST_ROWS = 256
_SHARE = 16
_ROWS_HINT = 64


class PackedLinears:
    """Inside a ``with`` block, a model's linear layers multiply with packed copies of their weights.

    A product of R rows with a weight spends most of its time on laying out the weight for the kernel, at every call of
    a plain linear layer. Here this happens once per version of the weights. Layers with the same input tensor (query,
    key and value; gate and up) become one product. These are observed and not looked up, so this works for every
    architecture; a layer that meets another tensor than its siblings multiplies alone. Measured on SmolLM2-135M in
    fp32, two AVX2 cores, all linear layers of one step: 64 rows 204 to 154 ms, 32 rows 123 to 79, 8 rows 101 to 51.
    Sums have another order: equal up to rounding.

    The copies take as much memory as the weights. They are made at the first step after `invalidate`, which must be
    called after every change of the weights. Only on a CPU, without gradients, for layers of at least 65,536 weights,
    and if all copies take at most a sixteenth of the machine's memory. More than 256 rows at a time use the plain
    layers.
    """

    def __init__(self, model: nn.Module) -> None:
        # Subclasses compute otherwise, and small weights are in the cache anyway.
        layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.numel() >= _LEAST_WEIGHTS]
        self._layers = layers if may_copy(layers) and all(_can_pack(m.weight) for m in layers) else []
        self._families: list[list[nn.Linear]] | None = None
        self._bundles: list[_Bundle] = []
        self._watched: list[tuple[nn.Linear, Tensor]] = []

    def invalidate(self) -> None:
        """Free the copies."""
        for bundle in self._bundles:
            bundle.forwards.clear()  # they refer to the bundle, which would wait for the cycle collector
        self._bundles = []

    def __enter__(self) -> None:
        # The first block only watches which layers get the same input; the copies are made for the second.
        if self._families is None:
            for layer in self._layers:
                _set_forward(layer, self._watching(layer))
            return
        if not self._bundles:
            self._bundles = [_Bundle(family) for family in self._families]
        for bundle in self._bundles:
            for place, layer in enumerate(bundle.layers):
                _set_forward(layer, bundle.forwards[place])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)
        if self._families is None and error is None:
            self._families = _families(self._watched)
        self._watched = []

    def _watching(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            self._watched.append((layer, inputs))  # the tensor itself: a freed one's identity may come again
            return functional.linear(inputs, layer.weight, layer.bias)

        return forward


class Product:
    """The outputs of linear layers for one input, side by side, in one product with a copy of their weights.

    ``layers`` have equal inputs; all have a bias, or none. Large weights are packed if the CPU has kernels, gnomon's or
    oneDNN's. The copy is of the current weights.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = (layers[0].weight if len(layers) == 1 else torch.cat(tuple(layer.weight for layer in layers))).detach()
        biases = tuple(layer.bias.detach() for layer in layers if layer.bias is not None)
        self._bias = torch.cat(biases) if biases else None
        self._outputs = len(weight)
        self._weight: Tensor = weight
        self._is_packed = min(layer.weight.numel() for layer in layers) >= _LEAST_WEIGHTS and _can_pack(weight)
        self._kernels = _with_linear(weight) if self._is_packed else None
        if self._kernels is not None:
            self._weight = self._kernels.packed(weight.contiguous())
        elif self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the product Float[... outputs]."""
        if self._kernels is not None:
            return self._native(self._kernels, inputs, None)
        if not self._is_packed:
            return functional.linear(inputs, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")
        return product

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        """Return ``other`` Float[... outputs] plus the product; packed weights round once, others twice."""
        if self._kernels is not None:
            return self._native(self._kernels, inputs, other)
        if not self._is_packed:
            return functional.linear(inputs, self._weight, self._bias).add_(other)
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._weight, self._bias, "add")
        return total

    def _native(self, kernels: Kernels, inputs: Tensor, other: Tensor | None) -> Tensor:
        if inputs.ndim == 2:
            return kernels.linear(inputs, self._weight, self._bias, self._outputs, other)
        rows = inputs.reshape(-1, inputs.shape[-1])
        added = None if other is None else other.reshape(len(rows), -1)
        product = kernels.linear(rows, self._weight, self._bias, self._outputs, added)
        return product.view(*inputs.shape[:-1], -1)


def _with_linear(weight: Tensor) -> Kernels | None:
    kernels = kernels_of(weight)
    return kernels if kernels is not None and kernels.has_pairs and weight.shape[1] % 2 == 0 else None


class _Bundle:
    """Layers that get the same input one after another: the first one multiplies for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.forwards = [self._forward(place) for place in range(len(layers))]
        self._product = Product(layers)
        self._inputs: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def _forward(self, place: int) -> Callable[[Tensor], Tensor]:
        layer, is_last = self.layers[place], place == len(self.layers) - 1

        def first(inputs: Tensor) -> Tensor:
            # The packed form is laid out for a few rows; a prefill is faster with the plain product.
            if inputs.numel() > _MOST_ROWS * layer.in_features:
                return functional.linear(inputs, layer.weight, layer.bias)
            product = self._product(inputs)
            if is_last:
                return product
            self._inputs = inputs
            self._parts = product.split([each.out_features for each in self.layers], dim=-1)
            return self._parts[0]

        def later(inputs: Tensor) -> Tensor:
            if inputs is not self._inputs:
                return functional.linear(inputs, layer.weight, layer.bias)
            part = self._parts[place]
            if is_last:
                # The last sibling frees the product, which holds memory of all of them.
                self._inputs, self._parts = None, ()
            return part

        return first if place == 0 else later


def may_copy(layers: Sequence[nn.Linear]) -> bool:
    """Whether copies of the layers' weights take at most a sixteenth of the machine's memory."""
    return sum(m.weight.numel() * m.weight.itemsize for m in layers) <= _memory_bytes() // _SHARE


def _families(calls: Sequence[tuple[nn.Linear, Tensor]]) -> list[list[nn.Linear]]:
    """Return the layers that were called once, in runs with the same input tensor."""
    layers = [layer for layer, _ in calls]
    families: list[list[nn.Linear]] = []
    before: Tensor | None = None
    for layer, inputs in calls:
        # A layer that is called twice a pass has another input the second time.
        if layers.count(layer) > 1:
            before = None
            continue
        is_sibling = inputs is before and (layer.bias is None) == (families[-1][0].bias is None)
        if is_sibling:
            families[-1].append(layer)
        else:
            families.append([layer])
        before = inputs
    return families


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _can_pack(weight: Tensor) -> bool:
    """Whether this build has packing kernels for the dtype on this CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_supported()
    return weight.dtype == torch.float32


def _set_forward(layer: Any, forward: Callable[[Tensor], Tensor]) -> None:
    layer.forward = forward
