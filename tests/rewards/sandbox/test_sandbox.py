"""The sandbox as its users see it: outcomes, limits, cancellation, the choice at start."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gnomon.core.errors import ConfigError, UserError
from gnomon.rewards.sandbox import bubblewrap
from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.linux import FOLDER, WALLS, LinuxSandbox, python
from gnomon.rewards.sandbox.selftest import Isolation, choose, probe_isolation
from gnomon.rewards.sandbox.watch import Watched, cause_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

QUICK = SandboxLimits(wall_seconds=1.0, memory_mib=256, output_kib=16)
NOBODY = 65534


@pytest.mark.parametrize(
    ("stderr", "cause"),
    [
        ("Traceback (most recent call last):\n  ...\nMemoryError\n", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 4 GiB\n", "memory"),
        ("  ...\nobject type name: MemoryError\nobject repr     : MemoryError()\nlost sys.stderr\n", "memory"),
        ("  ...\nobject type name: ValueError\nobject repr     : MemoryError()\nlost sys.stderr\n", "exit 1"),
        ("MemoryError\nValueError: 3\n", "exit 1"),
        ("object type name: MemoryError\n", "exit 1"),
        ("", "exit 1"),
    ],
)
def test_lack_of_memory_is_told_from_another_error(stderr: str, cause: str):
    """By the last line; Python 3.13 may lack the memory for a traceback, and then names the error's type alone."""
    assert cause_of({"exit": "1"}, stderr) == cause


def test_a_program_reads_writes_and_ends():
    """Standard input comes in, standard output and error come out, status 0 is no cause."""
    outcome = LinuxSandbox(QUICK).run_now("import sys; print(input()[::-1]); print('e', file=sys.stderr)", "abc\n")

    assert (outcome.stdout, outcome.stderr, outcome.cause) == ("cba\n", "e\n", None)
    assert 0 < outcome.seconds < 10


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise SystemExit(7)", "exit 7"),
        ("import os; os.abort()", "signal 11"),
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("x = bytearray(1 << 30)", "memory"),
        ("print('x' * (1 << 20))", "output"),
        ("1 / 0", "exit 1"),
        ("def f(:", "exit 1"),
    ],
)
def test_how_a_program_ended_is_named(source, cause):
    """Exit, signal, time, memory and output are told apart. (As first process of its own world, SIGABRT is SIGSEGV.)"""
    bounds = SandboxLimits(wall_seconds=0.3 if cause == "time" else 20.0, memory_mib=256, output_kib=16)

    assert LinuxSandbox(bounds).run_now(source).cause in {cause, cause.replace("signal 11", "signal 6")}


@pytest.mark.slow
def test_processor_time_is_limited_too():
    """One second of processor time ends a loop that its wall time would let run."""
    outcome = LinuxSandbox(SandboxLimits(wall_seconds=20.0, cpu_seconds=1)).run_now("while True: pass")

    assert outcome.cause in ("time", "signal 9")
    assert outcome.seconds < 19


def test_a_traceback_shows_the_program_and_not_the_machine():
    """The first line shown is the program's own, with its source; Python's folder is called python."""
    outcome = LinuxSandbox(QUICK).run_now("import json\njson.loads('{')")

    lines = outcome.stderr.splitlines()
    assert lines[1] == '  File "main.py", line 2, in <module>'
    assert lines[2].strip() == "json.loads('{')"
    assert 'File "python/json/__init__.py"' in outcome.stderr


def test_what_wrote_before_the_end_is_kept():
    """A program that is ended by the clock has said what it flushed before."""
    outcome = LinuxSandbox(SandboxLimits(wall_seconds=0.3)).run_now("print('so far', flush=True)\nwhile True: pass")

    assert (outcome.stdout, outcome.cause) == ("so far\n", "time")


def test_two_runs_are_strangers():
    """A file that one program wrote is not there for the next one, and hashes are the same in both."""
    sandbox = LinuxSandbox(QUICK)
    source = "import os; print(os.path.exists('/tmp/x'), hash('gnomon')); open('/tmp/x', 'w').write('x')"
    first, second = sandbox.run_now(source), sandbox.run_now(source)

    assert first.stdout == second.stdout
    assert first.stdout.startswith("False ")


@pytest.mark.parametrize(
    "source",
    [
        "import threading; t = threading.Thread(target=print, args=(42,)); t.start(); t.join()",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def f(n): return n and f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(40000) + 42)); t.start(); t.join()",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 42\nprint(asyncio.run(f()))",
        "from concurrent.futures import ThreadPoolExecutor as T\nwith T(4) as t: print(sum(t.map(int, ['40', '2'])))",
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('42'); f.seek(0); print(f.read())",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(42).x)",
        "import sys; print(42); exit()",
        "if __name__ == '__main__':\n    import sys; print(len(sys.argv) + 41)",
        "import datetime, decimal, fractions, random, statistics, string, zoneinfo, sqlite3, numbers; print(42)",
        "import atexit; atexit.register(print, 42)",
        "print(open('/dev/null').read() + '42')",
        "import pickle\nclass A: x = 42\nprint(pickle.loads(pickle.dumps(A())).x)",
    ],
)
def test_real_programs_run(source):
    """Threads, deep recursion, asyncio, temporary files, the library: what solutions use works."""
    outcome = LinuxSandbox(SandboxLimits(wall_seconds=5.0)).run_now(source)

    assert (outcome.stdout, outcome.cause) == ("42\n", None), outcome.stderr


LOOK = """
import gc, sys
texts, frame = [sys.path, sys.argv, sys.orig_argv, list(sys.path_importer_cache)], sys._getframe()
numbers = []
while frame:
    seen = [*frame.f_locals.values()]
    seen += [inner for value in seen for inner in getattr(value, '__dict__', {}).values()]
    texts += [frame.f_code.co_filename, [v for v in seen if isinstance(v, str)]]
    numbers += [v for v in seen if isinstance(v, int)]
    frame = frame.f_back
for found in gc.get_objects():
    texts.append(getattr(getattr(found, '__code__', None), 'co_filename', ''))
    texts += [part for part in gc.get_referents(found) if isinstance(part, str) and len(part) < 1000]
print(ascii(texts), numbers, sep='\\n')
"""


@pytest.mark.parametrize("walls", [WALLS, ("landlock", "seccomp")], ids=["namespaces", "none"])
def test_a_program_sees_neither_where_gnomon_lies_nor_its_grader(walls):
    """Its arguments, its interpreter's, the frames that called it and all objects: no path, no number of a process."""
    outcome = LinuxSandbox(SandboxLimits(wall_seconds=5.0), walls).run_now(LOOK)

    assert outcome.cause is None, outcome.stderr
    assert "['main.py'], ['python', 'main.py']" in outcome.stdout
    assert str(Path(FOLDER).parent) not in outcome.stdout
    assert os.getpid() not in json.loads(outcome.stdout.splitlines()[-1].lower())


LOCKS = """
import fcntl, os
for path, mode in ((os.__file__, 'rb'), ('/dev/null', 'wb')):
    with open(path, mode) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(42)
"""


def test_programs_do_not_meet_in_locks():
    """What others have locked, a file of the library or a device, is granted to a program as if they were not there."""
    with open(os.__file__, "rb") as library, open("/dev/null", "wb") as device:
        for file in (library, device):
            fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(device, fcntl.LOCK_EX)
        outcome = LinuxSandbox(QUICK).run_now(LOCKS)

    assert (outcome.stdout, outcome.cause) == ("42\n", None), outcome.stderr


def test_a_database_in_a_file_works():
    """SQLite locks its files, which is granted."""
    source = "import sqlite3\nfor n in (20, 22):\n    with sqlite3.connect('x.db') as d:\n"
    source += "        d.execute('create table if not exists t(n)'); d.execute('insert into t values(?)', (n,))\n"
    outcome = LinuxSandbox(QUICK).run_now(source + "print(d.execute('select sum(n) from t').fetchone()[0])")

    assert (outcome.stdout, outcome.cause) == ("42\n", None) or not _namespaces(), outcome.stderr


def _namespaces() -> bool:
    return "namespaces" in LinuxSandbox(QUICK).isolation()


def test_cancelling_ends_the_program():
    """A cancelled run leaves no process behind."""

    async def cancelled() -> None:
        sandbox = LinuxSandbox(SandboxLimits(wall_seconds=2000.0))
        run = asyncio.ensure_future(sandbox.run("import time; time.sleep(1000)"))
        await asyncio.sleep(0.3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancelled())

    assert not _left()


def test_many_run_at_once():
    """Eight programs at a time answer each for itself."""

    async def all_of_them() -> list[str]:
        sandbox = LinuxSandbox(SandboxLimits())
        outcomes = await asyncio.gather(*(sandbox.run(f"print({n} * {n})") for n in range(8)))
        return [outcome.stdout for outcome in outcomes]

    assert asyncio.run(all_of_them()) == [f"{n * n}\n" for n in range(8)]


def test_the_walls_of_this_machine_stand():
    """The default sandbox stops all sixty-nine programs, and says so."""
    _, enforced = choose("auto", QUICK)

    assert "69 of 69 hostile probes stopped" in str(enforced)
    assert "seccomp" in enforced.walls


def test_without_walls_the_probes_say_so():
    """The same probes get through where there are no walls: they can fail."""
    enforced = probe_isolation(LinuxSandbox(QUICK, walls=("none",)))

    assert {"read a file of the user", "write outside", "connect by TCP", "start a process"} <= set(enforced.open)


def test_a_wall_that_falls_over_runs_nothing():
    """Where a limit or wall cannot be put up, the program is refused, not run without it: 2^80 bytes are no limit."""
    outcome = LinuxSandbox(SandboxLimits(files_mib=1 << 60)).run_now("print('ran')")

    assert (outcome.stdout, outcome.cause) == ("", "refused")


def test_no_sandbox_is_an_error_of_the_user():
    """Where nothing isolates, the refusal says what to install and which setting takes the risk."""
    with pytest.raises(UserError, match=r"apt install bubblewrap.*sandbox = 'none'.*rights"):
        choose("monty")


def test_the_risk_can_be_taken_knowingly():
    """The setting none runs programs and is written down as such."""
    sandbox, enforced = choose("none", QUICK)

    assert sandbox.run_now("print(1)").stdout == "1\n"
    assert str(enforced) == "none: the user took the risk (limits)"


def test_bounds_are_positive():
    """Zero seconds, or less memory than Python needs, is refused with the value."""
    with pytest.raises(ConfigError, match=r"wall_seconds must be above 0, got 0"):
        SandboxLimits(wall_seconds=0)


def test_what_was_enforced_reads_as_a_sentence():
    """Name, walls, count, and what stayed open."""
    enforced = Isolation("own", "limits seccomp", ("a", "b"), ("c",))

    assert str(enforced) == "own (limits, seccomp): 2 of 3 hostile probes stopped; open: c"


@pytest.mark.skipif(not os.path.exists("/usr/bin/bwrap"), reason="bubblewrap is not installed")
def test_bubblewrap_stands_in():
    """Bubblewrap with our filter inside stops them as well, where it may run."""
    sandbox = LinuxSandbox(QUICK, bubblewrap.WALLS)
    if sandbox.run_now("print(1)").cause == "refused":
        pytest.skip("this system does not let bubblewrap build namespaces")

    assert probe_isolation(sandbox).open == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="this user is unprivileged already")
def test_a_user_without_privileges_has_the_same_walls():
    """What root enforces, nobody enforces too: gnomon needs no root."""
    interpreter = _public_python()
    source = "from gnomon.rewards.sandbox.selftest import choose; print(choose()[1])"

    said = _as_nobody(interpreter, "-c", source)

    assert "69 of 69 hostile probes stopped" in said.stdout, said.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is unprivileged already")
@pytest.mark.parametrize("walls", ["namespaces,landlock,seccomp", "landlock,seccomp"])
def test_a_user_without_privileges_stops_every_probe(walls):
    """All hostile programs, as nobody, with and without namespaces."""
    said = _as_nobody(_public_python(), "-m", "gnomon.rewards.sandbox.audit", walls)

    assert said.stdout == "[]\n", said.stdout
    assert " 0 got through" in said.stderr


def _public_python() -> str:
    """Return a Python that everybody may start, since that of the tests may lie in a home."""
    for candidate in (python(), "/usr/bin/python3"):
        path = Path(candidate).resolve()
        is_open = path.exists() and all(p.stat().st_mode & 0o001 for p in path.parents)
        version = "import sys; sys.exit(sys.version_info < (3, 11))"
        if is_open and subprocess.run([path, "-c", version]).returncode == 0:
            return str(path)
    pytest.skip("there is no Python 3.11 that an unprivileged user can start")


def _as_nobody(*command: str) -> "subprocess.CompletedProcess[str]":
    source = str(Path(__file__).resolve().parents[3] / "src")
    environment = {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}
    return subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], env=environment, cwd="/", capture_output=True, text=True
    )


def _left() -> list[str]:
    """Return the command lines of sandboxed processes that this process started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"inside.start" in b" ".join(words) and str(os.getpid()).encode() in words:
            found.append(str(words))
    return found


def killed(times: int) -> Outcome:
    """Return what a program's run comes to whose process something outside kills as often."""
    watched, done = Watched(), threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < times and not done.is_set():
            # The witness is a child of ours, the program a child of its.
            witness = None if watched.process is None else watched.process.pid
            with contextlib.suppress(OSError, ProcessLookupError):
                for pid in map(int, Path(f"/proc/{witness}/task/{witness}/children").read_text().split()):
                    if pid not in killed and "S" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
            time.sleep(0.005)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        return LinuxSandbox(SandboxLimits(wall_seconds=4.0)).run_now(
            "import time\ntime.sleep(1)\nprint('whole')", "", watched
        )
    finally:
        done.set()
        thread.join()


def test_a_program_that_something_outside_kills_is_run_again():
    """Killed once, it runs again and is whole; killed twice, nobody can judge it: refused, which is no verdict."""
    once, twice = killed(1), killed(2)

    assert (once.cause, once.stdout) == (None, "whole\n")
    assert twice.cause == "refused"
    assert "killed or stopped it twice" in twice.stderr


def test_a_program_cannot_kill_itself_as_the_memory_killer_would():
    """SIGKILL to itself is refused: a wrong program cannot make an error of its reward of 0."""
    source = "import os\ntry:\n    os.kill(os.getpid(), 9)\nexcept PermissionError:\n    print('refused')\n"

    assert LinuxSandbox(SandboxLimits(wall_seconds=5.0)).run_now(source).stdout == "refused\n"
