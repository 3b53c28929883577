"""Where rows come from: every format, what each may hold, and what is no table at all."""

import datetime
import gzip
import json
import os
import socket
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import answer_of
from gnomon.tasks.readers import _hub_or_cache, read_rows
from gnomon.tasks.tables import TableTask
from gnomon.training.objects import write_rows


def test_a_file_of_an_unknown_format_is_not_looked_for_on_the_hub(tmp_path: Path):
    """A file that is here and cannot be read is refused at once, with the formats that can."""
    table = tmp_path / "rows.xlsx"
    table.write_text("prompt,answer\n1+1=,2\n")

    with pytest.raises(DatasetError, match=r"no known format; known are \.arrow, \.csv, \.json, \.jsonl, \.parquet"):
        read_rows(str(table), None, "train")


def questions(path: Path) -> list[tuple[str, Any]]:
    return [(q.text, answer_of(q.columns)) for q in TableTask(str(path)).questions().questions]


def parquet(folder: Path, answers: Any, **more: Any) -> Path:
    path = folder / "t.parquet"
    columns = {"prompt": pa.array([f"Question {n}?" for n in range(len(answers))]), "answer": answers, **more}
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


DAY, MOMENT = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5)
NAMED = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("answers", "read"),
    [
        (pa.array([b"7", "caf\u00e9".encode()]), ["7", "caf\u00e9"]),
        (pa.array([b"7", b"8"], pa.large_binary()), ["7", "8"]),
        (pa.array([Decimal("7.00"), Decimal("0.50")]), ["7", "0.5"]),
        (pa.array([7.0, 0.5]), ["7", "0.5"]),
        (pa.array([7, 2**63 - 1]), ["7", "9223372036854775807"]),
        (pa.array([2**64 - 1, 0], pa.uint64()), ["18446744073709551615", "0"]),
        (pa.array([DAY, DAY]), ["2026-01-02"] * 2),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        (pa.array([[1, 2], [3]]), [[1, 2], [3]]),
        (pa.array([{"a": Decimal("1.0")}, {"a": Decimal("2.5")}]), [{"a": "1"}, {"a": "2.5"}]),
        (pa.array([[("k", 1)], [("l", 2)]], pa.map_(pa.string(), pa.int64())), [[["k", 1]], [["l", 2]]]),
        (pa.array([True, False]), [True, False]),
        (pa.array([b"0" * 15 + b"7"] * 2, pa.binary(16)), ["0" * 15 + "7"] * 2),
    ],
    ids=str,
)
def test_what_a_parquet_file_holds_is_read_as_what_it_can_only_mean(tmp_path: Path, answers: Any, read: list[Any]):
    """Bytes are UTF-8 text, numbers their shortest text, days ISO 8601; lists and objects are JSON's."""
    found = questions(parquet(tmp_path, answers))

    assert [answer for _, answer in found] == read
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (pa.array([7.0, float("nan")]), ":2: answer: nan is no number; where there is none write null"),
        (pa.array([float("inf"), 1.0]), ":1: answer: inf is no number"),
        (pa.array([-float("inf"), 1.0], pa.float32()), ":1: answer: -inf is no number"),
        (pa.array([b"\xff\xfe", b"7"]), r":1: answer: bytes that are no UTF-8 text: b'\\xff\\xfe'"),
        (pa.array([None, "7"]), ":1: answer: missing; the row has prompt, answer"),
        (pa.array(["  ", "7"]), ":1: answer: empty"),
        (pa.array(["7", "7\0"]), ":2: answer: a NUL at character 2"),
        (pa.array(["\ufeff7", "7"]), ":1: answer: a byte order mark at character 1"),
        (pa.array([MOMENT, MOMENT]), ":1: answer: 2026-01-02T03:04:05 is a time, .*; write the answer as text"),
        (pa.array([datetime.timedelta(1)] * 2), ":1: answer: 1 day, 0:00:00 is a time"),
        (pa.array([[{"a": [1.0, float("nan")]}], []]), r":1: answer\[0\]\.a\[1\]: nan is no number"),
        (pa.array([2**60, 1], pa.timestamp("ms")), ":1: answer: a value of the type timestamp.ms. that cannot be read"),
        (pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]),
         ":1: answer: a value of the type string that cannot be read"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value.type),
)  # fmt: skip
def test_what_a_parquet_file_holds_and_nobody_can_mean_is_named(tmp_path: Path, answers: Any, said: str):
    """A value that is no text, number, list or object is refused by file, row and field."""
    with pytest.raises(DatasetError, match=said):
        questions(parquet(tmp_path, answers))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("id", "\ud8000", "id: half a surrogate pair at character 1"),
        ("more", {"a": ["\udc00"]}, r"more\.a\[0\]: half a surrogate pair"),
        ("\ud800", 1, r"line: the name of a field, '\\ud800', has half a surrogate pair"),
        ("more", {"\0": 1}, "more: the name of a field, .* has a NUL"),
        ("more", float("nan"), "more: nan is no number"),
        ("more", [1e400], r"more\[0\]: inf is no number"),
        ("\ufeffid", "x", "line: the name of a field, .* has a byte order mark at character 1"),
        ("prompt", "\ufeffq", "prompt: a byte order mark at character 1"),
        ("prompt", "q\0", "prompt: a NUL at character 2"),
        ("id", "  ", "id: must be text or a whole number, got '  '"),
        ("id", 1.5, "id: must be text or a whole number, got 1.5"),
        ("prompt", [{"role": "user", "content": "\ud800"}], r"prompt\[0\]\.content: half a surrogate pair"),
        ("solution", "another", "answer and solution: differ, '7' and 'another'; say .* = \"answer\""),
        ("ground_truth", 8, "ground_truth and answer: differ, '8' and '7'"),
        ("reward_model", {"ground_truth": "x"}, "reward_model.ground_truth and answer: differ"),
        ("label", ["7"], "label and answer: differ"),
    ],
)  # fmt: skip
def test_every_field_of_a_row_is_looked_at_once(tmp_path: Path, name: str, value: Any, said: str):
    """Ids, prompts, answers, other columns and the names of fields, at any depth, go through one check."""
    rows = [{"id": "a", "prompt": "q", "answer": "7"}, {"id": "b", "prompt": "r", "answer": "7", name: value}]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    with pytest.raises(DatasetError, match=rf"t\.jsonl:2: {said}") as caught:
        questions(path)

    assert str(caught.value).count("\n") < 5


GOOD = b'{"prompt": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", b"", "is empty: it has 0 bytes"),
        ("t.jsonl", gzip.compress(GOOD, mtime=0), "is compressed by gzip; unpack it: `gunzip"),
        ("t.jsonl", b"\x28\xb5\x2f\xfd\0\0", "is compressed by zstd"),
        ("t.csv", b"PK\3\4....", "is a zip archive or a spreadsheet"),
        ("t.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
        ("t.csv", b"\n<!DOCTYPE html>\n<html>", "is an HTML page"),
        ("t.parquet", b"<html>Not found", "is an HTML page"),
        ("t.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("t.jsonl", b"PAR1....PAR1", "is a file of the format .parquet; rename it"),
        ("t.json", b"ARROW1..", "is a file of the format .arrow; rename it"),
        ("t.jsonl", GOOD.decode().encode("utf-16"), "is UTF-16; save it as UTF-8: `iconv"),
        ("t.jsonl", GOOD.decode().encode("utf-16-le"), "is UTF-16 or binary"),
        ("t.csv", "prompt,answer\nq,a and b and c and d".encode("utf-16-be"), "is UTF-16 or binary"),
        ("t.jsonl", GOOD.replace(b"q", b"caf\xe9"), ":1: line: not UTF-8: byte 0xe9"),
        ("t.csv", b"prompt,answer\nq,a\ncaf\xe9,a\n", ":3: is not UTF-8: byte 0xe9; save the file as UTF-8"),
        ("t.json", b'[\n{"prompt": "\xe9"}]', ":2: is not UTF-8"),
        ("t.jsonl", b"[" + GOOD + b"]", "is one JSON list, not an object on each line; rename it to .json"),
        ("t.jsonl", b"[\n " + GOOD + b",\n" + GOOD + b"\n]", "is one JSON list"),
        ("t.json", GOOD, "holds one dict; expected a list of objects, .*one object on each line is .jsonl"),
        ("t.json", GOOD + b"\n" + GOOD, "rename the file"),
        ("t.jsonl", GOOD + b"\n" + GOOD[:20], ":2: line: not JSON"),
        ("t.jsonl", b'{"prompt": "q", "answer": "1", "answer": "2"}', ":1: line: the field 'answer' is given twice"),
        ("t.json", b'[{"prompt": "q", "a": {"b": 1, "b": 2}}]', "the field 'b' is given twice"),
        ("t.jsonl", b'{"prompt": "q", "answer": ' + b"9" * 5000 + b"}", ":1: line: Exceeds the limit"),
        ("t.jsonl", b'{"prompt": "q", "answer": ' + b"[" * 90 + b"]" * 90 + b"}", "nested more than 64 levels deep"),
        ("t.jsonl", b'{"prompt": "q", "answer": ' + b"[" * 90000, ":1: line: "),
        ("t.csv", b"sep=;\nprompt;answer\nq;a\n", "columns are parted by ',', .* has ';' instead"),
        ("t.tsv", b"prompt,answer\nq,a\n", "columns are parted by '.t', .* has ',' instead"),
        ("t.csv", b"prompt,answer\nq,a,b\n", ":2: line: 3 columns, and the first line names 2"),
        ("t.csv", b'prompt,answer\n"q\nr",a\nq\n', ":4: line: 1 columns, and the first line names 2"),
        ("t.csv", b"prompt,answer,answer\nq,a,b\n", ":1: the column 'answer' is named twice"),
        ("t.csv", b'prompt,answer\nq,a\n"q,a\nr,b\n', ":3: not CSV: .*is a quote not closed"),
        ("t.csv", b"prompt,answer\nq,\n", ":2: answer: missing"),
        ("t.csv", b"prompt,answer\n", "has no rows"),
        ("t.arrow", b"nothing of the kind", "not a readable Arrow file"),
    ],
)
def test_what_is_no_table_is_refused_in_words(tmp_path: Path, name: str, content: bytes, said: str):
    """A file that is something else than its name says, or torn, is named with what to do."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DatasetError, match=said) as caught:
        questions(path)

    assert str(caught.value).count("\n") < 5
    assert len(str(caught.value)) < 900


def test_a_cell_of_csv_may_be_as_long_as_the_file(tmp_path: Path):
    """Tests of programs are longer than the 131,072 characters at which Python stops reading a cell."""
    path = tmp_path / "t.csv"
    path.write_text(f"prompt,answer,tests\nq,a,{'x' * 140_000}\nr,b,y\n")
    rows = TableTask(str(path)).questions().questions

    assert [len(str(row.columns["tests"])) for row in rows] == [140_000, 1]


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet", "t"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str):
    """A named pipe is not waited for, and neither a folder nor a device is read as rows."""
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")

    with pytest.raises(DatasetError, match=f"{name} is a named pipe"):
        questions(tmp_path / name)
    with pytest.raises(DatasetError, match=r"folder\.csv is a folder"):
        questions(tmp_path / "folder.csv")
    with pytest.raises(DatasetError, match=r"zero\.jsonl is a device"):
        questions(tmp_path / "zero.jsonl")
    with pytest.raises(DatasetError, match="cannot be read: File name too long"):
        questions(tmp_path / f"{'x' * 300}.jsonl")
    with pytest.raises(DatasetError, match=r"cannot be read: .*null byte"):
        questions(Path("a\0.jsonl"))


ROWS = [{"prompt": f'{n}, "two"\r\nlines\t=', "answer": f"{n}"} for n in range(3)]


@pytest.mark.parametrize("begin", ["", "\ufeff"], ids=["plain", "marked"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "mac"])
def test_marks_and_line_ends_of_every_system_are_read(tmp_path: Path, begin: str, end: str):
    """JSONL and CSV with or without a byte order mark and with the line ends of any system hold the same rows."""
    (tmp_path / "t.jsonl").write_bytes((begin + end.join(map(json.dumps, ROWS)) + end).encode())
    quoted = [",".join('"' + row[key].replace('"', '""') + '"' for key in row) for row in ROWS]
    (tmp_path / "t.csv").write_bytes((begin + end.join(["prompt,answer", *quoted]) + end).encode())

    expected = [(row["prompt"], row["answer"]) for row in ROWS]

    assert questions(tmp_path / "t.jsonl") == questions(tmp_path / "t.csv") == expected


def test_arrow_files_and_saved_datasets_hold_what_parquet_holds(tmp_path: Path):
    """The check of values is the same for Parquet, both forms of Arrow, and folders of `datasets`."""
    table = pa.table({"prompt": ["a", "b"], "answer": pa.array([b"7", b"8"]), "id": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, str(tmp_path / "file.arrow"), compression="uncompressed")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(table).select([0, 1]).save_to_disk(str(tmp_path / "saved"))

    for name in ("t.parquet", "file.arrow", "stream.arrow", "saved"):
        assert questions(tmp_path / name) == [("a", "7"), ("b", "8")]


FEATURES = datasets.Features({
    "prompt": datasets.Value("string"),
    "label": datasets.ClassLabel(names=["negative", "positive"]),
    "tags": datasets.List(datasets.ClassLabel(names=["a", "b"])),
    "meta": {"kind": datasets.ClassLabel(names=["film", "book"])},
})  # fmt: skip
REVIEWS = [{"prompt": "good", "label": 1, "tags": [1, 0], "meta": {"kind": 0}},
           {"prompt": "bad", "label": 0, "tags": [], "meta": {"kind": 1}}]  # fmt: skip


@pytest.mark.parametrize("form", ["t.parquet", "file.arrow", "stream.arrow", "saved", "folder"])
def test_the_answer_of_a_column_of_classes_is_the_name(tmp_path: Path, form: str):
    """Answers, templates and dotted columns have the names, however deep; rewards have the column's own numbers."""
    made = datasets.Dataset.from_list(REVIEWS, features=FEATURES)
    table = made.with_format("arrow")[:]
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "folder" / "train.parquet")
    path = str(tmp_path / form)

    found = TableTask(path, template="{label} {tags}? {question}").questions()
    dotted = TableTask(path, answer_column="meta.kind").questions().questions

    assert [q.columns["answer"] for q in found.questions] == ["positive", "negative"]
    assert [q.columns["label"] for q in found.questions] == [1, 0]
    assert found.questions[0].columns["tags"] == [1, 0]
    assert found.questions[0].content == 'positive ["b", "a"]? good'
    assert "are names of the classes of 'label', as 'positive'" in found.repeated
    assert "cast_column('label', Value('int64'))" in found.repeated
    assert [q.columns["answer"] for q in dotted] == ["film", "book"]


def test_a_class_without_a_name_is_no_answer(tmp_path: Path):
    """The -1 of a test split, of `datasets`, is a missing answer and not the last class."""
    datasets.Dataset.from_list([{**REVIEWS[0], "label": -1}], features=FEATURES).save_to_disk(str(tmp_path / "saved"))

    with pytest.raises(DatasetError, match=r"saved:1: answer: missing"):
        TableTask(str(tmp_path / "saved")).questions()


def test_a_label_of_two_classes_is_read_by_its_name(tmp_path: Path):
    """Which class is the good one is not guessed from its number."""
    features = datasets.Features({"prompt": datasets.Value("string"), "completion": datasets.Value("string"),
                                  "label": datasets.ClassLabel(names=["good", "bad"])})  # fmt: skip
    made = datasets.Dataset.from_list([{"prompt": "a", "completion": "b", "label": 1}], features=features)
    made.save_to_disk(str(tmp_path / "saved"))

    with pytest.raises(DatasetError, match="label: must be true or false, got 'bad'"):
        TableTask(str(tmp_path / "saved"), completion_column="completion", label_column="label").questions()


def test_parts_of_a_table_have_the_same_classes(tmp_path: Path):
    """`datasets` gives all files the names of the first, so that 1 would be another class."""
    for name, classes in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        features = datasets.Features({"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=classes)})
        made = datasets.Dataset.from_list([{"prompt": name, "label": 1}], features=features)
        pyarrow.parquet.write_table(made.with_format("arrow")[:], tmp_path / f"{name}.parquet")

    with pytest.raises(DatasetError, match=r"b.parquet: the column 'label' is of the classes .*yes.* in a.parquet"):
        TableTask(str(tmp_path)).questions()


CLASSES = datasets.ClassLabel(names=["no", "yes"])
FULL = datasets.Dataset.from_list(
    [{"prompt": "a", "label": 1, "tags": [0], "meta": {"kind": 0}},
     {"prompt": "b", "label": 0, "tags": [], "meta": None}],
    features=datasets.Features({"prompt": datasets.Value("string"), "label": CLASSES,
                                "tags": datasets.List(CLASSES), "meta": {"kind": CLASSES}}),
)  # fmt: skip
PLAIN = FULL.select_columns(["prompt", "label"])
STREAM, NARROW = FULL.to_iterable_dataset(), PLAIN.to_iterable_dataset()
INTEGER = datasets.Value("int64")


@pytest.fixture
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same(row: Any) -> Any:
    return row


@pytest.mark.usefixtures("_in_tmp_path")
@pytest.mark.parametrize(
    "rows",
    [
        STREAM.map(same),
        STREAM.map(same).map(same).filter(lambda _: True).shuffle(seed=1).take(1),
        NARROW.map(same, features=PLAIN.features).map(same),
        NARROW.map(lambda row: {"label": np.int64(row["label"])}),
        NARROW.map(lambda row: {"label": None if row["prompt"] == "a" else row["label"]}),
        STREAM.select_columns(["prompt", "tags"]).map(same),
        STREAM.select_columns(["prompt", "meta"]).map(same),
        datasets.concatenate_datasets([NARROW.map(same), NARROW.map(same)]),
        datasets.interleave_datasets([NARROW.map(same), NARROW.map(same)]),
        FULL.with_transform(same),
        FULL.with_transform(lambda rows: {"label": rows["label"]}),
    ],
)
def test_numbers_of_classes_whose_names_a_function_lost_are_refused(rows: Any):
    """`Dataset.map` keeps the classes of columns that stay numbers; where none are kept 1 would be the answer."""
    with pytest.raises(ConfigError, match=r"row \d, column '(label|tags|meta)': .* class.* features=.*remove_columns"):
        write_rows(rows)


@pytest.mark.usefixtures("_in_tmp_path")
@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        (NARROW.map(lambda row: {"label": CLASSES.int2str(row["label"])}), ["yes", "no"]),
        (NARROW.map(same, features=PLAIN.features), ["yes", "no"]),
        (NARROW.cast_column("label", INTEGER).map(same), ["1", "0"]),
        (PLAIN.cast_column("label", INTEGER).with_transform(same), ["1", "0"]),
        (NARROW.map(lambda row: {"answer": f"n{row['label']}"}, remove_columns=["label"]), ["n1", "n0"]),
        (datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a", "label": 1}])).map(same), ["1"]),
    ],
)
def test_rows_of_a_function_are_taken_where_no_name_is_lost(rows: Any, answers: list[str]):
    """Names, types that are given, and numbers that never had a name are answers as they are."""
    assert [q.columns["answer"] for q in TableTask(write_rows(rows)).questions().questions] == answers


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path):
    """Of two columns of one name neither is taken without a word."""
    pyarrow.parquet.write_table(pa.table([["q"], ["1"], ["2"]], ["prompt", "answer", "answer"]), tmp_path / "t.parquet")

    with pytest.raises(DatasetError, match="the column 'answer' is there twice"):
        questions(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("answers", "read"),
    [
        (pa.array([0.1, 3.3], pa.float32()), ["0.1", "3.3"]),
        (pa.array([0.1, 65504.0], pa.float16()), ["0.1", "65504"]),
        (pa.array([[0.7, None], []], pa.list_(pa.float32())), [[0.7, None], []]),
        (pa.array([{"a": 0.3}, None], pa.struct([("a", pa.float32())])), [{"a": 0.3}]),
        (pa.array([16777216.0, 1e30], pa.float32()), ["16777216", "1e+30"]),
    ],
    ids=str,
)
def test_short_floats_are_the_numbers_that_were_written(tmp_path: Path, answers: Any, read: list[Any]):
    """0.1 in 32 or 16 bits is 0.1 at any depth, and not the 0.10000000149011612 that Python makes of it."""
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": ["q", "r"], "answer": answers}), path)

    found = TableTask(str(path), require_answer=False).questions().questions

    assert [answer for q in found if (answer := answer_of(q.columns)) is not None] == read


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "written", "told"),
    [
        ("answer", 7, 7),
        ("answer", -3.0, -3),
        ("answer", 7.5, 7.5),
        ("answer", "7", "7"),
        ("answer", "7.0", "7.0"),
        ("solution", 7, "7"),
        ("label", True, True),
    ],
)
def test_functions_are_told_numbers_as_the_row_has_them(
    tmp_path: Path, form: str, column: str, written: Any, told: Any
):
    """A function that says `answer == int(completion)` is not given text; what gnomon compares is the number's text."""
    path = tmp_path / f"t.{form}"
    if form == "jsonl":
        path.write_text(json.dumps({"prompt": "q", column: written}) + "\n")
    else:
        pyarrow.parquet.write_table(pa.table({"prompt": ["q"], column: [written]}), path)

    question = TableTask(str(path)).questions().questions[0]

    assert (question.columns["answer"], type(question.columns["answer"])) == (told, type(told))
    assert question.columns[column] == written


@pytest.mark.parametrize(
    "number", ["3.14159265358979323846", "0.1000000000000000055", "123456789012345678901234567890.5", "1e-400"]
)
def test_a_number_of_more_digits_than_json_keeps_is_no_answer(tmp_path: Path, number: str):
    """The answer would be another number; in a column that is no answer it is the nearest number."""
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"prompt": "q", "answer": {number}}}')
    with pytest.raises(DatasetError, match=rf"t.jsonl:1: answer: .* stands for {number}.*write the answer as text"):
        questions(path)

    path.write_text(f'{{"prompt": "q", "answer": 0.30000000000000004, "weight": {number}}}')
    assert TableTask(str(path)).questions()[0].columns["weight"] == float(number)


@pytest.mark.parametrize(
    "text",
    ['[{"role": "user", "content": "hi"}]', "[{'role': 'user', 'content': 'hi'}]", ' [ { "from": "human"}]',
     "[{'content': 'hi', 'role': 'user'}\n {'role': 'user'}]"],
)  # fmt: skip
def test_messages_that_became_text_are_refused(tmp_path: Path, text: str):
    """A CSV, or pandas, writes a chat as text, which would be asked as it stands."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": text, "answer": "7"}))

    with pytest.raises(DatasetError, match="messages: text that holds a list of messages; write the list itself"):
        questions(path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"prompt": "q", "question": "r", "answer": "7"}],
            "the prompts 'prompt' and 'question' differ in 1 of 1 rows",
        ),
        ([{"prompt": "q", "question": "q", "answer": "7"}], ""),
        ([{"problem": "q", "messages": [{"role": "user", "content": "q!"}], "answer": "7"}], ""),
        (
            [{"prompt": "q", "messages": [{"role": "user", "content": "r"}], "answer": "7"}],
            "the prompts 'prompt' and 'messages' differ in 1 of 1 rows",
        ),
        ([{"prompt": "q", "answer": "nan"}], "1 of 1 answers of 't' are the text 'nan', which programs write for no"),
        (
            [{"prompt": "q", "answer": "7"}, {"prompt": "r", "answer": "N/A"}],
            "1 of 2 answers of 't' are the text 'N/A'",
        ),
        ([{"prompt": "q", "answer": "None of them"}], ""),
    ],
)
def test_what_may_be_a_slip_is_said(tmp_path: Path, rows: list[Any], said: str):
    """Two prompts that differ, and answers that programs write for nothing, are said; neither is refused."""
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    found = TableTask(str(path)).questions().repeated

    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("", "path is empty"),
        ("https://example.com/t.jsonl", "is an address; download"),
        ("{0}/texts", r"folder of 2 text file\(s\) .* name one of them: .*a\.jsonl, .*b\.csv"),
        ("{0}/t.jsonl.gz", "is compressed by gzip; unpack it"),
        ("{0}/link.jsonl", "is a link to nowhere.jsonl, which does not exist"),
        ("{0}/t.jsonl:main", "is a single file and has no subset or split; write .*t.jsonl alone"),
        ("{0}/wide.jsonl", "is UTF-32; save it as UTF-8"),
    ],
)
def test_places_that_are_no_table_are_told(tmp_path: Path, named: str, said: str):
    """What is named and cannot be rows is said with what to name instead."""
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "texts" / "deep" / "b.csv").write_text("prompt,answer\nq,007\n")
    (tmp_path / "t.jsonl").write_bytes(GOOD)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(GOOD, mtime=0))
    (tmp_path / "wide.jsonl").write_bytes(GOOD.decode().encode("utf-32"))
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")

    with pytest.raises((DatasetError, ConfigError), match=said):
        TableTask(named.format(tmp_path)).questions()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"subset": "main"}, "is a single file and has no subset 'main'"),
        ({"prompt_column": ""}, "task.prompt_column is ''; name a column"),
        ({"answer_column": "  "}, "task.answer_column is '  '"),
        ({"reward_columns": ("imagse",)}, "task.reward_columns: unknown column 'imagse'"),
    ],
)
def test_settings_of_a_table_that_name_nothing_are_refused(tmp_path: Path, setting: dict[str, Any], said: str):
    """A setting that would be passed over is an error that names it."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD)

    with pytest.raises(ConfigError, match=said):
        TableTask(str(path), **setting).questions()


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch):
    """What was fetched before is looked for; the message is of a dataset that is not there. With a hub it is asked."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        with _hub_or_cache(datasets.config):
            assert not datasets.config.HF_HUB_OFFLINE
    with _hub_or_cache(datasets.config):
        assert datasets.config.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE

    with pytest.raises(DatasetError, match="OfflineModeIsEnabled"):
        TableTask("no-such-organization/no-such-set").questions()
