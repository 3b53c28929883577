"""Calls that a program answers: what is added to it, and how its answers are read out here.

The answers are plain values (numbers, texts, lists, sets, ...), written as JSON with the kind of each container.
What is none of those comes back as `code_values.Opaque`, so an object cannot bring its own ``==``. The program can
replace any of this, so what comes back is read as a stranger's.
"""

import ast
from collections.abc import Sequence
from typing import Any

from gnomon.verifiers.code_text import parsed
from gnomon.verifiers.code_values import NoAnswerError, read_value

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

    setup: what the tests import. secret: starts each line of answer; nobody can guess it before the run.
    """
    lines = "".join(f"    lambda: ({call}),\n" for call in calls)
    after = _AFTER.replace("PLAIN", PLAIN).replace("SECRET", secret).replace("CALLS", lines)
    return f"{headed(program, ENTERED)}\n{setup}\n{after}"


def headed(program: str, head: str) -> str:
    """Return the program behind these lines, which come after what must come first: its imports from the future."""
    if not head:
        return program
    if "__future__" not in program or (tree := parsed(program)) is None:
        return head + program
    future = [n.end_lineno or 0 for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    lines = program.splitlines(keepends=True)
    first = max(future, default=0)
    return "".join((*lines[:first], "\n" if first else "", head, *lines[first:]))


def read_answers(stdout: str, secret: str, count: int) -> Answers | None:
    """Return the answers; None unless there are exactly ``count``, in whole, followed by the end."""
    words = [line[len(secret) + 1 :] for line in stdout.split("\n") if line.startswith(f"{secret} ")]
    if len(words) != count + 1 or words[-1] != "end":
        return None
    try:
        return [read_value(word) for word in words[:-1]]
    except NoAnswerError:
        return None
