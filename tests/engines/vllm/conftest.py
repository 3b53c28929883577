"""What the tests of vLLM share: one engine for all, as building one takes seconds.

vLLM lives in an environment of its own, which `make test-full` makes. Where it is missing, the tests that need it are
not collected.
"""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnomon.core.types import Snapshot
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if not HAS_VLLM:
    collect_ignore = [
        "test_architectures.py",
        "test_arrival.py",
        "test_broadcast.py",
        "test_engine.py",
        "test_image_models.py",
        "test_native.py",
        "test_on_cluster.py",
        "test_parallel.py",
        "test_program.py",
        "test_transfer.py",
        "test_walk.py",
    ]

# Heads of 32: vLLM's kernels for CPUs know none smaller.
CONFIG = TinyConfig(width=128, context_length=96)


def pytest_report_header() -> str | None:
    """Say why vLLM is not tested."""
    return None if HAS_VLLM else "tests/engines/vllm is left out in part without vllm: make test-full"


@pytest.fixture(scope="session")
def config() -> TinyConfig:
    """Return the shape of the model that is served."""
    return CONFIG


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model."""
    return save_tiny(tmp_path_factory.mktemp("model"), config=CONFIG)


@pytest.fixture
def snapshot() -> Callable[[int, int], Snapshot]:
    """Return a function: the weights of a seed, as a version."""

    def make(version: int, seed: int = 0) -> Snapshot:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            return merged_tensors(tiny_model(seed, CONFIG))

        return Snapshot(version, tensors)

    return make


@pytest.fixture(scope="session")
def engine(folder: Path):
    """Return vLLM in this process, with room for three rows."""
    from gnomon.engines.vllm.engine import VllmEngine

    torch.set_num_threads(1)
    made = VllmEngine(str(folder), torch.float32, max_concurrent=3, receives="nccl")
    yield made
    asyncio.run(made.close())


@pytest.fixture
def run(engine, snapshot) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Return a function that runs a coroutine function on the engine, with the weights of seed 0 as version 0."""

    def runs(steps: Callable[..., Awaitable[None]]) -> None:
        async def body() -> None:
            await engine.load(snapshot(0))
            await steps(engine)

        asyncio.run(body())

    return runs
