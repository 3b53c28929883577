"""Programs that attack: each is stopped, leaves nothing behind, and the next program works as ever."""

import importlib.util
import os
import sys

import pytest

from gnomon.core.errors import ConfigError
from gnomon.rewards.base import Sample
from gnomon.rewards.code.reward import Code
from gnomon.rewards.sandbox.audit import BOUNDS, attack, audit
from gnomon.rewards.sandbox.hostile import (
    ALL,
    ANSWERS,
    FILES,
    KERNEL,
    NETWORK,
    PACKAGED,
    PROCESSES,
    RESOURCES,
    SECRETS,
    TIMING,
)
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.probes import NINE, Probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="our own walls are Linux's")

KINDS = (RESOURCES, FILES, NETWORK, PROCESSES, KERNEL, SECRETS, ANSWERS, TIMING)
# Every third one of each kind, so that the quick tests stay quick; the slow ones try all.
QUICK = [probe for kind in KINDS for probe in kind[::3]]


PACKAGES = tuple(n for n in ("numpy", "sympy", "pandas", "scipy") if importlib.util.find_spec(n))
THROUGH = [probe for probe in PACKAGED if "scipy" in PACKAGES or "scipy" not in probe.name]
needs_packages = pytest.mark.skipif(len(PACKAGES) < 3, reason="numpy, sympy or pandas is not installed")
# Those that only read or leave a mark.
REAL = (
    "numpy reads a file", "numpy maps a file", "numpy writes", "numpy maps to write", "numpy's ctypes",
    "a pickle in an array", "sympy evaluates a command", "sympy makes a function of text",
    "pandas writes", "what lies beside a package", "scipy reads a file", "scipy writes", "scipy writes a table",
    "scipy calls the C library",
)  # fmt: skip


def name(probe: Probe) -> str:
    """Return what a probe is called."""
    return probe.name


def test_there_are_many():
    """At least forty of our own besides the nine, each with a name of its own within its kind."""
    assert len(ALL) + len(NINE) == 138
    assert len({(probe.name, probe.source) for probe in (*NINE, *ALL)}) == len(ALL) + len(NINE)


@pytest.mark.parametrize("probe", QUICK, ids=name)
def test_an_attack_is_stopped(probe, target):
    """The harm does not happen, the program ends, and a harmless program runs right afterwards."""
    sandbox = LinuxSandbox(BOUNDS)

    finding = attack(sandbox, probe, target)

    assert finding.reached == ()
    assert finding.is_expected, finding.cause


@pytest.mark.slow
@pytest.mark.parametrize("probe", [*NINE, *ALL], ids=name)
@pytest.mark.parametrize("walls", ["namespaces,landlock,seccomp", "landlock,seccomp"])
def test_every_attack_is_stopped_with_and_without_namespaces(probe, walls, target):
    """Where a system allows no namespaces, the other walls still stop everything."""
    finding = attack(LinuxSandbox(BOUNDS, tuple(walls.split(","))), probe, target)

    assert finding.reached == ()
    assert finding.is_expected, finding.cause


WALLED = ["namespaces,landlock,seccomp", "landlock,seccomp"]


@needs_packages
@pytest.mark.parametrize("probe", THROUGH, ids=name)
@pytest.mark.parametrize("walls", [WALLED[0], pytest.param(WALLED[1], marks=pytest.mark.slow)])
def test_an_attack_through_a_package_is_stopped(probe, walls, target):
    """Arrays over files and memory, compilers, evaluated texts, pickles, and the process that imported them."""
    finding = attack(LinuxSandbox(BOUNDS, tuple(walls.split(",")), PACKAGES), probe, target)

    assert finding.reached == ()
    assert finding.is_expected, finding.cause


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("probe", [*NINE, *ALL], ids=name)
@pytest.mark.parametrize("walls", WALLED)
def test_every_attack_is_stopped_where_packages_are_allowed(probe, walls, target):
    """A program that was forked from the process with the packages is as walled in as any."""
    finding = attack(LinuxSandbox(BOUNDS, tuple(walls.split(",")), PACKAGES), probe, target)

    assert finding.reached == ()
    assert finding.is_expected, finding.cause


@needs_packages
@pytest.mark.parametrize("probe", [p for p in THROUGH if p.name in REAL], ids=name)
def test_attacks_through_packages_are_real(probe, target):
    """Without walls they get through."""
    assert attack(LinuxSandbox(BOUNDS, ("none",), PACKAGES), probe, target).reached


def test_hostile_programs_are_not_tried_without_walls():
    """An audit of a sandbox that lets programs write outside is refused before the first of them runs."""
    with pytest.raises(ConfigError, match="not tried without walls"):
        audit(LinuxSandbox(BOUNDS, ("seccomp",)))


# Only those that read or leave a mark: the others would do their harm.
@pytest.mark.parametrize("probe", [FILES[0], FILES[3], FILES[5], NETWORK[0], PROCESSES[9]], ids=name)
def test_the_attacks_are_real(probe, target):
    """Without walls the same programs get through, so a probe that is stopped was stopped by a wall."""
    finding = attack(LinuxSandbox(BOUNDS, ("none",)), probe, target)

    assert finding.reached or os.geteuid() != 0


# None of these does harm: they read. Where there are no namespaces the number of another process means something.
@pytest.mark.parametrize(
    "probe", [p for p in TIMING if p.name.endswith(("'s clock", "clock is")) and "wait" not in p.name], ids=name
)
def test_clocks_of_others_are_there_to_be_read(probe, target):
    """Without the filter of calls a program knows how long the grader computed; with it, with no walls else, not."""
    found = attack(LinuxSandbox(BOUNDS, ("none",)), probe, target)
    walled = attack(LinuxSandbox(BOUNDS, ("seccomp",)), probe, target)

    assert found.reached
    assert walled.reached == ()


@pytest.mark.parametrize(
    "source", ["import time; time.sleep(600)", "import atexit, time; atexit.register(time.sleep, 9)"]
)
def test_a_right_answer_that_stalls_is_not_right(source):
    """What was said before the time was up counts for nothing: the program did not end by itself."""
    grade = Code(case_seconds=0.5, total_seconds=1.0)(
        Sample(
            "",
            f"```python\nprint(int(input()) + 1, flush=True)\n{source}\n```",
            columns={"tests": [{"input": "1\n", "output": "2\n"}]},
        )
    )

    assert grade == 0.0
