"""The interpreter that is kept over the calls of a rollout: what it keeps, what ends it, and attacks on it."""

import asyncio
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnomon.rewards.sandbox.base import NotRun, SandboxLimits
from gnomon.rewards.sandbox.interpreter import Interpreter
from gnomon.rewards.sandbox.linux import FOLDER, WALLS, LinuxSandbox, python
from gnomon.rewards.sandbox.probes import Probe
from gnomon.rewards.sandbox.template import Forking, template
from gnomon.rewards.sandbox.watch import _descendants
from gnomon.tasks.env_server import EnvServer
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.python_tool import ENDED, kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

NUMPY = ("numpy",) if importlib.util.find_spec("numpy") else ()
BOUNDS = SandboxLimits(wall_seconds=1.0, memory_mib=256, output_kib=32)
BOTH = pytest.mark.parametrize("walls", [WALLS, ("landlock", "seccomp")], ids=["namespaces", "none"])


@pytest.fixture
def interpreter() -> Iterator[Interpreter]:
    """One with numpy, where that is."""
    made = Interpreter(LinuxSandbox(BOUNDS, WALLS, NUMPY), seed=1)
    yield made
    made.close()


def said(interpreter: Interpreter, *codes: str) -> list[str]:
    """Return what each code shows, and its cause where it ended the interpreter."""
    outcomes = [interpreter.run(code) for code in codes]
    return [(o.stdout + o.stderr).strip() if o.cause is None else f"[{o.cause}]" for o in outcomes]


def test_variables_and_files_are_kept_and_a_last_value_is_shown(interpreter):
    """As in a notebook: names, classes, imports and files of earlier codes; None is not shown."""
    codes = [
        "x = 5",
        "print(x)",
        "x + 1",
        "class A:\n    y = 2\n",
        "import pickle",
        "pickle.loads(pickle.dumps(A())).y",
    ]
    assert said(interpreter, *codes) == ["", "5", "6", "", "", "2"]
    assert said(interpreter, "print(x)", "'a'", "_ = [x]; _", "for i in range(2):\n    i", "") == [
        "5",
        "'a'",
        "[5]",
        "",
        "",
    ]


@pytest.mark.skipif(not NUMPY, reason="a package that no other test imports twice")
def test_attempts_without_a_process_leave_nothing_open():
    """Where what forks programs ends at once, each call is refused, and what one opened is closed by the next."""

    class Nowhere(LinuxSandbox):
        def forking(self, is_kept: bool = False, seed: str = "") -> Forking:
            return Forking(("/bin/false", FOLDER), self.walls, self.bounds, ("numpy", "numpy"), is_kept, seed)

    interpreter, counts = Interpreter(Nowhere(BOUNDS, WALLS), seed=1), []
    for _ in range(3):
        with pytest.raises(NotRun):
            interpreter.run("1")
        counts.append(len(os.listdir("/proc/self/fd")))
    interpreter.close()

    assert counts[1] == counts[2]


def test_an_error_is_shown_with_the_lines_of_every_call(interpreter):
    """A code that raises ends nothing; its traceback has the source of the call that defined the function."""
    first, error, after = said(interpreter, "def f(n):\n    return 1 / n\n", "f(0)", "f(2)")

    assert (first, after) == ("", "0.5")
    lines = [line for line in error.splitlines() if not {*line} <= {*" ~^"}]  # Python 3.13 points at the call too
    assert lines[1:4] == [
        '  File "call 2", line 1, in <module>',
        "    f(0)",
        '  File "call 1", line 2, in f',
    ]
    assert error.endswith("ZeroDivisionError: division by zero")
    assert said(interpreter, "def (", "1")[1] == "1"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("print('x' * 100_000)", "output"),
        ("while True: print('x' * 1000)", "output"),
        ("import os; os._exit(0)", "exit 0"),
        ("exit(7)", "exit 7"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
    ],
)
def test_what_takes_too_much_or_exits_ends_the_interpreter_and_the_next_is_new(interpreter, code, cause):
    """The cause is said, and the next code finds nothing of the former ones."""
    assert said(interpreter, "x = 5", code)[1] == f"[{cause}]"
    assert "NameError" in said(interpreter, "x")[0]
    assert said(interpreter, "6 * 7") == ["42"]


def test_a_long_value_is_cut_and_a_memory_error_is_survived(interpreter):
    """A value of a megabyte is shown in part; an allocation beyond the limit raises and the interpreter goes on."""
    value, memory, after = said(interpreter, "'x' * 1_000_000", "y = bytearray(4 << 30)", "1")

    assert value.endswith("(996002 characters more)")
    assert "MemoryError" in memory
    assert after == "1"


def test_draws_are_those_of_the_seed():
    """The same seed gives the same draws, of numpy too, in another interpreter; another seed others."""
    code = "import random, sys\nn = sys.modules.get('numpy')\n(random.random(), n and float(n.random.rand()))"
    found = []
    for seed in (1, 1, 2):
        interpreter = Interpreter(LinuxSandbox(BOUNDS, WALLS, NUMPY), seed)
        found.append(said(interpreter, code)[0])
        interpreter.close()

    assert found[0] == found[1] != found[2]


def test_between_calls_nothing_computes_or_writes(interpreter):
    """A thread that is left behind stands still: its counter, its output and its processor time."""
    count = (
        "import threading, time\nn = 0\ndef f():\n    global n\n    while True:\n        n += 1; time.sleep(0.001)\n"
    )
    said(interpreter, count + "threading.Thread(target=f, daemon=True).start()", "m = n")
    before = said(interpreter, "n")[0]
    time.sleep(0.5)
    after = said(interpreter, "n")[0]

    assert int(after) - int(before) < 100


def test_closing_ends_the_process_and_nothing_is_left():
    """No process has the interpreter's mark after its end, whatever it ignores."""
    interpreter = Interpreter(LinuxSandbox(BOUNDS, ("landlock", "seccomp"), NUMPY), seed=1)
    ignoring = "import os, signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    ignoring += "    except (OSError, ValueError): pass\nos.getpid()"
    pid = int(said(interpreter, ignoring)[0])
    assert Path(f"/proc/{pid}").exists()
    interpreter.close()
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)

    assert not Path(f"/proc/{pid}").exists()


def test_a_template_that_was_killed_is_replaced():
    """Its death ends no run: the next interpreter is forked from a new one."""
    sandbox = LinuxSandbox(BOUNDS, WALLS, NUMPY)
    sandbox.forking().warm()
    os.kill(template(python(), FOLDER, NUMPY).pid, 9)
    time.sleep(0.2)
    interpreter = Interpreter(sandbox, seed=1)

    assert said(interpreter, "6 * 7") == ["42"]
    interpreter.close()


@BOTH
@pytest.mark.parametrize("victim", [0, 1], ids=["witness", "program"])
def test_a_kill_from_outside_is_no_reply(walls, victim):
    """What the policy would read is what it did itself; the next code begins in a new interpreter."""
    sandbox = LinuxSandbox(BOUNDS, walls, NUMPY)
    sandbox.forking().warm()
    before = set(_descendants(template(python(), FOLDER, NUMPY).pid))
    interpreter = Interpreter(sandbox, seed=1)
    said(interpreter, "x = 1")
    made = [pid for pid in _descendants(template(python(), FOLDER, NUMPY).pid) if pid not in before]
    os.kill(made[victim], signal.SIGKILL)

    with pytest.raises(NotRun, match="outside of the sandbox"):
        interpreter.run("print(x)")
    assert said(interpreter, "6 * 7") == ["42"]
    interpreter.close()


_FIND = """
import gc, os, sys
frame, found = sys._getframe(), []
while frame:
    found += [v for v in frame.f_locals.values() if type(v) is bytes and len(v) == 16]
    numbers = [v for k, v in frame.f_locals.items() if k == 'asked']
    asked = numbers[0] if numbers else None
    frame = frame.f_back
    if asked is not None: break
"""
HOSTILE = (
    Probe("say that it is done", _FIND + "os.write(asked, found[-1])\nprint('early', flush=True)\nwhile True: pass"),
    Probe("say it twice", _FIND + "os.write(asked, found[-1] * 2)"),
    Probe("say something else", _FIND + "os.write(asked, b'x' * 16)"),
    Probe("say much", _FIND + "while True: os.write(asked, b'x' * 9999)"),
    Probe("say it and go on", _FIND + "os.write(asked, found[-1])\nwhile True: print('x', flush=True)"),
    Probe("close the line", _FIND + "os.close(asked)"),
    Probe("answer itself", _FIND + "while True: h = os.read(asked, 24); os.write(asked, h[8:]); os.read(asked, 99)"),
    Probe("report for the witness", "import os\nfor fd in range(3, 200):\n"
          "    try: os.write(fd, b'exit 0\\nstill\\nwalls none\\n')\n    except OSError: pass"),
    Probe("close all", "import os\nos.closerange(0, 4096)"),
    Probe("replace the streams", "import sys\nsys.stdout = sys.stderr = sys.stdin = None"),
    Probe("replace what serves", "import os, sys\nos.read = os.write = lambda *a: b''\n"
          "_ = [sys.modules.pop(m) for m in [*sys.modules]]"),
    Probe("print without end in a thread",
          "import threading\ndef f():\n    while True: print('x' * 999, flush=True)\n"
          "threading.Thread(target=f, daemon=True).start()"),
    Probe("fork", "import os\nif os.fork() == 0:\n    while True: print('OPEN', flush=True)"),
    Probe("a thread that stays", "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"),
    Probe("stall at the end", "import atexit, time\natexit.register(time.sleep, 600)\nexit()"),
    Probe("stop itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    Probe("go on by itself", "import signal, os\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
          "signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGCONT))"),
    Probe("fill the memory", "x = []\ntry:\n    while True: x.append(bytearray(1 << 20))\nexcept MemoryError: pass"),
    Probe("fill the folder", "for n in range(4096):\n    with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 20))"),
    Probe("leave a file", "open('{folder}/mark', 'w').write('x')"),
    Probe("the next one's input", "import os\nfor n in range(9999):\n"
          "    try: print('OPEN', os.listdir(f'/proc/{n}/fd'))\n    except OSError: pass"),
    Probe("change the packages", "import sys\nm = sys.modules.get('numpy', sys)\nm.sum = m.array = print\n"
          "open(m.__file__, 'a')"),
    Probe("change the library", "import builtins, json, random\n"
          "builtins.print = random.random = json.dumps = lambda *a: 'OPEN'"),
)  # fmt: skip


@BOTH
@pytest.mark.parametrize("probe", HOSTILE, ids=lambda probe: probe.name)
def test_an_attack_by_a_kept_interpreter_is_contained(probe, walls, target):
    """Its own call and the next end, it reaches nothing, and another rollout's interpreter notices nothing."""
    sandbox = LinuxSandbox(SandboxLimits(wall_seconds=0.5, memory_mib=128, output_kib=32), walls, NUMPY)
    attacker, other = Interpreter(sandbox, 1), Interpreter(sandbox, 2)
    said(other, "x = 42")
    outcomes = [attacker.run(code) for code in (target.aim(probe), "print(1)", "print(2)")]
    mine = said(other, "print(x)", "import json, random\nprint(json.dumps(1), 0 <= random.random() < 1)", "f = [1]; f")
    attacker.close()
    other.close()

    assert mine == ["42", "1 True", "[1]"]
    assert target.marks() == []
    assert all("OPEN" not in o.stdout and len(o.stdout) <= 64 << 10 for o in outcomes)


def call(code: str) -> str:
    """Return an answer that calls the tool."""
    return f"```python\n{code}\n```"


def test_the_tool_keeps_variables_over_turns_and_forgets_them_with_the_rollout():
    """An environment's process: two rollouts one after the other, and the second knows nothing of the first."""
    plan = EnvironmentConfig(kind="tools", tools=("python",), packages=NUMPY, timeout_seconds=5.0)
    host = EnvServer(plan)
    host.prepare()
    rollouts = []
    for _ in range(2):
        host.answer({"do": "reset", "seed": 7, "prompt": "q", "columns": {}})
        codes = ("print('x' in globals())", "x = 5", "print(x)", "import random; random.random()")
        rollouts.append([host.answer({"do": "step", "text": call(code)})["messages"][0][1] for code in codes])
        host.answer({"do": "close"})

    assert rollouts[0] == rollouts[1]
    assert rollouts[0][:3] == ["False", "[no output]", "5"]
    [schema] = host.answer({"do": "describe"})["schemas"]
    assert "Variables are kept." in schema["function"]["description"]


def test_the_tool_has_scipy():
    """Its parts that load late are there as well, and its draws begin with the rollout's seed."""
    pytest.importorskip("scipy")
    plan = EnvironmentConfig(kind="tools", tools=("python",), packages=("numpy", "scipy"), timeout_seconds=10.0)
    host = EnvServer(plan)
    host.prepare()
    replies = []
    for _ in range(2):
        host.answer({"do": "reset", "seed": 7, "prompt": "q", "columns": {}})
        codes = ("from scipy import stats, optimize, signal", "round(optimize.brentq(lambda x: x * x - 2, 0, 2), 4)",
                 "stats.norm.rvs(size=3).tolist()")  # fmt: skip
        replies.append([host.answer({"do": "step", "text": call(code)})["messages"][0][1] for code in codes])
        host.answer({"do": "close"})

    assert replies[0] == replies[1]
    assert replies[0][:2] == ["[no output]", "1.4142"]


def test_a_call_that_is_cancelled_ends_the_interpreter():
    """What waits for a reply may give up: the code does not go on."""
    random.seed(1)
    tool = kept(LinuxSandbox(SandboxLimits(wall_seconds=2000.0), WALLS, NUMPY))

    async def cancelled() -> str:
        run = asyncio.ensure_future(tool.call("import time; time.sleep(1000)"))
        await asyncio.sleep(0.3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return await tool.call("exit()")

    assert asyncio.run(cancelled()).endswith(ENDED)
    tool.end()
