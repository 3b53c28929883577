"""What cannot be meant, or is not there, refused in one pass before anything is loaded."""

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace

from gnomon.config.experiment import EvaluationConfig, Experiment, settings_of
from gnomon.core.combinations import SettingsByKey, check_drawing, check_engines, check_learner
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STORE, SamplingConfig
from gnomon.engines.own import own_class
from gnomon.engines.vllm.transfer import check_backend
from gnomon.models.hf_names import HfNames
from gnomon.records.memory import free_memory_bytes
from gnomon.training.build_workers import cluster_room
from gnomon.training.resolve import Resolved

_GIB = 2**30
_LIBRARIES = 0.6 * _GIB
"""Bytes that a process of a learner, or an actor, takes for its libraries alone (docs/scaling.md)."""
_FORKED = 4 * 2**20
"""Bytes that a process which grades, or holds an environment, takes beyond those that it shares."""
_RESERVED = 64
"""Open files, or processes, of a run without those that are counted."""


def check_settings(resolved: Resolved) -> None:
    """Refuse engines, learners and cluster that cannot be meant together, or are not there.

    Raises:
        ConfigError: If one of them cannot be had.
    """
    check_drawing(settings_of(resolved.experiment))
    check_room(resolved.experiment.local_processes, free_memory_bytes())
    check_serving(resolved)
    check_staging(resolved)


def check_serving(resolved: Resolved) -> None:
    """Refuse engines that cannot be meant, or that are not there, before anything is loaded.

    Raises:
        ConfigError: If one of them cannot be had.
    """
    experiment = resolved.experiment
    plan = experiment.engine
    check_engines(settings_of(experiment))
    if plan.is_own:
        own_class(plan)
    if plan.kind != "vllm":
        return
    if plan.draws == "vllm":
        _check_native(experiment.sampling, experiment.evaluation)
    from gnomon.engines.vllm.engine import check_served, check_shared_process, check_vllm

    is_actor = experiment.cluster.kind != "none"
    # The machines of a cluster that is joined have an interpreter of their own, which is asked there.
    if not (is_actor and experiment.cluster.address and plan.python):
        check_vllm(plan, is_actor)
        if plan.server in ("", "start"):
            spelling = HfNames(experiment.model, experiment.trust_remote_code)
            check_served(experiment.model, spelling, plan.python)
            if plan.server == "" and not is_actor and plan.tensor_parallel == 1:
                check_shared_process(experiment.model, spelling)


def _check_native(trained: SamplingConfig, asked: EvaluationConfig) -> None:
    """Refuse sampling, of training or of a held-out set, that vLLM's own sampler cannot do.

    Raises:
        ConfigError: The message names the setting.
    """
    from gnomon.engines.vllm.sampling import native_fault

    held_out = [one.sampling.over(asked.sampling) for one in asked.tasks] or [asked.sampling]
    faults = [native_fault(replace(trained, **one.given), "evaluation.sampling") for one in held_out]
    if fault := next(filter(None, (native_fault(trained), *faults)), None):
        raise ConfigError(fault)


def check_staging(resolved: Resolved) -> None:
    """Refuse what cannot be had or meant, before anything is loaded.

    Raises:
        ConfigError: If one of them cannot be had.
    """
    experiment, device = resolved.experiment, resolved.device
    check_learner(SettingsByKey({**settings_of(experiment), **({"device": "cpu"} if device.type == "cpu" else {})}))
    if experiment.cluster.kind == "none":
        resolved.learner_spec.check()
        return
    if experiment.cluster.is_broadcasting:
        _check_broadcast(experiment)
    cluster_room().check(resolved)


def check_room(started: Mapping[str, tuple[int, int, bool]], free: int | None) -> None:
    """Refuse more processes on this machine than its memory, or the limits of its user, hold without a model.

    Args:
        started: `Experiment.local_processes`.
        free: Free memory, bytes; None where it is not known.

    Raises:
        ConfigError: Their libraries alone take more than is free, or more are started than may be.
    """
    # A process that was forked shares the libraries' pages with its parent, one that was spawned loads its own.
    sizes = {name: number * (_FORKED if forked else _LIBRARIES) for name, (_, number, forked) in started.items()}
    largest, needed = max(sizes, key=lambda name: sizes[name]), sum(sizes.values())
    value, own = started[largest][0], sizes[largest]
    if free is not None and needed > free:
        raise ConfigError(
            f"{largest} = {value} needs {own / _GIB:,.1f} GiB for libraries alone, and {free / _GIB:.1f} GiB are free; "
            f"set {largest} = {max(1, int(value * (free - needed + own) / own))}"
        )
    number = sum(each for _, each, _ in started.values())
    for kind, limit in ((resource.RLIMIT_NOFILE, "-n"), (resource.RLIMIT_NPROC, "-u")):
        most = resource.getrlimit(kind)[0]
        # The kernel does not apply RLIMIT_NPROC to root.
        is_bound = most != resource.RLIM_INFINITY and (limit == "-n" or os.geteuid() != 0)
        if is_bound and number > _RESERVED and number + _RESERVED > most:
            raise ConfigError(
                f"{largest} = {value}: {number} processes are more than ulimit {limit}, {most}, allows; set {largest} "
                f"lower, or type: ulimit {limit} {number + 2 * _RESERVED}"
            )


def _check_broadcast(experiment: Experiment) -> None:
    """Refuse weights that cannot be sent by vLLM's own transfer.

    Raises:
        ConfigError: If the model or the installed vLLM does not allow it.
    """
    from gnomon.engines.vllm.engine import check_vllm

    backend = experiment.cluster.transfer
    if not HfNames(experiment.model, experiment.trust_remote_code).is_plain:
        raise ConfigError(
            f"cluster.transfer = '{backend}' sends weights by the names that they have in memory, and "
            f"'{experiment.model}' has others in its files; or set cluster.transfer = '{STORE}'"
        )
    # Learners send with it too, in the cluster's own interpreter, which no other can stand in for.
    check_vllm(replace(experiment.engine, python=sys.executable), is_actor=True)
    check_backend(backend)
