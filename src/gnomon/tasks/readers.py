"""Readers: the rows of a file of any format, of a saved dataset, or of one on the Hugging Face hub.

The values of a row become JSON values in every format; a value that cannot is refused with the name of its field.
"""

import csv
import io
import json
import re
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from gnomon.core.errors import ConfigError, DatasetError, no_file, shortened, unknown
from gnomon.core.optional import import_optional
from gnomon.core.progress import show_progress, track
from gnomon.core.sections import TABLE_SUFFIXES
from gnomon.tasks.row_values import Reading, Row, written

LISTED = 3
"""Rows or files that a message names."""
_HEAD = 512
_HUB_SECONDS = 5.0
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
    b"\xff\xfe\0\0": "is UTF-32; save it as UTF-8: `iconv -f UTF-32 -t UTF-8 FILE > NEW`",
    b"\xff\xfe": "is UTF-16; save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`",
    b"\xfe\xff": "is UTF-16; save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`",
    b"<!doctype": "is an HTML page and not a table: was the download refused, or a login asked for?",
    b"<html": "is an HTML page and not a table: was the download refused, or a login asked for?",
    b"<?xml": "is XML and not a table; save it as JSONL or CSV",
}


def is_file_name(path: str) -> bool:
    """Whether ``path`` names a file of a known format, rather than a folder or a dataset on the hub.

    >>> is_file_name("train.jsonl"), is_file_name("openai/gsm8k:main")
    (True, False)
    """
    return Path(path).suffix.lower() in TABLE_SUFFIXES


def read_rows(path: str, subset: str | None, split: str, numbering: Collection[str] | None = None) -> list[Row]:
    """Return the rows of a file, of a folder that ``save_to_disk`` wrote, or of a dataset on the hub.

    Args:
        path: File, folder, or the dataset's name.
        subset, split: Parts of a dataset.
        numbering: Columns in which equal rows may differ, of which the first alone is returned, with its `Row.copies`;
            None returns every row.

    Raises:
        DatasetError: The table is missing, unreadable or empty; the message names the nearest files.
        ConfigError: The library that reads it is not installed.
    """
    if not path.strip():
        raise ConfigError("a table's path is empty; name a file, a folder or a dataset")
    if "://" in path:
        raise DatasetError(f"{path} is an address; download the file and name it, or write a dataset as OWNER/NAME")
    if not is_file_name(path) and _kind(Path(path)) == stat.S_IFREG:
        # The head may say what the file is: a compressed file's name ends in .gz.
        with Path(path).open("rb") as opened:
            _check_head(Path(path), opened.read(_HEAD))
        raise DatasetError(f"{path} is a file of no known format; known are {', '.join(sorted(TABLE_SUFFIXES))}")
    read = partial(_read_file, Path(path)) if is_file_name(path) else partial(_read_dataset, path)
    rows = read(subset, split, numbering)
    if not rows:
        raise DatasetError(f"{path} has no rows")
    return [_checked(row) for row in rows]


def _checked(row: Row) -> Row:
    """Return the row with values that JSON holds: no reader of a format says what a value may be."""
    if row.flaw is not None:
        return row
    reading = Reading()
    values, coded = reading.row(row.values), reading.row(row.coded)
    return replace(row, values=values, flaw=reading.flaw, unsure=reading.unsure, coded=coded)


def _kind(path: Path) -> int:
    """Return what is there, as `stat` has it, and 0 for nothing.

    Raises:
        DatasetError: The file system does not tell.
    """
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{shortened(ascii(str(path)))} cannot be read: {reason}") from error


def _read_file(file: Path, subset: str | None, split: str, numbering: Collection[str] | None) -> list[Row]:
    kind = _kind(file)
    if kind != stat.S_IFREG:
        what = _NO_FILES.get(kind)
        raise DatasetError(
            f"{file} is {what}, and rows are read from a plain file" if what else no_file(file, TABLE_SUFFIXES)
        )
    for name, value, default in (("split", split, "train"), ("subset", subset, None)):
        if value != default:
            raise ConfigError(
                f"{file} is a single file and has no {name} '{value}'; leave {name} out, or name another file"
            )
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".csv": read_csv, ".tsv": read_csv,
        ".parquet": partial(_read_parquet, numbering=numbering), ".arrow": partial(_read_arrow, numbering=numbering),
    }  # fmt: skip
    try:
        with file.open("rb") as opened:
            _check_head(file, opened.read(_HEAD))
        rows = readers[file.suffix.lower()](file)
        return rows if file.suffix.lower() in (".parquet", ".arrow") else _different(rows, numbering)
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}") from error


def _different(rows: Iterable[Row], numbering: Collection[str] | None) -> list[Row]:
    """Return the rows of a text file as `rows_of` returns those of an Arrow table."""
    if numbering is None:
        each = (replace(row, number=number, copies=()) for row in rows for number in (row.number, *row.copies))
        return sorted(each, key=lambda row: row.number)
    kept: dict[Any, list[Row]] = {}
    for row in rows:
        key: Any = row.number
        with suppress(RecursionError):  # nested too deep, which is refused below
            # Hashed, so that only 32 bytes a row are kept. repr tells 1
            # from "1" and True, which are equal or alike as keys.
            compared = repr([item for item in row.values.items() if item[0] not in numbering])
            # Each bad row is reported by itself.
            key = key if row.flaw else blake2b(compared.encode("utf-8", "surrogatepass")).digest()
        kept.setdefault(key, []).append(row)
    return [
        replace(first, copies=tuple(sorted((*first.copies, *(n for row in rest for n in (row.number, *row.copies))))))
        for first, *rest in kept.values()
    ]


def _check_head(file: Path, head: bytes) -> None:
    """Raise DatasetError for a file that begins as something else than its name says."""
    if not head:
        raise DatasetError(f"{file} is empty: it has 0 bytes")
    begun = head.lstrip().lower()
    for mark, why in _NO_TABLES.items():
        if head.startswith(mark) or begun.startswith(mark):
            raise DatasetError(f"{file} {why.replace('FILE', str(file))}")
    # Arrow has two formats, of which the stream has no mark.
    binary = {".parquet": b"PAR1", ".arrow": b""}
    if file.suffix.lower() in binary:
        return
    for suffix, mark in (*binary.items(), (".arrow", b"ARROW1")):
        if mark and head.startswith(mark):
            raise DatasetError(f"{file} is a file of the format {suffix}; rename it, so that its name says so")
    if head[:64:2].count(0) > 8 or head[1:64:2].count(0) > 8:
        raise DatasetError(f"{file} is UTF-16 or binary, and not UTF-8: every second byte is 0; save it as UTF-8")


def _read_jsonl(file: Path) -> list[Row]:
    """Return the rows, of equal lines the first."""
    # A byte order mark would be part of the first field's name.
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[":
        raise DatasetError(f"{file} begins with [ and is one JSON list, not an object on each line; rename it to .json")
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = track(io.BytesIO(content), f"reading {file}", content.count(b"\n") + 1)
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        # Equal lines are found before they are parsed: of a table that
        # repeats rows a hundred times, parsing is most of the cost.
        numbers = places[blake2b(line.removesuffix(b"\n"), digest_size=16).digest()]
        if not numbers and line.strip():
            rows.append(_parse(number, line.removesuffix(b"\n")))
        # A blank line has no number, so it is no copy of another one.
        if numbers or line.strip():
            numbers.append(number)
    copies = {numbers[0]: tuple(numbers[1:]) for numbers in places.values() if numbers}
    return [replace(row, copies=copies[row.number]) for row in rows]


def _parse(number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_once, parse_float=written)
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
        content = json.loads(_text(file), object_pairs_hook=_once, parse_float=written)
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
    """Return an object's fields.

    Raises:
        ValueError: A field is given twice; JSON would drop the first value.
    """
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

    All values are texts; an empty one is null.

    Raises:
        DatasetError: The file is no CSV table.
    """
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    text = _text(file)
    # Python's own limit, 131,072 characters a cell, is for the whole process; tests of programs are longer.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    names: list[str] | None = None
    first = 1
    try:
        for cells in lines:
            if names is None:
                names = _header(file, [cell.strip() for cell in cells], delimiter)
            elif cells:
                rows.append(_cells(first, names, cells))
            # A quoted cell may span lines: a row is named by the line on which it begins.
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
    # A header that is one cell with another delimiter inside: Excel writes semicolons in many countries.
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


def _read_parquet(file: Path, numbering: Collection[str] | None) -> list[Row]:
    from gnomon.tasks.arrow_rows import BATCH, read_arrow

    parquet = import_optional("pyarrow.parquet", "tables", "a Parquet file")
    arrow = import_optional("pyarrow", "tables", "a Parquet file")

    def opened() -> Any:
        table = parquet.ParquetFile(file)
        return arrow.RecordBatchReader.from_batches(table.schema_arrow, table.iter_batches(BATCH))

    return read_arrow(file, "Parquet", opened, numbering)


def _read_arrow(file: Path, numbering: Collection[str] | None) -> list[Row]:
    from gnomon.tasks.arrow_rows import BATCH, read_arrow

    ipc = import_optional("pyarrow.ipc", "tables", "an Arrow file")
    with file.open("rb") as opened:
        # ``save_to_disk`` writes the stream format, other programs the file format, both as .arrow.
        begin = ipc.open_file if opened.read(6) == b"ARROW1" else ipc.open_stream
    return read_arrow(file, "Arrow", lambda: begin(file.read_bytes()).read_all().to_reader(BATCH), numbering)


def _read_dataset(path: str, subset: str | None, split: str, numbering: Collection[str] | None) -> list[Row]:
    from gnomon.tasks.arrow_rows import BATCH, rows_of

    name, subset, split = _address(path, subset, split)
    datasets = import_optional("datasets", "tables", f"the dataset '{path}'")
    folder = Path(name)
    kind = _kind(folder)
    if kind == stat.S_IFREG:
        raise DatasetError(f"{name} is a single file and has no subset or split; write {name} alone")
    if kind not in (0, stat.S_IFDIR):
        raise DatasetError(f"{name} is {_NO_FILES[kind]}, and rows are read from a plain file or a folder")
    # No name on the hub looks so: it is a path, and nothing is there.
    if not kind and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DatasetError(no_file(folder, TABLE_SUFFIXES))
    is_saved = (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()
    if kind and not is_saved:
        _check_no_texts(folder)
        _check_parts(folder)
    try:
        with show_progress(f"reading the dataset {path}"), nullcontext() if kind else _hub_or_cache(datasets.config):
            found = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise DatasetError(
            f"'{path}' is neither a file ending in {', '.join(TABLE_SUFFIXES)} nor a dataset that can be loaded "
            f"(subset {subset!r}, split {split!r}): {type(error).__name__}: "
            f"{shortened(' '.join(str(error).split()), 300)}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise DatasetError(f"{path}: {unknown('split', split, found)}")
        found = found[split]
    with show_progress(f"taking the rows of {path}"):
        return rows_of(found.with_format("arrow")[:].to_reader(BATCH), path, numbering)


@contextmanager
def _hub_or_cache(config: Any) -> Iterator[None]:
    """Let `datasets` read what was fetched before where the hub cannot be reached, instead of trying for 30 seconds.

    Args:
        config: The module datasets.config.
    """
    hub = urlsplit(config.HF_ENDPOINT)
    before = config.HF_HUB_OFFLINE
    try:
        # Behind a proxy a direct connection fails although the hub can be reached.
        if not before and not getproxies():
            try:
                socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_HUB_SECONDS).close()
            except OSError:
                config.HF_HUB_OFFLINE = True
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _check_no_texts(folder: Path) -> None:
    """Raise DatasetError for a folder of text files: `datasets` would guess types, so that 007 is 7 and NA is null."""
    texts = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jsonl", ".json", ".csv", ".tsv"))
    if texts:
        raise DatasetError(
            f"{folder} is a folder of {len(texts)} text file(s) and not a saved dataset; name one of them: "
            f"{', '.join(map(str, texts[:LISTED]))}{', ...' if len(texts) > LISTED else ''}"
        )


_PART = re.compile(r"(.*)-(\d+)-of-(\d+)")
_WIDTHS = re.compile(r"large_|\bu?(?=int)|(?<=int)\d+|dictionary<values=|(?<=\w), indices=.*>")


def _check_parts(folder: Path) -> None:
    """Raise DatasetError where Parquet files that are one table lack a part, or have columns of different types.

    `datasets` reads what is there, and gives each file the types of the first, so that "007" can be 7.
    """
    parquet = import_optional("pyarrow.parquet", "tables", "a Parquet file")
    tables: dict[tuple[Path, str, str], dict[str, Path]] = {}
    for file in sorted(each for each in folder.rglob("*") if each.suffix.lower() == ".parquet"):
        found = _PART.fullmatch(file.stem)
        name, number, count = found.groups() if found else ("", file.name, "")
        tables.setdefault((file.parent, name, count), {})[number] = file
    for (_, _, count), files in tables.items():
        first, *others = files.values()
        if count and len(files) != int(count):
            raise DatasetError(
                f"{first} is one of {int(count)} parts by its name, and {len(files)} are there; fetch the others, or "
                "name a file alone"
            )
        types = _types(parquet, first)
        for other in others:
            own = _types(parquet, other)
            for column in {**types, **own}:
                kind, asked = (each.get(column, "not there") for each in (own, types))
                if kind != asked:
                    raise DatasetError(
                        f"{other}: the column '{column}' is {kind}, and {asked} in {first.name}; write both alike"
                    )


def _types(parquet: Any, file: Path) -> dict[str, str]:
    """Return the type of each column; widths of numbers and of offsets are left out, for they change no value."""
    from gnomon.tasks.arrow_rows import classes_of, readable

    try:
        with readable(file, "Parquet"):
            schema = parquet.read_schema(file)
            kinds = {each.name: _WIDTHS.sub("", str(each.type)) for each in schema}
            return kinds | {name: f"of the classes {json.dumps(each)}" for name, each in classes_of(schema).items()}
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}") from error


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
