"""Machines on which nothing can isolate, made by a filter of system calls: code rewards refuse, and say what helps.

The filter takes from a process of ours, for good, what an old kernel, a container or a policy takes: Landlock, new
namespaces, filters of its own. Bubblewrap, where it is installed, meets the same, or is not on the path.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import GNOMON, Forked, ended
from tests.random_model import RANDOM

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has x86-64's numbers"),
]

# Classic BPF: each named call ends with an error number, everything else goes on. A filter binds all that it starts.
TAKE = """
import ctypes, struct, sys

LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06
CALLS = {
    "landlock": [(444, None, 38), (445, None, 38), (446, None, 38)],
    # unshare, setns, mount, clone3; clone with any flag of a namespace.
    "namespaces": [(272, None, 1), (308, None, 1), (165, None, 1), (435, None, 38), (56, 0x7E020000, 1)],
    # seccomp(2); prctl(PR_SET_SECCOMP), which is looked up below.
    "seccomp": [(317, None, 38), (157, "=22", 22)],
}

def take(names):
    steps = [(LOAD, 0, 0, 0)]
    for number, what, error in [call for name in names for call in CALLS[name]]:
        refuse = (RETURN, 0, 0, 0x00050000 | error)
        if what is None:
            steps += [(EQUAL, 0, 1, number), refuse]
        else:
            test = (EQUAL, 0, 1, 22) if what == "=22" else (SET, 0, 1, what)
            steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, 16), test, refuse, (LOAD, 0, 0, 0)]
    steps.append((RETURN, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(program, len(program)), 0, 0) == 0, ctypes.get_errno()

take(sys.argv.pop(1).split(","))
"""
CHOOSE = """
from gnomon.core.errors import ConfigError
from gnomon.rewards.sandbox.selftest import choose
try:
    print("CHOSEN", choose(sys.argv[1])[1])
except ConfigError as error:
    print("REFUSED", error)
"""
EVERYTHING = "landlock,namespaces,seccomp"


def without(taken: str, code: str, *arguments: str, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run code in a process from which this was taken. path: where programs such as bubblewrap are looked for."""
    # Interpreters that it starts need to find gnomon; itself it is a fork.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({} if path is None else {"PATH": path})
    return ended(Forked([taken, *arguments], TAKE + code, environment=environment))


@pytest.mark.parametrize(
    ("taken", "walls"),
    [("landlock", "limits, namespaces, seccomp"), ("namespaces", "limits, landlock-")],
)
def test_what_is_left_is_enough_where_it_is(taken: str, walls: str):
    """Without Landlock, or without namespaces, the other walls stop every probe, and the card names them alone."""
    said = without(taken, CHOOSE, "auto").stdout

    assert said.startswith("CHOSEN own (" + walls), said
    assert "69 of 69 hostile probes stopped" in said
    assert taken not in said.partition(":")[0]


@pytest.mark.parametrize(
    "taken", [EVERYTHING, "seccomp", "landlock,seccomp", "landlock,namespaces", "namespaces,seccomp"]
)
@pytest.mark.parametrize("path", [None, "/nowhere"], ids=["with the path", "with no bubblewrap"])
def test_where_nothing_is_enough_nothing_is_chosen(taken: str, path: str | None):
    """Each candidate is named with what it did not stop or why it does not start, and then what to install."""
    said = without(taken, CHOOSE, "auto", path=path).stdout

    assert said.startswith("REFUSED nothing on this machine isolates model-written code, so none is run (own: "), said
    assert said.count("own: ") == 2
    assert "bubblewrap: " in said
    assert "use a kernel from 5.13 on with Landlock, or install bubblewrap (Debian, Ubuntu: apt install" in said
    assert "pip install pydantic-monty and set sandbox = 'monty'" in said


CASES = [{"prompt": f"{n}?", "answer": "x", "tests": {"inputs": ["1\n"], "outputs": ["1\n"]}} for n in range(40)]


def options(folder: Path) -> tuple[str, ...]:
    """Return an experiment that rewards programs."""
    table = folder / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in CASES))
    return (f"task={{kind='table', path='{table}'}}", "rewards=[{kind='code'}]", "held_out.size=2", "steps=1")


@pytest.mark.parametrize("verb", ["train", pytest.param("plan", marks=pytest.mark.slow)])
def test_a_run_with_code_rewards_is_refused_before_anything_is_loaded(tmp_path: Path, verb: str):
    """Exit code 2, one message that says what to install, no traceback, no run directory, and no program was run."""
    run = tmp_path / "run"
    place = ("--run-dir", str(run)) if verb == "train" else ()
    ran = without(EVERYTHING, GNOMON, verb, "tiny", *options(tmp_path), *place, path="/nowhere")

    assert ran.returncode == 2, ran.stderr
    assert "nothing on this machine isolates model-written code" in ran.stderr
    assert "install bubblewrap" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not run.exists()


@pytest.mark.slow
def test_the_python_tool_is_refused_as_well(tmp_path: Path):
    """An environment that runs what a model writes needs the same walls."""
    asked = ("environment={kind='tools', tools=['python']}", "rewards=[{kind='numeric'}]", "steps=1")
    ran = without(EVERYTHING, GNOMON, "plan", RANDOM, *asked, path="/nowhere")

    assert ran.returncode == 2, ran.stderr
    assert "nothing on this machine isolates model-written code" in ran.stderr
