"""Names of a user's own code: ``path.py:NAME`` or ``module:NAME``."""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gnomon.errors import ConfigError, unknown
from gnomon.user_file import announce, check_allowed, run_as_module

_PREFIX = "gnomon_user_"

_HOME = __name__.rpartition(".")[0]


def load_object(reference: str) -> Any:
    """Return what ``path.py:NAME`` or ``module:NAME`` means. A file is executed once.

    Raises: ConfigError when there is no such file, module or name, or when importing it fails.
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
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:  # whatever a user's module raises is a wrong name or wrong code of theirs
        raise ConfigError(_failed(reference, error)) from error


def _load_file(path: Path, reference: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"'{reference}': there is no file {path} (looked in {Path.cwd()})")
    resolved = path.resolve()
    name = f"{_PREFIX}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    announce(reference)
    try:
        return run_as_module(resolved, name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(_failed(reference, error)) from error


def _failed(reference: str, error: BaseException) -> str:
    return f"'{reference}' could not be imported: {type(error).__name__}: {error}"


def piece_name(cls: type) -> str:
    """Return what "piece" says for ``cls``: its name, or where a user's own is found."""
    return cls.__name__ if cls.__module__.startswith(_HOME) else reference_of(cls)
