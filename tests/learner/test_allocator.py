import json
import os
import platform

import pytest
from tests.forked import Forked, ended

from gnomon.core.errors import LearnerError
from gnomon.learner.allocator import HALVINGS, bound_prepared_products, retry_on_oom
from gnomon.learner.forward import ForwardRunner
from gnomon.learner.sections import LearnerConfig
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
        retry_on_oom(passes, work)
    assert budgets == [64 >> n for n in range(HALVINGS + 1)]


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
