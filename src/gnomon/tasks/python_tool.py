"""The Python tool: code that the policy writes, run in the sandbox, its output given back. No torch."""

import functools
from collections.abc import Awaitable, Callable

from gnomon.rewards.sandbox.base import NotRun, Outcome, Sandbox, SandboxLimits
from gnomon.rewards.sandbox.selftest import Kind, choose

LONGEST_OUTPUT = 4000
"""Characters of output that the policy sees: the beginning and the end of more."""

_SHARE = 0.8  # of a reply's time: the sandbox ends the program before the host is ended


def python_tool(timeout_seconds: float, walls: Kind) -> Callable[[str], Awaitable[str]]:
    """Return the tool over this machine's sandbox, which has most of a reply's time.

    Raises:
        ConfigError: Nothing isolates on this machine as ``walls`` asks.
    """
    return over(_sandbox(_SHARE * timeout_seconds, walls))


def over(sandbox: Sandbox) -> Callable[[str], Awaitable[str]]:
    """Return the tool over a sandbox."""

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
    half = LONGEST_OUTPUT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


@functools.cache
def _sandbox(wall_seconds: float, walls: Kind) -> Sandbox:
    """Return this machine's sandbox, its walls tried out once."""
    sandbox, _ = choose(walls, SandboxLimits(wall_seconds=wall_seconds, output_kib=64))
    return sandbox
