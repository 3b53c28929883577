"""Try the walls of this machine, choose a sandbox, and say in words what was enforced."""

import functools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Literal

from gnomon.core.errors import ConfigError
from gnomon.core.progress import show_progress
from gnomon.rewards.sandbox import bubblewrap
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.monty import Monty
from gnomon.rewards.sandbox.packages import places
from gnomon.rewards.sandbox.probes import NINE, OPEN, SECRET, Probe, Target, targets

Kind = Literal["auto", "own", "bubblewrap", "monty", "none"]
AnySandbox = LinuxSandbox | Monty

_PATIENCE = 5.0
_IMPORTING = 10.0  # seconds that the first import of a package may take, from a cold disk
_HEAD = "probe: "
_HOPE = "print(sum(map(int, input().split())))"


@dataclass(frozen=True)
class Isolation:
    """What a sandbox was seen to stop on this machine.

    Attributes:
        name: Name of the sandbox.
        walls: Names of the walls that stand.
        stopped: Names of the probes that were stopped.
        open: Names of the probes that got through.
        packages: Packages that programs may import.
    """

    name: str
    walls: str = ""
    stopped: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say it in one line, for the run card."""
        walls = f" ({self.walls.replace(' ', ', ')})" if self.walls else ""
        given = f"; programs may import {', '.join(self.packages)}" if self.packages else ""
        tried = len(self.stopped) + len(self.open)
        if not tried:
            return f"{self.name}{walls}{given}"
        left = f"; open: {', '.join(self.open)}" if self.open else ""
        return f"{self.name}{walls}: {len(self.stopped)} of {tried} hostile probes stopped{left}{given}"


@functools.cache
def choose(
    kind: Kind = "auto", bounds: SandboxLimits | None = None, packages: tuple[str, ...] = ()
) -> tuple[AnySandbox, Isolation]:
    """Return a sandbox that passed the probes just now, and what it enforces. Takes under two seconds, once.

    Args:
        kind: "auto" takes our own walls, else bubblewrap's; "none" runs without walls and says so.
        packages: That programs may import, behind the same walls.

    Raises:
        ConfigError: If nothing that was asked for isolates on this machine, or a package is not there; it says what to
            install.
    """
    bounds = bounds or SandboxLimits()
    places(packages)
    if kind == "monty" and packages:
        raise ConfigError('sandbox = "monty" imports no packages; take sandbox = "auto", or remove packages')
    if kind == "none":
        sandbox = LinuxSandbox(bounds, ("none",), packages)
        return sandbox, Isolation("none: the user took the risk", "limits", packages=packages)
    # In the order of preference; the first that runs a harmless program and stops every probe is taken.
    failed: list[str] = []
    for candidate in _candidates(kind, bounds, packages):
        with show_progress(f"trying the sandbox {candidate.name}"):
            fault = _fault(candidate, packages)
            enforced = Isolation(candidate.name) if fault else probe_isolation(candidate)
            enforced = replace(enforced, packages=packages)
        if fault is None and not enforced.open:
            return candidate, enforced
        failed.append(f"{candidate.name}: {fault or 'did not stop: ' + ', '.join(enforced.open)}")
    raise ConfigError(
        f"nothing on this machine isolates model-written code, so none is run ({'; '.join(failed) or sys.platform}). "
        "On Linux use a kernel from 5.13 on with Landlock, or install bubblewrap (Debian, Ubuntu: apt install "
        "bubblewrap) where user namespaces are allowed; elsewhere pip install pydantic-monty and set sandbox = "
        "'monty', which runs a part of Python. sandbox = 'none' runs it with your own rights: only on a machine "
        "that you can lose"
    )


def enforced_by(asked: Iterable[tuple[Kind, tuple[str, ...]]]) -> str:
    """Return what sandboxes of these kinds, with these packages, enforce: words for the run card.

    Raises:
        ConfigError: As `choose`.
    """
    said = dict.fromkeys(str(choose(kind, None, packages)[1]) for kind, packages in asked)
    return "; ".join(said) or "none: no model-written code"


def probe_isolation(sandbox: AnySandbox) -> Isolation:
    """Run hostile programs and report which were stopped.

    First the nine, which do no harm where nothing stands; where all of them are stopped, `MORE`, which need walls to
    be tried at all. (A sandbox that runs a part of Python stops those by not knowing what they call, and is spared.)
    """
    from gnomon.rewards.sandbox.hostile import MORE

    patient = replace(sandbox, bounds=replace(sandbox.bounds, wall_seconds=_PATIENCE, memory_mib=512))
    stopped = _stopped(patient, NINE)
    tried: tuple[Probe, ...] = NINE
    # The other probes fork, fill memory or attack the kernel: they
    # are run only behind walls that were just seen to stand.
    if len(stopped) == len(NINE) and not isinstance(sandbox, Monty):
        stopped, tried = stopped + _stopped(patient, MORE), NINE + MORE
    left = tuple(probe.name for probe in tried if probe.name not in stopped)
    return Isolation(sandbox.name, patient.isolation(), stopped, left)


def _stopped(sandbox: AnySandbox, probes: tuple[Probe, ...]) -> tuple[str, ...]:
    """Return the names of probes that were stopped, tried together: one start instead of many.

    One that was not run to its end counts as open, and so do all when one of them left a mark outside.
    """
    was = os.environ.get(SECRET)
    os.environ[SECRET] = "x"
    try:
        with targets() as target:
            said = sandbox.run_now(_together(probes, target)).stdout
            is_marked = bool(target.marks())
    finally:
        if was is None:
            del os.environ[SECRET]
    reports = dict(part.partition("\n")[::2] for part in said.split(_HEAD)[1:])
    # A probe without a line was never reached, so one before it ended the program: nothing can be said of any.
    if is_marked or any(probe.name not in reports for probe in probes):
        return ()
    return tuple(probe.name for probe in probes if OPEN not in reports[probe.name])


def _together(probes: Iterable[Probe], target: Target) -> str:
    """Return one program that tries all probes, one after the other."""
    parts = [
        f"print({_HEAD + probe.name!r}, flush=True)\ntry:\n{indent(target.aim(probe), '    ')}\n"
        "except BaseException:\n    pass\n"
        for probe in probes
    ]
    return "".join(parts)


def _fault(sandbox: AnySandbox, packages: tuple[str, ...]) -> str | None:
    """Return why a harmless program does not run, None when it does."""
    patient = replace(sandbox, bounds=replace(sandbox.bounds, wall_seconds=_PATIENCE + _IMPORTING * len(packages)))
    try:
        outcome = patient.run_now("".join(f"import {name}\n" for name in packages) + _HOPE, "20 22")
    except (ConfigError, OSError) as error:
        return str(error)
    if outcome.cause is None and outcome.stdout.strip() == "42":
        return None
    return f"a harmless program ended with {outcome.cause}: {outcome.stderr[-200:].strip()}"


def _candidates(kind: Kind, bounds: SandboxLimits, packages: tuple[str, ...]) -> list[AnySandbox]:
    if kind == "monty":
        return [Monty(bounds)]
    if sys.platform != "linux":
        return []
    # Some systems let any user enter namespaces and then forbid to mount there: the other walls still stand.
    own: list[AnySandbox] = [
        LinuxSandbox(bounds, packages=packages),
        LinuxSandbox(bounds, ("landlock", "seccomp"), packages),
    ]
    wrapped: list[AnySandbox] = [LinuxSandbox(bounds, bubblewrap.WALLS, packages)]
    return {"auto": own + wrapped, "own": own, "bubblewrap": wrapped}[kind]
