"""Each choice of a kernel against its alternatives: attention over packed rows, and log-probabilities of the head.

Seconds of a forward and a backward pass, the share of the measured ceiling that the needed operations come to, bytes
at the peak, and how far the result is from the reference. What cannot run on a device says why.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.attention import PackedShape
from benchmarks.gpu.ceilings import best_mean
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.step import peak, reset_peak
from gnomon.models.cpu.prefix_attention import Alteration, PrefixLayout
from gnomon.models.head import chosen_logprobs, chunk_for
from gnomon.models.packed_attention import BLOCK, attend_packed, distance, has_varlen, visible_pairs

Row = dict[str, Any]
ATTENTION = ("dense", "branches", "flex", "varlen")
SHARED, PLAIN = PackedShape(1, 512, (2048,) * 8), PackedShape(8, 256, (1792,))
_ALTERED = {
    "plain": Alteration(), "window": Alteration(60), "bounded": Alteration(softcap=0.7),
    "sinks": Alteration(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}  # fmt: skip
FEW_SHARED, FEW_PLAIN = PackedShape(1, 40, (64,) * 3), PackedShape(3, 40, (64,))


def compare(device: torch.device, dtype: torch.dtype, is_quick: bool) -> Iterator[tuple[str, Row]]:
    """Yield a name and what was measured, for each kernel on each shape, then for each way of the head."""
    model = SHAPES["small" if is_quick else "8b"]
    shapes = {"shared": FEW_SHARED, "plain": FEW_PLAIN} if is_quick else {"shared": SHARED, "plain": PLAIN}
    for name, shape in shapes.items():
        for kernel in ATTENTION if name == "plain" and has_varlen() else ATTENTION[:-1]:
            measured = partial(_attention, kernel, shape, model, device, dtype)
            yield f"attention, {name} {shape}: {kernel}", _tried(measured)
    hidden, head, targets = _head(model, 64 if is_quick else 8192, device, dtype)
    for name, way in _ways(hidden, head, targets).items():
        yield f"head, {len(hidden):,} tokens: {name}", _tried(partial(_timed, way, device))


def distances(device: torch.device) -> Row:
    """Return how far each kernel that runs on ``device`` is from SDPA with a dense mask, and whether all are near."""
    found: Row = {}
    heads, dtype = (4, 2, 64), torch.float32 if device.type == "cpu" else torch.bfloat16
    kernels = ("branches", "flex", *["varlen"] * has_varlen()) if device.type == "cuda" else ("branches",)
    for kernel in kernels:
        for name, altered in _ALTERED.items() if kernel != "varlen" else [*_ALTERED.items()][:2]:
            found[f"{kernel}, {name}"] = distance(kernel, device, dtype, heads, altered)
    return {"holds": max(found.values()) < (1e-5 if device.type == "cpu" else 0.03), **found}


def _tried(measured: Callable[[], Row]) -> Row:
    try:
        return measured()
    except Exception as error:
        return {"left out": f"{type(error).__name__}: {error}"[:300]}


def _timed(work: Callable[[], Any], device: torch.device) -> Row:
    work()
    reset_peak(device)
    seconds = best_mean(work, device, 5)
    return {"seconds": seconds, "peak_bytes": peak(device)}


def _attention(kernel: str, shape: PackedShape, model: Shape, device: torch.device, dtype: torch.dtype) -> Row:
    length = shape.layout.positions
    # The dense mask is of packed rows one by one, the others of one line with whole blocks.
    rows = shape.groups if kernel == "dense" else 1
    layout = shape.layout if kernel in ("dense", "branches") else _whole_blocks(shape)
    layout = layout.on(device, kernel)
    size = (rows, -1, layout.positions // rows, model.head)
    leaves = [
        torch.randn(size[0], count, size[2], size[3], device=device, dtype=dtype).requires_grad_()
        for count in (model.heads, model.kv_heads, model.kv_heads)
    ]
    given = (leaves[0], leaves[1], leaves[2])

    def both() -> None:
        torch.autograd.grad(attend_packed(given, layout, model.head**-0.5).sum(), leaves)

    needed = int(visible_pairs(shape.layout).sum())
    # Two products forward, five backward, of 2 operations a score and number of the head.
    flops = 7 * 2 * needed * model.heads * model.head
    return {**_timed(both, device), "tokens": length, "needed_flops": flops}


def _whole_blocks(shape: PackedShape) -> PrefixLayout:
    layout = shape.layout
    return replace(layout, positions=-(-layout.positions // BLOCK) * BLOCK)


def _head(model: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    with torch.device(device):
        head = nn.Linear(model.width, model.vocabulary, bias=False, dtype=dtype)
        hidden = torch.randn(tokens, model.width, dtype=dtype).requires_grad_()
        return hidden, head, torch.randint(0, model.vocabulary, (tokens,))


def _ways(hidden: Tensor, head: nn.Linear, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """Return ways to one and the same gradient of hidden states and weight, by name."""
    chunk = chunk_for(hidden.device, head.out_features)
    leaves = (hidden, head.weight)

    def own(with_entropy: bool) -> Any:
        logprobs, entropy = chosen_logprobs(hidden, head, targets, 1.0, chunk, with_entropy)
        return torch.autograd.grad(logprobs.sum() + entropy.sum(), leaves)

    def plain() -> Any:
        return torch.autograd.grad(functional.cross_entropy(head(hidden).float(), targets, reduction="sum"), leaves)

    def of_torch() -> Any:
        # A log-probability of each token, as a policy's ratio needs; of PyTorch 2.13 on.
        fused, chunked = vars(functional)["linear_cross_entropy"], vars(nn)["LinearCrossEntropyOptions"]()
        found = fused(hidden, head.weight, targets, reduction="none", options=chunked)
        return torch.autograd.grad(found.sum(), leaves)

    def of_liger() -> Any:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return torch.autograd.grad(
            liger_fused_linear_cross_entropy(hidden, head.weight, targets, reduction="sum"), leaves
        )

    ways: dict[str, Callable[[], Any]] = {
        f"gnomon, chunks of {chunk:,}": partial(own, False),
        "the same with entropy": partial(own, True),
        "all logits": plain,
        "torch linear_cross_entropy": of_torch,
    }
    return ways | ({"Liger": of_liger} if importlib.util.find_spec("liger_kernel") else {})
