"""Libraries that only some verifiers and tasks need."""

import importlib
from typing import Any

from gnomon.core.errors import ConfigError


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
