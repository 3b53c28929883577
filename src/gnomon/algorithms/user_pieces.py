"""Pieces of a user: loading them by reference, and writing a piece or a value as TOML."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gnomon.algorithms.ratios import Ratio
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.user_code import announce, check_allowed, import_as_module, run_as_module, running_user_code

_PREFIX = "gnomon_user_"

_HOME = __name__.rpartition(".")[0]


def load_object(reference: str) -> Any:
    """Return what ``path.py:NAME`` or ``module:NAME`` means. A file is executed once.

    Raises:
        ConfigError: There is no such file, module or name, or its import fails.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' should be 'path.py:NAME' or 'module:NAME'")
    if place.partition(".")[0] != "gnomon":
        check_allowed(reference)
    module = _load_file(Path(place), reference) if place.endswith(".py") else _load_module(place, reference)
    found: Any = module
    for part in name.split("."):
        if part not in vars(found):
            public = [n for n in vars(found) if not n.startswith("_")]
            raise ConfigError(f"{place}: {unknown('name', part, public)}")
        found = vars(found)[part]
    return found


def reference_of(cls: type) -> str:
    """Return the reference with which `load_object` finds ``cls`` again."""
    if cls.__module__.startswith(_PREFIX):
        return f"{sys.modules[cls.__module__].__file__}:{cls.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def _load_module(place: str, reference: str) -> ModuleType:
    if place not in sys.modules:
        announce(reference)
    try:
        with _as_it_was(reference):
            return import_as_module(place)
    except (Exception, SystemExit) as error:  # whatever a user's module raises is a wrong name or wrong code of theirs
        raise ConfigError(_failed(reference, error)) from error


def _load_file(path: Path, reference: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"'{reference}': there is no file {path} (looked in {Path.cwd()})")
    resolved = real_path(path)
    name = f"{_PREFIX}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    announce(reference)
    try:
        with _as_it_was(reference):
            return run_as_module(resolved, name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(_failed(reference, error)) from error


@contextmanager
def _as_it_was(reference: str) -> Iterator[None]:
    """Refuse an import that leaves torch with other defaults: every later tensor would be another."""
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    with running_user_code(f"importing {reference}"):
        yield
    after = torch.get_default_dtype(), torch.is_grad_enabled()
    if after != before:
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])
        raise ConfigError(
            f"importing {reference} changed torch's default type or gradients, from {before} to {after}; "
            "do so within a piece: with torch.no_grad(), dtype="
        )


def _failed(reference: str, error: BaseException) -> str:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"'{reference}' could not be imported: {kind}{error}"


def piece_name(cls: type) -> str:
    """Return what "piece" says for ``cls``: its name, or where a user's own is found."""
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
