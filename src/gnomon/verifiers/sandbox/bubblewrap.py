"""Bubblewrap: a setuid-free program that builds namespaces, where the system lets it."""

import os
import sysconfig
from dataclasses import dataclass

from gnomon.verifiers.sandbox.base import Bounds, Outcome
from gnomon.verifiers.sandbox.own import FOLDER, start
from gnomon.verifiers.sandbox.watch import Watched, in_thread, outcome, watch

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


@dataclass(frozen=True)
class Bubblewrap:
    """Runs each program in bubblewrap's namespaces, with walls of ours inside.

    walls: without "seccomp" the program may start processes, which end with it, and speak to the whole kernel.
    Source: bubblewrap 0.8.0, https://github.com/containers/bubblewrap.
    """

    bounds: Bounds = Bounds()
    walls: tuple[str, ...] = ("bubblewrap", "landlock", "seccomp")

    @property
    def name(self) -> str:
        """What reports call it."""
        return "bubblewrap"

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
        inner = start(source, report, self.walls, self.bounds)
        library = sysconfig.get_path("stdlib")
        shown = [p for p in dict.fromkeys((*_SYSTEM, library, os.path.realpath(inner[0]))) if os.path.exists(p)]
        binds = [word for path in shown for word in ("--ro-bind", path, path)]
        return [
            "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv",
            "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0",
            *binds, "--ro-bind", FOLDER, FOLDER, "--dev", "/dev", "--size", str(self.bounds.files_mib << 20),
            "--tmpfs", "/tmp", "--chdir", "/tmp", "--cap-drop", "ALL", os.path.realpath(inner[0]), *inner[1:],
        ]  # fmt: skip
