"""Asserts, judged out here: the program answers the calls, this evaluates the rest.

``assert round(area(2), 2) == 12.57`` sends ``area(2)`` into the sandbox, and nothing else: rounding, comparing and
the 12.57 stay. The rest may hold literals, operators, comparisons, and the functions in `KNOWN`; what holds more
cannot be judged and is an error of the dataset.
"""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.verifiers.base import VerifierError
from gnomon.verifiers.code_compare import near
from gnomon.verifiers.code_operators import BINARY, KNOWN, formatted
from gnomon.verifiers.code_values import Opaque

_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_ANSWER = "answer "


@dataclass(frozen=True)
class AssertCase:
    """One assert. calls: what the program answers. rest: the claim, as text, with numbered answers in their place."""

    calls: tuple[str, ...]
    rest: ast.expr

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the claim holds for the answers; not where one was an exception or cannot be compared."""
        if any(isinstance(answer, Opaque) and answer.is_raised for answer in answers):
            return False
        try:
            return bool(_Rest(answers, tolerance).value(self.rest))
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return False


def read_asserts(text: str, entry: Any) -> tuple[tuple[AssertCase, ...], str]:
    """Return the asserts of a test, and the imports before them. entry: what ``candidate`` stands for.

    Raises: VerifierError when the text is no Python, or holds more than imports and asserts.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"the tests are no Python: {error}") from error
    imports: list[ast.stmt] = []
    cases: list[AssertCase] = []
    while body:
        statement = body.pop(0)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(statement)
        elif isinstance(statement, ast.Assert):
            cases.append(_case(statement.test, entry))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "check":
            body = [*statement.body, *body]
        elif not _says_nothing(statement):
            raise VerifierError(f"a test that is no assert cannot be judged outside: {ast.unparse(statement)[:100]!r}")
    return tuple(cases), "\n".join(map(ast.unparse, imports))


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        call = statement.value
        return isinstance(call, ast.Constant) or (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
        )
    is_metadata = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "METADATA"
    return is_metadata or isinstance(statement, ast.Pass)


def _case(test: ast.expr, entry: Any) -> AssertCase:
    cut = _Cut(entry)
    rest = cut.visit(test)
    if not cut.calls:
        raise VerifierError(f"an assert that calls nothing: {ast.unparse(test)[:100]!r}")
    _Rest([None] * len(cut.calls), 0.0).check(rest)
    return AssertCase(tuple(cut.calls), rest)


class _Cut(ast.NodeTransformer):
    """Takes the program's calls out of a claim and leaves numbers in their place."""

    def __init__(self, entry: Any) -> None:
        self.calls: list[str] = []
        self._entry = entry

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Keep a known function and look inside; take out any other call."""
        if _known(node.func) is not None:
            return self.generic_visit(node)
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id == "candidate" and isinstance(self._entry, str):
                name.id = self._entry
        self.calls.append(ast.unparse(node))
        return ast.copy_location(ast.Constant(f"{_ANSWER}{len(self.calls) - 1}", kind=_ANSWER), node)


def _known(function: ast.expr) -> Callable[..., Any] | None:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "math":
        return KNOWN.get(function.attr) if function.attr in ("isclose", "sqrt") else None
    return KNOWN.get(function.id) if isinstance(function, ast.Name) else None


class _Rest:
    """Evaluates what is left of a claim, by cases: no name, attribute or function but the known ones."""

    def __init__(self, answers: Sequence[Any], tolerance: float) -> None:
        self._answers = answers
        self._tolerance = tolerance

    def check(self, node: ast.AST) -> None:
        """Raises: VerifierError when the claim holds something that `value` does not know."""
        allowed = (
            ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare,
            ast.Subscript, ast.Slice, ast.boolop, ast.expr_context, *BINARY, *_UNARY, *_COMPARED, ast.Eq, ast.NotEq,
        )  # fmt: skip
        if isinstance(node, ast.Call) and _known(node.func) is not None:
            inner: list[ast.AST] = [*node.args, *(word.value for word in node.keywords)]
        elif isinstance(node, allowed):
            inner = list(ast.iter_child_nodes(node))
        else:
            raise VerifierError(f"a claim that cannot be judged outside the sandbox: {ast.unparse(node)[:100]!r}")
        for part in inner:
            self.check(part)

    def value(self, node: ast.expr) -> Any:
        """Return the value. Raises: TypeError, ValueError, ArithmeticError, LookupError as Python would."""
        match node:
            case ast.Constant(value=str(text), kind=kind) if kind == _ANSWER:
                return self._answers[int(text.removeprefix(_ANSWER))]
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                made = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                return made(map(self.value, node.elts))
            case ast.Dict():
                keys = (self.value(key) for key in node.keys if key is not None)
                return dict(zip(keys, map(self.value, node.values), strict=True))
            case ast.BoolOp():
                settles = isinstance(node.op, ast.Or)
                values = [self.value(part) for part in node.values]
                return next((v for v in values[:-1] if bool(v) is settles), values[-1])
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self.value(node.operand))
            case ast.Compare():
                return self._compare(node)
            case ast.Subscript():
                return self.value(node.value)[self.value(node.slice)]
            case ast.Slice():
                ends = (node.lower, node.upper, node.step)
                return slice(*(None if end is None else self.value(end) for end in ends))
            case ast.Call():
                return self._call(node)
        raise ValueError(f"a claim holds {type(node).__name__}")

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        is_form = isinstance(node.left, ast.Constant) and node.left.kind != _ANSWER and isinstance(left, str)
        if is_form and isinstance(node.op, ast.Mod):
            return formatted(left, right)
        return BINARY[type(node.op)](left, right)

    def _call(self, node: ast.Call) -> Any:
        function = _known(node.func)
        if function is None:
            raise ValueError("a claim holds an unknown function")
        words = {word.arg: self.value(word.value) for word in node.keywords if word.arg is not None}
        return function(*map(self.value, node.args), **words)

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            if isinstance(kind, ast.Eq | ast.NotEq):
                holds = self._equal(left, right) is isinstance(kind, ast.Eq)
            else:
                holds = bool(_COMPARED[type(kind)](left, right))
            if not holds:
                return False
            left = right
        return True

    def _equal(self, left: Any, right: Any) -> bool:
        if isinstance(left, float) and isinstance(right, int | float):
            return near(left, right, self._tolerance)
        return bool(left == right)
