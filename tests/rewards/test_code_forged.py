"""Answers that a program forges: never an error, never right unless equal, and never long to judge."""

import asyncio
import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core.processes.client import Limits
from gnomon.rewards.base import Sample
from gnomon.rewards.code.asserts import read_asserts
from gnomon.rewards.code.cases import CallCase
from gnomon.rewards.code.program import read_answers
from gnomon.rewards.code.reward import Code
from gnomon.rewards.code.values import DEPTH, NoAnswerError, Opaque, read_value, same_text
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

RIGHT = "the right answer"  # which no strategy below draws
KINDS = ("tuple", "list", "set", "dict", "bytes", "complex", "number", "opaque", "raised", "unknown", "")
# Every function and operator of a claim meets what was forged.
CLAIMS = [
    f"assert {form} == {RIGHT!r}"
    for form in (
        "f()", "str(f())", "len(f())", "sorted(f())", "set(f())", "dict(f())", "Counter(f())", "sum(f())",
        "sum(f(), [])", "int(f())", "int(f(), 16)", "float(f())", "round(f(), 2)", "round(2.5, f())", "abs(f())",
        "f() % 2", "'%s' % f()", "'%*d' % (f(), 3)", "10 ** f()", "f() ** 2", "f() ** f()", "f() * 1000", "'ab' * f()",
        "[0] * f()", "f() * f()", "f() + f()", "f()[0]", "f()[f()]", "-f()", "math.sqrt(f())", "max(f())",
        "tuple(f())", "frozenset(f()) | set(f())", "f() // 7", "1 / f()",
    )
] + ["assert math.isclose(f(), 0.1) and f() in (1, 2) and f() < 3 and f() == 'never'"]  # fmt: skip
MERSENNE = (1 << 61) - 1
COLLIDING = ",".join(str(n * MERSENNE) for n in range(1, 40_000))
PAIRS = ",".join(f"[{n * MERSENNE},0]" for n in range(1, 40_000))
# What a hostile reader tried, and its kin.
FORGED = {
    "a number beyond floats": '{"number": 1%s}' % ("0" * 400),
    "a complex beyond floats": '{"complex": [1%s, 0]}' % ("0" * 400),
    "terabytes by a number": '{"bytes": 10000000000000}',
    "gigabytes by a number": '{"bytes": 600000000}',
    "bytes beyond 255": '{"bytes": [256]}',
    "lists, deep": '{"list": [' * 400 + "]}" * 400,
    "tuples as a key, deep": '{"dict": [[' + '{"tuple": [' * 480 + "]}" * 480 + ", 1]]}",
    "bare lists, deep": "[" * 900 + "]" * 900,
    "bare lists, deeper than JSON goes": "[" * 100_000 + "]" * 100_000,
    "objects, deeper than JSON goes": '{"list":' * 100_000 + "[]" + "}" * 100_000,
    "a key of thousands of digits": '{"dict": [[1%s, 1]]}' % ("0" * 4290),
    "more digits than are read": "1" * 5000,
    "a float of a million digits": "1" * 900_000 + ".5",
    "half a character": '"\\ud800"',
    "a form that is a gigabyte wide": '"%999999999d"',
    "an exponent": "999999999",
    "an exponent below": "-999999999",
    "sets that collide": f'{{"set": [{COLLIDING}]}}',
    "keys that collide": f'{{"dict": [{PAIRS}]}}',
    "lists that would collide": f'{{"list": [{COLLIDING}]}}',
    "lists of lists": '{"list": [' + ",".join(['{"list":[1]}'] * 80_000) + "]}",
    "many keys": "{" + ",".join(f'"{n}":1' for n in range(80_000)) + "}",
    "binary digits": '"%s"' % ("1" * 1_000_000),
    "nothing": "",
}


def judged(said: str) -> list[bool]:
    """Judge what a program wrote by every claim, and as the result of a call."""
    cases: list[Any] = [case for claim in CLAIMS for case in read_asserts(claim)[0]]
    cases += [CallCase(("f()",), wanted) for wanted in (RIGHT, [RIGHT], {"a": RIGHT}, {RIGHT: 1})]
    answers = read_answers(f"\ns {said}\ns end\n", "s", 1)
    return [answers is not None and case.accepts(list(answers) * len(case.calls), 1e-9) for case in cases]


numbers = st.integers() | st.sampled_from([10**400, -(10**4000), MERSENNE, -1, 256, 10**13]) | st.floats()
leaves = st.none() | st.booleans() | numbers | st.text(max_size=4) | st.sampled_from(["nan", "inf", "%99d", "1" * 5000])
forged = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KINDS), inner, min_size=1, max_size=2)
        | st.dictionaries(st.sampled_from(KINDS[:3]), st.lists(inner, max_size=4), min_size=1, max_size=1)
        | st.lists(st.tuples(inner, inner), max_size=3).map(lambda pairs: {"dict": pairs})
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(forged.map(json.dumps) | st.text() | st.binary().map(lambda some: some.decode("utf-8", "replace")))
def test_no_forged_answer_is_an_error_or_right(said):
    """Whatever is written instead of an answer, no claim raises, and none holds for it."""
    assert not any(judged(said))


@pytest.mark.parametrize("said", FORGED.values(), ids=FORGED.keys())
def test_no_forged_answer_takes_long_or_much(said):
    """Numbers that ask for memory, depth, digits, exponents and hashes that collide: 41 judgements in seconds."""
    began = time.process_time()

    assert not any(judged(said))
    assert time.process_time() - began < 4.0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
        max_leaves=8,
    )
)
def test_what_is_written_is_read(value):
    """Every plain value comes back as it was, so no bound refuses an honest answer."""
    assert read_value(json.dumps(written(value))) == value


def written(value: Any) -> Any:
    """Return what the far side says of a value, written a second time."""
    if isinstance(value, list | tuple):
        return {type(value).__name__: [written(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    is_finite = not isinstance(value, float) or value - value == 0
    return value if is_finite else {"number": repr(value)}


def test_values_are_as_deep_as_the_far_side_writes_them():
    """51 containers are a value, 52 are none."""
    assert read_value('{"list":[' * DEPTH + "]}" * DEPTH) is not None
    with pytest.raises(NoAnswerError, match="too deep"):
        read_value('{"list":[' * (DEPTH + 1) + "]}" * (DEPTH + 1))


def test_a_set_holds_sets_and_no_objects():
    """Members that are sets are frozen; with an object of the program's own the whole cannot be compared."""
    assert read_value('{"set": [{"set": [1]}, 2]}') == {frozenset({1}), 2}
    assert isinstance(read_value('{"set": [{"opaque": "Thing"}]}'), Opaque)
    assert isinstance(read_value('{"dict": [[{"opaque": "Thing"}, 1]]}'), Opaque)


@pytest.mark.parametrize(
    ("claim", "answer"),
    [
        ("assert 10 ** f() == 1000", 3),
        ("assert f() % 7 == 3", 10),
        ("assert '%.2f' % f() == '3.14'", 3.14159),
        ("assert sum(f(), []) == [1, 2]", [[1], [2]]),
        ("assert f() * 3 == 'ababab'", "ab"),
        ("assert round(f(), ndigits=1) == 2.5", 2.54),
        ("assert set(f()) == {0}", [0] * 1000),
        ("assert dict(f()) == {1: 2} and Counter(f()) == {(1, 2): 1}", [(1, 2)]),
        ("assert int(f(), 2) == 5 and len(f()) == 3", "101"),
        ("assert f() == 2 ** 10000", 2**10000),
    ],
)
def test_ordinary_claims_stay_within_the_bounds(claim, answer):
    """What datasets ask is computed as Python does."""
    (case,), _ = read_asserts(claim)

    assert case.accepts([answer] * len(case.calls), 1e-9)


@pytest.mark.parametrize("digits", ["1" * 900_000 + ".5", "0.5" + "0" * 20 + "1" * 900_000, "1" * 900_000])
def test_a_long_number_on_standard_output_is_read_in_time(digits):
    """A megabyte of digits is a wrong line, and soon."""
    began = time.process_time()

    assert not same_text(digits, "2.5", 1e-9)
    assert time.process_time() - began < 1.0


CALLS = {"inputs": [[2]], "outputs": [RIGHT], "fn_name": "area"}
ASSERTS = [f"assert area(2) == {RIGHT!r}", f"assert str(area(2)) == {RIGHT!r}"]
STDIN = {"inputs": ["2"], "outputs": [RIGHT]}
PROGRAM = "import json, os\ndef area(x): return 12\njson.dumps = lambda v: {!r}\nos.write(1, {!r})\n"


@on_linux
@settings(max_examples=8, deadline=None)
@given(forged.map(json.dumps), st.binary(max_size=60))
@pytest.mark.parametrize("tests", [CALLS, ASSERTS, STDIN], ids=["calls", "asserts", "stdin"])
def test_a_program_that_forges_is_a_zero(tests, said, raw):
    """Through the sandbox, whatever it answers and whatever it writes beside: zero, no error."""
    assert Code()(_sample(PROGRAM.format(said, raw), tests)) == 0.0


@on_linux
def test_the_pool_grades_forgeries_zero():
    """In grading processes, with their deadline and memory: each of them is a zero, none an error or late."""
    grades = asyncio.run(_graded([PROGRAM.format(said, b"") for said in FORGED.values() if len(said) < 100_000]))

    assert {(grade.reward, grade.error) for grade in grades} == {(0.0, None)}


async def _graded(programs: list[str]) -> list[Any]:
    limits = Limits(workers=2, deadline_seconds=8.0, memory_gib=1.0)
    async with GradingPool(Grading((WeightedReward(Code()),)), limits) as pool:
        samples = [_sample(program, tests) for program in programs for tests in (CALLS, ASSERTS)]
        return [await pool.grade(sample) for sample in samples]


def _sample(program: str, tests: Any) -> Sample:
    return Sample("", f"```python\n{program}\n```", columns={"tests": tests})
