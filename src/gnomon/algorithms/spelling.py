"""A piece or a value as it is typed on the command line and in TOML."""

import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from gnomon.algorithms.imports import piece_name
from gnomon.algorithms.ratios import Ratio


def spelled(value: Any) -> str:
    """Return ``value`` as inline TOML that `resolve` turns into it again; a piece with its defaults is its name.

    >>> spelled(None), spelled(0.5), spelled(("a", True))
    ('"none"', '0.5', '["a", true]')
    >>> spelled(Ratio(clamp=float("inf")))
    '{anchor = "proximal", level = "token", clamp = inf}'
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if isinstance(value, Ratio):
        # There is one kind of ratio, so its name says nothing; without it, a table changes what it names alone.
        return _table({f.name: getattr(value, f.name) for f in fields(value)})
    if is_dataclass(value) and not isinstance(value, type):
        said = _differing(value)
        return _table({"piece": piece_name(type(value)), **said}) if said else spelled(piece_name(type(value)))
    return repr(value)


def _differing(piece: Any) -> dict[str, Any]:
    """Return the fields that are not as they are when nothing is said."""
    said = {}
    for f in fields(piece):
        value = getattr(piece, f.name)
        unsaid = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != unsaid:
            said[f.name] = value
    return said


def _table(values: dict[str, Any]) -> str:
    return f"{{{', '.join(f'{name} = {spelled(value)}' for name, value in values.items())}}}"
