import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.tasks.tables import TableTask


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "1+2=", "answer": 3', "line: not JSON: Expecting ',' delimiter at position 31"),
        (b'{"prompt": "caf\xe9", "answer": 3}', "line: not UTF-8: byte 0xe9 at position 16"),
        (b'{"prompt": "  ", "answer": 3}', "prompt: empty"),
        (b'{"answer": 3}', "prompt: missing; the row has answer"),
        (b'{"answer": 3, "question": null}', "question: null; the row has answer, question"),
        (
            b'{"answer": 3, " prompt": "1+3="}',
            "prompt: missing; the row has answer, ' prompt'; task.prompt_column = \" prompt\" takes that one",
        ),
        (
            b'{"prompts": "1+3=", "answer": 3}',
            'prompt: missing; the row has prompts, answer; task.prompt_column = "prompts" takes that one',
        ),
        (
            b'{"prompt": "1+3=", "Answers": 3}',
            'answer: missing; the row has prompt, Answers; task.answer_column = "Answers" takes that one',
        ),
        (
            b'{"prompt": "1+3=", "expected_answer": 3}',
            'answer: missing; the row has prompt, expected_answer; task.answer_column = "expected_answer" takes that one',  # noqa: E501
        ),
        (
            b'{"prompt": "1+3=", "Final answer": 3}',
            'answer: missing; the row has prompt, Final answer; task.answer_column = "Final answer" takes that one',
        ),
        (b'{"prompt": 5, "answer": 3}', "prompt: must be text or a list of messages, got int"),
        (b'{"prompt": "1+3="}', "answer: missing; the row has prompt (task.require_answer = false does without)"),
        (b'{"prompt": "1+4=", "answer": 5, "id": "a"}', "id: 'a' is already the id of row 1"),
        (
            b'{"prompt": [{"role": "usr", "content": "1+5="}], "answer": 6}',
            "prompt: message 1: role must be one of system, developer, user, assistant, tool, got 'usr'",
        ),
        (b"[1]", "line: a row is an object with named fields, got list"),
        (b'{"prompt": "1+6=", "answer": NaN}', "answer: nan is no number; where there is none write null"),
        (b'{"prompt": "\\ud800", "answer": 3}', "prompt: half a surrogate pair at character 1"),
        (b'{"prompt": "1+7=", "answer": 8, "id": true}', "id: must be text or a whole number, got True"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    """A bad line gives file:line: field: reason; good lines and blank lines are not mentioned but counted."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"prompt": "1+1=", "answer": 2, "id": "a"}\n\n' + line + b'\n{"prompt": "2+2=", "answer": 4}\n')

    with pytest.raises(DatasetError, match=r"1 of 3 rows .* cannot be used") as caught:
        TableTask(str(file)).questions()

    assert str(caught.value).splitlines()[1] == f"  {file}:3: {said}"


def test_the_listing_is_capped_and_counted(tmp_path: Path) -> None:
    """Of 50 bad rows 3 are shown and 47 counted, in five lines."""
    path = write(tmp_path / "train.jsonl", [{}] * 50)

    with pytest.raises(
        DatasetError, match=r"(?s)50 of 50 rows.*:3: prompt: missing.*and 47 more, rows 4, .*, 13, \.\.\.; correct"
    ) as caught:
        TableTask(path).questions()
    assert str(caught.value).count("\n") == 4


@pytest.mark.parametrize(
    ("read", "named"),
    [
        ({}, "prompt answer"),
        ({"completion_column": "auto"}, "prompt answer completion"),
        ({"completion_column": "chosen", "rejected_column": "rejected"}, "prompt completion rejected"),
        ({"completion_column": "completion", "label_column": "label"}, "prompt completion label"),
    ],
)
def test_a_bad_row_is_advised_of_the_columns_that_are_read(tmp_path: Path, read: dict[str, str], named: str) -> None:
    """Each form of row names the settings of its own columns, and an answer to train on is nothing to do without."""
    path = write(tmp_path / "train.jsonl", [{"prompt": "1+1="}])
    columns = ", ".join(f"task.{name}_column" for name in named.split())

    with pytest.raises(DatasetError, match=rf"name other columns with {columns}$") as caught:
        TableTask(path, **read).questions()
    assert ("require_answer" in str(caught.value)) == (not read)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"solution": "s", "answer": "s", "label": None}, "s"),
        ({"solution": None, "answer": "a"}, "a"),
        ({"ground_truth": 7, "label": 7.0}, "7"),
        ({"reward_model": {"style": "rule", "ground_truth": "v"}}, "v"),
        ({"reward_spec": {"ground_truth": 1.5}}, "1.5"),
        ({"label": ["x", "y"]}, ["x", "y"]),
    ],
)
def test_the_answer_is_the_first_that_is_there(tmp_path: Path, row: dict[str, Any], answer: Any) -> None:
    """solution, answer, ground_truth, reward_model., reward_spec.ground_truth, label; numbers become text."""
    question = TableTask(write(tmp_path / "t.jsonl", [{"prompt": "q", **row}])).questions()[0]

    assert question.columns["answer"] == answer


@pytest.mark.parametrize("column", ["prompt", "question", "problem", "messages"])
def test_prompt_columns(tmp_path: Path, column: str) -> None:
    """Each known column is found by itself and does not stay among the columns."""
    question = TableTask(write(tmp_path / "t.jsonl", [{column: "q", "answer": "a", "more": 1}])).questions()[0]

    assert question.text == question.content == "q"
    assert question.columns == {"answer": "a", "more": 1, "data_source": "t"}


def test_chosen_columns_win(tmp_path: Path) -> None:
    """prompt_column and answer_column name any column, the answer with dots; the others stay as they are."""
    path = write(tmp_path / "t.jsonl", [{"prompt": "no", "q": "yes", "solution": "no", "x": {"y": "yes"}}])

    question = TableTask(path, prompt_column="q", answer_column="x.y").questions()[0]

    assert question.text == "yes"
    assert question.columns["answer"] == "yes"
    assert question.columns["solution"] == "no"


def test_messages_are_kept_and_read_without_the_system_message(tmp_path: Path) -> None:
    """A verl row: messages, data_source, extra_info; keys that are null are left out."""
    row = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": None}],
        "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 0},
    }  # fmt: skip

    question = TableTask(write(tmp_path / "t.jsonl", [row])).questions()[0]

    assert question.content == ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    assert question.text == "q"
    assert question.columns["data_source"] == "openai/gsm8k"
    assert question.columns["extra_info"] == {"index": 0}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty list of messages"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "last message must be the user's",
        ),
        ([{"role": "user", "content": " "}], "the last message is empty"),
        ([{"role": "user", "content": ["q"]}], "message 1: content must be text, got a list of parts; write the text"),
    ],
)
def test_conversations_that_ask_nothing_are_bad_rows(tmp_path: Path, messages: Any, reason: str) -> None:
    """There must be something to answer, and it must be text."""
    with pytest.raises(DatasetError, match=f":1: messages: .*{reason}"):
        TableTask(write(tmp_path / "t.jsonl", [{"messages": messages, "answer": "a"}])).questions()


def test_ids(tmp_path: Path) -> None:
    """An id column is used as text; without it the id is a hash of the prompt and the row number."""
    rows = [
        {"prompt": "q", "answer": "a", "id": 7},
        {"prompt": "q", "answer": "a"},
        {"prompt": "q", "answer": "b"},
    ]

    questions = TableTask(write(tmp_path / "t.jsonl", rows), repeated="keep").questions()

    first, second = questions[1].id.split("-"), questions[2].id.split("-")
    assert questions[0].id == "7"
    assert (first[0], first[1], second[1]) == (second[0], "2", "3")


def test_an_answer_may_be_missing_where_none_is_needed(tmp_path: Path) -> None:
    """With require_answer = false there is simply no answer column."""
    question = TableTask(write(tmp_path / "t.jsonl", [{"prompt": "q"}]), require_answer=False).questions()[0]

    assert "answer" not in question.columns


def test_rows_that_ask_the_same_are_one_prompt(tmp_path: Path) -> None:
    """The same question with the same answer is merged, or kept if that is set; another answer is said, and kept."""
    rows = [{"prompt": p, "answer": a} for p, a in [("q", "1"), ("r", "1"), ("q", "1"), ("r", "2"), ("s", "1")]]
    path = write(tmp_path / "t.jsonl", rows)

    merged, kept = TableTask(path).questions(), TableTask(path, repeated="keep").questions()

    contrary = (
        "1 of 5 rows of 't' ask what an earlier row asks and have another answer (row 4 as row 2): one is wrong, and "
        "each stays a prompt"
    )
    assert [q.text for q in merged.questions] == ["q", "r", "r", "s"]
    assert merged.repeated == (
        "1 of 5 rows of 't' ask the same as an earlier row (row 3 as row 1) and are merged: 4 prompts remain "
        f"(task.repeated); {contrary}"
    )
    assert len(kept) == 5
    assert kept.repeated == (
        f"1 of 5 rows of 't' ask the same as an earlier row (row 3 as row 1) and are trained on too; {contrary}"
    )
    assert TableTask(write(tmp_path / "t.jsonl", rows[:2])).questions().repeated == ""


@pytest.mark.parametrize(
    ("rows", "remain", "said"),
    [
        ([{"answer": "1", "id": n, "extra_info": {"index": n}} for n in range(3)], 1, "are merged: 1 prompts remain"),
        ([{"answer": "1", "solution": s} for s in "ab"], 1, "merged rows differ in 'solution' in 1, and the first"),
        ([{"secret": n} for n in (1, 2, 1)], 2, "(row 3 as row 1) and are merged"),
        ([{"answer": "1", "tools": [{"name": n}]} for n in "ab"], 2, ""),
        ([{"answer": a} for a in "121"], 2, "(row 3 as row 1) and are merged"),
    ],
)
def test_what_makes_two_rows_one_prompt(tmp_path: Path, rows: list[Any], remain: int, said: str) -> None:
    """Numbers of rows do not count, answers and tools do; without an answer every other column does."""
    path = write(tmp_path / "t.jsonl", [{"prompt": "q", **row} for row in rows])

    found = TableTask(path, answer_column="answer", require_answer=False).questions()

    assert len(found) == remain
    assert said in found.repeated


def test_words_around_a_question(tmp_path: Path) -> None:
    r"""Prefix, template and suffix stand around it, \boxed{x} stays, and what questions are compared by is bare."""
    rows = [
        {"prompt": "1+1=?", "answer": "2", "about": {"topic": "sums"}},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2=?"}], "answer": "4", "about":
         {"topic": 7}},
    ]  # fmt: skip
    path = write(tmp_path / "t.jsonl", rows)

    asked = TableTask(path, prefix="<", suffix=r" \boxed{about}>", template="{about.topic}: {question}").questions()

    assert asked[0].content == r"<sums: 1+1=? \boxed{about}>"
    assert asked[1].content == (rows[1]["prompt"][0], {"role": "user", "content": r"<7: 2+2=? \boxed{about}>"})
    assert [q.text for q in asked.questions] == ["1+1=?", "2+2=?"]


def test_templates_that_cannot_be_meant(tmp_path: Path) -> None:
    """A template without the question, with the answer, or with a column that a row lacks is refused by name."""
    path = write(tmp_path / "t.jsonl", [{"prompt": "q", "answer": "a"}])

    with pytest.raises(ConfigError, match=r"has no \{question\}, so every row would ask the same"):
        TableTask(path, template="Q: {prompt}")
    with pytest.raises(ConfigError, match=r"shows \{answer\}, the answer, to the model"):
        TableTask(path, template="{question} ({answer})")
    with pytest.raises(ConfigError, match=r"shows \{x.y\}, the answer"):
        TableTask(path, template="{question} ({x.y})", answer_column="x.y")
    with pytest.raises(DatasetError, match=r":1: task.template: no column 'topic'; the row has prompt, answer"):
        TableTask(path, template="{topic}: {question}").questions()


def test_json_parquet_and_saved_datasets_hold_the_same_questions(tmp_path: Path) -> None:
    """The same rows give the same ids, texts and columns from every format."""
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(3)]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "many"))
    tables = [
        TableTask(write(tmp_path / "t.jsonl", rows)), TableTask(str(tmp_path / "t.json")),
        TableTask(str(tmp_path / "t.parquet")), TableTask(str(tmp_path / "one")),
        TableTask(f"{tmp_path / 'many'}::test"), TableTask(str(tmp_path / "many"), split="test"),
    ]  # fmt: skip

    seen = [[(q.id, q.text, q.columns["answer"]) for q in table.questions().questions] for table in tables]

    assert all(each == seen[0] for each in seen)
    assert [answer for _, _, answer in seen[0]] == ["1", "2", "3"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_folder_that_lacks_a_part_of_a_table_is_refused(tmp_path: Path, missing: int) -> None:
    """By the names that the hub gives parts; a whole table, beside one of another split, is read."""
    for number in range(3):
        rows = pa.Table.from_pylist([{"prompt": f"{number}+{n}=", "answer": str(number + n)} for n in range(4)])
        pyarrow.parquet.write_table(rows, tmp_path / f"train-{number:05d}-of-00003.parquet")
    pyarrow.parquet.write_table(rows, tmp_path / "test-00000-of-00001.parquet")
    assert len(TableTask(str(tmp_path)).questions().questions) == 12

    (tmp_path / f"train-{missing:05d}-of-00003.parquet").unlink()
    with pytest.raises(DatasetError, match="is one of 3 parts by its name, and 2 are there"):
        TableTask(str(tmp_path)).questions()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (7, "007", r"b\.parquet: the column 'answer' is string, and int in a\.parquet"),
        ("7", 7.5, r"'answer' is double, and string in"),
        (["7"], "7", r"'answer' is string, and list<"),
        (True, 1, r"'answer' is int, and bool in"),
        (None, "7", r"'answer' is string, and null in"),
    ],
)
def test_files_of_one_folder_have_columns_of_one_type(tmp_path: Path, first: Any, second: Any, said: str) -> None:
    """`datasets` gives each file the types of the first, or ends in a page that names no file."""
    for name, answer in (("a", first), ("b", second)):
        rows = [{"prompt": f"{name}?", "answer": answer}, {"prompt": f"{name}!", "answer": answer}]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")

    with pytest.raises(DatasetError, match=said):
        TableTask(str(tmp_path)).questions()


def test_files_of_one_folder_have_the_same_columns(tmp_path: Path) -> None:
    """What one of them lacks is named."""
    for name, more in (("a", {}), ("b", {"level": 1})):
        rows = [{"prompt": f"{name}?", "answer": "1", **more}, {"prompt": f"{name}!", "answer": "2", **more}]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")

    with pytest.raises(DatasetError, match=r"b\.parquet: the column 'level' is int, and not there in a\.parquet"):
        TableTask(str(tmp_path)).questions()


def test_widths_of_types_are_no_difference(tmp_path: Path) -> None:
    """Files of 32 and 64 bits, of large texts and of categories hold the same values."""
    answers = pa.array(["1", "2"])
    kinds = {"a": answers, "b": answers.cast(pa.large_string()), "c": answers.dictionary_encode()}
    for name, column in kinds.items():
        table = pa.table({"prompt": [f"{name}?", f"{name}!"], "answer": column})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")

    assert [q.columns["answer"] for q in TableTask(str(tmp_path)).questions().questions] == ["1", "2"] * 3


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    """The message gives the path and a file beside it that is spelled alike."""
    write(tmp_path / "train.jsonl", [{"prompt": "q", "answer": "a"}])

    with pytest.raises(DatasetError, match=r"trian\.jsonl does not exist; did you mean .*train\.jsonl\?"):
        TableTask(str(tmp_path / "trian.jsonl")).questions()
    with pytest.raises(DatasetError, match="nor does its folder"):
        TableTask(str(tmp_path / "nowhere" / "train.jsonl")).questions()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl", b"\n \n", "has no rows"),
        ("t.json", b'{"prompt": "q"}', "holds one dict; expected a list"),
        ("t.json", b'[{"prompt": "q"},\n{]', r"t\.json:2: not JSON"),
        ("t.json", b'{"prompt": "q"}\n{"prompt": "q"}', "rename the file"),
        ("t.json", b'["\xff"]', "is not UTF-8"),
        ("t.parquet", b"not parquet", "not a readable Parquet file"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    """Empty, malformed and mislabeled files end in one message."""
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DatasetError, match=reason):
        TableTask(str(tmp_path / name)).questions()


def test_splits_and_subsets_that_contradict_are_refused(tmp_path: Path) -> None:
    """A split must exist, be said once, and does not belong to a single file."""
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"prompt": "q"}])}).save_to_disk(str(tmp_path / "many"))
    file = write(tmp_path / "t.jsonl", [{"prompt": "q", "answer": "a"}])

    with pytest.raises(DatasetError, match="unknown split 'tset'; did you mean 'test'"):
        TableTask(f"{tmp_path}/many", split="tset").questions()
    with pytest.raises(ConfigError, match="has no split 'test'"):
        TableTask(file, split="test").questions()
    with pytest.raises(ConfigError, match="names the split 'a'"):
        TableTask(f"{tmp_path}/many::a", split="b").questions()
    with pytest.raises(ConfigError, match="names the subset 'a'"):
        TableTask(f"{tmp_path}/many:a", subset="b").questions()
    with pytest.raises(ConfigError, match="NAME:SUBSET:SPLIT"):
        TableTask("a:b:c:d").questions()


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    """Files from Windows load."""
    (tmp_path / "t.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "q", "answer": "a"}\r\n{"prompt": "r", "answer": "b"}\r\n'
    )

    assert [q.text for q in TableTask(str(tmp_path / "t.jsonl")).questions().questions] == ["q", "r"]
