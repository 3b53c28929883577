"""The plan of an experiment: what one step does, in sentences and numbers, before anything runs."""

import json
import time
from dataclasses import asdict, dataclass, replace

import torch

from gnomon.algorithms import Algorithm
from gnomon.algorithms.sections import TrackerConfig
from gnomon.core.errors import ConfigError
from gnomon.core.sentences import many, sentences
from gnomon.learner.optimizer import MOMENT_BYTES
from gnomon.learner.precision import Precision, dtype_of
from gnomon.learner.sections import DEVICE_SHARE, kept_numbers, token_budget
from gnomon.models.device import describe_device, finish, memory_of, resolve_device
from gnomon.models.head import chunk_for
from gnomon.models.quantized import BITS
from gnomon.models.size import ModelSize, foreseen_slow, model_size, outline
from gnomon.records.console import duration
from gnomon.training.build_data import TrainingData
from gnomon.training.build_workers import describe_engines
from gnomon.training.notes import Costs, initial_answers, paragraphs
from gnomon.training.resolve import Resolved

GIB = 2**30
_SHOWN, _ENDS = 400, 8
_PROBE_TOKENS = 256
_PROBE_TOKENS_GPU = 8192
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
        first, last = (", ".join(map(str, ids)) for ids in (self.first_ids, self.last_ids))
        ids = first if self.tokens <= len(self.first_ids) else f"{first}, ..., {last}"
        return f"The prompt of '{self.id}' has {many(self.tokens, 'token')}, {ids}, and reads {_quoted(self.text)}"


def _quoted(text: str) -> str:
    said = json.dumps(text, ensure_ascii=False)
    return said if len(said) <= 2 * _SHOWN else f"{said[:_SHOWN]} ... {said[-_SHOWN:]}"


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
    # About 40 bytes a token in a rollout file: ids, two log-probabilities and the text, for answers of full length.
    records = int(rollouts * steps * 40 * experiment.sampling.max_completion_length)
    estimated = _step_seconds(resolved, size, precision, asked_tokens, asked.mean_answer_tokens)
    seconds = max(_LEAST_SECONDS, estimated)
    # Answers for initial values cost one pass each, where a step costs `passes` over its own.
    before = initial_answers(experiment, costs.training_prompts) / rollouts / passes(algorithm)
    # The sentences need the numbers, so the plan is made without them first.
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
    device = resolve_device(experiment.device)
    falls = foreseen_slow(outline(experiment.model, experiment.trust_remote_code))
    known = {
        "experiment": experiment,
        "asked": asked,
        "plan": plan,
        "serving": describe_engines(resolved),
        "late": _lateness(resolved),
        "judged": sum(eval_set.samples * len(eval_set.tasks) for eval_set in asked.eval_sets),
        "notes": (*asked.remarks, *resolved.slow_ways(asked_tokens), *falls),
        "kept": _kept(resolved),
        "own": memory_of(device) * experiment.learner.processes,
        "device": describe_device(device),
        "quoted": _quoted,
        "duration": duration,
    }
    shape, price = (sentences("analysis/plan.j2", part, **known) for part in ("shape", "price"))
    return replace(plan, sentences=(*shape, *paragraphs(experiment, costs), *price))


def _lateness(resolved: Resolved) -> list[str]:
    """Return the reasons why trained weights differ from the weights that answered; empty if the run is on-policy."""
    experiment = resolved.experiment
    critic, updates, late = experiment.algorithm.critic, experiment.algorithm.updates.total, []
    # With a shared trunk the critic's loss moves the policy too: not even the first update is on-policy then.
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
    # An average and a critic of their own are updated by less than
    # bfloat16 can add, so float32 masters stand beside them.
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
    # With adapters the reference is the frozen base itself, with the adapters switched off.
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
    # An id and a log-probability of 4 bytes each; 0 asks for the whole vocabulary.
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
    # A master and two moments of 4 bytes for each trained number.
    return 12 * trained + (12 * size.parameters if _has_own_critic(resolved) else 0) + average


def _has_own_critic(resolved: Resolved) -> bool:
    critic = resolved.experiment.algorithm.critic
    return critic is not None and critic.trunk == "separate"


def _memory(resolved: Resolved, size: ModelSize, precision: Precision, prompt_tokens: float, costs: Costs) -> int:
    experiment = resolved.experiment
    item, device = dtype_of(precision).itemsize, resolve_device(experiment.device)
    # Two float32 moments are 8 bytes; coded ones are about one byte each.
    coded = 8 - 2 * MOMENT_BYTES if experiment.learner.optimizer.moments == "8bit" else 0
    # Gradient, two moments and, below float32, a master: 4 bytes each.
    masters = (16 if item < 4 else 12) - coded
    weights = size.parameters * item + _trained(resolved, size) * masters
    if experiment.lora is not None and experiment.lora.quantized is not None:
        # Frozen layers in fewer bits; embedding and head keep the computing precision.
        weights -= int(size.quantizable * (item - BITS[experiment.lora.quantized] / 8))
    weights += costs.reference_bytes + costs.average_bytes + costs.critic_bytes
    # Once with the answers on their way, once more in the batch.
    weights += (experiment.staleness_bound + 2) * costs.distribution_bytes
    weights += resolved.own_copies * size.parameters * item
    # Training continues while a copy of the state is written.
    weights += _checkpoint(resolved, size, precision) if experiment.checkpoints.asynchronous else 0
    weights += _undo(resolved, size)
    length = prompt_tokens + experiment.sampling.max_completion_length
    # Every engine fills its rows, and a row's keys and values are held to its full length.
    rows = experiment.engine.max_concurrent * max(1, resolved.own_copies)
    per_token = size.cache_bytes_per_token * (item / 2)
    cache = rows * length * per_token
    # Between turns, of all conversations that are under way.
    said = experiment.rollouts_per_step * (experiment.staleness_bound + 1) * length * per_token
    cache += min(resolved.kept_bytes * max(1, resolved.own_copies), said)
    budget = experiment.learner.max_tokens_per_micro_batch or token_budget(
        kept_numbers(size.layers, size.width), item, size.parameters, memory_of(device) // DEVICE_SHARE
    )
    # A micro-batch holds one row at least, however small the budget.
    micro = max(budget, length)
    # Numbers of a token: 40 widths a layer, above the 24 that `kept_numbers` counts.
    activations = micro * size.layers * size.width * 40 * item / (8 if experiment.learner.gradient_checkpointing else 1)
    # On a GPU logits are computed in float32.
    each = item if device.type == "cpu" else 4
    logits = chunk_for(device, size.vocabulary, item) * size.vocabulary * each * 4
    # Each process of a learner has its own libraries and micro-batches; sent weights are in memory once more.
    processes = experiment.learner.processes if experiment.learner.is_sharded else 0
    sent = size.parameters * item if processes else 0
    # What Python and torch take once imported.
    imports = 0.6 * GIB * (1 + processes)
    answering, learning = cache, (activations + logits) * max(1, processes)
    if experiment.engine.sleeps:  # one after the other
        own = resolved.own_copies * size.parameters * item
        answering, learning, weights = max(cache + own, learning), 0, weights - own
    return int(weights + answering + learning + sent + imports)


def _trained(resolved: Resolved, size: ModelSize) -> int:
    if resolved.experiment.lora is None:
        return size.parameters - size.frozen
    # An adapter of rank r on a d x k matrix has r (d + k) numbers;
    # the seven matrices of a layer together have about 14 widths.
    return min(size.parameters, 14 * size.layers * size.width * resolved.experiment.lora.rank)


def passes(algorithm: Algorithm) -> int:
    """Return the passes over a step's tokens in forward passes: generating, scoring, and three for training."""
    critic = algorithm.critic
    trained = 0 if algorithm.ranks_pairs else algorithm.updates.epochs
    trained += critic.updates.epochs if critic else 0
    # A backward pass costs two forward passes, so training counts three.
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
    # The best of a few: whatever else the machine does makes a product slower and never faster.
    best = float("inf")
    for _ in range(12):
        finish(device)
        began = time.perf_counter()
        left @ right
        finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * rows * wide * 4 * wide / best
