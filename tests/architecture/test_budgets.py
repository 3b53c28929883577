"""Files, functions and signatures stay small enough to be read at once."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "gnomon").rglob("*.py"))

FILE_LINES = 800
FUNCTION_CODE_LINES = 60
PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield every function and method, nested ones too."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


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


def parameters(function: Function) -> int:
    """Count what a caller can name; `self`, `cls`, `*args` and `**kwargs` are none."""
    a = function.args
    named = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def test_code_lines_count_neither_docstrings_nor_comments_nor_blanks():
    """Of six lines, a docstring, a comment and a blank one are no code: three remain."""
    source = 'def f():\n    """Say."""\n\n    # why\n    x = 1\n    return x\n'

    assert code_lines(source) == {1, 5, 6}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_keep_to_their_budget(path: Path):
    """A file has at most 800 lines, a function 60 lines of code and 6 parameters."""
    source = path.read_text()
    code = code_lines(source)
    over = [f"{path.name}: {n} lines"] if (n := len(source.splitlines())) > FILE_LINES else []
    for f in functions(ast.parse(source)):
        length = len(code.intersection(range(f.lineno, (f.end_lineno or f.lineno) + 1)))
        if length > FUNCTION_CODE_LINES:
            over.append(f"{path.name}:{f.lineno} {f.name}: {length} code lines")
        if (count := parameters(f)) > PARAMETERS:
            over.append(f"{path.name}:{f.lineno} {f.name}: {count} parameters")

    assert over == []
