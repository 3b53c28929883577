"""What a program is asked and what is expected: the forms that coding datasets write cases in.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       standard input and output (APPS, TACO)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}           arguments and result of a function
    [{"input": "1 2", "output": "3", "testtype": "stdin"}]           one case each (LiveCodeBench)
    [{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]   a line an argument, as JSON
    ["assert add(1, 2) == 3"]                                        asserts (MBPP)
    "def check(candidate):\\n    assert candidate(1, 2) == 3"         asserts in a function (HumanEval)

Any of them may be text that holds it as JSON.
"""

import ast
import builtins
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.rewards.base import VerifierError
from gnomon.rewards.code.asserts import AssertCase, AssertedCall, is_class, named_by, read_asserts
from gnomon.rewards.code.published import frameworks, has_attribute, is_claim, read_packed, refuse_unknown, runner_line
from gnomon.rewards.code.text import SCOPES, Piece, begun, flaw_of, free_names, parsed
from gnomon.rewards.code.values import Opaque, same, same_text
from gnomon.rewards.sandbox.packages import KNOWN as ALLOWED

# Tests with more than plain claims: loops, helpers, variables, expected errors. They run apart from the program.
#
# The tests are one program, the answer is another, each behind walls of its own. The names that the tests do not define
# stand for the answer's functions and classes: a call goes over as its arguments and comes back as a plain value, and
# what is claimed about it is computed where the answer cannot reach. See `isolated` for the two sides.

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
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """Tests as a program.

    Attributes:
        source: Its text.
        names: Names that stand for the answer's functions and classes.
        entry: The expression that ``candidate`` stands for; "None" where nothing is called so.
    """

    source: str
    names: frozenset[str]
    entry: str


def read_script(
    text: str, setup: str, asked: AssertedCall, given: Piece | None, packages: Collection[str] = ()
) -> Script:
    """Return tests as a program of their own.

    Args:
        setup: Code that runs before the tests.
        given: The code with which the row's program begins; its helpers belong to the tests.
        packages: Packages that may be imported.

    Raises:
        VerifierError: If they claim nothing about a program, or cannot stand apart from it.
    """
    tree = parsed(f"{setup}\n{text}")
    if tree is None:
        raise VerifierError(f"the tests are no Python: {flaw_of(text) or flaw_of(setup)}")
    asked = named_by(tree, asked)
    # The order matters: imports of the program's own module go first, since their names must count as free;
    # then come frameworks and helpers, which define names; only what is still free belongs to the program.
    tree = _without_own(tree)
    tree.body = [*frameworks(free_names(tree)), *tree.body]
    tree.body = [*_lent(given, tree, asked), *tree.body]
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    free = free_names(tree)
    has_check = any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in tree.body)
    if (has_check or "candidate" in free) and asked.entry is None:
        raise VerifierError("the tests call candidate: a column entry_point should name the program's function")
    entry = {node.id for node in ast.walk(ast.parse(asked.entry or "None")) if isinstance(node, ast.Name)}
    names = (free - {"candidate"}) | (asked.own & loaded) | entry
    check_imports(tree, {*packages, "pytest"})
    _refuse(tree, names, packages)
    refuse_unknown(tree)
    if not names or not any(map(is_claim, ast.walk(tree))):
        raise VerifierError("the tests claim nothing: there is no assert that calls a function of the program")
    # The call was removed above with the argument that the row gave it, and is added again with the stand-in.
    last = "\ncheck(candidate)" if has_check else ""
    last += runner_line(tree)
    return Script(ast.unparse(ast.fix_missing_locations(_Tolerant().visit(tree))) + last, names, asked.entry or "None")


def _lent(given: Piece | None, tree: ast.Module, asked: AssertedCall) -> list[ast.stmt]:
    """Return the imports of the row's own text, and what tests need that it defines, but for the function asked for."""
    if given is None or given.tree is None:
        return []
    found: list[ast.stmt] = []
    needed = set(free_names(tree))
    # Backwards, because a helper may need another one that is defined above it.
    for statement in reversed(given.tree.body):
        is_needed = isinstance(statement, SCOPES) and statement.name in needed and statement.name != asked.entry
        if is_needed or isinstance(statement, ast.Import | ast.ImportFrom):
            found.insert(0, statement)
            needed |= free_names(statement)
    return found


def _without_own(tree: ast.Module) -> ast.Module:
    """Return the tests without imports of the program's own module, and without the call of check that ends them."""
    kept: list[ast.stmt] = []
    for statement in tree.body:
        is_own = isinstance(statement, ast.ImportFrom) and statement.module in OWN
        if not is_own and not is_check(statement) and not _is_main(statement):
            kept.append(statement)
    return ast.Module(kept, [])


def _is_main(statement: ast.stmt) -> bool:
    """Whether a statement has a framework run the tests of the file, which is done without it."""
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(("unittest.main(", "pytest.main("))


def is_check(statement: ast.stmt) -> bool:
    """Whether a statement calls ``check`` of one argument."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_named = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    return is_named and isinstance(call, ast.Call) and len(call.args) == 1


def check_imports(tree: ast.Module, packages: Collection[str]) -> None:
    """Refuse an import of what is not in the sandbox.

    Raises:
        VerifierError: If there is one.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for module in named:
            root = module.partition(".")[0]
            if root not in sys.stdlib_module_names and root not in packages:
                known = [name for name in ALLOWED if name in packages or name == root]
                instead = "use the standard library" if root not in ALLOWED else f"set packages = {json.dumps(known)}"
                raise VerifierError(f"the tests import {module}, which is not in the sandbox; {instead}")


def _refuse(tree: ast.Module, names: frozenset[str], packages: Collection[str]) -> None:
    """Refuse what cannot be computed where the program is not.

    Raises:
        VerifierError: If there is such a thing.
    """
    answered = _answered(tree, names)
    # Names under which pandas is imported: its comparisons need tables, and no table leaves the sandbox.
    frames = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
              for alias in node.names if alias.name.partition(".")[0] == "pandas"}  # fmt: skip
    for node in ast.walk(tree):
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if word in _WITHIN:
            raise VerifierError(f"the tests use {word}, which {_WITHIN[word]}: that cannot be judged from outside")
        if isinstance(node, ast.ExceptHandler) and node.type is not None and names & free_names(node.type):
            raise VerifierError(
                f"the tests expect the program's own {ast.unparse(node.type)}; name one of Python's errors"
            )
        if isinstance(node, ast.Assert):
            _refuse_claim(node.test, names, answered)
        elif isinstance(node, ast.Call):
            _refuse_call(node, names, answered, frames)
        elif isinstance(node, ast.Attribute) and not has_attribute(node.attr, packages):
            # An answer is a plain value on the tests' side: reading any other
            # attribute of it would raise there and look like a wrong answer.
            is_answer = isinstance(node.value, ast.Name | ast.Call) and _is_answer(node.value, names, answered)
            if is_answer:
                raise VerifierError(
                    f"the tests look at .{node.attr} of an answer, and only numbers, texts and containers leave the "
                    "program; let the question ask for those, or remove the row"
                )


def _refuse_call(call: ast.Call, names: frozenset[str], answered: frozenset[str], frames: Collection[str]) -> None:
    """Refuse a claim of unittest's as `_refuse_claim` does, and one about an answer that only pandas could compare."""
    given = [*call.args, *(word.value for word in call.keywords)]
    others = [call.func, *(part for part in given if not _is_answer(part, names, answered))]
    by_pandas = any(isinstance(node, ast.Name) and node.id in frames for part in others for node in ast.walk(part))
    if by_pandas and any(_is_answer(part, names, answered) for part in given):
        raise VerifierError(
            f"{ast.unparse(call)[:80]!r} compares an answer by pandas, and no table leaves the program; let the "
            "question ask for lists, or remove the row"
        )
    if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert"):
        # assertTrue(f(x)) and assertEqual(f(x), True) are claims that rest on the truth of one call.
        is_truth = call.func.attr in ("assertTrue", "assertFalse")
        if is_truth or any(isinstance(part, ast.Constant) and isinstance(part.value, bool) for part in given):
            for part in given:
                _refuse_claim(part, names, answered)


def _is_answer(node: ast.AST, names: frozenset[str], answered: frozenset[str]) -> bool:
    """Whether a node is an answer itself, and not only holds one."""
    if isinstance(node, ast.Name):
        return node.id in answered
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return not is_class(node.func) and _is_of(node.func, names)


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
        if isinstance(part, ast.Call) and _is_of(part.func, names) and not is_class(part.func):
            return True
    return False


def _is_of(function: ast.expr, names: frozenset[str]) -> bool:
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and (function.id in names or function.id == "candidate")


class _Tolerant(ast.NodeTransformer):
    """Makes each single ``a == b`` in the claim of an assert equal within the tolerance, at any depth."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Replace the comparisons of the claim; others decide what the tests do, and stay exact."""
        node.test = _EqualCalls().visit(node.test)
        return node


class _EqualCalls(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        # Inner comparisons first: the call takes the sides as they are then.
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return ast.Call(ast.Name("equal_", ast.Load()), [node.left, node.comparators[0]], [])
        return node


_NAME = re.compile(r"[A-Za-z_]\w*")
# What open-r1/codeforces, CodeContests and others call the program that judges outputs of which several are right.
_JUDGES = ("checker", "generated_checker", "special_judge", "output_checker")


class Case(Protocol):
    """Calls to make, and what their answers must be."""

    @property
    def calls(self) -> Sequence[str]:
        """Expressions for the program to answer."""

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the answers are right."""


@dataclass(frozen=True)
class StdinCase:
    """What is read and what must be written."""

    stdin: str
    expected: str

    def accepts(self, stdout: str, tolerance: float) -> bool:
        """Whether the output is the expected one, line by line."""
        return same_text(stdout, self.expected, tolerance)


@dataclass(frozen=True)
class CallCase:
    """A function called with arguments.

    Attributes:
        expected: A JSON value, so a tuple may answer for a list.
    """

    calls: tuple[str]
    expected: Any
    is_wrapped: bool = False
    name: str = ""

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the answer is the expected one; APPS wraps some in a list of one."""
        # An object of the program's own, or an exception, equals nothing.
        if isinstance(answers[0], Opaque):
            return False
        if same(answers[0], self.expected, tolerance):
            return True
        wrapped = self.is_wrapped and isinstance(self.expected, list) and len(self.expected) == 1
        return wrapped and same(answers[0], self.expected[0], tolerance)


@dataclass(frozen=True)
class Cases:
    """All cases of one question.

    Attributes:
        setup: What the tests themselves import.
        names: What a program must define.
        script: Tests that are more than claims; together they are one case.
    """

    stdin: tuple[StdinCase, ...] = ()
    called: tuple[CallCase | AssertCase, ...] = field(default_factory=tuple)
    setup: str = ""
    names: frozenset[str] = frozenset()
    script: Script | None = None

    @property
    def claims(self) -> bool:
        """Whether they are asserts, whose benchmarks put no imports before a program."""
        return self.script is not None or any(isinstance(case, AssertCase) for case in self.called)


def read_cases(tests: Any, columns: Mapping[str, Any], prompt: str = "", packages: Collection[str] = ()) -> Cases:
    """Return the cases of a tests column.

    Args:
        packages: Packages that programs and tests may import.
        columns: The row's other columns; ``entry_point``, ``fn_name``, ``func_name`` or that of ``metadata`` names the
            function, ``test_setup_code`` and ``test_imports`` are what tests import, and ``code`` or
            ``canonical_solution`` tells which function with the name of one of Python's is the program's.

    Raises:
        VerifierError: If the form is none of those above, or there is no case.
    """
    tests = read_packed(tests)
    entry = _entry(columns)
    setup = "\n".join(_lines(columns.get(name)) for name in ("test_imports", "test_setup_code") if columns.get(name))
    known = {**columns, **(tests if isinstance(tests, Mapping) else {})}
    if (judge := next(filter(known.get, _JUDGES), None)) is not None:
        raise VerifierError(
            f"{judge} says which outputs are right, and cases compare with one output; leave the row out, or judge it "
            'by a reward of your own (kind = "function")'
        )
    # The forms are told apart by their types: text is Python, a table with
    # inputs and outputs is APPS's, a list of tables is LiveCodeBench's.
    if isinstance(tests, str) or (tests and isinstance(tests, list) and all(isinstance(t, str) for t in tests)):
        text = tests if isinstance(tests, str) else "\n".join(tests)
        given = begun(columns, prompt)
        found = _some(_written(text, setup, _asked(columns, entry), given, packages))
        for part in (found.setup, "" if given is None else given.text):
            if (tree := parsed(part)) is not None:
                check_imports(tree, {*packages, *OWN, "pytest"})
        return found
    if isinstance(tests, Mapping) and isinstance(tests.get("test_cases"), list):
        tests = tests["test_cases"]  # PrimeIntellect's verifiable coding problems
    if isinstance(tests, Mapping) and isinstance(tests.get("input"), list) and isinstance(tests.get("output"), list):
        tests = {**tests, "inputs": tests["input"], "outputs": tests["output"]}  # CodeContests
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        # An entry point says what function a row is about even where its cases are texts
        # for standard input; only arguments that are no text are certain to be a call's.
        is_typed = not all(isinstance(given, str) for given in tests["inputs"] or ())
        named = entry if is_typed else _entry({**columns, "entry_point": None})
        return _some(_listed(tests, _name(tests) or named, setup))
    rows = [tests] if isinstance(tests, Mapping) else tests
    if not isinstance(rows, list) or not all(isinstance(r, Mapping) and {"input", "output"} <= r.keys() for r in rows):
        raise VerifierError(f"cases have none of the known forms: {str(tests)[:100]!r}")
    read = [_row(row, entry) for row in rows]
    stdin = tuple(case for case in read if isinstance(case, StdinCase))
    called = tuple(case for case in read if isinstance(case, CallCase))
    return _some(Cases(stdin, called, setup, frozenset(case.name for case in called)))


def _entry(columns: Mapping[str, Any]) -> Any:
    """Return the function that a row names, from its metadata too, which some sets keep as text."""
    own = columns.get("entry_point") or _name(columns)
    metadata = columns.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip()[:1] == "{":
        metadata = read_packed(metadata)
    return own or (_name(metadata) if isinstance(metadata, Mapping) else None)


def _name(values: Mapping[str, Any]) -> Any:
    return values.get("fn_name") or values.get("func_name")


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _written(text: str, setup: str, asked: AssertedCall, given: Piece | None, packages: Collection[str]) -> Cases:
    """Return plain claims as a case each, and tests that are more as one."""
    try:
        asserts, imports = read_asserts(text, asked)
    except VerifierError:
        script = read_script(text, setup, asked, given, packages)
        return Cases(names=script.names, script=script)
    names = frozenset(name for case in asserts for name in case.names)
    return Cases(called=asserts, setup=f"{setup}\n{imports}", names=names)


def _asked(columns: Mapping[str, Any], entry: Any) -> AssertedCall:
    """Return whom asserts ask; a function of the row's own solution is the program's whatever its name."""
    solutions = (columns.get("code"), columns.get("canonical_solution"))
    texts = (text for text in solutions if isinstance(text, str))
    own = {name for text in texts for name in Piece(text, parsed(text)).defines if hasattr(builtins, name)}
    named = entry if isinstance(entry, str) else None
    return AssertedCall(named, frozenset({*own, *([named] if named else [])}))


def _some(cases: Cases) -> Cases:
    if not cases.stdin and not cases.called and cases.script is None:
        raise VerifierError("there are no cases to run")
    return cases


def _listed(tests: Mapping[str, Any], name: Any, setup: str) -> Cases:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise VerifierError("'inputs' and 'outputs' should be lists of one length")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        called = tuple(_call(name, _values(args), _value(wanted, args), is_wrapped=True) for args, wanted in pairs)
        return Cases(called=called, setup=setup, names=frozenset(case.name for case in called))
    return Cases(stdin=tuple(StdinCase(_joined(given), _joined(wanted)) for given, wanted in pairs))


def _row(row: Mapping[str, Any], entry: Any) -> StdinCase | CallCase:
    kind = row.get("testtype") or row.get("type") or ("functional" if _name(row) else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return StdinCase(_joined(row["input"]), _joined(row["output"]))
    if kind not in ("functional", "function", "function_call"):
        raise VerifierError(f"a case of unknown type {kind!r}; known: stdin, functional")
    name = _name(row) or _entry(row) or entry
    return _call(name, _values(row["input"]), _value(row["output"], ""), is_wrapped=kind == "function_call")


def _values(given: Any) -> Any:
    """Return arguments: a list, or text of which each line is one as JSON."""
    if not isinstance(given, str):
        return given
    return [_value(line, given) for line in given.split("\n") if line.strip()]


def _value(text: Any, given: Any) -> Any:
    """Return a value, which is written as JSON where the arguments are text."""
    if not isinstance(text, str) or not isinstance(given, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"arguments or result of a functional case are no JSON: {error}; {text[:60]!r}") from error


def _call(name: Any, args: Any, expected: Any, is_wrapped: bool = False) -> CallCase:
    name = name.removeprefix("Solution().").removeprefix("Solution.") if isinstance(name, str) else name
    if not isinstance(name, str) or not all(map(_NAME.fullmatch, name.split("."))):
        raise VerifierError(
            f"a function case needs the function's name (fn_name, entry_point or metadata), got {name!r}"
        )
    if not isinstance(args, list):
        raise VerifierError(f"the arguments of {name} should be a list, got {str(args)[:80]!r}")
    # LeetCode's problems put the function into a class Solution, others at the top
    # of the module. The arguments travel as JSON text, as the data set wrote them.
    owner = f"(Solution() if 'Solution' in globals() else __import__('sys').modules['__main__']).{name}"
    call = f"{owner}(*__import__('json').loads({json.dumps(args)!r}))"
    return CallCase((call,), expected, is_wrapped, name.split(".")[-1])


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return "\n".join(map(str, text))
    if not isinstance(text, str):
        raise VerifierError(f"input and output of a case should be text, got {text!r:.80} ({type(text).__name__})")
    return text
