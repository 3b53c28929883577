"""What one step of an experiment does, in plain words and numbers, before any of it is done."""

import time
from dataclasses import asdict, dataclass

import torch

from gnomon.algorithms.advantages import Whitened
from gnomon.algorithms.gae import Gae, LengthAdaptive
from gnomon.assemble import Questions
from gnomon.experiment import Experiment
from gnomon.learner.precision import Precision, dtype_of, resolve_precision
from gnomon.models.size import ModelSize
from gnomon.records.console import duration

GIB = 2**30
_PROBE_TOKENS = 256
_REACHED = 0.25
"""Share of the measured matrix rate that a whole step reached where this was calibrated (docs/log.md)."""
_SHARE = 20
"""alpha times the longest answer that `lambda_note` proposes: lambda 0.95, the one that PPO uses for every answer."""


@dataclass(frozen=True)
class Plan:
    """An experiment in numbers. Bytes and seconds are estimates; `sentences` says what they rest on."""

    steps: int
    prompts_per_step: int
    rollouts_per_step: int
    updates_per_step: int
    rollouts_per_update: int
    is_on_policy: bool
    training_prompts: int
    held_out_prompts: int
    parameters: int
    precision: str
    memory_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    step_seconds: float
    total_seconds: float
    sentences: tuple[str, ...]

    def as_row(self) -> dict[str, object]:
        """Return one JSON object."""
        return asdict(self)


def make_plan(experiment: Experiment, asked: Questions, size: ModelSize) -> Plan:
    """Return the plan of ``experiment``; measures the machine's matrix rate for a moment."""
    algorithm = experiment.algorithm
    precision = resolve_precision(experiment.learner.precision)
    updates, rollouts = algorithm.updates.total, experiment.rollouts_per_step
    per_update = rollouts // algorithm.updates.minibatches
    prompt = sum(len(asked.split.train[i].prompt) for i in range(min(64, len(asked.split.train))))
    prompt_tokens = prompt / min(64, len(asked.split.train))
    memory, checkpoint = _memory(experiment, size, precision, prompt_tokens), _checkpoint(experiment, size, precision)
    kept = experiment.checkpoints.keep_last + 1 + (_taught_batches(experiment) > 0)
    records = int(rollouts * experiment.steps * 40 * experiment.sampling.max_completion_length)
    seconds = _step_seconds(experiment, size, precision, prompt_tokens)
    total_seconds = seconds * (experiment.steps + _taught_batches(experiment))
    is_on_policy = updates == 1 and experiment.max_staleness == 0
    sentences = (
        f"{experiment.steps} steps of {algorithm.name} on '{experiment.task.name}' with {experiment.model} "
        f"({_parameters(size.parameters)} parameters, computed in {precision}"
        f"{f', LoRA of rank {experiment.lora.rank}' if experiment.lora else ''}).",
        f"A step asks {_many(experiment.prompts_per_step, 'prompt')}, {_many(algorithm.num_generations, 'answer')} "
        f"each: {rollouts} rollouts of at most {experiment.sampling.max_completion_length} tokens, from prompts of "
        f"about {prompt_tokens:.0f}.",
        f"It makes {_many(updates, 'optimizer update')} of {per_update} rollouts"
        + (f" ({algorithm.updates.epochs} passes over the batch)" if algorithm.updates.epochs > 1 else "")
        + "; "
        + _policy(is_on_policy, updates, experiment.max_staleness),
        f"{_many(len(asked.split.train), 'training prompt')}, so one pass over them takes "
        f"{len(asked.split.train) / experiment.prompts_per_step:.0f} steps; {asked.split.dropped} were given up "
        f"because they are held out; {_many(len(asked.split.held_out), 'held-out prompt')}.",
        *_critic_sentences(experiment, _critic(experiment, size, precision)),
        *_replay_sentences(experiment),
        f"Memory at most about {_bytes(memory)}; a checkpoint is {_bytes(checkpoint)}, and at most {kept} "
        f"exist at once, with the records {_bytes(checkpoint * kept + records)} on disk.",
        f"Roughly {duration(seconds) if seconds >= 1 else 'a second or less'} a step if every answer uses its whole "
        f"budget, {duration(max(1.0, total_seconds))} in all, plus evaluation (reckoned from the matrix "
        "rate that this machine showed just now; other programs at work make it longer).",
    )
    return Plan(
        steps=experiment.steps,
        prompts_per_step=experiment.prompts_per_step,
        rollouts_per_step=rollouts,
        updates_per_step=updates,
        rollouts_per_update=per_update,
        is_on_policy=is_on_policy,
        training_prompts=len(asked.split.train),
        held_out_prompts=len(asked.split.held_out),
        parameters=size.parameters,
        precision=precision,
        memory_bytes=memory,
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * kept + records,
        step_seconds=seconds,
        total_seconds=total_seconds,
        sentences=sentences,
    )


def lambda_note(experiment: Experiment) -> str | None:
    """Return what a length-adaptive lambda means when no answer can be long enough for it; None when one can."""
    advantage = experiment.algorithm.advantage
    inside = advantage.of if isinstance(advantage, Whitened) else advantage
    rule = inside.policy_lambda if isinstance(inside, Gae) else None
    longest = experiment.sampling.max_completion_length
    if not isinstance(rule, LengthAdaptive) or longest >= rule.shortest:
        return None
    return (
        f"LengthAdaptive(alpha = {rule.alpha:g}) gives lambda 0 to answers of fewer than {rule.shortest} tokens, and "
        f"none may have more than {longest}: every advantage is then a one-step difference of values, and the reward "
        "reaches the last token alone, the others through the critic only; set "
        f"algorithm.advantage.{'' if inside is advantage else 'of.'}policy_lambda.alpha = {_SHARE / longest:.2g}, "
        f"which gives an answer of the whole budget lambda {1 - 1 / _SHARE:g}"
    )


def _critic_sentences(experiment: Experiment, held: int) -> list[str]:
    plan = experiment.algorithm.critic
    if plan is None:
        return []
    what = f"a network of its own, {_bytes(held)} with its moments"
    if plan.trunk == "shared":
        what = "a head on the policy's own hidden states, so that its loss moves the policy's weights too"
    order = "before the policy, which then sees its fresh values" if plan.order == "before" else "after the policy"
    said = [
        f"The critic is {what}; it makes {_many(plan.updates.total, 'update')} a step of its own, {order}, at "
        f"{plan.learning_rate_ratio:g} times the policy's learning rate."
    ]
    if plan.pretraining is not None:
        wanted = plan.pretraining.explained_variance
        early = f", fewer once it explains {wanted:.0%} of the variance" if wanted is not None else ""
        said.append(
            f"Before step 1 the critic alone learns from {_many(plan.pretraining.steps, 'batch', 'batches')} of "
            f"{experiment.rollouts_per_step} answers of the unchanged policy{early}; `steps` counts the training steps "
            "after that."
        )
    note = lambda_note(experiment)
    return said if note is None else [*said, f"{note}."]


def _replay_sentences(experiment: Experiment) -> list[str]:
    plan = experiment.algorithm.replay
    if plan is None:
        return []
    return [
        f"After every {_many(plan.every, 'step')} imitation makes {_many(plan.updates, 'update')} of {plan.rows} "
        f"answers drawn from the best {plan.capacity} so far, of rewards above {plan.above:g}."
    ]


def _taught_batches(experiment: Experiment) -> int:
    """Return the most batches of value pre-training."""
    plan = experiment.algorithm.critic
    return 0 if plan is None or plan.pretraining is None else plan.pretraining.steps


def _policy(is_on_policy: bool, updates: int, max_staleness: int) -> str:
    if is_on_policy:
        return "it is on-policy: the weights that answered are the weights that are trained."
    late = [f"the first update is on-policy and the other {updates - 1} are not"] if updates > 1 else []
    if max_staleness:
        late.append(f"answers may be {_many(max_staleness, 'step')} older than the weights they train")
    return f"it is off-policy: {', and '.join(late)}."


def _many(count: int, what: str, several: str = "") -> str:
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def _parameters(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1_000_000 else f"{count:,}"


def _bytes(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{max(1, round(count / 2**20))} MiB"


def _checkpoint(experiment: Experiment, size: ModelSize, precision: Precision) -> int:
    """Return the model as it computes, and masters and two moments in float32 of what is trained."""
    weights = size.parameters * dtype_of(precision).itemsize
    return weights + 12 * _trained(experiment, size) + _critic(experiment, size, precision)


def _critic(experiment: Experiment, size: ModelSize, precision: Precision) -> int:
    """Return the bytes of a critic's own network, its masters and two moments; 0 on a shared trunk."""
    plan = experiment.algorithm.critic
    if plan is None or plan.trunk == "shared":
        return 0
    item = dtype_of(precision).itemsize
    return size.parameters * (item + (12 if item < 4 else 8))


def _memory(experiment: Experiment, size: ModelSize, precision: Precision, prompt_tokens: float) -> int:
    item = dtype_of(precision).itemsize
    masters = 16 if item < 4 else 12
    weights = size.parameters * item + _trained(experiment, size) * masters + _critic(experiment, size, precision)
    if experiment.algorithm.proximal is not None:
        weights += 4 * _trained(experiment, size)
    length = prompt_tokens + experiment.sampling.max_completion_length
    cache = experiment.engine.max_concurrent * length * size.cache_bytes_per_token * (item / 2)
    micro = max(experiment.learner.max_tokens_per_micro_batch, length)
    activations = micro * size.layers * size.width * 40 * item / (8 if experiment.learner.gradient_checkpointing else 1)
    logits = 256 * size.vocabulary * 4 * 4
    imports = 0.6 * GIB
    return int(weights + cache + activations + logits + imports)


def _trained(experiment: Experiment, size: ModelSize) -> int:
    if experiment.lora is None:
        return size.parameters
    return min(size.parameters, 14 * size.layers * size.width * experiment.lora.rank)


def _step_seconds(experiment: Experiment, size: ModelSize, precision: Precision, prompt_tokens: float) -> float:
    """Return the seconds of generating and training on whole budgets, each prompt computed once for its answers."""
    algorithm = experiment.algorithm
    answers = experiment.rollouts_per_step * experiment.sampling.max_completion_length
    tokens = experiment.prompts_per_step * prompt_tokens + answers
    taught = 0 if algorithm.critic is None else algorithm.critic.updates.epochs
    forwards = 1 + len(algorithm.needs) + 3 * (algorithm.updates.epochs + taught)
    return 2 * size.parameters * tokens * forwards / (_matrix_rate(precision, size.width) * _REACHED)


def _matrix_rate(precision: Precision, width: int) -> float:
    """Return floating-point operations a second of a product of the model's width, measured over a few calls."""
    wide = max(64, width)
    left = torch.randn(_PROBE_TOKENS, wide).to(dtype_of(precision))
    right = torch.randn(wide, 4 * wide).to(dtype_of(precision))
    best = float("inf")
    for _ in range(12):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return 2 * _PROBE_TOKENS * wide * 4 * wide / best
