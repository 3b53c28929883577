"""Columns that mean input are used, or refused with the row."""

import json
from pathlib import Path

import pytest
from tests.tasks.templates import QWEN, tokenizer_of

from gnomon.config.experiment import load
from gnomon.core.errors import DatasetError
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.question import TokenizedDataset
from gnomon.tasks.row_inputs import further_of, untold_flaw, untold_inputs
from gnomon.tasks.tables import TableTask
from gnomon.training.build_data import questions

WEATHER = {"name": "weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": WEATHER}


@pytest.mark.parametrize(
    "tools",
    [[WRAPPED], [WEATHER], WRAPPED, json.dumps([WRAPPED]), json.dumps(WEATHER), [json.dumps(WRAPPED)],
     [{**WRAPPED, "strict": None}], (WRAPPED,)],
)  # fmt: skip
def test_tools_are_read_in_every_usual_form(tools):
    """Lists of schemas, with or without their envelope, and JSON of them; nulls that Arrow writes are left out."""
    if isinstance(tools, tuple):
        tools = list(tools)

    further, flaw = further_of({"prompt": "x", "tools": tools})

    assert flaw is None
    assert further.tools == (WRAPPED,)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("images", ["cat.png"]),
        ("image", {"bytes": "00"}),
        ("videos", ["a.mp4"]),
        ("video", "a.mp4"),
        ("audio", {"array": [0.0]}),
        ("audios", [b"x"]),
        ("tools", "search the web"),
        ("tools", [{"description": "no name"}]),
        ("tools", [7]),
        ("tools", 7),
        ("documents", "some text"),
        ("enable_thinking", "yes"),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"no name": 1}),
        ("chat_template_kwargs", "{"),
    ],
)
def test_what_cannot_be_given_to_a_model_is_refused(column, value):
    """The column is named with the setting that gives it to rewards alone, which then takes it."""
    _, flaw = further_of({"prompt": "x", column: value})

    assert flaw is not None
    assert flaw.startswith(f"{column}: ")
    assert "task.reward_columns" in flaw
    assert further_of({"prompt": "x", column: value}, [column])[1] is None


@pytest.mark.parametrize("column", ["images", "tools", "documents", "enable_thinking", "chat_template_kwargs", "audio"])
@pytest.mark.parametrize("value", [None, [], "", {}])
def test_an_empty_column_is_none(column, value):
    """Null and empty cells give nothing and refuse nothing."""
    further, flaw = further_of({"prompt": "x", column: value})

    assert (flaw, further.tools, dict(further.switches)) == (None, (), {})


def test_switches_are_gathered():
    """Columns of their own names and those of chat_template_kwargs."""
    row = {
        "enable_thinking": False,
        "chat_template_kwargs": '{"effort": "low"}',
        "documents": [{"text": "a", "b": None}],
    }

    further, flaw = further_of(row)

    assert flaw is None
    assert further.switches == {"enable_thinking": False, "effort": "low", "documents": [{"text": "a"}]}


def test_the_variables_of_a_row_go_with_its_task(tmp_path: Path):
    """For the later turns of a conversation, which are written by the same template."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "1", "enable_thinking": False}))
    tasks = TokenizedDataset(TableTask(str(path)).questions(), ChatRenderer(tokenizer_of(QWEN)))

    assert tasks[0].switches == {"enable_thinking": False}


def test_the_rows_are_named(tmp_path: Path):
    """All bad rows are in one message, with file, row and column."""
    path = tmp_path / "q.jsonl"
    rows = [{"prompt": "a", "answer": "1"}, *({"prompt": "b", "answer": "1", "images": ["x.png"]} for _ in range(2))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(DatasetError, match=r"q\.jsonl:2: images: .*\n.*q\.jsonl:3: images: "):
        TableTask(str(path)).questions()
    assert len(TableTask(str(path), repeated="keep", reward_columns=("images",)).questions()) == 3


@pytest.mark.parametrize(
    ("row", "content", "said"),
    [
        ({"system": "Be brief."}, "2+2=", "system: reaches no prompt; set task.template"),
        ({"system_prompt": "Be brief."}, ({"role": "user", "content": "2+2="},), "system_prompt: reaches no prompt"),
        ({"functions": [{"name": "add"}]}, "2+2=", "functions: reaches no prompt; the column of schemas is tools"),
        ({"system": "Be brief."}, "Be brief.\n2+2=", None),
        ({"system": "Hi "}, ({"role": "system", "content": "Hi"}, {"role": "user", "content": "2+2="}), None),
        ({"system": "  ", "functions": []}, "2+2=", None),
        ({"system": 3, "system_prompt": None}, "2+2=", None),
    ],
)
def test_a_column_that_tells_the_model_something_is_in_its_prompt(row, content, said):
    """Or refused: other programs write it before the question. A column that rewards read alone is theirs."""
    found = untold_flaw(row, content)
    assert (found is None) == (said is None)
    assert said is None or str(found).startswith(said)
    assert untold_flaw(row, content, tuple(row)) is None


@pytest.mark.parametrize(
    ("columns", "asked", "found"),
    [
        ({"choices": ["red", "blue"]}, "Which?", ["choices"]),
        ({"choices": ["red", "blue"]}, "Which? (A) red (B) blue", []),
        ({"choices": {"text": ["red", "blue"], "label": ["A", "B"]}}, "red or blue?", []),
        ({"choices": {"text": ["red", "blue"], "label": ["A", "B"]}}, "Which?", ["choices"]),
        ({"A": "1", "B": "2", "C": "3", "D": "4", "answer": "A"}, "x+y?", ["A", "B", "C", "D"]),
        ({"A": "1"}, "2+2?", []),
        ({"context": " There are 3 cats. "}, "There are 3 cats. How many?", []),
        ({"context": "There are 3 cats."}, "How many?", ["context"]),
        ({"context": None, "input": ""}, "How many?", []),
        ({"input": "0+0", "instruction": "Add"}, "Add 0+0", []),
        ({"input": "0+0"}, "Add the numbers", ["input"]),
        ({"input": "4", "answer": "4"}, "2+2?", []),
        ({"image_path": "a.png"}, "What is this?", ["image_path"]),
        ({"topic": "sums"}, "2+2?", []),
    ],
)
def test_columns_that_usually_mean_input_are_found(columns, asked, found):
    """Where a text of theirs is not in the question; the answer under such a name is none."""
    assert untold_inputs(columns, asked) == found
    assert untold_inputs(columns, ({"role": "user", "content": asked},)) == found


@pytest.mark.parametrize(
    ("setting", "is_said"),
    [("steps=1", True), ('task.template="{context} {question}"', False), ('task.reward_columns=["context"]', False)],
)
def test_a_context_that_reaches_no_prompt_is_said(tmp_path, setting, is_said):
    """With the template to type; not where the template has it, or where rewards alone read it."""
    rows = [{"question": f"How many, {n}?", "context": f"There are {n} cats.", "answer": n} for n in range(30)]
    (tmp_path / "cats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [f"task={tmp_path / 'cats.jsonl'}", "held_out.size=3", "held_out.fraction=0.3", "rollouts_per_step=16"]
    said = questions(load("tiny", [*asked, "rewards=['numeric']", setting]).experiment).said

    wanted = 'task.template = "{context} {question}"'
    assert any("the column context reaches no prompt in 26 of 26" in one and wanted in one for one in said) == is_said
