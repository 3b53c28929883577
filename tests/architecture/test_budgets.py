"""Files, functions and signatures stay small enough to be read at once, and files large enough to hold an idea."""

import ast
import io
import tokenize

from tests.architecture.sources import MODULES, SOURCES, at_most, functions, none_of, parameters, parse, spot

FILE_LINES = 800
SMALL_FILE_LINES = 40
FUNCTION_CODE_LINES = 60
PARAMETERS = 6

# Files below 40 lines that have a reason to be files.
SMALL_FOR_A_REASON = {
    "gnomon.algorithms.algorithm": "a composition, checked: in a file with either half it would close a circle",
}
# Files below 40 lines as they were when the rule began. This number may only go down: a file of a few lines belongs
# to the file that uses it. `__init__.py` and `__main__.py` have their reason in their name, and so has a verb's module.
SMALL_FILES = 8

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a string constant; standing alone, that is a docstring."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code: no blanks, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and is_text(n.value)]
    for node in texts:
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def test_code_lines_count_neither_docstrings_nor_comments_nor_blanks():
    """Of six lines, a docstring, a comment and a blank one are no code: three remain."""
    source = 'def f():\n    """Say."""\n\n    # why\n    x = 1\n    return x\n'

    assert code_lines(source) == {1, 5, 6}


def test_files_keep_to_their_budget():
    """A file has at most 800 lines."""
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    over = [f"{spot(path)}: {n} lines" for path, n in lengths.items() if n > FILE_LINES]

    none_of(over, f"cut the file where its idea ends; at most {FILE_LINES} lines")


def test_no_file_is_too_small_to_be_one():
    """Files below 40 lines, which cost more imports than they hold ideas, do not become more."""
    named = {m: p for m, p in MODULES.items() if not p.stem.startswith("__") and not m.startswith("gnomon.cli.")}
    candidates = [p for m, p in named.items() if m not in SMALL_FOR_A_REASON]
    lengths = {path: len(path.read_text().splitlines()) for path in candidates}
    under = [f"{spot(path)}: {n} lines" for path, n in lengths.items() if n < SMALL_FILE_LINES]

    at_most(SMALL_FILES, under, "put what it holds into the file that uses it, or say in SMALL_FOR_A_REASON why not")


def test_functions_keep_to_their_budget():
    """A function has at most 60 lines of code; docstrings, comments and blank lines are free."""
    over = []
    for path in SOURCES:
        spans = {f: range(f.lineno, (f.end_lineno or f.lineno) + 1) for f in functions(parse(path))}
        long = {f: span for f, span in spans.items() if len(span) > FUNCTION_CODE_LINES}
        code = code_lines(path.read_text()) if long else set()
        for f, span in long.items():
            length = len(code.intersection(span))
            if length > FUNCTION_CODE_LINES:
                over.append(f"{spot(path, f.lineno)}: {f.name} has {length} lines of code")

    none_of(over, f"give its parts names; at most {FUNCTION_CODE_LINES} lines of code")


def test_signatures_keep_to_their_budget():
    """A function has at most 6 parameters; `self`, `cls`, `*args` and `**kwargs` are none."""
    over = [
        f"{spot(path, f.lineno)}: {f.name} has {count} parameters"
        for path in SOURCES
        for f in functions(parse(path))
        if (count := len([p for p in parameters(f) if p.arg not in ("self", "cls")])) > PARAMETERS
    ]

    none_of(over, f"pass what belongs together as one value; at most {PARAMETERS} parameters")
