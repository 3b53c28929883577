"""The program that holds environments: ``python -m gnomon.tasks.env_server FD``. It loads no torch.

It is `core/processes/server.py` with other work: user code is imported once, and each rollout has a forked worker that
holds
its environment from reset to close. A worker is ended with all that it started when it hangs, dies, raises or floods.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.core.processes.exceptions import exception_text, shorten
from gnomon.core.processes.seeding import seed_all
from gnomon.core.processes.server import run_program
from gnomon.core.tables import build
from gnomon.rewards.sandbox.base import NotRun
from gnomon.tasks.agent_program import AgentProgram, check_agent
from gnomon.tasks.env_adapter import EnvAdapter, EnvReply, UserEnv, check_class
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.game_envs import GymnasiumEnv, OpenEnvEnv, TextArenaEnv, check_game, check_server
from gnomon.tasks.tools import ToolRaised, Tools, check_tools
from gnomon.tasks.verifiers_agent import VerifiersAgent, check_taskset
from gnomon.tasks.verifiers_env import VerifiersEnv, check_prime

LONGEST_REPLY = 80_000
"""Characters of a reply that cross to the run, at twelve bytes each within what `worker_pool.LONGEST_ANSWER` allows.

More floods, whatever it would be in tokens.
"""

_PARTNERS: Mapping[str, tuple[Callable[[EnvironmentConfig], EnvAdapter], Callable[[EnvironmentConfig], None]]] = {
    "class": (UserEnv, check_class), "tools": (Tools, check_tools), "trl": (Tools, check_tools),
    "verifiers": (VerifiersEnv, check_prime), "taskset": (VerifiersAgent, check_taskset),
    "agent": (AgentProgram, check_agent), "gymnasium": (GymnasiumEnv, check_game),
    "textarena": (TextArenaEnv, check_game), "openenv": (OpenEnvEnv, check_server),
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
        _PARTNERS[_part(self.plan)][1](self.plan)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return messages, reward and whether it is done; or a fault: how it failed, in one line."""
        try:
            return self._do(request)
        except ToolRaised as error:
            return {"fault": shorten(str(error)), "is_lost": isinstance(error.__cause__, NotRun)}
        except BaseException as error:
            return {"fault": _cause(error)}

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "describe":
                return {"fault": None, "schemas": list(self._made().schemas)}
            case "reset":
                self._adapter = None
                os.environ.update(request.get("variables", {}))
                seed_all(request["luck"], "environment")
                return _told(self._run(self._made().begin(request["prompt"], request["columns"])))
            case "step":
                return _told(self._run(self._made().reply(request["text"])))
            case _:
                adapter, self._adapter = self._made(), None
                try:
                    return {"fault": None, "reward": self._run(adapter.end())}
                finally:
                    self._end_loop()

    def _made(self) -> EnvAdapter:
        if self._adapter is None:
            self._adapter = _PARTNERS[_part(self.plan)][0](self.plan)
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


def hosting(settings: Any) -> EnvServer:
    """Return the handler of a plan that was sent as a table."""
    return EnvServer(build(EnvironmentConfig, settings))


if __name__ == "__main__":
    run_program(hosting)
