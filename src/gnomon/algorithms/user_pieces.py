"""Pieces of a user: loading them by reference, functions as pieces, and writing a piece or a value as TOML."""

import functools
import hashlib
import json
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from gnomon.algorithms.protocols import LossInputs
from gnomon.algorithms.ratios import Ratio
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.metrics import Metrics
from gnomon.core.optional import Tensor
from gnomon.core.types import Batch
from gnomon.core.user_code import check_allowed, import_as_module, notify, run_as_module, running_user_code

_PREFIX = "gnomon_user_"

_HOME = __name__.rpartition(".")[0]

_FOUND: MutableMapping[Any, str] = WeakKeyDictionary()
"""Classes that a file holds and another module defines, and where: another program may find them there only."""


def load_object(reference: str) -> Any:
    """Return what ``path.py:NAME`` or ``module:NAME`` means. A file is executed once.

    Raises:
        ConfigError: There is no such file, module or name, or its import fails.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' should be 'path.py:NAME' or 'module:NAME'")
    # gnomon's own modules need no permission to be imported.
    if place.partition(".")[0] != "gnomon":
        check_allowed(reference)
    module = _load_file(Path(place), reference) if place.endswith(".py") else _load_module(place, reference)
    # NAME may have dots: a class's attribute.
    found: Any = module
    for part in name.split("."):
        # A number or a text has no names below it, and no ``__dict__``.
        names = getattr(found, "__dict__", {})
        if part not in names:
            public = [n for n in names if not n.startswith("_")]
            raise ConfigError(f"{place}: {unknown('name', part, public)}")
        found = names[part]
    # A file may import its class from elsewhere; another process finds it through this file.
    is_kept = isinstance(found, type) and found.__module__ != module.__name__
    if is_kept and module.__name__.startswith(_PREFIX) and not found.__module__.startswith("gnomon."):
        _FOUND[found] = f"{module.__file__}:{name}"
    return found


def reference_of(own: type | Callable[..., Any]) -> str:
    """Return the reference with which `load_object` finds a class or a function again."""
    if own in _FOUND:
        return _FOUND[own]
    module, name = own.__module__, own.__qualname__
    return f"{sys.modules[module].__file__ if module.startswith(_PREFIX) else module}:{name}"


def _load_module(place: str, reference: str) -> ModuleType:
    if place not in sys.modules:
        notify(reference)
    try:
        with running_user_code(f"importing {reference}"):
            return import_as_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's module raises is a wrong name or wrong code of theirs
        raise ConfigError(_failed(reference, error)) from error


def _load_file(path: Path, reference: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"'{reference}': there is no file {path} (looked in {Path.cwd()})")
    resolved = real_path(path)
    # The digest tells apart files of one name in different folders.
    name = f"{_PREFIX}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    notify(reference)
    try:
        with running_user_code(f"importing {reference}"):
            return run_as_module(resolved, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        raise ConfigError(_failed(reference, error)) from error


def _failed(reference: str, error: BaseException) -> str:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"'{reference}' could not be imported: {kind}{error}"


@dataclass(frozen=True)
class FunctionPiece:
    """A function in the place of a piece: it has no settings, reads what is always there, and measures nothing.

    A loss, a correction or a regularizer is ``f(view) -> Float[B T]``; an advantage is ``f(batch) -> Float[B T]``, or
    Float[B] for the same number at each token of a row; elsewhere the function is the protocol's call. What a piece
    returns beside its tensor, metrics or returns, may be returned too.

    Attributes:
        function: "path.py:NAME" or "module:NAME"; the function itself, where none finds it.

    Raises:
        ConfigError: A file that an experiment names holds the function under no name.
    """

    function: str | Callable[..., Any]
    needs = frozenset[str]()
    minimum_generations = 1

    def __post_init__(self) -> None:
        function = self.function
        if callable(function):
            module, name = sys.modules.get(function.__module__), function.__qualname__
            # Whether importing the module gives this very function: not for a lambda or a nested one.
            if vars(module or sys).get(name) is function:
                function = reference_of(function)
            elif function.__module__.startswith(_PREFIX):
                piece_name(self)
        elif (place := function.rpartition(":"))[0].endswith(".py"):
            function = f"{real_path(place[0])}:{place[2]}"
        object.__setattr__(self, "function", function)

    def __call__(self, *given: Any) -> Any:
        """Return what the protocol of the function's place asks for."""
        found = self.own(*given)
        if not isinstance(found, Tensor):
            return found
        if isinstance(given[0], LossInputs):
            return found, Metrics()
        if isinstance(given[0], Batch):
            if found.shape not in (given[0].rewards.shape, given[0].mask.shape):
                return found, None
            # (rows,) is one number a response; (rows, tokens) one a token.
            each = found[:, None] if found.shape == given[0].rewards.shape[:1] else found
            return (each * given[0].mask).to(given[0].behavior.dtype), None
        return found

    def center(self, batch: Batch) -> Tensor:
        """Return the advantages as float64."""
        advantages: Tensor = self(batch)[0]
        return advantages.double()

    def weights(self, batch: Batch, default: Tensor) -> Tensor:
        """Return the algorithm's weights."""
        return default

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.own.__name__)

    @property
    def own(self) -> Callable[..., Any]:
        """The function."""
        return self.function if callable(self.function) else _loaded(self.function)


@functools.cache
def _loaded(reference: str) -> Callable[..., Any]:
    found: Callable[..., Any] = load_object(reference)
    return found


def with_functions(value: Any) -> Any:
    """Return a piece, or a tuple of pieces, in which every function is a `FunctionPiece`."""
    if isfunction(value):
        return FunctionPiece(value)
    # Named tuples are values, not lists of pieces. Unchanged values are returned as they are.
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        made = tuple(map(with_functions, value))
        return made if any(new is not there for new, there in zip(made, value, strict=True)) else value
    if is_dataclass(value) and type(value).__module__.startswith(_HOME) and not isinstance(value, FunctionPiece | type):
        there = {f.name: getattr(value, f.name) for f in fields(value)}
        changed = {name: new for name, old in there.items() if (new := with_functions(old)) is not old}
        return replace(value, **changed) if changed else value
    return value


def piece_name(piece: Any) -> str:
    """Return what "piece" says for a piece or its class: its name, or where a user's own is found.

    Raises:
        ConfigError: It is a function that no module holds under its name.
    """
    if isinstance(piece, FunctionPiece):
        if callable(piece.function):
            raise ConfigError(
                f"{piece.function.__qualname__} is found under no name, and a run could not write it down: define it "
                "at the top of a file, or give the algorithm to gnomon.train"
            )
        return piece.function
    cls = piece if isinstance(piece, type) else type(piece)
    return cls.__name__ if cls.__module__.startswith(_HOME) else reference_of(cls)


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
        return _table({"piece": piece_name(value), **said}) if said else spelled(piece_name(value))
    return repr(value)


def settings_of(piece: Any) -> tuple[Field[Any], ...]:
    """Return the fields that are settings; a function has none, for its name is the piece's."""
    return () if isinstance(piece, FunctionPiece) else fields(piece)


def _differing(piece: Any) -> dict[str, Any]:
    """Return the fields that are not as they are when nothing is said."""
    said: dict[str, Any] = {}
    for f in settings_of(piece):
        value = getattr(piece, f.name)
        unsaid = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != unsaid:
            said[f.name] = value
    return said


def _table(values: dict[str, Any]) -> str:
    return f"{{{', '.join(f'{name} = {spelled(value)}' for name, value in values.items())}}}"
