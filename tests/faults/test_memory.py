"""F9: where memory ends in an update, the same step is made in smaller micro-batches; a grader's end is one error."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.algorithms import GRPO, EmaProximal, LossInputs
from gnomon.core.errors import LearnerError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.testing import make_batch


@dataclass(frozen=True)
class Crowded:
    """A term of 0 that needs more memory than there is as soon as it sees more than ``rows`` rows."""

    rows: int
    name: str = "crowded"
    needs: frozenset[str] = frozenset()
    message: str = ""

    def weights(self, batch: Batch, default: torch.Tensor) -> torch.Tensor:
        return default

    def __call__(self, view: LossInputs) -> tuple[torch.Tensor, Metrics]:
        if len(view.batch) > self.rows:
            raise RuntimeError(self.message) if self.message else torch.OutOfMemoryError("CUDA out of memory")
        return 0 * view.current, Metrics()


def updated(rows: int, budget: int, message: str = "") -> tuple[dict[str, torch.Tensor], Metrics]:
    """Return weights and metrics after one update of eight rows of three tokens with memory for so many rows a cut."""
    algorithm = replace(GRPO, regularizers=(Crowded(rows, message=message),))
    plan = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_micro_batch=budget)
    learner = TorchLearner(tiny_model(0), plan, 1)
    lists = [[-5.5, -5.6]] * 8
    batch = make_batch([1.0, 0.0] * 4, [[1, 1]] * 8, dtype=torch.float32, behavior=lists, proximal=lists)
    batch = batch.with_fields(tokens=torch.arange(24).reshape(8, 3))
    metrics = asyncio.run(learner.update(algorithm.weigh(algorithm.prepare(batch)), algorithm, 0))
    return dict(learner.state().tensors), metrics


@pytest.mark.parametrize("message", ["", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"])
def test_a_step_without_memory_is_made_in_halves(message: str):
    """Memory for two rows of eight: two halvings later it is the step of small micro-batches, near the whole one."""
    halved, metrics = updated(rows=2, budget=24, message=message)
    small, _ = updated(rows=8, budget=6)
    whole, _ = updated(rows=8, budget=24)

    assert metrics["learner/halved_micro_batches"] == 2
    assert halved.keys() == small.keys() == whole.keys()
    assert all(torch.equal(halved[name], small[name]) for name in halved)
    apart = torch.cat([(halved[name] - whole[name]).abs().flatten() for name in halved])
    # Adam's first step divides a gradient by its own size: one near epsilon (1e-8) moves by a rounding of itself.
    assert float(apart.max()) < 1e-5
    assert float((apart > 1e-6).double().mean()) < 1e-4


def test_three_halvings_are_enough():
    """An eighth of what was begun with is still too much: an error with the number of tokens and what to do."""
    with pytest.raises(LearnerError, match=r"micro-batches of 3 tokens.*gradient_checkpointing"):
        updated(rows=0, budget=24)


def test_other_errors_are_not_tried_again():
    """A mistake in a piece is a mistake at any size."""
    with pytest.raises(RuntimeError, match="no such kernel"):
        updated(rows=2, budget=24, message="no such kernel")


class EndOfMemory(TorchDispatchMode):
    """Raises what an allocator does, once, instead of the ``at``-th operation of its thread."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Watched:
    """A term of 0 whose first call begins to count the operations of the learner's thread."""

    mode: EndOfMemory
    name: str = "watched"
    needs: frozenset[str] = frozenset()
    met: list[int] = field(default_factory=list)

    def weights(self, batch: Batch, default: torch.Tensor) -> torch.Tensor:
        return default

    def __call__(self, view: LossInputs) -> tuple[torch.Tensor, Metrics]:
        if not self.met:
            self.met.append(1)
            self.mode.__enter__()
        return 0 * view.current, Metrics()


def ended_at(at: int, moments: Literal["float32", "8bit"]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the state after an update whose memory ended at an operation, and what is left to count."""
    watched = Watched(EndOfMemory(at))
    algorithm = replace(GRPO, regularizers=(watched,), proximal=EmaProximal(0.5))
    plan = LearnerConfig(OptimizerConfig(1e-2, epsilon=1.0, moments=moments), max_tokens_per_micro_batch=24)
    learner = TorchLearner(tiny_model(0, TinyConfig(width=16, heads=2, kv_heads=1)), plan, 1, proximal=EmaProximal(0.5))
    lists = [[-5.5, -5.6]] * 8
    batch = make_batch([1.0, 0.0] * 4, [[1, 1]] * 8, dtype=torch.float32, behavior=lists, proximal=lists)
    batch = batch.with_fields(tokens=torch.arange(24).reshape(8, 3))
    asyncio.run(learner.update(algorithm.weigh(algorithm.prepare(batch)), algorithm, 0))
    return dict(learner.state().tensors), watched.mode.left


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_an_update_is_made_once_wherever_memory_ends(moments: Literal["float32", "8bit"]):
    """From the loss to the averages behind the step: weights, moments and averages are those of one update, or the
    run ends with what to do; nothing is updated by a half more.
    """
    right, left = ended_at(1 << 20, moments)
    refused, points = 0, range(1, (1 << 20) - left, 17)
    for at in points:
        try:
            found, _ = ended_at(at, moments)
        except LearnerError as error:
            refused += "out of memory while the weights were changed" in str(error)
            continue
        # Halves add up in another order; in 8 bits a rounding may then take a moment to the next level, a twelfth.
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=0.2 * ("moment" in name), atol=1e-6)
    assert 0 < refused < len(points)
