"""What the device can do at most, measured, and what a piece of work needs at least, counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.shapes import Shape, head_weights, products
from gnomon.models.device import finish

NOMINAL = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 operations a second by the makers' sheets, by a part of the device's name."""


def measure(device: torch.device, is_quick: bool) -> dict[str, Any]:
    """Return operations a second of square products and bytes a second of a copy, reads and writes both counted."""
    size, count = (512, 3) if is_quick else (8192, 10)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = best_mean(lambda a=left, b=right: a @ b, device, count)
        found[f"{str(dtype).removeprefix('torch.')}_flops"] = 2 * size**3 / seconds
        del left, right
    source = torch.ones((2**24 if is_quick else 2**33) // 4, device=device)
    target = torch.empty_like(source)
    seconds = best_mean(lambda: target.copy_(source), device, count)
    found["bytes_per_second"] = 2 * source.numel() * 4 / seconds
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    found["nominal_bf16_flops"] = next((v for k, v in NOMINAL.items() if k in name), None)
    return found


def best_mean(work: Callable[[], Any], device: torch.device, count: int) -> float:
    """Return the seconds of one call, the mean of ``count`` calls after three."""
    for _ in range(3):
        work()
    finish(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    finish(device)
    return (time.perf_counter() - began) / count


@dataclass(frozen=True)
class Work:
    """A step's work: ``groups`` prompts of ``prompt`` tokens, ``size`` answers to each, of ``answer`` tokens."""

    groups: int
    size: int
    prompt: int
    answer: int

    @property
    def rows(self) -> int:
        """Answers of a step."""
        return self.groups * self.size

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return self.rows * self.answer

    def update_flops(self, shape: Shape, model: Any) -> float:
        """Return the operations that a step's forward and backward passes need: a product with W twice per pass.

        Each prompt counts once a group, a masked pair of positions not at all, the head for answers alone. The backward
        pass costs two forward passes, or one with adapters, whose weights' gradients are small. What is computed again,
        or padded, is not counted: this is the work, not what is done.
        """
        through = self.groups * self.prompt + self.tokens
        causal_prompt = self.groups * self.prompt * (self.prompt + 1) / 2
        causal_answer = self.rows * (self.answer * self.prompt + self.answer * (self.answer + 1) / 2)
        attention = 4 * shape.layers * shape.heads * shape.head * (causal_prompt + causal_answer)
        forward = 2 * products(model) * through + 2 * head_weights(model) * self.tokens + attention
        return forward * (2 if shape.lora else 3)

    def decode_bytes(self, shape: Shape, model: Any, item: int) -> float:
        """Return the bytes that generation must read: all weights once a step, and each row's keys and values."""
        weights = (products(model) + head_weights(model)) * item
        a_token = 2 * shape.layers * shape.kv_heads * shape.head * item
        seen = sum(self.prompt + n for n in range(self.answer))
        return self.answer * weights + self.rows * seen * a_token
