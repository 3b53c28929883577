"""An engine of the user's own, named as ``path.py:Class``: looked at before anything is loaded, then made."""

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch

from gnomon.algorithms.user_pieces import load_object
from gnomon.core.errors import ConfigError
from gnomon.core.sections import EngineConfig
from gnomon.core.user_code import running_user_code
from gnomon.engines.base import Engine
from gnomon.models.hf_names import as_folder

CONSTRUCTED_WITH = ("model", "dtype", "device", "max_concurrent")
"""The keyword arguments that an engine is made with, beside those of ``engine.settings``."""
_PUBLIC = [name for name in vars(Engine) if not name.startswith("_")]


def own_class(plan: EngineConfig) -> type:
    """Return the class that ``engine.kind`` names.

    Raises:
        ConfigError: There is no such class, it cannot be made with what it is given, or it lacks a method of `Engine`;
            the message has the protocol's line.
    """
    where = f"engine.kind = '{plan.kind}'"
    found = load_object(plan.kind)
    if not isinstance(found, type):
        raise ConfigError(f"{where} is {type(found).__name__}, and an engine is a class")
    try:
        inspect.signature(found).bind(**dict.fromkeys((*CONSTRUCTED_WITH, *plan.settings)))
    except TypeError as error:
        raise ConfigError(
            f"{where} is made with {', '.join(CONSTRUCTED_WITH)} and engine.settings = {plan.settings}, by keyword: "
            f"{error}"
        ) from error
    for name in _PUBLIC:
        promised, own = vars(Engine)[name], getattr(found, name, None)
        if isinstance(promised, property):
            continue  # may be set when it is made
        if not callable(own):
            raise ConfigError(f"{where} has no method {name}; {_line(name)}")
        if not inspect.iscoroutinefunction(own):
            raise ConfigError(f"{where}: {name} is not async; {_line(name)}")
        try:
            inspect.signature(own).bind(*inspect.signature(promised).parameters)
        except TypeError as error:
            raise ConfigError(f"{where}: {name} {error}; {_line(name)}") from error
    return found


def make_own(model: str, plan: EngineConfig, dtype: torch.dtype, device: torch.device) -> Engine:
    """Return a new engine of the user's class.

    Args:
        model: A folder, a hub name or a built-in name. A built-in model is written into a folder while it is loaded.

    Raises:
        ConfigError: As `own_class`, or the class raises an error, or what it made lacks ``version`` or ``beats``.
    """
    cls = own_class(plan)
    with tempfile.TemporaryDirectory(prefix="gnomon-engine-") as made:
        given = (as_folder(model, Path(made)), dtype, device, plan.max_concurrent)
        try:
            with running_user_code(f"making {plan.kind}", 600.0):
                engine: Any = cls(**dict(zip(CONSTRUCTED_WITH, given, strict=True)), **plan.settings)
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{plan.kind} could not be made: {type(error).__name__}: {error}") from error
    for name in _PUBLIC:
        if not hasattr(engine, name):
            raise ConfigError(f"engine.kind = '{plan.kind}' has no {name}; {_line(name)}")
    ready: Engine = engine
    return ready


def _line(name: str) -> str:
    """Return what an engine promises under this name, in one line."""
    promised = vars(Engine)[name]
    said = (inspect.getdoc(promised) or "").partition("\n")[0]
    if isinstance(promised, property):
        return f"an engine has {name}: int. {said}"
    return f"an engine has async def {name}{inspect.signature(promised)}. {said}"
