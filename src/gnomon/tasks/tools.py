"""Tools as plain typed functions: calls in an answer are made, their results are the reply. No torch."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gnomon.errors import ConfigError
from gnomon.tasks.calls import Call, find_calls, misfit, schema_of
from gnomon.tasks.environment import PYTHON, EnvironmentPlan
from gnomon.tasks.partner import Said, check_settings, reset, rewarded, settled
from gnomon.tasks.python_tool import python_tool
from gnomon.verifiers.cause import cause
from gnomon.verifiers.function import find_member
from gnomon.verifiers.sandbox.base import NotRun


class ToolRaised(Exception):
    """A tool raised; the message names the tool and the cause."""


class Tools:
    """A conversation with tools: each call is answered in a message of its own; an answer without one is the last.

    A call that cannot be made (no JSON, an unknown name, arguments that do not fit) is answered with what is wrong, for
    that is the policy's to learn. A tool that raises ends the rollout, or is answered with the error (``on_error``).
    """

    def __init__(self, plan: EnvironmentPlan) -> None:
        self._plan = plan
        self._environment = find_member(plan.use, "environment", "class")(**plan.settings) if plan.use else None
        functions = [*_methods(self._environment), *(_tool(name, plan) for name in plan.tools)]
        self._functions = {str(schema_of(f)["function"]["name"]): f for f in functions}
        if len(self._functions) != len(functions):
            raise ConfigError(f"two tools have one name: {', '.join(f.__name__ for f in functions)}")
        self.schemas = tuple(schema_of(f) for f in functions)
        self._fits = {s["function"]["name"]: s for s in self.schemas}

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> Said:
        """Reset the environment whose methods are tools, if there is one."""
        return Said() if self._environment is None else await reset(self._environment, prompt, columns)

    async def reply(self, text: str) -> Said:
        """Make the calls in an answer. Raises: ToolRaised."""
        calls = find_calls(text, PYTHON if PYTHON in self._functions else None)
        if not calls:
            return Said(is_done=True)
        return Said(tuple([("tool", await self._result(call)) for call in calls]))

    async def end(self) -> float | None:
        """Return the environment's ``reward``, which TRL's keep as an attribute, if it has one."""
        return rewarded(getattr(self._environment, "reward", None))

    async def _result(self, call: Call) -> str:
        if call.flaw is None and call.name not in self._functions:
            call = Call(call.name, {}, f"there is no tool '{call.name}'; there are {', '.join(self._functions)}")
        flaw = call.flaw or misfit(call.arguments, self._fits[call.name])
        if flaw is not None:
            return f"error: {flaw}"
        try:
            result = await settled(self._functions[call.name](**call.arguments))
        except Exception as error:
            if self._plan.on_error == "end" or isinstance(error, NotRun):
                raise ToolRaised(f"{call.name}: {cause(error)}") from error
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def check_tools(plan: EnvironmentPlan) -> None:
    """Import the tools and read their schemas.

    Raises: RewardError when one is not found; ConfigError when its types or docstring are missing.
    """
    if plan.use:
        check_settings(find_member(plan.use, "environment", "class"), plan)
    for name in plan.tools:
        schema_of(_tool(name, plan))


def _tool(name: str, plan: EnvironmentPlan) -> Callable[..., Any]:
    if name == PYTHON:
        return python_tool(plan.timeout_seconds, plan.sandbox)
    tool: Callable[..., Any] = find_member(name, "tool")
    return tool


def _methods(environment: Any) -> Sequence[Callable[..., Any]]:
    """Return the public methods but ``reset`` and ``close``: what TRL makes tools of."""
    if environment is None:
        return ()
    members = inspect.getmembers(environment, inspect.ismethod)
    return [method for name, method in members if not name.startswith("_") and name not in ("reset", "close")]
