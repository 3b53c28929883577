"""What a row of a file may hold: the values of every format as JSON values, or why they cannot be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from gnomon.core.errors import on_one_line, shortened

DEEPEST = 64
"""Levels of lists and objects in a value: far fewer than Python's own readers and writers can take."""
_WHOLE = 2.0**53
_MARK = "\ufeff"


class Rounded(float):
    """A number of which JSON keeps fewer digits than the file has.

    Attributes:
        text: The number as the file has it, with all digits.
    """

    text: str


def written(text: str) -> float:
    """Return the number that ``text`` stands for, or the nearest one with its text.

    >>> written("0.10"), written("3.14159265358979323846").text
    (0.1, '3.14159265358979323846')
    """
    value = float(text)
    # Up to 15 significant digits survive a double, and 16 characters hold no more with their point.
    if value and len(text) < 17:
        return value
    try:
        # `repr` is the shortest decimal that reads back as this double:
        # equal means that nothing of the file's digits is lost.
        is_whole = Decimal(text) == Decimal(repr(value))
    except ArithmeticError:  # an exponent beyond those of Decimal
        is_whole = False
    if is_whole:
        return value
    rounded = Rounded(value)
    rounded.text = text
    return rounded


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        number: Row number, counted from 1; in a JSONL or CSV file the line.
        values: Values of the columns, as JSON values.
        flaw: Why the row cannot be used; None for a sound row.
        unsure: Why a field's value is no answer that can be compared (`Reading`), by field.
        copies: Numbers of the rows that are equal to this one, and were not read.
        coded: What columns of classes (`datasets.ClassLabel`) hold in the file: numbers, of which ``values`` has the
            names.
    """

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    flaw: str | None = None
    unsure: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[int, ...] = ()
    coded: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unread:
    """What a file holds in the place of a value that could not be made of it."""

    reason: str


@dataclass
class Reading:
    """The values of one row on their way to JSON.

    Attributes:
        flaw: The first value that is none, with its field.
        unsure: Why a field's value is no answer that can be compared, though a prompt or a reward may use it.

    >>> reading = Reading()
    >>> reading.row({"prompt": b"1+1=", "answer": Decimal("2.00"), "day": date(2026, 1, 2), "more": (1, None)})
    {'prompt': '1+1=', 'answer': '2', 'day': '2026-01-02', 'more': [1, None]}
    >>> _ = reading.row({"a": {"b": [0.5, math.nan]}}); reading.flaw
    'a.b[1]: nan is no number; where there is none write null'
    """

    flaw: str | None = None
    unsure: dict[str, str] = field(default_factory=dict)

    def row(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the values of a row as JSON holds them; where one cannot be, `flaw` says why."""
        return {self._key(key, ""): self._value(value, self._key(key, ""), 1) for key, value in values.items()}

    def _value(self, value: Any, place: str, depth: int) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            return self._text(str(value), place)
        if isinstance(value, float):
            if isinstance(value, Rounded):
                self.unsure[place] = f"stands for {shortened(value.text, 60)}, which a number of JSON cannot hold"
            return float(value) if math.isfinite(value) else self._refuse(place, _no_number(value))
        if isinstance(value, Mapping | list | tuple):
            return self._nested(value, place, depth)
        # Told by name, since this module imports no NumPy. Its times
        # have no Python value at all precisions and go on to `_odd`.
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
        # Before `date`, of which datetime is a subclass.
        if isinstance(value, datetime | time | timedelta):
            self.unsure[place] = "is a time, which can be written in many ways"
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
        # Only the first is reported: others often follow from it.
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
