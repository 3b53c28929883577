"""Published test sets: their names, columns and verifiers, on local rows of the published form."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gnomon.config.experiment import anchored, from_table, to_toml
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.rewards.base import Sample
from gnomon.rewards.grading import Grading
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.benchmarks import BENCHMARKS, BenchmarkTask
from gnomon.tasks.build import build_held_out, build_split, named
from gnomon.tasks.split import HeldOut

# Rows of our own in the published form: column names and kinds as the dataset cards have them.
ROWS: Mapping[str, dict[str, Any]] = {
    "gsm8k": {
        "question": "Ann has 3 boxes of 400 pens and gives away 120. How many are left?",
        "answer": "There are 3 * 400 = <<3*400=1200>>1200.\nShe keeps 1200 - 120 = <<1200-120=1080>>1080.\n#### 1,080",
    },
    "math-500": {
        "problem": "Compute $\\frac{1}{4} + \\frac{1}{4}$.",
        "solution": "The sum is $\\frac{2}{4} = \\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}", "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json",
    },
    "aime-24": {
        "id": 60, "problem": "Find the remainder of $2^{10}$ divided by $1000$.",
        "solution": "It is $1024 - 1000 = 24$. There are 7 steps.", "answer": "024", "url": "https://x", "year": "2024",
    },
    "aime-25": {"problem": "Find the number of primes below $100$.", "answer": "25", "id": "0"},
    "beyond-aime": {"problem": "Find $12345 \\cdot 2$.", "answer": 24690},
}  # fmt: skip
RIGHT = {
    "gsm8k": "She keeps 1,080 pens in the end.",
    "math-500": "It is $0.5$, so \\boxed{\\frac{2}{4}}.",
    "aime-24": "Therefore \\boxed{24}.",
    "aime-25": "The answer is \\boxed{25}.",
    "beyond-aime": "So \\boxed{24690}.",
}
WRONG = {name: text.replace("1,080", "1,081").replace("\\boxed{", "\\boxed{9") for name, text in RIGHT.items()}


def as_bytes(question: object, further: object = None) -> tuple[int, ...]:
    return tuple(str(question).encode())


def copy(folder: Path, name: str) -> str:
    """Write a local copy of one row and return NAME=PATH."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n")
    return f"{name}={path}"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_local_copy_is_asked_and_judged(tmp_path: Path, name: str):
    """The right column is asked and the right one compared: a right answer scores 1, a wrong one and none score 0."""
    (question,) = named(copy(tmp_path, name)).questions()
    grading = Grading(BENCHMARKS[name].rewards)
    verdicts = [
        grading(Sample(question.text, text, columns=question.columns)) for text in (RIGHT[name], WRONG[name], "?")
    ]

    assert question.text in (ROWS[name].get("question"), ROWS[name].get("problem"))
    assert str(question.content).startswith(question.text)
    assert str(question.content).endswith(BENCHMARKS[name].suffix)
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0]
    assert [v.parts["format"] for v in verdicts] == [1.0, 1.0, 0.0]
    assert len({v.answer for v in verdicts}) == 3


@pytest.mark.parametrize(
    ("said", "name"),
    [("gsm8k", "gsm8k"), ("openai/gsm8k", "gsm8k"), ("MATH500", "math-500"), ("HuggingFaceH4/MATH-500", "math-500"),
     ("aime24", "aime-24"), ("HuggingFaceH4/aime_2024", "aime-24"), ("aime-25", "aime-25"),
     ("BeyondAIME", "beyond-aime"), ("ByteDance-Seed/BeyondAIME", "beyond-aime")],
)  # fmt: skip
def test_names_and_hub_names(said: str, name: str):
    """In any spelling; a path makes it a local copy."""
    assert named(said) == BenchmarkTask(name)
    assert named(f"{said}=x.jsonl") == BenchmarkTask(name, path="x.jsonl")


def test_a_subset_of_the_hub_is_a_table():
    """GSM8K's training split is named as any dataset is."""
    assert named("openai/gsm8k:main:train").kind == "table"


def test_an_unknown_benchmark_says_the_nearest():
    """By name in a task's table, and on the command line."""
    with pytest.raises(ConfigError, match="did you mean 'math-500'"):
        BenchmarkTask("math-50")
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        named("gsm8")


def test_it_stands_in_an_experiment_as_what_is_evaluated_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By name, with a copy or without; written down and read again it is the same, from any folder."""
    monkeypatch.chdir(tmp_path)
    copy(tmp_path, "gsm8k")
    for said, path in (("gsm8k=gsm8k.jsonl", str(tmp_path / "gsm8k.jsonl")), ("gsm8k", None)):
        table = {"model": "tiny", "algorithm": "grpo", "task": "arithmetic", "evaluation": {"task": said}}
        experiment = anchored(from_table(table).experiment)

        assert experiment.evaluation.task == BenchmarkTask("gsm8k", path=path)
        assert from_table(tomllib.loads(to_toml(experiment))).experiment == experiment


def test_without_the_file_the_copy_is_missed(tmp_path: Path):
    """A copy that is not there is said as for any file."""
    with pytest.raises(DatasetError, match=r"none\.jsonl does not exist"):
        named(f"gsm8k={tmp_path / 'none.jsonl'}").questions()


def test_rows_of_another_form_are_refused(tmp_path: Path):
    """A copy whose columns are not the published ones names the one that is missing."""
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"Problem": "1?", "Answer": "1"}))
    with pytest.raises(DatasetError, match="problem: missing; the row has Problem, Answer"):
        named(f"aime-24={path}").questions()


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [("aime-24", "not a number", "a whole number from 0 to 999"), ("aime-25", "1000", "a whole number from 0 to 999"),
     ("aime-25", -3, "a whole number from 0 to 999"), ("beyond-aime", "x + 1", "a whole number"),
     ("gsm8k", "no number here", "a solution that ends in a number")],
)  # fmt: skip
def test_an_answer_that_cannot_be_is_refused(tmp_path: Path, name: str, answer: object, words: str):
    """Nothing could ever be right there, so the score would say nothing: the row is named, beside a sound one."""
    path = tmp_path / "copy.jsonl"
    sound = ROWS[name]
    flawed = {**sound, "id": "other", "problem": "Another?", "question": "Another?", "answer": answer}
    path.write_text(f"{json.dumps(sound)}\n{json.dumps(flawed)}\n")
    with pytest.raises(DatasetError, match=rf"'answer' of '{name}' is {words}.*1 of 2 rows have something else"):
        named(f"{name}={path}").questions()


def test_a_benchmark_is_never_trained_on(tmp_path: Path):
    """It is refused as a training task, and taken as what is evaluated on."""
    benchmark = named(copy(tmp_path, "gsm8k"))
    with pytest.raises(ConfigError, match="'gsm8k' is a test set: it is evaluated on and never trained on"):
        build_split(benchmark, HeldOut(size=1), as_bytes)
    split = build_split(ArithmeticTask(), HeldOut(size=1), as_bytes, benchmark)

    assert [split.held_out[i].text for i in range(len(split.held_out))] == [ROWS["gsm8k"]["question"]]
    assert len(build_held_out(benchmark, HeldOut(), as_bytes)) == 1


@pytest.mark.slow
def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    """One message: what could not be loaded, the dataset's place, and how a local copy is named."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(
        DatasetError, match=r"needs a network; without one, bring a copy as JSONL with the columns\s+'q"
    ):
        named("gsm8k").questions()
