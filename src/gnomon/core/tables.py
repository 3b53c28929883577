"""Tables to frozen dataclasses and back: every key known, every type strict, every message with its path."""

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from gnomon.core.errors import ConfigError, dotted, unknown

_MOST_DOTS = 1000
# What is quoted, to its end or that of the line or text, and comments: nothing in them is a dot of a key.
_QUOTED = re.compile(
    r'"{3}(?:\\.|[^\\])*?(?:"{3,5}|\Z)|' r"'{3}.*?(?:'{3,5}|\Z)|" r'"(?:\\.|[^"\\\n])*"?|' r"'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
_DOTTED = re.compile(r'(?:[\w-]|"")++(?:[ \t]*+\.[ \t]*+(?:[\w-]|"")*+)*+')


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Refused beside: names of a key without end, for which the parser's time grows with their square (50,000 take it
    minutes); numbers that Python reads, in hexadecimal, and cannot write.

    Raises:
        ValueError, RecursionError: The text is no TOML, or no sound one.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    """
    text = text.removeprefix("\ufeff")  # some editors begin a file with a mark that says it is UTF-8
    # Texts and comments are taken out first: their dots are no keys.
    bare = _QUOTED.sub(lambda match: "" if match[0][0] == "#" else '""', text)
    if any(found[0].count(".") > _MOST_DOTS for found in _DOTTED.finditer(bare)):
        raise ValueError(f"a key has more than {_MOST_DOTS} names, joined by dots")
    table = tomllib.loads(text)
    # Python refuses to print integers of more than 4,300 digits:
    # better here, with the file's name, than when a record is written.
    repr(table)
    return table


def packaged_toml(package: str, name: str) -> dict[str, Any]:
    """Return the table of a TOML file that lies beside the modules of ``package``: each caller's own, read once."""
    return dict(deepcopy(_packaged(package, name)))


@cache
def _packaged(package: str, name: str) -> Mapping[str, Any]:
    return tomllib.loads((files(package) / name).read_text(encoding="utf-8"))


def canonical(name: str) -> str:
    """Return what all spellings of a name have in common.

    >>> canonical("REINFORCE++ baseline") == canonical("reinforce-pp-baseline"), canonical("A*-PO")
    (True, 'astarpo')
    """
    folded = name.lower().replace("++", "pp").replace("*", "star")
    return "".join(letter for letter in folded if letter.isalnum())


T = TypeVar("T")


def build(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """Return the frozen dataclass ``cls`` that ``table`` describes.

    Nested tables become nested dataclasses; where several are possible their ``kind`` field decides. Leaves are checked
    strictly (no "5" for 5, no 1 for true).

    Raises:
        ConfigError: The message names the path, the value, what was expected, and the nearest known key.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ConfigError(_at(path, unknown("key", key, known)))
    missing = [name for name, f in known.items() if name not in table and _is_required(f)]
    if missing:
        raise ConfigError(_at(path, f"missing {', '.join(missing)}"))
    values = {key: checked(hints[key], value, dotted(path, key)) for key, value in table.items()}
    try:
        return cls(**values)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(_at(path, str(error))) from error


def settled(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields of ``cls``, each as `build` makes it; those that are it already, and defaults, stay.

    Raises:
        ConfigError: As `build`.
    """
    hints, known = typing.get_type_hints(cls, include_extras=True), {f.name: f for f in dataclasses.fields(cls)}
    made: dict[str, Any] = {}
    for name, value in given.items():
        made[name] = value if _is_default(known[name], value) else checked(hints[name], value, name)
    return made


def _is_default(known: "dataclasses.Field[Any]", value: Any) -> bool:
    return value is known.default or (value == {} and known.default_factory is dict)


def check_types(section: Any, path: str) -> None:
    """Refuse fields of a dataclass that hold something of another type, and of the dataclasses in it.

    Raises:
        ConfigError: The message names the field below ``path``, its value and what it should be.
    """
    hints = typing.get_type_hints(type(section), include_extras=True)
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if not _is_default(f, value):
            checked(hints[f.name], value, f"{path}.{f.name}")
        if dataclasses.is_dataclass(value):
            check_types(value, f"{path}.{f.name}")


def to_table(piece: Any) -> dict[str, Any]:
    """Return the table that `build` turns into ``piece`` again; ``None`` fields are left out, as TOML has none."""
    table: dict[str, Any] = {}
    for f in dataclasses.fields(piece):
        value = getattr(piece, f.name)
        if value is not None and f.init:
            table[f.name] = _plain(value)
    return table


def flat(table: Any, path: str = "") -> dict[str, Any]:
    """Return every value of nested tables and lists by its dotted path.

    >>> flat({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    if isinstance(table, Mapping):
        inner = [(dotted(path, str(key)), value) for key, value in table.items()]
    elif isinstance(table, list | tuple) and any(isinstance(value, Mapping | list) for value in table):
        inner = [(f"{path}.{place}", value) for place, value in enumerate(table)]
    else:
        return {path: list(table) if isinstance(table, tuple) else table}
    return {key: value for at, below in inner for key, value in flat(below, at).items()}


def value_at(table: Any, path: str) -> Any:
    """Return what an unchecked table has at a path of names; None where it has nothing there.

    >>> value_at({"algorithm": {"name": "grpo"}}, "algorithm.name"), value_at({"algorithm": "grpo"}, "algorithm.name")
    ('grpo', None)
    """
    for name in path.split("."):
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def reach_table(table: Any, path: str) -> Mapping[str, Any]:
    """Return the table that `value_at` finds, an empty one where there is none."""
    found = value_at(table, path)
    return found if isinstance(found, Mapping) else {}


def set_path(table: dict[str, Any], path: str, value: Any) -> None:
    """Set ``table["a"]["b"]`` for the path "a.b", making tables on the way; a number counts in a list, from 0.

    A text on the way becomes the table that it stands for: ``preset`` of the algorithm, ``piece`` below that, ``kind``
    elsewhere.

    Raises:
        ConfigError: The path goes below a list that has no such entry.
    """
    *parents, last = path.split(".")
    node: Any = table
    for depth, parent in enumerate(parents):
        key = _key(node, parent, path)
        below = node[key] if isinstance(node, list) else node.get(key)
        if not isinstance(below, dict | list):
            if isinstance(below, int | float):
                section = ".".join(parents[: depth + 1])
                raise ConfigError(f"{section} = {below!r}: a section has settings of its own; set {path} alone")
            naming = "kind" if parents[0] != "algorithm" else "piece" if depth else "preset"
            naming = "task" if parents[:2] == ["evaluation", "tasks"] else naming
            # An algorithm's lists are changed by their numbers where the algorithm is made.
            is_list = parents[0] != "algorithm" and [*parents, last][depth + 1].isdecimal()
            below = ([None] if is_list else {}) if below is None else {naming: below}
            node[key] = below
        node = below
    node[_key(node, last, path)] = value


def drop_other_kind(table: dict[str, Any], path: str, kind: Any) -> list[str]:
    """Empty the table whose ``kind`` is at ``path`` if it is of another kind, for its keys mean nothing there.

    Returns:
        One note that names the keys that were left out; nothing when none were.

    >>> table = {"task": {"kind": "arithmetic", "lowest": 0}}
    >>> drop_other_kind(table, "task.kind", "table"), table
    (['task.kind = table is another kind than arithmetic, so lowest of that is left out'], {'task': {}})
    """
    node = value_at(table, path.rpartition(".")[0])
    if not isinstance(node, dict) or node.get("kind", kind) == kind:
        return []
    before, keys = node["kind"], [name for name in node if name != "kind"]
    node.clear()
    verb = "is" if len(keys) == 1 else "are"
    return (
        [f"{path} = {kind} is another kind than {before}, so {', '.join(keys)} of that {verb} left out"] if keys else []
    )


def _key(node: Any, key: str, path: str) -> Any:
    if not isinstance(node, list):
        return key
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(
            f"{path}: '{key}' is no entry of a list of {len(node)}, counted from 0; or give the whole list"
        )
    return int(key)


def checked(hint: Any, value: Any, path: str) -> Any:
    """Return a value as `build` makes it of what a table has.

    Args:
        hint: The type that is asked for.
        value: What is there.
        path: Where it stands, for the message.

    Raises:
        ConfigError: It is of another type.
    """
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    allowed = members(hint)
    classes = [m for m in allowed if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if isinstance(value, Mapping) and classes:
        return build(_choose(classes, value, path), value, path)
    if classes and isinstance(value, tuple(classes)):
        return value
    # Of the members that are lists, the first whose length fits takes the
    # value; elements are checked one by one, so that the message has the index.
    for member in allowed:
        arguments = typing.get_args(member)
        is_list = arguments[1:] == (Ellipsis,) and not any(map(dataclasses.is_dataclass, members(arguments[0])))
        # A text stays a text where a text is allowed too.
        is_other = type(value) not in allowed and not any(value in typing.get_args(each) for each in allowed)
        if is_list and type(value) in (str, int, float) and is_other and value != "":
            value = [value]  # one text or number is a list of one
        if typing.get_origin(member) is tuple and isinstance(value, list | tuple):
            of_each = arguments[:1] * len(value) if arguments[1:] == (Ellipsis,) else arguments
            if len(of_each) == len(value):
                pairs = zip(of_each, value, strict=True)
                return tuple(checked(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(pairs))
    return _leaf(hint, value, path)


def _leaf(hint: Any, value: Any, path: str) -> Any:
    # Nearly all leaves, without pydantic: a grading process begins twice as fast.
    allowed = members(hint)
    if type(value) in (bool, int, float, str, type(None)) and str(value).isascii():
        literals = [each for m in allowed if typing.get_origin(m) is typing.Literal for each in typing.get_args(m)]
        if type(value) in allowed or any(each == value and type(each) is type(value) for each in literals):
            return value
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        reasons = sorted({_form(e["msg"].removeprefix("Input should be "), hint) for e in error.errors()})
        raise ConfigError(f"{path} = {value!r}: should be {either(reasons, value)}") from error


def either(forms: Sequence[str], value: Any) -> str:
    """Return in words what a value should be, of which each form is one way; and how a whole number is written.

    >>> either(["'measured'", "a whole number"], "5")
    "a whole number or 'measured'; write 5"
    """
    *others, last = sorted(dict.fromkeys(forms), key=lambda form: form[:1] == "'")  # quoted ones last
    whole = re.fullmatch(r"([0-9]{1,12})(?:\.0+)?", str(value)) if "a whole number" in forms else None
    return " or ".join(filter(None, (", ".join(others), last))) + (f"; write {whole[1]}" if whole else "")


_FORMS = {
    "a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false",
    "a valid string": "text", "a valid list": "a list", "a valid dictionary": "a table, such as {name = 1}",
}  # fmt: skip


def _form(said: str, hint: Any) -> str:
    """Return what pydantic asks for in the words of TOML."""
    if said.startswith("an instance of "):
        return "a table, such as {name = 1}"
    if said != "a valid tuple":
        return _FORMS.get(said, said)
    of_each = next(typing.get_args(member) for member in members(hint) if typing.get_origin(member) is tuple)
    return 'a list, such as ["a", "b"]' if of_each[1:] == (Ellipsis,) else f"a list of {len(of_each)}"


def _choose(classes: list[Any], value: Mapping[str, Any], path: str) -> Any:
    if len(classes) == 1:
        return classes[0]
    kinds = {typing.get_args(typing.get_type_hints(c)["kind"])[0]: c for c in classes}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(_at(path, unknown("kind", str(kind), kinds) if kind else f"needs a kind: {', '.join(kinds)}"))
    return kinds[kind]


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types that ``hint`` allows, each alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    flat: list[Any] = []
    for member in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(member) is typing.Annotated:
            member = typing.get_args(member)[0]
        flat += members(member) if typing.get_origin(member) in (typing.Union, types.UnionType) else [member]
    return tuple(flat)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_table(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _is_required(f: "dataclasses.Field[Any]") -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _at(path: str, message: str) -> str:
    is_said = not path or message.startswith(f"{path}.")
    return message if is_said else f"{path}: {message}"
