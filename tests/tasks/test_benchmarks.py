"""Published test sets: their names, columns and verifiers, on local rows of the published form."""

import base64
import json
import os
import pickle
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon.config.experiment import from_table, to_toml, with_absolute_paths
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.rewards.base import Sample
from gnomon.rewards.grading import Grading
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.benchmarks import BENCHMARKS, BenchmarkTask
from gnomon.tasks.build import build_held_out, build_split, named
from gnomon.tasks.split import HeldOut


def packed(cases: list[dict[str, str]]) -> str:
    """Return cases as LiveCodeBench publishes the private ones: a pickled text of JSON, packed."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


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
    "aime-26": {"problem_idx": 1, "problem": "Find $5^3$.", "answer": 125},
    "beyond-aime": {"problem": "Find $12345 \\cdot 2$.", "answer": 24690},
    "amc-23": {"id": 0, "question": "Find $3 \\cdot 9$.", "answer": "27.0", "url": "https://x"},
    "brumo-25": {"problem_idx": 1, "problem": "Find $\\sqrt{8}$.", "answer": "2\\sqrt{2}", "problem_type": ["Algebra"]},
    "hmmt-25": {"problem_idx": 1, "problem": "Find $1 - 2/\\pi$.", "answer": "1-\\frac{2}{\\pi}", "problem_type": []},
    "amo-bench": {
        "question_id": 1, "prompt": "Solve $x^2 = 4$.", "solution": "It is so.", "answer": "$\\boxed{\\{-2, 2\\}}$",
        "answer_type": "set",
    },
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": 'def add(a: int, b: int) -> int:\n    """Add."""\n',
        "canonical_solution": "    return a + b\n", "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n",
    },
    "mbpp": {
        "task_id": 11, "text": "Write a function to add two numbers.", "code": "def add(a, b):\r\n  return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "test_setup_code": "",
        "challenge_test_list": [],
    },
    "livecodebench": {
        "question_title": "Add", "question_content": "Read two numbers and print their sum.", "platform": "atcoder",
        "question_id": "abc1_a", "contest_id": "abc1", "contest_date": "2024-09-07T00:00:00", "starter_code": "",
        "difficulty": "easy", "metadata": "{}",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "40 2\n", "output": "42\n", "testtype": "stdin"}]),
    },
    "ifeval": {
        "key": 1000, "prompt": "Name a bird without a comma, in fewer than 5 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 5, "relation": "less than"}],
    },
}  # fmt: skip
_ADD = "```python\ndef add(a, b):\n    return a + b\n```"
_PRINT = "```python\nprint(sum(map(int, input().split())))\n```"
RIGHT = {
    "gsm8k": ("She keeps 1,080 pens in the end.", "**Answer: 1080**", "#### 1080"),
    "math-500": ("It is $0.5$, so \\boxed{\\frac{2}{4}}.", "\\[\\boxed{\\dfrac12}\\]", "\\boxed{1/2}", "\\boxed{0.50}"),
    "aime-24": ("Therefore \\boxed{24}.", "\\boxed{024}", "$\\boxed{ 24 }$", "\\boxed{24.0}", "\\fbox{24}"),
    "aime-25": ("The answer is \\boxed{25}.", "\\boxed{\\text{25}}", "\\boxed{n = 25}"),
    "aime-26": ("So \\boxed{125}.", "\\boxed{\\mathbf{125}}", "first \\boxed{7}, no: \\boxed{125}"),
    "beyond-aime": ("So \\boxed{24690}.", "\\boxed{24,690}", "\\boxed{24{,}690}"),
    "amc-23": ("So \\boxed{27}.", "\\boxed{27.0}", "$$\\boxed{27}$$"),
    "brumo-25": ("So \\boxed{2\\sqrt{2}}.", "\\boxed{\\sqrt{8}}", "\\boxed{2 \\sqrt 2}"),
    "hmmt-25": ("So \\boxed{1-\\frac{2}{\\pi}}.", "\\boxed{\\frac{\\pi-2}{\\pi}}", "\\boxed{1 - \\dfrac{2}{\\pi}}"),
    "amo-bench": ("So \\boxed{\\{-2, 2\\}}.", "\\boxed{\\{2, -2\\}}", "$\\boxed{\\left\\{-2,2\\right\\}}$"),
    "humaneval": (_ADD, "    return a + b\n", "```\ndef add(a, b):\n    return sum([a, b])\n```"),
    "mbpp": (_ADD, "def add(a, b):\r\n  return a + b", "It is\n```py\ndef add(x, y): return y + x\n```\nDone."),
    "livecodebench": (_PRINT, _PRINT.replace("python", "")),
    "ifeval": ("A small wren", "Wren."),
}
WRONG = {
    name: text[0].replace("1,080", "1,081").replace("\\boxed{", "\\boxed{9").replace("a + b", "a - b")
    .replace("sum(", "max(").replace("A small wren", "A wren, of course")
    for name, text in RIGHT.items()
}  # fmt: skip


def as_bytes(question: object, further: object = None) -> tuple[int, ...]:
    return tuple(str(question).encode())


def copy(folder: Path, name: str) -> str:
    """Write a local copy of one row and return NAME=PATH."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n")
    return f"{name}={path}"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_local_copy_is_asked_and_judged(tmp_path: Path, name: str):
    """The right column is asked and the right one compared: right in each form scores 1, wrong and none score 0."""
    (question,) = named(copy(tmp_path, name)).questions()
    grading = Grading(BENCHMARKS[name].rewards)
    right, (wrong, none) = (
        [grading(Sample(question.text, text, columns=question.columns)) for text in texts]
        for texts in (RIGHT[name], (WRONG[name], "?" if name != "ifeval" else ""))
    )

    assert question.text == ROWS[name][BENCHMARKS[name].prompt_column]
    assert str(question.content).startswith(question.text)
    assert str(question.content).endswith(BENCHMARKS[name].suffix)
    assert [v.reward for v in right] == [1.0] * len(RIGHT[name])
    assert (wrong.reward, none.reward) == (0.0, 0.0)
    if "format" in wrong.parts:
        assert [v.parts["format"] for v in (right[0], wrong, none)] == [1.0, 1.0, 0.0]
        assert len({v.answer for v in (right[0], wrong, none)}) == 3


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_thought_is_no_answer(tmp_path: Path, name: str):
    """A right answer within a thought earns nothing, cut off or not; after a thought that is wrong it earns 1."""
    (question,) = named(copy(tmp_path, name)).questions()
    right, wrong = RIGHT[name][0], WRONG[name]
    grading = Grading(BENCHMARKS[name].rewards)
    texts = (f"<think>{right}", f"{right}</think>\n\n{wrong}", f"<think>Is it {wrong}?</think>\n{right}")

    assert [grading(Sample(question.text, t, columns=question.columns)).reward for t in texts] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("name", [name for name, set_ in BENCHMARKS.items() if set_.answer_column])
def test_published_answers_earn_1_when_they_are_given_back(tmp_path: Path, name: str):
    """What `check_answers` asks before a run: the gold answer in the form that is asked for; code states none."""
    (question,) = named(copy(tmp_path, name)).questions()
    verifier = BENCHMARKS[name].rewards[0].verifier
    said = verifier.stated(Sample(question.text, "", columns=question.columns))

    assert (said is None) == (verifier.kind == "code")
    assert said is None or verifier(Sample(question.text, said, columns=question.columns)) == 1.0


FORMS = {
    "hmmt-25": ["103", "\\frac{1}{576}", "1037", "\\sqrt{23}-2\\sqrt{3}", "2^{99}", "-984", "\\frac{7+\\sqrt{5}}{2}",
                "\\frac{-1+\\sqrt{17}}{2}, \\frac{-1-\\sqrt{17}}{2}", "\\frac{9}{7} \\pi", "20", "6300", "x + 1"],
    "brumo-25": ["5", "2\\sqrt{13}", "\\frac{2025}{101}", "(10,4)", "\\frac{1}{2}", "4^{10}", "374", "\\sqrt{30}"],
    "amo-bench": ["$\\boxed{-4}$", "$\\boxed{\\frac{\\sqrt{3}}{2}}$", "$\\boxed{\\{1, 2, 5\\}}$",
                  "$\\boxed{2^{n-1}+1}$", "$\\boxed{\\left(\\frac{1}{2}, 3\\right]}$", "\\boxed{1011}"],
    "math-500": ["\\left( 3, \\frac{\\pi}{2} \\right)", "p - q", "\\text{Evelyn}", "27", "6 - 5i", "2220_5",
                 "\\begin{pmatrix} -2 \\\\ 1 \\end{pmatrix}", "11\\sqrt2", "\\$32,\\!348", "90^\\circ", "x^3+3x-6",
                 "(-\\infty,0]", "\\text{(C)}", "3, 5, 7", "145^\\circ", "\\frac{270}7\\text{ degrees}",
                 "\\dfrac{3}{56}", "y = 2x + 3"],
    "amc-23": ["27.0", "27", "3/4", "36", "-1"], "aime-24": ["000", "073", "7", 25], "beyond-aime": [-5, "281", 1.0],
    "aime-26": [277, "62", 62.0], "aime-25": ["588", 16], "gsm8k": ["It is so.\n#### -3", "#### 2,125", "#### 0.5"],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_answers_of_every_form_of_a_set_are_right_when_given_back(tmp_path: Path, name: str):
    """A row of each form that the published answers have: in a box after a sentence, in display, and with spaces."""
    benchmark = BENCHMARKS[name]
    path = tmp_path / "forms.jsonl"
    rows = [{benchmark.prompt_column: f"Question {n}?", "answer": gold} for n, gold in enumerate(FORMS[name])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifier = benchmark.rewards[0].verifier
    missed = []
    for question in named(f"{name}={path}").questions().questions:
        said = verifier.stated(Sample(question.text, "", columns=question.columns))
        for text in (said, f"Thus, at last:\n\\[ {said} \\]\n", f"$x=1$. **{said}**"):
            if verifier(Sample(question.text, text, columns=question.columns)) != 1.0:
                missed.append((question.columns["answer"], text))

    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, set_ in BENCHMARKS.items() if set_.answer_column])
def test_every_published_answer_is_right_where_a_copy_is(name: str):
    """All 500 of MATH-500, and each other set that the folder GNOMON_SETS has as NAME.jsonl, as it was published."""
    copy = Path(os.environ.get("GNOMON_SETS", "no-folder"), f"{name}.jsonl")
    if not copy.exists():
        pytest.skip(f"no copy of {name}: GNOMON_SETS names a folder that has {name}.jsonl, as published")
    (reward, *_) = BENCHMARKS[name].rewards
    missed = []
    for question in named(f"{name}={copy}").questions().questions:
        sample = Sample(question.text, "", columns=question.columns)
        said = reward.verifier.stated(sample) or question.columns["answer"]
        for text in (said, f"<think>It may be 7.</think>\n\n{said}"):
            if reward.judge(replace(sample, completion=text)) != 1.0:
                missed.append((question.id, text))

    assert missed == []


def test_rows_that_no_program_can_judge_are_left_out_and_said(tmp_path: Path):
    """AMO-Bench's answers in words, IFEval's language: the others are asked; a set of nothing else is refused."""
    described = {**ROWS["amo-bench"], "question_id": 2, "prompt": "Describe.", "answer_type": "description"}
    asked = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "hi"}], "prompt": "Say."}
    for name, row, why in (
        ("amo-bench", described, "an answer in words"), ("ifeval", {**ROWS["ifeval"], **asked}, "ask for a language")
    ):  # fmt: skip
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f"{json.dumps(ROWS[name])}\n{json.dumps(row)}\n")
        found = named(f"{name}={path}").questions()

        assert len(found) == 1
        assert found.repeated.startswith(f"1 of 2 rows of '{name}' ")
        assert why in found.repeated
        path.write_text(json.dumps(row))
        with pytest.raises(DatasetError, match=f"no row of '{name}' can be judged"):
            named(f"{name}={path}").questions()


def test_livecodebench_has_a_window_and_both_kinds_of_cases(tmp_path: Path):
    """Public and private cases are judged; a contest outside the window is not asked; starter code is shown."""
    starter = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
    functional = {
        **ROWS["livecodebench"], "question_id": "3000", "contest_date": "2025-01-31T00:00:00", "starter_code": starter,
        "question_content": "Add two numbers.", "metadata": '{"func_name": "add"}',
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "private_test_cases": packed([{"input": "40\n2", "output": "42", "testtype": "functional"}]),
    }  # fmt: skip
    path = tmp_path / "copy.jsonl"
    path.write_text(f"{json.dumps(ROWS['livecodebench'])}\n{json.dumps(functional)}\n")
    windows = {
        "": 2,
        "@2024-10-01..": 1,
        "@..2024-10-01": 1,
        "@2024-09-07..2025-01-31": 1,
        "@2024-09-07..2025-02-01": 2,
    }

    assert {w: len(named(f"livecodebench{w}={path}").questions()) for w in windows} == windows
    (late,) = named(f"livecodebench@2025-01-01..={path}").questions()
    judge = Grading(BENCHMARKS["livecodebench"].rewards)
    bodies = ("return a + b", "return 3")
    texts = [f"```python\n{starter}{body}\n```" for body in bodies]
    assert starter.rstrip() in str(late.content)
    assert len(late.columns["tests"]) == 2
    assert [judge(Sample(late.text, text, columns=late.columns)).reward for text in texts] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("said", "words"),
    [("livecodebench@2025-02-01..2024-08-01", "has no day in it"), ("livecodebench@August..", "written as 2024-08-01"),
     ("gsm8k@2024-01-01..", "'gsm8k' has no dates"), ("codeforces", "a rating needs the standings of its contests"),
     ("CodeForces", "cannot be asked")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(said: str, words: str):
    """An empty window, a day in words, a window of a set without dates, and a rating that no local judge can give."""
    with pytest.raises(ConfigError, match=words):
        named(said)


@pytest.mark.parametrize(
    "text",
    ["!", base64.b64encode(b"no").decode(), base64.b64encode(zlib.compress(b"N.")).decode(), json.dumps({"in": 1})],
)  # fmt: skip
def test_cases_in_another_form_are_refused(tmp_path: Path, text: str):
    """No base64, no zlib, a pickle without a text, an object in place of a list: the question is named."""
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps({**ROWS["livecodebench"], "private_test_cases": text}))
    with pytest.raises(DatasetError, match=r"copy\.jsonl: question '.*-1': "):
        named(f"livecodebench={path}").questions()


def test_a_packed_pickle_is_read_and_never_run(tmp_path: Path):
    """A pickle that would run a command when it is loaded writes nothing, and is refused for what it holds."""
    mark = tmp_path / "ran"
    evil = b"cos\nsystem\n(V" + f"touch {mark}".encode() + b"\ntR."
    path = tmp_path / "copy.jsonl"
    text = base64.b64encode(zlib.compress(evil)).decode()
    path.write_text(json.dumps({**ROWS["livecodebench"], "private_test_cases": text}))
    with pytest.raises(DatasetError, match="question"):
        named(f"livecodebench={path}").questions()

    assert not mark.exists()


@pytest.mark.parametrize(
    ("said", "name"),
    [("gsm8k", "gsm8k"), ("openai/gsm8k", "gsm8k"), ("MATH500", "math-500"), ("HuggingFaceH4/MATH-500", "math-500"),
     ("aime24", "aime-24"), ("HuggingFaceH4/aime_2024", "aime-24"), ("aime-25", "aime-25"),
     ("BeyondAIME", "beyond-aime"), ("ByteDance-Seed/BeyondAIME", "beyond-aime"), ("AIME26", "aime-26"),
     ("BRUMO25", "brumo-25"), ("hmmt25", "hmmt-25"), ("AMC23", "amc-23"), ("AMO-Bench", "amo-bench"),
     ("HumanEval", "humaneval"), ("MBPP", "mbpp"), ("LiveCodeBench", "livecodebench"), ("IFEval", "ifeval"),
     ("MathArena/hmmt_feb_2025", "hmmt-25")],
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
        experiment = with_absolute_paths(from_table(table).experiment)

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
    for asked, other in (
        (benchmark, 'questions for training, task = "gsm8k"'),
        (BenchmarkTask("aime-24"), "another task"),
    ):
        with pytest.raises(ConfigError, match=f"'{asked.name}' is a test set: .* never trained on; .*{other}"):
            build_split(asked, HeldOut(size=1), as_bytes)
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
