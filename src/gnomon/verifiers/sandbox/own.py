"""Our own walls: a fresh process under Landlock, seccomp and limits, in namespaces of its own where allowed."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gnomon.verifiers.sandbox.base import Bounds, Outcome
from gnomon.verifiers.sandbox.watch import Watched, in_thread, outcome, watch

WALLS = ("namespaces", "landlock", "seccomp")
FOLDER = str(Path(__file__).resolve().parent)
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.start import main; main()"


def python() -> str:
    """Return the interpreter that programs run in: this one's base, so no installed package is on its path."""
    base: str = sys._base_executable  # type: ignore[attr-defined]
    return base or sys.executable


def start(source: int, report: int, walls: tuple[str, ...], bounds: Bounds, folder: str = FOLDER) -> list[str]:
    """Return the command that starts a program behind ``walls``."""
    numbers = (bounds.cpu_seconds, bounds.memory_mib, bounds.files_mib, bounds.threads)
    parent = 0 if "bubblewrap" in walls else os.getpid()
    words = (parent, source, report, ",".join(walls), *numbers)
    return [python(), "-s", "-S", "-P", "-X", "utf8", "-c", _START, folder, *map(str, words)]


@dataclass(frozen=True)
class OwnSandbox:
    """Runs each program in one process that may start no other.

    What cannot be had on this machine is left out and missing from the report; `selftest` decides whether what
    is left is enough. walls: those to try.
    """

    bounds: Bounds = Bounds()
    walls: tuple[str, ...] = WALLS

    @property
    def name(self) -> str:
        """What reports call it."""
        return "own"

    async def run(self, source: str, stdin: str = "") -> Outcome:
        """Run ``source`` in a thread; cancelling ends the program."""
        return await in_thread(self.run_now, source, stdin)

    def run_now(self, source: str, stdin: str = "", watched: Watched | None = None) -> Outcome:
        """Run ``source`` and wait for it."""
        return outcome(watch(self._command, source, stdin, self.bounds, watched or Watched()))

    def standing(self) -> str:
        """Return the names of the walls that stand around a program, empty where none is run."""
        return watch(self._command, "", "", self.bounds, Watched()).report.get("walls", "")

    def _command(self, source: int, report: int) -> list[str]:
        return start(source, report, self.walls, self.bounds)
