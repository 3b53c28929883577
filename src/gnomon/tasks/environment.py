"""Tasks that answer back: what a user writes, and the table ``environment`` of an experiment. No torch.

An environment is a class of the user's with `reset` and `step`; either may be ``async def``:

    class Guess:
        def __init__(self, highest: int = 9): ...
        def reset(self, answer: str, **columns) -> str | None: ...
        def step(self, text: str) -> Reply: ...
        def close(self) -> None: ...            # if there is something to close

One instance serves one rollout, in a process that can be killed (`tasks/env_server.py`), and is closed afterwards.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from gnomon.core.errors import ConfigError, bounded, check_read
from gnomon.core.redaction import check_no_secret
from gnomon.rewards.base import VerifierError, real
from gnomon.rewards.function import find_member
from gnomon.rewards.sandbox.base import SandboxLimits
from gnomon.rewards.sandbox.container import CONTAINER_ENGINES, ContainerSandbox
from gnomon.rewards.sandbox.packages import check_names
from gnomon.rewards.sandbox.selftest import Kind as Walls

Role = Literal["user", "tool"]
Kind = Literal["class", "tools", "trl", "verifiers", "gymnasium", "textarena", "openenv", "agent"]

PACKAGES = {
    "verifiers": (("0.4.", "0.1.9"), "0.4.0"), "gymnasium": (("1.",), "1.4.0"), "textarena": (("0.7.",), "0.7.4"),
    "openenv": (("0.10.",), "0.10.0"),
}  # fmt: skip
"""Kinds that are packages, whose environments have names of their own and say how good a rollout was.

Each with how its version begins, and the version that is tested.
"""


@dataclass(frozen=True)
class Reply:
    """What an environment says to an answer.

    Attributes:
        text: Message that the policy sees; the text of a last reply is not shown.
        reward: Reward of the answer, which is added to the rollout's; None adds nothing. An agent's may be a table from
            the roles that it called the policy by to their rewards.
        is_done: Whether the conversation is over.
        role: Role of the message; "tool" becomes "user" for a chat template that knows no tools.
    """

    text: str = ""
    reward: float | Mapping[str, float] | None = None
    is_done: bool = False
    role: Role = "user"


class Environment(Protocol):
    """What is talked to for the length of one rollout."""

    def reset(self, **columns: Any) -> Any:
        """Begin with the task's columns and ``prompt``, as many as are named. Return a first observation or None."""

    def step(self, text: str) -> Any:
        """Return the `Reply` to an answer, its end of turn left out; a plain text is a reply that goes on."""


_NEEDS: Mapping[Kind, str] = {
    "class": 'use = "path.py:Class" or "module:Class"',
    "tools": 'tools = ["path.py:function", "python"]',
    "trl": 'use = "path.py:Class", whose public methods are tools, or tools = ["path.py:function"]',
    "verifiers": 'use = "name", a taskset, or before version 0.4 an environment',
    "gymnasium": 'use = "Name-v1" or "module:Name-v1", as gymnasium.make has it',
    "textarena": 'use = "Name-v0", as textarena.make has it',
    "openenv": 'use = "http://127.0.0.1:8000", the address of an OpenEnv server',
    "agent": 'use = "path.py:function", command = ["program", "argument"] or server = "http://127.0.0.1:PORT/PATH"',
}


@dataclass(frozen=True)
@bounded(
    "environment",
    max_turns="at least 1",
    max_calls="at least 1",
    max_prompt_tokens="at least 0",
    max_turn_tokens="at least 0",
    max_reply_tokens="at least 1",
    timeout_seconds="above 0",
    max_concurrent="at least 1",
    memory_gib="at least 0",
)
class EnvironmentConfig:
    """What replies to answers, and within which limits.

    All tokens after the prompt, replies included, count in ``sampling.max_completion_length``.

    Attributes:
        kind: "class" is a class of your own; "tools" are typed functions, and "python" among them runs code in the
            sandbox; "trl" is a class whose public methods are tools, as TRL's ``environment_factory``; "verifiers",
            "gymnasium", "textarena" and "openenv" are environments of these packages; "agent" is a program that calls
            the policy by itself (docs/agents.md).
        use: The class or the environment that is built, an OpenEnv server's address, or the agent's function.
        command: The agent's program and its arguments; ``{prompt}`` in one stands for the question.
        server: Address of a running server that is the agent, on this machine.
        settings: Keyword arguments of ``use``. For "gymnasium" also ``actions``, names of its numbered actions.
        tools: Names of functions that the model may call.
        max_turns: Most answers of a rollout.
        max_calls: Most calls of an agent that may wait for an answer at once.
        max_prompt_tokens: Most tokens that an agent's conversation may begin with; 0 leaves it to the model's context.
        max_turn_tokens: Most tokens of one answer; 0 allows as many as are left. A cut answer counts as said.
        max_reply_tokens: Most tokens of one reply; a longer reply ends the rollout.
        timeout_seconds: Seconds of wall time for one reply; of an agent, between two answers of the policy.
        on_error: What happens when a tool raises: "end" ends the rollout, "reply" answers with the error.
        sandbox: What isolates the programs of the Python tool; "docker" and "podman" run them, and the tool "shell", in
            a container of ``image`` for each rollout.
        image: Name of a container's image, which must be there already.
        image_network: Whether programs in the container have a network.
        image_writable: Whether programs run as the image's user and may write in all of it; else as nobody, in /tmp.
        image_files: Column with a table from paths to texts, which are written into the container first.
        packages: Packages that the Python tool may import; set ``packages`` of the experiment instead.
        max_concurrent: Rollouts with an environment at once, each in a process.
        memory_gib: GiB of address space that a process may take beyond its imports.
        variables: Names of further environment variables that the environment may read.
    """

    kind: Kind = "class"
    use: str = ""
    command: tuple[str, ...] = ()
    server: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    max_turns: int = 8
    max_calls: int = 8
    max_prompt_tokens: int = 0
    max_turn_tokens: int = 0
    max_reply_tokens: int = 512
    timeout_seconds: float = 10.0
    on_error: Literal["end", "reply"] = "end"
    sandbox: Literal[Walls, "docker", "podman"] = "auto"
    image: str = ""
    image_network: bool = False
    image_writable: bool = False
    image_files: str = ""
    packages: tuple[str, ...] = ()
    max_concurrent: int = 64
    memory_gib: float = 4.0
    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.packages)
        has_use, has_tools = bool(self.use), bool(self.tools)
        of_agent = bool(self.command) + bool(self.server)
        # Each kind needs its own of use, tools, command and server; any other combination would be ignored silently.
        fits = {
            "tools": has_tools and not has_use,
            "trl": has_use or has_tools,
            "agent": has_use + of_agent == 1 and not has_tools,
        }.get(self.kind, has_use and not has_tools) and (self.kind == "agent" or not of_agent)
        if not fits:
            raise ConfigError(f'kind = "{self.kind}" needs {_NEEDS[self.kind]}, and no other name')
        check_no_secret(self.settings, 'let the environment read it (variables = ["NAME"])')
        if self.server:
            _check_server(self.server)
        if self.kind == "openenv" and urlsplit(self.use).scheme not in ("http", "https"):
            raise ConfigError(
                f"environment.use = '{self.use}' is no address; kind = \"openenv\" needs {_NEEDS['openenv']}"
            )
        # Names of packages' environments have forms of their own, which the packages check.
        if self.kind not in PACKAGES:
            named = (*((self.use,) if has_use else ()), *(tool for tool in self.tools if tool not in (PYTHON, SHELL)))
            _check_names(named)
        self._check_container()
        self._check_read()

    def _check_read(self) -> None:
        of_agent = self.kind in ("agent", "verifiers") or self.is_self_play, 'kind = "agent"'
        of_tools = self.kind in ("tools", "trl"), 'kind = "tools" or "trl"'
        of_python = bool({PYTHON, SHELL} & set(self.tools)), f'"{PYTHON}" among the tools'
        of_process = not self.server, "an agent that is started here, `use` or `command`"
        check_read(
            "environment", self,
            settings=(self.use, "`use`, whose arguments they are"), max_calls=of_agent, max_prompt_tokens=of_agent,
            on_error=of_tools, sandbox=of_python, packages=of_python, max_concurrent=of_process,
            memory_gib=of_process, variables=of_process,
        )  # fmt: skip

    def _check_container(self) -> None:
        if self.sandbox in CONTAINER_ENGINES:
            if not self.image or self.image.startswith("-"):
                raise ConfigError(f'sandbox = "{self.sandbox}" needs image = "NAME" of an image, got \'{self.image}\'')
            if self.packages or not {PYTHON, SHELL} & set(self.tools):
                raise ConfigError(
                    f'sandbox = "{self.sandbox}" is for tools = ["python", "shell"], and the image has their packages: '
                    "leave packages out"
                )
        elif SHELL in self.tools or self.image or self.image_files or self.image_network or self.image_writable:
            raise ConfigError(
                f'the tool "shell" and the settings image... need a container; set sandbox = "podman" or "docker" and '
                f"image, got sandbox = '{self.sandbox}'"
            )

    @property
    def container(self) -> ContainerSandbox | None:
        """Where the tools "python" and "shell" run, if that is a container."""
        if self.sandbox != "docker" and self.sandbox != "podman":
            return None
        bounds = SandboxLimits(
            # A tool has four fifths of a reply's time, so that its own limit is hit before the worker is ended.
            wall_seconds=0.8 * self.timeout_seconds, memory_mib=max(64, round(self.memory_gib * 1024) or 4096),
            output_kib=64, files_mib=256, threads=256,
        )  # fmt: skip
        return ContainerSandbox(self.sandbox, self.image, bounds, self.image_network, self.image_writable)

    @property
    def is_agent(self) -> bool:
        """Whether it calls the policy by itself: an agent, a taskset of verifiers from version 0.4, or self-play."""
        if self.kind != "verifiers":
            return self.kind == "agent" or self.is_self_play
        try:
            # Version 0.4 replaced the environments of 0.1 by harnesses that call the model
            # themselves. Read from the metadata: importing the package takes seconds.
            return not version("verifiers").startswith("0.1.")
        except PackageNotFoundError:
            return False

    @property
    def is_self_play(self) -> bool:
        """Whether the policy plays all seats of a game."""
        return self.kind == "textarena" and self.settings.get("opponent") == POLICY

    @property
    def is_rewarding(self) -> bool:
        """Whether the environment itself says how good a rollout was."""
        return self.kind == "class" or self.kind in PACKAGES

    @property
    def names(self) -> str:
        """What it is called in messages."""
        return " ".join(self.command) or self.server or ", ".join((*((self.use,) if self.use else ()), *self.tools))


POLICY = "policy"
"""The opponent of a game that the policy plays with itself."""
PYTHON = "python"
"""The tool that runs Python in the sandbox."""
SHELL = "shell"
"""The tool that runs a command in the sandbox's container."""


def _check_server(server: str) -> None:
    """Refuse an agent's address that is none, or from which no call would come back: an endpoint is on this machine."""
    parts = urlsplit(server)
    try:
        is_address = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        is_address = False
    if not is_address or parts.username or parts.password:
        raise ConfigError(f"environment.server = '{server}' is no address such as http://127.0.0.1:9000/run")
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"environment.server = '{server}' is on another machine, and agents call the policy on this one; start the "
            "server here"
        )


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        source, _, member = name.rpartition(":")
        if not source.strip() or not member.isidentifier():
            raise ConfigError(f"'{name}' is named as path.py:name or module:name, for example tools.py:search")


@dataclass(frozen=True)
class EnvReply:
    """What an adapter says at once: messages as (role, text), a reward to add, and whether that was all.

    An agent may pay each role that it called the policy by: the reward is then one of each role.
    """

    messages: tuple[tuple[str, str], ...] = ()
    reward: "float | Mapping[str, float] | None" = None
    is_done: bool = False


class EnvAdapter(Protocol):
    """The other side of one conversation."""

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the tools that the policy is told about; none unless said otherwise."""
        return ()

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Return a first observation, before the first answer. An agent runs to its end here."""

    async def reply(self, text: str) -> EnvReply:
        """Return what follows an answer. An agent, which calls the policy itself, is given none."""
        raise NotImplementedError

    async def end(self) -> float | None:
        """Let go of everything; return a reward that is known only now. Nothing unless said otherwise."""
        return None


class UserEnv(EnvAdapter):
    """A class of the user's: `tasks/environment.py`.

    Raises:
        RewardError: The class is not found.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        made = find_member(plan.use, "environment", "class")
        self._environment = made(**plan.settings)

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Reset it with the columns that it names."""
        return await reset(self._environment, prompt, columns)

    async def reply(self, text: str) -> EnvReply:
        """Step it."""
        reply = await maybe_await(self._environment.step(text))
        if isinstance(reply, str):
            reply = Reply(reply)
        if not isinstance(reply, Reply):
            raise TypeError(f"step returned {type(reply).__name__}, expected a Reply or a text")
        if not isinstance(reply.text, str) or reply.role not in ("user", "tool"):
            raise TypeError(f"step returned a Reply without text or with a role that is none: {reply!r}")
        # Environments compute with NumPy, whose truth values are no bool.
        done = reply.is_done.item() if hasattr(reply.is_done, "item") else reply.is_done
        if not isinstance(done, bool):
            raise TypeError(f"step returned a Reply with is_done = {done!r}, expected True or False")
        check_text(reply.text, "step")
        return EnvReply(((reply.role, reply.text),), checked_reward(reply.reward), done)

    async def end(self) -> float | None:
        """Close it, if it can be closed."""
        close = getattr(self._environment, "close", None)
        if callable(close):
            await maybe_await(close())
        return None


def foreign_package(name: str) -> Any:
    """Import a package with environments.

    Raises:
        ConfigError: It is not here, or of a version with another interface; the message says what to type.
    """
    begins, tested = PACKAGES[name]
    command = f"pip install {name}=={tested}"
    try:
        found = version(name)
        if not found.startswith(begins):
            raise ConfigError(
                f"environment.kind = '{name}' was written for {name} {tested}, here is {found}: {command}"
            )
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"environment.kind = '{name}' needs a package that is not here ({error}): {command}"
        ) from error


def check_text(text: str, where: str) -> None:
    """Raise TypeError for a text that no file holds."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TypeError(f"{where} returned a text with half a surrogate pair at character {error.start + 1}") from error


async def maybe_await(result: Any) -> Any:
    """Return what a plain or an asynchronous function of the user's returned."""
    return await result if inspect.isawaitable(result) else result


async def reset(environment: Any, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
    """Reset an environment of the user's; its text, if any, is the first observation."""
    offered = {**{str(name): value for name, value in columns.items()}, "prompt": prompt}
    seen = await maybe_await(environment.reset(**accepted_arguments(environment.reset, offered)))
    if seen is None or seen == "":
        return EnvReply()
    if not isinstance(seen, str):
        raise TypeError(f"reset returned {type(seen).__name__}, expected a text or None")
    check_text(seen, "reset")
    return EnvReply((("user", seen),))


def accepted_arguments(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``function`` names of ``offered``, and all of it when it takes ``**columns``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def checked_rewards(reward: Any) -> float | dict[str, float] | None:
    """Return an agent's reward: a finite number, or one for each role that it called the policy by.

    Raises:
        ValueError: As `checked_reward`.
    """
    if not isinstance(reward, Mapping):
        return checked_reward(reward)
    return {str(role): checked_reward(paid) or 0.0 for role, paid in reward.items()}


def checked_reward(reward: Any) -> float | None:
    """Return a reward as a finite number.

    Raises:
        ValueError: The reward is no finite number; the message names it.
    """
    if reward is None:
        return None
    try:
        return real(reward)
    except VerifierError as error:
        raise ValueError(f"the reward of a reply: {error}") from error


def check_class(plan: EnvironmentConfig) -> None:
    """Import the class and compare the settings with its parameters.

    Raises:
        RewardError: The class is not found.
        ConfigError: The class has no reset or step, or takes other settings.
    """
    made = find_member(plan.use, "environment", "class")
    # A factory function is taken as well; what it returns is not known before it is called.
    lacks = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if lacks and inspect.isclass(made):
        raise ConfigError(f"environment '{plan.use}' has no {' and no '.join(lacks)}: a class with reset and step")
    check_settings(made, plan)


def check_settings(made: Callable[..., Any], plan: EnvironmentConfig, is_partial: bool = False) -> None:
    """Raise ConfigError when ``made`` cannot be called with the plan's settings.

    Args:
        is_partial: Whether the call has further arguments, as that of an agent has.
    """
    signature = inspect.signature(made)
    try:
        (signature.bind_partial if is_partial else signature.bind)(**plan.settings)
    except TypeError as error:
        raise ConfigError(
            f"environment.settings {plan.settings} do not fit '{plan.use}' {signature}: {error}"
        ) from error
