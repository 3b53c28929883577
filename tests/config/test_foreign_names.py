"""Other libraries' names: understood and said back, or answered with what to do."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.algorithms import MaskedIS
from gnomon.algorithms.aliases import ALIASES as COMPOSITION
from gnomon.cli.main import main
from gnomon.config.experiment import from_table, load
from gnomon.config.foreign_names import (
    ALIASES,
    COMMON,
    COMPOSED,
    DEFERRED,
    FOREIGN,
    OPENRLHF,
    PRIME_RL,
    SECTIONS,
    TRL,
    VERL,
    as_markdown,
    translated,
)
from gnomon.config.reading import parse_override, read
from gnomon.config.reference import named, settings
from gnomon.core.errors import ConfigError
from gnomon.core.tables import set_path

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
TABLE = Path(__file__).parents[2] / "src" / "gnomon" / "config" / "foreign_names.toml"
# The fields of TRL's GRPOConfig (main, August 2026), and the fields of TrainingArguments that GRPO scripts set.
GRPO_CONFIG = re.findall(
    r"\w+",
    """
model_init_kwargs disable_dropout cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset generation_batch_size steps_per_generation temperature
top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty use_transformers_paged cache_implementation
use_vllm vllm_mode vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
vllm_enable_sleep_mode beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap
off_policy_mask_threshold use_bias_correction_kl log_completions num_completions_to_print log_unique_prompts
log_completions_hub_repo learning_rate gradient_checkpointing bf16 logging_steps
""",
)
ARGUMENTS = re.findall(
    r"\w+",
    """
output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps warmup_ratio warmup_steps
lr_scheduler_type max_grad_norm weight_decay adam_beta1 adam_beta2 adam_epsilon optim fp16 tf32 save_steps save_strategy
save_total_limit eval_steps eval_strategy per_device_eval_batch_size report_to run_name seed push_to_hub hub_model_id
deepspeed fsdp dataloader_num_workers resume_from_checkpoint max_prompt_length use_peft lora_r lora_alpha lora_dropout
lora_target_modules model_name_or_path torch_dtype attn_implementation dataset_name use_liger_kernel
""",
)


@pytest.mark.parametrize("names", [GRPO_CONFIG, ARGUMENTS], ids=["GRPOConfig", "TrainingArguments"])
def test_every_name_of_trl_is_known(names: list[str]):
    """All 64 fields of GRPOConfig, and 42 of TrainingArguments and TRL's scripts, are names that are answered."""
    own = {setting.key for setting in settings()}
    lacking = [name for name in names if name not in {*FOREIGN, *COMPOSED, *own}]

    assert lacking == []
    assert len(names) >= 42


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_every_name_is_answered(name: str):
    """Any value ends in settings, in a note or in a refusal that says what to do; no name is dropped in silence."""
    for value in (True, 3, "grpo"):
        pairs, notes, refused = [], [], ""
        try:
            pairs, notes = translated([(name, value)])
        except ConfigError as error:
            refused = str(error)
        assert notes or pairs == [(name, value)] or (f"{name} = " in refused and FOREIGN[name].says in refused)
        assert name in DEFERRED or all(key not in FOREIGN or key in DEFERRED for key, _ in pairs)


def test_our_keys_are_nobody_elses():
    """No setting of ours is in the table, no name has two meanings, and what it names exists."""
    keys = {setting.key for setting in settings()}
    tables = (TRL, VERL, OPENRLHF, PRIME_RL, COMMON)
    twice = [n for n in FOREIGN if len({table[n].says for table in tables if n in table}) > 1]
    wrong = [n for n, c in FOREIGN.items() if c.key and c.key not in {*keys, *DEFERRED} and "algorithm." not in c.key]

    assert keys & set(FOREIGN) == set()
    assert {key.partition(".")[0] for key in keys} & SECTIONS == set()
    assert set(COMPOSED) == {*COMPOSITION, "num_generations"}
    assert (twice, wrong) == ([], [])


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("lr=1e-3", "learner.optimizer.learning_rate", 1e-3),
        ("save_steps=7", "checkpoints.every", 7),
        ("eval_steps=7", "evaluation.every", 7),
        ("max_grad_norm=0.5", "learner.optimizer.max_gradient_norm", 0.5),
        ("lr_scheduler_type=cosine", "learner.optimizer.schedule", "cosine"),
        ("bf16=True", "learner.precision", "bf16"),
        ("bf16=false", "learner.precision", "fp32"),
        ("use_vllm=true", "engine.kind", "vllm"),
        ("report_to=none", "records.sinks", ()),
        ("warmup_ratio=0.1", "learner.optimizer.warmup_steps", 6),
        ("actor_rollout_ref.actor.optim.lr=2e-6", "learner.optimizer.learning_rate", 2e-6),
        ("load_in_4bit=true", "lora.base", "nf4"),
        ("load_in_8bit=true", "lora.base", "int8"),
        ("optim=paged_adamw_8bit", "learner.optimizer.moments", "8bit"),
        ("actor_rollout_ref.rollout.n=4", "algorithm.num_generations", 4),
        ("data.train_batch_size=4", "rollouts_per_step", 32),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.updates.minibatches", 4),
        ("trainer.save_freq=-1", "checkpoints.every", 0),
        ("trainer={test_freq = 3}", "evaluation.every", 3),
        ("algorithm.adv_estimator=rloo", "algorithm.name", "rloo"),
        ("rollout_batch_size=2", "rollouts_per_step", 16),
        ("advantage_estimator=group_norm", "algorithm.name", "grpo"),
        ("generate_max_len=5", "sampling.max_completion_length", 5),
        ("orchestrator.sampling.max_tokens=5", "sampling.max_completion_length", 5),
        ("ckpt.interval=4", "checkpoints.every", 4),
        ("max_async_level=2", "max_staleness", 2),
    ],
)
def test_a_name_is_its_counterpart(override: str, path: str, value: object):
    """The setting has the value, in an override and in a file, and a note names both."""
    name = override.partition("=")[0].partition(".")[0]
    loaded = load(RANDOM, [override])
    found: object = loaded.experiment
    for part in path.split("."):
        found = getattr(found, part)

    assert found == value
    assert any(note.startswith(name) for note in loaded.notes)


def test_a_file_of_verl_is_understood():
    """Nested sections of a file, with verl's algorithm beside ours; a switch that is off takes its names with it."""
    theirs = {
        "data": {"train_batch_size": 4, "max_response_length": 5},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": 2e-6}, "use_kl_loss": False, "kl_loss_coef": 0.001, "entropy_coeff": 0},
            "rollout": {"n": 4, "name": "vllm", "log_prob_micro_batch_size_per_gpu": 8},
        },
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "use_kl_in_reward": False},
        "trainer": {"logger": ["console"], "total_training_steps": 9, "n_gpus_per_node": 1},
    }
    table = {"model": "tiny", "task": "arithmetic", **theirs}
    experiment = from_table(table).experiment

    assert (experiment.steps, experiment.rollouts_per_step, experiment.engine.kind) == (9, 16, "vllm")
    assert (experiment.algorithm.name, experiment.algorithm.regularizers) == ("grpo", ())
    assert experiment.algorithm.advantage.scale == "none"  # type: ignore[union-attr]


def test_what_the_command_line_says_counts_over_another_name_in_the_file():
    """A file's learning_rate does not undo an override of our own key; two names in one file are refused."""
    table = {**read(RANDOM), "learning_rate": 1e-3}
    path = "learner.optimizer.learning_rate"
    table["learner"].pop("optimizer", None)

    assert from_table(table, [f"{path}=1e-5"]).experiment.learner.optimizer.learning_rate == 1e-5
    with pytest.raises(ConfigError, match=rf"{path} is given twice under two names: 0.001 and 0.002"):
        from_table({**table, "lr": 2e-3})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("per_device_train_batch_size=4", "rollouts_per_step = per_device_train_batch_size"),
        ("batch_size=4", "prompts_per_step its prompts"),
        ("fp16=true", 'learner.precision = "bf16"'),
        ("output_dir=out", "--run-dir DIR"),
        ("repetition_penalty=1.1", "no penalty"),
        ("optim=sgd", "AdamW is the only optimizer"),
        ("trainer.n_gpus_per_node=8", "learner.processes = N"),
        ("trainer.no_such_name=8", "trainer.no_such_name: no counterpart"),
        ("model.no_such_name=8", "model.no_such_name: no counterpart"),
        ("zero_stage=3", "FSDP2"),
        ("ppo_mini_batch_size=7", "is no multiple"),
        ("warmup_ratio=3", "should be a share of the steps"),
    ],
)
def test_what_cannot_be_is_answered_with_what_to_do(override: str, said: str):
    """A refusal names what was written, and what to write."""
    with pytest.raises(ConfigError) as error:
        load(RANDOM, [override])

    assert said in str(error.value)
    assert override.partition("=")[0] in str(error.value)


def test_many_names_are_refused_at_once_in_five_lines():
    """Three are answered, the others counted."""
    names = ["fp16=true", "optim=sgd", "output_dir=o", "deepspeed=a", "batch_size=3"]
    with pytest.raises(ConfigError, match="and 2 more; docs/migrate") as error:
        load(RANDOM, names)

    assert str(error.value).count("\n") == 4


def test_neutral_values_are_left_out_aloud():
    """What gnomon does anyway is no mistake: TRL's defaults of what does not exist here pass with a note."""
    loaded = load(RANDOM, ["repetition_penalty=1.0", "fp16=False", "logging_steps=10", "lora_dropout=0"])

    assert loaded.experiment == load(RANDOM).experiment
    assert len(loaded.notes) == 4


def test_trls_correction_has_trls_bounds():
    """The default mode of TRL is a mask at 3; a mode says more than the switch."""
    switch = load(RANDOM, ["vllm_importance_sampling_correction=true"]).experiment
    mode = ["vllm_importance_sampling_correction=true", "vllm_importance_sampling_mode=token_mask"]

    assert switch.algorithm.correction == MaskedIS(0.0, 3.0, "sequence")
    assert load(RANDOM, mode).experiment.algorithm.correction == MaskedIS(0.0, 3.0, "token")


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    """docs/migrate.md is up to date: `gnomon config --migration > docs/migrate.md` writes it."""
    assert main(["config", "--migration"]) == 0
    assert capsys.readouterr().out == as_markdown() == PAGE.read_text()


@pytest.mark.parametrize("name", ["save_steps", "warmup_steps", "eval_steps", "logging_steps", "use_peft", "lr"])
def test_no_known_name_is_taken_for_a_slip(name: str):
    """`gnomon config NAME` finds our setting, or says what to do; it never guesses by letters."""
    said, key = "another library's name", ""
    try:
        key = named(name)[0].key
    except ConfigError as error:
        said = str(error)

    assert key in {"", *ALIASES.values()}
    assert "another library's name" in said
    assert "did you mean" not in said


def test_what_a_name_becomes_is_made_anew():
    """A value that a name becomes may be changed by its reader: the next experiment gets another one."""
    first, second = (dict(translated([("use_peft", True), ("use_wandb", "key")])[0]) for _ in range(2))
    first["lora"]["rank"] = 3
    first["records.sinks"].append("x")

    assert second == {"lora": {}, "records.sinks": ["wandb"]}


def test_every_text_of_the_table_is_used_once_at_least():
    """A text that several names share is written once, and none is left that no name shows."""
    texts = tomllib.loads(TABLE.read_text(encoding="utf-8"))["texts"]

    assert [name for name in texts if f'"@{name}"' not in TABLE.read_text(encoding="utf-8")] == []


LORA, ADAM = {"lora": {"rank": 8}}, {"learner": {"optimizer": {"betas": [0.8, 0.95]}}}


@pytest.mark.parametrize(
    ("table", "override", "said"),
    [
        ({"algorithm": "ppo"}, "algorithm.lam=1.0", "set algorithm.advantage.of.policy_lambda.value = 1"),
        ({"algorithm": "vapo"}, "trainer.critic_warmup=0", "set algorithm.critic.pretraining = none"),
        ({"algorithm": "reinforce_pp"}, "algorithm.use_kl_in_reward=false", "set algorithm.advantage.of.kl = 0"),
        ({"algorithm": "reinforce_pp_baseline"}, "actor_rollout_ref.actor.use_kl_loss=false", "regularizers.0.anchor"),
        ({"algorithm": "dapo"}, "dynamic_filtering=false", "set algorithm.keep = none"),
        ({"algorithm": "gspo"}, "policy_loss_type=ppo", "set algorithm.ratio.level = 'token'"),
        ({"algorithm": "reinforce", "algorithm.advantage.gamma": 0.9}, "gamma=1", "set algorithm.advantage.gamma = 1"),
        (LORA, "use_peft=false", "has lora.rank = 8; change one"),
        (LORA, "lora_r=0", "has lora.rank = 8; change one"),
        ({"lora": {"base": "nf4"}}, "load_in_4bit=false", "set lora.base = 'unquantized'"),
        (ADAM, "adam_beta1=0.9", r"betas.0 = 0.8; write learner.optimizer.betas = \[beta1, beta2\]"),
    ],
)
def test_a_neutral_value_is_refused_where_the_experiment_says_otherwise(table: dict, override: str, said: str):
    """What is left out as "what gnomon does anyway" is what this experiment does, whatever its preset and its file."""
    pairs = [f"{key}={value}" for key, value in table.items() if "." in key or isinstance(value, str)]
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    given = {**read("quickstart"), **tables}
    with pytest.raises(ConfigError, match=said):
        from_table(given, [*pairs, "rollouts_per_step=64", override])


def test_a_switch_that_is_off_turns_a_setting_of_the_file_off():
    """False is a value like any other where the file says true; true alone has the other library's coefficient."""
    table = read("quickstart") | {"max_staleness": 2, "records": {"sinks": ["wandb"]}}
    made = from_table(table, ["async_train=false", "use_wandb=false", "actor_rollout_ref.actor.use_kl_loss=true"])
    assert (made.experiment.max_staleness, made.experiment.records.sinks) == (0, ())
    assert [term.coefficient for term in made.experiment.algorithm.regularizers] == [0.001]


@pytest.mark.parametrize(
    ("older", "override", "path", "value"),
    [
        ({"num_generations": 8}, "algorithm.num_generations=4", "algorithm.num_generations", 4),
        ({"prompts_per_step": 4}, "rollouts_per_step=32", "rollouts_per_step", 32),
        ({"data": {"train_batch_size": 4}}, "rollouts_per_step=32", "rollouts_per_step", 32),
        ({"warmup_ratio": 0.1}, "learner.optimizer.warmup_steps=5", "learner.optimizer.warmup_steps", 5),
        ({"ppo_mini_batch_size": 2}, "algorithm.updates.minibatches=1", "algorithm.updates.minibatches", 1),
        ({"rollouts_per_step": 64}, "prompts_per_step=2", "rollouts_per_step", 16),
    ],
)
def test_the_command_line_counts_over_what_a_file_says_in_other_words(
    older: dict, override: str, path: str, value: int
):
    """A name that is worked out last does not undo the setting on the command line that it would become."""
    table = {"model": "tiny", "task": "arithmetic", "algorithm": "grpo", **older}
    found = from_table(table, [override]).experiment
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    "given",
    [
        ("prompts_per_step=4", "rollouts_per_step=64"),
        ("warmup_ratio=0.1", "warmup_steps=5"),
        ("ppo_mini_batch_size=2", "algorithm.updates.minibatches=3"),
        ("num_generations=4", "algorithm.num_generations=8"),
        ("beta=0.1", "kl_coef=0.3"),
        ("kl_loss_type=k1", "kl_estimator=k3"),
        ("entropy_coef=0.1", "entropy_coeff=0.2"),
    ],
)
def test_two_names_for_one_thing_do_not_say_two_values(given: tuple[str, str]):
    """Two names for one thing with two values in one place are refused, on the command line and in a file."""
    table = {"model": "tiny", "task": "arithmetic", "algorithm": {"preset": "grpo"}}
    said = r"say the same in two ways|given twice under two names"
    with pytest.raises(ConfigError, match=said):
        from_table(table, given)
    for key, value in map(parse_override, given):
        set_path(table, key, value)
    with pytest.raises(ConfigError, match=said):
        from_table(table)
