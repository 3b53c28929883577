"""The program that holds environments: ``python -m gnomon.tasks.env_server FD``. It loads no torch.

It is `core/processes/server.py` with other work: user code is imported once, and each rollout has a forked worker that
holds
its environment from reset to close. A worker is ended with all that it started when it hangs, dies, raises or floods.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.core.errors import ConfigError
from gnomon.core.processes.exceptions import exception_text, shorten
from gnomon.core.processes.seeding import seed_all
from gnomon.core.processes.server import run_program
from gnomon.core.tables import build
from gnomon.rewards.function import find_member
from gnomon.rewards.sandbox.base import NotRun
from gnomon.tasks.environment import (
    EnvAdapter,
    EnvironmentConfig,
    EnvReply,
    Reply,
    UserEnv,
    accepted_arguments,
    check_class,
    check_settings,
    check_text,
    checked_rewards,
    maybe_await,
)
from gnomon.tasks.game_envs import (
    GymnasiumEnv,
    OpenEnvEnv,
    TextArenaEnv,
    TextArenaSelfPlay,
    check_game,
    check_server,
)
from gnomon.tasks.tools import ToolRaised, Tools, check_tools
from gnomon.tasks.verifiers_agent import VerifiersAgent, check_taskset
from gnomon.tasks.verifiers_env import VerifiersEnv, check_verifiers

# An agent in a process of its own: a function of the user's, or a command. No torch.
#
# It finds the policy by environment variables (`rollouts/agent.py`), and runs to its end within one request of
# `tasks/env_server.py`, whose worker is then ended with all that the agent started.

_MOST_BYTES = 1 << 20
"""Of what a command prints."""


class AgentProgram(EnvAdapter):
    """One run of an agent."""

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._plan = plan

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Run it. A text that it returns or prints is its answer, a number or a table its reward, a `Reply` both.

        Raises:
            TypeError: A function returned something else.
            ToolRaised: A command failed, or printed too much.
        """
        if self._plan.command:
            said: Any = await _run(self._plan.command, prompt, columns)
        else:
            function = find_member(self._plan.use, "agent")
            offered = {**{str(name): value for name, value in columns.items()}, "prompt": prompt}
            # Settings win over columns of the same name: the experiment is more explicit than the row.
            given = {**accepted_arguments(function, offered), **self._plan.settings}
            said = await maybe_await(function(**given))
        if said is None or isinstance(said, str):
            said = Reply(said or "")
        elif not isinstance(said, Reply):
            try:
                said = Reply(reward=checked_rewards(said))
            except ValueError as error:
                raise TypeError(f"an agent returns a text, a reward, a Reply or None: {error}") from error
        check_text(said.text, "the agent")
        return EnvReply((("assistant", said.text),) if said.text else (), checked_rewards(said.reward), True)


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
    # The program must see the end of its input, or one that reads all of it would wait for ever.
    program.stdin.close()
    # Both at once: a program that fills one pipe while the other is read would stand still.
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


LONGEST_REPLY = 80_000
"""Characters of a reply that cross to the run, at twelve bytes each within what `processes.pool.LONGEST_ANSWER` allows.

More floods, whatever it would be in tokens.
"""

_ADAPTERS: Mapping[str, tuple[Callable[[EnvironmentConfig], EnvAdapter], Callable[[EnvironmentConfig], None]]] = {
    "class": (UserEnv, check_class), "tools": (Tools, check_tools), "trl": (Tools, check_tools),
    "verifiers": (VerifiersEnv, check_verifiers), "taskset": (VerifiersAgent, check_taskset),
    "agent": (AgentProgram, check_agent), "gymnasium": (GymnasiumEnv, check_game),
    "textarena": (TextArenaEnv, check_game), "self-play": (TextArenaSelfPlay, check_game),
    "openenv": (OpenEnvEnv, check_server),
}  # fmt: skip
"""What is made for each kind, and what checks its settings."""
T = TypeVar("T")


@dataclass
class EnvServer:
    """The handler of an environment worker: requests ``reset``, ``step``, ``close`` and ``describe`` to what an
    environment says.
    """

    plan: EnvironmentConfig
    what: str = "the environment"
    _adapter: EnvAdapter | None = field(default=None, init=False)
    _runner: "asyncio.Runner | None" = field(default=None, init=False)

    def prepare(self) -> None:
        """Import it, and check what can be checked without an instance.

        Raises:
            UserError: The environment cannot be used.
        """
        _ADAPTERS[_part(self.plan)][1](self.plan)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return messages, reward and whether it is done; or a fault: how it failed, in one line."""
        try:
            return self._do(request)
        except ToolRaised as error:
            # A sandbox that did not run is the machine's fault: the rollout is lost and not graded.
            return {"fault": shorten(str(error)), "is_lost": isinstance(error.__cause__, NotRun)}
        except BaseException as error:
            return {"fault": _cause(error)}

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "describe":
                return {"fault": None, "schemas": list(self._made().schemas)}
            case "reset":
                # A worker may have been asked `describe` before; each rollout has an instance of its own.
                self._adapter = None
                os.environ.update(request.get("variables", {}))
                seed_all(request["seed"], "environment")
                return _told(self._run(self._made().begin(request["prompt"], request["columns"])))
            case "step":
                return _told(self._run(self._made().reply(request["text"])))
            case _:
                # Taken off first: an `end` that raises must not be called twice.
                adapter, self._adapter = self._made(), None
                try:
                    return {"fault": None, "reward": self._run(adapter.end())}
                finally:
                    self._end_loop()

    def _made(self) -> EnvAdapter:
        if self._adapter is None:
            self._adapter = _ADAPTERS[_part(self.plan)][0](self.plan)
        return self._adapter

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _end_loop(self) -> None:
        """Cancel what still runs in the background: a loop is one rollout's."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None


def _part(plan: EnvironmentConfig) -> str:
    if plan.is_self_play:
        return "self-play"
    return "taskset" if plan.kind == "verifiers" and plan.is_agent else plan.kind


def _told(said: EnvReply) -> dict[str, Any]:
    length = sum(len(text) for _, text in said.messages)
    if length > LONGEST_REPLY:
        return {"fault": None, "flood": length}
    messages = [list(message) for message in said.messages]
    return {"fault": None, "messages": messages, "reward": said.reward, "is_done": said.is_done}


def _cause(error: BaseException) -> str:
    try:
        return exception_text(error)
    except Exception:  # an exception whose text cannot be made
        return type(error).__name__


def read_handler(settings: Any) -> EnvServer:
    """Return the handler of a plan that was sent as a table."""
    return EnvServer(build(EnvironmentConfig, settings))


if __name__ == "__main__":
    run_program(read_handler)
