"""What a host drives: an environment of the user's class, or tools, behind three calls. No torch."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from gnomon.core.errors import ConfigError
from gnomon.rewards.base import VerifierError, real
from gnomon.rewards.function import find_member
from gnomon.tasks.environment import PACKAGES, EnvironmentConfig, Reply


@dataclass(frozen=True)
class EnvReply:
    """What a partner says at once: messages as (role, text), a reward to add, and whether that was all."""

    messages: tuple[tuple[str, str], ...] = ()
    reward: float | None = None
    is_done: bool = False


class EnvAdapter(Protocol):
    """The other side of one conversation."""

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the tools that the policy is told about."""

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Return a first observation, before the first answer."""

    async def reply(self, text: str) -> EnvReply:
        """Return what follows an answer."""

    async def end(self) -> float | None:
        """Let go of everything; return a reward that is known only now."""


class UserEnv:
    """A class of the user's: `tasks/environment.py`.

    Raises:
        RewardError: The class is not found.
    """

    schemas: tuple[dict[str, Any], ...] = ()

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
