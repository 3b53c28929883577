"""F9: where memory ends in an update, the same step is made in smaller micro-batches; a grader's end is one error."""

import asyncio
from dataclasses import dataclass, replace

import pytest
import torch

from gnomon.algorithms import GRPO, LossInputs
from gnomon.core.errors import LearnerError
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.optimizer import OptimizerConfig
from gnomon.learner.sections import LearnerConfig
from gnomon.models.tiny import tiny_model
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
