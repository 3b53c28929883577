"""What a program is asked and what is expected: the forms that coding datasets write cases in.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       standard input and output (APPS, TACO)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}           arguments and result of a function
    [{"input": "1 2", "output": "3", "testtype": "stdin"}]           one case each (LiveCodeBench)
    [{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]   a line an argument, as JSON
    ["assert add(1, 2) == 3"]                                        asserts (MBPP)
    "def check(candidate):\\n    assert candidate(1, 2) == 3"         asserts in a function (HumanEval)

Any of them may be text that holds it as JSON.
"""

import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.verifiers.base import VerifierError
from gnomon.verifiers.code_asserts import Asked, AssertCase, read_asserts
from gnomon.verifiers.code_compare import same, same_text
from gnomon.verifiers.code_script import Script, read_script
from gnomon.verifiers.code_text import Piece, begun, parsed
from gnomon.verifiers.code_values import Opaque

_NAME = re.compile(r"[A-Za-z_]\w*")


class Case(Protocol):
    """Calls to make, and what their answers must be."""

    @property
    def calls(self) -> Sequence[str]:
        """Expressions for the program to answer."""
        ...

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the answers are right."""
        ...


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
    """A function called with arguments. expected: a JSON value, so a tuple may answer for a list."""

    calls: tuple[str]
    expected: Any
    is_wrapped: bool = False
    name: str = ""

    def accepts(self, answers: Sequence[Any], tolerance: float) -> bool:
        """Whether the answer is the expected one; APPS wraps some in a list of one."""
        if isinstance(answers[0], Opaque):
            return False
        if same(answers[0], self.expected, tolerance):
            return True
        wrapped = self.is_wrapped and isinstance(self.expected, list) and len(self.expected) == 1
        return wrapped and same(answers[0], self.expected[0], tolerance)


@dataclass(frozen=True)
class Cases:
    """All cases of one question. setup: what the tests themselves import. names: what a program must define.

    script: tests that are more than claims; together they are one case.
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


def read_cases(tests: Any, columns: Mapping[str, Any], prompt: str = "") -> Cases:
    """Return the cases of a tests column.

    columns: the others; ``entry_point``, ``fn_name``, ``func_name`` or that of ``metadata`` names the function,
    ``test_setup_code`` and ``test_imports`` are what tests import, and ``code`` or ``canonical_solution`` tells which
    function with the name of one of Python's is the program's.
    Raises: VerifierError when the form is none of those above, or there is no case.
    """
    tests = _parsed(tests)
    entry = _entry(columns)
    setup = "\n".join(_lines(columns.get(name)) for name in ("test_imports", "test_setup_code") if columns.get(name))
    if isinstance(tests, str) or (tests and isinstance(tests, list) and all(isinstance(t, str) for t in tests)):
        text = tests if isinstance(tests, str) else "\n".join(tests)
        return _some(_written(text, setup, _asked(columns, entry), begun(columns, prompt)))
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
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
        metadata = _parsed(metadata)
    return own or (_name(metadata) if isinstance(metadata, Mapping) else None)


def _name(values: Mapping[str, Any]) -> Any:
    return values.get("fn_name") or values.get("func_name")


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _written(text: str, setup: str, asked: Asked, given: Piece | None) -> Cases:
    """Return plain claims as a case each, and tests that are more as one."""
    try:
        asserts, imports = read_asserts(text, asked)
    except VerifierError:
        script = read_script(text, setup, asked, given)
        return Cases(names=script.names, script=script)
    names = frozenset(name for case in asserts for name in case.names)
    return Cases(called=asserts, setup=f"{setup}\n{imports}", names=names)


def _asked(columns: Mapping[str, Any], entry: Any) -> Asked:
    """Return whom asserts ask; a function of the row's own solution is the program's whatever its name."""
    solutions = (columns.get("code"), columns.get("canonical_solution"))
    texts = (text for text in solutions if isinstance(text, str))
    own = {name for text in texts for name in Piece(text, parsed(text)).defines if hasattr(builtins, name)}
    named = entry if isinstance(entry, str) else None
    return Asked(named, frozenset({*own, *([named] if named else [])}))


def _parsed(tests: Any) -> Any:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"cases look like JSON but are not: {error}") from error
    return tests


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
    return _call(name, _values(row["input"]), _value(row["output"], ""))


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
    if not isinstance(name, str) or not all(map(_NAME.fullmatch, name.split("."))):
        raise VerifierError(
            f"a function case needs the function's name (fn_name, entry_point or metadata), got {name!r}"
        )
    if not isinstance(args, list):
        raise VerifierError(f"the arguments of {name} should be a list, got {str(args)[:80]!r}")
    owner = f"(Solution() if 'Solution' in globals() else __import__('sys').modules['__main__']).{name}"
    call = f"{owner}(*__import__('json').loads({json.dumps(args)!r}))"
    return CallCase((call,), expected, is_wrapped, name.split(".")[-1])


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return "\n".join(map(str, text))
    if not isinstance(text, str):
        raise VerifierError(f"input and output of a case should be text, got {str(text)[:80]!r}")
    return text
