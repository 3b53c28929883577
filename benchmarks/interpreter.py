"""How long the Python tool's interpreter takes to start and to answer: `python -m benchmarks.interpreter`."""

import importlib.util
import statistics
import time

from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.interpreter import Interpreter
from gnomon.rewards.sandbox.linux import WALLS, LinuxSandbox
from gnomon.rewards.sandbox.packages import KNOWN

_TIMES = 40


def main() -> None:
    """Print milliseconds: importing once, then the first and a later call of each of forty interpreters."""
    packages = tuple(name for name in KNOWN if importlib.util.find_spec(name) is not None)
    sandbox = LinuxSandbox(SandboxLimits(), WALLS, packages)
    began = time.perf_counter()
    sandbox.forking().warm()
    print(f"importing {', '.join(packages)}: {1e3 * (time.perf_counter() - began):.0f} ms, once for a run")
    first, later = [], []
    for seed in range(_TIMES):
        interpreter = Interpreter(sandbox, seed)
        for taken in (first, later):
            began = time.perf_counter()
            interpreter.run("x = 5")
            taken.append(1e3 * (time.perf_counter() - began))
        interpreter.close()
    for name, taken in (("first call, start included", first), ("later call", later)):
        print(f"{name}: median {statistics.median(taken):.1f} ms, fastest {min(taken):.1f}, slowest {max(taken):.1f}")


if __name__ == "__main__":
    main()
