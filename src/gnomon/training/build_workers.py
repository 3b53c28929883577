"""Who computes where: learner, engines and graders in this process, in others of this machine, or on a cluster."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gnomon.cluster.engine_actor import EngineSpec
from gnomon.cluster.engine_group import BroadcastGroup
from gnomon.cluster.engines import serve_remotely
from gnomon.cluster.graders import Graders
from gnomon.cluster.learners import RayWorkerGroup
from gnomon.cluster.ray import Cluster, ResourceBundle, check_cluster
from gnomon.config.experiment import Experiment
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.core.sections import STORE
from gnomon.core.types import Snapshot
from gnomon.engines.pool import EnginePool
from gnomon.engines.vllm.transfer import BACKEND, check_backend
from gnomon.learner.base import SavableLearner
from gnomon.learner.distributed import DistributedLearner, Rounding
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.decoder import vocabulary_size
from gnomon.models.device import resolve_device
from gnomon.models.hf_names import HfNames
from gnomon.models.size import outline
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading
from gnomon.training.build_data import grading_limits
from gnomon.training.build_engines import device_of, load_network, one_engine, recipe_of, sending, serve
from gnomon.training.weight_sync import Sending

Warn = Callable[[str], None]


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class Workers:
    """The learner, the engines, and what becomes of weights on their way; measured is what the way itself measured.

    watch: raises when a part of the learner is lost, also between two calls; never returns.
    """

    learner: SavableLearner
    engine: EnginePool
    sent: Sending | None
    measured: Callable[[], Metrics] = Metrics
    watch: Callable[[], Coroutine[Any, Any, None]] = _forever


def places_of(experiment: Experiment) -> list[ResourceBundle]:
    """Return what a run takes of a cluster: for each learner, engine and grader an actor."""
    gpus, plan = 1.0 if device_of(experiment).type == "cuda" else 0.0, experiment.engine
    learners = [ResourceBundle("learner", gpus=gpus)] * experiment.learner.processes
    parts = float(plan.tensor_parallel)
    engines = [ResourceBundle("engine", parts, parts * gpus, plan.python)] * plan.count
    return [
        *learners,
        *engines,
        *[ResourceBundle("grader", float(experiment.grading.workers))] * experiment.cluster.graders,
    ]


def check_staging(experiment: Experiment) -> None:
    """Refuse what cannot be had or meant, before anything is loaded. Raises: ConfigError."""
    recipe = recipe_of(experiment)
    if experiment.cluster.kind == "none":
        recipe.check()
        return
    device = device_of(experiment)
    recipe.check_cut(device)
    if ":" in experiment.device:
        raise ConfigError(
            f"device = '{experiment.device}' is one GPU of this machine, and a cluster deals its GPUs out itself; set "
            "device = 'cuda'"
        )
    if experiment.engine.server:
        raise ConfigError(
            "engine.server is about servers, and on a cluster each engine is a process of its own; "
            'remove it, or set cluster.kind = "none"'
        )
    if experiment.cluster.is_broadcasting:
        _check_broadcast(experiment, device)
    check_cluster(experiment.cluster, places_of(experiment), torch.cuda.device_count() if device.type == "cuda" else 0)


def _check_broadcast(experiment: Experiment, device: torch.device) -> None:
    """Refuse weights that cannot be sent by vLLM's own transfer. Raises: ConfigError."""
    from gnomon.engines.vllm.engine import check_vllm

    backend, plan = experiment.cluster.transfer, experiment.engine
    if plan.kind != "vllm":
        why = f"is vLLM's own transfer, and engine.kind = '{plan.kind}'; set engine.kind = 'vllm'"
    elif backend == BACKEND and device.type != "cuda":
        why = f"goes from GPU to GPU, and device = '{experiment.device}' is none; set device = 'cuda'"
    elif plan.rounding != "none":
        why = f"sends the learner's own numbers, and engine.rounding = '{plan.rounding}'; set engine.rounding = 'none'"
    elif experiment.lora is not None:
        why = "sends whole weights, and with lora adapters travel alone"
    elif not HfNames(experiment.model, experiment.trust_remote_code).is_plain:
        why = f"sends weights by the names that they have in memory, and '{experiment.model}' has others in its files"
    else:
        # Learners send with it too, in the cluster's own interpreter, which no other can stand in for.
        check_vllm(replace(plan, python=sys.executable), is_actor=True)
        check_backend(backend)
        return
    raise ConfigError(f"cluster.transfer = '{backend}' {why}; or set cluster.transfer = '{STORE}'")


def opened(experiment: Experiment, warn: Warn) -> Cluster | None:
    """Return the cluster that the experiment asks for, with room on it; None where it asks for none.

    Raises: ConfigError.
    """
    if experiment.cluster.kind == "none":
        return None
    return Cluster.open(experiment.cluster, places_of(experiment), warn)


def judging(experiment: Experiment, grading: Grading, cluster: Cluster | None, warn: Warn) -> GradingPool | Graders:
    """Return what judges answers."""
    limits = grading_limits(experiment)
    if cluster is None:
        return GradingPool(grading, limits)
    return Graders(cluster, cluster.of("grader"), grading, limits, warn)


def staged(
    experiment: Experiment, cluster: Cluster | None, warn: Warn, logs: Path | None = None, waiting: Path | None = None
) -> Workers:
    """Return learner and engines, started, with the experiment's model.

    warn: is told of every engine that is lost, in one line. logs: where what lost learners wrote is kept.
    waiting: see `DistributedLearner`.
    Raises: UserError as loading does; LearnerError.
    """
    if cluster is not None:
        return _on_cluster(experiment, cluster, warn, waiting)
    recipe = recipe_of(experiment)
    if not experiment.learner.is_sharded:
        model = load_network(experiment)
        learner = recipe.learner(model, resolve_device(experiment.device))
        return Workers(learner, serve(experiment, model, warn), sending(experiment, model))
    distributed = DistributedLearner(
        recipe, LocalWorkerGroup(experiment.learner.processes, experiment.device, logs), waiting=waiting
    )
    distributed.open()
    try:
        model = outline(experiment.model, experiment.trust_remote_code)
        return Workers(distributed, serve(experiment, model, warn), sending(experiment, model), watch=distributed.watch)
    except BaseException:
        distributed.close()
        raise


def _on_cluster(experiment: Experiment, cluster: Cluster, warn: Warn, waiting: Path | None) -> Workers:
    device = device_of(experiment).type
    model, plan = outline(experiment.model, experiment.trust_remote_code), experiment.engine
    rounding = Rounding(plan.rounding, {} if plan.rounding == "none" else input_axes(model))
    # While the learner loads its model, so do the engines.
    order = EngineSpec(
        partial(one_engine, replace(experiment, device=device)),
        takes_parts=plan.kind == "local",
        threads=max(1, torch.get_num_threads() // len(cluster.places)),
        receives=experiment.cluster.transfer if experiment.cluster.is_broadcasting else "",
        parts=plan.tensor_parallel,
    )
    places = {f"engine-{n}": place for n, place in enumerate(cluster.of("engine"), start=1)}
    engine, measured, started = serve_remotely(
        cluster, places, order, plan.timeout_seconds, vocabulary_size(model), warn
    )
    group = BroadcastGroup(cluster, started, order, plan.timeout_seconds) if order.receives else None
    worker_group = RayWorkerGroup(cluster, device, group=group)
    distributed = DistributedLearner(recipe_of(experiment), worker_group, rounding, waiting)
    distributed.open()
    if group is not None:
        try:
            distributed.meet(worker_group.receivers())
        except BaseException:
            distributed.close()
            raise
    # What is put where engines find it was rounded and merged there.
    is_other = plan.rounding != "none" or experiment.lora is not None
    return Workers(distributed, engine, _as_it_is if is_other else None, measured, distributed.watch)


def _as_it_is(snapshot: Snapshot) -> Snapshot:
    return snapshot
