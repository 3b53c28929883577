"""The reward for programs: what passes, what does not, and what no trick makes pass."""

import asyncio
import contextlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.config.experiment import from_table
from gnomon.config.reading import read
from gnomon.core.errors import ConfigError
from gnomon.core.processes.client import Limits
from gnomon.core.types import Grade
from gnomon.rewards.base import Sample, VerifierError
from gnomon.rewards.code.asserts import read_asserts
from gnomon.rewards.code.cases import read_cases
from gnomon.rewards.code.program import harness, read_answers
from gnomon.rewards.code.reward import Code, last_program
from gnomon.rewards.code.values import same, same_text
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward, from_json, to_json
from gnomon.training.build_data import grading_of, isolation_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

SUM = "print(sum(map(int, input().split())))"
ADD = "def add(a, b):\n    return a + b"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


def reward(program: str, tests: object, **columns: object) -> float:
    """Grade a program in a fenced block."""
    return Code()(Sample("", f"So:\n```python\n{program}\n```\n", columns={"tests": tests, **columns}))


JUDGES = ("checker", "generated_checker", "special_judge", "output_checker")


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (SUM, STDIN),
        (SUM, json.dumps(STDIN)),
        (SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}]),
        (ADD, CALLS),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", {**CALLS, "fn_name": "Solution.add"}),
        (ADD, {**CALLS, "fn_name": "Solution().add"}),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}]),
        (ADD, '{"fn_name": "add", "inputs": [[NaN, 1], [1, 2]], "outputs": [NaN, 3]}'),
        ("def add(a, b):\n    return {a: b}", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [{"1": 2}]}),
        (ADD, ASSERTS),
        (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"),
        ("from __future__ import annotations\n" + ADD, ASSERTS),
        ("import sys\n" + ADD + "\nif __name__ == '__main__':\n    sys.exit(add(*input()))", ASSERTS),
    ],
)
def test_a_right_program_passes_in_every_form_of_case(program, tests):
    """Standard input, calls, methods of Solution, asserts, check functions; a script's last lines are not run."""
    assert reward(program, tests, entry_point="add") == 1.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(3)", STDIN),
        ("print(3", STDIN),
        ("def add(a, b):\n    return 3", CALLS),
        ("def sub(a, b):\n    return a + b", CALLS),
        ("def add(a, b):\n    return {1: 0, '1': 2}", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [{"1": 2}]}),
        ("def add(a, b):\n    while True: pass", CALLS),
        ("def add(a, b):\n    return a - b", ASSERTS),
        (SUM + "\nraise SystemExit(1)", STDIN),
    ],
)
def test_a_wrong_program_does_not(program, tests):
    """Wrong, incomplete, raising, hanging, exiting with a status: a zero and no error."""
    assert Code(case_seconds=0.5, total_seconds=0.5)(
        Sample("", f"```python\n{program}\n```", columns={"tests": tests})
    ) == (0.0)


ALWAYS = "class Yes:\n    __eq__ = __ge__ = __contains__ = lambda s, o: True\n    __hash__ = None\n"


@pytest.mark.parametrize(
    "hack",
    [
        ALWAYS + "def add(a, b): return Yes()",
        "class Int(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef add(a, b): return Int(9)",
        "import os\ndef add(a, b): os._exit(0)",
        "import sys\nsys.exit(0)",
        "import sys\ndef add(a, b): sys.exit(0)",
        "import os\nos._exit(0)",
        "import ctypes\nctypes.CDLL(None)._exit(0)",
        "import ctypes\ndef add(a, b): ctypes.CDLL(None)._exit(0)",
        "import ctypes\ndef add(a, b): ctypes.pythonapi.Py_Exit(0)",
        "import ctypes\ndef add(a, b): ctypes.CDLL(None).syscall(231, 0)",
        "import ctypes\ndef add(a, b): print('3\\nend', flush=True); ctypes.CDLL(None).exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit",
        "print('passed'); print('1.0'); print('{\"reward\": 1.0}')\ndef add(a, b): return None",
        "import json\njson.dumps = lambda *a, **k: '3'\ndef add(a, b): return 0",
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda *a: int\n"
        "def add(a, b): return 0",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'exit 0\\n')\n    except OSError: pass\n"
        "def add(a, b): return 0",
        # It finds the secret and answers with it, but what is expected is not in the process.
        "import os, sys\ndef add(a, b):\n    f = sys._getframe(1)\n    while f:\n        for n in f.f_code.co_names:\n"
        "            if n.startswith('_judge_') or n.startswith('calls_'):\n"
        "                s = n.split('_')[-1]; os.write(1, f'\\n{s} 3\\n{s} 3\\n{s} end\\n'.encode())\n"
        "        f = f.f_back\n    os._exit(0)",
        "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'same'): m.same = lambda *a: True\n"
        "def add(a, b): return 0",
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, list) and 7 in o: print(o)\n"
        "def add(a, b): return 0",
        "def add(a, b): raise AssertionError",
    ],
)
@pytest.mark.parametrize("tests", [CALLS, ASSERTS], ids=["calls", "asserts"])
def test_no_trick_earns_credit(hack, tests):
    """Patching, exiting early, objects equal to all, forged lines: nothing but the right values passes."""
    assert reward(hack, tests) == 0.0


@pytest.mark.parametrize("claim", ["assert not add(1, 2)", "assert add(1, 2) is not None", "assert add(1, 2) != 4"])
@pytest.mark.parametrize("body", ["raise ValueError", "return Yes()", "import ctypes; ctypes.CDLL(None)._exit(0)"])
def test_an_exception_or_an_object_fulfils_no_claim_of_difference(claim, body):
    """Neither a raised exception nor an object of its own counts as false, or as different from a number."""
    wanted = 1.0 if body == "return Yes()" and "is not None" in claim else 0.0

    assert reward(f"{ALWAYS}def add(a, b): {body}", [claim]) == wanted


def test_what_is_expected_never_enters():
    """The text that runs holds the calls and neither the expected values nor the comparison."""
    cases, _ = read_asserts("assert round(area(2), 2) == 12.57 and area(0) in (0, 31337)")
    text = harness("", "", cases[0].calls, "s")

    assert cases[0].calls == ("area(2)", "area(0)")
    assert "12.57" not in text
    assert "31337" not in text


def test_each_case_can_count_alone():
    """With credit each, one of two is a half; a program that dies in a call has none."""
    half = Code(credit="each")
    sample = {"tests": {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}}

    assert half(Sample("", f"```\n{SUM}\n```", columns=sample)) == 0.5
    assert half(Sample("", "```\nimport os\ndef add(a, b): return a + b if a == 1 else os._exit(0)\n```",
                       columns={"tests": CALLS})) == 0.0  # fmt: skip


def test_a_completion_without_a_program_is_zero():
    """Prose, an open block, or one of another language: nothing to run."""
    for text in ("It is print and input.", f"```python\n{SUM}", f"```bash\n{SUM}\n```"):
        assert Code()(Sample("", text, columns={"tests": STDIN})) == 0.0


def test_the_last_block_is_the_program():
    """A draft before the answer does not count."""
    assert last_program("```py\n1\n```\n```python\n2\n```\n```text\n3\n```") == "2\n"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "no cases"),
        ({"inputs": ["1"], "outputs": []}, "one length"),
        ("{not json", "not: Expecting"),
        ("assert is_close(add(1, 2)", "no Python"),
        (["assert 1 == 1"], "claim nothing"),
        (["assert True"], "no cases"),
        (["class A(TestCase):\n    def test(self): print(add(1, 2))"], "claim nothing"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "function's name"),
        ([{"input": "1", "output": "2", "testtype": "interactive"}], "unknown type 'interactive'"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f(); x"}, "function's name"),
        (7, "none of the known forms"),
        *(({**STDIN, name: "print(1)"}, f"{name} says which outputs are right") for name in JUDGES),
    ],
)
def test_cases_that_cannot_be_read_are_an_error(tests, message):
    """A dataset that cannot be judged is an error with its reason, never a zero."""
    with pytest.raises(VerifierError, match=message.replace("(", r"\(")):
        read_cases(tests, {})


@pytest.mark.parametrize("name", JUDGES)
def test_a_row_with_a_judge_of_its_own_is_an_error(name):
    """Where several outputs are right, comparing with one would give right programs 0; null is no judge."""
    with pytest.raises(VerifierError, match=f"{name} says which outputs are right, and cases compare with one"):
        read_cases(STDIN, {name: "import sys"})
    assert read_cases(STDIN, {name: None}).stdin


@pytest.mark.parametrize(
    ("claim", "answer", "holds"),
    [
        ("assert f() == (1, [2], {3: 'x'})", (1, [2], {3: "x"}), True),
        ("assert f() == [1, 2]", (1, 2), False),
        ("assert set(f()) == {1, 2}", [2, 1, 1], True),
        ("assert sorted(f(), reverse=True)[0] > 2 and len(f()) == 3", [1, 2, 3], True),
        ("assert math.isclose(f(), 0.3, abs_tol=0.1)", 0.35, True),
        ("assert abs(f() - 2.5) < 1e-6", 2.5, True),
        ("assert f() == 0.3", 0.1 + 0.2, True),
        ("assert 'a' in f()", "cat", True),
        ("assert f() is True", 1, False),
        ("assert f()[0] == 1", 5, False),
        ("assert f() % 0 == 1", 5, False),
    ],
)
def test_claims_are_evaluated_out_here(claim, answer, holds):
    """Operators, known functions and comparisons over answers, as Python has them; what raises does not hold."""
    (case,), _ = read_asserts(claim)

    assert case.accepts([answer] * len(case.calls), 1e-9) is holds


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_every_value_is_the_same_as_itself(value):
    """Comparing is reflexive on JSON values, and a number never equals a text."""
    assert same(value, value, 0.0)
    assert not same(value, [value], 0.0)


@pytest.mark.parametrize(
    ("value", "expected", "agrees"),
    [
        ({1: 2}, {"1": 2}, True), ({1: 2, "1": 3}, {"1": 3}, False), ({"1": 3, 1: 2}, {"1": 2}, False),
        ({1: 2, "1": 3}, {1: 2, "1": 3}, True), ({1: 2, "1": 3}, {1: 3, "1": 2}, False),
        ({"a": {1: 2, "1": 3}}, {"a": {"1": 3}}, False), ([{1: 2, "1": 3}], [{"1": 3}], False),
        ({None: 1, "None": 2}, {"None": 2}, False), ({True: 1, "true": 2}, {"true": 2}, False),
        ({True: 1}, {"true": 1}, True), ({None: 1}, {"null": 1}, True), ({1.0: 2}, {1: 2}, True),
        ({1.5: 2}, {"1.5": 2}, True), ({(1, 2): 3}, {(1, 2): 3}, True), ({1: 2, 2: 3}, {"1": 2, "2": 3}, True),
        ({"1": 3}, {1: 2, "1": 3}, False),
        (math.nan, math.nan, True), ([1.0, math.nan], [1.0, math.nan], True), ({"a": math.nan}, {"a": math.nan}, True),
        (math.nan, 1.0, False), (1, math.nan, False), (math.nan, "nan", False), (math.inf, math.nan, False),
        (None, math.nan, False), (math.nan, None, False), (-math.inf, -math.inf, True),
    ],
)  # fmt: skip
def test_keys_never_merge_and_nan_is_nan(value: object, expected: object, agrees: bool):
    """JSON's text stands for a key only where no other key is lost by it; NaN where NaN is expected is right."""
    assert same(value, expected, 0.0) is agrees


@pytest.mark.parametrize(
    ("text", "expected", "agrees"),
    [
        ("3", "3\n", True),
        ("3 \n\n", "3", True),
        ("3\n4", "3 4", False),
        ("0.30000000004", "0.3", True),
        ("yes", "YES", False),
        ("1e400", "2.0", False),
        ("nan", "1.0", False),
    ],
)
def test_outputs_agree_line_by_line(text, expected, agrees):
    """Spaces at ends do not count, case and line breaks do, numbers written with a point may round."""
    assert same_text(text, expected, 1e-9) is agrees


def test_answers_are_whole_or_nothing():
    """A missing end, a missing line or one too many is no answer."""
    assert read_answers("x\ns 1\ns 2\ns end\n", "s", 2) == [1, 2]
    for said in ("s 1\ns 2\n", "s 1\ns end\n", "s 1\ns 2\ns 3\ns end\n", "s {]\ns 2\ns end\n"):
        assert read_answers(said, "s", 2) is None


def test_the_reward_travels_and_names_itself():
    """It survives JSON like every verifier, and needs no more than its kind."""
    grading = Grading((WeightedReward(Code(credit="each", sandbox="own"), weight=2.0),))

    assert from_json(to_json(grading)) == grading
    assert grading.rewards[0].part == "code"


def test_settings_that_make_no_sense_are_refused():
    """A case may not have more time than all cases together."""
    with pytest.raises(ConfigError, match="case_seconds <= total_seconds, got 9 and 4"):
        Code(case_seconds=9.0)


def test_nothing_that_isolates_is_found_before_anything_is_loaded():
    """Where the sandbox that was asked for is missing, preparing says so."""
    with pytest.raises(ConfigError, match="nothing on this machine isolates"):
        Code(sandbox="monty").prepare()


async def grade(*completions: str, deadline_seconds: float = 5.0) -> list[Grade]:
    """Grade programs for `STDIN` in worker processes, all at once."""
    limits = Limits(workers=2, deadline_seconds=deadline_seconds)
    async with GradingPool(Grading((WeightedReward(Code()),)), limits) as pool:
        samples = (Sample("", f"```python\n{text}\n```", columns={"tests": STDIN}) for text in completions)
        return list(await asyncio.gather(*map(pool.grade, samples)))


def test_programs_are_graded_in_workers():
    """From inside a grading process, which has limits of its own, the walls stand and verdicts are the same."""
    grades = asyncio.run(grade(SUM, "print(3)", "import os; os.kill(os.getppid(), 9)", SUM))

    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0, 1.0]


def test_a_grading_deadline_ends_the_program_too():
    """Past the deadline the sample is an error, and no process of it runs on."""
    (graded,) = asyncio.run(grade("while True: pass", deadline_seconds=0.5))

    assert graded.reward is None
    assert "timed out after 0.5 s" in str(graded.error)
    assert not sandboxed()


def sandboxed() -> list[bytes]:
    """Return the command lines of programs whose grader is gone: nobody waits for them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents = [word for word in words[8:12] if word.isdigit()]
            if b"inside.start" in b" ".join(words) and parents and not Path(f"/proc/{int(parents[1])}").exists():
                found.append(b" ".join(words))
    return found


def test_an_experiment_names_it_and_its_time_must_fit():
    """``kind = "code"`` is all it needs; a total that the deadline would cut is refused with both numbers."""
    experiment = from_table({**read("tiny"), "rewards": [{"kind": "code"}]}).experiment

    assert grading_of(experiment).rewards[0].verifier == Code()
    hasty = replace(experiment, grading=replace(experiment.grading, deadline_seconds=3.0))
    with pytest.raises(ConfigError, match=r"total_seconds = 4, which must be less than.*got 3"):
        grading_of(hasty)


def test_the_run_card_says_what_isolates():
    """With a code reward, the walls and how many probes they stopped; without one, that no such code is run."""
    experiment = from_table({**read("tiny"), "rewards": [{"kind": "code"}]}).experiment

    assert "69 of 69 hostile probes stopped" in isolation_of(experiment, [grading_of(experiment)])
    plain = replace(experiment, rewards=())
    assert isolation_of(plain, [grading_of(plain)]) == "none: no model-written code"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (SUM, {"input": ["1 2\n", "3 4\n"], "output": ["3\n", "7\n"]}),
        (SUM, json.dumps({"input": ["1 2\n"], "output": ["3\n"], "is_generated": False})),
        (SUM, {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]}),
        (ADD, {"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}),
    ],
)
def test_lists_of_inputs_are_cases_of_their_own(program, tests):
    """CodeContests' columns of inputs and outputs, and a list of cases within an object, are read case by case."""
    assert reward(program, tests) == 1.0
    assert reward(program.replace("sum", "max").replace("+", "-"), tests) == 0.0


@pytest.mark.parametrize(
    "claim",
    [
        "f(1) == datetime.date(2020, 1, 1)", "f(1) == date(2020, 1, 1)", "f(1) == Decimal('1.5')",
        "Fraction(1, 2) == f(2)",
        "f(1) != decimal.Decimal(1)", "f(3) == timedelta(days=1)", "not f(1) == datetime(2020, 1, 1)",
        "f(1) == fractions.Fraction(3, 4)", "f(2) < date(2021, 1, 1)", "f(1) and f(2) == Decimal(2)",
    ],
)  # fmt: skip
def test_a_claim_about_what_does_not_leave_the_sandbox_is_refused(claim: str):
    """Such a comparison never holds, so every right program would earn 0 without a word."""
    with pytest.raises(VerifierError, match="leaves the sandbox, so an answer cannot be compared"):
        read_asserts(f"assert {claim}")
