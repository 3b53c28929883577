"""Tools as plain typed functions: calls in an answer are made, their results are the reply. No torch."""

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.processes.exceptions import exception_text
from gnomon.rewards.function import find_member
from gnomon.rewards.sandbox.base import NotRun
from gnomon.tasks.environment import (
    PYTHON,
    SHELL,
    EnvironmentConfig,
    EnvReply,
    check_settings,
    checked_reward,
    maybe_await,
    reset,
)
from gnomon.tasks.python_tool import ContainerTools, PythonTool, python_tool

# The form, which Qwen and Hermes models were trained on, and which others are told in the system message:
#
#     <tool_call>
#     {"name": "add", "arguments": {"a": 1, "b": 2}}
#     </tool_call>
#
# A call of the Python tool may also be a fenced block that begins with three backticks and ``python``.

# The end of the text closes a call too: an answer that stopped at its budget, or at the tag as a stop string.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```python[ \t]*\n(.*?)```", re.DOTALL)
_TYPES: Mapping[type, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        flaw: Why it cannot be made, in words for the model; None when it can.
    """

    name: str
    arguments: Mapping[str, Any]
    flaw: str | None = None


def find_calls(text: str, python: str | None = None) -> list[ToolCall]:
    """Return the calls in an answer, in their order.

    Args:
        python: Name of the tool that fenced Python blocks call, when no other call is made; None for no such tool.

    >>> find_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, flaw=None)]
    """
    calls = [_read(inner) for inner in _CALL.findall(text)]
    if calls or python is None:
        return calls
    return [ToolCall(python, {"code": code}) for code in _FENCE.findall(text)]


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return an answer's text without its calls, and the calls; the whole text and none where one cannot be made.

    >>> split_calls('I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('I add.', (ToolCall(name='add', arguments={'a': 1}, flaw=None),))
    >>> split_calls("<tool_call>{</tool_call>")
    ('<tool_call>{</tool_call>', ())
    """
    calls = find_calls(text)
    if not calls or any(call.flaw for call in calls):
        return text, ()
    return _CALL.sub("", text).strip(), tuple(calls)


def _read(inner: str) -> ToolCall:
    try:
        said = json.loads(inner)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return ToolCall("", {}, 'a call is {"name": ..., "arguments": {...}}')
    arguments = said.get("arguments", said.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(said["name"], {}, "arguments must be an object")
    return ToolCall(said["name"], arguments)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's JSON schema, in the form that chat templates and OpenAI's interface have.

    The description is the docstring up to ``Args:``, a parameter's is its line below that (Google's style, as
    transformers and TRL read it). A parameter without default is required.

    Raises:
        ConfigError: It is no plain function, a parameter has no type that JSON has, or a function has no docstring.
    """
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"the tool {function!r:.99} is no plain function: def NAME(parameter: type), or async def")
    name = vars(function).get("__name__", function.__name__)
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"the tool {name!r:.99} needs a name of letters, digits and _")
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"the tool '{name}' needs a docstring: the model reads what it does there")
    # Description and parameters, in Google's style; the sections behind them are not for the model.
    head, _, rest = re.split(r"^(Args|Arguments):\s*$", text, maxsplit=1, flags=re.MULTILINE) if _has_args(text) else (
        re.split(r"^Returns:", text, maxsplit=1, flags=re.MULTILINE)[0], "", "",
    )  # fmt: skip
    descriptions = dict(re.findall(r"^ {2,4}\*{0,2}(\w+)(?: ?\([^)]*\))?: *(.+)$", rest, flags=re.MULTILINE))
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ConfigError(f"the tool '{name}': {parameter} cannot be passed by name")
        if parameter.name not in hints:
            raise ConfigError(f"the tool '{name}': the parameter '{parameter.name}' needs a type, such as str or int")
        properties[parameter.name] = _typed(hints[parameter.name], f"{name}.{parameter.name}")
        if parameter.name in descriptions:
            properties[parameter.name]["description"] = descriptions[parameter.name].strip()
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(head.split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _has_args(text: str) -> bool:
    return re.search(r"^(Args|Arguments):\s*$", text, flags=re.MULTILINE) is not None


def _typed(hint: Any, where: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    # The first argument is the type, the others are notes on it.
    if origin is typing.Annotated:
        return _typed(inner[0], where)
    if origin is typing.Literal and all(type(value) in _TYPES for value in inner):
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_typed(member, where) for member in inner]}
    plain = origin or hint
    if plain not in _TYPES:
        raise ConfigError(f"the tool's parameter {where}: {hint} is no type of JSON")
    schema: dict[str, Any] = {"type": _TYPES[plain]}
    if plain is list and inner:
        schema["items"] = _typed(inner[0], where)
    return schema


def misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Return how the arguments do not fit the tool's schema, in words for the model, or None."""
    parameters = schema["function"]["parameters"]
    known = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    strange = [name for name in arguments if name not in known]
    if missing or strange:
        parts = [
            f"missing: {', '.join(missing)}" if missing else "",
            f"unknown: {', '.join(strange)}" if strange else "",
        ]
        return f"the arguments do not fit ({'; '.join(filter(None, parts))}); it takes {', '.join(known) or 'none'}"
    wrong = [
        f"{name} should be {_said(known[name])}" for name, value in arguments.items() if not _is(value, known[name])
    ]
    return "; ".join(wrong) or None


def _is(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_is(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return bool(value in schema["enum"])
    if "type" not in schema:
        return True
    if schema["type"] == "number":
        # JSON has one kind of number: 1 is right where a float is asked for. True is none, though Python says so.
        return isinstance(value, int | float) and not isinstance(value, bool)
    if schema["type"] == "array":
        return isinstance(value, list) and all(_is(one, schema.get("items", {})) for one in value)
    # The exact type: a bool must not pass as an integer.
    return str(schema["type"]) == _TYPES.get(type(value))


def _said(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_said(one) for one in schema["anyOf"])
    return " or ".join(map(repr, schema["enum"])) if "enum" in schema else str(schema.get("type"))


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the system message that tells a model without a tool format of its own how to call tools."""
    listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    return (
        "You can call these functions, described as JSON:\n"
        f"{listed}\n"
        "To call one, write its name and arguments as JSON between tags, and then stop:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": VALUE}}\n</tool_call>\n'
        "The result comes in the next message. An answer without a call ends the conversation."
    )


class ToolRaised(Exception):
    """A tool or an agent's command failed; the message names it and the cause."""


class Tools:
    """A conversation with tools: each call is answered in a message of its own; an answer without one is the last.

    A call that cannot be made (no JSON, an unknown name, arguments that do not fit) is answered with what is wrong, for
    that is the policy's to learn. A tool that raises ends the rollout, or is answered with the error (``on_error``).
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._plan = plan
        self._environment = find_member(plan.use, "environment", "class")(**plan.settings) if plan.use else None
        self._container = ContainerTools(plan.container) if plan.container else None
        self._python = _python(plan) if PYTHON in plan.tools and not self._container else None
        own = {PYTHON: self._python.call} if self._python else {}
        if self._container:
            own = {PYTHON: self._container.python, SHELL: self._container.shell}
        named: list[Callable[..., Any]] = [own.get(name) or _tool(name) for name in plan.tools]
        functions: list[Callable[..., Any]] = [*_methods(self._environment), *named]
        self._functions = {str(schema_of(f)["function"]["name"]): f for f in functions}
        if len(self._functions) != len(functions):
            raise ConfigError(f"two tools have one name: {', '.join(f.__name__ for f in functions)}")
        self.schemas = tuple(schema_of(f) for f in functions)
        self._fits = {s["function"]["name"]: s for s in self.schemas}

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Start the container with the row's files; reset the environment whose methods are tools, if there is one.

        A container that starts slowly is thereby no fault of an answer's.

        Raises:
            ToolRaised: A file cannot be written, or the container does not start.
        """
        if self._container:
            try:
                await asyncio.to_thread(self._container.begin, _files(columns, self._plan.image_files))
            except NotRun as error:
                raise ToolRaised(f"no container of '{self._plan.image}' starts: {error}") from error
            except OSError as error:
                raise ToolRaised(f"a file of the column '{self._plan.image_files}' is not written: {error}") from error
        return EnvReply() if self._environment is None else await reset(self._environment, prompt, columns)

    async def reply(self, text: str) -> EnvReply:
        """Make the calls in an answer.

        Raises:
            ToolRaised: A tool raised an exception.
        """
        calls = find_calls(text, PYTHON if PYTHON in self._functions else None)
        if not calls:
            return EnvReply(is_done=True)
        return EnvReply(tuple([("tool", await self._result(call)) for call in calls]))

    async def end(self) -> float | None:
        """End interpreter and container; return the environment's ``reward`` (TRL's keep it so), if it has one."""
        for part in (self._python, self._container):
            if part is not None:
                part.end()
        return checked_reward(getattr(self._environment, "reward", None))

    async def _result(self, call: ToolCall) -> str:
        # The flaw is put into the call, so that all faults of the policy take one way back to it.
        if call.flaw is None and call.name not in self._functions:
            call = ToolCall(call.name, {}, f"there is no tool '{call.name}'; there are {', '.join(self._functions)}")
        flaw = call.flaw or misfit(call.arguments, self._fits[call.name])
        if flaw is not None:
            return f"error: {flaw}"
        try:
            result = await maybe_await(self._functions[call.name](**call.arguments))
        except Exception as error:
            if self._plan.on_error == "end" or isinstance(error, NotRun):
                raise ToolRaised(f"{call.name}: {exception_text(error)}") from error
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def _files(columns: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return what a row's column holds; an entry of None is none, as Arrow fills what a row has not."""
    if not name:
        return {}
    if name not in columns:
        raise ToolRaised(f"image_files = '{name}': there is no such column; there are {', '.join(map(str, columns))}")
    files = {} if columns[name] is None else columns[name]
    if isinstance(files, dict):
        files = {path: text for path, text in files.items() if text is not None}
        if all(isinstance(t, str) and isinstance(p, str) and p and "\0" not in p for p, t in files.items()):
            return files
    form = 'write {"/tmp/name": "text"}: paths and texts'
    raise ToolRaised(f"image_files = '{name}': the column holds {str(files)[:80]!r}; {form}")


def check_tools(plan: EnvironmentConfig) -> None:
    """Import the tools and read their schemas.

    Raises:
        RewardError: A tool is not found.
        ConfigError: A tool has no types or no docstring.
    """
    if plan.use:
        check_settings(find_member(plan.use, "environment", "class"), plan)
    if plan.container:
        plan.container.check(PYTHON in plan.tools)
    for name in plan.tools:
        if name == PYTHON and not plan.container:
            schema_of(_python(plan).call)
        elif name not in (PYTHON, SHELL):
            schema_of(_tool(name))


def _python(plan: EnvironmentConfig) -> PythonTool:
    # Containers have tools of their own; the asserts tell mypy which kinds are left.
    assert plan.sandbox != "docker"
    assert plan.sandbox != "podman"
    return python_tool(plan.timeout_seconds, plan.sandbox, plan.packages, plan.max_turns)


def _tool(name: str) -> Callable[..., Any]:
    tool: Callable[..., Any] = find_member(name, "tool")
    return tool


def _methods(environment: Any) -> Sequence[Callable[..., Any]]:
    """Return the public methods but ``reset`` and ``close``: what TRL makes tools of."""
    if environment is None:
        return ()
    members = inspect.getmembers(environment, inspect.ismethod)
    return [method for name, method in members if not name.startswith("_") and name not in ("reset", "close")]
