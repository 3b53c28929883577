"""Asserts, judged out here: the program answers the calls, this file evaluates the rest.

``assert round(area(2), 2) == 12.57`` sends ``area(2)`` into the sandbox, and nothing else: rounding, comparing and
the 12.57 stay. The rest may hold literals, operators, comparisons, and the functions in `KNOWN`; what holds more
cannot be judged and is an error of the dataset.
"""

import ast
import builtins
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnomon.rewards.base import VerifierError
from gnomon.rewards.code.text import flaw_of, parsed
from gnomon.rewards.code.values import BINARY, KNOWN, Opaque, formatted, near

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
    """One assert.

    Attributes:
        calls: Expressions that the program answers.
        rest: The claim, with numbered answers in the place of the calls.
        names: Names of what is called.
    """

    calls: tuple[str, ...]
    rest: ast.expr
    names: frozenset[str] = frozenset()

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the claim holds for the answers; not where one was an exception or cannot be compared."""
        # An exception must not reach the claim: `not f(1)` or `f(1) is None` could hold for it.
        if any(isinstance(answer, Opaque) and answer.is_raised for answer in answers):
            return False
        try:
            return bool(_Rest(answers, tolerance).value(self.rest))
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return False


@dataclass(frozen=True)
class AssertedCall:
    """Whom tests ask.

    Attributes:
        entry: What ``candidate`` stands for.
        own: Functions of the program with names of Python's.
    """

    entry: str | None = None
    own: frozenset[str] = frozenset()

    def calls_program(self, function: ast.expr, imported: Collection[str] = ()) -> bool:
        """Whether a function, named in a claim, is the program's: no name of Python's, nor one that tests import.

        A method is when it is of the program's own name, or of an object that the claim makes of a class there.
        """
        # A method belongs to the program when its object does:
        # `Solution().add(1)` and `stack.push(1)`, but not `math.sqrt(2)`.
        if isinstance(function, ast.Attribute):
            inner = function.value
            is_module = isinstance(inner, ast.Name) and inner.id in sys.stdlib_module_names and inner.id not in self.own
            made = inner.func if isinstance(inner, ast.Call) and is_class(inner.func) else inner
            return not is_module and self.calls_program(made, imported)
        if not isinstance(function, ast.Name) or function.id in imported:
            return False
        return function.id in self.own or (function.id not in KNOWN and not hasattr(builtins, function.id))


def read_asserts(text: str, asked: AssertedCall | None = None) -> tuple[tuple[AssertCase, ...], str]:
    """Return the asserts of a test, and the imports before them.

    Raises:
        VerifierError: If the text is no Python, or holds more than imports and asserts.
    """
    tree = parsed(text)
    if tree is None:
        raise VerifierError(f"the tests are no Python: {flaw_of(text)}")
    asked = named_by(tree, asked or AssertedCall())
    body = list(tree.body)
    imports: list[ast.stmt] = []
    cases: list[AssertCase] = []
    # The body of `check` is spliced in where the function stands, so its asserts become cases as if written outside.
    while body:
        statement = body.pop(0)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(statement)
        elif isinstance(statement, ast.Assert) and not _is_true(statement.test):
            cases.append(_case(statement.test, asked, [a for i in imports for a in _aliases(i)]))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "check":
            body = [*statement.body, *body]
        elif not _says_nothing(statement):
            raise VerifierError(f"a test that is no assert cannot be judged outside: {ast.unparse(statement)[:100]!r}")
    return tuple(cases), "\n".join(map(ast.unparse, imports))


def named_by(tree: ast.Module, asked: AssertedCall) -> AssertedCall:
    """Return whom the tests ask, also where only their own text tells.

    A call ``check(add)`` names the candidate. Where no claim calls a function that is not Python's, a program is asked
    to define one by a name of Python's: MBPP's ``assert sum(10, 15) == 6``.
    """
    if asked.entry is None:
        checked = [s.value for s in tree.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        given = [c.args[0] for c in checked if isinstance(c.func, ast.Name) and c.func.id == "check" and c.args]
        asked = replace(asked, entry=ast.unparse(given[0]) if given else None)
    # If no claim calls anything but Python's own functions, the outermost call of each claim is the program's.
    claims = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    calls = [[node for node in ast.walk(claim) if isinstance(node, ast.Call)] for claim in claims]
    if asked.own or any(asked.calls_program(call.func) for found in calls for call in found):
        return asked
    first = {found[0].func.id for found in calls if found and isinstance(found[0].func, ast.Name)}
    return replace(asked, own=frozenset(first))


def is_class(function: ast.expr) -> bool:
    """Whether what is called is a class, by its spelling: its call makes an argument and is no answer."""
    return isinstance(function, ast.Name) and function.id[:1].isupper()


def _aliases(statement: ast.stmt) -> list[str]:
    named = statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else []
    return [(alias.asname or alias.name).partition(".")[0] for alias in named]


def _is_true(claim: ast.expr) -> bool:
    return isinstance(claim, ast.Constant) and bool(claim.value)


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        call = statement.value
        return isinstance(call, ast.Constant | ast.Name) or (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
        )
    is_metadata = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "METADATA"
    return is_metadata or isinstance(statement, ast.Pass | ast.Assert)


def _case(test: ast.expr, asked: AssertedCall, imported: Collection[str]) -> AssertCase:
    _check_readable(test)
    cut = _Cut(asked, imported)
    rest = cut.visit(test)
    if not cut.calls:
        raise VerifierError(f"an assert that calls nothing: {ast.unparse(test)[:100]!r}")
    _Rest([None] * len(cut.calls), 0.0).check(rest)
    return AssertCase(tuple(cut.calls), rest, frozenset(cut.names))


_UNREADABLE = ("Decimal", "Fraction", "date", "datetime", "time", "timedelta", "UUID", "Path")
"""Classes of Python's library whose values do not come out of the sandbox: a comparison with one would never hold."""


def _check_readable(test: ast.expr) -> None:
    """Refuse a claim that compares with a value that no answer can be.

    Raises:
        VerifierError: If it is one.
    """
    for node in ast.walk(test):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for side in sides:
            name = getattr(side.func, "attr", getattr(side.func, "id", "")) if isinstance(side, ast.Call) else ""
            # Such a row would give 0 to every answer, right ones included.
            if name in _UNREADABLE:
                raise VerifierError(
                    f"no {name} leaves the sandbox, so an answer cannot be compared with one: "
                    f"{ast.unparse(test)[:100]!r}; let the question ask for a number or a text, or remove the row"
                )


class _Cut(ast.NodeTransformer):
    """Takes the program's calls out of a claim and leaves numbers in their place.

    Whatever else is called stays outside, so that a program decides nothing but its own answers.
    """

    def __init__(self, asked: AssertedCall, imported: Collection[str]) -> None:
        self.calls: list[str] = []
        self.names: set[str] = set()
        self._asked = asked
        self._imported = imported

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Take out a call of the program, and look inside any other.

        Raises:
            VerifierError: For a call of the program about another of its answers.
        """
        if not self._asked.calls_program(node.func, self._imported):
            return self.generic_visit(node)
        # `equal(f(1), 2)` with an `equal` of the program's would let the program decide whether it is right.
        given = [part for word in (*node.args, *node.keywords) for part in ast.walk(word)]
        if any(isinstance(part, ast.Call) and self._is_answer(part) for part in given):
            raise VerifierError(f"an answer of the program is judged by the program: {ast.unparse(node)[:100]!r}")
        for name in ast.walk(node):
            # HumanEval's tests call the function `candidate`, whatever its name is in the program.
            if isinstance(name, ast.Name) and name.id == "candidate" and self._asked.entry:
                name.id = self._asked.entry
        text = ast.unparse(node)
        self.calls.append(text)
        function = ast.parse(text, mode="eval").body
        assert isinstance(function, ast.Call), "what was unparsed is a call"
        self.names |= {part.id for part in ast.walk(function.func) if isinstance(part, ast.Name)}
        # The kind of a constant tells an answer's place from a text that a test happens to hold.
        return ast.copy_location(ast.Constant(f"{_ANSWER}{len(self.calls) - 1}", kind=_ANSWER), node)

    def _is_answer(self, call: ast.Call) -> bool:
        return not is_class(call.func) and self._asked.calls_program(call.func, self._imported)


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
        """Refuse a claim that holds something that `value` does not know.

        Raises:
            VerifierError: If it does.
        """
        # Checked once when the cases are read, so that `value` meets nothing unknown while samples are graded.
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
        """Return the value.

        Raises:
            TypeError, ValueError, ArithmeticError, LookupError: As Python would.
        """
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
                # All parts are evaluated, unlike in Python: the answers are
                # here already, and nothing has a side effect.
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
                function = _known(node.func)
                assert function is not None, "check comes first"
                words = {word.arg: self.value(word.value) for word in node.keywords if word.arg is not None}
                return function(*map(self.value, node.args), **words)
        raise ValueError(f"a claim holds {type(node).__name__}")

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        # Only a format that the test itself holds is applied: one that
        # the program chose could ask for a width of gigabytes.
        is_form = isinstance(node.left, ast.Constant) and node.left.kind != _ANSWER and isinstance(left, str)
        if is_form and isinstance(node.op, ast.Mod):
            return formatted(left, right)
        return BINARY[type(node.op)](left, right)

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
        # The tolerance is for floats on the left, where the answer
        # stands in almost every test; integers must be equal exactly.
        if isinstance(left, float) and isinstance(right, int | float):
            return near(left, right, self._tolerance)
        return bool(left == right)
