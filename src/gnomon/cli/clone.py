"""What only a clone of the repository has: benchmarks and experiments, which no wheel holds."""

import sys
from pathlib import Path

import gnomon
from gnomon.core.errors import ConfigError


def enter_clone(verb: str, folder: str) -> None:
    """Let ``folder`` of the clone that this gnomon runs from be imported.

    Raises: ConfigError when gnomon does not run from a clone.
    """
    root = Path(gnomon.__file__).resolve().parents[2]
    if not (root / folder).is_dir():
        raise ConfigError(
            f"this needs a clone of the repository: {folder}/ is no part of the installed package; "
            "in a clone, type make setup and then .venv/bin/gnomon " + verb
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
