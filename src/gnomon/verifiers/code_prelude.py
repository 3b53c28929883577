"""A program as it is run: an answer's text with what its benchmark puts before it.

Benchmarks import much before every program, so that ``List[int]`` needs no import of its own. Only those are imported
whose names a program reads and nowhere defines: all together they take longer than most programs. What a row's own
text defines (HumanEval's prompt, starter code) goes before a program that leaves it out.
"""

import ast
import functools
import importlib
import textwrap
from collections.abc import Iterable, Iterator

from gnomon.verifiers.base import Sample
from gnomon.verifiers.code_calls import headed
from gnomon.verifiers.code_cases import Cases
from gnomon.verifiers.code_fences import blocks
from gnomon.verifiers.code_text import Piece, begun, free_names, inner_indent, last_program, parsed, up_to_flaw

# The order counts: of two modules with one name, the later one's is meant, as it is where all are imported.
_STARS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
_MODULES = frozenset((*_STARS, "os", "time", "cmath", "decimal", "fractions", "queue", "array", "types", "numbers"))


def prelude(names: Iterable[str], only: tuple[str, ...] = _STARS) -> list[str]:
    """Return the imports that give these names; a name that no module has is left out.

    only: the modules whose names are given; modules themselves are, by their own names, when all are.
    Source: LiveCodeBench, ``lcb_runner/evaluation/testing_util.py``, ``import_string``.

    >>> prelude(["List", "math", "gcd", "nobody"])
    ['from math import gcd', 'from typing import List', 'import math']
    """
    found: list[str] = []
    for name in sorted(set(names), key=lambda name: (name.lower(), name)):
        home = next((module for module in reversed(only) if name in _exported(module)), None)
        if only is _STARS and name in _MODULES:
            found.append(f"import {name}")
        elif home is not None:
            found.append(f"from {home} import {name}")
    return found


@functools.cache
def _exported(module: str) -> frozenset[str]:
    loaded = importlib.import_module(module)
    return frozenset(getattr(loaded, "__all__", None) or [name for name in vars(loaded) if name[0] != "_"])


def program_of(sample: Sample, cases: Cases) -> str | None:
    """Return the program of an answer as it is run; None where there is none.

    An answer that only goes on with the text that the row begins (HumanEval's form) is put behind it.
    """
    given = begun(sample.columns, sample.prompt)
    text = last_program(sample.completion, cases.names, bool(cases.stdin))
    if given is not None and cases.names and not (text and cases.names <= Piece(text, parsed(text)).defines):
        text = next(_continued(given, sample.completion, cases.names), text)
    if text is None:
        return None
    piece = Piece(text, parsed(text))
    before = [] if given is None else _left_out(given, piece, cases)
    read = piece.needs - {name for part in before for name in Piece(part, parsed(part)).defines}
    before += prelude(read, ("typing",)) if cases.claims else prelude(read)
    return headed(text, "".join(line + "\n" for line in before))


def _continued(given: Piece, completion: str, names: frozenset[str]) -> Iterator[str]:
    """Yield the text that a row begins with the completion behind it, where that is Python and defines the names."""
    fenced = [block.body for block in blocks(completion) if block.is_python]
    for body in (*reversed(fenced), completion):
        inner = textwrap.indent(textwrap.dedent(body.strip("\n")), " " * inner_indent(given.text))
        for whole in (given.text + body, given.text.rstrip() + "\n" + inner):
            some = up_to_flaw(whole)
            tree = parsed(some)
            if len(some) > len(given.text.rstrip()) + 4 and names <= Piece(some, tree).defines:
                yield some


def _left_out(given: Piece, piece: Piece, cases: Cases) -> list[str]:
    """Return the imports of the row's own text, and those of its functions that program or cases need."""
    found: list[str] = []
    needed = piece.needs | cases.names
    for statement in given.tree.body if given.tree else ():
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if is_import and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            found.append(ast.unparse(statement))
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name in needed - piece.defines:
            found.append(ast.unparse(statement))
            needed |= free_names(statement)
    return found
