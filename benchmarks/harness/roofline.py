"""What the machine can do: matrix rates at the shapes of the model, and memory rates."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import repeat
from gnomon.config.experiment import load
from gnomon.models.load import load_model

_ROWS = 2048
_EMULATED = 50.0
"""GFLOP/s below which a precision has no hardware here, and a decode step's rows show its rate in time."""
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def roofline(size: Size, repeats: int) -> BenchResult:
    """Return GFLOP/s of matrix products in fp32 and bf16, and GB/s of reading and copying.

    Products are ``x @ w.T`` with the weights of the fixed work's model, all of one shape in turn, so that they come
    from memory as they do in a step: for one decode step ("decode", a row an answer) and for training ("training",
    2,048 rows, or as few as in a decode step in a precision that is emulated); "square" is the largest rate that one
    product shows. A rate counts 2 operations a multiplication. Facts say what the limits of other cases need:
    parameters inside the layers and in the head, and key and value numbers a token.
    """
    experiment = load(size.experiment, size.overrides).experiment
    model: Any = load_model(experiment.model, torch.float32, None, experiment.trust_remote_code)
    head = model.get_output_embeddings()
    shapes = Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    facts = {
        "model": experiment.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "body_parameters": sum(n * out * into for (out, into), n in shapes.items()),
        "head_parameters": head.weight.numel(),
        "cache_numbers": _cache_numbers(model),
    }
    wide = tuple(head.weight.shape)
    del model, head
    rows = size.prompts * size.generations
    edge, megabytes = (1024, 512) if size.name == "standard" else (256, 16)
    many = _ROWS if size.name == "standard" else 128
    measures = list(_memory(megabytes, repeats))
    for name, dtype in _PRECISIONS.items():
        square = torch.randn(edge, edge).to(dtype)
        largest = _rate(f"{name} square", 2 * edge**3, repeat(partial(torch.matmul, square, square), repeats))
        measures.append(largest)
        measures.append(_linears(f"{name} decode", shapes, wide, (rows, rows), dtype, repeats))
        trained = many if max(largest.values) > _EMULATED else rows
        measures.append(_linears(f"{name} training", shapes, wide, (trained, trained // 2), dtype, repeats))
    return BenchResult("roofline", "gnomon", tuple(measures), facts)


def _cache_numbers(model: Any) -> int:
    """Return the key and value numbers of one token in all layers."""
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    return int(2 * config.num_hidden_layers * heads * (config.hidden_size // config.num_attention_heads))


def _memory(megabytes: int, repeats: int) -> tuple[BenchMeasure, BenchMeasure]:
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    read = tuple(size / s / 1e9 for s in repeat(source.sum, repeats))
    copied = tuple(2 * size / s / 1e9 for s in repeat(lambda: target.copy_(source), repeats))
    return BenchMeasure("memory read", "GB/s", read), BenchMeasure("memory copy", "GB/s", copied)


def _linears(
    name: str,
    shapes: Counter[tuple[int, ...]],
    head: tuple[int, ...],
    rows: tuple[int, int],
    dtype: torch.dtype,
    repeats: int,
) -> BenchMeasure:
    """Return the rate of every product of one pass: ``rows[0]`` through the layers, ``rows[1]`` through the head."""
    work: list[tuple[Tensor, Tensor]] = []
    operations = 0
    for shape, count in (*shapes.items(), (head, 1)):
        given = torch.randn(rows[1] if shape == head else rows[0], shape[1]).to(dtype)
        work += [(given, torch.randn(*shape).to(dtype)) for _ in range(count)]
        operations += count * 2 * len(given) * shape[0] * shape[1]

    def products() -> None:
        for given, weight in work:
            functional.linear(given, weight)

    return _rate(name, operations, repeat(products, repeats))


def _rate(name: str, operations: int, seconds: tuple[float, ...]) -> BenchMeasure:
    return BenchMeasure(name, "GFLOP/s", tuple(operations / s / 1e9 for s in seconds))
