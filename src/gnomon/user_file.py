"""A Python file of the user's, run as a module: the only place where a file that is named becomes code."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def run_as_module(path: Path, name: str) -> ModuleType:
    """Run the file under this module name and return the module; the name must be none that others import.

    path: ends in ``.py``. Raises: whatever the file raises, and then the name is free again.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
