"""Environments of Gymnasium and TextArena, by their ``reset`` and ``step``; an answer is the action. No torch.

What an environment begins with is shown before the first answer, unless the question holds it (`write_questions`). A
row's column ``seed`` says which game is played, so that a group plays one game; without it each rollout has its own.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.core.errors import ConfigError
from gnomon.core.processes.exceptions import exception_text
from gnomon.tasks.env_adapter import EnvAdapter, EnvReply, checked_reward, foreign_package
from gnomon.tasks.environment import EnvironmentConfig

_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOR = re.compile(r"\x1b\[(?:\d+;)*?(?:(?:[349]|10)([0-7])|\d*)(?:;\d+)*m")


class GymnasiumEnv:
    """An episode of an environment whose actions are texts, or numbered and then chosen by name or number.

    Raises:
        ConfigError: The environment cannot be made, or has actions or observations that no text says.
    """

    schemas: tuple[dict[str, Any], ...] = ()

    def __init__(self, plan: EnvironmentConfig) -> None:
        gymnasium = foreign_package("gymnasium")
        settings = {"disable_env_checker": True, **plan.settings}
        named = settings.pop("actions", None)
        try:
            self._env = gymnasium.make(plan.use, **settings)
            if "render_mode" not in settings and "ansi" in self._env.metadata.get("render_modes", ()):
                self._env = gymnasium.make(plan.use, render_mode="ansi", **settings)
        except Exception as error:
            raise ConfigError(
                f"gymnasium cannot make '{plan.use}' with {plan.settings}: {exception_text(error)}"
            ) from error
        seen, actions = self._env.observation_space, self._env.action_space
        if self._env.render_mode != "ansi" and len(seen.shape or ()) > 1:
            raise ConfigError(
                f"'{plan.use}' shows arrays of shape {seen.shape}, and is not rendered as a text ('ansi')"
            )
        self._first, self._names = 0, tuple[str, ...]()
        if isinstance(actions, gymnasium.spaces.Discrete):
            self._first, count = int(actions.start), int(actions.n)
            self._names = _checked(plan.use, named or range(self._first, self._first + count), count)
        elif not isinstance(actions, gymnasium.spaces.Text) or named:
            raise ConfigError(
                f"'{plan.use}' has the actions {actions}; an answer is a text, or names one of Discrete(n)"
            )

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Reset it with the column ``seed``."""
        seen, _ = self._env.reset(seed=int(columns["seed"]))
        return _opening(self._shown(seen), prompt)

    async def reply(self, text: str) -> EnvReply:
        """Step it by the last action that the answer names; an answer without one is told which there are."""
        action: Any = text
        if self._names:
            listed = "|".join(map(re.escape, self._names))
            found = re.findall(rf"(?<![\w-])(?<!\d\.)(?:{listed})(?!\w|\.\d)", text, re.IGNORECASE)
            if not found:
                return EnvReply((("user", f"Name one of these actions: {_few(self._names)}."),))
            action = self._first + [name.casefold() for name in self._names].index(found[-1].casefold())
        seen, reward, is_over, is_cut, _ = self._env.step(action)
        return EnvReply((("user", self._shown(seen)),), checked_reward(float(reward)), bool(is_over or is_cut))

    async def end(self) -> float | None:
        """Close it."""
        self._env.close()
        return None

    def _shown(self, seen: Any) -> str:
        if self._env.render_mode == "ansi":
            # Color is meaning: where the player stands, what is to be brought where.
            return _COLOR.sub(lambda m: f"[{_COLORS[int(m[1])]} " if m[1] else "]", self._env.render())
        return seen if isinstance(seen, str) else json.dumps(_plain(seen))


class TextArenaEnv:
    """A game for one player. It pays when it is over; one that a budget of the run ended pays nothing.

    What its observation wrappers would say again is not said: a conversation holds it. Action wrappers stay.

    Raises:
        ConfigError: The game cannot be made.
    """

    schemas: tuple[dict[str, Any], ...] = ()

    def __init__(self, plan: EnvironmentConfig) -> None:
        textarena = foreign_package("textarena")
        self._said_by_player = textarena.ObservationType.PLAYER_ACTION
        try:
            self._game = textarena.make(plan.use, **plan.settings)
        except Exception as error:
            raise ConfigError(
                f"textarena cannot make '{plan.use}' with {plan.settings}: {exception_text(error)}"
            ) from error

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Begin the game of the column ``seed``."""
        self._game.reset(num_players=1, seed=int(columns["seed"]))
        return _opening(self._new(), prompt)

    async def reply(self, text: str) -> EnvReply:
        """Give it the answer as a move."""
        is_over, _ = self._game.step(text)
        reward = float(self._game.close()[0][0]) if is_over else None
        return EnvReply((("user", self._new()),), checked_reward(reward), bool(is_over))

    async def end(self) -> float | None:
        """Let go of it."""
        return None

    def _new(self) -> str:
        said = self._game.state.get_current_player_observation()
        return "\n".join(text.strip() for _, text, kind in said if kind != self._said_by_player)


_GAMES: Mapping[str, type[GymnasiumEnv | TextArenaEnv]] = {"gymnasium": GymnasiumEnv, "textarena": TextArenaEnv}


def check_game(plan: EnvironmentConfig) -> None:
    """Make the environment and begin one episode, twice.

    Raises:
        ConfigError: It cannot be made or begun, says nothing that a text can answer, or draws what no seed decides.
    """
    if _opened(plan, 0) != _opened(plan, 0):
        raise ConfigError(
            f"'{plan.use}' begins otherwise each time with the same seed, so that a group would play several games; "
            "name in environment.settings what it draws when it is made"
        )


def write_questions(
    kind: str, use: str, path: Path, count: int, settings: Mapping[str, Any] | None = None, first_seed: int = 0
) -> None:
    """Write one question for each of ``count`` games as JSON lines: its opening as ``prompt``, and its ``seed``.

    They are read by ``task = {kind = "table", path = ..., require_answer = false}``.

    Args:
        kind: "gymnasium" or "textarena".
        use: Name of the environment.

    Raises:
        ConfigError: The environment cannot be made or begun.
    """
    plan = EnvironmentConfig(kind=kind, use=use, settings=dict(settings or {}))  # type: ignore[arg-type]
    rows = ({"prompt": _opened(plan, seed), "seed": seed} for seed in range(first_seed, first_seed + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _opened(plan: EnvironmentConfig, seed: int) -> str:
    game: EnvAdapter = _GAMES[plan.kind](plan)
    try:
        begun = asyncio.run(game.begin("", {"seed": seed}))
    except Exception as error:
        raise ConfigError(
            f"'{plan.use}' of {plan.kind} cannot be begun by one player: {exception_text(error)}"
        ) from error
    return begun.messages[0][1] if begun.messages else ""


def _opening(shown: str, prompt: str) -> EnvReply:
    return EnvReply((("user", shown),)) if shown and shown not in prompt else EnvReply()


def _checked(use: str, named: Sequence[Any], count: int) -> tuple[str, ...]:
    names = tuple(map(str, named))
    if len({name.casefold() for name in names}) != count or not all(name.strip() for name in names):
        raise ConfigError(
            f"environment.settings.actions are {_few(names)}: '{use}' has {count} actions, a name for each"
        )
    return names


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 20 else f"{names[0]} to {names[-1]}"


def _plain(seen: Any) -> Any:
    """Return an observation as JSON has it."""
    if isinstance(seen, Mapping):
        return {str(name): _plain(part) for name, part in seen.items()}
    if isinstance(seen, tuple | list):
        return [_plain(part) for part in seen]
    return seen.tolist() if hasattr(seen, "tolist") else seen
