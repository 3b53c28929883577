"""An agent in a process of its own: a function of the user's, or a command. No torch.

It finds the policy by environment variables (`rollouts/agent.py`), and runs to its end within one request of
`tasks/env_server.py`, whose worker is then ended with all that the agent started.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.rewards.function import find_member
from gnomon.tasks.env_adapter import (
    EnvReply,
    accepted_arguments,
    check_settings,
    check_text,
    checked_reward,
    maybe_await,
)
from gnomon.tasks.environment import EnvironmentConfig, Reply
from gnomon.tasks.tools import ToolRaised

_MOST_BYTES = 1 << 20
"""Of what a command prints."""


class AgentProgram:
    """One run of an agent."""

    schemas: tuple[dict[str, Any], ...] = ()

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._plan = plan

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Run it. A text that it returns or prints is its answer, a number its reward, a `Reply` both.

        Raises:
            TypeError: A function returned something else.
            ToolRaised: A command failed, or printed too much.
        """
        if self._plan.command:
            said: Any = await _run(self._plan.command, prompt, columns)
        else:
            function = find_member(self._plan.use, "agent")
            offered = {**{str(name): value for name, value in columns.items()}, "prompt": prompt}
            given = {**accepted_arguments(function, offered), **self._plan.settings}
            said = await maybe_await(function(**given))
        if said is None or isinstance(said, str):
            said = Reply(said or "")
        elif not isinstance(said, Reply):
            try:
                said = Reply(reward=checked_reward(said))
            except ValueError as error:
                raise TypeError(f"an agent returns a text, a reward, a Reply or None: {error}") from error
        check_text(said.text, "the agent")
        return EnvReply((("assistant", said.text),) if said.text else (), checked_reward(said.reward), True)

    async def reply(self, text: str) -> EnvReply:
        """Never: an agent asks, and is not asked."""
        raise NotImplementedError

    async def end(self) -> float | None:
        """Nothing is left to let go of."""
        return None


async def _run(command: tuple[str, ...], prompt: str, columns: Mapping[str, Any]) -> str:
    """Run a command, its standard input the question as JSON, and return what it printed."""
    program = await asyncio.create_subprocess_exec(
        *(part.replace("{prompt}", prompt) for part in command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdin.write(json.dumps({**columns, "prompt": prompt}, default=str).encode())
    program.stdin.close()
    printed, warned = await asyncio.gather(_read(program.stdout), _read(program.stderr))
    status = await program.wait()
    if status:
        last = warned.decode(errors="replace").strip().rpartition("\n")[2]
        raise ToolRaised(f"{command[0]} ended with status {status}: {last[:200]}")
    return printed.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Return all that is written, to the end.

    Raises:
        ToolRaised: It is more than a program says.
    """
    read = b""
    while some := await stream.read(1 << 16):
        read += some
        if len(read) > _MOST_BYTES:
            raise ToolRaised(f"it printed more than {_MOST_BYTES} bytes")
    return read


def check_agent(plan: EnvironmentConfig) -> None:
    """Import the function and compare the settings with its parameters, or find the command's program.

    Raises:
        RewardError: The function is not found.
        ConfigError: The function takes other settings, or there is no such program.
    """
    if plan.command:
        if shutil.which(plan.command[0]) is None:
            raise ConfigError(f"environment.command begins with '{plan.command[0]}', and there is no such program")
        return
    check_settings(find_member(plan.use, "agent"), plan, is_partial=True)
