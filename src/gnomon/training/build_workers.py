"""Who computes where: learner, engines and graders in this process, in others of this machine, or on a cluster."""

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from gnomon.config.experiment import Experiment
from gnomon.core.metrics import Metrics
from gnomon.core.processes.client import Limits
from gnomon.core.sections import STARTED, STORE, StalenessConfig
from gnomon.core.sentences import many
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine
from gnomon.engines.local import LocalEngine
from gnomon.engines.own import make_own
from gnomon.engines.pool import EnginePool
from gnomon.learner.base import SavableLearner
from gnomon.learner.distributed import DistributedLearner
from gnomon.learner.worker_group import LocalWorkerGroup
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.decoder import vocabulary_size
from gnomon.models.device import resolve_device
from gnomon.models.size import outline
from gnomon.models.transfer.rounding import rounded
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading
from gnomon.rewards.judge_client import JudgeCache
from gnomon.training.build_data import grading_limits
from gnomon.training.resolve import Resolved
from gnomon.training.reward_models import load_scorer
from gnomon.training.weight_sync import SnapshotTransform

# From an experiment to who answers: one engine or several, sharing the learner's weights or with their own.


def describe_engines(resolved: Resolved) -> str:
    """Return in one sentence who answers, with which weights."""
    plan = resolved.experiment.engine
    if resolved.shares_weights:
        return f"They are drawn in this process, from the learner's own weights, at most {plan.max_concurrent} at once."
    if resolved.experiment.cluster.kind != "none":
        kind = {"vllm": "vLLM"}.get(plan.kind, plan.kind)
        who = f"{many(plan.count, f'{kind} engine')} on a Ray cluster"
    elif plan.kind != "vllm":
        who = f"{many(plan.count, f'{plan.kind} engine')} in this process"
    elif plan.server:
        at = "started for it" if plan.server == STARTED else f"at {plan.server}"
        who = f"{many(plan.count, 'vLLM server')} {at}"
    else:
        who = f"{many(plan.count, 'vLLM engine')} in this process"
    each = "each with weights of its own" if plan.count > 1 else "with weights of its own"
    rounding = "" if plan.rounding == "none" else f", rounded to {plan.rounding} whenever they are sent"
    parts = f" in {plan.tensor_parallel} parts (tensor parallel)" if plan.tensor_parallel > 1 else ""
    turns = ", which it releases while the learner works" if plan.sleeps else ""
    said = f"They are drawn by {who}, {each}{parts}{rounding}{turns}, at most {plan.max_concurrent} at once by each."
    native = " vLLM's own sampler draws them: another engine or version of vLLM draws other tokens."
    return said + (native if plan.draws == "vllm" else "")


def load_network(resolved: Resolved) -> nn.Module:
    """Return the experiment's model, adapters included, as it computes."""
    return resolved.learner_spec.network(resolve_device(resolved.experiment.device))


def serve(resolved: Resolved, trained: nn.Module, warn: Callable[[str], None]) -> EnginePool:
    """Return who answers while ``trained`` is trained; it answers nothing useful before it was given a snapshot.

    Args:
        warn: Is told of every engine that is lost, in one line.
    """
    plan = resolved.experiment.engine
    return EnginePool(_engines(resolved, trained), plan.timeout_seconds, vocabulary_size(trained), warn)


def serve_alone(resolved: Resolved, warn: Callable[[str], None]) -> EnginePool:
    """Return one engine with the experiment's model as it is, to evaluate it: nothing is rounded, nothing is sent."""
    experiment = resolved.experiment
    plan = replace(experiment.engine, count=1, rounding="none")
    # Everything that would give the engine other weights than the model's own is switched off.
    learner = replace(experiment.learner, processes=1, offload=False)
    alone = replace(experiment, max_staleness=0, staleness=StalenessConfig(), lora=None, engine=plan, learner=learner)
    as_it_is = Resolved(replace(alone, cluster=replace(alone.cluster, transfer=STORE)))
    model = load_network(resolved) if plan.kind == "local" else None
    vocabulary = None if model is None else vocabulary_size(model)
    return EnginePool(_engines(as_it_is, model), plan.timeout_seconds, vocabulary, warn=warn)


def _engines(resolved: Resolved, trained: nn.Module | None) -> Mapping[str, Engine]:
    experiment = resolved.experiment
    plan = experiment.engine
    if plan.is_own:
        return {
            f"own-{n}": make_own(experiment.model, plan, resolved.dtype, resolved.device) for n in range(plan.count)
        }
    if plan.kind == "vllm":
        from gnomon.engines.vllm.engine import make_vllm

        dtype, cluster = resolved.dtype, experiment.cluster
        receives = cluster.transfer if cluster.is_broadcasting else ""
        return {f"vllm-{n}": make_vllm(experiment.model, plan, dtype, receives) for n in range(1, plan.count + 1)}
    if trained is not None and resolved.shares_weights:
        # One module for both: weights need no sending, and memory holds them once.
        return {"local": LocalEngine(trained, plan.max_concurrent, kept_bytes=resolved.kept_bytes)}
    return {f"local-{n}": one_engine(resolved) for n in range(1, plan.count + 1)}


def one_engine(resolved: Resolved) -> Engine:
    """Return an engine with weights of its own, in this process, such as each of several has, or each of a cluster's.

    Raises:
        EngineError, ModelError: As loading the model does, or vLLM.
    """
    experiment = resolved.experiment
    plan = replace(experiment.engine, count=1, server="", python="")
    if plan.kind == "local":
        model = load_network(Resolved(replace(experiment, lora=None)))
        return LocalEngine(model, plan.max_concurrent, shared=False, kept_bytes=resolved.kept_bytes)
    return next(iter(_engines(Resolved(replace(experiment, engine=plan)), None).values()))


def engine_there(experiment: Experiment) -> Engine:
    """Return `one_engine` in a process that was sent the experiment, and resolves it on the machine that it is on."""
    return one_engine(Resolved(experiment))


def snapshot_transform(resolved: Resolved, trained: nn.Module) -> Callable[[Snapshot], Snapshot] | None:
    """Return what becomes of a snapshot on its way to engines; None where they get the learner's own numbers.

    Adapters that are merged into weights are a rounding of its own, and are made by the snapshot itself.
    """
    kind = resolved.experiment.engine.rounding
    if kind != "none":
        axes = MappingProxyType(input_axes(trained))
        return lambda snapshot: rounded(snapshot, kind, axes)
    is_merged = resolved.experiment.lora is not None and not resolved.shares_weights
    return (lambda snapshot: snapshot) if is_merged else None


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
    transform: SnapshotTransform | None
    measured: Callable[[], Metrics] = Metrics
    watch: Callable[[], Coroutine[Any, Any, None]] = _forever


def open_cluster(resolved: Resolved, warn: Warn) -> RunCluster | None:
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


def build_graders(
    resolved: Resolved, grading: Grading, cluster: RunCluster | None, warn: Warn, said: JudgeCache
) -> Any:
    """Return what judges answers: a `GradingPool` that knows what judges ``said``, or graders on a cluster."""
    limits = grading_limits(resolved.experiment)
    if cluster is not None:
        return cluster.graders(grading, limits, warn)
    return GradingPool(grading, limits, partial(load_scorer, said=said))


def start_workers(
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
        return Workers(learner, serve(resolved, model, warn), snapshot_transform(resolved, model))
    distributed = DistributedLearner(
        recipe, LocalWorkerGroup(experiment.learner.processes, experiment.device, logs), waiting=waiting
    )
    # The learner's processes hold the weights; this one needs names and shapes alone, for its engines.
    distributed.open()
    try:
        model = outline(experiment.model, experiment.trust_remote_code)
        return Workers(
            distributed, serve(resolved, model, warn), snapshot_transform(resolved, model), watch=distributed.watch
        )
    except BaseException:
        # Also for Ctrl-C: the processes would outlive an error that is raised before anybody owns the learner.
        distributed.close()
        raise
