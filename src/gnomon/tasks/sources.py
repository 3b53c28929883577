"""Rows of JSONL, JSON, CSV, Parquet and Arrow files and of Hugging Face datasets, with what is wrong with each."""

import csv
import difflib
import io
import json
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, DatasetError, shortened, unknown
from gnomon.progress import counted, working
from gnomon.tasks.values import Reading, Unread
from gnomon.verifiers.optional import library

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

    number: counted from 1; in a JSONL or CSV file its line. values: as JSON holds them (`tasks/values.py`). flaw: why
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
    parquet = library("pyarrow.parquet", "tables", "a Parquet file")
    return _arrow_rows(file, "Parquet", lambda: parquet.ParquetFile(file).read())


def _read_arrow(file: Path) -> list[Row]:
    ipc = library("pyarrow.ipc", "tables", "an Arrow file")
    with file.open("rb") as opened:
        begin = ipc.open_file if opened.read(6) == b"ARROW1" else ipc.open_stream
    return _arrow_rows(file, "Arrow", lambda: begin(file.read_bytes()).read_all())


def _arrow_rows(file: Path, form: str, read: Callable[[], Any]) -> list[Row]:
    arrow = library("pyarrow", "tables", f"a file of {form}")
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
    datasets = library("datasets", "tables", f"the dataset '{path}'")
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
