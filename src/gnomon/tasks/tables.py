"""Prompts and answers from a file or a Hugging Face dataset, with the columns of TRL and verl."""

import csv
import difflib
import io
import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from gnomon.core.errors import ConfigError, DatasetError, on_one_line, shortened, unknown
from gnomon.core.optional import import_optional
from gnomon.core.progress import counted, working
from gnomon.tasks.chat import message_flaw, readable
from gnomon.tasks.question import Content, ListDataset, Question, digest
from gnomon.tasks.row_inputs import further_of

# Values as JSON can hold them. No torch: the processes that make questions load none.


def json_safe(value: Any) -> Any:
    """Return ``value`` such that ``json.dumps`` accepts it, changed as little as possible.

    Tuples and integer keys stay what they are (``json.dumps`` writes both), because scorers compare with
    them. Subclasses of str become str, sets become sorted lists, dates their ISO form, bytes hexadecimal,
    the rest text.

    >>> json_safe({"when": date(2026, 1, 2), 3: (1, {2, 1})})
    {'when': '2026-01-02', 3: (1, [1, 2])}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_json_key(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(json_safe(item) for item in value)
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((json_safe(item) for item in value), key=repr)
    if isinstance(value, date | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json_key(key: Any) -> Any:
    return key if key is None or type(key) in (str, bool, int, float) else str(key)


# What the values of a row are, whatever file they come from: JSON's own, or they are refused by the field's name.

DEEPEST = 64
"""Levels of lists and objects in a value: far fewer than Python's own readers and writers can take."""
_WHOLE = 2.0**53
_MARK = "\ufeff"


@dataclass(frozen=True)
class Unread:
    """What a file holds in the place of a value that could not be made of it."""

    reason: str


@dataclass
class Reading:
    """The values of one row on their way to JSON.

    flaw: the first value that is none, with its field. times: fields that held a time of day or a span of time, which
    are texts now.

    >>> reading = Reading()
    >>> reading.row({"prompt": b"1+1=", "answer": Decimal("2.00"), "day": date(2026, 1, 2), "more": (1, None)})
    {'prompt': '1+1=', 'answer': '2', 'day': '2026-01-02', 'more': [1, None]}
    >>> _ = reading.row({"a": {"b": [0.5, math.nan]}}); reading.flaw
    'a.b[1]: nan is no number; where there is none write null'
    """

    flaw: str | None = None
    times: set[str] = field(default_factory=set)

    def row(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the values of a row as JSON holds them; where one cannot be, `flaw` says why."""
        return {self._key(key, ""): self._value(value, self._key(key, ""), 1) for key, value in values.items()}

    def _value(self, value: Any, place: str, depth: int) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            return self._text(str(value), place)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else self._refuse(place, _no_number(value))
        if isinstance(value, Mapping | list | tuple):
            return self._nested(value, place, depth)
        if type(value).__module__ == "numpy" and type(value).__name__ not in ("datetime64", "timedelta64"):
            return self._value(value.tolist(), place, depth)
        return self._odd(value, place)

    def _nested(self, value: Any, place: str, depth: int) -> Any:
        if depth > DEEPEST:
            return self._refuse(place[:40], f"nested more than {DEEPEST} levels deep")
        if isinstance(value, Mapping):
            keys = {key: self._key(key, place) for key in value}
            return {keys[key]: self._value(inner, f"{place}.{keys[key]}", depth + 1) for key, inner in value.items()}
        return [self._value(inner, f"{place}[{number}]", depth + 1) for number, inner in enumerate(value)]

    def _odd(self, value: Any, place: str) -> Any:
        """Return what is no JSON, as the text that it can only mean."""
        if isinstance(value, Decimal):
            return number_text(value) if value.is_finite() else self._refuse(place, _no_number(value))
        if isinstance(value, datetime | time | timedelta):
            self.times.add(place)
            return str(value) if isinstance(value, timedelta) else value.isoformat()
        if isinstance(value, date):
            return value.isoformat()
        if isinstance(value, UUID):
            return str(value)
        if isinstance(value, bytes | bytearray):
            return self._bytes(bytes(value), place)
        reason = value.reason if isinstance(value, Unread) else f"a value of the type {type(value).__name__}"
        return self._refuse(place, f"{shortened(reason)}, which is no text, number, list or object")

    def _bytes(self, value: bytes, place: str) -> Any:
        try:
            return self._text(value.decode("utf-8"), place)
        except UnicodeDecodeError:
            return self._refuse(place, f"bytes that are no UTF-8 text: {shortened(repr(value), 40)}")

    def _text(self, text: str, place: str) -> str:
        flaw = text_flaw(text)
        if flaw is not None:
            self._refuse(place, flaw)
        return text

    def _key(self, key: Any, place: str) -> str:
        name = str(key)
        flaw = text_flaw(name)
        if flaw is not None:
            self._refuse(place or "line", f"the name of a field, {shortened(ascii(name))}, has {flaw}")
        return name

    def _refuse(self, place: str, why: str) -> None:
        if self.flaw is None:
            self.flaw = f"{shortened(on_one_line(place))}: {why}"


def text_flaw(text: str) -> str | None:
    r"""Return why ``text`` is none that a file, a tokenizer and a reward would agree on, or None.

    >>> text_flaw("caf\u00e9"), text_flaw("a\0"), text_flaw("\ufeff7"), text_flaw("a\ud800")
    (None, 'a NUL at character 2', 'a byte order mark at character 1', 'half a surrogate pair at character 2')
    """
    if "\0" in text:
        return f"a NUL at character {text.index(chr(0)) + 1}"
    if text.startswith(_MARK) or text.endswith(_MARK):
        return f"a byte order mark at character {1 if text.startswith(_MARK) else len(text)}"
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half a surrogate pair at character {error.start + 1}"
    return None


def number_text(value: int | float | Decimal) -> str:
    """Return a number as a person writes it: a whole one without a point, a fraction without zeros at its end.

    >>> number_text(7.0), number_text(1.5), number_text(Decimal("-0.50")), number_text(1e22), number_text(-0.0)
    ('7', '1.5', '-0.5', '1e+22', '0')
    """
    if isinstance(value, Decimal):
        plain = format(value, "f")
        short = (plain.rstrip("0").rstrip(".") if "." in plain else plain) or "0"
        return "0" if short == "-0" else short
    if isinstance(value, float) and value.is_integer() and abs(value) <= _WHOLE:
        return str(int(value))
    return str(value)


def _no_number(value: object) -> str:
    return f"{value} is no number; where there is none write null"


# Rows of JSONL, JSON, CSV, Parquet and Arrow files and of Hugging Face datasets, with what is wrong with each.

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_HEAD = 512
_NO_FILES = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip
_NO_TABLES = {
    b"version https://git-lfs.github.com": "is a pointer of Git LFS and not the rows; fetch them with `git lfs pull`",
    b"\x1f\x8b": "is compressed by gzip; unpack it: `gunzip FILE`",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it: `unzstd FILE`",
    b"BZh": "is compressed by bzip2; unpack it: `bunzip2 FILE`",
    b"\xfd7zXZ": "is compressed by xz; unpack it: `unxz FILE`",
    b"PK\x03\x04": "is a zip archive or a spreadsheet; unpack it, or save the sheet as CSV",
    b"\xff\xfe": "is UTF-16; save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`",
    b"\xfe\xff": "is UTF-16; save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`",
    b"<!doctype": "is an HTML page and not a table: was the download refused, or a login asked for?",
    b"<html": "is an HTML page and not a table: was the download refused, or a login asked for?",
    b"<?xml": "is XML and not a table; save it as JSONL or CSV",
}


@dataclass(frozen=True)
class Row:
    """One row.

    number: counted from 1; in a JSONL or CSV file its line. values: as JSON holds them (`tasks/tables.py`). flaw: why
    they cannot be used. times: fields whose values were a time of day or a span of time.
    """

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    flaw: str | None = None
    times: frozenset[str] = frozenset()


def is_file_name(path: str) -> bool:
    """Whether ``path`` names a file of a known format, rather than a folder or a dataset on the hub.

    >>> is_file_name("train.jsonl"), is_file_name("openai/gsm8k:main")
    (True, False)
    """
    return Path(path).suffix.lower() in SUFFIXES


def read_rows(path: str, subset: str | None, split: str) -> list[Row]:
    """Return the rows of a file, of a folder that ``save_to_disk`` wrote, or of a dataset on the hub.

    Raises: DatasetError when it is missing (naming the nearest files), unreadable or empty; ConfigError when
    the library that reads it is not installed.
    """
    if not is_file_name(path) and _kind(Path(path)) == stat.S_IFREG:
        raise DatasetError(f"{path} is a file of no known format; known are {', '.join(sorted(SUFFIXES))}")
    rows = _read_file(Path(path), split) if is_file_name(path) else _read_dataset(path, subset, split)
    if not rows:
        raise DatasetError(f"{path} has no rows")
    return [_checked(row) for row in rows]


def _checked(row: Row) -> Row:
    """Return the row with values that JSON holds: no reader of a format says what a value may be."""
    if row.flaw is not None:
        return row
    reading = Reading()
    values = reading.row(row.values)
    return replace(row, values=values, flaw=reading.flaw, times=frozenset(reading.times))


def _kind(path: Path) -> int:
    """Return what is there, as `stat` has it, and 0 for nothing. Raises: DatasetError where that cannot be known."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{shortened(ascii(str(path)))} cannot be read: {reason}") from error


def _read_file(file: Path, split: str) -> list[Row]:
    kind = _kind(file)
    if kind != stat.S_IFREG:
        what = _NO_FILES.get(kind)
        raise DatasetError(f"{file} is {what}, and rows are read from a plain file" if what else _missing(file))
    if split != "train":
        raise ConfigError(f"{file} is a single file and has no split '{split}'; leave split out, or name another file")
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".csv": read_csv, ".tsv": read_csv, ".parquet": _read_parquet,
        ".arrow": _read_arrow,
    }  # fmt: skip
    try:
        with file.open("rb") as opened:
            _check_head(file, opened.read(_HEAD))
        return readers[file.suffix.lower()](file)
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}") from error


def _check_head(file: Path, head: bytes) -> None:
    """Raise DatasetError for a file that begins as something else than its name says."""
    if not head:
        raise DatasetError(f"{file} is empty: it has 0 bytes")
    begun = head.lstrip().lower()
    for mark, why in _NO_TABLES.items():
        if head.startswith(mark) or begun.startswith(mark):
            raise DatasetError(f"{file} {why.replace('FILE', str(file))}")
    binary = {".parquet": b"PAR1", ".arrow": b""}
    if file.suffix.lower() in binary:
        return
    for suffix, mark in (*binary.items(), (".arrow", b"ARROW1")):
        if mark and head.startswith(mark):
            raise DatasetError(f"{file} is a file of the format {suffix}; rename it, so that its name says so")
    if head[:64:2].count(0) > 8 or head[1:64:2].count(0) > 8:
        raise DatasetError(f"{file} is UTF-16 or binary, and not UTF-8: every second byte is 0; save it as UTF-8")


def _read_jsonl(file: Path) -> list[Row]:
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[":
        raise DatasetError(f"{file} begins with [ and is one JSON list, not an object on each line; rename it to .json")
    lines = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    numbered = enumerate(counted(lines, f"reading {file}", len(lines)), start=1)
    return [_parse(number, line) for number, line in numbered if line.strip()]


def _parse(number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        return Row(number, flaw=f"line: not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except json.JSONDecodeError as error:
        return Row(number, flaw=f"line: not JSON: {error.msg} at position {error.colno}")
    except (ValueError, RecursionError) as error:
        return Row(number, flaw=f"line: {error}")
    return _row(number, values)


def _row(number: int, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(number, values)
    return Row(number, flaw=f"line: a row is an object with named fields, got {type(values).__name__}")


def _read_json(file: Path) -> list[Row]:
    try:
        content = json.loads(_text(file), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        hint = "; one object per line is .jsonl: rename the file" if error.msg == "Extra data" else ""
        raise DatasetError(f"{file}:{error.lineno}: not JSON: {error.msg} at column {error.colno}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file} is no table: {error}") from error
    if not isinstance(content, list):
        raise DatasetError(
            f"{file} holds one {type(content).__name__}; expected a list of objects, one per row (one object on each "
            "line is .jsonl)"
        )
    return [_row(number, values) for number, values in enumerate(content, start=1)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields. Raises: ValueError for one that is given twice, of which JSON would drop the first."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shortened(ascii(twice))} is given twice in one object")
    return fields


def _text(file: Path) -> str:
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DatasetError(
            f"{file}:{line}: is not UTF-8: byte 0x{content[error.start]:02x}; save the file as UTF-8"
        ) from error


def read_csv(file: Path) -> list[Row]:
    """Return the rows of a CSV file (of a TSV file, with tabs), whose first line names the columns.

    All values are texts; an empty one is null. Raises: DatasetError.
    """
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    lines = csv.reader(io.StringIO(_text(file), newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    names: list[str] | None = None
    first = 1
    try:
        for cells in lines:
            if names is None:
                names = _header(file, [cell.strip() for cell in cells], delimiter)
            elif cells:
                rows.append(_cells(first, names, cells))
            first = lines.line_num + 1
    except csv.Error as error:
        raise DatasetError(
            f"{file}:{first}: not CSV: {error}; is a quote not closed? A quote within a text is written twice"
        ) from error
    return rows


def _header(file: Path, names: list[str], delimiter: str) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DatasetError(f"{file}:1: the column {shortened(ascii(twice[0]))} is named twice; rename one of them")
    other = next((mark for mark in (";", "\t", ",", "|") if mark != delimiter and mark in "".join(names)), None)
    if len(names) < 2 and other is not None:
        raise DatasetError(
            f"{file}:1: columns are parted by {delimiter!r}, and the first line {shortened(ascii(names[0]))} has "
            f"{other!r} instead; save the file with {delimiter!r}, and without a line such as sep=;"
        )
    return names


def _cells(number: int, names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        return Row(number, flaw=f"line: {len(cells)} columns, and the first line names {len(names)}")
    return Row(number, {name: cell if cell else None for name, cell in zip(names, cells, strict=True)})


def _read_parquet(file: Path) -> list[Row]:
    parquet = import_optional("pyarrow.parquet", "tables", "a Parquet file")
    return _arrow_rows(file, "Parquet", lambda: parquet.ParquetFile(file).read())


def _read_arrow(file: Path) -> list[Row]:
    ipc = import_optional("pyarrow.ipc", "tables", "an Arrow file")
    with file.open("rb") as opened:
        begin = ipc.open_file if opened.read(6) == b"ARROW1" else ipc.open_stream
    return _arrow_rows(file, "Arrow", lambda: begin(file.read_bytes()).read_all())


def _arrow_rows(file: Path, form: str, read: Callable[[], Any]) -> list[Row]:
    arrow = import_optional("pyarrow", "tables", f"a file of {form}")
    try:
        with working(f"reading {file}"):
            return _rows_of(read(), str(file))
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise DatasetError(f"{file} is not a readable {form} file: {reason}") from error


def _rows_of(table: Any, name: str) -> list[Row]:
    """Return the rows of an Arrow table."""
    names = list(table.column_names)
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise DatasetError(f"{name}: the column {shortened(ascii(twice))} is there twice; rename one of them")
    columns = [_taken(column) for column in table.columns]
    cells: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else ()
    return [Row(number, dict(zip(names, row, strict=True))) for number, row in enumerate(cells, start=1)]


def _taken(column: Any) -> list[Any]:
    """Return the values of an Arrow column; what is none that Python has is `Unread`."""
    try:
        return list(column.to_pylist())
    except Exception:  # Arrow raises what each type raises: a year 10,000, half a nanosecond, text that is no UTF-8
        return [_value(cell) for cell in column]


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except Exception as error:
        return Unread(f"a value of the type {cell.type} that cannot be read ({error})")


def _read_dataset(path: str, subset: str | None, split: str) -> list[Row]:
    name, subset, split = _address(path, subset, split)
    datasets = import_optional("datasets", "tables", f"the dataset '{path}'")
    folder = Path(name)
    kind = _kind(folder)
    if kind not in (0, stat.S_IFDIR):
        raise DatasetError(
            f"{name} is {_NO_FILES.get(kind, 'a file')}, and rows are read from a plain file or a folder"
        )
    if not kind and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DatasetError(_missing(folder))
    try:
        with working(f"reading the dataset {path}"):
            if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
                found = datasets.load_from_disk(name)
            else:
                found = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise DatasetError(
            f"'{path}' is neither a file ending in {', '.join(SUFFIXES)} nor a dataset that can be loaded "
            f"(subset {subset!r}, split {split!r}): {type(error).__name__}: "
            f"{shortened(' '.join(str(error).split()), 300)}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise DatasetError(f"{path}: {unknown('split', split, found)}")
        found = found[split]
    with working(f"taking the rows of {path}"):
        return _rows_of(found.with_format("arrow")[:], path)


def _address(path: str, subset: str | None, split: str) -> tuple[str, str | None, str]:
    """Return the parts of NAME, NAME:SUBSET or NAME:SUBSET:SPLIT; the fields fill what is not in ``path``."""
    name, *parts = path.split(":")
    if len(parts) > 2:
        raise ConfigError(f"a dataset is written NAME, NAME:SUBSET or NAME:SUBSET:SPLIT, got '{path}'")
    given_subset, given_split = [*parts, "", ""][:2]
    if given_subset and subset and given_subset != subset:
        raise ConfigError(f"'{path}' names the subset '{given_subset}', and subset = '{subset}' another")
    if given_split and split not in ("train", given_split):
        raise ConfigError(f"'{path}' names the split '{given_split}', and split = '{split}' another")
    return name, given_subset or subset, given_split or split


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder {folder}"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
    near = near or [name for name in names if is_file_name(name)][:3]
    hint = f"did you mean {', '.join(str(folder / name) for name in near)}?" if near else "nothing there is like it"
    return f"{path} does not exist; {hint}"


PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = (
    "solution", "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "label",
)  # fmt: skip
_ASKED_TOO = ("tools", "images", "videos", "audio")
LISTED = 3


@dataclass(frozen=True)
class TableTask:
    """Questions from the rows of a table.

    Attributes:
        path: A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder that ``save_to_disk`` wrote, or a dataset
            on the hub as NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.
        kind: "table".
        subset: Subset of a dataset; a single file has none.
        split: Split of a dataset; a single file has none.
        prompt_column: Column with the question, as text or chat messages. None takes the first of prompt, question,
            problem, messages.
        answer_column: Column with the answer; dots reach into objects. None takes the first of solution, answer,
            ground_truth, reward_model.ground_truth, reward_spec.ground_truth, label that is not null. A row in which
            several of them differ is a bad row: where worked solutions stand beside bare answers, say
            ``answer_column = "answer"``. The answer (a number as its text) becomes the column ``answer`` and replaces
            one of that name.
        require_answer: Whether a row without an answer is a bad row.
        reward_columns: Columns that only rewards read, though their names mean input. Otherwise ``tools``,
            ``documents``, ``enable_thinking`` and ``chat_template_kwargs`` go into the prompt through the model's chat
            template, and images, videos and audio are refused (`tasks/row_inputs.py`).

    All other columns stay what they are. ``data_source`` is the table's name where a row has none. An id is the row's
    ``id`` where it has one, else a hash of its prompt and its row number.
    """

    path: str
    kind: Literal["table"] = "table"
    subset: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    require_answer: bool = True
    reward_columns: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name without ending, or the dataset's."""
        return Path(self.path).stem if is_file_name(self.path) else self.path.rstrip("/")

    def questions(self) -> ListDataset:
        """Read and check every row.

        Raises: DatasetError that names bad rows as file:row: field: reason (the first 3, and the numbers of others).
        """
        questions: list[Question] = []
        flaws: list[tuple[int, str]] = []
        seen: dict[str, int] = {}
        name = self.name
        rows = read_rows(self.path, self.subset, self.split)
        for row in counted(rows, f"checking the rows of {name}", len(rows)):
            question, flaw = self._question(row, name)
            if question is not None and question.id in seen:
                flaw = f"id: {_shown(question.id)} is already the id of row {seen[question.id]}"
            if flaw is not None:
                flaws.append((row.number, flaw))
            elif question is not None:
                seen[question.id] = row.number
                questions.append(question)
        if flaws:
            raise DatasetError(self._report(flaws, len(rows)))
        return ListDataset(name, tuple(questions), again(name, questions, [*seen.values()]))

    def _question(self, row: Row, name: str) -> tuple[Question | None, str | None]:
        """Return the row's question, or None and what is wrong with it."""
        if row.flaw is not None:
            return None, row.flaw
        column = self.prompt_column or next((c for c in PROMPT_COLUMNS if row.values.get(c) is not None), None)
        if column is None or row.values.get(column) is None:
            return None, f"{column or 'prompt'}: missing; the row has {_names(row.values)}"
        content, flaw = _content(row.values[column])
        if flaw is not None:
            return None, f"{column}: {flaw}"
        answer, flaw = self._answer(row)
        if flaw is not None:
            return None, flaw
        number = row.values.get("id")
        if number is not None and not _is_id(number):
            return None, f"id: must be text or a whole number, got {_shown(number)}"
        further, flaw = further_of(row.values, self.reward_columns)
        if flaw is not None:
            return None, flaw
        text = content if isinstance(content, str) else readable(content)
        columns = {k: v for k, v in row.values.items() if k not in ("id", column)}
        columns["data_source"] = columns.get("data_source") or name
        if answer is not None:
            columns["answer"] = answer
        return Question(str(number) if number is not None else f"{digest(content)}-{row.number}",
                        content, text, columns, further), None  # fmt: skip

    def _answer(self, row: Row) -> tuple[Any, str | None]:
        """Return the answer (None when there is none and none is needed), and what is wrong with it."""
        columns = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        found = {c: _as_answer(a) for c in columns if (a := _reach(row.values, c)) is not None}
        if not found:
            missing = f"{columns[0] if self.answer_column else 'answer'}: missing"
            reason = f"{missing}; the row has {_names(row.values)} (require_answer = false does without)"
            return None, reason if self.require_answer else None
        (column, answer), *others = found.items()
        for other, value in others:
            if value != answer:
                return None, (
                    f"{other} and {column}: differ, {_shown(value)} and {_shown(answer)}; say which is the answer: "
                    f'task.answer_column = "{other}"'
                )
        if column in row.times:
            return None, f"{column}: {answer} is a time, which can be written in many ways; write the answer as text"
        if isinstance(answer, str) and self.require_answer and not answer.strip():
            return None, f"{column}: empty"
        return answer, None

    def _report(self, flaws: Sequence[tuple[int, str]], rows: int) -> str:
        listed = "\n  ".join(f"{self.path}:{number}: {flaw}" for number, flaw in flaws[:LISTED])
        rest = [str(number) for number, _ in flaws[LISTED:]]
        numbers = f"{', '.join(rest[:10])}{', ...' if len(rest) > 10 else ''}"
        more = f"and {len(rest)} more, rows {numbers}; " if rest else ""
        return (f"{len(flaws)} of {rows} rows of {self.path} cannot be used:\n  {listed}\n"
                f"{more}correct these rows, or name the columns with prompt_column and answer_column")  # fmt: skip


def again(name: str, questions: Sequence[Question], numbers: Sequence[int]) -> str:
    """Return, in words, which rows ask exactly what an earlier row asks; "" for none.

    numbers: the rows of the questions.
    """
    first: dict[str, int] = {}
    repeated: list[tuple[int, int]] = []
    for place, question in enumerate(questions):
        beside = [question.columns.get(name) for name in _ASKED_TOO]
        earlier = first.setdefault(digest(question.content, beside), place)
        if earlier != place:
            repeated.append((earlier, place))
    if not repeated:
        return ""
    contrary = [pair for pair in repeated if _answers(questions, pair[0]) != _answers(questions, pair[1])]
    said = f"{len(repeated):,} of {len(questions):,} rows of '{name}' ask the same as an earlier row"
    said += f" ({_pairs(repeated, numbers)}) and are trained on as often"
    if contrary:
        said += f"; {len(contrary):,} have another answer than that row ({_pairs(contrary, numbers)}): one is wrong"
    return said


def _answers(questions: Sequence[Question], place: int) -> Any:
    return questions[place].columns.get("answer")


def _pairs(pairs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> str:
    shown = [f"row {numbers[place]} as row {numbers[earlier]}" for earlier, place in pairs[:LISTED]]
    return ", ".join(shown) + (", ..." if len(pairs) > LISTED else "")


def _names(values: Mapping[str, Any]) -> str:
    return shortened(", ".join(on_one_line(name) or "''" for name in values), 200) or "nothing"


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def _as_answer(value: Any) -> Any:
    """Return a number as its text, and all else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(value) if is_number else value


def _content(value: Any) -> tuple[Content, str | None]:
    """Return text or messages, and what is wrong with them."""
    if isinstance(value, str):
        return value, None if value.strip() else "empty"
    if not isinstance(value, list):
        return "", f"must be text or a list of messages, got {type(value).__name__}"
    flaw = _messages_flaw(value)
    if flaw is not None:
        return "", flaw
    return tuple({"role": m["role"], "content": m["content"]} for m in value), None


def _messages_flaw(messages: Sequence[Any]) -> str | None:
    if not messages:
        return "empty list of messages"
    for number, message in enumerate(messages, start=1):
        flaw = message_flaw(message)
        if flaw is not None:
            return f"message {number}: {flaw}"
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        return (f"the last message must be the user's, or nothing is asked; it is the {last['role']}'s: remove it (an "
                "answer goes into the column answer; answers cannot be begun for the model)")  # fmt: skip
    return None if last["content"].strip() else "the last message is empty"


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip() != ""


def _reach(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None; a column whose own name has dots comes first."""
    if path in values:
        return values[path]
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
