"""Environments of Gymnasium, TextArena and OpenEnv, by their ``reset`` and ``step``; an answer is the action. No torch.

What an environment begins with is shown before the first answer, unless the question holds it (`write_questions`). A
row's column ``seed`` says which game is played, so that a group plays one game; without it each rollout has its own.
"""

import asyncio
import json
import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError
from gnomon.core.http import exchange
from gnomon.core.processes.exceptions import exception_text
from gnomon.rewards.function import find_member
from gnomon.tasks.environment import (
    POLICY,
    EnvAdapter,
    EnvironmentConfig,
    EnvReply,
    checked_reward,
    foreign_package,
    maybe_await,
)
from gnomon.tasks.tools import find_calls

_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
# An ANSI color sequence; the group is the color, and empty where the sequence resets it.
_COLOR = re.compile(r"\x1b\[(?:\d+;)*?(?:(?:[349]|10)([0-7])|\d*)(?:;\d+)*m")


class GymnasiumEnv(EnvAdapter):
    """An episode of an environment whose actions are texts, or numbered and then chosen by name or number.

    Raises:
        ConfigError: The environment cannot be made, or has actions or observations that no text says.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        gymnasium = foreign_package("gymnasium")
        settings = {"disable_env_checker": True, **plan.settings}
        named = settings.pop("actions", None)
        try:
            self._env = gymnasium.make(plan.use, **settings)
            # Made twice, since the render modes are known only once it is made.
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
            # No action within a longer word or number: "1" in "10" or "1.5", "up" in "upper".
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


class TextArenaEnv(EnvAdapter):
    """A game for one player, or against an opponent. It pays at its end, and nothing if a budget ended it.

    ``settings.opponent`` names a function of the user's that plays all other seats of ``settings.players`` (2): it is
    given all that its seat was shown, and returns a move. The column ``seat`` is the policy's, 0 without it. The
    opponent "policy" is `TextArenaSelfPlay`.

    What its observation wrappers would say again is not said: a conversation holds it. Action wrappers stay.

    Raises:
        ConfigError: The game cannot be made.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        textarena = foreign_package("textarena")
        self._said_by_player = textarena.ObservationType.PLAYER_ACTION
        settings = dict(plan.settings)
        opponent = settings.pop("opponent", None)
        self._opponent = find_member(opponent, "opponent") if opponent not in (None, POLICY) else None
        self.players = settings.pop("players", 1 if opponent is None else 2)
        try:
            self.game = textarena.make(plan.use, **settings)
        except Exception as error:
            raise ConfigError(
                f"textarena cannot make '{plan.use}' with {plan.settings}: {exception_text(error)}"
            ) from error

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Begin the game of the column ``seed``."""
        self.deal(columns)
        self._player, self._heard = int(columns.get("seat", 0)), dict[int, str]()
        if not 0 <= self._player < self.players:
            raise ValueError(f"the row's seat is {self._player}, of {self.players} players")
        await self._others()
        return _opening(self.turn()[1], prompt)

    async def reply(self, text: str) -> EnvReply:
        """Give it the answer as a move."""
        is_over = self.game.step(text)[0] or await self._others()
        # `close` returns the rewards of all players, and only a finished game has them.
        reward = float(self.game.close()[0][self._player]) if is_over else None
        return EnvReply((("user", self.turn()[1]),), checked_reward(reward), bool(is_over))

    async def _others(self) -> bool:
        """Play the other seats until it is the policy's turn, or the game is over."""
        while self.game.state.current_player_id != self._player:
            if self._opponent is None:
                raise ValueError("another player moves; environment.settings.opponent names who")
            player, seen = self.turn()
            self._heard[player] = f"{self._heard.get(player, '')}\n{seen}".strip()
            if self.game.step(await maybe_await(self._opponent(self._heard[player])))[0]:
                return True
        return False

    def deal(self, columns: Mapping[str, Any]) -> None:
        """Begin the game of the column ``seed``, with nothing said yet."""
        self.game.reset(num_players=self.players, seed=int(columns["seed"]))

    def turn(self) -> tuple[int, str]:
        """Return whose turn it is, and what that seat has not been shown: what others and the game said."""
        player, said = self.game.state.current_player_id, self.game.state.get_current_player_observation()
        texts = [
            f"[Player {who}] {text.strip()}" if kind == self._said_by_player else text.strip()
            # What the seat itself said is in its conversation already.
            for who, text, kind in said
            if kind != self._said_by_player or who != player
        ]
        return player, "\n".join(texts)


class TextArenaSelfPlay(EnvAdapter):
    """A game whose seats are all the policy's: a conversation, a role ("player_0") and a reward of its own for each.

    It calls the policy as an agent does (`rollouts/agent.py`), by the role whose turn it is.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._env = TextArenaEnv(plan)

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Play the game of the column ``seed``; it pays nothing where a limit of the rollout ends it.

        Raises:
            ValueError: The question holds what one of the seats is shown.
        """
        self._env.deal(columns)
        # The rollout's address and key, as any agent finds them.
        where, said = urlsplit(os.environ["OPENAI_BASE_URL"]), dict[int, list[dict[str, str]]]()
        path, key = f"{where.path}/chat/completions", os.environ["OPENAI_API_KEY"]
        is_over = False
        while not is_over:
            player, seen = self._env.turn()
            if seen and seen in prompt:
                raise ValueError(f"the question holds what seat {player} is shown; write rows by write_questions")
            shown = seen if player in said else f"{prompt}\n\n{seen}".strip()
            talk = said.setdefault(player, [])
            talk.append({"role": "user", "content": shown})
            body = {"model": f"player_{player}", "messages": talk}
            status, reply = await exchange(str(where.hostname), where.port or 80, path, key, body)
            # The rollout ended at one of its limits, and the game stands where it is.
            if status != HTTPStatus.OK:
                break
            talk.append(reply["choices"][0]["message"])
            is_over = self._env.game.step(talk[-1]["content"])[0]
        paid = self._env.game.close()[0] if is_over else {}
        return EnvReply(
            (), {f"player_{player}": float(paid.get(player, 0.0)) for player in range(self._env.players)}, True
        )


class OpenEnvEnv(EnvAdapter):
    """A session with an OpenEnv server, whose address is ``use``; ``settings`` and the row's columns go to its reset.

    An answer that is a JSON object of the action's fields is the action; of an action with one field to fill, the
    answer is its text, or its last number. A server whose actions are calls of MCP tools has them as tools.

    Raises:
        ConfigError: No server answers there.
    """

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._package, self._plan, self._left = foreign_package("openenv"), plan, AsyncExitStack()
        try:
            with urllib.request.urlopen(f"{plan.use.rstrip('/')}/schema", timeout=10) as reply:
                action = json.load(reply)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no OpenEnv server answers at {plan.use}: {exception_text(error)}; start it") from error
        ours = ("metadata", "type")
        self._fields = {name: how for name, how in action.get("properties", {}).items() if name not in ours}
        self._needed = [name for name in action.get("required", ()) if name not in ours] or [*self._fields][:1]
        self._has_tools = action.get("title") in ("Action", "CallToolAction", "ListToolsAction")

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The server's MCP tools."""
        return asyncio.run(self._listed()) if self._has_tools else ()

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Open a session, and reset it."""
        self._client = await self._left.enter_async_context(self._package.GenericEnvClient(base_url=self._plan.use))
        result = await self._client.reset(**{**self._plan.settings, **columns})
        return _opening(_observed(result.observation), prompt)

    async def reply(self, text: str) -> EnvReply:
        """Step it by the action, or by each call of an answer; where there are tools, an answer without a call ends."""
        calls = find_calls(text) if self._has_tools else []
        if self._has_tools and not calls:
            return EnvReply(is_done=True)
        if flaw := next((call.flaw for call in calls if call.flaw), None):
            return EnvReply((("tool", flaw),))
        asked = [{"type": "call_tool", "tool_name": call.name, "arguments": call.arguments} for call in calls]
        steps: list[dict[str, Any]] = asked or ([action] if (action := self._action(text)) is not None else [])
        if not steps:
            return EnvReply((("user", f"Answer with a JSON object of these fields: {json.dumps(self._fields)}"),))
        said, reward, is_done = [], None, False
        for step in steps:
            try:
                result = await self._client.step(step)
            except RuntimeError as error:
                # The client has one exception for everything; only a malformed action is the policy's fault.
                if "VALIDATION_ERROR" not in str(error):
                    raise
                said.append(f"No such action: {json.dumps(step)}")
                break  # what the steps before it did and said stays
            said.append(_observed(result.observation))
            if result.reward is not None:
                reward = (reward or 0.0) + float(result.reward)
            is_done = is_done or bool(result.done)
        role = "tool" if asked else "user"
        return EnvReply(tuple((role, text) for text in said), checked_reward(reward), is_done)

    async def end(self) -> float | None:
        """Close the session."""
        await self._left.aclose()
        return None

    async def _listed(self) -> tuple[dict[str, Any], ...]:
        async with self._package.GenericEnvClient(base_url=self._plan.use) as client:
            tools = (await client.step({"type": "list_tools"})).observation["tools"]
        kept = ("name", "description")
        return tuple(
            {"type": "function", "function": {**{k: tool[k] for k in kept}, "parameters": tool["input_schema"]}}
            for tool in tools
        )

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return an answer as an action; None where it is none."""
        fenced = re.fullmatch(r"\s*```\w*\n(.*)\n```\s*", text, re.DOTALL)
        try:
            given = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, dict) and given.keys() <= self._fields.keys():
            return given
        if len(self._needed) != 1:
            return None
        kind = self._fields.get(self._needed[0], {}).get("type")
        if kind not in ("integer", "number"):
            return {self._needed[0]: text}
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        return {self._needed[0]: json.loads(numbers[-1])} if numbers else None


def _observed(observation: Mapping[str, Any]) -> str:
    """Return what an OpenEnv observation says; its metadata is the server's own."""
    said = {name: value for name, value in observation.items() if name != "metadata"}
    if "tool_name" in said:
        failed, result = said.get("error"), said.get("result")
        given = failed["message"] if failed else result.get("data", result) if isinstance(result, dict) else result
        return given if isinstance(given, str) else json.dumps(given)
    texts = [value for value in said.values() if value not in (None, "", [], {})]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(said)


_GAMES: Mapping[str, type[GymnasiumEnv | TextArenaEnv | OpenEnvEnv]] = {
    "gymnasium": GymnasiumEnv, "textarena": TextArenaEnv, "openenv": OpenEnvEnv,
}  # fmt: skip


def check_game(plan: EnvironmentConfig) -> None:
    """Make the environment and begin one episode, twice.

    Raises:
        ConfigError: It cannot be made or begun, says nothing that a text can answer, or draws what no seed decides.
    """
    # Two instances with one seed: advantages compare the answers of a group, which must play the same game.
    if _opened(plan, 0) != _opened(plan, 0):
        raise ConfigError(
            f"'{plan.use}' begins otherwise each time with the same seed, so that a group would play several games; "
            "name in environment.settings what it draws when it is made"
        )


def check_server(plan: EnvironmentConfig) -> None:
    """Open as many sessions as rollouts may have at once, and check what `check_game` does.

    Raises:
        ConfigError: The server holds fewer, or as `check_game`.
    """
    check_game(plan)

    async def opened() -> None:
        async with AsyncExitStack() as stack:
            for number in range(plan.max_concurrent):
                client = foreign_package("openenv").GenericEnvClient(base_url=plan.use)
                try:
                    await (await stack.enter_async_context(client)).state()
                except (RuntimeError, OSError) as error:
                    raise ConfigError(
                        f"the server {plan.use} holds {number} sessions at once: set environment.max_concurrent = "
                        f"{number}, or start it with max_concurrent_envs = {plan.max_concurrent} "
                        f"({exception_text(error)})"
                    ) from error

    asyncio.run(opened())


def write_questions(
    kind: str, use: str, path: Path, count: int, settings: Mapping[str, Any] | None = None, first_seed: int = 0
) -> None:
    """Write one question for each of ``count`` games as JSON lines: its opening as ``prompt``, and its ``seed``.

    In self-play the prompt, which each seat's opening follows, names game and number; write what you like in its place.

    They are read by ``task = {kind = "table", path = ..., require_answer = false}``.

    Args:
        kind: "gymnasium", "textarena" or "openenv".
        use: Name of the environment, or its address.

    Raises:
        ConfigError: The environment cannot be made or begun.
    """
    plan = EnvironmentConfig(kind=kind, use=use, settings=dict(settings or {}))  # type: ignore[arg-type]
    seeds = range(first_seed, first_seed + count)
    # In self-play each seat is shown its own opening; the number makes questions of games that begin alike.
    rows = ({"prompt": f"Game {n} of {use}." if plan.is_self_play else _opened(plan, n), "seed": n} for n in seeds)
    write_durably(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _opened(plan: EnvironmentConfig, seed: int) -> str:
    game: EnvAdapter = _GAMES[plan.kind](plan)

    async def begun() -> EnvReply:
        if isinstance(game, TextArenaEnv) and plan.is_self_play:
            game.deal({"seed": seed})
            return _opening(game.turn()[1], "")
        first = await game.begin("", {"seed": seed})
        await game.end()
        return first

    try:
        first = asyncio.run(begun())
    except Exception as error:
        who = " by one player (settings.opponent names another)" if "opponent" not in plan.settings else ""
        raise ConfigError(f"'{plan.use}' of {plan.kind} cannot be begun{who}: {exception_text(error)}") from error
    return first.messages[0][1] if first.messages else ""


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
