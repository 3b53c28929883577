"""All contenders, one after another, under the same conditions; light, so that it adds nothing to what they use."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.contender import CONTENDERS, UNTUNED
from benchmarks.harness.limits import with_limits
from benchmarks.harness.peers import PeerProgram, at_hand, programs
from benchmarks.harness.report import BenchReport, BenchResult
from benchmarks.harness.sizes import Size, size_of
from benchmarks.harness.timing import lap, wait_until_idle
from gnomon import SPIN
from gnomon.core.errors import ConfigError, RunError, unknown
from gnomon.core.progress import show_progress, track
from gnomon.core.redaction import without_secrets

CASES = tuple(CONTENDERS)
_MODULE = "benchmarks.harness.contender"
ALLOCATOR = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:glibc.malloc.top_pad=268435456"
"""What `learner.machine.tune_allocator` asks of glibc, as an environment variable, so that peers have it too."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Conditions:
    """What every contender gets.

    threads: of arithmetic. limit_seconds: for one contender; one that takes longer is stopped and shows what it has by
    then. quiet_seconds: to wait, before each, for other programs to be quiet. only: the one contender of ours that is
    measured in each case; "" measures all.
    """

    threads: int
    limit_seconds: float = 1800.0
    quiet_seconds: float = 60.0
    only: str = ""

    def environment(self, is_tuned: bool) -> dict[str, str]:
        """Return the environment of a contender; how threads wait is left to it, or as the user has it."""
        threads = str(self.threads)
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
        own |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if is_tuned:
            own["GLIBC_TUNABLES"] = ALLOCATOR
        inherited = dict(os.environ)
        # What `import gnomon` has just chosen for this process is not the user's wish, and no peer's setting.
        if inherited.get("GOMP_SPINCOUNT") == SPIN and inherited.get("OMP_WAIT_POLICY") == "PASSIVE":
            inherited = {name: value for name, value in inherited.items() if name not in _WAITING}
        return {**inherited, **own}


def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, else the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def checked(cases: Sequence[str]) -> tuple[str, ...]:
    """Return the cases, all without any. Raises: ConfigError naming the nearest for one that there is not."""
    for case in cases:
        if case not in CASES:
            raise ConfigError(unknown("case", case, CASES))
    return tuple(dict.fromkeys(cases)) or CASES


def conduct(
    cases: Sequence[str],
    size: Size,
    repeats: int,
    conditions: Conditions,
    pythons: Sequence[str] = (),
    say: Say = lambda line: None,
) -> BenchReport:
    """Return what everybody showed in ``cases``.

    The roofline is measured in any case, in the same run: the limits come from it. Peers run in the interpreters
    ``pythons``, or in this one where it has them. A contender that fails is reported with its error, and the others go
    on.
    Raises: ConfigError for a case that there is not, or an interpreter that cannot be run; RunError when the roofline
    itself cannot be measured.
    """
    asked, found = checked(cases), at_hand(pythons)
    named = [(case, name) for case in asked if case != "roofline" for name in CONTENDERS[case]]
    kept = [(case, name) for case, name in named if conditions.only in ("", name)]
    if not kept and conditions.only:
        raise ConfigError(unknown("contender", conditions.only, [name for _, name in named]))
    own = [_own(case, name, size, repeats) for case, name in (("roofline", "gnomon"), *kept)]
    roofline = play(own[0], conditions, say)
    if roofline.error is not None:
        raise RunError(f"the machine's ceilings cannot be measured: {roofline.error}")
    facts = dict(roofline.facts)
    machine: dict[str, Any] = facts.pop("machine")
    roofline = replace(roofline, facts=facts)
    results = [roofline]
    with tempfile.TemporaryDirectory(prefix="gnomon-bench-") as folder:
        work = Path(folder) / "work.json"
        others = programs(asked, found, work, repeats, machine["precision"])
        if others:
            work.write_text(_last_line(Ran.of(_contender("work", "-", size.name, folder), conditions), "the work"))
        order = sorted([*own[1:], *others], key=lambda program: [*asked].index(program.case))
        each = track(order, "measuring", len(order))
        results += [with_limits(play(program, conditions, say), roofline) for program in each]
    settings = {
        "size": size.name,
        "repeats": repeats,
        "threads": conditions.threads,
        "allocator": ALLOCATOR,
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default"),
    }
    return BenchReport(machine, settings, tuple(results))


def profile(part: str, size: Size, conditions: Conditions) -> str:
    """Return a table of the operators in which "generate" or "update" of the fixed work's step spends its time."""
    ran = Ran.of(_contender("profile", part, size.name, "1"), conditions)
    return str(json.loads(_last_line(ran, f"the profile of '{part}'")))


def _contender(*words: str) -> PeerProgram:
    return PeerProgram(words[0], words[1], (sys.executable, "-m", _MODULE, *words))


def _own(case: str, name: str, size: Size, repeats: int) -> PeerProgram:
    return replace(_contender(case, name, size.name, str(repeats)), is_tuned=(case, name) not in UNTUNED)


def play(program: PeerProgram, conditions: Conditions, say: Say) -> BenchResult:
    """Return what one contender shows; a failure, or that it was stopped, is part of the result."""
    with show_progress("waiting for other programs to be quiet", is_brief=True):
        is_quiet = not conditions.quiet_seconds or wait_until_idle(conditions.quiet_seconds)
    if not is_quiet:
        say(f"the machine is not quiet: what other programs do is in the numbers of {program.case}")
    say(f"{program.case}: {program.contender} ...")
    with show_progress(f"measuring {program.contender}", is_brief=True), lap() as measured:
        ran = Ran.of(program, conditions)
    spent = {"wall_seconds": round(measured.seconds, 2), "peak_process_gib": round(ran.peak_gib, 3)}
    if measured.others is not None:
        spent["other_cores"] = round(measured.others, 2)
    rows = [line for line in ran.said.splitlines() if line.startswith('{"case"')]
    if not rows:
        return BenchResult(program.case, program.contender, (), spent, ran.why or "it printed no result")
    result = BenchResult.from_row(json.loads(rows[-1]))
    facts = {**result.facts, **spent, **({"stopped": ran.why} if ran.why else {})}
    return replace(result, case=program.case, contender=program.contender, facts=facts)


def _last_line(ran: "Ran", what: str) -> str:
    lines = ran.said.strip().splitlines()
    if ran.why or not lines:
        raise RunError(f"{what} cannot be made: {ran.why or 'nothing was printed'}")
    return lines[-1]


@dataclass(frozen=True)
class Ran:
    """A program that ended: what it printed, its largest resident size, and why it counts as failed, "" if not."""

    said: str
    peak_gib: float
    why: str

    @classmethod
    def of(cls, program: PeerProgram, conditions: Conditions) -> "Ran":
        """Run a program to its end, or to the end of its time."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            environment = conditions.environment(program.is_tuned)
            running = subprocess.Popen(program.command, stdout=out, stderr=err, env=environment, start_new_session=True)
            late = threading.Event()

            def stop() -> None:
                late.set()
                os.killpg(running.pid, signal.SIGKILL)

            timer = threading.Timer(conditions.limit_seconds, stop)
            timer.start()
            try:
                # Not Popen.wait: only this call says how much memory that one child used.
                _, status, usage = os.wait4(running.pid, 0)
            except BaseException:
                os.killpg(running.pid, signal.SIGKILL)
                raise
            finally:
                timer.cancel()
            running.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            why = ""
            if late.is_set():
                why = f"stopped after {conditions.limit_seconds:.0f} s"
            elif running.returncode:
                last = [line for line in without_secrets(err.read()).splitlines() if line.strip()][-1:]
                why = f"ended with code {running.returncode}: {' '.join(last)[:300]}"
            unit = 2**30 if sys.platform == "darwin" else 2**20
            return cls(out.read(), usage.ru_maxrss / unit, why)


def quick_or_standard(is_quick: bool) -> Size:
    """Return the size by its switch."""
    return size_of("quick" if is_quick else "standard")
