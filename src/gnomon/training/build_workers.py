"""Who computes where: learner, engines and graders in this process, in others of this machine, or on a cluster."""

import asyncio
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
from gnomon.cluster.ray import Cluster, ResourceBundle
from gnomon.core.metrics import Metrics
from gnomon.core.types import Snapshot
from gnomon.engines.pool import EnginePool
from gnomon.learner.base import SavableLearner
from gnomon.learner.distributed import DistributedLearner, Rounding
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.decoder import vocabulary_size
from gnomon.models.size import outline
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading
from gnomon.training.build_data import grading_limits
from gnomon.training.build_engines import engine_there, load_network, sending, serve
from gnomon.training.resolve import Resolved
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


def places_of(resolved: Resolved) -> list[ResourceBundle]:
    """Return what a run takes of a cluster: for each learner, engine and grader an actor."""
    experiment = resolved.experiment
    gpus, plan = 1.0 if resolved.device.type == "cuda" else 0.0, experiment.engine
    learners = [ResourceBundle("learner", gpus=gpus)] * experiment.learner.processes
    parts = float(plan.tensor_parallel)
    engines = [ResourceBundle("engine", parts, parts * gpus, plan.python)] * plan.count
    return [
        *learners,
        *engines,
        *[ResourceBundle("grader", float(experiment.grading.workers))] * experiment.cluster.graders,
    ]


def opened(resolved: Resolved, warn: Warn) -> Cluster | None:
    """Return the cluster that the experiment asks for, with room on it; None where it asks for none.

    Raises: ConfigError.
    """
    if resolved.experiment.cluster.kind == "none":
        return None
    return Cluster.open(resolved.experiment.cluster, places_of(resolved), warn)


def judging(resolved: Resolved, grading: Grading, cluster: Cluster | None, warn: Warn) -> GradingPool | Graders:
    """Return what judges answers."""
    limits = grading_limits(resolved.experiment)
    if cluster is None:
        return GradingPool(grading, limits)
    return Graders(cluster, cluster.of("grader"), grading, limits, warn)


def staged(
    resolved: Resolved, cluster: Cluster | None, warn: Warn, logs: Path | None = None, waiting: Path | None = None
) -> Workers:
    """Return learner and engines, started, with the experiment's model.

    warn: is told of every engine that is lost, in one line. logs: where what lost learners wrote is kept.
    waiting: see `DistributedLearner`.
    Raises: UserError as loading does; LearnerError.
    """
    experiment = resolved.experiment
    if cluster is not None:
        return _on_cluster(resolved, cluster, warn, waiting)
    recipe = resolved.learner_spec
    if not experiment.learner.is_sharded:
        model = load_network(resolved)
        learner = recipe.learner(model, resolved.device)
        return Workers(learner, serve(resolved, model, warn), sending(resolved, model))
    distributed = DistributedLearner(
        recipe, LocalWorkerGroup(experiment.learner.processes, experiment.device, logs), waiting=waiting
    )
    distributed.open()
    try:
        model = outline(experiment.model, experiment.trust_remote_code)
        return Workers(distributed, serve(resolved, model, warn), sending(resolved, model), watch=distributed.watch)
    except BaseException:
        distributed.close()
        raise


def _on_cluster(resolved: Resolved, cluster: Cluster, warn: Warn, waiting: Path | None) -> Workers:
    experiment = resolved.experiment
    device = resolved.device.type
    model, plan = outline(experiment.model, experiment.trust_remote_code), experiment.engine
    rounding = Rounding(plan.rounding, {} if plan.rounding == "none" else input_axes(model))
    # While the learner loads its model, so do the engines.
    order = EngineSpec(
        partial(engine_there, replace(experiment, device=device)),
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
    distributed = DistributedLearner(resolved.learner_spec, worker_group, rounding, waiting)
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
