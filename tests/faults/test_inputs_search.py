"""Whole experiments and tables of any content, through the command: refused in words, or read as they were written."""

import contextlib
import csv
import dataclasses
import io
import json
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import tomli_w
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from gnomon.cli.main import main
from gnomon.config.experiment import Experiment
from gnomon.tasks.tables import TableTask

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "a.b",
        '"""',
        "\\",
        "\r\n",
        "\0",
        "\ud800",
        "\ufeff",
        "x\ufeffy",
        "[x]\na = 1",
        "{{",
        "%s",
        "../x",
        "7,000",
    ]
)
NUMBERS = st.integers(0, 32) | st.integers() | st.sampled_from([2**32 + 1, 2**63, 10**30, -1, 0])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MODEL = {"model": "tiny", "algorithm": "grpo", "rollouts_per_step": 16, "steps": 1}
ASKED = {**MODEL, "task": {"kind": "arithmetic", "size": 40}, "held_out": {"size": 3}}


def said_by(*arguments: str) -> tuple[int, str]:
    """Return the exit code of the command and what it ended with: its message, or the last lines."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    said = err.getvalue()
    return code, said[said.rfind(f"gnomon {arguments[0]}:") :] if code else out.getvalue()


def judged(code: int, said: str) -> None:
    """Fail unless the exit code is 0 or 2, and the message of 2 is short and in words."""
    event(f"exit code {code}")
    assert code in (0, 2), said
    assert "Traceback" not in said
    if code:
        assert said.startswith("gnomon "), said
        assert said.strip().count("\n") < 5, said
        assert len(said) < 4000, said


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return values that a field of this type may be written as."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in inner if each is not type(None)])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(of_type(inner[0]), max_size=3)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        known = {f.name: of_type(hints[f.name]) for f in dataclasses.fields(hint) if f.init}
        kind = {"kind": known.pop("kind")} if "kind" in known else {}
        return st.fixed_dictionaries(kind, optional=known)
    simple = {str: TEXT, int: NUMBERS, float: st.floats(0.1, 1) | st.floats() | NUMBERS, bool: st.booleans()}
    return simple.get(hint, st.dictionaries(TEXT, JSON, max_size=3) if origin in (dict, Mapping) else JSON)


HINTS = typing.get_type_hints(Experiment)
FIELDS = {name: of_type(hint) for name, hint in HINTS.items() if name not in ("algorithm", "rewards", "model")}


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    """Return a whole experiment of which up to three keys are changed: to one of their type, or to any JSON."""
    names = draw(st.lists(st.sampled_from([*sorted(FIELDS), "model"]), min_size=1, max_size=3, unique=True))
    changed = {n: draw(TEXT if n == "model" else JSON if draw(st.integers(0, 5)) == 0 else FIELDS[n]) for n in names}
    return {**ASKED, **changed}


def plans(table: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"

        path.write_bytes(tomli_w.dumps(without_null(table)).encode("utf-8", "surrogatepass"))
        judged(*said_by("plan", str(path)))


def without_null(value: Any) -> Any:
    """Return the value as TOML can hold it: it has no null."""
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value if inner is not None] if isinstance(value, list) else value


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """Return a format and rows of which some have another prompt, answer, id or column: any text, or any JSON."""
    rows: list[dict[str, Any]] = [{"prompt": f"Question {n}?", "answer": str(n)} for n in range(24)]
    for name in draw(st.lists(st.sampled_from(["prompt", "answer", "id", "more", "solution"]), min_size=1, max_size=2)):
        at = draw(st.integers(0, len(rows) - 1))
        rows[at] = {**rows[at], name: draw(TEXT | JSON)}
    if draw(st.integers(0, 3)) == 0:
        name, of = draw(TEXT), draw(st.sampled_from([TEXT, NUMBERS, st.floats(), st.booleans()]))
        rows = [{name: draw(of), **row} for row in rows]
    return draw(st.sampled_from(["jsonl", "json", "csv", "tsv", "parquet"])), rows


def written(path: Path, rows: list[dict[str, Any]]) -> bool:
    """Write the rows in the format of the path's name; False where that format cannot hold them."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        try:
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        except (pa.ArrowException, ValueError, OverflowError):
            return False
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            lines = csv.DictWriter(file, names, delimiter="," if path.suffix == ".csv" else "\t")
            lines.writeheader()
            lines.writerows(rows)
    return True


def expected(row: dict[str, Any]) -> tuple[Any, Any]:
    """Return prompt and answer of a row that was written as JSON, where both are texts or numbers."""
    answer = row["answer"] if row.get("answer") is not None else row.get("solution")
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    whole = isinstance(answer, float) and answer.is_integer() and abs(answer) <= 2**53
    return row["prompt"], str(int(answer) if whole else answer) if is_number else answer


def reads(form: str, rows: list[dict[str, Any]], verb: str = "plan") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t.{form}"
        if not written(path, rows):
            return
        more = ["held_out.size=1", "held_out.fraction=0.3", "sampling.max_completion_length=4", "steps=1"]
        run = ["--run-dir", str(Path(folder) / "run")] if verb == "train" else []
        reward = 'rewards=[{kind="numeric"}]' if verb == "train" else 'rewards=[{kind="format", pattern="."}]'
        code, said = said_by(verb, "tiny", f"task={path}", reward, *more, *run)
        judged(code, said)
        if code:
            return
        asked = TableTask(str(path)).questions().questions
        json.dumps([dict(each.columns) for each in asked], allow_nan=False).encode()
        if form in ("jsonl", "json"):
            assert [(each.content, each.columns["answer"]) for each in asked] == [expected(row) for row in rows]
            assert [each.columns.get("more") for each in asked] == [row.get("more") for row in rows]


@given(experiments())
@settings(max_examples=25)
@example({**ASKED, "seed": 10**23})
@example({**ASKED, "system": ".\n" * 2000})
@example({**ASKED, "task": {"kind": "table", "path": "\0.jsonl"}})
@example({**ASKED, "model": "x" * 300})
@example({**ASKED, "model": "~nobody/x"})
@example({**ASKED, "task": {"kind": "table", "path": "x" * 300}})
def test_any_experiment_is_planned_or_refused(table: dict[str, Any]):
    """Whatever stands in any setting, `gnomon plan` ends with 0, or with 2 and at most five lines."""
    plans(table)


@given(tables())
@settings(max_examples=35)
@example(("jsonl", [{"id": "\ud8000", "prompt": "q", "answer": "1"}] * 12))
@example(("parquet", [{"prompt": f"q{n}", "answer": float("nan")} for n in range(12)]))
@example(("jsonl", [{"\n": "\0", "prompt": "q", "answer": "1"}] * 12))
@example(("jsonl", [{"a\nb": 1, "prompt": "q"}] * 12))
@example(("json", [{"prompt": [{"role": "user", "content": "q", "a\n\n\nb": 1}], "answer": "1"}] * 12))
def test_any_table_is_read_as_it_was_written_or_refused(table: tuple[str, list[dict[str, Any]]]):
    """Whatever stands in any column, a table is refused in words, or read as it was written."""
    reads(*table)


@pytest.mark.slow
@given(experiments())
@settings(max_examples=1000)
@pytest.mark.timeout(3600)
def test_a_thousand_experiments_are_planned_or_refused(table: dict[str, Any]):
    """As above, a thousand of them."""
    plans(table)


@pytest.mark.slow
@given(tables())
@settings(max_examples=960)
@pytest.mark.timeout(3600)
def test_a_thousand_tables_are_read_or_refused(table: tuple[str, list[dict[str, Any]]]):
    """As above, nearly a thousand of them."""
    reads(*table)


@pytest.mark.slow
@given(tables())
@settings(max_examples=40)
@pytest.mark.timeout(3600)
def test_tables_are_trained_on_or_refused(table: tuple[str, list[dict[str, Any]]]):
    """Whatever stands in any column, `gnomon train` makes its step, or ends with 2 before it."""
    reads(*table, verb="train")
