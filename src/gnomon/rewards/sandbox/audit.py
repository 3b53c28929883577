"""Try every hostile program on this machine: `python -m gnomon.rewards.sandbox.audit` says what got through."""

import json
import os
import sys
from dataclasses import asdict, dataclass

from gnomon.core.errors import ConfigError
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.hostile import ALL
from gnomon.rewards.sandbox.linux import WALLS, LinuxSandbox
from gnomon.rewards.sandbox.probes import NINE, OPEN, SECRET, Probe, Target, targets
from gnomon.rewards.sandbox.selftest import AnySandbox, probe_isolation

BOUNDS = SandboxLimits(wall_seconds=1.0, memory_mib=256, output_kib=256)
"""Small ones, so that programs which use up all that they may are through soon."""

_NEEDED = {"write outside", "signal the parent", "read a file of the user"}
_HARMLESS = "print(int(input()) + 2)"


@dataclass(frozen=True)
class AuditFinding:
    """What one hostile program did.

    Attributes:
        cause: How it ended.
        is_expected: Whether that is how it should have.
        reached: What it should not have reached, empty when it was stopped.
        seconds: Wall time.
    """

    probe: str
    cause: str | None
    is_expected: bool
    reached: tuple[str, ...]
    seconds: float


def attack(sandbox: AnySandbox, probe: Probe, target: Target) -> AuditFinding:
    """Run one hostile program, and a harmless one right afterwards, which must work as ever."""
    outcome = sandbox.run_now(target.aim(probe))
    reached = target.marks()
    if OPEN in outcome.stdout:
        reached.append(outcome.stdout.strip()[-100:])
    if outcome.cause == "refused":
        reached.append(f"never run: {outcome.stderr[:100]}")
    # Tracebacks name files of the library; these names say where on the machine Python lies.
    if _PATH in outcome.stdout + outcome.stderr:
        reached.append("a path of the machine in what it wrote")
    # A program may also harm the next one: by limits that were used up, files left behind, a template that was damaged.
    after = sandbox.run_now(_HARMLESS, "40")
    if after.cause is not None or after.stdout != "42\n":
        reached.append(f"the next program, which ended by {after.cause}: {after.stderr[-100:]}")
    is_expected = not probe.causes or outcome.cause in probe.causes
    return AuditFinding(probe.name, outcome.cause, is_expected, tuple(reached), outcome.seconds)


def audit(sandbox: AnySandbox) -> list[AuditFinding]:
    """Run hostile programs one after the other, with a secret in this process's environment.

    Raises:
        ConfigError: If the sandbox lets a program write or signal outside: these would do their harm.
    """
    # Without these walls a hostile program would delete files or kill processes of the machine that audits.
    if missing := _NEEDED - set(probe_isolation(sandbox).stopped):
        raise ConfigError(f"hostile programs are not tried without walls, and {sandbox.name} lets them {missing}")
    os.environ[SECRET] = SECRET
    with targets() as target:
        return [attack(sandbox, probe, target) for probe in (*NINE, *ALL)]


_PATH = os.path.dirname(os.path.realpath(os.__file__))


def main() -> None:
    """Print what got through our own walls, those named as the first word (``landlock,seccomp``) if any."""
    walls = tuple(sys.argv[1].split(",")) if len(sys.argv) > 1 else WALLS
    findings = audit(LinuxSandbox(BOUNDS, walls))
    print(json.dumps([asdict(finding) for finding in findings if finding.reached or not finding.is_expected], indent=1))
    print(f"{len(findings)} hostile programs, {sum(bool(f.reached) for f in findings)} got through", file=sys.stderr)


if __name__ == "__main__":
    main()
