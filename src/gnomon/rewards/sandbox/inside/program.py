"""Become the program: its source as the module `__main__`, in an interpreter that is already walled in."""

import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import SourceFileLoader  # importlib.machinery, without its 5 ms
from types import CodeType, FunctionType, ModuleType

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


class AllowedPackages:
    """Finds the packages that programs may import, by their places: the folder that they lie in cannot be read."""

    def __init__(self, paths: list[str]) -> None:
        self._places = {os.path.basename(path).removesuffix(".py"): path for path in paths}

    @property
    def names(self) -> list[str]:
        """What can be imported by its name; folders of libraries cannot."""
        return [name for name in self._places if name.isidentifier()]

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return where a package of the list is; what is below it, Python's own finder knows."""
        place = self._places.get(name)
        if place is None or path is not None:
            return None
        is_file = place.endswith(".py")
        origin = place if is_file else place + "/__init__.py"
        spec = ModuleSpec(name, SourceFileLoader(name, origin), origin=origin, is_package=not is_file)
        if not is_file:
            spec.submodule_search_locations = [place]
        spec.has_location = True
        return spec


def become(source: bytes) -> int:
    """Run the program to its end and return its exit status.

    Raises:
        SystemExit: As the program does.
    """
    module = ModuleType("__main__")
    module.__file__ = NAME
    module.__loader__ = loader = _Program(source)
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    # Replacing `open` costs an import and shows in tracebacks, so it is done only for programs that name such a path.
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


LONGEST_VALUE = 4000
"""Characters of a last expression's value that are shown."""


EXIT = os._exit
"""What ends a process whatever its program made of `os`."""


def serve() -> int:
    """Run one code after the other in one module, as they come, until there is no more to come.

    Each comes with a number of its own, which is given back when it was run: no other code can know it before.
    """
    asked, null = os.dup(0), os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    calls = 0
    while head := _exactly(asked, 8):
        # Length, number and text, in this order: as `Interpreter.run` sends them.
        number, source = _exactly(asked, 16), _exactly(asked, int.from_bytes(head, "little"))
        if source is None or number is None:
            break
        calls += 1
        _run_call(source, vars(module), f"call {calls}")
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the code closed or replaced it
                continue
        os.write(asked, number)
    return 0


def _exactly(end: int, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        some = os.read(end, size - len(found))
        if not some:
            return None
        found += some
    return found


def _run_call(source: bytes, space: dict[str, object], name: str) -> None:
    """Run a code and show the value of its last expression, if it ends in one that has a value."""
    import ast

    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # A call of a function and not exec(): the frames of this module do not show in the code's tracebacks.
        FunctionType(compile(tree, name, "exec"), space)()
        if isinstance(last, ast.Expr):
            value = FunctionType(compile(ast.Expression(last.value), name, "eval"), space)()
            if value is not None:
                text = repr(value)
                more = len(text) - LONGEST_VALUE
                print(text if more <= 0 else f"{text[:LONGEST_VALUE]}... ({more} characters more)")
    except SystemExit:
        raise
    except BaseException as error:
        _show(error, source, name)


def streams() -> "list[object]":
    """Return standard input, output and error anew, over descriptors that were exchanged below them."""
    return [open(number, "w" if number else "r", encoding="utf-8", closefd=False, buffering=1 if number == 2 else -1,
                 errors="backslashreplace" if number == 2 else "strict") for number in range(3)]  # fmt: skip


def reseed(seed: str) -> None:
    """Begin the draws of a forked process anew: from a seed, or from the system where it is ""."""
    import random

    random.seed(int(seed) if seed else None)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(int(seed) % 2**32 if seed else None)


def leave(code: object) -> None:
    """End a forked process as Python ends one: threads, what was registered for the end, streams, and the status."""
    import atexit
    import threading

    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        space = vars(sys.modules["__main__"])
        for name in [name for name, value in space.items() if not isinstance(value, ModuleType | type)]:
            del space[name]  # and so finalizers run, while what they use is there
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        EXIT(code & 0xFF if isinstance(code, int) else int(code is not None))


def _show(error: BaseException, source: bytes, name: str = NAME) -> None:
    """Write the traceback as Python would: from the program's own first line on."""
    import linecache
    import traceback

    text = source.decode(errors="replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    trace = error.__traceback__
    # Frames above the program's first line are this package's, and would show how it is run.
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
