"""A torchvision in name: vLLM imports it for models that also read images, and text goes through nothing of it.

Torchvision's own builds bring another torch. What stands here is found by every process of a test that has this folder
in PYTHONPATH, since Python imports sitecustomize before anything else.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock


class Nothing(ModuleType):
    """A module of which every name is there and does nothing."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> MagicMock:
        """Return something for any name that does not look like Python's own."""
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(MetaPathFinder, Loader):
    """Finds torchvision and everything in it."""

    def find_spec(self, fullname, path=None, target=None):
        """Return a module's spec if it is torchvision's."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        """Return the module that does nothing."""
        return Nothing(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


sys.meta_path.insert(0, Finder())
