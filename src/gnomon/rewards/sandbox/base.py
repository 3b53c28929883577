"""What a sandbox is asked, what it answers, and what it may use."""

from dataclasses import dataclass
from typing import Protocol

from gnomon.core.errors import bounded


@dataclass(frozen=True)
class Outcome:
    """What one program did.

    Attributes:
        stdout: What it wrote, decoded as UTF-8 (what is none becomes U+FFFD), up to the output limit; paths of the
            machine's Python are replaced by ``python``.
        stderr: What it wrote, decoded as UTF-8 (what is none becomes U+FFFD), up to the output limit; paths of the
            machine's Python are replaced by ``python``.
        cause: Why it did not end well. None: it ended by itself with status 0. Else "exit N", "time" (wall or processor
            time), "memory", "output" (it wrote more than allowed), "signal N", or "refused" (the machine would not
            isolate it, or something outside killed it twice; ``stderr`` says what).
        seconds: Wall time, the start of the process included.
    """

    stdout: str
    stderr: str
    cause: str | None
    seconds: float


class NotRun(Exception):
    """The sandbox did not run a program to its end, and the program did not end itself: nobody can judge it."""


class Sandbox(Protocol):
    """Runs one Python program in a fresh place that it cannot leave, and forgets the place afterwards."""

    async def run(self, source: str, stdin: str = "") -> Outcome:
        """Run ``source`` as ``__main__`` with ``stdin`` to read. Never raises for a bad program."""


@dataclass(frozen=True)
@bounded(
    "sandbox",
    wall_seconds="above 0",
    cpu_seconds="at least 1",
    memory_mib="at least 64",
    output_kib="at least 1",
    files_mib="at least 1",
    threads="at least 1",
)
class SandboxLimits:
    """What one program may use.

    Attributes:
        wall_seconds: Wall time, > 0; whichever of the two ends first ends the program.
        cpu_seconds: Processor time, > 0.
        memory_mib: MiB of address space, so a little more than it can fill; >= 64.
        output_kib: KiB of standard output, and as much again of standard error; more ends the program; > 0.
        files_mib: MiB of all files in its own temporary directory, > 0; gone with the program.
        threads: That it may start, > 0. Processes it may start: none.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_mib: int = 1024
    output_kib: int = 1024
    files_mib: int = 16
    threads: int = 64
