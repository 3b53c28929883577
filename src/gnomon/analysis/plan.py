"""The plan of an experiment: what one step does, in sentences and numbers, before anything runs."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from gnomon.algorithms import Algorithm
from gnomon.algorithms.sections import TrackerConfig
from gnomon.core.errors import ConfigError
from gnomon.learner.optimizer import MOMENT_BYTES
from gnomon.learner.precision import Precision, dtype_of
from gnomon.learner.sections import DEVICE_SHARE, kept_numbers, token_budget
from gnomon.models.device import describe_device, finish, memory_of, resolve_device
from gnomon.models.head import chunk_for
from gnomon.models.quantized import BITS
from gnomon.models.size import ModelSize, foreseen_falls, model_size, outline
from gnomon.records.console import duration
from gnomon.training.build_data import TrainingData
from gnomon.training.build_workers import said_of_serving
from gnomon.training.notes import Costs, initial_answers, many, paragraphs, size_in_words
from gnomon.training.resolve import Resolved

GIB = 2**30
_SHOWN, _ENDS = 400, 8
_YEAR = 366 * 24 * 3600
_ON_POLICY = "the weights that answered are the weights that are trained"
_PROBE_TOKENS = 256
_PROBE_TOKENS_GPU = 8192
_SMALLER = (
    "train adapters (lora.rank) on a base in few bits (lora.base), set learner.gradient_checkpointing = true, or lower "
    "engine.max_concurrent"
)
_REACHED = 0.25
"""Share of the measured matrix rate that a whole step reached in the calibration (docs/log)."""
_LEAST_SECONDS = 0.2
"""What a step takes at least: `tiny`, whose arithmetic is nothing, takes 0.15 to 0.27 s on two cores of an EPYC."""


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt as the model reads it.

    Attributes:
        id: The task's id.
        tokens: Number of tokens.
        text: Decoded text, with control tokens spelled out.
        first_ids: First token ids.
        last_ids: Last token ids.
    """

    id: str
    tokens: int
    text: str
    first_ids: tuple[int, ...]
    last_ids: tuple[int, ...]

    @property
    def said(self) -> str:
        """A sentence about the prompt; the middle of a long prompt is left out."""
        text = json.dumps(self.text, ensure_ascii=False)
        if len(text) > 2 * _SHOWN:
            text = f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"
        first, last = (", ".join(map(str, ids)) for ids in (self.first_ids, self.last_ids))
        ids = first if self.tokens <= len(self.first_ids) else f"{first}, ..., {last}"
        return f"The prompt of '{self.id}' has {many(self.tokens, 'token')}, {ids}, and reads {text}"


@dataclass(frozen=True)
class RunEstimate:
    """An experiment in numbers. Bytes and seconds are estimates; `sentences` explains them."""

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
    undo_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    step_seconds: float
    total_seconds: float
    prompt: ShownPrompt
    sentences: tuple[str, ...]

    def as_row(self) -> dict[str, object]:
        """Return one JSON object."""
        return asdict(self)


def make_plan(resolved: Resolved, asked: TrainingData, size: ModelSize) -> RunEstimate:
    """Plan the experiment. This measures the device's matrix rate for a moment.

    Args:
        resolved: The experiment.
        asked: Its prompts.
        size: Shape of its model.

    Raises:
        ConfigError: If the experiment's device is not on this machine.
    """
    experiment = resolved.experiment
    if resolved.device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "this plan measures what computes, and the cluster's GPUs are not here; plan with --hardware h100 --gpus "
            "N, which needs none"
        )
    algorithm, rollouts = experiment.algorithm, experiment.rollouts_per_step
    precision = resolved.precision
    asked_tokens = asked.mean_prompt_tokens
    costs = _costs(resolved, asked, size, precision)
    checkpoint = _checkpoint(resolved, size, precision)
    steps = experiment.steps - experiment.first_step
    records = int(rollouts * steps * 40 * experiment.sampling.max_completion_length)
    reckoned = _step_seconds(resolved, size, precision, asked_tokens, asked.mean_answer_tokens)
    seconds = max(_LEAST_SECONDS, reckoned)
    before = initial_answers(experiment, costs.training_prompts) / rollouts / passes(algorithm)
    plan = RunEstimate(
        steps=steps,
        prompts_per_step=experiment.prompts_per_step,
        rollouts_per_step=rollouts,
        updates_per_step=algorithm.updates.total,
        rollouts_per_update=rollouts // algorithm.updates.minibatches,
        is_on_policy=not _lateness(resolved),
        training_prompts=costs.training_prompts,
        held_out_prompts=len(asked.split.held_out),
        parameters=size.parameters,
        precision=precision,
        memory_bytes=_memory(resolved, size, precision, asked_tokens, costs),
        undo_bytes=_undo(resolved, size),
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * _kept(resolved) + records,
        step_seconds=seconds,
        total_seconds=seconds * (steps + _taught_batches(resolved) + before),
        prompt=_shown_prompt(asked),
        sentences=(),
    )
    said = (*_shape(resolved, asked, plan), *paragraphs(experiment, costs), *_price(resolved, plan))
    return replace(plan, sentences=said)


def _shape(resolved: Resolved, asked: TrainingData, plan: RunEstimate) -> Iterator[str]:
    """Yield the content of a step: prompts, responses, updates."""
    experiment = resolved.experiment
    algorithm = experiment.algorithm
    yield (
        f"{plan.steps} steps of {algorithm.name} on '{experiment.task.name}' with {experiment.model} "
        f"({_parameters(plan.parameters)} parameters, computed in {plan.precision}"
        f"{f', LoRA of rank {experiment.lora.rank}' if experiment.lora else ''}"
        f"{f' on a base in {experiment.lora.quantized}' if experiment.lora and experiment.lora.quantized else ''})."
    )
    if experiment.continue_from is not None:
        yield f"It goes on from step {experiment.first_step} of {experiment.continue_from}."
    yield from _limits(resolved)
    if experiment.rollouts_from is not None:
        groups = many(len(asked.split.train), "logged group")
        yield f"It trains on {groups} of {experiment.rollouts_from} and generates none."
    yield from (
        _rows(asked, plan, algorithm.ranks_pairs) if algorithm.is_supervised else _rollouts(resolved, asked, plan)
    )
    yield plan.prompt.said
    falls = foreseen_falls(outline(experiment.model, experiment.trust_remote_code))
    for said in (*asked.remarks, *resolved.slow_ways(asked.mean_prompt_tokens), *falls):
        yield f"{said[:1].upper()}{said[1:]}."


_LIKELIHOOD = "whose mean negative log-likelihood is the loss"


def _rows(asked: TrainingData, plan: RunEstimate, ranks_pairs: bool) -> Iterator[str]:
    """Yield what a step trains on, where that is the dataset's own answers."""
    row = asked.split.train[0]
    loss = "two of each row, which the loss compares" if row.contrast else _LIKELIHOOD
    yield (
        f"A step trains on {many(plan.prompts_per_step, 'row')} of the dataset in one optimizer update: questions of "
        f"about {asked.mean_prompt_tokens:.0f} tokens, which are read, and answers of about "
        f"{asked.mean_answer_tokens:.0f}, {loss}. No answer is generated in it."
    )
    what = "accuracy" if ranks_pairs else "loss"
    measured = f"{many(plan.held_out_prompts, 'held-out row')}, of which the {what} is measured"
    judged = f", and {many(sum(e.samples * len(e.tasks) for e in asked.exams), 'answer')} generated and judged"
    yield (
        f"{many(plan.training_prompts, 'row')} to train on, so one pass over them takes "
        f"{plan.training_prompts / plan.prompts_per_step:.0f} steps; {measured if asked.split.is_answered else ''}"
        f"{judged if asked.exams else ''}."
    )
    said = json.dumps(asked.tokenizer.spelled(row.response), ensure_ascii=False)
    shown = said if len(said) <= 2 * _SHOWN else f"{said[:_SHOWN]} ... {said[-_SHOWN:]}"
    yield (
        f"The answer of '{row.id}' has {many(len(row.response), 'token')}, of which {sum(row.mask)} are trained on, "
        f"and reads {shown}"
    )


def _rollouts(resolved: Resolved, asked: TrainingData, plan: RunEstimate) -> Iterator[str]:
    """Yield what a step asks and how it updates, where answers are sampled."""
    experiment = resolved.experiment
    algorithm, budget = experiment.algorithm, experiment.sampling.max_completion_length
    yield (
        f"A step asks {many(plan.prompts_per_step, 'prompt')}, {many(algorithm.num_generations, 'answer')} each: "
        f"{plan.rollouts_per_step} rollouts of at most {budget} tokens, from prompts of about "
        f"{asked.mean_prompt_tokens:.0f}. {said_of_serving(resolved)}"
    )
    epochs, late = algorithm.updates.epochs, _lateness(resolved)
    yield (
        f"It makes {many(plan.updates_per_step, 'optimizer update')} of {many(plan.rollouts_per_update, 'rollout')}"
        f"{f' ({epochs} passes over the batch)' if epochs > 1 else ''}; "
        + (f"it is off-policy: {', and '.join(late)}." if late else f"it is on-policy: {_ON_POLICY}.")
    )
    yield (
        f"{many(plan.training_prompts, 'training prompt')}, so one pass over them takes "
        f"{plan.training_prompts / plan.prompts_per_step:.0f} steps; {asked.split.dropped} were given up "
        f"because they are held out; {many(plan.held_out_prompts, 'held-out prompt')}."
    )


def _limits(resolved: Resolved) -> Iterator[str]:
    """Yield the limits that end the run before its last step, and their effect on a falling learning rate."""
    budget, schedule = resolved.experiment.budget, resolved.experiment.learner.optimizer.schedule
    if not budget.is_set:
        return
    limits = [f"{budget.tokens:,} tokens were generated for training"] if budget.tokens else []
    limits += [f"{budget.seconds:g} seconds of training are over"] if budget.seconds else []
    falls = f"; the {schedule} schedule of the learning rate goes by the steps, so it does not come to its end then"
    yield f"It ends sooner with the step in which {' or '.join(limits)}{falls if schedule != 'constant' else ''}."


def _price(resolved: Resolved, plan: RunEstimate) -> Iterator[str]:
    """Yield memory, disk and time."""
    experiment = resolved.experiment
    memory, checkpoint, disk = map(size_in_words, (plan.memory_bytes, plan.checkpoint_bytes, plan.disk_bytes))
    yield (
        f"Memory at most about {memory}; a checkpoint is {checkpoint}, and at most {_kept(resolved)} exist at once, "
        f"with the records {disk} on disk."
    )
    if plan.undo_bytes:
        said = f"Of that memory {size_in_words(plan.undo_bytes)} is a copy that undoes a step of several updates"
        processes = experiment.learner.processes
        yield f"{said}, a share of it in each of {processes} processes." if processes > 1 else f"{said}."
    device = resolve_device(experiment.device)
    own = memory_of(device) * experiment.learner.processes
    if experiment.learner.is_sharded:
        yield (
            f"{many(experiment.learner.processes, 'process', 'processes')} of the learner hold a part each of its "
            f"weights, gradients and moments, and make every step together by {'NCCL' if own else 'gloo'}."
        )
    if own:
        lacks = f", less than that: {_SMALLER}" if own < plan.memory_bytes else ""
        yield f"It computes on {describe_device(device)} with {size_in_words(own)} of memory{lacks}."
    seconds, total = plan.step_seconds, plan.total_seconds
    each = duration(seconds) if seconds >= 1 else "a second or less"
    longest = "" if experiment.algorithm.is_supervised else " if every answer uses its whole budget"
    yield (
        f"Roughly {each} a step{longest}, {duration(max(1.0, total)) if total < _YEAR else 'more than a year'} in all, "
        "plus evaluation (reckoned from the matrix rate that this machine showed just now; other programs at work make "
        "it longer)."
    )


def _lateness(resolved: Resolved) -> list[str]:
    """Return the reasons why trained weights differ from the weights that answered; empty if the run is on-policy."""
    experiment = resolved.experiment
    critic, updates, late = experiment.algorithm.critic, experiment.algorithm.updates.total, []
    if critic is not None and critic.moves_policy_first:
        late.append("the critic's updates move the shared weights before the policy's first")
    elif updates > 1:
        others = "second is not" if updates == 2 else f"other {updates - 1:,} are not"
        late.append(f"the first update is on-policy and the {others}")
    if experiment.staleness_bound:
        late.append(f"answers may be {many(experiment.staleness_bound, 'step')} older than the weights they train")
    if experiment.engine.rounding != "none":
        late.append(f"answers are drawn from weights rounded to {experiment.engine.rounding}")
    if experiment.scoring_temperature != experiment.sampling.temperature and not experiment.algorithm.is_supervised:
        late.append(
            f"answers are drawn at temperature {experiment.sampling.temperature:g} and scored at "
            f"{experiment.scoring_temperature:g} (learner.temperature)"
        )
    return late


def _parameters(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1_000_000 else f"{count:,}"


def _shown_prompt(asked: TrainingData) -> ShownPrompt:
    """Return the first training prompt."""
    task = asked.split.train[0]
    text = asked.tokenizer.spelled(task.prompt)
    return ShownPrompt(task.id, len(task.prompt), text, task.prompt[:_ENDS], task.prompt[-_ENDS:])


def _taught_batches(resolved: Resolved) -> int:
    """Return the most batches of value pretraining."""
    plan = resolved.experiment.algorithm.critic
    return 0 if plan is None or plan.pretraining is None else plan.pretraining.steps


def _kept(resolved: Resolved) -> int:
    """Return the most checkpoints that exist at once, including the one being written and step 0's."""
    return resolved.experiment.checkpoints.keep_last + 1 + (_taught_batches(resolved) > 0)


def _costs(resolved: Resolved, asked: TrainingData, size: ModelSize, precision: Precision) -> Costs:
    """Return the bytes of the other networks. A changing copy below float32 also has float32 masters."""
    algorithm, item = resolved.experiment.algorithm, dtype_of(precision).itemsize
    masters = 4 if item < 4 else 0
    average = _trained(resolved, size) * (item + masters)
    return Costs(
        training_prompts=len(asked.split.train),
        reference_bytes=_reference_bytes(resolved, size, item, average),
        average_bytes=average if algorithm.proximal is not None else 0,
        critic_bytes=size.parameters * (item + masters + 8) if _has_own_critic(resolved) else 0,
        is_mixture=size.experts > 1,
        distribution_bytes=_distributions(resolved, size),
    )


def _reference_bytes(resolved: Resolved, size: ModelSize, item: int, average: int) -> int:
    """Return the bytes of the reference's own weights: a copy, an average, teachers; 0 where nothing reads it."""
    experiment = resolved.experiment
    plan = experiment.algorithm.reference
    if "reference" not in experiment.algorithm.needs:
        return 0
    copied = size.parameters * item if plan.model == "start" and experiment.lora is None else 0
    if plan.precision != "auto":
        item = dtype_of(plan.precision).itemsize
    teachers = sum(model_size(name, plan.trust_remote_code).parameters * item for name in plan.teachers)
    return copied + teachers + (average if plan.model == "average" else 0)


def _distributions(resolved: Resolved, size: ModelSize) -> int:
    """Return the bytes of the tokens and log-probabilities that come with a step's answers of full length."""
    experiment = resolved.experiment
    kept = experiment.algorithm.top_logprobs
    if kept is None:
        return 0
    tokens = experiment.rollouts_per_step * experiment.sampling.max_completion_length
    return 8 * tokens * (min(kept, size.vocabulary) or size.vocabulary)


def _checkpoint(resolved: Resolved, size: ModelSize, precision: Precision) -> int:
    """Return the bytes of a checkpoint: the model in its computing precision, and the states of `_states`."""
    models = 2 if _has_own_critic(resolved) else 1
    return models * size.parameters * dtype_of(precision).itemsize + _states(resolved, size)


def _undo(resolved: Resolved, size: ModelSize) -> int:
    """Return the bytes of the copy that can undo a step of several updates."""
    return _states(resolved, size) if resolved.experiment.algorithm.updates_repeatedly else 0


def _states(resolved: Resolved, size: ModelSize) -> int:
    """Return the bytes of float32 masters and two moments, of trained weights and of a critic, and of an average."""
    trained = _trained(resolved, size)
    average = 4 * trained if resolved.experiment.algorithm.proximal is not None else 0
    return 12 * trained + (12 * size.parameters if _has_own_critic(resolved) else 0) + average


def _has_own_critic(resolved: Resolved) -> bool:
    critic = resolved.experiment.algorithm.critic
    return critic is not None and critic.trunk == "separate"


def _memory(resolved: Resolved, size: ModelSize, precision: Precision, prompt_tokens: float, costs: Costs) -> int:
    experiment = resolved.experiment
    item, device = dtype_of(precision).itemsize, resolve_device(experiment.device)
    coded = 8 - 2 * MOMENT_BYTES if experiment.learner.optimizer.moments == "8bit" else 0
    masters = (16 if item < 4 else 12) - coded
    weights = size.parameters * item + _trained(resolved, size) * masters
    if experiment.lora is not None and experiment.lora.quantized is not None:
        weights -= int(size.quantizable * (item - BITS[experiment.lora.quantized] / 8))
    weights += costs.reference_bytes + costs.average_bytes + costs.critic_bytes
    # Once with the answers on their way, once more in the batch.
    weights += (experiment.staleness_bound + 2) * costs.distribution_bytes
    weights += resolved.own_copies * size.parameters * item
    # Training continues while a copy of the state is written.
    weights += _checkpoint(resolved, size, precision) if experiment.checkpoints.asynchronous else 0
    weights += _undo(resolved, size)
    length = prompt_tokens + experiment.sampling.max_completion_length
    rows = experiment.engine.max_concurrent * max(1, resolved.own_copies)
    per_token = size.cache_bytes_per_token * (item / 2)
    cache = rows * length * per_token
    # Between turns, of all conversations that are under way.
    said = experiment.rollouts_per_step * (experiment.staleness_bound + 1) * length * per_token
    cache += min(resolved.kept_bytes * max(1, resolved.own_copies), said)
    budget = experiment.learner.max_tokens_per_micro_batch or token_budget(
        kept_numbers(size.layers, size.width), item, size.parameters, memory_of(device) // DEVICE_SHARE
    )
    micro = max(budget, length)
    activations = micro * size.layers * size.width * 40 * item / (8 if experiment.learner.gradient_checkpointing else 1)
    logits = chunk_for(device, size.vocabulary) * size.vocabulary * 4 * 4
    # Each process of a learner has its own libraries and micro-batches; sent weights are in memory once more.
    processes = experiment.learner.processes if experiment.learner.is_sharded else 0
    sent = size.parameters * item if processes else 0
    imports = 0.6 * GIB * (1 + processes)
    answering, learning = cache, (activations + logits) * max(1, processes)
    if experiment.engine.sleeps:  # one after the other
        own = resolved.own_copies * size.parameters * item
        answering, learning, weights = max(cache + own, learning), 0, weights - own
    return int(weights + answering + learning + sent + imports)


def _trained(resolved: Resolved, size: ModelSize) -> int:
    if resolved.experiment.lora is None:
        return size.parameters
    return min(size.parameters, 14 * size.layers * size.width * resolved.experiment.lora.rank)


def passes(algorithm: Algorithm) -> int:
    """Return the passes over a step's tokens in forward passes: generating, scoring, and three for training."""
    critic = algorithm.critic
    trained = 0 if algorithm.ranks_pairs else algorithm.updates.epochs
    trained += critic.updates.epochs if critic else 0
    return (not algorithm.is_supervised) + scoring_passes(algorithm) + 3 * trained


def scoring_passes(algorithm: Algorithm) -> int:
    """Return the learner's forward passes over a step's tokens, without the three of each training pass."""
    # Routing is written down in the pass of the proximal policy, and the rest comes with the rollouts.
    scored = len(algorithm.needs & {"proximal", "sharpened", "reference", "values"})
    if algorithm.reads_statistics:
        scored += algorithm.updates.epochs  # at most: the first micro-batch is computed once
    if isinstance(algorithm.tracker, TrackerConfig) and algorithm.tracker.drift == "replayed":
        scored += 1
    return scored + (algorithm.critic is not None and algorithm.critic.order == "before")


def _step_seconds(
    resolved: Resolved, size: ModelSize, precision: Precision, prompt_tokens: float, answer_tokens: float
) -> float:
    """Return the seconds of generating and training with responses of full length; each prompt is computed once."""
    experiment = resolved.experiment
    algorithm = experiment.algorithm
    length = answer_tokens if algorithm.is_supervised else experiment.sampling.max_completion_length
    answers = experiment.rollouts_per_step * length
    tokens = experiment.prompts_per_step * prompt_tokens + answers
    rate = _matrix_rate(precision, size.width, experiment.device) * _REACHED
    return 2 * size.parameters * tokens * passes(algorithm) / rate


def _matrix_rate(precision: Precision, width: int, asked: str) -> float:
    """Return measured floating-point operations per second of a matrix product of the model's width."""
    device = resolve_device(asked)
    wide, rows = max(64, width), _PROBE_TOKENS if device.type == "cpu" else _PROBE_TOKENS_GPU
    left = torch.randn(rows, wide, device=device).to(dtype_of(precision))
    right = torch.randn(wide, 4 * wide, device=device).to(dtype_of(precision))
    best = float("inf")
    for _ in range(12):
        finish(device)
        began = time.perf_counter()
        left @ right
        finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * rows * wide * 4 * wide / best
