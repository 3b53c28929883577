"""Tasksets of the ``verifiers`` package from version 0.4, whose harnesses call the policy by themselves. No torch.

An episode of the package runs within one request of `tasks/env_server.py`, as an agent of the user's does: its own
environment, harness, tools and rewards, its model the rollout's address (`rollouts/agent.py`).
"""

import asyncio
import functools
import importlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError
from gnomon.core.processes.exceptions import exception_text
from gnomon.tasks.environment import EnvAdapter, EnvironmentConfig, EnvReply, checked_reward, foreign_package
from gnomon.tasks.tools import ToolRaised


class VerifiersAgent(EnvAdapter):
    """One episode on the task whose number is the row's column ``index``.

    ``use`` is the taskset; ``settings`` is the package's table ``[env]``, with its ``id``, ``taskset`` and roles.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._environment = _loaded(plan.use, json.dumps(plan.settings), plan.max_turns)

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Run it; its reward is the mean over what the policy played and is trained on.

        Raises:
            ToolRaised: The episode failed, or the row names no task.
        """
        index = columns.get("index")
        tasks = self._environment.taskset
        task = next(itertools.islice(tasks, index, None), None) if isinstance(index, int) and index >= 0 else None
        if task is None:
            raise ToolRaised(f"the row's column index = {index!r} is no task; write rows by {write_questions.__name__}")
        package = _package()
        client = package.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
        async with self._environment.serving():
            episode = await self._environment.run_episode(
                task, package.ModelContext(os.environ["OPENAI_MODEL"], client)
            )
        failed = [error for part in (*episode.traces, episode) for error in part.errors]
        if not episode.ok:
            raise ToolRaised(f"{failed[-1].type}: {failed[-1].message}" if failed else "the episode is not complete")
        # Roles that another model plays are not trained on, and their rewards are not the policy's.
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        return EnvReply((), checked_reward(sum(rewards) / len(rewards)) if rewards else None, True)


def check_taskset(plan: EnvironmentConfig) -> None:
    """Load taskset, environment and harnesses once.

    Raises:
        ConfigError: They cannot be loaded; a program would run on this machine unasked; or the policy would be trained
            on a role that the environment does not train.
    """
    package, environment = _package(), _loaded(plan.use, json.dumps(plan.settings), plan.max_turns)
    roles: dict[str, Any] = {}

    def make(name: str, spec: Any) -> Any:
        return roles.setdefault(name, SimpleNamespace(trainable=True, config=spec))

    asyncio.run(environment.setup(package.Agents(environment.config, make)))
    # Each role's harness may run programs, and the default would run them on this machine without a word.
    for name, role in roles.items():
        harness = environment.config.agent_harnesses()[name]
        runs_code = _loaders().harness_class(harness.id).EXECUTES_CODE
        if runs_code and "runtime" not in plan.settings.get(name, {}):
            raise ConfigError(
                f"the harness '{harness.id}' of the role '{name}' runs programs, and nothing says where: "
                f'environment.settings.{name}.runtime = {{ type = "docker" }}, or "subprocess" for this machine'
            )
        if not role.trainable and role.config.client is None:
            raise ConfigError(
                f"'{environment.config.env_id}' does not train its role '{name}', so the policy cannot play it: give "
                f"environment.settings.{name} a client and a model of its own"
            )


def write_questions(use: str, path: Path, count: int, settings: Mapping[str, Any] | None = None) -> int:
    """Write the first tasks of a taskset as JSON lines: ``prompt``, which an agent sends by itself, and ``index``.

    They are read by ``task = {kind = "table", path = ..., require_answer = false, repeated = "keep"}``.

    Returns:
        The number of written questions.
    """
    tasks = list(itertools.islice(_loaded(use, json.dumps(dict(settings or {})), 1).taskset, count))
    texts = [task.data.prompt_text or task.data.name or f"task {n}" for n, task in enumerate(tasks)]
    rows = (json.dumps({"prompt": t, "index": n}) + "\n" for n, t in enumerate(texts))
    write_durably(path, "".join(rows).encode())
    return len(tasks)


def _package() -> Any:
    foreign_package("verifiers")
    return importlib.import_module("verifiers.v1")


def _loaders() -> Any:
    return importlib.import_module("verifiers.v1.utils.loaders")


@functools.cache
def _loaded(use: str, settings: str, max_turns: int) -> Any:
    """Return the package's environment. Roles run here and end with the rollout's turns, where nothing says otherwise.

    Raises:
        ConfigError: It cannot be loaded.
    """
    package, loaders, table = _package(), _loaders(), json.loads(settings)
    table["taskset"] = {**table.get("taskset", {}), "id": use}
    try:
        kind = loaders.env_config_type(use, table.get("id", ""))
        for name, field in kind.model_fields.items():
            if isinstance(field.default, package.AgentConfig):
                given = table.setdefault(name, {})
                # What the environment's author or the user set stays.
                set_before = field.default.model_fields_set | given.keys()
                own = {"runtime": {"type": "subprocess"}, "max_turns": max_turns}
                given.update({key: value for key, value in own.items() if key not in set_before})
        return loaders.load_environment(loaders.resolve_env_config(table))
    except Exception as error:
        raise ConfigError(
            f"verifiers cannot load '{use}' with {json.loads(settings)}: {exception_text(error)}"
        ) from error
