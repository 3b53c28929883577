"""The files of the package as the architecture tests read them, and how such a test lists what it found.

Modules and rooms are named as in an import ("gnomon.learner.mesh"), so that whatever moves a module finds them.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gnomon"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One module of gnomon that a file imports: which, on which line, and whether only when a function is called."""

    module: str
    line: int
    late: bool


def listed(offenders: Sequence[str], todo: str) -> str:
    """Return a message with every offender on a line of its own, then what to do about them."""
    return "\n  ".join([f"{len(offenders)} found:", *offenders]) + f"\nTo do: {todo}"


def none_of(offenders: Sequence[str], todo: str) -> None:
    """Fail with all offenders, if there are any."""
    __tracebackhide__ = True
    assert not offenders, listed(offenders, todo)


def at_most(limit: int, offenders: Sequence[str], todo: str) -> None:
    """Fail with all offenders, if they are more than today's number. `pytest -rP` shows what could be lowered."""
    __tracebackhide__ = True
    print(f"{len(offenders)} found, at most {limit} allowed")
    message = f"at most {limit} are allowed, a number that may only go down; {listed(offenders, todo)}"
    assert len(offenders) <= limit, message


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, read once for all tests."""
    return ast.parse(path.read_text(), filename=str(path))


def spot(path: Path, line: int = 1) -> str:
    """Return "src/gnomon/room/name.py:12"."""
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def module_of(path: Path) -> str:
    """Return the dotted name by which a file of the package is imported."""
    return ".".join(("gnomon", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def is_within(module: str, place: str) -> bool:
    """Whether a module is ``place`` or lies below it."""
    return module == place or module.startswith(f"{place}.")


def dotted(node: ast.expr) -> str:
    """Return "a.b.c" for such an expression, and "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def imported(tree: ast.Module) -> set[str]:
    """Return the top-level packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method, nested ones too."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: Function) -> list[ast.arg]:
    """Return what a caller can pass, `self` and `cls` too; without `*args` and `**kwargs`."""
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def words(name: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, lowered."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def imports(tree: ast.AST, modules: set[str], late: bool = False) -> Iterator[Import]:
    """Yield what a tree imports from ``modules``; `from a import b` is the module a.b if there is one, and else a.

    `import_module("gnomon.a")` at the top of a file counts; within a function it is a name, which anybody may have.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            known = {
                next((m for m in (f"{node.module}.{a.name}", node.module) if m in modules), "") for a in node.names
            }
            yield from (Import(m, node.lineno, late) for m in sorted(known) if m)
        elif isinstance(node, ast.Import):
            yield from (Import(a.name, node.lineno, late) for a in node.names if a.name in modules)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and not late:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (Import(m, node.lineno, late) for m in texts if m in modules)
        yield from imports(node, modules, late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


@cache
def graph() -> dict[str, list[Import]]:
    """Return what each module of the package imports from the others."""
    return {
        module: [found for found in imports(parse(path), set(MODULES)) if found.module != module]
        for module, path in MODULES.items()
    }
