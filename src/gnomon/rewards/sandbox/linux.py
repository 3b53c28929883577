"""A fresh process behind walls: Landlock, seccomp and limits, in namespaces of its own or of bubblewrap's."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.bubblewrap import BUBBLEWRAP, wrapped
from gnomon.rewards.sandbox.watch import Ends, Watched, in_thread, outcome, watch

WALLS = ("namespaces", "landlock", "seccomp")
FOLDER = str(Path(__file__).resolve().parent)
_KILLED = f"signal {int(signal.SIGKILL)}"
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.start import main, nameless; nameless(); main()"


def python() -> str:
    """Return the interpreter that programs run in: this one's base, so no installed package is on its path."""
    base: str = sys._base_executable  # type: ignore[attr-defined]
    return base or sys.executable


def start(source: int, report: int, walls: tuple[str, ...], bounds: SandboxLimits, folder: str = FOLDER) -> list[str]:
    """Return the command that starts a program behind ``walls``."""
    numbers = (bounds.cpu_seconds, bounds.memory_mib, bounds.files_mib, bounds.threads)
    parent = 0 if BUBBLEWRAP in walls else os.getpid()
    words = (parent, source, report, ",".join(walls), *numbers)
    return [python(), "-s", "-S", "-P", "-X", "utf8", "-c", _START, folder, *map(str, words)]


@dataclass(frozen=True)
class LinuxSandbox:
    """Runs each program in one process that may start no other.

    What cannot be had on this machine is left out and missing from the report; `selftest` decides whether what
    is left is enough. walls: those to try; bubblewrap's without "seccomp" lets a program start processes, which
    end with it, and speak to the whole kernel.
    """

    bounds: SandboxLimits = SandboxLimits()
    walls: tuple[str, ...] = WALLS

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

        ends: what it reads from and writes to in place of texts; it is then run once.
        """
        watched = watched or Watched()
        ended = outcome(watch(self._command, source, stdin, self.bounds, watched, ends))
        if ends is None and self._is_foreign(ended, watched):
            ended = outcome(watch(self._command, source, stdin, self.bounds, watched))
        if not self._is_foreign(ended, watched):
            return ended
        why = "something outside of the sandbox killed it twice (is the machine out of memory?)"
        return Outcome(ended.stdout, why, "refused", ended.seconds)

    def _is_foreign(self, ended: Outcome, watched: Watched) -> bool:
        """Whether neither the program nor its bounds nor whoever asked ended it: the filter lets it send no SIGKILL."""
        return ended.cause == _KILLED and "seccomp" in self.walls and not watched.is_ended

    def isolation(self) -> str:
        """Return the names of the walls that stand around a program, empty where none is run."""
        return watch(self._command, "", "", self.bounds, Watched()).report.get("walls", "")

    def _command(self, source: int, report: int) -> list[str]:
        inner = start(source, report, self.walls, self.bounds)
        return wrapped(inner, FOLDER, self.bounds.files_mib) if BUBBLEWRAP in self.walls else inner
