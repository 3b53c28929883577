"""Algorithms and pieces in words, for `gnomon algorithms [NAME]`."""

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.aliases import CORRECTIONS, FORMER
from gnomon.algorithms.build import to_table
from gnomon.algorithms.formulas import formula, plain
from gnomon.algorithms.pieces import choices, members, slots
from gnomon.algorithms.presets import NAMED
from gnomon.algorithms.sections import ReferencePolicy
from gnomon.algorithms.user_pieces import spelled
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import canonical, packaged_toml

_TABLE = packaged_toml("gnomon.algorithms", "notes.toml")
NOTES: Mapping[str, tuple[str, ...]] = {
    name: tuple(_TABLE["shared"].get(note.removeprefix("@"), note) for note in notes)
    for name, notes in _TABLE["notes"].items()
}
"""Where a preset differs from its paper, its published code or other libraries, and why."""
USES: Mapping[str, str] = _TABLE["use"]
"""When one takes a preset."""

WIDTH = 100
_READING = (
    "formula (R is a response's reward, x what a token earned, V a critic's and v a tracked value; means and "
    "deviations s are over the group G, the batch B or one state S; |o| counts trained tokens)"
)
_LABEL = 16


def summary() -> str:
    """Return a line for each preset: its name, and the paper."""
    widest = max(len(name) for name in NAMED)
    return "\n".join(f"{name:<{widest}}  {preset.paper}" for name, preset in NAMED.items())


def describe(algorithm: Algorithm) -> str:
    """Return composition, defaults, paper, formula, and where a preset differs from its paper and why."""
    use = USES.get(algorithm.name)
    lines = [algorithm.name, *_wrap("paper", algorithm.paper), *(_wrap("when", use) if use else ())]
    for f in fields(algorithm):
        value = getattr(algorithm, f.name)
        # Flags and words at their defaults say nothing; numbers are shown, since papers disagree about them.
        is_usual = isinstance(value, bool | str | ReferencePolicy) and value == f.default
        is_unsaid = value is None or value == () or is_usual
        if f.name not in ("name", "paper") and not is_unsaid:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            lines += _wrap(f.name, shown)
    lines += ["", *_fill(_READING, "  ", "  ")]
    for name, text in formula(algorithm).items():
        lines += _wrap(name, plain(text))
    notes = notes_on(algorithm)
    if notes:
        lines += ["", "  where it differs, and why"]
        for note in notes:
            lines += _fill(note, "  - ", "    ")
    return "\n".join(lines)


def notes_on(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the notes of the preset that has the algorithm's name; none for a user's own.

    >>> notes_on(NAMED["dr-grpo"])[0].startswith("aggregate.length is the paper's budget of 3000 tokens.")
    True
    """
    return NOTES.get(algorithm.name, ())


@dataclass(frozen=True)
class FieldText:
    """A field of a piece in words: what it may be, and what it is when nothing is said (TOML; None: must be said)."""

    type: str
    default: str | None


@dataclass(frozen=True)
class PieceText:
    """A piece in words: its name, the places below an algorithm where it fits, its docstring, and its fields."""

    name: str
    places: tuple[str, ...]
    text: str
    fields: dict[str, FieldText]

    def __str__(self) -> str:
        lines = [f"{self.name}, for algorithm.{' or algorithm.'.join(self.places)}", ""]
        lines += textwrap.indent(self.text, "  ").splitlines()
        if self.fields:
            lines += ["", "  fields"]
        for name, field in self.fields.items():
            lines += _wrap(f"  {name}", field.type + ("" if field.default is None else f" = {field.default}"))
        return "\n".join(lines)


def piece_text(cls: type) -> PieceText:
    """Return what there is to say about a piece.

    >>> print(piece_text(NAMED["spo"].tracker.__class__).fields["drift"].default)
    "replayed"
    """
    hints = get_type_hints(cls)
    said = {}
    for f in fields(cls):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        said[f.name] = FieldText(kind_of(hints[f.name]), None if default is MISSING else spelled(default))
    # A piece may fit in several places, such as an advantage inside another one.
    places = tuple(place for place, pieces in slots().items() if cls in pieces.values())
    return PieceText(cls.__name__, places, inspect.getdoc(cls) or "", said)


def find_piece(name: str) -> type | None:
    """Return the piece that ``name`` means, in whatever case or as others call it; None when it means an algorithm.

    Raises:
        ConfigError: ``name`` means neither; the message names the nearest algorithm or piece.

    >>> find_piece("truncated"), find_piece("TIS"), find_piece("grpo")
    (<class 'gnomon.algorithms.corrections.TruncatedIS'>, <class 'gnomon.algorithms.corrections.TruncatedIS'>, None)
    """
    # An algorithm's name wins over a piece's.
    if canonical(name) in map(canonical, NAMED):
        return None
    pieces = named_pieces()
    found = {canonical(piece): cls for piece, cls in pieces.items()}.get(canonical(name))
    if found is None and ":" not in name:
        raise ConfigError(
            unknown(
                "algorithm or piece",
                name.lower() if name.isupper() else name,
                [*NAMED, *(cls.__name__ for cls in pieces.values())],
            )
        )
    return found


def named_pieces() -> dict[str, type]:
    """Return the pieces by every name that they have or had, here and in other libraries."""
    pieces = {piece: cls for fitting in slots().values() for piece, cls in fitting.items()}
    theirs = {name: table["piece"] for name, table in CORRECTIONS.items()}
    return {**pieces, **{name: pieces[present] for name, present in {**FORMER, **theirs}.items() if present in pieces}}


def as_row(algorithm: Algorithm) -> dict[str, Any]:
    """Return the algorithm's table and, as "notes", where it differs from its paper: one JSON object."""
    return {**to_table(algorithm), "notes": list(notes_on(algorithm))}


def pieces_summary() -> str:
    """Return the pieces that fit into each place of an algorithm, a line or more for each."""
    lines = []
    for place, pieces in slots().items():
        lines += _wrap(place, ", ".join(pieces), 26)
    return "\n".join(lines)


def kind_of(hint: Any) -> str:
    """Return what a field of a piece may be, as TOML: its pieces by name, its words, or its type."""
    wanted = members(hint)
    if wanted.sequence is not None:
        return f"list of {kind_of(wanted.sequence)}"
    names = list(choices(wanted))
    for member in wanted:
        if get_origin(member) is Literal:
            names += map(spelled, get_args(member))
        elif member is type(None):
            names.append('"none"')
        elif member in (bool, int, float, str):
            names.append(member.__name__)
    return " | ".join(names)


def _wrap(label: str, text: str, wide: int = _LABEL) -> list[str]:
    first = f"  {label:<{wide}}"
    return _fill(text, first, " " * len(first))


def _fill(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
