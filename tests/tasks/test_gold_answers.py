"""The data check of answers: each earns 1 as its own answer, or its row is named before anything is trained."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import DatasetError
from gnomon.core.processes.client import Limits
from gnomon.core.sections import GrammarConfig, SamplingConfig
from gnomon.engines.base import Sampling
from gnomon.engines.grammar import barred
from gnomon.engines.stop_strings import until_stop
from gnomon.models.load import load_tokenizer
from gnomon.rewards.answers import Where
from gnomon.rewards.code.reward import Code
from gnomon.rewards.exact import Boxed, Exact, Format, Numeric
from gnomon.rewards.grading import AnyVerifier, Grading, WeightedReward
from gnomon.rewards.instructions import Instructions
from gnomon.rewards.math import Mathematics
from gnomon.tasks.gold_answers import MOST_HEAVY, Bounds, check_answers
from gnomon.tasks.question import ListDataset, Question, TokenizedDataset
from gnomon.tasks.tables import TableTask


def as_bytes(question: object) -> tuple[int, ...]:
    return tuple(str(question).encode())


def checked(folder: Path, answers: list[Any], verifier: AnyVerifier, within: Where = "anywhere", **stop: Any) -> str:
    path = folder / "made.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Question {n}?", "answer": a}) + "\n" for n, a in enumerate(answers))
    )
    task = TableTask(str(path), answer_column="answer", require_answer=False)
    sets = [TokenizedDataset(task.questions(), as_bytes)]
    grading = Grading((WeightedReward(verifier, within=within),))
    return check_answers(sets, grading, Limits(), Bounds(partial(until_stop, sampling=SamplingConfig(**stop))))


@pytest.mark.parametrize(
    "answer",
    ["72", 72, -1.5, "1,080", "so 24 + 48 = 72\n#### 72", "\\$32,\\!348", "-\\frac34", "2\\frac12", "90^\\circ",
     "12 km",      "x=5", "50\\%", "3.2\\times10^5", "We get \\boxed{7}."],
)  # fmt: skip
@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Mathematics(), Exact()], ids=lambda v: v.kind)
def test_an_answer_that_is_read_whole_passes(tmp_path: Path, answer: object, verifier: AnyVerifier):
    """Numbers in each of the forms that data sets have, for every reward that compares."""
    if verifier.kind == "mathematics":
        pytest.importorskip("math_verify")

    assert checked(tmp_path, [answer], verifier) == ""


@pytest.mark.parametrize("within", ["after_thinking", "answer_line", "last_box"])
@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Mathematics(), Exact()], ids=lambda v: v.kind)
def test_an_answer_is_tried_where_it_is_looked_for(tmp_path: Path, verifier: AnyVerifier, within: Where):
    """On its line, in its box: whatever is read whole anywhere is read whole there, and math-verify too."""
    solution = [] if verifier.kind == "exact" else ["so 24 + 48 = 72\n#### 72", "We get \\boxed{7}."]
    algebra = ["x+1", "\\frac{1}{\\sqrt2}"] if verifier.kind in ("boxed", "mathematics") else []

    assert checked(tmp_path, ["72", "-\\frac34", "\\$32,\\!348", "50\\%", *solution, *algebra], verifier, within) == ""


@pytest.mark.parametrize(
    ("answer", "within"),
    [("a } b", "last_box"), ("\\boxed{5}", "last_box"), ("two\nlines", "answer_line"), ("5*", "answer_line"),
     ("_x_", "answer_line"), ("a</think>b", "after_thinking"), ("<think>a", "after_thinking"), ("a{", "last_box")],
)  # fmt: skip
def test_an_answer_that_cannot_stand_where_it_is_looked_for_is_named(tmp_path: Path, answer: str, within: Where):
    """The row and the setting: no completion could earn anything there."""
    assert checked(tmp_path, ["Paris", answer], Exact()) == ""
    with pytest.raises(DatasetError, match=rf'row 2: .*earns 0 .* where extract = "{within}" looks for it'):
        checked(tmp_path, ["Paris", answer], Exact(), within)


@pytest.mark.parametrize(
    "answer",
    ["3 or 4", "(1, 2]", "\\sqrt{2}", "x+1", "2\\pi", "3,14", "1.234,56", "Paris", "5 dozen", "1e999999999", "1/0",
     "3 and 4",      "#### none", "We get \\boxed{x}.", [1, 2], {"a": 1}, True],
)  # fmt: skip
def test_an_answer_that_numeric_cannot_read_is_named_with_its_row(tmp_path: Path, answer: object):
    """Before training: the row, its value, the reward and what to type, in at most five lines."""
    with pytest.raises(DatasetError, match=r"1 of 3 answers of 'made' cannot be earned") as caught:
        checked(tmp_path, ["72", answer, "73"], Numeric())

    message = str(caught.value)
    assert "row 2: " in message
    assert 'kind = "boxed"' in message
    assert len(message.splitlines()) <= 5


@pytest.mark.parametrize(
    ("answers", "verifier", "stop", "row"),
    [
        (["72", "3.5"], Numeric(), ".", 2),
        (["72", "1,000"], Numeric(), (",", "\n"), 2),
        (["72", "-5"], Numeric(), "-", 2),
        (["72", "x+1"], Boxed(), "}", 1),
        (["72", "x+1"], Boxed(), "+", 2),
        (["a", "a b"], Exact(), " ", 2),
        (["yes", "a\nb"], Exact(), "\n", 2),
    ],
)
def test_an_answer_that_a_stop_string_cuts_is_named(
    tmp_path: Path, answers: list[str], verifier: AnyVerifier, stop: Any, row: int
):
    """Rewards see what stands before the string, so no rollout could earn it; with the string it is whole."""
    with pytest.raises(DatasetError, match=rf"row {row}: .*a stop string \(sampling.stop\) cuts it"):
        checked(tmp_path, answers, verifier, stop=stop)


@pytest.mark.parametrize("stop", ["\n", "</answer>", "The", " ", "Question:"])
@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Exact()], ids=lambda v: v.kind)
def test_an_answer_that_ends_before_a_stop_string_passes(tmp_path: Path, verifier: AnyVerifier, stop: str):
    """Also where only the form in which gnomon states it holds the string."""
    assert checked(tmp_path, ["72", "1/2", "-3.5"], verifier, stop=stop) == ""


def bounded(answers: list[Any], reward: WeightedReward, opened: str = "", **sampling: Any) -> str:
    """Check the answers as of the tokens of tiny-sums, which are bytes."""
    tokenizer = load_tokenizer("tiny-sums", False)
    drawn = Sampling(
        **{"max_completion_length": 40, "tokenizer": "tiny-sums", "stop_ids": tokenizer.stop_ids, **sampling}
    )
    rows = tuple(Question(f"q{n}", "?", "?", {"answer": answer}) for n, answer in enumerate(answers))
    tasks: Any = ListDataset("made", rows)
    bars = partial(barred, sampling=drawn, tokenizer=tokenizer, opened=opened)
    bounds = Bounds(partial(until_stop, sampling=drawn), bars, bool(drawn.grammar.regex))
    return check_answers([tasks], Grading((reward,)), Limits(), bounds)


@pytest.mark.parametrize(
    ("answers", "verifier", "within", "given"),
    [
        (["18", "27"], Numeric(), "anywhere", "[a-z]+"),
        (["18", "27"], Numeric(), "anywhere", "[0-9]"),
        (["x: #### 1,080", "$700"], Numeric(), "anywhere", "[A-D]/?"),
        (["18", "x+1"], Boxed(), "anywhere", "[0-9x+]+"),
        (["18"], Numeric(), "last_box", "[0-9]+"),
        (["Yes", "No"], Exact(), "anywhere", "yes|no"),
        (["Paris"], Exact(), "anywhere", "[a-z]*[0-9]"),
    ],
)  # fmt: skip
def test_a_grammar_that_no_answer_can_be_said_in_is_refused(
    tmp_path: Path, answers: list[str], verifier: AnyVerifier, within: Where, given: str
):
    """All rollouts would earn 0."""
    with pytest.raises(
        DatasetError, match=rf"{len(answers)} of {len(answers)} .*sampling\.grammar[\s\S]*earn anything"
    ):
        bounded(answers, WeightedReward(verifier, within=within), grammar=GrammarConfig(regex=given))


@pytest.mark.parametrize(
    ("answers", "verifier", "budget"),
    [(["18", "27"], Numeric(), 1), (["Paris", "Oslo"], Exact(), 3), (["18"], Boxed(), 4)],
)
def test_a_budget_that_every_answer_exceeds_is_said(answers: list[str], verifier: AnyVerifier, budget: int):
    """In a run and in an evaluation, where cut answers are a measure."""
    said = bounded(answers, WeightedReward(verifier), max_completion_length=budget)

    assert f"{len(answers)} of {len(answers)} different answers" in said
    assert f"sampling.max_completion_length = {budget}" in said


@pytest.mark.parametrize(
    ("answers", "verifier", "given"),
    [
        (["18", "-27"], Numeric(), "[0-9]{4}"),
        (["1080"], Numeric(), "[0-9]{1,3}(,[0-9]{3})*"),
        (["0.5", "0.25"], Numeric(), "[0-9]+/[0-9]+"),
        (["0.5"], Numeric(), r"\\frac\{[0-9]\}\{[0-9]\}"),
        (["1/2"], Numeric(), r"[0-9.]+"),
        (["0.5", "50%"], Numeric(), "[0-9]+%"),
        (["18", "300"], Numeric(), r"[0-9](\.[0-9]+)?e[0-9]"),
        (["18"], Numeric(), r"(?s:.*)#### [0-9]+"),
        (["18"], Numeric(tolerance=20), "[0-9]"),
        (["18"], Boxed(), r"[a-z/ ]*\\boxed\{[0-9]+\}"),
        (["x+1"], Boxed(), r"\\fbox\{[0-9x+ ]+\}"),
        (["Yes", "No"], Exact(casefold=True), "yes|no"),
        (["a/b"], Exact(), r"a/b|a\/c"),
        (["Paris", "Ulm"], Exact(), 5),
    ],
)  # fmt: skip
def test_answers_that_can_be_said_pass(tmp_path: Path, answers: list[str], verifier: AnyVerifier, given: str | int):
    """Also in another spelling of the number, and behind other text."""
    set_to = {"max_completion_length": given} if isinstance(given, int) else {"grammar": GrammarConfig(regex=given)}

    assert bounded(answers, WeightedReward(verifier), **set_to) == ""


def test_a_part_that_cannot_be_said_is_said(tmp_path: Path):
    """The others can be earned; the sentence has the count and one of them."""
    said = bounded(["7", "18", "9"], WeightedReward(Numeric()), grammar=GrammarConfig(regex="[0-9]"))

    assert "1 of 3 different answers of 'made' that were tried cannot be said" in said
    assert "'18'" in said


def test_a_box_that_the_prompt_opens_need_not_be_said(tmp_path: Path):
    """The completion goes on within it."""
    opened, digits = r"\boxed{", {"grammar": GrammarConfig(regex=r"[0-9]+\}")}

    assert bounded(["18"], WeightedReward(Boxed()), opened, **digits) == ""
    with pytest.raises(DatasetError, match="cannot be said"):
        bounded(["18"], WeightedReward(Boxed()), **digits)


@pytest.mark.parametrize(
    ("schema", "answers", "is_found"),
    [
        ({"type": "boolean"}, ["18"], False),
        ({"enum": ["A", "B"]}, ["18"], False),
        ({"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}, ["18"], True),
        ({"type": "object", "properties": {"why": {"type": "string"}, "n": {"type": "number"}},
          "required": ["why", "n"], "additionalProperties": False}, ["18"], True),
    ],
)  # fmt: skip
def test_a_schema_in_which_no_answer_was_found_is_said(
    tmp_path: Path, schema: dict[str, Any], answers: list[str], is_found: bool
):
    """Said and not refused: a few answers are written, which is no proof."""
    said = bounded(answers, WeightedReward(Numeric()), grammar=GrammarConfig(schema=schema))

    assert (said == "") == is_found
    assert is_found or "no JSON of the schema" in said


def test_only_the_first_three_of_many_rows_are_shown(tmp_path: Path):
    """The count is of all; a message is never longer than five lines."""
    with pytest.raises(DatasetError, match=r"40 of 40 answers .* \(the first 3\)") as caught:
        checked(tmp_path, [f"about {n} or {n + 1}" for n in range(40)], Numeric())

    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize("verifier", [Numeric(), Boxed(), Exact()], ids=lambda v: v.kind)
def test_a_list_as_an_answer_says_what_to_write(tmp_path: Path, verifier: AnyVerifier):
    """Some datasets have the one answer in a list."""
    with pytest.raises(DatasetError, match=r"got \['\$5\$'\]; write the one right text in place of the list"):
        checked(tmp_path, [["$5$"]], verifier)


def test_a_row_without_an_answer_is_named(tmp_path: Path):
    """A reward that compares would fail on each of its samples."""
    with pytest.raises(DatasetError, match=r"row 2: 'None': there is no column 'answer'"):
        checked(tmp_path, ["1", None], Boxed())


def test_a_reward_that_compares_nothing_passes(tmp_path: Path):
    """A format has no right answer."""
    assert checked(tmp_path, ["anything", None, "3 or 4"], Format(".*")) == ""


def test_what_math_verify_cannot_read_is_named(tmp_path: Path):
    """It is asked in a grading process, where a comparison that never returns ends."""
    pytest.importorskip("math_verify")

    assert checked(tmp_path, ["x+1", "\\frac{\\pi}{2}", "(1,2]", "\\text{Monday}", "7"], Mathematics()) == ""
    with pytest.raises(DatasetError, match=r"row 2: .*math-verify cannot read column 'answer'"):
        checked(tmp_path, ["x+1", "\\text{}", "y+1"], Mathematics())


@pytest.mark.slow
def test_a_large_table_of_algebra_is_tried_in_part_and_said(tmp_path: Path):
    """At most 500 different answers go to math-verify; the sentence says how many of how many."""
    pytest.importorskip("math_verify")

    said = checked(tmp_path, [f"x+{n}" for n in range(2 * MOST_HEAVY)], Mathematics())

    assert (
        said == "of 1,000 different answers of 'made' that are no numbers, 500 were tried with the reward 'mathematics'"
    )


@pytest.mark.parametrize(
    ("verifier", "sound", "bad", "said"),
    [
        (
            Instructions(),
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["x"]}]},
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keyword": "x"}]},
            "the arguments of 'keywords:existence' are not its own",
        ),
        (
            Code(),
            {"tests": {"inputs": [[1]], "outputs": [1]}, "entry_point": "f"},
            {"tests": {"inputs": [[1]], "outputs": [1]}, "entry_point": None},
            "input and output of a case should be text",
        ),
    ],
)
def test_what_is_judged_with_other_columns_is_looked_at_with_them(
    verifier: AnyVerifier, sound: dict[str, Any], bad: dict[str, Any], said: str
):
    """Equal instructions or tests of two rows: the second row's own arguments, or its function's name, are wrong."""
    rows = tuple(Question(name, name, name, columns) for name, columns in (("a", sound), ("b", sound), ("c", bad)))
    tasks: Any = ListDataset("rows", rows)

    with pytest.raises(DatasetError, match=r"1 of 3") as caught:
        check_answers([tasks], Grading((WeightedReward(verifier),)), Limits(workers=1))

    assert "row with id 'c'" in str(caught.value)
    assert said in str(caught.value)
