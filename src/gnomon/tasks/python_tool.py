"""The Python tool: code that the policy writes, run in the sandbox, its output given back. No torch."""

import asyncio
import functools
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gnomon.rewards.sandbox.base import NotRun, Outcome, Sandbox, SandboxLimits
from gnomon.rewards.sandbox.bubblewrap import BUBBLEWRAP
from gnomon.rewards.sandbox.container import Container, ContainerSandbox
from gnomon.rewards.sandbox.interpreter import Interpreter
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.selftest import Kind, choose

LONGEST_OUTPUT = 4000
"""Characters of output that the policy sees: the beginning and the end of more."""
ENDED = "[the interpreter ended, and what it defined is gone]"
CONTAINER_ENDED = "[the container ended; the next call begins in a new one]"

_SHARE = 0.8  # of a reply's time: the sandbox ends the program before the host is ended


def _nothing() -> None:
    """Let go of nothing."""


@dataclass(frozen=True)
class PythonTool:
    """The tool of one rollout: what the policy calls, and what ends its interpreter."""

    call: Callable[[str], Awaitable[str]]
    end: Callable[[], None] = _nothing


def python_tool(timeout_seconds: float, walls: Kind, packages: tuple[str, ...] = (), calls: int = 1) -> PythonTool:
    """Return the tool over this machine's sandbox, which has most of a reply's time.

    Args:
        timeout_seconds: Seconds of wall time for one reply.
        calls: Calls that are expected of one rollout; its interpreter has the processor time of so many.

    Raises:
        ConfigError: Nothing isolates on this machine as ``walls`` asks, or a package is not installed.
    """
    sandbox = _sandbox(_SHARE * timeout_seconds, walls, packages, calls)
    if isinstance(sandbox, LinuxSandbox) and BUBBLEWRAP not in sandbox.walls:
        return kept(sandbox)
    return PythonTool(over(sandbox))


def kept(sandbox: LinuxSandbox) -> PythonTool:
    """Return the tool over an interpreter that is kept until the rollout ends."""
    # The template is started before workers are forked, so that all of them share one.
    sandbox.forking().warm()
    made: list[Interpreter] = []

    async def python(code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression. Variables are kept.

        Args:
            code: the code; it can use what earlier code defined
        """
        if not made:
            # Drawn from the generator that the worker seeded for this rollout, so that a resumed run repeats it.
            made.append(Interpreter(sandbox, random.getrandbits(63)))
        try:
            outcome = await asyncio.to_thread(made[0].run, code)
        except asyncio.CancelledError:
            made.pop().stop()
            raise
        return shown(outcome) if outcome.cause is None else f"{shown(outcome)}\n{ENDED}"

    def end() -> None:
        while made:
            made.pop().close()

    return PythonTool(python, end)


class ContainerTools:
    """The tools of one rollout over one container; a new one has the row's files again."""

    def __init__(self, sandbox: ContainerSandbox) -> None:
        self._sandbox, self._open, self._files = sandbox, list[Container](), dict[str, bytes]()

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Files are kept from one call to the next, variables are not.

        Args:
            code: the whole program; print what you want to see
        """
        return await self._shown(lambda: self._container().python(code))

    async def shell(self, command: str) -> str:
        """Run a shell command and return what it prints. Files are kept from one call to the next.

        Args:
            command: the command, for sh
        """
        return await self._shown(lambda: self._container().run(["sh", "-c", command]))

    def begin(self, files: dict[str, str]) -> None:
        """Start the container and write files into it.

        Raises:
            OSError, NotRun: As `Container`.
        """
        self._files = {path: text.encode(errors="replace") for path, text in files.items()}
        self._container()

    def end(self) -> None:
        """Remove the container."""
        while self._open:
            self._open.pop().close()

    def _container(self) -> Container:
        if not self._open:
            self._open.append(Container(self._sandbox))
            for path, content in self._files.items():
                self._open[0].put(path, content)
        return self._open[0]

    async def _shown(self, run: Callable[[], Outcome]) -> str:
        outcome = await asyncio.to_thread(run)
        # A command may have ended the container, by using up its memory for one.
        if not self._container().is_ended:
            return shown(outcome)
        self.end()
        return f"{shown(outcome)}\n{CONTAINER_ENDED}"


def over(sandbox: Sandbox) -> Callable[[str], Awaitable[str]]:
    """Return the tool over a sandbox that runs whole programs."""

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: the whole program; print what you want to see
        """
        outcome = await sandbox.run(code)
        if outcome.cause == "refused":
            raise NotRun(outcome.stderr)
        return shown(outcome)

    return python


def shown(outcome: Outcome) -> str:
    """Return what the policy sees of an outcome: output, then the end of the errors, then the cause.

    A program that fails is no fault of the tool: its error is the reply.
    """
    parts = [outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")]
    parts += [f"[ended: {outcome.cause}]"] if outcome.cause is not None else []
    text = "\n".join(part for part in parts if part) or "[no output]"
    if len(text) <= LONGEST_OUTPUT:
        return text
    # The end is kept as well: that is where an error stands.
    half = LONGEST_OUTPUT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


@functools.cache
def _sandbox(wall_seconds: float, walls: Kind, packages: tuple[str, ...], calls: int) -> Sandbox:
    """Return this machine's sandbox, its walls tried out once."""
    # One process serves all calls of a rollout, and its limit on processor time cannot be reset between them.
    seconds = max(10, math.ceil(wall_seconds)) * calls
    bounds = SandboxLimits(wall_seconds=wall_seconds, cpu_seconds=seconds, output_kib=64)
    sandbox, _ = choose(walls, bounds, packages)
    return sandbox
