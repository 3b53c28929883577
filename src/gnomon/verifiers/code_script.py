"""Tests with more than plain claims: loops, helpers, variables, expected errors. They run apart from the program.

The tests are one program, the answer is another, each behind walls of its own. The names that the tests do not define
stand for the answer's functions and classes: a call goes over as its arguments and comes back as a plain value, and
what is claimed about it is computed where the answer cannot reach. See `code_apart` for the two sides.
"""

import ast
import sys
from dataclasses import dataclass

from gnomon.verifiers.base import VerifierError
from gnomon.verifiers.code_asserts import Asked, named_by
from gnomon.verifiers.code_text import Piece, flaw_of, free_names, parsed

# Modules by whose names tests mean the program itself.
OWN = frozenset({"solution", "main", "candidate_module"})
# What looks at the program's process from within it, so that it cannot stand elsewhere.
_WITHIN = {
    "redirect_stdout": "reads what the program prints", "redirect_stderr": "reads what the program prints",
    "StringIO": "reads what the program prints", "capsys": "reads what the program prints",
    "patch": "replaces parts of the program", "MagicMock": "replaces parts of the program",
    "monkeypatch": "replaces parts of the program", "globals": "looks into the program",
    "getsource": "looks into the program", "signature": "looks into the program",
    "exec": "runs text", "eval": "runs text", "exit": "ends the tests", "_exit": "ends the tests",
    "TestCase": "needs a runner of its own",
}  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Script:
    """Tests as a program. source: its text. names: those that stand for the answer's functions and classes.

    entry: the expression that ``candidate`` stands for; "None" where nothing is called so.
    """

    source: str
    names: frozenset[str]
    entry: str


def read_script(text: str, setup: str, asked: Asked, given: Piece | None) -> Script:
    """Return tests as a program of their own.

    setup: what runs before them. given: the text that the row begins; its helpers belong to the tests.
    Raises: VerifierError when they claim nothing about a program, or cannot stand apart from it.
    """
    tree = parsed(f"{setup}\n{text}")
    if tree is None:
        raise VerifierError(f"the tests are no Python: {flaw_of(text) or flaw_of(setup)}")
    asked = named_by(tree, asked)
    tree = _without_own(tree)
    tree.body = [*_lent(given, tree, asked), *tree.body]
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    free = free_names(tree)
    has_check = any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in tree.body)
    if (has_check or "candidate" in free) and asked.entry is None:
        raise VerifierError("the tests call candidate: a column entry_point should name the program's function")
    entry = {node.id for node in ast.walk(ast.parse(asked.entry or "None")) if isinstance(node, ast.Name)}
    names = (free - {"candidate"}) | (asked.own & loaded) | entry
    _refuse(tree, names)
    if not names or not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise VerifierError("the tests claim nothing: there is no assert that calls a function of the program")
    last = "\ncheck(candidate)" if has_check else ""
    tests = (s.name for s in tree.body if isinstance(s, ast.FunctionDef) and s.name.startswith("test_"))
    last += "".join(f"\n{name}()" for name in tests)
    return Script(ast.unparse(ast.fix_missing_locations(_Tolerant().visit(tree))) + last, names, asked.entry or "None")


def _lent(given: Piece | None, tree: ast.Module, asked: Asked) -> list[ast.stmt]:
    """Return the imports of the row's own text, and what tests need that it defines, but for the function asked for."""
    if given is None or given.tree is None:
        return []
    found: list[ast.stmt] = []
    needed = set(free_names(tree))
    for statement in reversed(given.tree.body):
        is_needed = isinstance(statement, _SCOPES) and statement.name in needed and statement.name != asked.entry
        if is_needed or isinstance(statement, ast.Import | ast.ImportFrom):
            found.insert(0, statement)
            needed |= free_names(statement)
    return found


def _without_own(tree: ast.Module) -> ast.Module:
    """Return the tests without imports of the program's own module, and without the call of check that ends them."""
    kept: list[ast.stmt] = []
    for statement in tree.body:
        is_own = isinstance(statement, ast.ImportFrom) and statement.module in OWN
        if not is_own and not is_check(statement):
            kept.append(statement)
    return ast.Module(kept, [])


def is_check(statement: ast.stmt) -> bool:
    """Whether a statement calls ``check`` of one argument."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_named = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    return is_named and isinstance(call, ast.Call) and len(call.args) == 1


def _refuse(tree: ast.Module, names: frozenset[str]) -> None:
    """Raises: VerifierError for what cannot be computed where the program is not."""
    answered = _answered(tree, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in named:
                if module.partition(".")[0] not in sys.stdlib_module_names:
                    raise VerifierError(
                        f"the tests import {module}, which is not in the sandbox; use the standard library"
                    )
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if word in _WITHIN:
            raise VerifierError(f"the tests use {word}, which {_WITHIN[word]}: that cannot be judged from outside")
        if isinstance(node, ast.ExceptHandler) and node.type is not None and names & free_names(node.type):
            raise VerifierError(
                f"the tests expect the program's own {ast.unparse(node.type)}; name one of Python's errors"
            )
        if isinstance(node, ast.Assert):
            _refuse_claim(node.test, names, answered)


def _refuse_claim(claim: ast.expr, names: frozenset[str], answered: frozenset[str]) -> None:
    """Refuse a claim that is nothing but what a function of the program says about an answer of the program."""
    if isinstance(claim, ast.BoolOp):
        for part in claim.values:
            _refuse_claim(part, names, answered)
    elif isinstance(claim, ast.UnaryOp):
        _refuse_claim(claim.operand, names, answered)
    elif isinstance(claim, ast.Compare):
        against = [claim.left, *claim.comparators]
        if any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in against):
            for part in against:
                _refuse_claim(part, names, answered)
    elif isinstance(claim, ast.Call) and _is_of(claim.func, names):
        given = [*claim.args, *(word.value for word in claim.keywords)]
        if any(_holds_answer(part, names, answered) for part in given):
            raise VerifierError(
                f"the program itself would judge {ast.unparse(claim)[:80]!r}: {ast.unparse(claim.func)[:40]} is not "
                "defined by the tests; define it there"
            )


def _answered(tree: ast.Module, names: frozenset[str]) -> frozenset[str]:
    """Return the variables that hold an answer of the program."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For):
            continue
        value = node.iter if isinstance(node, ast.For) else node.value
        if value is not None and _holds_answer(value, names, frozenset()):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return frozenset(found)


def _holds_answer(node: ast.AST, names: frozenset[str], answered: frozenset[str]) -> bool:
    """Whether a function of the program is called in it (a class of it is not: that makes an argument)."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in answered:
            return True
        if isinstance(part, ast.Call) and _is_of(part.func, names):
            is_class = isinstance(part.func, ast.Name) and part.func.id[:1].isupper()
            if not is_class:
                return True
    return False


def _is_of(function: ast.expr, names: frozenset[str]) -> bool:
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and (function.id in names or function.id == "candidate")


class _Tolerant(ast.NodeTransformer):
    """Makes ``a == b`` of a claim equal within the tolerance."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Replace each single ``==`` of the claim."""
        for part in ast.walk(node.test):
            for name, field in ast.iter_fields(part):
                if isinstance(field, ast.expr):
                    setattr(part, name, _equal(field))
                elif isinstance(field, list):
                    setattr(part, name, [_equal(item) if isinstance(item, ast.expr) else item for item in field])
        node.test = _equal(node.test)
        return node


def _equal(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        return ast.Call(ast.Name("equal_", ast.Load()), [node.left, node.comparators[0]], [])
    return node
