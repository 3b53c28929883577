"""Published training sets, in files of exactly the layout in which they are published."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.rewards.base import Sample
from gnomon.tasks.build import named, named_for_training, named_held_out, own_rewards
from gnomon.tasks.published import PUBLISHED, PublishedTask
from gnomon.tasks.question import ListDataset

ASKED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def dapo(question: str, answer: str, index: str) -> dict[str, Any]:
    """Return a row of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ASKED.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def copies(folder: Path) -> dict[str, Path]:
    """Write a file of each set, with the oddities of the published one."""
    twice = [dapo(f"What is {n}+{n}?", str(2 * n), f"id-{n}") for n in range(3)] * 100
    en = [
        {"prompt": f"What is {n}?", "solution": str(n), "data_source": "math_dapo", "ability": "MATH",
         "source_prompt": [{"content": ASKED.format(f"What is {n}?"), "role": "user"}],
         "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": f"{n}"}}
        for n in range(3)
    ]  # fmt: skip
    deep = [
        {"problem": "One half plus one half?", "answer": "1", "solution": "Add them to get $\\boxed{1}$."},
        {"problem": "Solve $2x=1$.", "answer": "\\frac{1}{2}", "solution": ""},
        {"problem": "Is there an answer?", "answer": "", "solution": "Nobody knows."},
    ]
    gsm = [
        {"question": "Ann has 3 pens and buys 4. How many?", "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
        {"question": "A car costs $1,000 and a tire $80.", "answer": "1,000+80 = 1,080.\n#### 1,080"},
    ]
    math = [
        {"problem": "Find $x$ in $2x=1$.", "level": "Level 1", "type": "Algebra",
         "solution": "Halve: $x=\\boxed{\\frac12}$."},
        {"problem": "What is $1+1$?", "level": "Level ?", "type": "Geometry", "solution": "It is $\\boxed 2$."},
    ]  # fmt: skip
    pyarrow.parquet.write_table(pa.Table.from_pylist(twice), folder / "dapo-math-17k.parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist(en), folder / "en.parquet")
    (folder / "deepscaler.json").write_text(json.dumps(deep))
    pyarrow.parquet.write_table(pa.Table.from_pylist(gsm), folder / "gsm8k.parquet")
    (folder / "math.jsonl").write_text("\n".join(map(json.dumps, math)))
    return {
        "dapo-17k": folder / "dapo-math-17k.parquet", "dapo-17k-en": folder / "en.parquet",
        "deepscaler": folder / "deepscaler.json", "gsm8k": folder / "gsm8k.parquet", "math": folder / "math.jsonl",
    }  # fmt: skip


RIGHT = {
    "dapo-17k": (["The sum is 0.\nAnswer: 0", "Answer: $2$", "So\nAnswer: 4."], "Answer: 5"),
    "dapo-17k-en": ([r"\boxed{0}", r"thus $\boxed{1}$.", r"\boxed{2.0}"], r"\boxed{7}"),
    "deepscaler": ([r"\boxed{1}", r"\boxed{0.5}"], r"\boxed{2}"),
    "gsm8k": (["7", "It costs $1,080."], "It costs $1,081."),
    "math": ([r"\boxed{1/2}", r"\boxed{2}"], r"\boxed{3}"),
}


def judged(name: str, question: Any, completion: str) -> float:
    """Return what the set's own reward says of a completion."""
    (first, *_) = own_rewards(PublishedTask(name))
    return first.judge(Sample(question.text, completion, columns=question.columns))


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_set_is_read_and_judged_as_it_is(tmp_path: Path, name: str):
    """By its name with a copy, each set has its questions once, and its own reward knows right from wrong."""
    asked = named_for_training(f"{name}={copies(tmp_path)[name]}").questions()
    right, wrong = RIGHT[name]

    assert asked.name == name
    assert [judged(name, q, answer) for q, answer in zip(asked.questions, right, strict=True)] == [1.0] * len(right)
    assert [judged(name, q, wrong) for q in asked.questions] == [0.0] * len(right)
    for question, answer in zip(asked.questions, right, strict=True):
        thoughts = (f"<think>{answer}", f"<think>{wrong}</think>{answer}")
        assert [judged(name, question, text) for text in thoughts] == [0.0, 1.0]


def test_the_oddities_are_said(tmp_path: Path):
    """Rows of DAPO are merged, answerless rows of DeepScaleR left out; each with its number in one line."""
    files = copies(tmp_path)
    said = {name: questions(name, files).repeated for name in ("dapo-17k", "deepscaler", "gsm8k", "math")}

    assert said["dapo-17k"].startswith("297 of 300 rows of 'dapo-math-17k' ask the same as an earlier row (row 4 as")
    assert "are merged: 3 prompts remain" in said["dapo-17k"]
    assert said["deepscaler"] == "1 of 3 rows of 'deepscaler' have no answer and are left out"
    assert said["gsm8k"] == said["math"] == ""


def questions(name: str, files: dict[str, Path]) -> ListDataset:
    """Return the questions of a copy."""
    return PublishedTask(name, path=str(files[name])).questions()


def test_the_words_are_the_sets_and_can_be_set(tmp_path: Path):
    """DAPO's rows say where the answer stands, the others get a suffix, and a suffix that is given replaces it."""
    files = copies(tmp_path)

    assert questions("dapo-17k", files)[0].content[-1]["content"] == ASKED.format("What is 0+0?")
    assert questions("math", files)[0].content.endswith("put the final answer in \\boxed{}.")
    own = load("tiny", [f"task=math={files['math']}", "task.suffix= Be brief.", "task.template={question} ({type})"])
    assert own.experiment.task.questions()[0].content == "Find $x$ in $2x=1$. (Algebra) Be brief."


def test_gsm8k_is_trained_on_by_its_training_rows_and_evaluated_on_its_test_rows():
    """As a task the name means the training set, as something to evaluate on the test set."""
    loaded = load("tiny", ["task=gsm8k", "evaluation.task=gsm8k"]).experiment

    assert loaded.task == named_for_training("GSM_8K") == PublishedTask("gsm8k")
    assert loaded.evaluation.task == named("gsm8k") == named_held_out("openai/gsm8k")
    assert loaded.evaluation.task.kind == "benchmark"


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("gsm8k", [{"question": "q", "answer": "none"}] * 3, r"3 of 3 rows have no answer of 'gsm8k' in the column"),
        ("math", [{"problem": "q", "solution": f"{n}"} for n in range(4)], r"4 of 4 rows .* so this is another table"),
        ("deepscaler", [{"question": "q", "answer": "1"}], "problem: missing; the row has question, answer"),
    ],
)
def test_a_copy_of_something_else_is_refused(tmp_path: Path, name: str, rows: list[Any], said: str):
    """Rows without the set's columns, or mostly without its answers, are not trained on."""
    file = tmp_path / "copy.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))

    with pytest.raises(DatasetError, match=said):
        PublishedTask(name, path=str(file), repeated="keep").questions()


def test_names_and_copies_that_are_not_there(tmp_path: Path):
    """A misspelt set gets the nearest name; without a network and a copy the message says how to bring one."""
    with pytest.raises(ConfigError, match="did you mean 'dapo-17k'"):
        PublishedTask("dapo17")
    with pytest.raises(ConfigError, match="did you mean 'deepscaler'"):
        named_for_training("deepscalar")
    with pytest.raises(DatasetError, match=r"is DigitalLearningGmbH/MATH-lighteval .* name it as task=math=FILE"):
        PublishedTask("math").questions()
    with pytest.raises(DatasetError, match="does not exist"):
        PublishedTask("math", path=str(tmp_path / "no.jsonl")).questions()


@pytest.mark.parametrize("name", ["dapo-17k", "math", "aime-24", "ifeval"])
def test_another_table_under_a_sets_name_is_told_the_columns_of_the_set(name: str, tmp_path: Path):
    """Its columns cannot be named otherwise, so no setting is proposed that would be refused."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "1+1=", "label": "2"}))

    with pytest.raises(
        DatasetError, match=rf"bring a copy of '{name}' as it was published, with '(prompt|problem)'"
    ) as e:
        named(f"{name}={file}").questions()
    assert "task.prompt_column" not in str(e.value)
