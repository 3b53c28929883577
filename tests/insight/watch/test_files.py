"""Files that grow are read as far as they are new."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.insight.made_runs import add_rows

from gnomon.insight.watch.watcher import Growing, Row, Unchanged


def growing(path: Path) -> Growing[Row]:
    """Return a reader that keeps whole rows."""
    return Growing(path, lambda row: row)


def test_only_what_was_added_is_read(tmp_path: Path):
    """Two rows, then one more: `keep` is asked three times in all, and a look without news asks nothing."""
    path, asked = tmp_path / "rows.jsonl", []
    reader = Growing(path, lambda row: asked.append(row) or row)
    add_rows(path, [{"step": 1}, {"step": 2}])
    reader.look()
    add_rows(path, [{"step": 3}])
    reader.look()
    reader.look()

    assert asked == reader.rows == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_line_counts_when_it_is_whole(tmp_path: Path):
    """Half a line is not there yet; with its other half it is one row. A damaged line is passed over."""
    path = tmp_path / "rows.jsonl"
    reader = growing(path)
    path.write_text('{"step": 1}\n{"ste')
    reader.look()
    before = list(reader.rows)
    with open(path, "a") as file:
        file.write('p": 2}\nnonsense\n[1]\n{"step": 3}\n')
    reader.look()

    assert before == [{"step": 1}]
    assert reader.rows == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path):
    """What a resumed run cut off is gone, also where the new file is longer than the place that was reached."""
    path = tmp_path / "rows.jsonl"
    reader = growing(path)
    add_rows(path, [{"step": 1}, {"step": 2}])
    reader.look()
    add_rows(tmp_path / "other", [{"step": 1}, {"step": 2, "again": True}, {"step": 3}])
    os.replace(tmp_path / "other", path)
    reader.look()

    assert reader.rows == [{"step": 1}, {"step": 2, "again": True}, {"step": 3}]


def test_a_file_that_was_written_over_is_read_anew(tmp_path: Path):
    """The same file with other lines before the place that was reached, and one that was cut, too."""
    path = tmp_path / "rows.jsonl"
    reader = growing(path)
    add_rows(path, [{"step": 1}, {"step": 2}])
    reader.look()
    with open(path, "r+") as file:
        file.write('{"step": 7}\n{"step": 8}\n{"step": 9}\n')
    reader.look()
    over = list(reader.rows)
    with open(path, "r+") as file:
        file.truncate(len('{"step": 7}\n'))
    reader.look()

    assert over == [{"step": 7}, {"step": 8}, {"step": 9}]
    assert reader.rows == [{"step": 7}]


def test_a_file_that_goes_and_comes_back(tmp_path: Path):
    """Without a file there are no rows, and no error; with another one there are its rows."""
    path = tmp_path / "rows.jsonl"
    reader = growing(path)
    reader.look()
    add_rows(path, [{"step": 1}])
    reader.look()
    path.unlink()
    reader.look()
    gone = list(reader.rows)
    add_rows(path, [{"step": 2}])
    reader.look()

    assert (gone, reader.rows) == ([], [{"step": 2}])


@settings(max_examples=30)
@given(
    rows=st.lists(st.dictionaries(st.text(), st.integers() | st.text(), max_size=2), max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_however_it_grows_the_rows_are_the_same(
    rows: list[Row], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
):
    """A law: looking after any number of bytes, at any moments, ends with all rows once and in order."""
    path = tmp_path_factory.mktemp("grown") / "rows.jsonl"
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    reader = growing(path)
    for cut in sorted(cuts):
        path.write_bytes(content[:cut]) if not path.exists() else _extend(path, content[:cut])
        reader.look()
    _extend(path, content)
    reader.look()

    assert reader.rows == rows


def _extend(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content[path.stat().st_size if path.exists() else 0 :])


def test_a_small_file_is_read_when_it_is_another(tmp_path: Path):
    """Read once while it stays the same, again when it was written to, and said to be absent without it."""
    path, reads = tmp_path / "x", []
    seen = Unchanged(path, lambda content: reads.append(content) or content.decode(), "nothing")
    first = seen.look()
    path.write_text("one")
    said = [seen.look(), seen.look()]
    path.write_text("three")

    assert (first, said, seen.look()) == ("nothing", ["one", "one"], "three")
    assert len(reads) == 2
