"""Programs as people write them into answers: found whole, in linear time, and none where there is none."""

import sys
import time

import pytest

from gnomon.rewards.base import Sample
from gnomon.rewards.code.program import prelude
from gnomon.rewards.code.reward import Code, last_program
from gnomon.rewards.code.text import blocks
from gnomon.rewards.code.values import same_text

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

ADD = "def add(a, b):\n    return a + b\n"
FENCED = f"```python\n{ADD}```\n"
DOCTEST = 'def add(a, b):\n    """Add.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b\n'


@pytest.mark.parametrize(
    "answer",
    [
        FENCED,
        FENCED.replace("python", "py"),
        FENCED.replace("python", "Python3"),
        FENCED.replace("python", ""),
        FENCED.replace("python", "{.python}"),
        FENCED.replace("python", " python title=add.py"),
        FENCED.replace("```", "~~~"),
        FENCED.replace("```", "`````"),
        FENCED.replace("\n", "\r\n"),
        "1. First:\n\n   " + FENCED.replace("\n", "\n   "),
        "- " + FENCED.replace("\n", "\n  "),
        "> " + FENCED.replace("\n", "\n> ").replace("> def", "def").replace(">     return", "    return"),
        "> " + FENCED.replace("\n", "\n> "),
        f"<answer>{ADD}</answer>",
        f"<answer>\n{ADD}</answer>",
        f"[PYTHON]\n{ADD}[/PYTHON]",
        f"[PYTHON]{ADD}\n[/PYTHON]\nIt adds both.",
        f"[BEGIN]\n{ADD}\n[DONE]",
        "[PYTHON]\ndef add(a, b, s=[0], DONE=0):\n    s[DONE] = a + b\n    return s[DONE]\n[/PYTHON]",
        f"Here it is:\n[BEGIN]\n{ADD}[DONE]\n",
        "The program is: " + FENCED,
        FENCED + "Use it:\n```python\nprint(add(1, 2))\n```\n",
        FENCED + "It prints:\n```\n3\n```\n",
        FENCED + "Run it:\n```bash\npython add.py\n```\n",
        "A draft:\n```python\ndef add(a, b): return 0\n```\nBetter:\n" + FENCED,
        f"```python\n{DOCTEST}```\nDone.",
        f"````markdown\n{FENCED}````\n",
        "```python\ndef add(a, b): return help_(a, b)\n```\nwith\n```python\ndef help_(a, b): return a + b\n```\n",
        "```python\nfrom operator import add as plus\n```\nthen\n```python\ndef add(a, b): return plus(a, b)\n```\n",
        f"<think>\n```python\ndef add(a, b): return 0\n```\nand\n```python\n</think>\n{FENCED}",
        ADD,
        f"Here it is:\n\n{ADD}",
        f"{ADD}\nThis adds both numbers.",
        f"```python\ndef add(a, b):\n    return (a +\n\nNo, wait:\n{FENCED}",
    ],
)
def test_the_program_is_found_that_defines_what_is_called(answer):
    """Fences of every kind, lists, examples behind it, docstrings with fences, several blocks, thoughts, no fence."""
    found = last_program(answer, {"add"})
    names: dict[str, object] = {}

    assert found is not None
    exec(found, names)
    assert names["add"](20, 22) == 42  # type: ignore[operator]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("```python\nn = int(input())\nprint(n)\n```\n```\n3\n```\n", "n = int(input())\nprint(n)\n"),
        ("```\nprint(input())\n```\nprints\n```\n7\n```\n", "print(input())\n"),
        ("```python\nprint(input())\n```\nFor example\n```python\nprint(1 + 1)\n```\n", "print(input())\n"),
        ("```python\nx = 1\nprint(input())\n```\nor\n```python\nprint(input() * 2)\n```\n", "print(input() * 2)\n"),
        ("Nothing.", None),
        ("", None),
        ("```python\nprint(input())", None),
        ("```bash\nprint(input())\n```", None),
    ],
)
def test_a_script_is_the_last_block_that_reads(answer, found):
    """Where cases write to standard input, samples of output and of use are passed over."""
    assert last_program(answer, reads=True) == found


HOSTILE = {
    "an opening without an end": "```" + "a" * 200_000,
    "openings": "```a\n" * 40_000,
    "empty fences": "```\n" * 40_000,
    "quotes that never close": "```\n'''\n```\n" * 15_000,
    "quotes that escape": '```\n\\"""\n```\n' * 15_000,
    "two kinds of fence": "~~~a\n```a\n" * 20_000,
    "shorter and shorter": "\n".join("`" * n + "a" for n in range(400, 2, -1)),
    "spaces": " " * 200_000,
    "quotation marks": "> " * 100_000,
    "items": "1. " * 60_000,
    "one line of backticks": "`" * 200_000,
    "brackets": "```python\n" + "(" * 100_000 + "\n```",
    "lines that begin": "def \n" * 40_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_answer_takes_long_to_read(text):
    """Two hundred thousand characters of anything are read within two seconds of processor time."""
    began = time.process_time()

    last_program(text, {"add"})

    assert time.process_time() - began < 2.0


def test_a_block_keeps_what_is_indented_in_it():
    """The fence's own indent goes, and no more."""
    assert [block.body for block in blocks("  ```\n  if x:\n      y\n  ```\n")] == ["if x:\n    y\n"]


def test_only_names_that_a_program_reads_are_imported():
    """The benchmarks' star imports, one name at a time; Python's own names stay Python's."""
    assert prelude(["List", "deque", "bisect", "copy", "inf"]) == [
        "import bisect", "import copy", "from collections import deque", "from math import inf",
        "from typing import List",
    ]  # fmt: skip
    assert prelude(["sqrt"], ("typing",)) == []


@pytest.mark.parametrize(
    ("text", "expected", "agrees"),
    [
        ("\n3\n", "3", True),
        ("  3", "3", True),
        ("5.0", "5", True),
        ("5.0000000001", "5", False),
        ("1000000001.0", "1000000000", False),
        ("inf", "1", False),
    ],
)
def test_outputs_agree_as_benchmarks_compare(text, expected, agrees):
    """White space at the ends of lines and of the whole is nothing; a whole number may be written with a point."""
    assert same_text(text, expected, 1e-9) is agrees


@on_linux
@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, input().split())))",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import pathlib\nprint(sum(map(int, pathlib.Path('/dev/stdin').read_text().split())))",
        "import os\nprint(sum(map(int, os.read(0, 99).split())))",
        "import fileinput\nprint(sum(int(w) for line in fileinput.input() for w in line.split()))",
        "xs: List[int] = list(map(int, stdin.readline().split()))\nprint(reduce(operator.add, xs))",
        "from __future__ import annotations\nprint(sum(map(int, input().split())), file=sys.stdout)",
    ],
)
def test_a_program_may_read_its_input_in_any_way(program):
    """input, sys.stdin, its buffer, descriptor 0, /dev/stdin; and names that the benchmark imports."""
    tests = {"inputs": ["1 2\n"], "outputs": ["3"]}

    assert Code()(Sample("", f"```python\n{program}\n```", columns={"tests": tests})) == 1.0


@on_linux
def test_an_output_may_be_as_large_as_it_should_be():
    """1.3 MB that are right earn 1; without an end they earn 0, in time."""
    wanted = "\n".join(map(str, range(200_000)))
    right = "print('\\n'.join(map(str, range(200000))))"

    for program, reward in ((right, 1.0), ("while True: print(1)", 0.0)):
        sample = Sample("", f"```python\n{program}\n```", columns={"tests": {"inputs": [""], "outputs": [wanted]}})
        assert Code()(sample) == reward
