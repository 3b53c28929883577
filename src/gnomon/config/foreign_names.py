"""Names of TRL, verl, OpenRLHF and prime-rl: what each is here, or what to do instead. No torch.

One table, `FOREIGN`, which an experiment, `gnomon config NAME` and docs/migrate.md read. A name is translated and said
back, left out because gnomon does what it asks for, or refused with what to do. Names that depend on the composition of
an algorithm (clips, KL, aggregation) are translated by `gnomon.algorithms.aliases`; this table says what they become.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError

Pairs = Mapping[str, Any]
_NOTHING = (None, "None", "none", "null", "")
DEFERRED = ("prompts_per_step", "warmup_ratio", "ppo_mini_batch_size")
"""Names whose value depends on the algorithm or on other settings: kept until those are known."""


@dataclass(frozen=True)
class Counterpart:
    """What one name of another library is here.

    Attributes:
        says: Our key, or what to do; what a page and a refusal show.
        convert: From the other library's value to our keys and values; it returns None for a value that has no
            counterpart. None as a whole: no value has one.
        neutral: Values that ask for what gnomon does anyway.
        is_needless: Whether every value is left out, because it changes no result.
    """

    says: str
    convert: Callable[[Any], Pairs | None] | None = None
    neutral: tuple[Any, ...] = ()
    is_needless: bool = False

    @property
    def key(self) -> str | None:
        """Our key where the name is another word for it and the value stays; None otherwise."""
        return self.says if self.convert is not None and " " not in self.says else None


def _key(path: str, *neutral: Any) -> Counterpart:
    return Counterpart(path, lambda value: {path: value}, neutral)


def _made(says: str, convert: Callable[[Any], Pairs | None], *neutral: Any) -> Counterpart:
    return Counterpart(says, convert, neutral)


def _one_of(path: str, values: Mapping[Any, Any], *neutral: Any) -> Counterpart:
    """Return the counterpart whose values have other names too; ``values`` maps them, and others are refused."""
    said = ", ".join(f"{theirs} = {ours!r}" for theirs, ours in values.items())

    def convert(value: Any) -> Pairs | None:
        known = value if isinstance(value, bool | str) and value in values else None
        return None if known is None else {path: values[known]}

    return Counterpart(f"{path} ({said})", convert, neutral)


def _needless(why: str) -> Counterpart:
    return Counterpart(why, is_needless=True)


def _instead(what: str, *neutral: Any) -> Counterpart:
    return Counterpart(what, neutral=neutral)


def _first(path: str) -> Counterpart:
    """Return the counterpart of a list of files of which one is meant."""

    def convert(value: Any) -> Pairs | None:
        listed = list(value) if isinstance(value, list | tuple) else [value]
        return {path: listed[0]} if len(listed) == 1 and isinstance(listed[0], str) else None

    return Counterpart(f"{path} (one file; several are a task of kind mixture)", convert)


def _every(path: str) -> Counterpart:
    return Counterpart(f"{path} (-1 is 0)", lambda value: {path: 0 if value == -1 else value})


def _listed(value: Any) -> list[Any]:
    named = list(value) if isinstance(value, list | tuple) else [value]
    return [name for name in named if name not in (*_NOTHING, "console", "file")]


def _switched(path: str, on: Any, off: Any) -> Counterpart:
    return _one_of(path, {True: on, False: off})


def _positive(path: str) -> Counterpart:
    """Return the counterpart of a number of which 0 means that there is none."""
    return _key(path, 0)


def _pick(*pairs: tuple[str, str]) -> Mapping[str, str]:
    return dict(pairs)


_RATE = "learner.optimizer.learning_rate"
_NORM = _made(
    "learner.optimizer.max_gradient_norm (0, no clipping, is 1e9)",
    lambda value: {"learner.optimizer.max_gradient_norm": 1e9 if value == 0 else value},
)
_STEPS = "every step and every rollout is recorded; gnomon watch RUN shows them"
_MICRO = (
    "micro-batches are made by tokens and change no gradient; learner.max_tokens_per_micro_batch bounds their memory"
)
_BATCH = "rollouts_per_step counts the rollouts of a step, prompts_per_step its prompts; write the one that is meant"
_DIRECTORY = (
    "a run is written to runs/NAME-DATE-TIME; give --run-dir DIR on the command line, run_dir=DIR in Python, or name"
)
_SPEED = "changes the speed alone, and gnomon chooses it"
_SHARDS = "learner.processes = N shards the model among N processes (FSDP2), learner.offload keeps it in main memory"
_EXPORT = "after the run, gnomon export RUN FOLDER writes the model's files"
_BETAS = "learner.optimizer.betas = [beta1, beta2]"
_EVALUATE = "evaluation.every = N; 0 evaluates before the first and after the last step, and held_out.size = 0 never"
_SCHEDULE = _one_of(
    "learner.optimizer.schedule",
    _pick(("constant", "constant"), ("constant_with_warmup", "constant"), ("linear", "linear"), ("cosine", "cosine")),
)
_REFERENCE = "the reference is the model that training began with"
_RATIO = "learner.optimizer.warmup_steps (the share of steps, rounded up)"
_EPOCHS = "steps = epochs * prompts / prompts_per_step; gnomon plan says how many prompts there are"
_MINIBATCHES = "algorithm.updates.minibatches = rollouts of a step / rollouts of an update"
_CORRECTION = "algorithm.correction.piece and .level"
# With TRL's cap.
_MODES: Mapping[str, Pairs] = {
    "token_truncate": {"piece": "TruncatedIS", "level": "token", "cap": 3.0},
    "token_mask": {"piece": "MaskedIS", "level": "token", "low": 0.0, "high": 3.0},
    "sequence_truncate": {"piece": "TruncatedIS", "level": "sequence", "cap": 3.0},
    "sequence_mask": {"piece": "MaskedIS", "level": "sequence", "low": 0.0, "high": 3.0},
}
_ALGORITHMS: Mapping[str, str] = {
    "grpo": "grpo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "opo": "opo",
    "reinforce": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _mode(value: Any) -> Pairs | None:
    return {"algorithm.correction": dict(_MODES[value])} if isinstance(value, str) and value in _MODES else None


def _targets(value: Any) -> Pairs:
    return {"lora.targets": value if value == "all-linear" or not isinstance(value, str) else [value]}


_ESTIMATOR = _one_of("algorithm", _ALGORITHMS)
_LENGTH = "sampling.max_completion_length"
_PRECISION = _one_of(
    "learner.precision",
    _pick(("auto", "auto"), ("bfloat16", "bf16"), ("bf16", "bf16"), ("float32", "fp32"), ("fp32", "fp32")),
)

COMMON: Mapping[str, Counterpart] = {
    "lr": _key(_RATE),
    "batch_size": _instead(_BATCH),
    "train_batch_size": _instead(_BATCH),
    "max_new_tokens": _key(_LENGTH),
    "max_response_length": _key(_LENGTH),
    "precision": _key("learner.precision"),
    "output_name": _key("name"),
    "device_name": _key("device"),
    "accelerator": _key("device"),
    "prompts_per_step": Counterpart("rollouts_per_step (times algorithm.num_generations)"),
    "ppo_mini_batch_size": Counterpart("algorithm.updates.minibatches (prompts of a step / prompts of an update)"),
    "epochs": _instead(_EPOCHS),
}
"""Short names that every library's users write."""

TRL: Mapping[str, Counterpart] = {
    "model_name_or_path": _key("model"),
    "model_init_kwargs": _instead("device, learner.precision and trust_remote_code say each of them", {}),
    "disable_dropout": _needless("no dropout is ever applied in training, so that engine and learner agree"),
    "cast_lm_head_to_fp32": _instead('learner.precision = "fp32" computes everything in float32', False),
    "remove_unused_columns": _needless("rewards get every column that they name"),
    "num_generations_eval": _key("evaluation.samples"),
    "max_completion_length": _key(_LENGTH),
    "ds3_gather_for_generation": _needless("engines have the whole weights"),
    "shuffle_dataset": _instead("prompts are drawn in an order that seed gives; each epoch has another one", True),
    "generation_batch_size": _key("rollouts_per_step"),
    "steps_per_generation": _instead("algorithm.updates.minibatches = steps_per_generation / gradient_accumulation"),
    "temperature": _key("sampling.temperature"),
    "top_p": _key("sampling.top_p"),
    "top_k": _made("sampling.top_k (-1 is 0)", lambda value: {"sampling.top_k": 0 if value == -1 else value}),
    "min_p": _key("sampling.min_p"),
    "generation_kwargs": _instead("sampling.temperature, .top_p, .top_k, .min_p and .stop_ids say each of them", {}),
    "repetition_penalty": _instead(
        "no penalty: answers are drawn from the policy that is trained, or the ratios would be wrong", 1, 1.0
    ),
    "use_transformers_paged": _needless(_SPEED),
    "cache_implementation": _needless(_SPEED),
    "use_vllm": _switched("engine.kind", "vllm", "local"),
    "vllm_mode": _instead(
        'engine.server = "" is colocated, "start" starts a server, and another text is the address of one', "colocate"
    ),
    "vllm_model_impl": _instead("vLLM's own implementation is used", "vllm", "auto"),
    "vllm_structured_outputs_regex": _instead("no constrained generation; a reward of kind format judges the form"),
    "vllm_server_base_url": _key("engine.server"),
    "vllm_server_host": _instead('engine.server = "http://HOST:PORT"'),
    "vllm_server_port": _instead('engine.server = "http://HOST:PORT"'),
    "vllm_server_timeout": _needless("a server that gnomon starts has ten minutes (engine.timeout_seconds afterwards)"),
    "vllm_group_port": _needless("free ports are chosen"),
    "vllm_gpu_memory_utilization": _needless("memory is shared out by engine.max_concurrent and the budget of tokens"),
    "vllm_max_model_length": _needless("prompts and sampling.max_completion_length say it"),
    "vllm_tensor_parallel_size": _key("engine.tensor_parallel"),
    "vllm_enable_sleep_mode": _instead("vLLM keeps its memory between steps; engine.max_concurrent bounds it", False),
    "sapo_temperature_pos": _key("algorithm.surrogate.positive"),
    "sapo_temperature_neg": _key("algorithm.surrogate.negative"),
    "reward_funcs": _made(
        "rewards, a list", lambda value: {"rewards": list(value) if isinstance(value, list | tuple) else [value]}
    ),
    "reward_weights": _instead("each reward has its weight: [[rewards]] weight = 0.5, in Python (function, 0.5)"),
    "multi_objective_aggregation": _instead("rewards are summed with their weights first", "sum_then_normalize"),
    "sync_ref_model": _instead(_REFERENCE, False),
    "ref_model_mixup_alpha": _instead(_REFERENCE, 0.6),
    "ref_model_sync_steps": _instead(_REFERENCE, 512),
    "top_entropy_quantile": _instead("no piece masks tokens by entropy; write one of your own", 1, 1.0),
    "max_tool_calling_iterations": _instead("environment.max_turns = iterations + 1"),
    "vllm_importance_sampling_correction": _one_of(
        "algorithm.correction", {True: _MODES["sequence_mask"], False: "none"}
    ),
    "vllm_importance_sampling_mode": _made(f"{_CORRECTION} (TruncatedIS or MaskedIS)", _mode),
    "vllm_importance_sampling_cap": _instead("algorithm.correction.cap of TruncatedIS, .high of MaskedIS"),
    "off_policy_mask_threshold": _instead("algorithm.correction = RejectionSampling has bounds low and high"),
    "use_bias_correction_kl": _instead("no importance weight on the KL; algorithm.regularizers takes a piece", False),
    "log_completions": _needless(_STEPS),
    "num_completions_to_print": _needless(_STEPS),
    "log_unique_prompts": _needless(_STEPS),
    "log_completions_hub_repo": _instead("rollouts are files below RUN/rollouts; upload those"),
    "max_prompt_length": _instead("no prompt is cut; one that is too long for the context is refused with its row"),
    "learning_rate": _key(_RATE),
    "max_steps": _key("steps", -1),
    "num_train_epochs": _instead(_EPOCHS),
    "per_device_train_batch_size": _instead(
        "rollouts_per_step = per_device_train_batch_size * gradient_accumulation_steps * GPUs"
    ),
    "per_device_eval_batch_size": _needless("engines make their own batches (engine.max_concurrent)"),
    "gradient_accumulation_steps": _instead(
        "rollouts_per_step = per_device_train_batch_size * gradient_accumulation_steps * GPUs", 1
    ),
    "auto_find_batch_size": _needless("a step that is out of memory is repeated with smaller micro-batches"),
    "warmup_steps": _key("learner.optimizer.warmup_steps"),
    "warmup_ratio": Counterpart(_RATIO),
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler_kwargs": _instead("learner.optimizer.final_fraction is the share of the rate that is left", {}),
    "weight_decay": _key("learner.optimizer.weight_decay"),
    "adam_beta1": _instead(_BETAS, 0.9),
    "adam_beta2": _instead(_BETAS, 0.999),
    "adam_epsilon": _key("learner.optimizer.epsilon"),
    "max_grad_norm": _NORM,
    "optim": _instead("AdamW is the only optimizer", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "bf16": _switched("learner.precision", "bf16", "fp32"),
    "fp16": _instead('no float16; learner.precision = "bf16" or "fp32"', False),
    "tf32": _needless("learner.precision says what is computed in"),
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "use_cpu": _switched("device", "cpu", "auto"),
    "no_cuda": _switched("device", "cpu", "auto"),
    "gradient_checkpointing": _key("learner.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": _needless("changes no gradient"),
    "attn_implementation": _needless(_SPEED),
    "use_liger_kernel": _needless("log-probabilities are computed without whole logits anyway"),
    "torch_compile": _needless(_SPEED),
    "deepspeed": _instead(_SHARDS),
    "fsdp": _instead(_SHARDS),
    "fsdp_config": _instead(_SHARDS),
    "save_steps": _key("checkpoints.every"),
    "save_strategy": _one_of("checkpoints.every", {"no": 0}, "steps"),
    "save_total_limit": _key("checkpoints.keep_last"),
    "save_only_model": _instead(f"a checkpoint has the whole state, so that a run can resume; {_EXPORT}", False),
    "eval_steps": _key("evaluation.every"),
    "eval_strategy": _instead(_EVALUATE, "steps"),
    "do_eval": _instead(_EVALUATE, True),
    "eval_on_start": _key("evaluation.before"),
    "load_best_model_at_end": _instead("gnomon evaluate RUN --checkpoint best", False),
    "metric_for_best_model": _instead("gnomon evaluate RUN --checkpoint best"),
    "logging_steps": _needless(_STEPS),
    "logging_strategy": _needless(_STEPS),
    "logging_first_step": _needless(_STEPS),
    "logging_dir": _instead(_DIRECTORY),
    "disable_tqdm": _needless("a log that is no terminal has one line a step"),
    "report_to": _made("records.sinks, a list", lambda value: {"records.sinks": _listed(value)}),
    "run_name": _key("name"),
    "output_dir": _instead(_DIRECTORY),
    "overwrite_output_dir": _instead("a run directory is never overwritten; name another", False),
    "data_seed": _instead("seed decides every draw of a run"),
    "dataloader_num_workers": _needless("prompts are read before the first step"),
    "resume_from_checkpoint": _instead("gnomon resume RUN", False),
    "push_to_hub": _instead(_EXPORT, False),
    "hub_model_id": _instead(_EXPORT),
    "dataset_name": _key("task"),
    "dataset_config": _key("task.subset"),
    "dataset_train_split": _key("task.split"),
    "dataset_test_split": _instead('evaluation.task = {kind = "table", path = NAME, split = SPLIT}'),
    "use_peft": _made("lora (true is lora = {})", lambda value: {"lora": {}} if value is True else None, False),
    "lora_r": _positive("lora.rank"),
    "lora_alpha": _key("lora.alpha"),
    "lora_dropout": _instead("no dropout is ever applied in training", 0, 0.0),
    "lora_target_modules": _made("lora.targets, a list", _targets),
    "load_in_4bit": _instead('weights are not quantized in training; lora with learner.precision = "bf16"', False),
    "load_in_8bit": _instead('weights are not quantized in training; lora with learner.precision = "bf16"', False),
}
"""TRL's ``GRPOConfig``, ``ModelConfig`` and ``ScriptArguments``, and ``TrainingArguments`` of transformers."""

_ACTOR, _ROLLOUT, _REF = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref")


def _below(path: str, table: Mapping[str, Counterpart]) -> dict[str, Counterpart]:
    return {f"{path}.{name}": counterpart for name, counterpart in table.items()}


VERL: Mapping[str, Counterpart] = {
    **_below(
        "data",
        {
            "train_files": _first("task"),
            "val_files": _first("evaluation.task"),
            "train_batch_size": _key("prompts_per_step"),
            "val_batch_size": _needless("engines make their own batches (engine.max_concurrent)"),
            "max_prompt_length": TRL["max_prompt_length"],
            "max_response_length": _key(_LENGTH),
            "prompt_key": _key("task.prompt_column"),
            "reward_fn_key": _needless("rewards get data_source with the other columns"),
            "return_raw_chat": _needless("prompts may be texts or chat messages"),
            "shuffle": TRL["shuffle_dataset"],
            "seed": _instead("seed decides every draw of a run"),
            "truncation": _instead("no prompt is cut", "error"),
            "filter_overlong_prompts": _instead("a prompt that is too long is refused with its row", False),
            "trust_remote_code": _key("trust_remote_code"),
            "apply_chat_template_kwargs": _key("chat_template_kwargs"),
            "custom_cls.path": _instead("task takes files and datasets; write the rows with any program"),
        },
    ),
    **_below(
        "actor_rollout_ref.model",
        {
            "path": _key("model"),
            "trust_remote_code": _key("trust_remote_code"),
            "enable_gradient_checkpointing": _key("learner.gradient_checkpointing"),
            "use_remove_padding": _needless("padding changes no result"),
            "use_fused_kernels": _needless(_SPEED),
            "use_liger": _needless(_SPEED),
            "lora_rank": _positive("lora.rank"),
            "lora_alpha": _key("lora.alpha"),
            "target_modules": _made("lora.targets, a list", _targets),
        },
    ),
    "actor_rollout_ref.hybrid_engine": _needless("one loop trains and generates"),
    **_below(
        _ACTOR,
        {
            "optim.lr": _key(_RATE),
            "optim.lr_warmup_steps": _key("learner.optimizer.warmup_steps", -1),
            "optim.lr_warmup_steps_ratio": _made(_RATIO, lambda value: {"warmup_ratio": value}),
            "optim.warmup_style": _SCHEDULE,
            "optim.lr_scheduler_type": _SCHEDULE,
            "optim.min_lr_ratio": _key("learner.optimizer.final_fraction"),
            "optim.weight_decay": _key("learner.optimizer.weight_decay"),
            "optim.betas": _key("learner.optimizer.betas"),
            "optim.clip_grad": _NORM,
            "optim.total_training_steps": _needless("steps says it"),
            "grad_clip": _NORM,
            "ppo_mini_batch_size": _made(
                "algorithm.updates.minibatches (prompts of a step / prompts of an update)",
                lambda value: {"ppo_mini_batch_size": value},
            ),
            "ppo_micro_batch_size": _needless(_MICRO),
            "ppo_micro_batch_size_per_gpu": _needless(_MICRO),
            "use_dynamic_bsz": _needless(_MICRO),
            "ppo_max_token_len_per_gpu": _key("learner.max_tokens_per_micro_batch"),
            "ppo_epochs": _key("algorithm.updates.epochs"),
            "clip_ratio": _key("algorithm.clip_ratio"),
            "clip_ratio_low": _key("algorithm.clip_ratio_low"),
            "clip_ratio_high": _key("algorithm.clip_ratio_high"),
            "clip_ratio_c": _key("algorithm.clip_ratio_c"),
            "use_kl_loss": _instead("algorithm.kl_loss_coef = 0.001, say; 0 is none", True, False),
            "kl_loss_coef": _key("algorithm.kl_loss_coef"),
            "kl_loss_type": _key("algorithm.kl_loss_type"),
            "entropy_coeff": _key("algorithm.entropy_coeff"),
            "loss_agg_mode": _key("algorithm.loss_agg_mode"),
            "policy_loss.loss_mode": _one_of("algorithm", {"gspo": "gspo"}, "vanilla"),
            "strategy": _needless("learner.processes and learner.offload say how the model is held"),
            "fsdp_config.param_offload": _key("learner.offload"),
            "fsdp_config.optimizer_offload": _key("learner.offload"),
            "fsdp_config.fsdp_size": _instead(_SHARDS, -1),
            "ulysses_sequence_parallel_size": _instead("sequences are not split among GPUs", 1),
            "use_torch_compile": _needless(_SPEED),
        },
    ),
    **_below(
        _ROLLOUT,
        {
            "name": _one_of("engine.kind", {"vllm": "vllm", "hf": "local"}),
            "mode": _needless("engines answer while other answers are being written"),
            "n": _key("algorithm.num_generations"),
            "temperature": _key("sampling.temperature"),
            "top_p": _key("sampling.top_p"),
            "top_k": TRL["top_k"],
            "response_length": _key(_LENGTH),
            "prompt_length": TRL["max_prompt_length"],
            "tensor_model_parallel_size": _key("engine.tensor_parallel"),
            "gpu_memory_utilization": TRL["vllm_gpu_memory_utilization"],
            "max_num_seqs": _key("engine.max_concurrent"),
            "max_num_batched_tokens": _needless(_SPEED),
            "max_model_len": TRL["vllm_max_model_length"],
            "enforce_eager": _needless(_SPEED),
            "enable_chunked_prefill": _needless(_SPEED),
            "free_cache_engine": TRL["vllm_enable_sleep_mode"],
            "load_format": _needless("weights come from the learner"),
            "dtype": _needless("engines compute in what learner.precision says"),
            "log_prob_micro_batch_size": _needless(_MICRO),
            "log_prob_micro_batch_size_per_gpu": _needless(_MICRO),
            "log_prob_max_token_len_per_gpu": _needless(_MICRO),
            "log_prob_use_dynamic_bsz": _needless(_MICRO),
            "val_kwargs.n": _key("evaluation.samples"),
            "val_kwargs.temperature": _key("evaluation.sampling.temperature"),
            "val_kwargs.top_p": _key("evaluation.sampling.top_p"),
            "val_kwargs.do_sample": _instead("evaluation.sampling.temperature = 0 is greedy, above 0 draws", True),
            "multi_turn.enable": _instead('environment = {kind = "class", use = "path.py:Class"}', False),
            "multi_turn.max_assistant_turns": _key("environment.max_turns"),
        },
    ),
    **_below(
        _REF,
        {
            "log_prob_micro_batch_size": _needless(_MICRO),
            "log_prob_micro_batch_size_per_gpu": _needless(_MICRO),
            "log_prob_max_token_len_per_gpu": _needless(_MICRO),
            "log_prob_use_dynamic_bsz": _needless(_MICRO),
            "fsdp_config.param_offload": _needless("learner.offload is for all weights"),
        },
    ),
    **_below(
        "algorithm",
        {
            "adv_estimator": _ESTIMATOR,
            "gamma": _instead("algorithm.advantage.gamma, where the advantage discounts", 1, 1.0),
            "lam": _instead("algorithm = ppo has algorithm.advantage.policy", 1, 1.0),
            "use_kl_in_reward": _instead("algorithm = reinforce_pp has its KL in the reward", False),
            "kl_ctrl.type": _instead("the coefficient of a KL is fixed", "fixed"),
            "kl_ctrl.kl_coef": _instead("algorithm.beta is the coefficient of a KL in the loss", 0, 0.0),
            "kl_penalty": _instead("algorithm.kl_estimator says how a KL in the loss is estimated", "kl"),
            "filter_groups.enable": _instead("algorithm = dapo draws again for groups without a difference", False),
        },
    ),
    **_below(
        "trainer",
        {
            "total_training_steps": _key("steps"),
            "total_epochs": _instead(_EPOCHS),
            "save_freq": _every("checkpoints.every"),
            "test_freq": _every("evaluation.every"),
            "val_before_train": _key("evaluation.before"),
            "val_only": _one_of("steps", {True: 0}, False),
            "experiment_name": _key("name"),
            "project_name": _needless("a tracker's project is gnomon"),
            "logger": _made("records.sinks, a list", lambda value: {"records.sinks": _listed(value)}),
            "log_val_generations": _needless(_STEPS),
            "rollout_data_dir": _needless(_STEPS),
            "default_local_dir": _instead(_DIRECTORY),
            "resume_mode": _instead("gnomon resume RUN", "auto", "disable"),
            "max_actor_ckpt_to_keep": _key("checkpoints.keep_last"),
            "n_gpus_per_node": _instead(f"{_SHARDS}; engine.count engines have a copy each", 1),
            "nnodes": _instead('cluster = "ray", see docs/scaling.md', 1),
            "critic_warmup": _instead("algorithm = vapo pretrains its critic (algorithm.critic)", 0),
            "balance_batch": _needless(_SPEED),
            "device": _key("device"),
        },
    ),
    "critic.optim.lr": _instead("algorithm = ppo has algorithm.critic.learning_rate"),
    "critic.model.path": _instead("algorithm = ppo has algorithm.critic.initial"),
    "reward_model.enable": _instead('no reward model; rewards = ["path.py:function"] may call one', False),
    "reward_model.reward_manager": _needless("rewards say how an answer is judged"),
    "custom_reward_function.path": _made(
        'rewards = ["PATH:compute_score"]', lambda value: {"rewards": [f"{value}:compute_score"]}
    ),
    "custom_reward_function.name": _instead('rewards = ["PATH:NAME"]', "compute_score"),
}
"""verl's dotted keys."""

_ROLLOUTS = _instead(_MINIBATCHES)

OPENRLHF: Mapping[str, Counterpart] = {
    "pretrain": _key("model"),
    "prompt_data": _key("task"),
    "prompt_split": _key("task.split"),
    "eval_dataset": _key("evaluation.task"),
    "input_key": _key("task.prompt_column"),
    "label_key": _key("task.answer_column"),
    "apply_chat_template": _needless("a model's chat template is used where it has one"),
    "max_samples": _instead("task takes a file of as many rows as are meant"),
    "rollout_batch_size": _key("prompts_per_step"),
    "micro_train_batch_size": _needless(_MICRO),
    "micro_rollout_batch_size": _needless(_MICRO),
    "max_epochs": _key("algorithm.updates.epochs"),
    "num_episodes": _instead(_EPOCHS),
    "generate_max_len": _key(_LENGTH),
    "prompt_max_len": TRL["max_prompt_length"],
    "actor_learning_rate": _key(_RATE),
    "critic_learning_rate": _instead("algorithm = ppo has algorithm.critic.learning_rate"),
    "lr_warmup_ratio": _made(_RATIO, lambda value: {"warmup_ratio": value}),
    "lr_scheduler": _SCHEDULE,
    "l2": _key("learner.optimizer.weight_decay"),
    "adam_betas": _key("learner.optimizer.betas"),
    "max_norm": _NORM,
    "init_kl_coef": _key("algorithm.beta"),
    "use_kl_loss": VERL[f"{_ACTOR}.use_kl_loss"],
    "advantage_estimator": _ESTIMATOR,
    "policy_loss_type": _one_of("algorithm", {"gspo": "gspo"}, "ppo"),
    "eps_clip": _key("algorithm.clip_ratio"),
    "eps_clip_low_high": _made(
        "algorithm.clip_ratio_low and .clip_ratio_high",
        lambda value: (
            dict(zip(("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), value, strict=True))
            if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
            else None
        ),
    ),
    "gamma": VERL["algorithm.gamma"],
    "lambd": VERL["algorithm.lam"],
    "normalize_reward": _instead("algorithm = reinforce_pp whitens advantages", False),
    "remote_rm_url": _instead('rewards = ["path.py:function"]'),
    "save_path": _instead(_DIRECTORY),
    "ckpt_path": _instead(_DIRECTORY),
    "max_ckpt_num": _key("checkpoints.keep_last"),
    "use_wandb": _made("records.sinks (wandb)", lambda value: {"records.sinks": ["wandb"]} if value else None, False),
    "use_tensorboard": _made(
        "records.sinks (tensorboard)", lambda value: {"records.sinks": ["tensorboard"]} if value else None, False
    ),
    "wandb_run_name": _key("name"),
    "zero_stage": _instead(_SHARDS),
    "adam_offload": _key("learner.offload"),
    "lora_rank": _positive("lora.rank"),
    "target_modules": _made("lora.targets, a list", _targets),
    "flash_attn": _needless(_SPEED),
    "packing_samples": _needless("padding changes no result"),
    "colocate_all_models": _needless("gnomon says itself who holds weights (docs/engines.md)"),
    "vllm_num_engines": _positive("engine.count"),
    "vllm_sync_backend": _instead("cluster.transfer says how weights travel"),
    "enforce_eager": _needless(_SPEED),
    "enable_prefix_caching": _needless(_SPEED),
    "async_train": _made("max_staleness (true is 1)", lambda value: {"max_staleness": 1} if value else None, False),
    "dynamic_filtering": VERL["algorithm.filter_groups.enable"],
    **_below(
        "rollout",
        {
            "batch_size": _key("prompts_per_step"),
            "n_samples_per_prompt": _key("algorithm.num_generations"),
            "max_new_tokens": _key(_LENGTH),
            "temperature": _key("sampling.temperature"),
            "top_p": _key("sampling.top_p"),
        },
    ),
    "train.batch_size": _ROLLOUTS,
    "train.max_epochs": _key("algorithm.updates.epochs"),
    "algo.kl.init_coef": _key("algorithm.beta"),
    "algo.kl.estimator": _key("algorithm.kl_estimator"),
    "data.input_key": _key("task.prompt_column"),
    "data.label_key": _key("task.answer_column"),
    "ckpt.best_metric_key": _instead("gnomon evaluate RUN --checkpoint best"),
}
"""OpenRLHF's options, flat and (since 2026) dotted."""

PRIME_RL: Mapping[str, Counterpart] = {
    "model.name": _key("model"),
    "seq_len": _instead(f"{_LENGTH} is for the answer alone; prompts are never cut"),
    "max_async_level": _key("max_staleness"),
    "max_off_policy_steps": _key("max_staleness"),
    "ckpt.interval": _key("checkpoints.every"),
    "ckpt.keep_last": _key("checkpoints.keep_last"),
    "ckpt.keep_interval": _key("checkpoints.keep_every"),
    "ckpt.resume_step": _instead("gnomon resume RUN"),
    "wandb.project": _needless("a tracker's project is gnomon"),
    "wandb.name": _key("name"),
    "trainer.model.name": _key("model"),
    "trainer.optim.lr": _key(_RATE),
    "trainer.optim.weight_decay": _key("learner.optimizer.weight_decay"),
    "trainer.optim.max_norm": _NORM,
    "trainer.optim.betas1": _instead(_BETAS, 0.9),
    "trainer.optim.betas2": _instead(_BETAS, 0.999),
    "trainer.scheduler.type": _SCHEDULE,
    "trainer.scheduler.warmup_steps": _key("learner.optimizer.warmup_steps"),
    "orchestrator.model.name": _key("model"),
    "orchestrator.batch_size": _key("rollouts_per_step"),
    "orchestrator.rollouts_per_example": _key("algorithm.num_generations"),
    "orchestrator.group_size": _key("algorithm.num_generations"),
    "orchestrator.seq_len": _instead(f"{_LENGTH} is for the answer alone; prompts are never cut"),
    "orchestrator.max_async_level": _key("max_staleness"),
    "orchestrator.max_off_policy_steps": _key("max_staleness"),
    "orchestrator.sampling.max_tokens": _key(_LENGTH),
    "orchestrator.sampling.temperature": _key("sampling.temperature"),
    "orchestrator.env": _instead('environment = {kind = "verifiers", use = NAME}, or task = NAME'),
    "orchestrator.eval.interval": _key("evaluation.every"),
    "orchestrator.eval.rollouts_per_example": _key("evaluation.samples"),
    "inference.model.name": _key("model"),
    "inference.parallel.tp": _key("engine.tensor_parallel"),
    "inference.parallel.dp": _key("engine.count"),
    "weight_broadcast.type": _instead("cluster.transfer says how weights travel"),
}
"""prime-rl's keys."""

COMPOSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("group_size", "n", "n_samples", "n_samples_per_prompt", "num_generations_per_prompt"),
        "algorithm.num_generations",
    ),
    "num_generations": "algorithm.num_generations",
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "algorithm.updates.epochs"),
    "ppo_n_minibatches": "algorithm.updates.minibatches",
    "importance_sampling_level": "algorithm.ratio.level",
    "mask_truncated_completions": "algorithm.mask_truncated",
    **dict.fromkeys(("epsilon", "clip_ratio"), "algorithm.surrogate.trust.low and .high"),
    **dict.fromkeys(("clip_low", "clip_ratio_low", "eps_clip_low"), "algorithm.surrogate.trust.low"),
    **dict.fromkeys(
        ("epsilon_high", "clip_high", "clip_ratio_high", "eps_clip_high", "eps_clip_higher"),
        "algorithm.surrogate.trust.high",
    ),
    **dict.fromkeys(("delta", "clip_c", "clip_ratio_c", "c_clip"), "algorithm.surrogate.dual"),
    **dict.fromkeys(
        ("beta", "kl_coef", "kl_coeff", "kl_loss_coef"), "algorithm.regularizers: Kl to the reference, its coefficient"
    ),
    **dict.fromkeys(
        ("kl_estimator", "kl_estimator_type", "kl_loss_type"),
        "algorithm.regularizers: Kl to the reference, its estimator",
    ),
    **dict.fromkeys(("entropy_coef", "entropy_coeff"), "algorithm.regularizers: Entropy, its coefficient"),
    **dict.fromkeys(("scale_rewards", "normalize_std", "norm_adv_by_std_in_grpo"), "algorithm.advantage.scale"),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), "algorithm.aggregate"),
}
"""Names that the algorithm's own composition translates, and what they become."""

FOREIGN: Mapping[str, Counterpart] = {**PRIME_RL, **OPENRLHF, **VERL, **TRL, **COMMON}
SECTIONS = frozenset(name.partition(".")[0] for name in FOREIGN if "." in name) - {"algorithm", "model"}
"""Sections that another library's files have, and that an experiment has not."""
ALIASES: Mapping[str, str] = {
    name: counterpart.key
    for name, counterpart in FOREIGN.items()
    if counterpart.key is not None
    and "." not in name
    and counterpart.key not in DEFERRED
    and not counterpart.key.startswith("algorithm.")
}
"""Other libraries' names at the top of an experiment that are our keys under another name."""
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    f"{_ACTOR}.use_kl_loss": (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    "use_kl_loss": ("kl_loss_coef",),
    "use_peft": ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    "use_vllm": tuple(name for name in TRL if name.startswith("vllm_")),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
}
"""Names that say nothing where another one is false."""
_MORE: Mapping[str, str] = {
    "vllm_importance_sampling_correction": "vllm_importance_sampling_mode",
    "use_kl_loss": "init_kl_coef",
}
"""Names that say nothing when they are true and another one says more."""


_HEAD = """# Names of other libraries

Written by `gnomon config --migration`. A configuration of TRL, verl, OpenRLHF or prime-rl mostly works as it is, in a
TOML file, on the command line (`save_steps=50`, `--save_steps 50`, `trainer.save_freq=50`) and in `gnomon.train(...)`.
Each name is translated and said back, left out because it changes no result, or refused with what to do.
`gnomon config NAME` says what one name is."""
_KEPT = {FOREIGN[name].says for name in DEFERRED}
_TITLES: Mapping[str, Mapping[str, Counterpart]] = {
    "TRL and transformers": TRL,
    "verl": VERL,
    "OpenRLHF": OPENRLHF,
    "prime-rl": PRIME_RL,
    "Short names": COMMON,
}


def as_markdown() -> str:
    """Return the page docs/migrate.md: a table for each library."""
    lines = [_HEAD]
    for title, names in _TITLES.items():
        rows = [f"| `{name}` | {_cell(counterpart)} |" for name, counterpart in names.items()]
        lines += ["", f"## {title}", "", "| name | here |", "|---|---|", *rows]
    composed = [f"| `{name}` | `{says}` |" for name, says in COMPOSED.items()]
    about = "An algorithm says whether it has such a part; a name that says nothing about it is refused."
    return "\n".join(
        [*lines, "", "## Parts of an algorithm", "", about, "", "| name | here |", "|---|---|", *composed, ""]
    )


def _cell(counterpart: Counterpart) -> str:
    if counterpart.key is not None:
        return f"`{counterpart.key}`"
    says = counterpart.says.replace("|", "\\|")
    if counterpart.is_needless:
        return f"left out: {says}"
    return says if counterpart.convert is not None or counterpart.says in _KEPT else f"write instead: {says}"


def translated(pairs: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return settings under our keys, and a sentence for each that had another library's.

    Args:
        pairs: Keys and values as they were written, ours among them.

    Raises:
        ConfigError: Names or values that have no counterpart; the message says what to do, for three at most.

    >>> translated([("save_steps", 50), ("seed", 1)])
    ([('checkpoints.every', 50), ('seed', 1)], ['save_steps = 50 is checkpoints.every = 50'])
    """
    given = [part for name, value in pairs for part in _spread(name, value)]
    off = {each for name, value in given if value is False for each in _SWITCHES.get(name, ())}
    off |= {name for name, value in given if value is True and any(each == _MORE.get(name) for each, _ in given)}
    ours: list[tuple[str, Any]] = []
    notes: list[str] = []
    refused: list[str] = []
    for name, value in given:
        counterpart = FOREIGN.get(name)
        if name in DEFERRED or (counterpart is None and not _is_theirs(name)):
            ours.append((name, value))
        elif counterpart is None:
            refused.append(f"{name}: no counterpart here; leave it out")
        elif name in off or value in _NOTHING:
            notes.append(f"{name} = {_say(value)} is left out")
        elif _is_among(value, counterpart.neutral):
            notes.append(f"{name} = {_say(value)} is left out: it is what gnomon does anyway")
        elif counterpart.is_needless:
            notes.append(f"{name} = {_say(value)} is left out: {counterpart.says}")
        elif (made := counterpart.convert(value) if counterpart.convert else None) is None:
            refused.append(f"{name} = {_say(value)}: {counterpart.says}")
        else:
            ours += made.items()
            notes += [f"{name} = {_say(value)} is {key} = {_say(new)}" for key, new in made.items()]
    if refused:
        more = [f"and {len(refused) - 3} more; docs/migrate.md has all names"] if len(refused) > 3 else []
        raise ConfigError(
            "names of another library have no such setting; instead:\n  " + "\n  ".join([*refused[:3], *more])
        )
    return ours, notes


def taken_out(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """Take other libraries' names and sections out of the table of an experiment, and return them.

    >>> table = {"trainer": {"save_freq": 5}, "seed": 1}
    >>> taken_out(table), table
    ([('trainer', {'save_freq': 5})], {'seed': 1})
    """
    names = [key for key in table if (key in FOREIGN or key in SECTIONS) and key not in DEFERRED]
    names += ["model"] if isinstance(table.get("model"), dict) else []
    found = [(key, table.pop(key)) for key in names]
    algorithm = table.get("algorithm")
    return [*found, *(_below_algorithm(algorithm, "algorithm") if isinstance(algorithm, dict) else [])]


def _below_algorithm(node: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """Take verl's keys out of an algorithm, which has our own keys as well."""
    found: list[tuple[str, Any]] = []
    for key in list(node):
        name = f"{path}.{key}"
        if name in FOREIGN:
            found.append((name, node.pop(key)))
        elif isinstance(node[key], dict):
            inside = _below_algorithm(node[key], name)
            found += inside
            if inside and not node[key]:
                del node[key]
    return found


def _spread(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the keys within a section of another library, with dots."""
    if not isinstance(value, Mapping) or name in FOREIGN or not _is_theirs(f"{name}."):
        return [(name, value)]
    return [part for key, below in value.items() for part in _spread(f"{name}.{key}", below)]


def _is_theirs(name: str) -> bool:
    section, dot, _ = name.partition(".")
    return bool(dot) and section in (*SECTIONS, "model")


def _is_among(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _say(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
