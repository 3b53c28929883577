"""A cluster of this machine alone for tests, and small engines that its processes make."""

import asyncio
import atexit
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gnomon.cluster.engines import EngineSpec
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.sections import ClusterConfig
from gnomon.core.types import Snapshot
from gnomon.engines.local import LocalEngine
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model

CONFIG = TinyConfig(width=128, context_length=96)
"""Of the conformance suite."""


def tiny_engine() -> LocalEngine:
    """An engine with weights of its own, none of which it was sent."""
    return LocalEngine(tiny_model(1, CONFIG), max_concurrent=3, shared=False)


def tiny_order(make: Callable[[], LocalEngine] = tiny_engine) -> EngineSpec:
    """How a process of the cluster makes it."""
    return EngineSpec(make, takes_parts=True, threads=1)


def snapshot(version: int, seed: int = 0) -> Snapshot:
    """Weights that fit it."""
    tensors = list(merged_tensors(tiny_model(seed, CONFIG)))
    return Snapshot(version, lambda: iter(tensors))


@contextmanager
def opened(*places: ResourceBundle) -> Iterator[Cluster]:
    """A cluster with these places, that is gone afterwards."""
    cluster = Cluster.open(ClusterConfig(kind="ray"), places, print)
    send(__name__)
    try:
        yield cluster
    finally:
        cluster.close()


def send(module: str) -> None:
    """Let what a module of tests defines travel to actors, where the module is not."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[module])


@functools.cache
def standing() -> Cluster:
    """A cluster for whoever comes, until the tests of this process end: one takes ten seconds to start."""
    stack = ExitStack()
    places = ResourceBundle("engine", 0.5), ResourceBundle("grader", 0.5), *[ResourceBundle("learner")] * 2
    cluster = stack.enter_context(opened(*places))
    # After Ray has registered its own end, so that it comes before that.
    atexit.register(stack.close)
    return cluster


def kill(home: tuple[str, int] | None) -> None:
    """End the process of an engine as the system does when memory ends."""
    assert home is not None, "it never said where it is"
    os.kill(home[1], signal.SIGKILL)


def children(pid: int) -> set[int]:
    """Return the numbers of the processes that a process started, in whichever thread."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for listed in threads for child in listed.read_text().split()}


async def settled(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let others work until it is so."""
    for _ in range(int(seconds / 0.05)):
        if is_so():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came to that")
