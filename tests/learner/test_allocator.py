import json
import os
import platform

import pytest
import torch
from tests.forked import Forked, ended
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.core.errors import LearnerError
from gnomon.learner.allocator import HALVINGS, bound_prepared_products, retry_on_oom
from gnomon.learner.forward import ForwardRunner
from gnomon.learner.optimizer import Optimizer
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.tiny import tiny_model


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_ends_is_known_whoever_says_so(said: str):
    """The CPU, the driver and cuBLAS say it in a RuntimeError: cuts are halved three times, then the run is told."""
    passes = ForwardRunner(LearnerConfig(max_tokens_per_micro_batch=64), tiny_model())
    budgets = []

    def work() -> None:
        budgets.append(passes.max_tokens)
        raise RuntimeError(said)

    with pytest.raises(LearnerError, match="micro-batches of 8 tokens"):
        retry_on_oom(passes, work, int)
    assert budgets == [64 >> n for n in range(HALVINGS + 1)]


class EndOfMemory(TorchDispatchMode):
    """Raises what an allocator does, once, instead of the ``at``-th operation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def stepped(at: int, moments: str, dtype: torch.dtype) -> tuple[Optimizer, int]:
    """Return an optimizer after two steps, whose second met the end of memory at its ``at``-th operation; and what is
    left to count.
    """
    plan = OptimizerConfig(learning_rate=0.1, weight_decay=0.1, moments=moments, max_gradient_norm=1.0)
    draw = torch.Generator().manual_seed(3)
    named = [(name, nn.Parameter(torch.randn(2, 5, generator=draw).to(dtype))) for name in "abc"]
    gradients = [[torch.randn(2, 5, generator=draw).to(dtype) for _ in named] for _ in range(2)]
    optimizer, passes = Optimizer(named, plan), ForwardRunner(LearnerConfig(), tiny_model())

    def work(number: int) -> float:
        try:
            for (_, parameter), gradient in zip(named, gradients[number], strict=True):
                (parameter * gradient).sum().backward()
            return optimizer.step(0.1)
        except RuntimeError:
            optimizer.drop_gradients()
            raise

    work(0)
    with EndOfMemory(at) as counted:
        retry_on_oom(passes, lambda: work(1), lambda: optimizer.begun)
    return optimizer, counted.left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_a_step_is_made_once_wherever_memory_ends(moments: str, dtype: torch.dtype):
    """At each operation of backward pass and step: what the retry makes is the step, to the bit, or it is refused."""
    expected, left = stepped(1 << 20, moments, dtype)
    right, retried, refused = expected.state().tensors, 0, 0
    for at in range(1, (1 << 20) - left + 1):
        try:
            found = stepped(at, moments, dtype)[0].state().tensors
        except LearnerError as error:
            refused += "out of memory while the weights were changed" in str(error)
            continue
        retried += 1
        assert all(torch.equal(found[name], right[name]) for name in right)
    assert retried > 0
    assert refused > 0
    assert retried + refused == (1 << 20) - left


def test_the_allocator_says_what_it_took():
    """With glibc all four settings are taken; elsewhere nothing is claimed. In a process of its own."""
    code = "import json; from gnomon.learner.allocator import tune_allocator; print(json.dumps(tune_allocator()))"
    answer = ended(Forked([], code))

    with_glibc = {"arena_max": 1, "mmap_max": 0, "trim_threshold": -1, "top_pad": 2**28}
    assert json.loads(answer.stdout) == (with_glibc if platform.libc_ver()[0] == "glibc" else {})


def test_how_many_products_stay_prepared_is_the_environments_to_say(monkeypatch):
    """64 where nobody said otherwise."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    bound_prepared_products()
    assert os.environ[name] == "7"

    monkeypatch.delenv(name)
    bound_prepared_products()
    assert os.environ[name] == "64"
