import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gnomon.core.errors import DatasetError
from gnomon.tasks.arrow_rows import rows_of
from gnomon.tasks.split import Repetitions
from gnomon.tasks.tables import TableTask

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUMBERING = frozenset(("id", "extra_info"))


def made(random: Random, count: int) -> list[dict[str, Any]]:
    """Return rows in the layout of DAPO-Math-17k that repeat each other in part, with nulls and odd columns."""
    rows = []
    for number in range(count):
        messages = [{"role": random.choice(["system", "user"]), "content": random.choice("ab")}] * random.randint(0, 1)
        rows.append({
            "prompt": [*messages, {"role": "user", "content": random.choice(["1+1", "2+2", "e\u0301"])}],
            "reward_model": {"ground_truth": random.choice("12"), "style": random.choice([None, "rule"])},
            "level": random.choice([None, 0.5, -0.0, 3.0]),
            "extra_info": {"index": number},
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("repeated", ["merge", "keep"])
def test_a_table_of_parquet_asks_what_the_same_rows_ask_in_jsonl(tmp_path: Path, seed: int, repeated: Any):
    """Rows that are compared before they are made become the prompts and sentences of those compared one by one."""
    rows = made(Random(seed), 120)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=50)
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))

    fast, plain = (TableTask(str(tmp_path / f"t.{e}"), repeated=repeated).questions() for e in ("parquet", "jsonl"))
    rest = Repetitions("t", repeated == "merge")
    kept = [q.id for q in TableTask(str(tmp_path / "t.jsonl"), repeated="keep").questions().questions
            if rest.is_kept(q, int(q.id.rpartition("-")[2]))]  # fmt: skip

    assert [q.id for q in plain.questions] == kept
    assert plain.repeated == rest.said

    assert [(q.id, q.content, q.columns) for q in fast.questions] == [
        (q.id, q.content, q.columns) for q in plain.questions
    ]
    assert fast.repeated == plain.repeated != ""


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_copies_are_counted_across_batches(size: int):
    """However a table is cut, each different row is there once, in its order, with the numbers of its copies."""
    random = Random(size)
    table = pa.Table.from_pylist(made(random, 90))
    rows = rows_of(table.to_reader(size), "t", NUMBERING)
    first: dict[str, list[int]] = {}
    for number, row in enumerate(rows_of(table.to_reader(), "t", None), start=1):
        first.setdefault(repr({k: v for k, v in row.values.items() if k not in NUMBERING}), []).append(number)

    assert [[row.number, *row.copies] for row in rows] == list(first.values())
    assert [row.values["extra_info"]["index"] + 1 for row in rows] == [row.number for row in rows]


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (pa.array([[("a", 1)], [("a", 1)]], pa.map_(pa.string(), pa.int64())), 2),
        (pa.array([list(range(17))] * 2), 2),
        (pa.array([list(range(16))] * 2), 1),
        (pa.array([[], None]), 2),
        (pa.array([{"x": None}, None]), 2),
        (pa.array([None, None]), 1),
        (pa.array([b"\xff", b"\xff"]), 1),
        (pa.array(["a", "a"]).dictionary_encode(), 1),
        (pa.array(["a", "a"], pa.large_string()), 1),
        (pa.array([[[1], []], [[1], []]], pa.large_list(pa.list_(pa.int64()))), 1),
    ],
)
def test_what_arrow_cannot_compare_stays(column: Any, rows: int):
    """Maps and lists of more than 16 are left to the comparison of rows; null is another value than an empty one."""
    assert len(rows_of(pa.table({"x": column, "id": ["1", "2"]}).to_reader(), "t", NUMBERING)) == rows


def test_columns_that_number_rows_count_where_they_are_read(tmp_path: Path):
    """A template that shows extra_info makes each row a prompt of its own; a bad row's copies are counted as bad."""
    rows = [{"prompt": "q", "answer": "1", "extra_info": {"index": n}} for n in range(4)]
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    shown = TableTask(str(path), template="({extra_info.index}) {question}").questions()
    assert [q.content for q in shown.questions] == ["(0) q", "(1) q", "(2) q", "(3) q"]

    parquet.write_table(pa.Table.from_pylist([{"prompt": " ", "answer": "1"}, rows[0]] * 3), path)
    with pytest.raises(DatasetError, match=r"3 of 6 rows(.|\n)*:1: prompt: empty(.|\n)*:3: (.|\n)*:5: "):
        TableTask(str(path)).questions()


def test_texts_that_arrow_only_views_are_read(tmp_path: Path):
    """Polars writes texts as string_view, which Arrow neither compares nor takes; equal rows are one prompt still."""
    texts = {"question": ["1+1", "1+1", "2+2"], "answer": ["2", "2", "4"]}
    table = pa.table({name: pa.array(values, type=pa.string_view()) for name, values in texts.items()})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)

    for path in (tmp_path / "t.parquet", tmp_path / "t.arrow"):
        assert [row.columns["answer"] for row in TableTask(str(path)).questions()] == ["2", "4"]
