"""Become the program: its source as the module `__main__`, in an interpreter that is already walled in."""

import sys
from _frozen_importlib_external import SourceFileLoader  # importlib.machinery, without its 5 ms
from types import CodeType, ModuleType

NAME = "main.py"
_INPUT = ("/dev/stdin", "/proc/self/fd/0", "/dev/fd/0")


class _Program(SourceFileLoader):
    """Loads a module from text, so that the program needs no file."""

    def __init__(self, source: bytes) -> None:
        super().__init__("__main__", NAME)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile it, from memory."""
        return self.source_to_code(self._source, NAME)


def become(source: bytes) -> int:
    """Run the program to its end and return its exit status. Raises: SystemExit as the program does."""
    module = ModuleType("__main__")
    module.__file__ = NAME
    module.__loader__ = loader = _Program(source)
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    if any(name.encode() in source for name in _INPUT):
        _give_input()
    try:
        loader.exec_module(module)
    except SystemExit:
        raise
    except BaseException as error:
        _show(error, source)
        return 1
    return 0


def _give_input() -> None:
    """Let a program open its input by a path, of which there is none behind walls."""
    import builtins
    import io
    import os

    own = io.open

    def open(file, *words, **named):  # type: ignore[no-untyped-def]
        return own(os.dup(0) if str(file) in _INPUT else file, *words, **named)

    builtins.open = io.open = open


def _show(error: BaseException, source: bytes) -> None:
    """Write the traceback as Python would: from the program's own first line on."""
    import linecache
    import traceback

    text = source.decode(errors="replace")
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
