"""What a program is asked and what is expected: the forms that coding datasets write cases in.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       standard input and output (APPS, TACO)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}           arguments and result of a function
    [{"input": "1 2", "output": "3", "testtype": "stdin"}]           one case each (LiveCodeBench)
    [{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]   a line an argument, as JSON
    ["assert add(1, 2) == 3"]                                        asserts (MBPP)
    "def check(candidate):\\n    assert candidate(1, 2) == 3"         asserts in a function (HumanEval)

Any of them may be text that holds it as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.verifiers.base import VerifierError
from gnomon.verifiers.code_asserts import AssertCase, read_asserts
from gnomon.verifiers.code_compare import same, same_text
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
    """All cases of one question. setup: what the tests themselves import."""

    stdin: tuple[StdinCase, ...] = ()
    called: tuple[CallCase | AssertCase, ...] = field(default_factory=tuple)
    setup: str = ""


def read_cases(tests: Any, columns: Mapping[str, Any]) -> Cases:
    """Return the cases of a tests column.

    columns: the others; ``entry_point`` or ``fn_name`` names the function, ``test_setup_code`` what tests import.
    Raises: VerifierError when the form is none of those above, or there is no case.
    """
    tests = _parsed(tests)
    entry = columns.get("entry_point") or columns.get("fn_name")
    setup = str(columns.get("test_setup_code") or "")
    if isinstance(tests, str) or (tests and isinstance(tests, list) and all(isinstance(t, str) for t in tests)):
        asserts, imports = read_asserts(tests if isinstance(tests, str) else "\n".join(tests), entry)
        return _some(Cases(called=asserts, setup=f"{setup}\n{imports}"))
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        return _some(_listed(tests, tests.get("fn_name") or entry, setup))
    rows = [tests] if isinstance(tests, Mapping) else tests
    if not isinstance(rows, list) or not all(isinstance(r, Mapping) and {"input", "output"} <= r.keys() for r in rows):
        raise VerifierError(f"cases have none of the known forms: {str(tests)[:100]!r}")
    read = [_row(row, entry) for row in rows]
    stdin = tuple(case for case in read if isinstance(case, StdinCase))
    return _some(Cases(stdin, tuple(case for case in read if isinstance(case, CallCase)), setup))


def _parsed(tests: Any) -> Any:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"cases look like JSON but are not: {error}") from error
    return tests


def _some(cases: Cases) -> Cases:
    if not cases.stdin and not cases.called:
        raise VerifierError("there are no cases to run")
    return cases


def _listed(tests: Mapping[str, Any], name: Any, setup: str) -> Cases:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise VerifierError("'inputs' and 'outputs' should be lists of one length")
    pairs = list(zip(inputs, outputs, strict=True))
    if name and not all(isinstance(given, str) for given in inputs):
        called = tuple(_call(name, args, expected, is_wrapped=True) for args, expected in pairs)
        return Cases(called=called, setup=setup)
    return Cases(stdin=tuple(StdinCase(_joined(given), _joined(wanted)) for given, wanted in pairs))


def _row(row: Mapping[str, Any], entry: Any) -> StdinCase | CallCase:
    kind = row.get("testtype") or row.get("type") or "stdin"
    if kind in ("stdin", "stdin_stdout"):
        return StdinCase(_joined(row["input"]), _joined(row["output"]))
    if kind not in ("functional", "function", "function_call"):
        raise VerifierError(f"a case of unknown type {kind!r}; known: stdin, functional")
    name = row.get("fn_name") or row.get("func_name") or entry
    try:
        given = row["input"]
        args = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
        wanted = json.loads(row["output"]) if isinstance(row["output"], str) else row["output"]
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"arguments or result of a functional case are no JSON: {error}") from error
    return _call(name, args, wanted)


def _call(name: Any, args: Any, expected: Any, is_wrapped: bool = False) -> CallCase:
    if not isinstance(name, str) or not all(map(_NAME.fullmatch, name.split("."))):
        raise VerifierError(f"a function case needs the function's name (fn_name or entry_point), got {name!r}")
    if not isinstance(args, list):
        raise VerifierError(f"the arguments of {name} should be a list, got {str(args)[:80]!r}")
    owner = f"(Solution() if 'Solution' in globals() else __import__('sys').modules['__main__']).{name}"
    return CallCase((f"{owner}(*__import__('json').loads({json.dumps(args)!r}))",), expected, is_wrapped)


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return "\n".join(map(str, text))
    if not isinstance(text, str):
        raise VerifierError(f"input and output of a case should be text, got {str(text)[:80]!r}")
    return text
