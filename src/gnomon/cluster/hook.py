"""What a run needs of a Ray cluster. `training` imports this module by name, and only for a run on a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gnomon.cluster.engines import BroadcastGroup, EngineSpec, serve_remotely
from gnomon.cluster.graders import Graders
from gnomon.cluster.learners import RayWorkerGroup
from gnomon.cluster.ray import Cluster, ResourceBundle, check_cluster
from gnomon.core.processes.client import Limits
from gnomon.core.types import Snapshot
from gnomon.learner.distributed import DistributedLearner, Rounding
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.decoder import vocabulary_size
from gnomon.models.size import outline
from gnomon.rewards.grading import Grading
from gnomon.training.build_workers import Warn, Workers, engine_there
from gnomon.training.resolve import Resolved


@dataclass(frozen=True)
class OpenCluster:
    """A cluster with room for one run: `gnomon.training.build_workers.RunCluster`."""

    cluster: Cluster

    @property
    def said(self) -> str:
        """The run card's entry about the cluster."""
        return self.cluster.said

    @property
    def stateless(self) -> Mapping[type, str]:
        """Types that checkpoints do not save, each with the reason."""
        return {Graders: "judge each answer by itself", Cluster: "is where others compute", OpenCluster: "is a cluster"}

    def graders(self, grading: Grading, limits: Limits, warn: Warn) -> Graders:
        """Return graders in actors of the cluster."""
        return Graders(self.cluster, self.cluster.of("grader"), grading, limits, warn)

    def workers(self, resolved: Resolved, warn: Warn, waiting: Path | None) -> Workers:
        """Start learner and engines on the cluster.

        Raises:
            UserError: As loading does.
            LearnerError: If a rank of the learner cannot start.
        """
        return _workers(resolved, self.cluster, warn, waiting)

    def close(self) -> None:
        """Give back the run's resources."""
        self.cluster.close()


def open_cluster(resolved: Resolved, warn: Warn) -> OpenCluster:
    """Open the experiment's cluster and reserve its resources.

    Raises:
        ConfigError: If the cluster cannot be reached or has no room.
    """
    return OpenCluster(Cluster.open(resolved.experiment.cluster, resource_bundles(resolved), warn))


def check(resolved: Resolved) -> None:
    """Refuse an impossible cluster before anything is loaded.

    Raises:
        ConfigError: As `check_cluster` does.
    """
    gpus = torch.cuda.device_count() if resolved.device.type == "cuda" else 0
    check_cluster(resolved.experiment.cluster, resource_bundles(resolved), gpus)


def resource_bundles(resolved: Resolved) -> list[ResourceBundle]:
    """Return the resource bundles of a run: one for each learner rank, engine and grader.

    An engine that sleeps while the learner works is in the bundle of a rank.
    """
    experiment = resolved.experiment
    gpus, plan = 1.0 if resolved.device.type == "cuda" else 0.0, experiment.engine
    count, parts = experiment.learner.processes, float(plan.tensor_parallel)
    learners = [ResourceBundle("learner", gpus=gpus)] * count
    engines = [ResourceBundle("engine", parts, parts * gpus, plan.python)] * plan.count
    if plan.sleeps:
        # Two actors share the bundle's GPU: a rank of the learner, and an engine that sleeps while the rank computes.
        both = [ResourceBundle("learner", 2.0, gpus, actors=2)] * plan.count
        learners, engines = [*both, *learners[plan.count :]], []
    return [
        *learners,
        *engines,
        *[ResourceBundle("grader", float(experiment.grading.workers))] * experiment.cluster.graders,
    ]


def _workers(resolved: Resolved, cluster: Cluster, warn: Warn, waiting: Path | None) -> Workers:
    experiment = resolved.experiment
    device = resolved.device.type
    model, plan = outline(experiment.model, experiment.trust_remote_code), experiment.engine
    rounding = Rounding(plan.rounding, {} if plan.rounding == "none" else input_axes(model))
    # The engines load their models while the learner loads its own.
    spec = EngineSpec(
        partial(engine_there, replace(experiment, device=device)),
        takes_parts=plan.kind == "local",
        # On one machine all actors compute beside each other.
        threads=max(1, torch.get_num_threads() // len(cluster.places)),
        receives=experiment.cluster.transfer if experiment.cluster.is_broadcasting else "",
        parts=plan.tensor_parallel,
    )
    rooms = cluster.of("learner")[: plan.count] if plan.sleeps else cluster.of("engine")
    places = {f"engine-{n}": place for n, place in enumerate(rooms, start=1)}
    engine, measured, started = serve_remotely(
        cluster, places, spec, plan.timeout_seconds, vocabulary_size(model), warn
    )
    group = BroadcastGroup(cluster, started, spec, plan.timeout_seconds) if spec.receives else None
    worker_group = RayWorkerGroup(cluster, device, group=group)
    distributed = DistributedLearner(resolved.learner_spec, worker_group, rounding, waiting)
    distributed.open()
    if group is not None:
        try:
            distributed.connect(worker_group.receivers())
        except BaseException:
            distributed.close()
            raise
    # Rounding and merging happened before the weights were put into the store.
    is_other = plan.rounding != "none" or experiment.lora is not None
    return Workers(distributed, engine, _as_it_is if is_other else None, measured, distributed.watch)


def _as_it_is(snapshot: Snapshot) -> Snapshot:
    return snapshot
