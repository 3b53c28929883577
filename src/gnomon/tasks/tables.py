"""Prompts and answers from a file or a Hugging Face dataset, with the columns of TRL and verl.

The values of a row become JSON values in every format; a value that cannot is refused with the name of its field.
"""

import csv
import io
import json
import re
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from gnomon.core.errors import ConfigError, DatasetError, bounded, no_file, shortened, unknown
from gnomon.core.optional import import_optional
from gnomon.core.progress import show_progress, track
from gnomon.core.sections import TABLE_SUFFIXES
from gnomon.core.tables import value_at
from gnomon.core.types import Message
from gnomon.tasks.arrow_rows import BATCH, read_arrow, rows_of
from gnomon.tasks.base import Content
from gnomon.tasks.chat import message_flaw, readable
from gnomon.tasks.question import ListDataset, Question, digest
from gnomon.tasks.row_inputs import Wording, further_of, names_in, untold_flaw
from gnomon.tasks.row_values import Reading, Row, number_text, written
from gnomon.tasks.split import NUMBERING, Repetitions

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
    values = reading.row(row.values)
    return replace(row, values=values, flaw=reading.flaw, unsure=reading.unsure)


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
    parquet = import_optional("pyarrow.parquet", "tables", "a Parquet file")
    arrow = import_optional("pyarrow", "tables", "a Parquet file")

    def opened() -> Any:
        table = parquet.ParquetFile(file)
        return arrow.RecordBatchReader.from_batches(table.schema_arrow, table.iter_batches(BATCH))

    return read_arrow(file, "Parquet", opened, numbering)


def _read_arrow(file: Path, numbering: Collection[str] | None) -> list[Row]:
    ipc = import_optional("pyarrow.ipc", "tables", "an Arrow file")
    with file.open("rb") as opened:
        # `save_to_disk` writes the stream format, other programs the file format, both as .arrow.
        begin = ipc.open_file if opened.read(6) == b"ARROW1" else ipc.open_stream
    return read_arrow(file, "Arrow", lambda: begin(file.read_bytes()).read_all().to_reader(BATCH), numbering)


def _read_dataset(path: str, subset: str | None, split: str, numbering: Collection[str] | None) -> list[Row]:
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


PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations")
ANSWER_COLUMNS = (
    "solution", "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "label",
)  # fmt: skip
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""What a label may be, as text: CSV has no other."""
LISTED = 3
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""")
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
             "observation": "tool"}  # fmt: skip
"""ShareGPT's names of roles."""
_NOTHING = frozenset(("nan", "none", "null", "<na>", "n/a", "nat"))
"""What programs write for no value, in lower case."""


@dataclass(frozen=True)
@bounded("task")
class TableTask:
    """Questions from the rows of a table.

    Attributes:
        path: A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder that ``save_to_disk`` wrote, or a dataset
            on the hub as NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.
        kind: "table".
        subset: Subset of a dataset; a single file has none.
        split: Split of a dataset; a single file has none.
        prompt_column: Column with the question, as text or chat messages. None takes the first of prompt, question,
            problem, messages, conversations. Messages may be ShareGPT's (``from``, ``value``).
        answer_column: Column with the answer; dots reach into objects. None takes the first of solution, answer,
            ground_truth, reward_model.ground_truth, reward_spec.ground_truth, label that is not null. A row in which
            several of them differ is a bad row: where worked solutions stand beside bare answers, say
            ``answer_column = "answer"``. The answer (a number as its text) becomes the column ``answer`` and replaces
            one of that name.
        require_answer: Whether a row without an answer is a bad row.
        prefix: Text before each question; in a conversation, before its last message.
        suffix: Text after each question, such as where the answer is to stand.
        template: The question within other text, as {question} and further columns of the row as {NAME}: "Topic:
            {type}. {question}". A name directly after a letter, as in \\boxed{x}, is text. "" is the question alone.
        repeated: What becomes of a row that asks the same with the same answer as an earlier row: "merge" makes both
            one prompt, "keep" trains on each. Rows without an answer are the same if all their columns are.
        completion_column: Column with the answer that `gnomon sft` trains on, as text or chat messages. "auto" takes
            completion, else what follows the question in chat messages, every assistant's message of them, else the
            answer column, else, where a row has no question, the whole of its ``text``. None, which `gnomon sft` takes
            for "auto", reads none.
        rejected_column: Column with the answer that the one in completion_column is preferred to; None reads none.
            Preferences (algorithm "dpo") read ``chosen`` and ``rejected`` where nothing is said: two answers, or two
            conversations with one beginning, which is the question then.
        label_column: Column with true or false for a good or a bad answer; None reads none. Algorithm "kto" reads
            ``label``, with ``completion``, where nothing is said.
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
    prefix: str = ""
    suffix: str = ""
    template: str = ""
    repeated: Literal["merge", "keep"] = "merge"
    reward_columns: tuple[str, ...] = ()
    completion_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a column without a name, or a template that cannot be filled."""
        self.wording.check(self.answer_column)
        for key in ("prompt_column", "answer_column", "completion_column", "rejected_column", "label_column"):
            column = getattr(self, key)
            if column is not None and not column.strip():
                raise ConfigError(f"task.{key} is {column!r}; name a column, or leave {key} out")

    @property
    def name(self) -> str:
        """The file's name without ending, or the dataset's."""
        return Path(self.path).stem if is_file_name(self.path) else self.path.rstrip("/")

    @property
    def wording(self) -> Wording:
        """The text around each question."""
        return Wording(self.prefix, self.suffix, self.template)

    def questions(self) -> ListDataset:
        """Read and check every row.

        Raises:
            DatasetError: A row is bad. The message names file, row, field and reason of the first three, and the
                numbers of the others.
        """
        questions: list[Question] = []
        flaws: list[tuple[int, str]] = []
        seen: dict[str, int] = {}
        name = self.name
        repetitions = Repetitions(name, self.repeated == "merge")
        rows = read_rows(self.path, self.subset, self.split, self._numbering)
        for row in track(rows, f"checking the rows of {name}", len(rows)):
            question, flaw = self._question(row, name)
            if question is not None and not repetitions.is_kept(question, row.number, row.copies):
                continue
            if question is not None and question.id in seen:
                flaw = f"id: {_shown(question.id)} is already the id of row {seen[question.id]}"
            if flaw is not None:
                flaws += [(number, flaw) for number in (row.number, *row.copies)]
            elif question is not None:
                seen[question.id] = row.number
                questions.append(question)
        total = len(rows) + sum(len(row.copies) for row in rows)
        if flaws:
            raise DatasetError(self._report(sorted(flaws), total))
        said = (repetitions.said, *self._doubts(rows, total, questions))
        return ListDataset(name, tuple(questions), "; ".join(filter(None, said)))

    @property
    def _numbering(self) -> frozenset[str] | None:
        """Columns in which rows that become one prompt may differ; None where each row is a prompt."""
        if self.repeated == "keep":
            return None
        named = (
            self.prompt_column,
            self.answer_column,
            self.completion_column,
            self.rejected_column,
            self.label_column,
        )
        read = {str(name).partition(".")[0] for name in (*named, *self.wording.columns)}
        return frozenset(NUMBERING) - read

    def _doubts(self, rows: Sequence[Row], total: int, questions: Sequence[Question]) -> list[str]:
        """Return, in words, what may be meant and may be a slip.

        Args:
            rows: The table's different rows.
            total: Number of all its rows.
            questions: What they ask.

        Raises:
            ConfigError: ``reward_columns`` names a column that no row has.
        """
        names = dict.fromkeys(name for row in rows for name in row.values)
        for name in self.reward_columns:
            if name not in names:
                raise ConfigError(f"task.reward_columns: {unknown('column', name, names)}")
        said = []
        several = [row for row in rows if not self.prompt_column and len(_prompts(row)) > 1]
        if several:
            used, other, *_ = _prompts(several[0])
            count = sum(1 + len(row.copies) for row in several)
            said.append(
                f"the prompts {used!r} and {other!r} differ in {count:,} of {total:,} rows of '{self.name}' "
                f"(row {several[0].number}), and {used!r} is asked; task.prompt_column names another"
            )
        answers = [str(q.columns.get("answer")) for q in questions if q.columns.get("answer") is not None]
        missing = [answer for answer in answers if answer.strip().lower() in _NOTHING]
        if missing:
            said.append(f"{len(missing):,} of {total:,} answers of '{self.name}' are the text {missing[0]!r}, "
                        "which programs write for no answer: remove these rows unless it is one")  # fmt: skip
        return said

    def _question(self, row: Row, name: str) -> tuple[Question | None, str | None]:
        """Return the row's question, or None and what is wrong with it."""
        if row.flaw is not None:
            return None, row.flaw
        chats = {*PROMPT_COLUMNS, "completion", self.prompt_column, self.completion_column, self.rejected_column}
        # Only columns that may be a conversation: a reward's own column with the keys from and value stays what it is.
        row = replace(row, values={k: _as_messages(v) if k in chats else v for k, v in row.values.items()})
        if self.rejected_column is not None and self.prompt_column is None:
            row = replace(row, values=_with_prompt(row.values, str(self.completion_column), self.rejected_column))
        column = self.prompt_column or next((c for c in PROMPT_COLUMNS if row.values.get(c) is not None), None)
        is_read = self.completion_column == "auto" and self.prompt_column is None
        if is_read and column is None and isinstance(text := row.values.get("text"), str):
            return self._text(row, text)
        if is_read and row.values.get("completion") is None:
            whole = (c for c in ("messages", "conversations") if _first_answer(row.values.get(c)) is not None)
            column = next(whole, column)  # a prompt beside them is the first of them
        if column is None or row.values.get(column) is None:
            column = column or next((c for c in PROMPT_COLUMNS if c in row.values), "prompt")
            near = names_in(row.values, None if self.prompt_column else "prompt_column", PROMPT_COLUMNS)
            return None, f"{column}: {'null' if column in row.values else 'missing'}; the row has {near}"
        value, turns, flaw = self._completed(row.values, column)
        if flaw is not None:
            return None, flaw
        content, flaw = _content(value)
        if flaw is not None:
            return None, f"{column}: {flaw}"
        rejected, flaw = self._rejected(row.values, turns)
        if flaw is not None:
            return None, flaw
        given = True if self.label_column is None else row.values.get(self.label_column)
        label = _LABELS.get(str(given).strip().lower())
        if label is None:
            said = "is not there" if given is None else f"must be true or false, got {_shown(given)}"
            return None, f"{self.label_column}: {said}; another column with labels is task.label_column"
        answer, flaw = self._answer(row)
        if flaw is not None and not turns:
            return None, flaw
        number = row.values.get("id")
        if number is not None and not _is_id(number):
            return None, f"id: must be text or a whole number, got {_shown(number)}"
        further, flaw = further_of(row.values, self.reward_columns)
        if flaw is not None:
            return None, flaw
        text = content if isinstance(content, str) else readable(content)
        try:
            content = self.wording.around(content, row.values)
        except KeyError as error:
            return None, f"task.template: no column {error}; the row has {names_in(row.values)}"
        if (flaw := untold_flaw(row.values, content, self.reward_columns)) is not None:
            return None, flaw
        columns = {k: v for k, v in row.values.items() if k not in ("id", column)}
        columns["data_source"] = columns.get("data_source") or name
        if answer is not None:
            columns["answer"] = answer
        return Question(str(number) if number is not None else f"{digest(content)}-{row.number}",
                        content, text, columns, further, turns, rejected, label), None  # fmt: skip

    def _text(self, row: Row, text: str) -> tuple[Question | None, str | None]:
        """Return a row of text, which is trained on as a whole, or None and what is wrong with it."""
        number = row.values.get("id")
        if not text.strip():
            return None, "text: empty"
        if self.wording != Wording():
            return None, "text: asks nothing, so task.prefix, suffix and template have no place; remove them"
        if number is not None and not _is_id(number):
            return None, f"id: must be text or a whole number, got {_shown(number)}"
        columns = {k: v for k, v in row.values.items() if k not in ("id", "text")} | {"data_source": self.name}
        name = str(number) if number is not None else f"{digest(text)}-{row.number}"
        return Question(name, (), text, columns, turns=({"role": "assistant", "content": text},)), None

    def _completed(self, values: Mapping[str, Any], column: str) -> tuple[Any, tuple[Message, ...], str | None]:
        """Return the row's question, the messages that follow it, and what is wrong with them."""
        asked, name = values[column], self.completion_column
        if name is None:
            return asked, (), None
        given = values.get("completion" if name == "auto" else name)
        if given is None and name != "auto":
            return asked, (), f"{name}: missing; the row has {names_in(values)}"
        if given is None:
            first = _first_answer(asked)
            if first is None:
                return asked, (), None
            asked, name, given = asked[:first], column, asked[first:]
        turns, flaw = _turns(given)
        return asked, turns, None if flaw is None else f"{'completion' if name == 'auto' else name}: {flaw}"

    def _rejected(self, values: Mapping[str, Any], chosen: Sequence[Message]) -> tuple[tuple[Message, ...], str | None]:
        """Return the messages of the answer that the chosen one is preferred to, and what is wrong with them."""
        name = self.rejected_column
        if name is None or values.get(name) is None:
            return (), None if name is None else f"{name}: missing; the row has {names_in(values)}"
        turns, flaw = _turns(values[name])
        if flaw is None and turns == chosen:
            flaw = f"is the same as {self.completion_column}, so neither is preferred; remove the row"
        return turns, None if flaw is None else f"{name}: {flaw}"

    def _answer(self, row: Row) -> tuple[Any, str | None]:
        """Return the answer (None when there is none and none is needed), and what is wrong with it."""
        columns = (self.answer_column,) if self.answer_column else ANSWER_COLUMNS
        found = {c: _as_answer(a) for c in columns if (a := row.values.get(c, value_at(row.values, c))) is not None}
        if not found:
            near = names_in(row.values, None if self.answer_column else "answer_column", ANSWER_COLUMNS)
            missing = f"{columns[0] if self.answer_column else 'answer'}: missing; the row has {near}"
            # The hint to do without an answer would mislead where a misspelt column is the likely cause.
            is_needed = " takes " in near or self.completion_column is not None
            reason = missing + ("" if is_needed else " (task.require_answer = false does without)")
            return None, reason if self.require_answer else None
        # Several columns may hold the answer. Which one is meant is not guessed where they differ.
        (column, answer), *others = found.items()
        for other, value in others:
            if value != answer:
                return None, (
                    f"{other} and {column}: differ, {_shown(value)} and {_shown(answer)}; say which is the answer: "
                    f'task.answer_column = "{other}"'
                )
        # A prompt or a reward may use such a value; as an answer it cannot be compared.
        if column in row.unsure:
            return None, f"{column}: {answer} {row.unsure[column]}; write the answer as text"
        if isinstance(answer, str) and self.require_answer and not answer.strip():
            return None, f"{column}: empty"
        return answer, None

    def _report(self, flaws: Sequence[tuple[int, str]], rows: int) -> str:
        listed = "\n  ".join(f"{self.path}:{number}: {flaw}" for number, flaw in flaws[:LISTED])
        rest = [str(number) for number, _ in flaws[LISTED:]]
        numbers = f"{', '.join(rest[:10])}{', ...' if len(rest) > 10 else ''}"
        more = f"and {len(rest)} more, rows {numbers}; " if rest else ""
        return (f"{len(flaws)} of {rows} rows of {self.path} cannot be used:\n  {listed}\n"
                f"{more}correct these rows, or {self._remedy}")  # fmt: skip

    @property
    def _remedy(self) -> str:
        named = [key for key in ("completion", "rejected", "label") if getattr(self, f"{key}_column") is not None]
        read = ["prompt", *(["answer"] if self.completion_column in (None, "auto") else []), *named]
        return "name other columns with " + ", ".join(f"task.{key}_column" for key in read)


def _with_prompt(values: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a row of two conversations as their common beginning, in ``prompt``, and what follows it in each."""
    first, second = (values.get(name) for name in names)
    if not (isinstance(first, list) and isinstance(second, list) and _first_answer(first) and _first_answer(second)):
        return values
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])
    return {**values, "prompt": first[:same], names[0]: first[same:], names[1]: second[same:]}


def _prompts(row: Row) -> list[str]:
    """Return the columns that may be the prompt and hold different things; a chat that repeats a text is no other."""
    given = {name: _content(_as_messages(value)) for name in PROMPT_COLUMNS if (value := row.values.get(name))}
    # Some sets hold the question as text and, in another column, as messages: the same question twice is no doubt.
    texts = {n: said if isinstance(said, str) else readable(said) for n, (said, flaw) in given.items() if flaw is None}
    first = {text: name for name, text in reversed(texts.items())}
    chats = {name for name, (said, _) in given.items() if not isinstance(said, str)}
    return [
        name
        for name in PROMPT_COLUMNS
        if name in first.values()
        and not (name in chats and any(text.strip() in texts[name] for other, text in texts.items() if other != name))
    ]


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def _as_answer(value: Any) -> Any:
    """Return a number as its text, and all else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(value) if is_number else value


def _content(value: Any) -> tuple[Content, str | None]:
    """Return text or messages, and what is wrong with them."""
    if isinstance(value, str):
        if _MESSAGES.match(value):
            return "", "text that holds a list of messages; write the list itself (JSONL and Parquet can hold one)"
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


def _as_messages(value: Any) -> Any:
    """Return ShareGPT's messages as the others have them, and all else as it is.

    >>> _as_messages([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Salve"}])
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Salve'}]
    """
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and {"from", "value"} <= {*m} for m in value):
        return value
    rest = [{k: v for k, v in m.items() if k not in ("from", "value")} for m in value]
    return [
        {"role": _SHAREGPT.get(str(m["from"]).lower(), m["from"]), "content": m["value"], **more}
        for m, more in zip(value, rest, strict=True)
    ]


def _first_answer(content: Any) -> int | None:
    """Return the place of the first assistant's message of a chat; None where there is none."""
    messages = content if isinstance(content, list) else []
    return next((n for n, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "assistant"), None)


def _turns(given: Any) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages that answer a question, of text or messages, and what is wrong with them."""
    turns = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
    if not isinstance(turns, list) or not turns:
        return (), f"must be text or a list of messages, got {_shown(turns)}"
    for number, message in enumerate(turns, start=1):
        flaw = message_flaw(message)
        if flaw is not None:
            return (), f"message {number} of the answer: {flaw}"
    # Messages of the user or a tool may stand between answers, but not at the ends.
    for end in (turns[0], turns[-1]):
        if end["role"] != "assistant" or not end["content"].strip():
            said = "is empty" if end["role"] == "assistant" else f"is the {end['role']}'s"
            return (), f"an answer begins and ends with an assistant's message that has text, and one of them {said}"
    return tuple({"role": m["role"], "content": m["content"]} for m in turns), None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip() != ""
