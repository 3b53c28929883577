"""What cannot be meant, or is not there, refused in one pass before anything is loaded."""

import importlib.util
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from gnomon.algorithms.critic import CriticConfig
from gnomon.config.experiment import EvaluationConfig, Experiment
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STARTED, STORE, SamplingConfig
from gnomon.engines.own import own_class
from gnomon.engines.vllm.transfer import BACKEND, check_backend
from gnomon.models.hf_names import HfNames
from gnomon.records.memory import free_memory_bytes
from gnomon.training.build_workers import cluster_room
from gnomon.training.notes import many
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
    _check_greedy(resolved.experiment)
    _check_distributions(resolved.experiment)
    check_room(resolved.experiment.local_processes, free_memory_bytes())
    check_serving(resolved)
    check_staging(resolved)


def _check_greedy(experiment: Experiment) -> None:
    """Refuse training on greedy answers where the loss would be none: no draw, so no ratio and no groups.

    With one answer a prompt and ``learner.temperature`` it is a choice that has a meaning: the ratio is 1 at the first
    update, as if the answer had been drawn at temperature 1.

    Raises:
        ConfigError: The message names what to set.
    """
    if experiment.steps == 0 or experiment.sampling.temperature != 0:
        return
    answers, said = experiment.algorithm.num_generations, "sampling.temperature = 0 takes the likeliest token each time"
    if answers > 1 and experiment.environment is None:
        why = f"the {answers} answers to a prompt (algorithm.num_generations) would be one answer {answers} times"
    elif experiment.learner.temperature is None:
        why = "no log-probability of a sampled token is there for the ratio (or give learner.temperature = 1)"
    else:
        return
    raise ConfigError(f"{said}: {why}; set it above 0, and evaluation.sampling.temperature = 0 to evaluate greedily")


def _check_distributions(experiment: Experiment) -> None:
    """Refuse to compare with distributions that the engine does not return, or that leave tokens out.

    Raises:
        ConfigError: The message names what to set.
    """
    plan = experiment.sampling
    if experiment.steps == 0 or experiment.algorithm.top_logprobs is None:
        return
    cut = {
        "top_p": plan.top_p < 1,
        "top_k": plan.top_k > 0,
        "min_p": plan.min_p > 0,
        "temperature": not plan.temperature,
    }
    said = [f"sampling.{name} = {getattr(plan, name):g}" for name, is_cut in cut.items() if is_cut]
    said += ["sampling.grammar"] if plan.grammar.is_set else []
    if experiment.engine.kind == "vllm":
        why = "gnomon's vLLM engines return the log-probability of the drawn token alone; set engine.kind = 'local'"
    elif said:
        why = f"{', '.join(said)} gives tokens probability 0, where the KL has no bound; draw from all tokens"
    else:
        return
    raise ConfigError(
        f"EssKl's estimator = 'exact' compares with the whole distribution that tokens were drawn from, and {why}, or "
        "estimator = 'unbiased'"
    )


def check_extras(experiment: Experiment) -> None:
    """Refuse an experiment that needs several packages which are not installed, all in one message.

    A single one is refused by the part that needs it, which says more.

    Raises:
        ConfigError: The message has one command that installs them.
    """
    rewards = {reward.verifier.kind for reward in experiment.rewards}
    needed: dict[str, str] = {name: f"records.sinks = {name}" for name in experiment.records.sinks}
    needed |= {"peft": "lora"} if experiment.lora is not None else {}
    needed |= {"math-verify": "the mathematics reward"} if "mathematics" in rewards else {}
    is_generated = experiment.task.kind == "reasoning_gym" or "reasoning" in rewards
    needed |= {"reasoning-gym": "the task"} if is_generated else {}
    missing = [name for name in needed if not _is_installed(name.replace("-", "_"))]
    if len(missing) > 1:
        said = ", ".join(f"{name} ({needed[name]})" for name in missing)
        raise ConfigError(f"{len(missing)} packages are not installed: {said}; run: pip install {' '.join(missing)}")


def _is_installed(module: str) -> bool:
    found = importlib.util.find_spec(module)
    # A folder of that name in the working directory is found as a package without a file.
    return found is not None and found.origin is not None


def check_serving(resolved: Resolved) -> None:
    """Refuse engines that cannot be meant, or that are not there, before anything is loaded.

    Raises:
        ConfigError: If one of them cannot be had.
    """
    experiment = resolved.experiment
    plan, asked = experiment.engine, experiment.prompts_per_step * (experiment.staleness_bound + 1)
    if plan.count > asked:
        raise ConfigError(
            f"engine.count = {plan.count} exceeds the {many(asked, 'prompt')} in flight; the extra engines would stay "
            f"idle; set engine.count = {asked} or less, or raise rollouts_per_step"
        )
    if plan.sleeps:
        _check_sleep(
            resolved.shares_weights,
            experiment.algorithm.critic,
            plan.count,
            experiment.learner.processes,
            experiment.cluster.kind != "none",
        )
    if plan.is_own:
        own_class(plan)
    if plan.kind != "vllm":
        return
    if plan.count > 1 and plan.server not in ("", STARTED):
        raise ConfigError(
            f"engine.server = '{plan.server}' is one engine, and engine.count = {plan.count}; set engine.count = 1, or "
            f'engine.server = "{STARTED}" for servers of their own'
        )
    if experiment.algorithm.routing == "behavior":
        raise ConfigError(
            'algorithm.routing = "behavior" replays the experts that the engine chose, and gnomon does not ask vLLM '
            'which; set algorithm.routing = "proximal", or engine.kind = "local"'
        )
    if experiment.trust_remote_code:
        raise ConfigError(
            "trust_remote_code lets a model's own code run in this process, and vLLM would not run it; set "
            'engine.kind = "local"'
        )
    if plan.draws == "vllm":
        _check_native(experiment.sampling, experiment.evaluation)
    from gnomon.engines.vllm.engine import check_vllm

    is_actor = experiment.cluster.kind != "none"
    # The machines of a cluster that is joined have an interpreter of their own, which is asked there.
    if not (is_actor and experiment.cluster.address and plan.python):
        check_vllm(plan, is_actor)


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


def _check_sleep(
    shares_weights: bool, critic: CriticConfig | None, engines: int, processes: int, is_cluster: bool
) -> None:
    """Refuse an engine that cannot sleep while the learner works, or for whose sleep nothing would be gained.

    Raises:
        ConfigError: The message names what to set.
    """
    if shares_weights:
        why = (
            "the engine answers with the learner's own weights, so there is nothing to release; leave it out, or set "
            "learner.offload = true, learner.processes or max_staleness = 1"
        )
    elif critic is not None and critic.pretraining is not None:
        why = "value pre-training asks between its updates; leave algorithm.critic.pretraining out"
    elif is_cluster and engines > processes:
        why = (
            f"each engine shares the place of one learner, and engine.count = {engines} with learner.processes = "
            f"{processes}; set engine.count = {processes} or less"
        )
    else:
        return
    raise ConfigError(f"engine.sleeps = true: {why}")


def check_staging(resolved: Resolved) -> None:
    """Refuse what cannot be had or meant, before anything is loaded.

    Raises:
        ConfigError: If one of them cannot be had.
    """
    experiment = resolved.experiment
    recipe = resolved.learner_spec
    if experiment.cluster.kind == "none":
        recipe.check()
        return
    device = resolved.device
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
        _check_broadcast(resolved, device)
    cluster_room().check(resolved)


def check_room(started: Mapping[str, tuple[int, int, bool]], free: int | None) -> None:
    """Refuse more processes on this machine than its memory, or the limits of its user, hold without a model.

    Args:
        started: `Experiment.local_processes`.
        free: Free memory, bytes; None where it is not known.

    Raises:
        ConfigError: Their libraries alone take more than is free, or more are started than may be.
    """
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
        is_bound = most != resource.RLIM_INFINITY and (limit == "-n" or os.geteuid() != 0)
        if is_bound and number > _RESERVED and number + _RESERVED > most:
            raise ConfigError(
                f"{largest} = {value}: {number} processes are more than ulimit {limit}, {most}, allows; set {largest} "
                f"lower, or type: ulimit {limit} {number + 2 * _RESERVED}"
            )


def _check_broadcast(resolved: Resolved, device: torch.device) -> None:
    """Refuse weights that cannot be sent by vLLM's own transfer.

    Raises:
        ConfigError: If the devices or backends do not allow it.
    """
    experiment = resolved.experiment
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
