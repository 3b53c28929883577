"""An algorithm from a name or a table, and the table of an algorithm.

    "grpo"                                                        a preset
    "mine.py:MY_ALGORITHM", "package.module:MY_ALGORITHM"         an `Algorithm` of yours
    "mine.py:my_loss"                                             GRPO with a loss f(view) or an advantage f(batch)
    {"preset": "grpo", "surrogate": {"trust": {"high": 0.28}}}    a preset with overrides; the key
                                                                  "surrogate.trust.high" says the same
    {"preset": "grpo", "aggregate": {"piece": "TokenMean"}}       a preset with another piece; "TokenMean" alone
                                                                  says the same

A table with "piece" starts from that piece's own defaults; one without changes the piece that is there.
"none" removes an optional part. Without "preset" a table describes everything. Names of presets are found however
they are written: "GRPO", "reinforce++", "A*-PO", "dr_grpo".
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from inspect import isfunction, signature
from typing import Any, get_type_hints

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.aliases import former_pieces, translate
from gnomon.algorithms.pieces import SLOTS, choices, leaf, members
from gnomon.algorithms.presets import NAMED, PRESETS
from gnomon.algorithms.user_pieces import FunctionPiece, load_object, piece_name, settings_of
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import canonical

Table = dict[str, Any]


@dataclass(frozen=True)
class Resolution:
    """An algorithm, and what other libraries' names in its table became, a sentence each, to be printed."""

    algorithm: Algorithm
    notes: tuple[str, ...] = ()


def resolve(spec: str | Mapping[str, Any]) -> Algorithm:
    """Return the algorithm that ``spec`` describes; see the module.

    Raises:
        ConfigError: The message names the path, the value, what was expected and the nearest known name.

    >>> resolve({"preset": "grpo", "surrogate.trust.high": 0.28}).surrogate
    ClippedSurrogate(trust=Clip(low=0.2, high=0.28), dual=None)
    """
    return resolve_with_notes(spec).algorithm


def resolve_with_notes(spec: str | Mapping[str, Any]) -> Resolution:
    """Return the algorithm that ``spec`` describes, and what TRL's and verl's spellings in it became.

    >>> resolve_with_notes({"preset": "grpo", "group_size": 4}).notes
    ('group_size = 4 is num_generations = 4',)
    """
    if isinstance(spec, str):
        return Resolution(_named(spec), _renamed(spec))
    if not isinstance(spec, Mapping):
        raise ConfigError(f"algorithm = {spec!r}: should be the name of a preset, like 'grpo', or a table")
    # Names of earlier versions first, so that everything below knows the names of today only.
    table, former = former_pieces(dict(spec))
    # Without a preset other libraries' names are not translated: what they mean depends on the preset.
    if "preset" not in table:
        return Resolution(_build(Algorithm, nest(table), "algorithm"), tuple(former))
    preset = table.pop("preset")
    if not isinstance(preset, str):
        raise ConfigError(f"algorithm.preset = {preset!r}: should be the name of a preset, like 'grpo'")
    base = _named(preset)
    own, notes = translate(table, base)
    overrides = nest(own)
    return Resolution(
        _change(base, overrides, "algorithm") if overrides else base, _renamed(preset) + notes + tuple(former)
    )


def override(algorithm: Algorithm, path: str, value: Any) -> Algorithm:
    """Return ``algorithm`` with one value replaced: "surrogate.trust.high", "regularizers.0.coefficient".

    Raises:
        ConfigError: As for `resolve`.
    """
    changed: Algorithm = _change(algorithm, nest({path: value}), "algorithm")
    return changed


def to_table(algorithm: Algorithm, name: Callable[[Any], str] = piece_name) -> Table:
    """Return the full table: ``resolve(to_table(algorithm)) == algorithm``. Absent parts are left out.

    Args:
        name: What a piece is called in it.

    >>> to_table(resolve("grpo"))["aggregate"]
    {'piece': 'SequenceMean'}
    """
    table = _plain(algorithm, name)
    del table["piece"]
    return dict(table)


def nest(table: Mapping[str, Any]) -> Table:
    """Return ``table`` with dotted keys made into tables, at every depth.

    Raises:
        ConfigError: A path is given a value and is a table at once.
    """
    nested: Table = {}
    for key, value in table.items():
        *parents, last = key.split(".")
        below = nested
        for parent in parents:
            below = below.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(f"'{key}' goes below '{parent}', which was given the value {below!r}")
        _put(below, last, nest(value) if isinstance(value, Mapping) else value, key)
    return nested


def _put(table: Table, key: str, value: Any, path: str) -> None:
    there = table.get(key)
    if isinstance(there, dict) and isinstance(value, dict):
        for name, inner in value.items():
            _put(there, name, inner, f"{path}.{name}")
        return
    if key in table:
        raise ConfigError(f"'{path}' is given twice: {there!r} and {value!r}")
    table[key] = value


def _named(name: str) -> Algorithm:
    if ":" not in name:
        # Case, hyphens and underscores do not matter.
        known = {canonical(preset): preset for preset in NAMED}
        if canonical(name) not in known:
            raise ConfigError(f"{unknown('algorithm', name.lower(), NAMED)}; or your own as 'path.py:NAME'")
        return NAMED[known[canonical(name)]]
    found = load_object(name)
    if isfunction(found):
        return with_function(name)
    if not isinstance(found, Algorithm):
        raise ConfigError(f"'{name}' should be a gnomon Algorithm or a function, got {type(found).__name__}")
    return found


def with_function(function: str | Callable[..., Any]) -> Algorithm:
    """Return GRPO with a function in the place that its first parameter says: a loss of ``view``, or an advantage.

    Raises:
        ConfigError: The parameter is neither ``view`` nor ``batch``.
    """
    piece = FunctionPiece(function)
    taken = [*signature(piece.own).parameters]
    place = {"view": "surrogate", "batch": "advantage"}.get(taken[0] if taken else "")
    if place is None:
        raise ConfigError(
            f"'{piece.name}' takes ({', '.join(taken)}), and a function as an algorithm is a loss f(view) or an "
            "advantage f(batch) in GRPO; name another place: algorithm.aggregate=my.py:f (docs/pieces.md)"
        )
    name = piece.name.strip("<>")  # a lambda has no other name
    found = name if callable(piece.function) else piece.function.rpartition("/")[2]
    own: Table = {"name": name, "paper": f"GRPO with {place} {found}", place: piece}
    return replace(NAMED["grpo"], **own)


def _renamed(name: str) -> tuple[str, ...]:
    """Return a sentence when ``name`` is a preset's in another spelling."""
    if ":" in name or name in NAMED:
        return ()
    return (f"algorithm = '{name}' is algorithm = '{_named(name).name}'",)


def _build(cls: type, table: Mapping[str, Any], path: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    _refuse_unknown(table, known, path)
    defaults = {n for n, f in known.items() if f.default is not MISSING or f.default_factory is not MISSING}
    missing = [name for name in known if name not in table and name not in defaults]
    if missing:
        hint = f"; or start from a preset: preset = one of {', '.join(PRESETS)}" if cls is Algorithm else ""
        raise ConfigError(f"{path}: missing {', '.join(missing)}{hint}")
    hints = get_type_hints(cls)
    values = {key: _value(hints[key], None, value, f"{path}.{key}") for key, value in table.items()}
    return _checked(lambda: cls(**values), path)


def _change(piece: Any, table: Mapping[str, Any], path: str) -> Any:
    _refuse_unknown(table, {f.name for f in fields(piece)}, path)
    hints = get_type_hints(type(piece))
    there = {f.name: getattr(piece, f.name) for f in fields(piece)}
    # Only what the table names is changed; the rest of the piece stays.
    values = {k: _value(hints[k], there[k], value, f"{path}.{k}") for k, value in table.items()}
    return _checked(lambda: replace(piece, **values), path)


def _value(hint: Any, there: Any, value: Any, path: str) -> Any:
    """Return ``value`` as ``hint`` wants it; ``there`` is what a table without "piece" changes."""
    wanted = members(hint)
    is_optional = type(None) in wanted
    # TOML has no null, so "none" says it.
    if is_optional and (value is None or value == "none"):
        return None
    if wanted.sequence is not None:
        return _sequence(wanted.sequence, there, value, path)
    pieces = choices(wanted)
    if not pieces:
        return leaf(hint, value, path)
    if isfunction(value):
        return FunctionPiece(value)
    if is_dataclass(value) and not isinstance(value, type):
        return value
    if isinstance(value, str):
        return _piece(value, {}, pieces, path)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} = {value!r}: should be a table or the name of one of {', '.join(sorted(pieces))}")
    if "piece" in value:
        rest = {k: v for k, v in value.items() if k != "piece"}
        return _piece(value["piece"], rest, pieces, path)
    if there is not None:
        return _change(there, value, path)
    if len(pieces) == 1:
        return _build(next(iter(pieces.values())), value, path)
    # A section such as the tracker has several classes with different keys; pieces of a protocol are always named.
    fitting = [cls for cls in pieces.values() if set(value) <= {f.name for f in fields(cls)}]
    if len(fitting) == 1 and not any(member in SLOTS for member in wanted):
        return _build(fitting[0], value, path)
    raise ConfigError(f"{path}: say which piece: {path}.piece = one of {', '.join(sorted(pieces))}")


def _sequence(hint: Any, there: Any, value: Any, path: str) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(_value(hint, None, v, f"{path}.{i}") for i, v in enumerate(value))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} = {value!r}: should be a list")
    changed = list(there or ())
    for key, inner in value.items():
        if not str(key).isdecimal():
            raise ConfigError(f"{path}: '{key}' is no place in a list; write the whole list, [{{{key} = ...}}]")
        if int(key) >= len(changed):
            raise ConfigError(f"{path}.{key}: there are {len(changed)}, counted from 0; or give the whole list")
        # A table with numbers as keys changes single entries of a list.
        changed[int(key)] = _value(hint, changed[int(key)], inner, f"{path}.{key}")
    return tuple(changed)


def _piece(name: Any, table: Mapping[str, Any], pieces: Mapping[str, type], path: str) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f"{path}.piece = {name!r}: should be a name, one of {', '.join(sorted(pieces))}")
    if ":" in name:
        found = load_object(name)
        if isfunction(found):
            _refuse_unknown(table, (), path)
            return FunctionPiece(name)
        if not (isinstance(found, type) and is_dataclass(found)):
            raise ConfigError(f"{path}: '{name}' should be a dataclass or a function, got {found!r}")
        return _build(found, table, path)
    if name not in pieces:
        raise ConfigError(f"{path}: {unknown('piece', name, pieces)}")
    return _build(pieces[name], table, path)


def _refuse_unknown(table: Mapping[str, Any], known: Any, path: str) -> None:
    for key in table:
        if key not in known:
            names = list(known)
            raise ConfigError(f"{path}: {unknown('key', key, names)}" if names else f"{path} has no key '{key}'")


def _checked(make: Any, path: str) -> Any:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # a user's class may refuse its settings in any way
        raise ConfigError(f"{path}: making it raised {type(error).__name__}: {error}") from error


def _plain(value: Any, name: Callable[[Any], str]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        table: Table = {"piece": name(value)}
        for f in settings_of(value):
            inner = getattr(value, f.name)
            if inner is not None:
                table[f.name] = _plain(inner, name)
            elif f.default is not None:
                # Left out, it would come back as its default.
                table[f.name] = "none"
        return table
    return [_plain(v, name) for v in value] if isinstance(value, tuple) else value
