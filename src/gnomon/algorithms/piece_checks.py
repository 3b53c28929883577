"""What each piece of an algorithm must have, and which places take gnomon's own kinds alone."""

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from gnomon.algorithms.composition import Composition
from gnomon.algorithms.piece_calls import FORMS, article, said_of
from gnomon.core.errors import ConfigError
from gnomon.core.tables import checked

_MAY_BE_INFINITE = frozenset({"clamp", "low", "high", "cap", "dual", "clip", "threshold"})
"""Settings that bound something, where infinity is no bound. Elsewhere it would make a loss of nan, or of nothing."""


def check_finite(piece: Any, path: str = "algorithm") -> None:
    """Check that every number of a composition is finite, but for bounds that are left out by infinity.

    Pieces of a user's own decide that for themselves.

    Args:
        piece: A composition, or a piece of one.
        path: Where it stands.

    Raises:
        ConfigError: The message names the setting and its value.
    """
    if isinstance(piece, tuple):
        for number, each in enumerate(piece):
            check_finite(each, f"{path}.{number}")
    elif is_dataclass(piece) and type(piece).__module__.startswith("gnomon."):
        for field in fields(piece):
            check_finite(getattr(piece, field.name), f"{path}.{field.name}")
    elif isinstance(piece, float) and not math.isfinite(piece):
        is_bound = path.rpartition(".")[2] in _MAY_BE_INFINITE
        if piece != math.inf or not is_bound:
            raise ConfigError(
                f"{path} = {piece} is no finite number; write one{'' if is_bound else ', or leave it out'}"
            )


def check_places(piece: Any, path: str = "") -> None:
    """Check that every part of an algorithm, and of its pieces, is of a kind that its place takes, and every value too.

    Args:
        piece: A composition, or a piece of one.
        path: Where it stands; "" for a composition.

    Raises:
        ConfigError: The message names the place, what stands there and the protocol's line.
    """
    cls: Any = Composition if isinstance(piece, Composition) else type(piece)
    for name, (allowed, is_list) in _places(cls).items():
        value, at = getattr(piece, name), f"{path}.{name}".lstrip(".")
        if is_list and not isinstance(value, tuple):
            raise ConfigError(f"algorithm.{at} is a tuple of pieces, got {type(value).__name__}")
        for number, each in enumerate(value if is_list else (value,)):
            _check(f"{at}.{number}" if is_list else at, each, allowed)
            if is_dataclass(each) and type(each).__module__.startswith(f"{__package__}."):
                check_places(each, f"{at}.{number}" if is_list else at)
    for name, hint in _values(cls).items():
        checked(hint, getattr(piece, name), f"algorithm.{path}.{name}".replace("..", "."))


def _check(path: str, piece: Any, allowed: tuple[Any, ...]) -> None:
    if piece is None and type(None) in allowed:
        return
    names = [kind.__name__ for kind in allowed if kind is not type(None)]
    if names[0] in FORMS:
        form = FORMS[names[0]]
        lacks = form.lacks(piece)
        if lacks:
            raise ConfigError(
                f"{path} {said_of(piece)} has no {' and no '.join(lacks)}; {article(names[0])} is `{form.line}` "
                "(docs/pieces.md)"
            )
        if not is_dataclass(piece):
            raise ConfigError(
                f"{path} {said_of(piece)} is no dataclass, and a run could not write it down: put "
                f"@dataclass(frozen=True) over a class whose fields are its settings; {article(names[0])} is "
                f"`{form.line}`"
            )
    elif not isinstance(piece, allowed):
        raise ConfigError(
            f"{path} {said_of(piece)} is none of {', '.join(names)}: this place takes no piece of your own"
        )


@functools.cache
def _places(cls: type) -> Mapping[str, tuple[tuple[Any, ...], bool]]:
    """Return the kinds that each place of a class takes and whether it is a list, for places that take pieces."""
    found, hints = {}, get_type_hints(cls)
    for name in (f.name for f in fields(cls)):
        is_list = get_origin(hints[name]) is tuple
        inner = get_args(hints[name])[0] if is_list else hints[name]
        allowed = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
        # A Literal or a parametrized type is no class: such a field is a value.
        if all(isinstance(kind, type) for kind in allowed) and any(
            kind.__module__.startswith(f"{__package__}.") for kind in allowed
        ):
            found[name] = allowed, is_list
    return found


@functools.cache
def _values(cls: type) -> Mapping[str, Any]:
    """Return the type of each field of a class that takes no piece."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init and f.name not in _places(cls)}
