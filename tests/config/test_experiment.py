"""Experiments: what is written is what is read, whatever folder and order."""

import itertools
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.random_model import RANDOM

from gnomon.algorithms import GRPO, NAMED, Algorithm, TruncatedIS
from gnomon.config.experiment import (
    Experiment,
    Loaded,
    from_table,
    load,
    supervised,
    to_toml,
    with_absolute_paths,
)
from gnomon.config.reading import built_in, parse_override, read
from gnomon.core.errors import ConfigError, ModelError
from gnomon.core.sections import EngineConfig, EvalSampling, GrammarConfig
from gnomon.core.tables import members
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.tasks.benchmarks import BenchmarkTask
from gnomon.tasks.build import MixtureTask
from gnomon.tasks.published import PublishedTask
from gnomon.tasks.reasoning import ReasoningGymTask
from gnomon.tasks.tables import TableTask


@pytest.mark.parametrize("name", sorted(built_in()))
def test_a_built_in_experiment_comes_back_from_its_record(name: str, tmp_path: Path):
    """`load` of what `to_toml` writes is the same experiment."""
    experiment = load(name).experiment
    record = tmp_path / "experiment.toml"
    record.write_text(to_toml(experiment))

    assert load(record).experiment == experiment


@pytest.mark.parametrize("preset", sorted(NAMED))
def test_every_preset_comes_back_from_its_record(preset: str):
    """Choosing a name alone is enough, and its record says everything."""
    experiment = load(RANDOM, [f"algorithm={preset}"]).experiment

    assert from_table(json.loads(json.dumps(_table(to_toml(experiment))))).experiment == experiment


def _table(text: str) -> dict[str, object]:
    import tomllib

    return tomllib.loads(text)


def test_overrides_may_come_in_any_order():
    """What is said of a part holds, whether it stands before or after the whole."""
    one = load(RANDOM, ["algorithm=spo", "algorithm.tracker.initial=prior"]).experiment
    other = load(RANDOM, ["algorithm.tracker.initial=prior", "algorithm=spo"]).experiment

    assert one == other
    assert one.algorithm.tracker is not None
    assert one.algorithm.tracker.initial == "prior"


@pytest.mark.parametrize(
    "overrides", list(itertools.permutations(["correction=Truncated", "correction.level=sequence"]))
)
def test_a_field_of_a_piece_needs_no_table(overrides: tuple[str, ...]):
    """A piece by its name and a field of it in an override of its own, in both orders."""
    experiment = load(RANDOM, [f"algorithm.{override}" for override in overrides]).experiment

    assert experiment.algorithm.correction == TruncatedIS(level="sequence")


def test_a_key_twice_is_said():
    """The last one counts, and a note names both values."""
    loaded = load(RANDOM, ["steps=3", "algorithm=spo", "steps=4"])

    assert loaded.experiment.steps == 4
    assert loaded.notes == ("steps is given 2 times, and the last counts: 3, then 4",)


def test_a_step_has_a_rollout_for_every_update():
    """As many minibatches as rollouts are the most; the numbers are both named."""
    most = load(RANDOM, ["algorithm.updates.minibatches=64", "rollouts_per_step=64"]).experiment

    assert most.algorithm.updates.total == most.rollouts_per_step
    with pytest.raises(ConfigError, match=r"updates\.minibatches = 65 are more than the 64 rollouts"):
        load(RANDOM, ["algorithm.updates.minibatches=65", "rollouts_per_step=64"])


@pytest.mark.parametrize("text", ['{piece="TruncatedIS"', '"TruncatedIS', "['a'", "{piece=Truncated}", "{}}"])
def test_toml_that_does_not_close_is_no_text(text: str):
    """What begins with a bracket or a quote is meant as TOML, and the message shows what the parser said."""
    with pytest.raises(ConfigError, match=r"is not TOML: .*is a bracket or a quote missing"):
        load(RANDOM, [f"algorithm.correction={text}"])


def test_a_template_may_begin_with_its_question():
    """A name in braces begins no table of TOML, so it is text without quotes of its own."""
    assert parse_override("sampling.grammar.regex=[12]{3}") == ("sampling.grammar.regex", "[12]{3}")
    for key in ("system", "task.template", "rewards.0.pattern", "evaluation.sampling.grammar.regex"):
        assert parse_override(f"{key}=[12]") == (key, "[12]")
    assert parse_override("name=3") == ("name", 3)  # which is refused as no text
    assert parse_override("packages=[12]") == ("packages", [12])
    assert parse_override('sampling.grammar.regex="a=b"') == ("sampling.grammar.regex", "a=b")
    assert parse_override("task.template={question} Think: x = ?") == ("task.template", "{question} Think: x = ?")


def test_a_reward_may_be_the_name_of_a_function_alone():
    """`rewards = ["mine.py:score"]` is a weighted reward of kind "function"."""
    table = {**read(RANDOM), "rewards": ["mine.py:score"]}

    assert from_table(table).experiment.rewards[0].verifier.kind == "function"


def test_named_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run's record names its files so that it can be resumed from any folder; other names stay."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(prompt, completion): return 1.0\n")
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    table = {**read(RANDOM), "rewards": ["mine.py:score", "package.module:other"], "task": "rows.jsonl"}

    experiment = with_absolute_paths(from_table(table).experiment)

    assert experiment.task.path == str(tmp_path / "rows.jsonl")
    assert [r.verifier.function for r in experiment.rewards] == [f"{tmp_path}/mine.py:score", "package.module:other"]


@pytest.mark.parametrize("override", ["steps", "=3", "a b=3", "steps=", "1x=2"])
def test_an_override_that_cannot_be_read_is_refused(override: str):
    """The message shows what an override looks like."""
    with pytest.raises(ConfigError, match=r"override|steps"):
        load(RANDOM, [override])


def test_a_step_is_a_whole_number_of_groups():
    """The message says which number would do."""
    with pytest.raises(ConfigError, match=r"not a multiple of the 8 rollouts .* try 64"):
        load(RANDOM, ["rollouts_per_step=63"])


def test_other_spellings_are_understood_and_said_back():
    """prompts_per_step counts prompts; here a step is counted in rollouts."""
    loaded = load(RANDOM, ["prompts_per_step=4", "max_new_tokens=5"])

    assert loaded.experiment.rollouts_per_step == 32
    assert loaded.experiment.sampling.max_completion_length == 5
    assert len(loaded.notes) == 2


def test_what_is_the_algorithms_may_stand_at_the_top():
    """TRL's and verl's files name num_generations and epsilon_high beside the model; both are understood."""
    loaded = load(RANDOM, ["num_generations=4", "epsilon_high=0.28"])

    assert loaded.experiment.algorithm.num_generations == 4
    assert any("epsilon_high" in note for note in loaded.notes)


@pytest.mark.parametrize("overrides", list(itertools.permutations(["engine=vllm", "engine.max_concurrent=8"])))
def test_an_engine_may_be_named_by_a_text(overrides: tuple[str, ...]):
    """`engine = "vllm"` is `engine.kind`, in TOML and as an override in any order, and keeps what else is said."""
    experiment = load(RANDOM, overrides).experiment
    table = read(RANDOM) | {"engine": "vllm"}

    assert (experiment.engine.kind, experiment.engine.max_concurrent) == ("vllm", 8)
    assert from_table(table, ["engine.count=2"]).experiment.engine == EngineConfig("vllm", count=2)
    assert from_table(table, ["engine=local"]).experiment.engine == EngineConfig()
    with pytest.raises(ConfigError, match=r"engine\.kind = 'vlm'"):
        load(RANDOM, ["engine=vlm"])


def test_another_kind_of_task_leaves_the_keys_of_the_recipe_behind():
    """`task.kind=table` is no mistake about `lowest`, which the recipe says; what is left out is told."""
    for more in (["task.kind=table", "task.path=a.jsonl"], ["task.path=a.jsonl", "task.kind=table"]):
        loaded = load(RANDOM, more)
        assert loaded.experiment.task == TableTask("a.jsonl")
        assert any("so lowest, highest of that are left out" in note for note in loaded.notes)
    with pytest.raises(ConfigError, match="task: missing path"):
        load(RANDOM, ["task.kind=table"])
    assert load(RANDOM, ["task.kind=arithmetic"]).experiment.task == load(RANDOM).experiment.task


def test_an_adapter_goes_on_upon_a_base_in_few_bits(tmp_path: Path):
    """As the model or beside it; its own settings are not doubted by what it cannot say, and must be possible."""
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**written, "base_model_name_or_path": "tiny"}))
    named = [f"lora={{adapter='{tmp_path}', base='nf4'}}"]
    for overrides in (named, [f"model={tmp_path}", "lora.base=nf4"]):
        experiment = load(RANDOM, overrides).experiment
        assert experiment.model == "tiny"
        assert experiment.lora is not None
        assert (experiment.lora.base, experiment.lora.rank, experiment.lora.adapter) == ("nf4", 4, str(tmp_path))
    with pytest.raises(ConfigError, match=r"lora: unknown key 'bse'; did you mean 'base'"):
        load(RANDOM, [f"lora={{adapter='{tmp_path}', bse='nf4'}}"])
    for wrong in ({"r": 0}, {"r": -4}, {"lora_alpha": 0}, {"lora_alpha": float("nan")}, {"lora_alpha": float("inf")}):
        config.write_text(json.dumps({**written, **wrong}))
        with pytest.raises(ModelError, match=r"json': (r|lora_alpha) is .*, and should be a (whole )?number above 0"):
            load(RANDOM, named)


def test_an_experiment_made_in_python_takes_words_and_tables():
    """What a file says by a word or a table, and the tables of the caller stay as they are."""
    evaluation = {"task": "gsm8k"}
    made = Experiment(
        model="tiny",
        task="arithmetic",
        algorithm={"preset": "grpo", "num_generations": 4},
        rewards=["numeric", {"kind": "exact", "weight": 0.5}],
        learner={"processes": 2},
        engine="vllm",
        packages="numpy",
        evaluation=evaluation,
    )

    assert (made.prompts_per_step, made.learner.processes, made.engine.kind, made.packages) == (
        16,
        2,
        "vllm",
        ("numpy",),
    )
    assert [(reward.verifier.kind, reward.weight) for reward in made.rewards] == [("numeric", 1.0), ("exact", 0.5)]
    assert evaluation == {"task": "gsm8k"}
    assert Experiment("tiny", "arithmetic", "grpo") == Experiment("tiny", made.task, GRPO)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"algorithm": 3}, "algorithm = 3: should be the name of a preset"),
        ({"task": "arithmetik"}, "did you mean 'arithmetic'"),
        ({"steps": "10"}, "steps = '10': should be a whole number; write 10"),
        ({"seed": True}, "seed = True: should be a whole number"),
        ({"model": None}, "model = None: should be text"),
        ({"lora": 16}, "lora = 16: should be a table"),
        ({"learner": {"proceses": 2}}, "did you mean 'processes'"),
        ({"engine": "vlm"}, "engine.kind = 'vlm': should be"),
        ({"rewards": 5}, r"rewards\[0\] = 5: should be a table"),
        ({"held_out": 3}, "held_out = 3: should be a table"),
        ({"lora": LoraConfig(targets=3)}, r"lora\.targets\[0\] = 3: should be text"),  # type: ignore[arg-type]
        ({"learner": LearnerConfig(processes="2")}, r"learner\.processes = '2': should be a whole number; write 2"),  # type: ignore[arg-type]
        ({"steps": {}}, "steps = {}: should be a whole number"),
    ],
)
def test_what_is_wrong_with_an_experiment_made_in_python_is_said(given: dict[str, Any], said: str):
    """In the words of a file, when it is made."""
    with pytest.raises(ConfigError, match=said):
        Experiment(**{"model": "tiny", "task": "arithmetic", "algorithm": "grpo", **given})


WRONG_TYPES = (None, "x", 3, 2.5, True, [], {}, ["a"], [None], {"a": 1}, object())
NEEDED = {TableTask: {"path": "x.jsonl"}, PublishedTask: {"set": "gsm8k"}, BenchmarkTask: {"benchmark": "gsm8k"}}


@pytest.mark.parametrize("make", [from_table, supervised])
def test_a_table_that_no_file_can_hold_is_refused(make: Callable[[Any], Loaded]):
    """One that holds itself, and one with a key that is no text."""
    circular: dict[str, Any] = {"algorithm": "sft"}
    circular["task"] = circular
    for table in (circular, {"algorithm": "sft", ("model",): "tiny"}):
        with pytest.raises(ConfigError, match="texts, numbers, lists and tables, and this one cannot be read"):
            make(table)


def test_a_section_made_in_python_names_the_field_of_another_type():
    """Every field of every section and task with eleven values: made, or a ConfigError, and never a bare error."""
    hints = [hint for each in get_type_hints(Experiment).values() for hint in members(each) if is_dataclass(hint)]
    sections = [hint for hint in hints if isinstance(hint, type) and hint not in (Algorithm, MixtureTask)]
    bare: list[str] = []
    for section in [*sections, GrammarConfig, EvalSampling, OptimizerConfig]:
        needed: dict[str, Any] = {"generator": "chain_sum"} if section is ReasoningGymTask else NEEDED.get(section, {})
        for f in (f for f in fields(section) if f.init):
            for value in WRONG_TYPES:
                try:
                    section(**{**needed, f.name: value})
                except ConfigError:
                    continue
                except Exception as error:
                    bare.append(f"{section.__name__}({f.name}={value!r}): {type(error).__name__}: {error}")

    assert len(sections) > 15
    assert bare == []


def test_a_wrong_place_of_an_answer_names_the_key_that_was_typed():
    """`extract` is written as `within`, which the user never typed."""
    with pytest.raises(ConfigError, match=r"rewards: unknown extract 'last_bx'.*'last_box'"):
        load("tiny", ['rewards=[{kind="numeric", extract="last_bx"}]'])
