"""Rows of Arrow tables as Python has them, each of equal ones once: rows are compared before they are made."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from gnomon.core.errors import DatasetError, shortened
from gnomon.core.optional import import_optional
from gnomon.core.progress import show_progress
from gnomon.tasks.row_values import Row, Unread

_LONGEST = 16
"""Elements of a list up to which rows are compared here."""

BATCH = 2**17
"""Rows that are read at once."""

Codes = npt.NDArray[np.int64]


def read_arrow(file: Any, form: str, read: Callable[[], Any], numbering: Collection[str] | None) -> list[Row]:
    """Return the rows of a file that ``read`` makes a table of; ``numbering`` as in `rows_of`.

    Raises:
        DatasetError: The file is damaged.
    """
    with readable(file, form), show_progress(f"reading {file}"):
        return rows_of(read(), str(file), numbering)


@contextmanager
def readable(file: Any, form: str) -> Iterator[None]:
    """Read a file in the block.

    Raises:
        DatasetError: The file is damaged.
    """
    arrow = import_optional("pyarrow", "tables", f"a file of {form}")
    try:
        yield
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise DatasetError(f"{file} is not a readable {form} file: {reason}") from error


def rows_of(reader: Any, name: str, numbering: Collection[str] | None) -> list[Row]:
    """Return the rows of an Arrow table, equal ones once.

    Of 1.79 million rows (DAPO-Math-17k) only 17 thousand are made rows of Python: seconds in place of minutes.

    Args:
        reader: The table as a pyarrow.RecordBatchReader.
        name: Its name in messages.
        numbering: Columns that may differ between equal rows; None keeps every row.

    Raises:
        DatasetError: Two columns have one name.
    """
    names = list(reader.schema.names)
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise DatasetError(f"{name}: the column {shortened(ascii(twice))} is there twice; rename one of them")
    table, groups = _different(
        reader, [column for column in names if column not in (numbering or ())], numbering is not None
    )
    columns = dict(zip(names, map(_taken, table.columns), strict=True))
    coded = {column: columns[column] for column in classes_of(reader.schema)}
    for column, feature in classes_of(reader.schema).items():
        columns[column] = [_named(value, feature) for value in columns[column]]
    return [
        Row(
            place + 1,
            {column: values[row] for column, values in columns.items()},
            copies=tuple(other + 1 for other in others),
            coded={column: values[row] for column, values in coded.items()},
        )
        for row, (place, *others) in enumerate(groups)
    ]


def classes_of(schema: Any) -> dict[str, Any]:
    """Return the features of the columns that hold numbers of classes, as `datasets` writes them into a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: features[name] for name in schema.names if '"ClassLabel"' in json.dumps(features.get(name))}
    except (KeyError, TypeError, ValueError, AttributeError):  # none, or another program's
        return {}


def parquet_of(rows: Any, most: int) -> tuple[int, bytes] | None:
    """Return a table of `datasets` or Arrow that holds numbers of classes as Parquet, whose schema has their names.

    Args:
        most: Rows that are read of what does not say how many it has.

    Returns:
        The number of rows and the file's content; None for any other table, and for rows that a function makes.
    """
    if type(rows).__module__.partition(".")[0] not in ("datasets", "pyarrow"):
        return None
    schema = getattr(rows, "schema", None) or getattr(getattr(rows, "features", None), "arrow_schema", None)
    if schema is None or not classes_of(schema) or getattr(rows, "format", {}).get("type") == "custom":
        return None
    arrow = import_optional("pyarrow", "tables", "a table")
    parquet = import_optional("pyarrow.parquet", "tables", "a Parquet file")
    if hasattr(rows, "features"):
        rows = rows if hasattr(rows, "__len__") else rows.take(most)
        rows = arrow.concat_tables(rows.with_format("arrow").iter(1000)).replace_schema_metadata(schema.metadata)
    parquet.write_table(arrow.table(rows), file := arrow.BufferOutputStream())
    return len(rows), file.getvalue().to_pybytes()


def first_unnamed(rows: Any, lines: Sequence[str]) -> tuple[int, str, Any] | None:
    """Return row, column and value of the first number of a class whose name was lost on the way to JSON.

    What a function makes of each row (``map`` of a stream without ``features``, ``with_transform``) has no types, but
    the rows before it may have had classes. ``Dataset.map`` keeps those of columns that stay numbers.
    """
    if type(rows).__module__.partition(".")[0] != "datasets":
        return None
    coded = _classes_before(getattr(rows, "_ex_iterable", rows))
    for number, line in enumerate(lines if coded else (), 1):
        row = json.loads(line)
        for column in coded.keys() & row.keys():
            if _named(row[column], coded[column]) != row[column]:
                return number, column, row[column]
    return None


def _classes_before(source: Any) -> dict[str, Any]:
    """Return the features of columns of classes where types were last known, going back through a stream's steps."""
    if source is None or source.features is not None:
        return classes_of(getattr(getattr(source, "features", None), "arrow_schema", None))
    before = getattr(source, "ex_iterables", None) or [getattr(source, "ex_iterable", None)]
    return {name: feature for each in before for name, feature in _classes_before(each).items()}


def _named(value: Any, feature: Any) -> Any:
    """Return a value with the names of classes in place of their numbers; a number without a name (-1) is null."""
    if isinstance(feature, list):  # a list as older versions of `datasets` write it
        feature = {"feature": feature[0], "_type": "List"}
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind == "ClassLabel" and type(value) is int:
        names = feature["names"]
        return names[value] if 0 <= value < len(names) else None
    if isinstance(value, list) and isinstance(kind, str):
        return [_named(each, feature.get("feature")) for each in value]
    if isinstance(value, dict) and isinstance(feature, Mapping):
        # A sequence of objects, which older versions of `datasets` know, is an object of lists.
        inner = {k: [f] for k, f in feature["feature"].items()} if kind == "Sequence" else feature
        return {name: _named(each, inner.get(name)) for name, each in value.items()}
    return value


def _different(reader: Any, compared: Sequence[str], is_merging: bool) -> tuple[Any, list[list[int]]]:
    """Return the rows that differ in the columns ``compared``, as a table, and the places of those equal to each.

    Batches are merged by themselves and then with each other, so that the whole table is never in memory.
    """
    arrow = import_optional("pyarrow", "tables", "a table")
    # `kept` holds the different rows of each batch; `classes` maps
    # every row read to a row of the concatenation of these.
    kept, classes = [reader.schema.empty_table()], [np.zeros(0, np.int64)]
    for batch in reader:
        table, codes = _merged(arrow.Table.from_batches([batch]), compared if is_merging else ())
        classes.append(codes + sum(map(len, kept)))
        kept.append(table)
    table, codes = _merged(arrow.concat_tables(kept), compared if is_merging else ())
    codes = codes[np.concatenate(classes)]
    # A stable sort keeps the rows of one class in file order, so the first of each group is the row that is kept.
    order = np.argsort(codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    return table, [group.tolist() for group in groups]


def _merged(table: Any, compared: Sequence[str]) -> tuple[Any, Codes]:
    """Return the first of equal rows, and the place among them of each row, [rows].

    All rows stay where nothing is ``compared``, or a column has values that Arrow does not compare (maps, long lists).
    """
    try:
        codes = _joined([_codes(table.column(name)) for name in compared]) if compared else np.arange(len(table))
    except NotImplementedError:  # pyarrow's own class derives from it
        codes = np.arange(len(table))
    # np.unique numbers the classes by value. They are renumbered in
    # order of first appearance, so that rows stay in file order.
    _, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    places = firsts[order]
    try:
        table = table.take(places)
    except NotImplementedError:  # of some types Arrow takes no rows (string_view)
        table = type(table).from_batches([part for place in places for part in table.slice(place, 1).to_batches()])
    return table, np.argsort(order)[codes]


def _codes(column: Any) -> Codes:
    """Return a number for each cell, [rows], equal where the cells are.

    Raises:
        NotImplementedError: Arrow does not compare cells of this type, or a list has more than 16 elements.
    """
    arrow = import_optional("pyarrow", "tables", "a table")
    column = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    kind = column.type
    # A struct is its fields and whether it is null: a null struct and a struct of nulls are two values.
    if arrow.types.is_struct(kind):
        return _joined([column.is_null().to_numpy(zero_copy_only=False), *map(_codes, column.flatten())])
    # A dictionary encoding numbers equal cells alike; null, which has no number there, becomes -1.
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)):
        if not arrow.types.is_dictionary(kind):
            column = column.dictionary_encode()
        return np.asarray(column.indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    lengths = np.asarray(column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST:
        raise NotImplementedError(f"lists of {longest} elements")
    # The appended -1 is what index -1 finds: the place of an element that a shorter list does not have.
    inner = np.append(_codes(column.flatten()), -1)
    begins = np.cumsum(np.maximum(lengths, 0)) - np.maximum(lengths, 0)
    elements = (np.where(lengths > place, begins + place, -1) for place in range(longest))
    return _joined([lengths, *(inner[places] for places in elements)])


def _joined(parts: Sequence[npt.NDArray[Any]]) -> Codes:
    """Return a number for each row, equal where all ``parts`` are, and below the number of rows."""
    total = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        if len(part) and (part != part[0]).any():
            _, codes = np.unique(part, return_inverse=True)
            # Two numbers become one as digits of a mixed base. They are renumbered
            # after each part, so products stay below rows squared and do not overflow.
            _, total = np.unique(total * (int(codes.max()) + 1) + codes, return_inverse=True)
    return total


def _taken(column: Any) -> list[Any]:
    """Return the values of an Arrow column; what is none that Python has is `Unread`."""
    try:
        values = list(column.to_pylist())
        return [_shortest(value, column.type) for value in values] if "float" in str(column.type) else values
    except Exception:  # Arrow raises what each type raises: a year 10,000, half a nanosecond, text that is no UTF-8
        return [_value(cell) for cell in column]


def _shortest(value: Any, kind: Any) -> Any:
    """Return ``value`` with floats of 16 and 32 bits as they were written: 0.1, and not 0.10000000149011612."""
    if isinstance(value, float):
        short = {"float": np.float32, "halffloat": np.float16}.get(str(kind))
        # Whole numbers up to 2**24 are the same in float32, and need no detour over text.
        if short is None or (value.is_integer() and abs(value) <= 2**24):
            return value
        return float(str(short(value)))
    if isinstance(value, dict):
        return {name: _shortest(inner, kind.field(name).type) for name, inner in value.items()}
    return [_shortest(inner, kind.value_type) for inner in value] if type(value) is list else value


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except Exception as error:
        return Unread(f"a value of the type {cell.type} that cannot be read ({error})")
