"""Libraries that only some verifiers and tasks need."""

import importlib
import importlib.util
from collections.abc import Collection
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


def check_extras(sinks: Collection[str], is_adapted: bool, rewards: Collection[str], is_generated: bool) -> None:
    """Refuse packages that are asked for and not installed, all in one message.

    Args:
        sinks: Trackers.
        is_adapted: Whether a LoRA adapter is trained.
        rewards: Kinds of rewards.
        is_generated: Whether reasoning-gym makes the questions.

    Raises:
        ConfigError: The message has one command that installs them.
    """
    needed: dict[str, str] = {name: f"records.sinks = {name}" for name in sinks}
    needed |= {"peft": "lora"} if is_adapted else {}
    needed |= {"math-verify": "the mathematics reward"} if "mathematics" in rewards else {}
    needed |= {"reasoning-gym": "the task"} if is_generated or "reasoning" in rewards else {}
    missing = [name for name in needed if not _is_installed(name.replace("-", "_"))]
    if len(missing) > 1:
        said = ", ".join(f"{name} ({needed[name]})" for name in missing)
        raise ConfigError(f"{len(missing)} packages are not installed: {said}; run: pip install {' '.join(missing)}")
    for name in missing:
        way = f", or leave {name} out (metrics.jsonl is always written)" if name in sinks else ""
        extra = _EXTRAS.get(name, name)
        raise ConfigError(f"{needed[name]} needs {name}, which is not installed; pip install 'gnomon[{extra}]'{way}")


_EXTRAS = {"peft": "lora", "math-verify": "math", "reasoning-gym": "tasks"}
"""The extra of a package that has another name; a tracker's has its own."""


def _is_installed(module: str) -> bool:
    found = importlib.util.find_spec(module)
    # A folder of that name in the working directory is found as a package without a file.
    return found is not None and found.origin is not None
