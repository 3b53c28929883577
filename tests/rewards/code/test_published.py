"""Tests as HumanEval+, MBPP+, KodCode, BigCodeBench and LiveCodeBench publish them; rows made here, of their forms."""

import base64
import importlib.util
import json
import pickle
import sys
import zlib
from typing import Any

import pytest

from gnomon.core.errors import ConfigError
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.code.cases import read_cases
from gnomon.rewards.code.published import unpacked
from gnomon.rewards.code.reward import Code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

NUMPY = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
PANDAS = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")


def reward(program: str, tests: Any, packages: tuple[str, ...] = (), **columns: Any) -> float:
    """Grade a program in a fenced block."""
    code = Code(packages=packages, case_seconds=10.0, total_seconds=20.0)
    return code(Sample("", f"```python\n{program}\n```\n", columns={"tests": tests, **columns}))


# evalplus' own head of each row.
PLUS = """import numpy as np
from math import inf

def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert type(out) == type(exp)
        if isinstance(exp, (list, tuple)):
            assert len(out) == len(exp)
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
"""
HUMAN_EVAL_PLUS = (
    PLUS
    + """

def check(candidate):
    inputs = [[[1.0, 2.0, 3.0]], [[0.1, 0.2]], [[4.0]]]
    results = [2.0, 0.15, 4.0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
)
MBPP_PLUS = (
    PLUS
    + """
inputs = [[(3, 4, 5), (5, 4)], [(1, inf), (inf, 2)]]
results = [(4, 5), (inf,)]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(shared(*inp), exp, 0)
"""
)
PARAMETRIZED = """import pytest
from solution import divide


@pytest.fixture
def three():
    return 3


@pytest.mark.parametrize("a, b, expected", [(6, 3, 2), (1, 2, 0.5), pytest.param(-9, 3, -3, id="negative")])
def test_divides(a, b, expected):
    assert divide(a, b) == pytest.approx(expected)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(("a",), [(4,), (8,)])
def test_rows_cross(a, b, three):
    assert divide(a * three, b * three) == a / b


def test_zero():
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        divide(1, 0)
    assert "zero" in str(caught.value)
    pytest.raises(ZeroDivisionError, divide, 2, 0)


class TestMore:
    def setup_method(self):
        self.one = 1

    def test_one(self):
        assert divide(self.one, 1) == 1


if __name__ == "__main__":
    pytest.main()
"""
UNITTEST = """import unittest


class TestCases(unittest.TestCase):
    def setUp(self):
        self.words = ["b", "a", "b"]

    def test_counts(self):
        result = task_func(self.words)
        self.assertIsInstance(result, dict)
        self.assertEqual(result, {"b": 2, "a": 1})
        self.assertEqual(len(result), 2)

    def test_floats(self):
        self.assertAlmostEqual(task_func([0.1])[0.1], 1.0, places=5)

    def test_errors(self):
        with self.assertRaises(ValueError) as caught:
            task_func([])
        self.assertIn("empty", str(caught.exception))
        for bad in (None, 3):
            with self.subTest(bad=bad), self.assertRaises(TypeError):
                task_func(bad)
"""
COUNTS = """def task_func(words):
    if not isinstance(words, list):
        raise TypeError("no list")
    if not words:
        raise ValueError("empty")
    return {w: words.count(w) for w in words}"""
ARRAYS = """import numpy as np


def test_scale():
    given = np.array([1.0, 2.0])
    assert np.allclose(scale(given, 2), [2.0, 4.0])
    assert scale(given, 3).shape == (2,)
    assert isinstance(scale(given, 1), np.ndarray)
    np.testing.assert_array_equal(scale(np.eye(2), 0), np.zeros((2, 2)))
"""
FRAME = """import pandas as pd
import unittest


class TestCases(unittest.TestCase):
    def test_total(self):
        self.assertEqual(task_func(pd.DataFrame({"x": [1, 2, 3]})), 6)
"""

# Each: a right program, a wrong one, the tests, packages, other columns.
PUBLISHED: dict[str, tuple[str, str, str, tuple[str, ...], dict[str, Any]]] = {
    "HumanEval+": (
        "def mean(xs): return sum(xs) / len(xs)",
        "def mean(xs): return xs[0]",
        HUMAN_EVAL_PLUS,
        ("numpy",),
        {"entry_point": "mean"},
    ),
    "HumanEval+, a number of numpy's": (
        "import numpy as np\ndef mean(xs): return np.mean(xs)",
        "import numpy as np\ndef mean(xs): return np.max(xs)",
        HUMAN_EVAL_PLUS,
        ("numpy",),
        {"entry_point": "mean"},
    ),
    "MBPP+": (
        "def shared(a, b): return tuple(sorted(set(a) & set(b)))",
        "def shared(a, b): return tuple(sorted(set(a) | set(b)))",
        MBPP_PLUS,
        ("numpy",),
        {},
    ),
    "KodCode": ("def divide(a, b): return a / b", "def divide(a, b): return a // b", PARAMETRIZED, (), {}),
    "KodCode, another error": (
        "def divide(a, b): return a / b",
        "def divide(a, b):\n    if b == 0: raise ValueError('by zero')\n    return a / b",
        PARAMETRIZED,
        (),
        {},
    ),
    "BigCodeBench": (COUNTS, COUNTS.replace("words.count(w)", "1"), UNITTEST, (), {}),
    "BigCodeBench, no error": (COUNTS, COUNTS.replace('raise ValueError("empty")', "return {}"), UNITTEST, (), {}),
    "arrays both ways": (
        "def scale(xs, k): return xs * k",
        "def scale(xs, k): return xs * k + 1",
        ARRAYS,
        ("numpy",),
        {},
    ),
    "functions of scipy's": (
        "import numpy as np\nfrom scipy import optimize\ndef root(f, a, b): return optimize.brentq(f, a, b)",
        "def root(f, a, b): return (a + b) / 2",
        "import numpy as np\nfrom scipy import stats\ndef check(candidate):\n"
        "    assert np.allclose(candidate(lambda x: x * x - 2, 0, 2), 2 ** 0.5)\n"
        "    assert abs(candidate(lambda x: x - 1.5, 0, 2) - stats.norm.mean(1.5)) < 1e-6\n",
        ("numpy", "scipy"),
        {"entry_point": "root"},
    ),
    "a table as an argument": (
        "def task_func(df): return df['x'].sum()",
        "def task_func(df): return df['x'].max()",
        FRAME,
        ("pandas",),
        {},
    ),
}


@NUMPY
@PANDAS
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tests_tell_right_from_wrong(name):
    """Of each form of tests a right program earns 1, and one that is wrong in one case earns nothing."""
    right, wrong, tests, packages, columns = PUBLISHED[name]
    for package in packages:
        pytest.importorskip(package)

    assert reward(right, tests, packages, **columns) == 1.0
    assert reward(wrong, tests, packages, **columns) == 0.0


ALWAYS = "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\n    shape = ()\n    dtype = 'float64'\n"
ALWAYS += "    __bool__ = lambda s: True\n    __array__ = lambda s, *a, **k: 1 / 0\n    tolist = lambda s: A()\n"
FORGED = {
    "allclose replaced": "import numpy as np\nnp.allclose = lambda *a, **k: True\ndef mean(xs): return 7.0",
    "an object equal to all": ALWAYS + "def mean(xs): return A()",
    "an object that says it is numpy's": ALWAYS + "A.__module__ = 'numpy'\ndef mean(xs): return A()",
    "an array of objects": ALWAYS + "import numpy as np\ndef mean(xs): return np.array([A()], dtype=object)",
    "an array of other numbers": "import numpy as np\ndef mean(xs): return np.array([7.0])",
    "an array that is not one": "import numpy as np\nclass B(np.ndarray):\n    __eq__ = lambda s, o: True\n"
    "def mean(xs): return np.zeros(3).view(B)",
    "a float that is equal to all": "import numpy as np\nclass F(np.float64):\n    __eq__ = lambda s, o: True\n"
    "def mean(xs): return F(7)",
    "not a number": "def mean(xs): return float('nan')",
}


@NUMPY
@pytest.mark.parametrize("name", FORGED)
def test_numpy_decides_outside_of_the_program(name):
    """What a program makes of numpy in its own process changes no verdict: a zero, never an error."""
    assert reward(FORGED[name], HUMAN_EVAL_PLUS, ("numpy",), entry_point="mean") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\ndef divide(a, b): return 0",
        "def run_tests_(x): return None\nrun_tests = run_tests_\ndef divide(a, b): return 0",
        "def divide(a, b): raise ZeroDivisionError('by zero')",
        "class ZeroDivisionError(Exception): pass\ndef divide(a, b): raise ZeroDivisionError('by zero')",
    ],
)
def test_a_program_has_no_say_in_the_frameworks(program):
    """pytest's parts and the runner are those of the tests' process, and an error of one's own is not Python's."""
    assert reward(program, PARAMETRIZED) == 0.0


def packed(text: str, protocol: int = 4) -> str:
    """Pack cases as LiveCodeBench does."""
    return base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()


CASES = json.dumps([{"input": f"{n}\n", "output": f"{n + 1}\n", "testtype": "stdin"} for n in range(3)])
SHOWN = json.dumps([{"input": "9\n", "output": "10\n", "testtype": "stdin"}])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("text", [CASES, "[]", CASES + " " * 70_000, json.dumps(["é", "\u2028"], ensure_ascii=False)])
def test_packed_cases_are_read_without_running_anything(protocol, text):
    """A pickle of one text, short, long or in frames, of any protocol that writes texts as UTF-8."""
    assert unpacked(packed(text, protocol)) == text


def test_hidden_cases_count_with_those_shown():
    """A row of LiveCodeBench as published: the packed column names the cases, and those shown are run before them."""
    columns = {"private_test_cases": packed(CASES), "public_test_cases": SHOWN, "metadata": "{}"}
    code = Code(column="private_test_cases")
    programs = ["print(int(input()) + 1)", "n = int(input())\nprint(n + (n < 9))", "print(10)"]
    found = [code(Sample("", f"```python\n{program}\n```", columns=columns)) for program in programs]

    assert found == [1.0, 0.0, 0.0]
    assert len(read_cases(packed(CASES), columns).stdin) == 3


class Runs:
    """What a pickle can do."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(Runs()))).decode(), "more than one text, which is not read"),
        (base64.b64encode(zlib.compress(pickle.dumps([CASES]))).decode(), "more than one text"),
        (base64.b64encode(zlib.compress(pickle.dumps(CASES)[:-1])).decode(), "more than one text"),
        (base64.b64encode(zlib.compress(pickle.dumps(CASES) + b"x")).decode(), "more than one text"),
        (base64.b64encode(zlib.compress(b"")).decode(), "more than one text"),
        (packed(CASES)[:-8], "packed"),
        (packed(CASES)[:40] + "!" + packed(CASES)[41:], "packed"),
        ("eJ" + "A" * 200, "packed"),
    ],
)
def test_what_is_packed_otherwise_is_refused(text, message, capsys):
    """Code in the pickle, another object, a cut or a changed text: an error of the row, and nothing ran."""
    with pytest.raises(VerifierError, match=message):
        read_cases(text, {})
    assert capsys.readouterr().out == ""


def test_a_package_that_cannot_be_given_is_named_with_what_to_type():
    """An unknown one when the reward is made, one that is not installed before anything is loaded."""
    with pytest.raises(ConfigError, match=r"unknown package 'nunpy'.*did you mean 'numpy'"):
        Code(packages=("nunpy",))
    missing = [name for name in ("scipy", "pandas") if importlib.util.find_spec(name) is None]
    for name in missing:
        with pytest.raises(ConfigError, match=f"{name} is not installed.*pip install {name}"):
            Code(packages=(name,)).prepare()
