"""Frozen weights in 4 or 8 bits: linear layers that store a weight quantized, and dequantize it when they multiply."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gnomon.core.errors import ConfigError
from gnomon.models.adapter_config import Kind
from gnomon.models.forward import ends_of

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NormalFloat4: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.

Source: Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3 and appendix E.
"""
BLOCK = 64
"""Weights that share a scale in NF4, one after the other in a row (QLoRA, section 3)."""
BITS = {"nf4": 4 + 32 / BLOCK, "int8": 8.0}
"""Bits that a weight takes, with its share of a scale in float32; of int8 a row has one scale, which is left out."""
_AT_ONCE, AT_ONCE_GPU = 1 << 18, 1 << 24
"""Weights that are dequantized at once: on a CPU so many that they stay in its cache."""
TRAFFIC = {"nf4": 20.5, "int8": 9.0}
"""Bytes that the operations which dequantize a weight read and write, beside the weight that they make."""
# A model of which less than this share could be quantized is refused.
_LEAST_SHARE = 0.5
_LEAST = torch.finfo(torch.float32).tiny


class QuantizedLinear(nn.Module):
    """``x W^T + b`` with a frozen W in few bits. No dequantized copy outlives the product that it is made for.

    NF4: blocks of 64 weights have one scale, their largest magnitude, and each is the nearest of 16 values times that;
    two lie in a byte. int8: a row has one scale, its largest magnitude over 127. The backward pass dequantizes again.

    Args:
        layer: The plain layer. Its bias is taken, its weight is not kept.
        kind: "nf4" or "int8".
        device: Where the weight is quantized, and lies from then on.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, kind: Kind, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.shape, self.dtype, self.kind = layer.weight.shape, layer.weight.dtype, kind
        self.bias = layer.bias
        codes, scales = _quantized(layer.weight.detach().to(device), kind)
        # Not in the state: what is saved and sent is the plain weight.
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.lent: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """A new tensor Float[outputs inputs] in the layer's precision; what was lent in its place, if anything is."""
        return self._dequantized() if self.lent is None else self.lent

    @property
    def plain_bytes(self) -> int:
        """Bytes of the weight that this stands for."""
        return int(self.shape.numel()) * self.dtype.itemsize

    def forward(self, inputs: Tensor) -> Tensor:
        """Return Float[... outputs] of Float[... inputs]."""
        product: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return product

    def _dequantized(self) -> Tensor:
        device = self.codes.device
        if self.kind == "int8":
            return self.codes.mul(self.scales[:, None]).to(self.dtype)
        found = torch.empty(self.shape, dtype=self.dtype, device=device)
        flat, pairs = found.view(-1), _pairs(device)
        size = _AT_ONCE if device.type == "cpu" else AT_ONCE_GPU
        parts = zip(self.codes.split(size // 2), self.scales.split(size // BLOCK), flat.split(size), strict=True)
        for codes, scales, place in parts:
            # One look-up a byte gives both of its weights, as the parts of a complex number.
            values = torch.view_as_real(pairs.index_select(0, codes.int())).view(-1, BLOCK)
            place.copy_(values.mul_(scales[:, None]).view(-1)[: len(place)])
        return found


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward pass but the layer, which never changes."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.weight, None


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, the high half first, as one number Complex64[256]."""
    table = torch.tensor(NF4)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)
    return torch.view_as_complex(pairs).to(device)


def _quantized(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return codes and scales Float32 of a weight: Int8[R C] and one a row, or UInt8[pairs] and one a block."""
    if kind == "int8":
        # 127 and not 128, so that the codes are symmetric and zero stays zero.
        scales = weight.float().abs().amax(1) / 127
        return (weight.float() / scales.clamp_min(_LEAST)[:, None]).round_().to(torch.int8), scales
    table = torch.tensor(NF4, device=weight.device)
    # A number belongs to the value on its side of the middle between two neighbors.
    edges = (table[1:] + table[:-1]) / 2
    found = list[tuple[Tensor, Tensor]]()
    for part in weight.reshape(-1).split(AT_ONCE_GPU):
        blocks = functional.pad(part.float(), (0, -len(part) % BLOCK)).view(-1, BLOCK)
        most = blocks.abs().amax(1)
        # (pairs, 2): two codes of four bits share a byte.
        nearest = torch.bucketize(blocks / most.clamp_min(_LEAST)[:, None], edges).to(torch.uint8).view(-1, 2)
        found.append((nearest[:, 0] << 4 | nearest[:, 1], most))
    codes, blockwise = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(blockwise)


def layers_of(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantized layers of a model by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


def kind_of(model: nn.Module) -> Kind | None:
    """Return how the quantized layers of a model are stored; None if it has none."""
    return next((layer.kind for _, layer in layers_of(model)), None)


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what quantized layers store, by name: codes and scales."""
    for name, layer in layers_of(model):
        yield f"{name}.codes", layer.codes
        yield f"{name}.scales", layer.scales


def quantizable(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain linear layers between embedding and head by name, adapters and shared weights left out."""
    ends = {id(module) for end in ends_of(model) for module in end.modules()}
    uses = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "lora_" not in name
        and id(module) not in ends
        and uses[id(module.weight)] == 1
    }


def quantize(model: nn.Module, kind: Kind, device: torch.device | str = "cpu") -> nn.Module:
    """Put quantized layers in the place of the plain ones that are frozen, one after the other, and return the model.

    Args:
        model: Changed in place.
        kind: "nf4" or "int8".
        device: Where each layer is quantized, and lies from then on.
    """
    for name, layer in quantizable(model).items():
        if not layer.weight.requires_grad:
            parent, _, own = name.rpartition(".")
            # One after another, so that the plain weights of one layer at a time lie beside their codes.
            setattr(model.get_submodule(parent), own, QuantizedLinear(layer, kind, device))
    return model


def check_quantizable(model: nn.Module, kind: Kind) -> str | None:
    """Refuse a model whose weights are mostly not in plain linear layers.

    Args:
        model: May be without weights.
        kind: "nf4" or "int8".

    Returns:
        A sentence about the share that stays as it is, if it is more than a hundredth.

    Raises:
        ConfigError: The message has the share that could be quantized.
    """
    ends = {id(own) for end in ends_of(model) for own in end.parameters()}
    inner = {id(own): own.numel() for own in model.parameters() if own.ndim > 1 and id(own) not in ends}
    share = sum(layer.weight.numel() for layer in quantizable(model).values()) / max(1, sum(inner.values()))
    what = f"{share:.0%} of a {type(model).__name__}'s weights between embedding and head are in plain linear layers"
    if share < _LEAST_SHARE:
        raise ConfigError(
            f"lora.base = '{kind}' stores linear layers in fewer bits, and {what} (experts are one tensor a layer, and "
            "GPT-2's layers are no linear ones); leave lora.base out"
        )
    return None if share > 0.99 else f"lora.base = '{kind}' leaves some weights as they are: {what}"
