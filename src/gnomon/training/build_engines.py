"""From an experiment to who answers: one engine or several, sharing the learner's weights or with their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from gnomon.config.experiment import Experiment
from gnomon.core.errors import ConfigError
from gnomon.core.sections import STORE, StalenessPlan
from gnomon.core.types import Snapshot
from gnomon.engines.base import Engine
from gnomon.engines.local import LocalEngine
from gnomon.engines.pool import EnginePool
from gnomon.learner.precision import Precision, dtype_of, resolve_precision
from gnomon.learner.spec import LearnerSpec
from gnomon.models.cpu.kernels import kernels_of
from gnomon.models.cpu.packed_linear import input_axes
from gnomon.models.decoder import vocabulary_size
from gnomon.models.device import describe_device, resolve_device
from gnomon.models.size import outline
from gnomon.models.slow import slow_parts
from gnomon.models.transfer.rounding import rounded
from gnomon.records.run_card import CLUSTERED, CONVERSING, OVERLAPPED, PARTED, SERVED, TIMED
from gnomon.training.notes import many

_STARTED = "start"


def check_serving(experiment: Experiment) -> None:
    """Refuse engines that cannot be meant, or that are not there, before anything is loaded.

    Raises: ConfigError.
    """
    plan, asked = experiment.engine, experiment.prompts_per_step * (experiment.staleness_bound + 1)
    if plan.count > asked:
        raise ConfigError(
            f"engine.count = {plan.count} exceeds the {many(asked, 'prompt')} in flight; the extra engines would stay "
            f"idle; set engine.count = {asked} or less, or raise rollouts_per_step"
        )
    if plan.kind == "local":
        return
    if plan.count > 1 and plan.server not in ("", _STARTED):
        raise ConfigError(
            f"engine.server = '{plan.server}' is one engine, and engine.count = {plan.count}; set engine.count = 1, or "
            f'engine.server = "{_STARTED}" for servers of their own'
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
    from gnomon.engines.vllm.engine import check_vllm

    is_actor = experiment.cluster.kind != "none"
    # The machines of a cluster that is joined have an interpreter of their own, which is asked there.
    if not (is_actor and experiment.cluster.address and plan.python):
        check_vllm(plan, is_actor)


def shares_weights(experiment: Experiment) -> bool:
    """Whether the engine reads the learner's own tensors: one local engine, never asked while they change.

    Rounded weights are others than the learner's, answers of older weights need those, each of several engines would
    have to stand still while another one computes with the same module, and parts of weights in other processes cannot
    be read at all.
    """
    plan = experiment.engine
    is_plain = plan.kind == "local" and plan.count == 1 and plan.rounding == "none"
    is_plain = is_plain and experiment.cluster.kind == "none"
    return is_plain and experiment.staleness_bound == 0 and not experiment.learner.is_sharded


def own_copies(experiment: Experiment) -> int:
    """Return how many copies of the weights engines hold on this machine, beside the learner's."""
    plan = experiment.engine
    is_elsewhere = plan.kind == "vllm" and plan.server not in ("", _STARTED)
    return 0 if is_elsewhere or shares_weights(experiment) else plan.count


def said_of_serving(experiment: Experiment) -> str:
    """Return in one sentence who answers, with which weights."""
    plan = experiment.engine
    if shares_weights(experiment):
        return f"They are drawn in this process, from the learner's own weights, at most {plan.max_concurrent} at once."
    if experiment.cluster.kind != "none":
        kind = "vLLM" if plan.kind == "vllm" else "local"
        who = f"{many(plan.count, f'{kind} engine')} on a Ray cluster"
    elif plan.kind == "local":
        who = f"{many(plan.count, 'local engine')} in this process"
    elif plan.server:
        at = "started for it" if plan.server == _STARTED else f"at {plan.server}"
        who = f"{many(plan.count, 'vLLM server')} {at}"
    else:
        who = f"{many(plan.count, 'vLLM engine')} in this process"
    each = "each with weights of its own" if plan.count > 1 else "with weights of its own"
    rounding = "" if plan.rounding == "none" else f", rounded to {plan.rounding} whenever they are sent"
    parts = f" in {plan.tensor_parallel} parts (tensor parallel)" if plan.tensor_parallel > 1 else ""
    return f"They are drawn by {who}, {each}{parts}{rounding}, at most {plan.max_concurrent} at once by each."


def weakened(experiment: Experiment) -> str | None:
    """Return what the experiment itself takes from bitwise repetition; None where only the device decides."""
    if experiment.staleness_bound:
        return OVERLAPPED
    if experiment.environment is not None:
        return CONVERSING
    if experiment.cluster.kind != "none":
        return CLUSTERED
    if experiment.engine.kind != "local" or experiment.engine.count > 1:
        return SERVED
    processes = experiment.learner.processes
    if processes > 1 and device_of(experiment).type == "cpu":
        return PARTED.format(processes=processes)
    return TIMED if experiment.budget.seconds else None


def device_of(experiment: Experiment) -> torch.device:
    """Return what computes: of this machine, or "cuda" where the GPUs are those of a cluster that is joined.

    Raises: ConfigError when it is not here, and is not looked for elsewhere.
    """
    is_elsewhere = bool(experiment.cluster.address) and experiment.device == "cuda"
    if is_elsewhere and not torch.cuda.is_available():
        return torch.device("cuda")
    return resolve_device(experiment.device)


def precision_of(experiment: Experiment) -> Precision:
    """Return what the network computes in. Raises: ConfigError when only a GPU that is elsewhere could say."""
    asked, device = experiment.learner.precision, device_of(experiment)
    if asked == "auto" and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "learner.precision = 'auto' asks the GPU, and this machine has none: the cluster's are elsewhere; set "
            "learner.precision = 'bf16', or 'fp32'"
        )
    return resolve_precision(asked, str(device))


def said_of_native(experiment: Experiment) -> str:
    """Return what a run's card says of the functions in C that it computes with; "" where there are none."""
    if device_of(experiment).type != "cpu":
        return ""
    kernels = kernels_of(torch.empty(0, dtype=dtype_of(precision_of(experiment))))
    return "" if kernels is None else kernels.name


def slow_ways(experiment: Experiment, prompt_tokens: float) -> tuple[str, ...]:
    """Return a sentence for each slower way that the run computes by, with its factor: for plan, start and card.

    prompt_tokens: of a usual prompt.
    """
    if experiment.engine.kind != "local":
        return ()
    answer = experiment.sampling.max_completion_length
    said = list(slow_parts(outline(experiment.model, experiment.trust_remote_code), prompt_tokens, answer))
    if device_of(experiment).type == "cpu" and not said_of_native(experiment):
        said.append(
            "there are no functions in C (no compiler, or GNOMON_NATIVE=0), so PyTorch does what they would: "
            "generation and updates take up to twice as long (reckoned: docs/speed.md)"
        )
    return tuple(said)


def said_of_device(experiment: Experiment) -> str:
    """Return what a run's card says of what computes."""
    device = device_of(experiment)
    is_here = device.type == "cpu" or torch.cuda.is_available()
    return describe_device(device) if is_here else f"{device} (of the cluster's machines)"


def load_network(experiment: Experiment) -> nn.Module:
    """Return the experiment's model, adapters included, as it computes."""
    return recipe_of(experiment).network(resolve_device(experiment.device))


def recipe_of(experiment: Experiment) -> LearnerSpec:
    """Return what the experiment's learner is made of."""
    return LearnerSpec(
        model=experiment.model,
        algorithm=experiment.algorithm,
        plan=experiment.learner,
        steps=experiment.steps,
        lora=experiment.lora,
        trust_remote_code=experiment.trust_remote_code,
        device=experiment.device,
        seed=experiment.seed,
    )


def serve(experiment: Experiment, trained: nn.Module, warn: Callable[[str], None]) -> EnginePool:
    """Return who answers while ``trained`` is trained; it answers nothing useful before it was given a snapshot.

    warn: is told of every engine that is lost, in one line.
    """
    plan = experiment.engine
    return EnginePool(_engines(experiment, trained), plan.timeout_seconds, vocabulary_size(trained), warn)


def serve_alone(experiment: Experiment, warn: Callable[[str], None]) -> EnginePool:
    """Return one engine with the experiment's model as it is, to evaluate it: nothing is rounded, nothing is sent."""
    plan = replace(experiment.engine, count=1, rounding="none")
    learner = replace(experiment.learner, processes=1, offload=False)
    alone = replace(experiment, max_staleness=0, staleness=StalenessPlan(), lora=None, engine=plan, learner=learner)
    alone = replace(alone, cluster=replace(alone.cluster, transfer=STORE))
    model = load_network(experiment) if plan.kind == "local" else None
    vocabulary = None if model is None else vocabulary_size(model)
    return EnginePool(_engines(alone, model), plan.timeout_seconds, vocabulary, warn=warn)


def _engines(experiment: Experiment, trained: nn.Module | None) -> Mapping[str, Engine]:
    plan = experiment.engine
    if plan.kind == "vllm":
        from gnomon.engines.vllm.engine import make_vllm

        dtype, cluster = dtype_of(precision_of(experiment)), experiment.cluster
        receives = cluster.transfer if cluster.is_broadcasting else ""
        return {f"vllm-{n}": make_vllm(experiment.model, plan, dtype, receives) for n in range(1, plan.count + 1)}
    if trained is not None and shares_weights(experiment):
        return {"local": LocalEngine(trained, plan.max_concurrent)}
    return {f"local-{n}": one_engine(experiment) for n in range(1, plan.count + 1)}


def one_engine(experiment: Experiment) -> Engine:
    """Return an engine with weights of its own, in this process, such as each of several has, or each of a cluster's.

    Raises: as loading the model does, or vLLM.
    """
    plan = replace(experiment.engine, count=1, server="", python="")
    if plan.kind == "local":
        return LocalEngine(load_network(replace(experiment, lora=None)), plan.max_concurrent, shared=False)
    return next(iter(_engines(replace(experiment, engine=plan), None).values()))


def sending(experiment: Experiment, trained: nn.Module) -> Callable[[Snapshot], Snapshot] | None:
    """Return what becomes of a snapshot on its way to engines; None where they get the learner's own numbers.

    Adapters that are merged into weights are a rounding of its own, and are made by the snapshot itself.
    """
    kind = experiment.engine.rounding
    if kind != "none":
        axes = MappingProxyType(input_axes(trained))
        return lambda snapshot: rounded(snapshot, kind, axes)
    is_merged = experiment.lora is not None and not shares_weights(experiment)
    return (lambda snapshot: snapshot) if is_merged else None
