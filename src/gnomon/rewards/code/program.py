"""A program as it is run: an answer's text with what its benchmark puts before it.

Benchmarks import much before every program, so that ``List[int]`` needs no import of its own. Only those are imported
whose names a program reads and nowhere defines: all together they take longer than most programs. What a row's own
text defines (HumanEval's prompt, starter code) goes before a program that leaves it out.
"""

import ast
import functools
import importlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gnomon.rewards.base import Sample
from gnomon.rewards.code.cases import Cases
from gnomon.rewards.code.text import Piece, begun, blocks, free_names, inner_indent, last_program, parsed, up_to_flaw
from gnomon.rewards.code.values import NoAnswerError, read_value

# Calls that a program answers: what is added to it, and how its answers are read out here.
#
# The answers are plain values (numbers, texts, lists, sets, ...), written as JSON with the kind of each container.
# What is none of those comes back as `values.Opaque`, so an object cannot bring its own ``==``. The program can
# replace any of this, so what comes back is read as a stranger's.

Answers = Sequence[Any]

# The program believes it was imported, so that what it would do as a script is not done.
ENTERED = "import sys as _; _.modules['solution'] = _.modules['__main__']; __name__ = 'solution'; del _\n"
"""What goes before it."""

PLAIN = """
    def plain(value, depth=0):
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if value - value == 0 else {"number": repr(value)}
        if depth > 50:
            return {"opaque": kind.__name__}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            found = plain(value.tolist(), depth + 1)
            return found if value.shape == () else {"array": [found, str(value.dtype)]}
        if isinstance(value, dict):
            return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in dict.items(value)]}
        for name, kinds in kinds_of.items():
            if isinstance(value, kinds):
                return {name: [plain(item, depth + 1) for item in value]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {"bytes": list(value)}
        return {"opaque": kind.__name__}

    lazy = (types.GeneratorType, range, map, filter, zip, reversed, enumerate, collections.deque)
    kinds_of = {"tuple": tuple, "set": (set, frozenset), "list": (list, *lazy)}
"""
"""How the far side writes a value; ``collections`` and ``types`` are imported there."""

_AFTER = """
def _judge_SECRET():
    import json, os, sys
    import collections, types

PLAIN
    def say(word):
        text = ("\\nSECRET " + word + "\\n").encode()
        while text:
            text = text[os.write(1, text):]

    def answer(call):
        try:
            return plain(call())
        except BaseException as error:
            return {"raised": type(error).__name__}

    for call in calls_SECRET:
        said = json.dumps(answer(call))
        sys.stdout.flush()
        say(said)
    say("end")

calls_SECRET = [
CALLS]
_judge_SECRET()
"""


def harness(program: str, setup: str, calls: Sequence[str], secret: str) -> str:
    """Return a program that answers each of ``calls``, which are expressions.

    Args:
        setup: What the tests import.
        secret: Starts each line of answer; nobody can guess it before the run.
    """
    # A lambda for each call: one that raises must not keep the others from being made.
    lines = "".join(f"    lambda: ({call}),\n" for call in calls)
    after = _AFTER.replace("PLAIN", PLAIN).replace("SECRET", secret).replace("CALLS", lines)
    return f"{headed(program, ENTERED)}\n{setup}\n{after}"


def headed(program: str, head: str) -> str:
    """Return the program behind these lines, which come after what must come first: its imports from the future."""
    if not head:
        return program
    if "__future__" not in program or (tree := parsed(program)) is None:
        return head + program
    # `from __future__` must be the first statement of a file, so the head is put behind the last one.
    future = [n.end_lineno or 0 for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    lines = program.splitlines(keepends=True)
    first = max(future, default=0)
    return "".join((*lines[:first], "\n" if first else "", head, *lines[first:]))


def read_answers(stdout: str, secret: str, count: int) -> Answers | None:
    """Return the answers; None unless there are exactly ``count``, in whole, followed by the end."""
    # What the program prints by itself lies between the lines that carry the secret, and is passed over.
    words = [line[len(secret) + 1 :] for line in stdout.split("\n") if line.startswith(f"{secret} ")]
    # A program that ended early, or wrote a line of its own with a stolen secret, has answered nothing.
    if len(words) != count + 1 or words[-1] != "end":
        return None
    try:
        return [read_value(word) for word in words[:-1]]
    except NoAnswerError:
        return None


# The order counts: of two modules with one name, the later one's is meant, as it is where all are imported.
_STARS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
_MODULES = frozenset((*_STARS, "os", "time", "cmath", "decimal", "fractions", "queue", "array", "types", "numbers"))


def prelude(names: Iterable[str], only: tuple[str, ...] = _STARS) -> list[str]:
    """Return the imports that give these names; a name that no module has is left out.

    Source: LiveCodeBench, ``lcb_runner/evaluation/testing_util.py``, ``import_string``.

    Args:
        only: The modules whose names are given; modules themselves are, by their own names, when all are.

    >>> prelude(["List", "math", "gcd", "nobody"])
    ['from math import gcd', 'from typing import List', 'import math']
    """
    found: list[str] = []
    for name in sorted(set(names), key=lambda name: (name.lower(), name)):
        # The last module wins, as it does where a benchmark's prelude imports everything from each in turn.
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
    # The answer defines what is called, or it is a body that continues the row's own beginning.
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
        # As it is, and indented as the body of the last function: models write a continuation either way.
        for whole in (given.text + body, given.text.rstrip() + "\n" + inner):
            some = up_to_flaw(whole)
            tree = parsed(some)
            # More than the beginning alone must be left, or a completion
            # that is no Python at all would count as a program.
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
