"""Compare what can isolate model-written code: `python experiments/sandbox/compare.py results.json`.

Every isolator meets the same hostile programs, the same solutions and the same clock. One that this machine does not
have is left out. See README.md.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gnomon.core.errors import ConfigError
from gnomon.rewards.sandbox import bubblewrap
from gnomon.rewards.sandbox.audit import BOUNDS, audit
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.linux import LinuxSandbox, python
from gnomon.rewards.sandbox.monty import Monty
from gnomon.rewards.sandbox.selftest import AnySandbox, probe_isolation

SOLUTIONS = tomllib.loads((Path(__file__).parent / "solutions.toml").read_text(encoding="utf-8"))["solution"]
LIMITS = SandboxLimits(wall_seconds=5.0, memory_mib=512)
STARTS = 40
BARE = "Python itself"


def candidates(bounds: SandboxLimits) -> dict[str, AnySandbox]:
    """Return every isolator by the name in the table."""
    return {
        "limits only": LinuxSandbox(bounds, ("none",)),
        "own: namespaces, Landlock, seccomp": LinuxSandbox(bounds),
        "own: Landlock, seccomp": LinuxSandbox(bounds, ("landlock", "seccomp")),
        "bubblewrap": LinuxSandbox(bounds, ("bubblewrap",)),
        "bubblewrap, Landlock, seccomp": LinuxSandbox(bounds, bubblewrap.WALLS),
        "pydantic-monty": Monty(bounds),
    }


def right(sandbox: AnySandbox) -> list[str]:
    """Return the names of the solutions that this sandbox does not run rightly."""
    wrong = []
    for solution in SOLUTIONS:
        outcome = sandbox.run_now(solution["source"], solution["stdin"])
        if outcome.cause is not None or outcome.stdout.rstrip() != solution["expected"]:
            wrong.append(f"{solution['name']}: {outcome.cause}: {outcome.stderr.strip()[-120:]}")
    return wrong


def milliseconds(sandboxes: dict[str, AnySandbox]) -> dict[str, list[float]]:
    """Return wall times of ``print(1)``, start included, all taking turns: other work on the machine meets all."""
    starts: dict[str, Callable[[], object]] = {
        name: partial(sandbox.run_now, "print(1)") for name, sandbox in sandboxes.items()
    }
    starts[BARE] = partial(subprocess.run, [python(), "-s", "-S", "-c", "print(1)"], stdout=subprocess.DEVNULL)
    taken: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(STARTS):
        for name, start in starts.items():
            began = time.perf_counter()
            start()
            taken[name].append(1000 * (time.perf_counter() - began))
    return taken


def main() -> None:
    """Run it all and write the results."""
    limits, small = candidates(LIMITS), candidates(BOUNDS)
    for name in list(limits):
        try:
            works = limits[name].run_now("print(1)").stdout == "1\n"
        except (ConfigError, OSError):
            works = False
        if not works:
            del limits[name], small[name]
    times = milliseconds(limits)
    results = {}
    for name, sandbox in limits.items():
        # What has no walls is asked nine questions; the hostile programs would do their harm.
        seen = probe_isolation(small[name])
        findings = [] if "write outside" in seen.open else audit(small[name])
        through = {finding.probe: list(finding.reached) for finding in findings if finding.reached}
        wrong = right(sandbox)
        results[name] = {
            "walls": seen.walls,
            "nine_probes_open": list(seen.open),
            "hostile_programs": len(findings),
            "got_through": through,
            "solutions": len(SOLUTIONS),
            "not_run_rightly": wrong,
            "milliseconds_median": round(statistics.median(times[name]), 1),
            "milliseconds_fastest": round(min(times[name]), 1),
        }
        print(name, len(through), len(wrong), results[name]["milliseconds_median"], flush=True)
    machine: dict[str, str | float] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "user": os.geteuid(),
    }
    Path(sys.argv[1]).write_text(
        json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
