"""Rows of JSONL, JSON and Parquet files and of Hugging Face datasets, with what is wrong with each."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, DatasetError, unknown
from gnomon.progress import counted, working
from gnomon.verifiers.optional import library

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row.

    number: counted from 1; in a JSONL file its line. flaw: why it has no values, when it has none.
    """

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    flaw: str | None = None


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
    if Path(path).is_file() and not is_file_name(path):
        raise DatasetError(f"{path} is a file of no known format; known are {', '.join(sorted(SUFFIXES))}")
    rows = _read_file(Path(path), split) if is_file_name(path) else _read_dataset(path, subset, split)
    if not rows:
        raise DatasetError(f"{path} has no rows")
    return rows


def _read_file(file: Path, split: str) -> list[Row]:
    if not file.is_file():
        raise DatasetError(_missing(file))
    if split != "train":
        raise ConfigError(f"{file} is a single file and has no split '{split}'; leave split out, or name another file")
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet,
    }  # fmt: skip
    try:
        return readers[file.suffix.lower()](file)
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}") from error


def _read_jsonl(file: Path) -> list[Row]:
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = enumerate(counted(lines, f"reading {file}", len(lines)), start=1)
    return [_parse(number, line) for number, line in numbered if line.strip()]


def _parse(number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        return Row(number, flaw=f"line: not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except json.JSONDecodeError as error:
        return Row(number, flaw=f"line: not JSON: {error.msg} at position {error.colno}")
    except (ValueError, RecursionError) as error:
        return Row(number, flaw=f"line: not JSON: {error}")
    return _row(number, values)


def _row(number: int, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(number, values)
    return Row(number, flaw=f"line: a row is an object with named fields, got {type(values).__name__}")


def _read_json(file: Path) -> list[Row]:
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{file} is not UTF-8: byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        hint = "; one object per line is .jsonl: rename the file" if error.msg == "Extra data" else ""
        raise DatasetError(f"{file}:{error.lineno}: not JSON: {error.msg} at column {error.colno}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, list):
        raise DatasetError(f"{file} holds one {type(content).__name__}; expected a list of objects, one per row")
    return [_row(number, values) for number, values in enumerate(content, start=1)]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _read_parquet(file: Path) -> list[Row]:
    parquet = library("pyarrow.parquet", "tables", "a Parquet file")
    arrow = library("pyarrow", "tables", "a Parquet file")
    try:
        with working(f"reading {file}"):
            values = parquet.read_table(file).to_pylist()
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise DatasetError(f"{file} is not a readable Parquet file: {error}") from error
    return [Row(number, row) for number, row in enumerate(values, start=1)]


def _read_dataset(path: str, subset: str | None, split: str) -> list[Row]:
    name, subset, split = _address(path, subset, split)
    datasets = library("datasets", "tables", f"the dataset '{path}'")
    folder = Path(name)
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
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
            f"(subset {subset!r}, split {split!r}): {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise DatasetError(f"{path}: {unknown('split', split, found)}")
        found = found[split]
    with working(f"taking the rows of {path}"):
        return [Row(number, row) for number, row in enumerate(found.to_list(), start=1)]


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
