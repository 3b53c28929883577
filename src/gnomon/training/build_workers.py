"""Who computes where: learner, engines and graders in this process, in others of this machine, or on a cluster."""

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gnomon.core.metrics import Metrics
from gnomon.core.processes.client import Limits
from gnomon.engines.pool import EnginePool
from gnomon.learner.base import SavableLearner
from gnomon.learner.distributed import DistributedLearner
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.models.size import outline
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading
from gnomon.rewards.judge_client import JudgeCache
from gnomon.training.build_data import grading_limits
from gnomon.training.build_engines import load_network, sending, serve
from gnomon.training.resolve import Resolved
from gnomon.training.reward_models import load_scorer
from gnomon.training.weight_sync import Sending

Warn = Callable[[str], None]


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


class RunCluster(Protocol):
    """A cluster with room for one run, as the room of clusters has it."""

    @property
    def said(self) -> str:
        """What the run card says of the cluster."""

    @property
    def stateless(self) -> Mapping[type, str]:
        """Kinds of objects that are in no checkpoint, each with the reason."""

    def graders(self, grading: Grading, limits: Limits, warn: Warn) -> Any:
        """Return what judges answers, in actors of the cluster."""

    def workers(self, resolved: Resolved, warn: Warn, waiting: Path | None) -> "Workers":
        """Return learner and engines on the cluster, started.

        Raises:
            UserError: As loading does; LearnerError.
        """

    def close(self) -> None:
        """Give back what the run took."""


@dataclass(frozen=True)
class Workers:
    """The learner, the engines, and what becomes of weights on their way; measured is what the way itself measured.

    Attributes:
        watch: Raises when a part of the learner is lost, also between two calls; never returns.
    """

    learner: SavableLearner
    engine: EnginePool
    sent: Sending | None
    measured: Callable[[], Metrics] = Metrics
    watch: Callable[[], Coroutine[Any, Any, None]] = _forever


def opened(resolved: Resolved, warn: Warn) -> RunCluster | None:
    """Return the cluster that the experiment asks for, with room on it; None where it asks for none.

    Raises:
        ConfigError: If the cluster is not there or has no room.
    """
    if resolved.experiment.cluster.kind == "none":
        return None
    cluster: RunCluster = cluster_room().open_cluster(resolved, warn)
    return cluster


def cluster_room() -> Any:
    """Return the module that puts a run on a Ray cluster; the room is known here by its name only."""
    return importlib.import_module("gnomon.cluster.hook")


def judging(resolved: Resolved, grading: Grading, cluster: RunCluster | None, warn: Warn, said: JudgeCache) -> Any:
    """Return what judges answers: a `GradingPool` that knows what judges ``said``, or graders on a cluster."""
    limits = grading_limits(resolved.experiment)
    if cluster is not None:
        return cluster.graders(grading, limits, warn)
    return GradingPool(grading, limits, partial(load_scorer, said=said))


def staged(
    resolved: Resolved, cluster: RunCluster | None, warn: Warn, logs: Path | None = None, waiting: Path | None = None
) -> Workers:
    """Return learner and engines, started, with the experiment's model.

    Args:
        warn: Is told of every engine that is lost, in one line.
        logs: Where what lost learners wrote is kept.
        waiting: See `DistributedLearner`.

    Raises:
        UserError: As loading does; LearnerError.
    """
    experiment = resolved.experiment
    if cluster is not None:
        return cluster.workers(resolved, warn, waiting)
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
