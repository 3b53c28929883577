"""pydantic-monty: an interpreter of a part of Python, written in Rust, that knows no way to the machine."""

import importlib
import time
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.watch import Watched, in_thread


@dataclass(frozen=True)
class Monty:
    """Runs each program in a fresh session of the interpreter, in a process that ends with it.

    It has no generators, no heapq, no sys.stdin and few other modules, so many real programs fail that are right:
    for short sums, and for systems where nothing else isolates. Programs read by ``input()`` alone.
    Source: pydantic-monty 1.4, https://github.com/pydantic/monty.
    """

    bounds: SandboxLimits = SandboxLimits()

    @property
    def name(self) -> str:
        """What reports call it."""
        return "monty"

    async def run(self, source: str, stdin: str = "") -> Outcome:
        """Run ``source`` in a thread.

        Raises:
            ConfigError: If pydantic-monty is not installed.
        """
        return await in_thread(self.run_now, source, stdin)

    def run_now(self, source: str, stdin: str = "", watched: Watched | None = None) -> Outcome:
        """Run ``source`` and wait for it; its own clock ends it.

        Raises:
            ConfigError: As `run`.
        """
        monty = _library()
        lines = iter(stdin.splitlines())

        def read(prompt: str = "") -> str:
            for line in lines:
                return line
            raise EOFError

        limits = {"max_feed_duration_secs": self.bounds.wall_seconds, "max_memory": self.bounds.memory_mib << 20}
        written = monty.CollectStreams(max_bytes=self.bounds.output_kib << 10)
        began, cause, fault = time.monotonic(), None, ""
        try:
            with monty.Monty() as pool, pool.checkout(limits=limits) as session:
                session.feed_run(source, print_callback=written, external_lookup={"input": read})
        except monty.MontyError as error:
            fault = str(error)
            cause = _CAUSES.get(fault.partition(":")[0], "exit 1")
        said = {name: "".join(text for stream, text in written.output if stream == name) for name in _STREAMS}
        return Outcome(said["stdout"], said["stderr"] + fault, cause, time.monotonic() - began)

    def isolation(self) -> str:
        """Return what keeps a program in: an interpreter that has no way out."""
        return "interpreter"


def _library() -> Any:
    try:
        return importlib.import_module("pydantic_monty")
    except ImportError as error:
        raise ConfigError(f"pydantic-monty cannot be imported ({error}): pip install pydantic-monty") from error


_STREAMS = ("stdout", "stderr")
_CAUSES = {"TimeoutError": "time", "MemoryError": "memory"}
