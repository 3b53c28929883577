"""Environments that Gymnasium, TextArena and OpenEnv ship, where these are installed (`make test-full` does that)."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.rollouts.test_agent import TEMPLATES, grouped, say

import gnomon
from gnomon.core.errors import ConfigError
from gnomon.core.types import Task
from gnomon.engines.scripted import ScriptedEngine
from gnomon.tasks import environment
from gnomon.tasks.env_server import EnvServer
from gnomon.tasks.environment import PACKAGES, EnvironmentConfig
from gnomon.tasks.game_envs import TextArenaEnv, write_questions

LAKE = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}


def needed(kind: str) -> None:
    """Skip where the package is missing, with what to type."""
    pytest.importorskip(kind, reason=f"pip install {kind}=={PACKAGES[kind][1]}")


def talk(kind: str, use: str, *answers: str, seed: int = 0, prompt: str = "Play.", **settings: Any) -> list[Any]:
    """What it says to a reset, to each answer, and at its end."""
    needed(kind)
    host = EnvServer(EnvironmentConfig(kind=kind, use=use, settings=settings, max_concurrent=1))  # type: ignore
    host.prepare()
    requests = [{"do": "reset", "seed": 0, "prompt": prompt, "columns": {"seed": seed}}]
    requests += [{"do": "step", "text": text} for text in answers]
    return [host.answer(request) for request in [*requests, {"do": "close"}]]


def texts(said: list[Any]) -> list[str]:
    """What was shown, one text a reply."""
    return [reply["messages"][0][1] for reply in said if reply.get("messages")]


def test_a_frozen_lake_is_crossed_in_words():
    """The way is down, down, right, right, down, right; the player's place is marked, and the last step pays 1."""
    said = talk("gymnasium", "FrozenLake-v1", "down", "I go Down", "not left, right", "right", "down", "right", **LAKE)

    assert all(reply["fault"] is None for reply in said)
    assert texts(said)[0] == "\n[red S]FFF\nFHFH\nFFFH\nHFFG\n"
    assert texts(said)[1] == "  (Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG\n"
    assert [(reply["reward"], reply["is_done"]) for reply in said[1:-1]] == [(0.0, False)] * 5 + [(1.0, True)]
    assert said[-1] == {"fault": None, "reward": None}


def test_an_answer_without_an_action_is_told_which_there_are():
    """Nothing moves; numbers are the names where none are given, and a part of a number or a word is none."""
    none, moved = talk("gymnasium", "FrozenLake-v1", "leftover1, -1, 3.1, 12", "1.", is_slippery=False)[1:-1]

    assert none["messages"] == [["user", "Name one of these actions: 0, 1, 2, 3."]]
    assert (none["reward"], none["is_done"]) == (None, False)
    assert "(Down)" in moved["messages"][0][1]


def test_colors_are_words():
    """The taxi is yellow, the passenger waits where it is blue, the way leads to magenta; one within the other."""
    begun, below = texts(talk("gymnasium", "Taxi-v4", "0"))

    assert "|[yellow  ]| : | : |\n|[magenta Y]| : |[blue B]: |" in begun
    assert "|[magenta [yellow Y]]| : |[blue B]: |" in below


def test_observations_of_numbers_are_shown_as_json():
    """Blackjack shows the player's sum, the dealer's card and whether an ace counts 11; sticking ends it."""
    begun, hit, *_ = talk("gymnasium", "Blackjack-v1", "stick", seed=1, actions=["stick", "hit"])

    assert len(json.loads(begun["messages"][0][1])) == 3
    assert hit["is_done"]
    assert hit["reward"] in (-1.0, 0.0, 1.0)


def test_what_no_text_says_is_refused():
    """Unknown names and settings, actions that are vectors, names that are too few, and a map that no seed decides."""
    for use, settings, why in (
        ("FrozenLake-v9", {}, "gymnasium cannot make 'FrozenLake-v9'"),
        ("Pendulum-v1", {}, "has the actions Box"),
        ("FrozenLake-v1", {"actions": ["a", "A", "b", "c"]}, "'FrozenLake-v1' has 4 actions"),
        ("FrozenLake-v1", {"render_mode": "rgb_array", "wind": 1}, "cannot make 'FrozenLake-v1' with .*wind"),
        ("FrozenLake-v1", {"map_name": None}, "begins otherwise each time with the same seed"),
    ):
        with pytest.raises(ConfigError, match=why):
            talk("gymnasium", use, **settings)


def test_a_number_is_guessed():
    """Each reply narrows the range, the player's own words are not said again, and the right number pays 1."""
    low, high, said = 1, 20, []
    while not said or not said[-2]["is_done"]:
        guesses = [*(reply.get("guess") for reply in said[1:-1]), str((low + high) // 2)]
        said = talk("textarena", "GuessTheNumber-v0", *guesses, seed=5)
        for reply, guess in zip(said[1:-1], guesses, strict=True):
            reply["guess"] = guess
        (shown,) = said[-2]["messages"]
        assert "[" not in shown[1]
        low, high = ((low + high) // 2 + 1, high) if "higher" in shown[1] else (low, (low + high) // 2 - 1)

    assert "You have to guess the number between 1 and 20" in texts(said)[0]
    assert said[-2]["reward"] == 1.0
    assert all(reply["reward"] is None for reply in said[:-2])


def test_a_seed_is_a_game(tmp_path: Path):
    """A group's rollouts get the same replies to the same answers, and questions hold what is then not shown again."""
    for kind, use in (("textarena", "Mastermind-v0"), ("gymnasium", "Taxi-v4")):
        needed(kind)
        file = tmp_path / f"{kind}.jsonl"
        write_questions(kind, use, file, 4)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        asked = [talk(kind, use, "[1 2 3 4]", "0", **row) for row in [*rows, *rows]]

        assert [row["seed"] for row in rows] == [0, 1, 2, 3]
        assert asked[:4] == asked[4:]
        assert len({json.dumps(each) for each in asked}) > 1
        assert all(each[0]["messages"] == [] for each in asked)


def test_an_opponent_plays_the_other_seats(tmp_path: Path):
    """It is shown all that its seat saw; the policy wins from either seat, and the loser's reward is not its own."""
    path = tmp_path / "opponents.py"
    path.write_text(
        "import re\n\nasync def first_free(seen):\n"
        "    return re.findall(r'\\[\\d\\]', seen.rpartition('Available Moves:')[2])[0]\n"
    )
    plan = EnvironmentConfig(kind="textarena", use="TicTacToe-v0", settings={"opponent": f"{path}:first_free"})
    for seat in (0, 1):
        needed("textarena")
        host = EnvServer(plan)
        host.prepare()
        columns = {"seed": 3, "seat": seat}
        said = [host.answer({"do": "reset", "seed": 0, "prompt": "Play.", "columns": columns})]
        said += [host.answer({"do": "step", "text": move}) for move in ("[4]", "[2]", "[6]")]

        host.answer({"do": "close"})
        assert f"As Player {seat}" in texts(said)[0]
        assert f"Player {1 - seat} placed their symbol" in texts(said)[1]
        assert [reply["fault"] for reply in said] == [None] * 4
        assert (said[-1]["is_done"], said[-1]["reward"]) == (True, 1.0)


def test_the_policy_plays_all_seats(tmp_path: Path):
    """Each seat is a conversation of its own with its own reward; a game that `max_turns` ends pays nothing.

    The policy takes the first free field of tic-tac-toe: with 0, 1, 2, 3, 4, 5, 6 the first player wins.
    """
    needed("textarena")

    def first_free(prompt: Sequence[int], key: int) -> list[int]:
        seen = TEMPLATES.tokenizer.spelled(list(prompt)).rpartition("Available Moves:")[2]
        return say(re.findall(r"\[\d\]", seen)[0])

    plan = EnvironmentConfig(
        kind="textarena", use="TicTacToe-v0", settings={"opponent": "policy"}, max_reply_tokens=4000
    )
    write_questions("textarena", "TicTacToe-v0", tmp_path / "rows.jsonl", 1, plan.settings)
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    task = Task("t", (1,), row.pop("prompt"), row)
    long = replace(TEMPLATES, tokenizer=replace(TEMPLATES.tokenizer, context_length=None))
    whole, cut = (
        grouped(replace(plan, max_turns=most), [task], ScriptedEngine(first_free), templates=long)[0]  # type: ignore
        for most in (9, 3)
    )

    assert [(g.task.columns["role"], g.rewards) for g in whole.by_role] == [("player_0", (1.0,)), ("player_1", (-1.0,))]
    assert [len(rollout.turn_ends) for rollout in whole.rollouts] == [4, 3]
    for seat, rollout in enumerate(whole.rollouts):
        shown = TEMPLATES.tokenizer.spelled(list(rollout.prompt))
        assert "Game 0 of TicTacToe-v0." in shown
        assert f"You are Player {seat}" in shown
    assert [(r.role, r.grade.reward, r.ending.by) for r in cut.rollouts] == [  # type: ignore[union-attr]
        ("player_0", 0.0, "turns"), ("player_1", 0.0, "turns"),
    ]  # fmt: skip


def test_what_another_player_says_is_heard():
    """Words that a game passes on are shown to the others with who said them, and not to who did."""
    needed("textarena")
    env = TextArenaEnv(EnvironmentConfig(kind="textarena", use="SimpleNegotiation-v0", settings={"opponent": "policy"}))
    env.deal({"seed": 0})
    heard = []
    for number in range(4):
        heard.append(env.turn())
        env.game.step(f"argument {number}")

    assert [seat for seat, _ in heard] == [0, 1, 0, 1]
    assert "[Player 0] [argument 0]" in heard[1][1]
    assert "argument 1" not in heard[3][1]


def test_a_game_for_two_needs_an_opponent():
    """The policy plays alone where none is named; the game's own words say how many it needs."""
    with pytest.raises(ConfigError, match=r"begun by one player \(settings.opponent names another\): .*has to be 2"):
        talk("textarena", "Nim-v0")
    with pytest.raises(ConfigError, match="textarena cannot make 'None-v0'"):
        talk("textarena", "None-v0")


SEARCH = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Search(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        mcp = FastMCP("search")

        @mcp.tool
        def find(word: str, length: int = 3) -> str:
            \"\"\"Look a word up.\"\"\"
            return word[:length]

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, word="none", **columns):
        return Observation(metadata={"word": word})

    def _step_impl(self, action, **more):
        raise NotImplementedError


app = create_app(Search, CallToolAction, CallToolObservation, env_name="search", max_concurrent_envs=4)
"""


def template(folder: Path) -> str:
    """Write what `openenv init echo` writes of the environment that the package ships; return the application."""
    shipped = files("openenv") / "cli" / "templates" / "openenv_env"
    names = {"ENV_NAME": "echo", "ENV_CLASS_NAME": "Echo", "ENV_TITLE_NAME": "Echo"}
    for part in ("models.py", "server/__init__.py", "server/app.py", "server/__ENV_NAME___environment.py"):
        text, to = (shipped / part).read_text(), folder / part.replace("__ENV_NAME__", "echo")
        to.parent.mkdir(exist_ok=True)
        to.write_text(re.sub(r"__(ENV_\w+?)__", lambda m: names[m[1]], text))
    return "server.app:app"


@contextlib.contextmanager
def served(app: str, folder: Path) -> Iterator[str]:
    """An OpenEnv server's address."""
    command = [sys.executable, "-m", "uvicorn", app, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            yield next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            server.terminate()


def test_openenv_steps_by_text_or_object(tmp_path: Path):
    """The echo environment that the package ships pays a tenth for each character, by text or as a JSON object."""
    needed("openenv")
    with served(template(tmp_path), tmp_path) as address:
        begun, text, given, wrong, end = talk("openenv", address, "hello", '{"message": "a"}', '{"message": 3}')

        assert begun["messages"] == [["user", '{"echoed_message": "Echo environment ready!", "message_length": 0}']]
        assert (text["reward"], given["reward"], end["reward"]) == (0.5, 0.1, None)
        assert json.loads(texts([text])[0]) == {"echoed_message": "hello", "message_length": 5}
        with pytest.raises(ConfigError, match=r"holds 1 sessions at once: set environment.max_concurrent = 1"):
            EnvServer(EnvironmentConfig(kind="openenv", use=address, max_concurrent=2)).prepare()
        assert wrong["messages"] == [["user", 'No such action: {"message": 3}']]
        assert wrong["fault"] is None


def test_openenv_tools_are_called(tmp_path: Path):
    """MCP tools are told and called, several in one answer, and an answer without a call ends the episode."""
    needed("openenv")
    (tmp_path / "search.py").write_text(SEARCH)
    call = '<tool_call>{{"name": "{}", "arguments": {{"word": "gnomon"}}}}</tool_call>'
    with served("search:app", tmp_path) as address:
        host = EnvServer(EnvironmentConfig(kind="openenv", use=address))
        (schema,) = host.answer({"do": "describe"})["schemas"]
        _, called, flawed, ended, _ = talk(
            "openenv", address, call.format("find") + call.format("none"), "<tool_call>{</tool_call>", "It is gno."
        )

    assert (schema["function"]["name"], schema["function"]["description"]) == ("find", "Look a word up.")
    assert sorted(schema["function"]["parameters"]["properties"]) == ["length", "word"]
    assert [role for role, _ in called["messages"]] == ["tool", "tool"]
    assert called["messages"][0][1] == "gno"
    assert "none" in called["messages"][1][1]
    assert (flawed["messages"][0][0], flawed["is_done"], ended["is_done"]) == ("tool", False, True)


def test_an_openenv_server_that_is_not_there_is_one_message():
    """Neither a name nor a closed port is a server."""
    needed("openenv")
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:1: .*start it"):
        talk("openenv", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="'echo_env' is no address"):
        talk("openenv", "echo_env")


@pytest.mark.parametrize("kind", ["gymnasium", "textarena", "openenv"])
def test_a_version_with_another_interface_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The message names both versions and what to type."""
    needed(kind)
    monkeypatch.setattr(environment, "version", lambda name: "0.2.0" if name == kind else metadata.version(name))
    with pytest.raises(ConfigError, match=f"here is 0.2.0: pip install {kind}=="):
        talk(kind, "http://127.0.0.1:1" if kind == "openenv" else "Any-v0")


@pytest.mark.slow
def test_a_run_plays_games_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every rollout sees the lake before its first answer; an answer without an action is told which there are."""
    needed("gymnasium")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n % 10}+{n // 10}=", "seed": n} for n in range(20)]
    Path("games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = gnomon.train(
        model="tiny", task={"kind": "table", "path": "games.jsonl", "require_answer": False}, precision="fp32",
        environment={
            "kind": "gymnasium", "use": "FrozenLake-v1", "settings": {"is_slippery": False}, "max_turns": 3,
            "max_turn_tokens": 2,
        },
        rollouts_per_step=16, max_completion_length=400, held_out={"size": 2, "fraction": 0.3}, steps=1,
    )  # fmt: skip

    rollouts = [each.rollout for each in run.rollouts(1)]
    assert len(rollouts) == 16
    assert {rollout.ending.by for rollout in rollouts} == {"turns"}
    assert all(rollout.grade.reward == 0.0 for rollout in rollouts)
    assert any("Name one of these actions: 0, 1, 2, 3." in rollout.text for rollout in rollouts)
