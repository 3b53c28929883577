"""Tests as sets publish them: LiveCodeBench's packed cases, tests for pytest (KodCode) and for unittest (BigCodeBench).

pytest itself is not in the sandbox. What tests use of it (``raises``, ``approx``, ``mark.parametrize``, ``fixture``,
``param``, ``fail``) stands there by its name, beside what runs their functions and classes.
"""

import ast
import base64
import binascii
import json
import zlib
from collections.abc import Collection, Iterator
from typing import Any

from gnomon.rewards.base import VerifierError

PRIVATE, PUBLIC = "private_test_cases", "public_test_cases"
"""LiveCodeBench's columns. What its own evaluation runs are the cases of both."""

_MOST_BYTES = 1 << 28
_PACKED = "eJ"  # of zlib's two first bytes, in base64

# Of the pickles of one text, protocols 2 to 5: opcode to the bytes of its argument. Nothing is run to read them.
_SKIPPED = {0x80: 1, 0x95: 8, ord("q"): 1, ord("r"): 4, 0x94: 0}
_TEXT = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_STOP = ord(".")


def is_packed(text: str) -> bool:
    """Whether a text is cases that were packed by zlib and base64."""
    # zlib streams begin with 0x78, which base64 writes as "eJ". Python text
    # that begins so has a blank, a bracket or an equals sign early on.
    return text.startswith(_PACKED) and not {" ", "\n", "(", "="} & {*text.rstrip("=\n")[:200]}


def unpacked(text: str) -> str:
    """Return the JSON of cases that LiveCodeBench keeps as a pickle of a text, by zlib, in base64.

    Raises:
        VerifierError: It is anything else. A pickle that holds more than one text is not read.
    """
    try:
        packed = zlib.decompressobj()
        # Bounded: a few kilobytes of zlib can unpack to gigabytes.
        data = packed.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise VerifierError(f"cases look packed (base64, zlib) and are not: {error}") from error
    if packed.unconsumed_tail:
        raise VerifierError(f"packed cases are more than {_MOST_BYTES >> 20} MiB; leave the row out")
    if not packed.eof:
        raise VerifierError("packed cases are cut off: their end is missing")
    try:
        # The data set's own loader unpickles, which would run whatever
        # a row holds. The one text in it is cut out instead.
        return data.decode() if data[:1] in (b"[", b"{") else _only_text(data)
    except UnicodeDecodeError as error:
        raise VerifierError(f"packed cases are no UTF-8: {error}") from error


def _only_text(data: bytes) -> str:
    found: bytes | None = None
    at = 0
    while at < len(data):
        code, at = data[at], at + 1
        if code == _STOP and found is not None and at == len(data):
            return found.decode("utf-8", "surrogatepass")
        if code in _TEXT and found is None:
            size = int.from_bytes(data[at : at + _TEXT[code]], "little")
            at += _TEXT[code]
            found = data[at : at + size]
            at += size
        elif code in _SKIPPED:
            at += _SKIPPED[code]
        else:
            break
    raise VerifierError(
        "packed cases are a pickle of more than one text, which is not read: it could run code; write them as JSON"
    )


def with_public(private: Any, public: Any) -> Any:
    """Return all cases of a row, those that it shows first."""
    lists = [read_packed(cases) for cases in (public, private)]
    return lists[0] + lists[1] if all(isinstance(cases, list) for cases in lists) else private


def read_packed(cases: Any) -> Any:
    """Return cases, read where they are text that holds JSON or that is packed.

    Raises:
        VerifierError: If they cannot be unpacked, or are no JSON.
    """
    if isinstance(cases, str) and is_packed(cases):
        cases = unpacked(cases)
    if isinstance(cases, str) and cases.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(cases)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"cases look like JSON but are not: {error}") from error
    return cases


_OF_PYTEST = frozenset({"raises", "approx", "mark", "fixture", "fail", "param", "main"})
_SKIPS = frozenset({"skip", "skipif", "skipIf", "skipUnless", "SkipTest", "xfail", "importorskip", "expectedFailure"})
_FILES = frozenset({
    "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "mkdtemp", "mkstemp", "makedirs", "rmtree",
    "write_text", "write_bytes", "to_csv", "to_excel", "savefig", "listdir",
})  # fmt: skip


def runner_line(tree: ast.Module) -> str:
    """Return the line that runs the test functions and classes of a file of tests, "" where there are none."""
    functions = [s.name for s in tree.body if isinstance(s, ast.FunctionDef) and s.name.startswith("test")]
    classes = [s.name for s in tree.body if isinstance(s, ast.ClassDef) and is_test_class(s)]
    return f"\nrun_tests_([{', '.join((*functions, *classes))}])" if functions or classes else ""


def frameworks(names: Collection[str]) -> list[ast.stmt]:
    """Return the imports of test frameworks that tests without imports of their own take as given."""
    known = {"pytest": "import pytest", "unittest": "import unittest", "TestCase": "from unittest import TestCase"}
    return [part for name, line in known.items() if name in names for part in ast.parse(line).body]


def is_test_class(statement: ast.ClassDef) -> bool:
    """Whether pytest or unittest would run a class."""
    bases = {getattr(base, "attr", getattr(base, "id", "")) for base in statement.bases}
    return "TestCase" in bases or statement.name.startswith("Test")


def is_claim(node: ast.AST) -> bool:
    """Whether a node can make a test fail: an assert, a raise, or a call of unittest's or pytest's that does."""
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name.startswith(("assert", "raises", "fail"))


def refuse_unknown(tree: ast.Module) -> None:
    """Refuse what tests ask of pytest or unittest, or of files, that is not there.

    Raises:
        VerifierError: If there is such a thing.
    """
    for node in ast.walk(tree):
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if word in _SKIPS:
            raise VerifierError(f"the tests use {word}: a test that is left out claims nothing; remove it")
        of_pytest = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pytest"
        if of_pytest and word not in _OF_PYTEST:
            raise VerifierError(f"the tests use pytest.{word}; of pytest there are {', '.join(sorted(_OF_PYTEST))}")
        if isinstance(node, ast.ImportFrom) and node.module == "pytest":
            raise VerifierError("the tests import from pytest; write import pytest, and pytest.raises")
        opens = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
        if opens or word in _FILES:
            raise VerifierError(
                f"the tests use {word or 'open'}: the program runs apart from them and shares no file; ask for text"
            )
    _refuse_fixtures(tree)


def _refuse_fixtures(tree: ast.Module) -> None:
    made = {s.name for s in tree.body if isinstance(s, ast.FunctionDef) and _named_in(s.decorator_list, "fixture")}
    for function, is_method in _tests(tree):
        given = [arg.arg for arg in function.args.args][is_method:]
        # Parameters with defaults need no fixture.
        given = given[: len(given) - len(function.args.defaults)]
        words = {
            word.strip()
            for node in function.decorator_list
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
            for word in part.value.split(",")
        }
        strange = [name for name in given if name not in made | words]
        if strange:
            raise VerifierError(f"the tests take {strange[0]}, which is no fixture that they define; remove it")
        if isinstance(function, ast.AsyncFunctionDef):
            raise VerifierError(f"{function.name} is asynchronous: write asyncio.run(...) in a plain function")


def _tests(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for statement in tree.body:
        body = statement.body if isinstance(statement, ast.ClassDef) and is_test_class(statement) else [statement]
        for inner in body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test"):
                yield inner, inner is not statement


def _named_in(decorators: list[ast.expr], name: str) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == name for d in decorators for part in ast.walk(d))


_OF_PLAIN = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, frozenset, int, float, complex) for name in dir(kind)
)
_OF_ARRAYS = frozenset({
    "shape", "dtype", "size", "ndim", "T", "tolist", "sum", "mean", "std", "var", "min", "max", "all", "any", "flatten",
    "ravel", "reshape", "astype", "argmax", "argmin", "argsort", "item", "transpose", "round", "dot", "prod", "cumsum",
    "nonzero", "diagonal", "trace", "squeeze", "flat", "nbytes", "itemsize", "ptp", "clip", "conj", "view", "fill",
})  # fmt: skip


def has_attribute(name: str, packages: Collection[str]) -> bool:
    """Whether a plain value, which is all that leaves a program, may have an attribute of this name."""
    return name in _OF_PLAIN or ("numpy" in packages and name in _OF_ARRAYS)


# Kept as text, since it runs in an interpreter that can import neither pytest nor this package.
RUNNER = """
    import re
    frameworks = types.ModuleType("pytest")

    class Raises:
        def __init__(self, kinds, match):
            self.kinds, self.match, self.value, self.type = kinds, match, None, None
        def __enter__(self):
            return self
        def __exit__(self, kind, error, trace):
            if kind is None:
                raise AssertionError("nothing was raised")
            if kind is Unusable or not issubclass(kind, self.kinds):
                return False
            self.value, self.type = error, kind
            if self.match is not None and not re.search(self.match, str(error)):
                raise AssertionError("another message")
            return True

    def raises(kinds, function=None, *given, match=None, **words):
        context = Raises(kinds, match)
        if function is None:
            return context
        with context:
            function(*given, **words)
        return context

    class Approximate:
        __hash__ = None
        __array_ufunc__ = None
        def __init__(self, expected, rel=None, abs=None, nan_ok=False):
            self.expected, self.nan_ok = expected, nan_ok
            self.rel = 1e-6 if rel is None and abs is None else rel or 0.0
            self.abs = 1e-12 if abs is None else abs
        def near(self, found, wanted):
            if isinstance(wanted, dict):
                return isinstance(found, dict) and found.keys() == wanted.keys() and all(
                    self.near(found[key], wanted[key]) for key in wanted)
            if hasattr(wanted, "tolist"):
                wanted = wanted.tolist()
            if hasattr(found, "tolist"):
                found = found.tolist()
            if isinstance(wanted, (list, tuple)):
                return isinstance(found, (list, tuple)) and len(found) == len(wanted) and all(
                    map(self.near, found, wanted))
            if type(wanted) not in (int, float, complex) or type(found) not in (int, float, complex):
                return type(found) is not Opaque and found == wanted
            if wanted != wanted:
                return self.nan_ok and found != found
            return found == wanted or abs(found - wanted) <= max(self.rel * abs(wanted), self.abs) < float("inf")
        def __eq__(self, found):
            return self.near(found, self.expected)
        def __ne__(self, found):
            return not self == found

    def parametrize(names, rows, **words):
        is_text = isinstance(names, str)
        names = [n.strip() for n in names.split(",") if n.strip()] if is_text else list(names)
        def marked(function):
            sets = [(row,) if is_text and len(names) == 1 and not isinstance(row, Row) else row for row in rows]
            if not sets or any(len(row) != len(names) for row in sets):
                raise Unusable("parametrize gives no rows, or rows of another length than its names")
            function.rows_ = [*getattr(function, "rows_", ()), [dict(zip(names, row)) for row in sets]]
            return function
        return marked

    class Row(tuple):
        pass

    class Marks:
        def __getattr__(self, name):
            return lambda *given, **words: given[0] if given and callable(given[0]) else lambda function: function

    Marks.parametrize = staticmethod(parametrize)
    fixtures = {}

    def fixture(function=None, *, autouse=False, **words):
        def made(function):
            if words.get("params"):
                raise Unusable("a fixture has params; write mark.parametrize")
            fixtures[words.get("name") or function.__name__] = (function, autouse)
            return function
        return made if function is None else made(function)

    def fail(reason="", **words):
        raise AssertionError(reason)

    vars(frameworks).update(raises=raises, approx=Approximate, mark=Marks(), fixture=fixture, fail=fail)
    frameworks.param = lambda *values, **words: Row(values)
    frameworks.main = lambda *given, **words: None
    sys.modules["pytest"] = frameworks

    def fixed(name, kept):
        if name not in kept:
            function, _ = fixtures[name]
            words = {n: fixed(n, kept) for n in function.__code__.co_varnames[:function.__code__.co_argcount]}
            found = function(**words)
            kept[name] = next(found) if isinstance(found, types.GeneratorType) else found
        return kept[name]

    def run_test(function, *before):
        sets = [{}]
        for rows in getattr(function, "rows_", ()):
            sets = [{**given, **row} for given in sets for row in rows]
        code = function.__code__
        for given in sets:
            kept = {}
            for name, (_, is_always) in fixtures.items():
                if is_always:
                    fixed(name, kept)
            words = dict(given)
            for name in code.co_varnames[len(before):code.co_argcount]:
                if name not in words and name in fixtures:
                    words[name] = fixed(name, kept)
            function(*before, **words)

    def run_class(cls):
        names = [name for name in dir(cls) if name.startswith("test")]
        unittest = sys.modules.get("unittest")
        if unittest is None or not issubclass(cls, unittest.TestCase):
            for name in names:
                test = cls()
                for begin in ("setup_method", "setUp"):
                    getattr(test, begin, lambda *given: None)(*([None] if begin in vars(cls) and
                        vars(cls)[begin].__code__.co_argcount > 1 else []))
                run_test(vars(cls)[name], test) if name in vars(cls) else getattr(test, name)()
            return
        unittest.defaultTestLoader.loadTestsFromTestCase(cls).debug()

    def run_tests(found):
        for test in found:
            run_class(test) if isinstance(test, type) else run_test(test)
"""
"""On the tests' side (`isolated`): what stands for pytest, and ``run_tests``, which runs functions and classes."""
