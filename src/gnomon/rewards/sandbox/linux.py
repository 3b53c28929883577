"""A fresh process behind walls: Landlock, seccomp and limits, in namespaces of its own or of bubblewrap's."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from gnomon.rewards.sandbox.base import NotRun, Outcome, SandboxLimits
from gnomon.rewards.sandbox.bubblewrap import BUBBLEWRAP, wrapped
from gnomon.rewards.sandbox.packages import folders_of, places, room_mib
from gnomon.rewards.sandbox.template import Forking
from gnomon.rewards.sandbox.watch import (
    Ends,
    SandboxEnding,
    Starting,
    Watched,
    by_command,
    cause_of,
    in_thread,
    outcome,
    watch,
)

WALLS = ("namespaces", "landlock", "seccomp")
FOLDER = str(Path(__file__).resolve().parent)
_KILLED = f"signal {int(signal.SIGKILL)}"
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.start import main, nameless; nameless(); main()"


def python() -> str:
    """Return the interpreter that programs run in: this one's base, so no installed package is on its path."""
    base: str = sys._base_executable  # type: ignore[attr-defined]
    return base or sys.executable


def start(
    source: int, report: int, walls: tuple[str, ...], bounds: SandboxLimits, packages: tuple[str, ...] = ()
) -> list[str]:
    """Return the command that starts a program behind ``walls``, which may import ``packages``."""
    numbers = (bounds.cpu_seconds, bounds.memory_mib + room_mib(packages), bounds.files_mib, bounds.threads)
    # Behind bubblewrap the parent is another process, so the far side cannot check that the one that asked still lives.
    parent = 0 if BUBBLEWRAP in walls else os.getpid()
    words = (parent, source, report, ",".join(walls), *numbers, *places(packages))
    return [python(), "-s", "-S", "-P", "-X", "utf8", "-c", _START, FOLDER, *map(str, words)]


@dataclass(frozen=True)
class LinuxSandbox:
    """Runs each program in one process that may start no other.

    What cannot be had on this machine is left out and missing from the report; `selftest` decides whether what is left
    is enough.

    Attributes:
        walls: Those to try; bubblewrap's without "seccomp" lets a program start processes, which end with it, and speak
            to the whole kernel.
        packages: That programs may import, as `packages.places` knows them.
    """

    bounds: SandboxLimits = SandboxLimits()
    walls: tuple[str, ...] = WALLS
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What reports call it."""
        return BUBBLEWRAP if BUBBLEWRAP in self.walls else "own"

    async def run(self, source: str, stdin: str = "") -> Outcome:
        """Run ``source`` in a thread; cancelling ends the program."""
        return await in_thread(self.run_now, source, stdin)

    def run_now(
        self, source: str, stdin: str = "", watched: Watched | None = None, ends: Ends | None = None
    ) -> Outcome:
        """Run ``source`` and wait for it; once more where something outside killed it.

        Args:
            ends: What it reads from and writes to in place of texts; it is then run once.
        """
        watched = watched or Watched()
        try:
            ending = watch(self._starting(), source, stdin, self.bounds, watched, ends)
            # Run once more. With `ends` it cannot be: the other side has read half of a conversation.
            if ends is None and self._is_foreign(ending, watched):
                ending = watch(self._starting(), source, stdin, self.bounds, watched)
        except NotRun as error:
            return Outcome("", str(error), "refused", 0.0)
        ended = outcome(ending, folders_of(self.packages))
        if ended.cause == "refused" or not self._is_foreign(ending, watched):
            return ended
        why = "something outside of the sandbox killed or stopped it twice (is the machine out of memory?)"
        return Outcome(ended.stdout, why, "refused", ended.seconds)

    def _is_foreign(self, ending: SandboxEnding, watched: Watched) -> bool:
        """Whether neither the program nor its bounds nor the caller ended it.

        What ends without a word was killed before the program began. Later the filter lets it send no SIGKILL.
        """
        if watched.is_ended or ending.cause not in (None, "stopped"):
            return False
        if ending.cause == "stopped":
            return True
        if not ending.report and not ending.stderr:
            return True
        return "walls" in ending.report and self.is_killed(ending.report)

    def is_killed(self, report: dict[str, str]) -> bool:
        """Whether something outside killed a program: the filter lets none send a SIGKILL."""
        return "seccomp" in self.walls and cause_of(report, "") == _KILLED

    def isolation(self) -> str:
        """Return the names of the walls that stand around a program, empty where none is run."""
        return watch(self._starting(), "", "", self.bounds, Watched()).report.get("walls", "")

    def forking(self, is_kept: bool = False, seed: str = "") -> Forking:
        """Return what starts programs from a process that has imported the packages."""
        return Forking((python(), FOLDER), self.walls, self.bounds, self.packages, is_kept, seed)

    def _starting(self) -> Starting:
        # Importing numpy takes longer than a program: a template that has imported
        # it forks. Without packages a fresh interpreter starts fast enough.
        is_forked = self.packages and BUBBLEWRAP not in self.walls
        return self.forking() if is_forked else by_command(self._command)

    def _command(self, source: int, report: int) -> list[str]:
        inner = start(source, report, self.walls, self.bounds, self.packages)
        shown = (FOLDER, *places(self.packages))
        return wrapped(inner, shown, self.bounds.files_mib) if BUBBLEWRAP in self.walls else inner
