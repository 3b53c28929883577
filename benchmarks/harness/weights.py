"""Weights on their way to engines: seconds a GiB of model, by each way there is, beside a plain copy of memory."""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.harness.materials import experiment_of
from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import repeat
from gnomon.config.experiment import Experiment
from gnomon.core.sections import ClusterConfig
from gnomon.core.types import Snapshot
from gnomon.learner.serialization import packed, unpacked
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.lora import adapt, merged_tensors, parts, snapshot_of, trainable
from gnomon.models.transfer.fingerprint import fingerprints
from gnomon.training.build_workers import engine_there, load_network, one_engine
from gnomon.training.resolve import Resolved

_RANK = 16
_PATIENCE_SECONDS = 300.0
_versions = itertools.count()


def weights(size: Size, repeats: int) -> BenchResult:
    """Return seconds a GiB of model, from the learner's tensors to an engine that answers with others of its own.

    Before each repeat every weight that is trained is changed, outside of the clock. The limit is one copy of as many
    bytes in memory, measured here, which whoever has weights of its own must make; of two engines each makes one.
    "rank and run" is the way from a rank of a learner in several processes to an engine of the run, without the
    gathering. "store" is the way to engines in processes of a cluster: looking for changes, putting, fetching, and each
    engine's copy. "adapters" trains nothing else: seconds a GiB of the whole model, of which facts say what share went.
    """
    experiment = experiment_of(size)
    model = load_network(Resolved(experiment))
    gib = sum(tensor.nbytes for _, tensor in merged_tensors(model)) / 2**30
    copied = tuple(seconds / gib for seconds in _copies(model, repeats))
    least = min(copied)
    measures = [BenchMeasure("a copy of memory", "s/GiB", copied)]

    def timed(name: str, work: Callable[[], Any], trained: nn.Module, limit: float | None) -> None:
        seconds = repeat(work, repeats, before=partial(_move, trained))
        measures.append(BenchMeasure(name, "s/GiB", tuple(s / gib for s in seconds), limit))

    timed("fingerprints alone", lambda: fingerprints(merged_tensors(model)), model, None)
    engine = one_engine(Resolved(experiment))
    timed("in process", lambda: asyncio.run(engine.load(_snapshot(model))), model, least)
    timed("rank and run", lambda: asyncio.run(engine.load(_parceled(model))), model, least)
    asyncio.run(engine.close())
    facts: dict[str, Any] = {"model": experiment.model, "gib": gib, "rank": _RANK}
    if find_spec("ray") is None:
        return BenchResult("weights", "gnomon", tuple(measures), facts)
    adapted = adapt(load_network(Resolved(experiment)), LoraConfig(_RANK))
    with asyncio.Runner() as runner:
        for engines in (1, 2):
            with _Remote(experiment, engines) as remote:
                word = f"store, {engines} engine{'s' if engines > 1 else ''}"
                load = partial(_loaded, runner, remote)
                timed(word, partial(load, model), model, engines * least)
                if engines == 1:
                    load(adapted)
                    remote.sent()
                    timed(f"{word}, adapters", partial(load, adapted), adapted, None)
                    facts["adapters_share"] = round(remote.sent() / (repeats + 1) / 2**30 / gib, 4)
                runner.run(remote.pool.close())
    return BenchResult("weights", "gnomon", tuple(measures), facts)


class _Remote:
    """Engines in a cluster that is started for them."""

    def __init__(self, experiment: Experiment, engines: int) -> None:
        from gnomon.cluster.engines import EngineSpec, serve_remotely
        from gnomon.cluster.ray import Cluster, ResourceBundle

        self._cluster = Cluster.open(ClusterConfig(kind="ray"), [ResourceBundle("engine", 0.5)] * engines, _say)
        order = EngineSpec(partial(engine_there, experiment), takes_parts=True, threads=1)
        places = {f"engine-{number}": number for number in range(engines)}
        self.pool, self._measured, _ = serve_remotely(self._cluster, places, order, _PATIENCE_SECONDS, None, _say)

    def __enter__(self) -> "_Remote":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._cluster.close()

    async def load(self, model: nn.Module) -> None:
        """Let every engine answer with a model's weights."""
        await self.pool.load(_snapshot(model))

    def sent(self) -> float:
        """Return the bytes that engines fetched since the last call."""
        return self._measured()["weights/sent_bytes"]


def _loaded(runner: asyncio.Runner, remote: _Remote, model: nn.Module) -> None:
    runner.run(remote.load(model))


def _snapshot(model: nn.Module) -> Snapshot:
    return snapshot_of(next(_versions), lambda: parts(model))


def _parceled(model: nn.Module) -> Snapshot:
    """Return the weights after they went from one process's memory to another's."""
    with packed(dict(merged_tensors(model))) as (text, file):
        tensors = unpacked(text, os.dup(file))
    return Snapshot(next(_versions), lambda: iter(tensors.items()))


def _move(model: nn.Module) -> None:
    """Change every weight that is trained."""
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(1e-3)


def _copies(model: nn.Module, repeats: int) -> tuple[float, ...]:
    """Return seconds of copying a model's weights in memory, to where others were before."""
    pairs = [(torch.empty_like(tensor), tensor) for _, tensor in merged_tensors(model)]

    def copy() -> None:
        for there, here in pairs:
            there.copy_(here)

    return repeat(copy, repeats)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
