"""Access to benchmarks and experiments, which only a clone of the repository contains."""

import sys
from pathlib import Path

import gnomon
from gnomon.core.errors import ConfigError


def enter_clone(verb: str, folder: str) -> Path:
    """Make ``folder`` of the clone importable; return where it lies.

    Raises:
        ConfigError: If gnomon does not run from a clone.
    """
    # src/gnomon/__init__.py: two folders up is the clone.
    root = Path(gnomon.__file__).resolve().parents[2]
    if not (root / folder).is_dir():
        raise ConfigError(
            f"this needs a clone of the repository: {folder}/ is no part of the installed package; "
            "in a clone, type make setup and then .venv/bin/gnomon " + verb
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return root / folder
