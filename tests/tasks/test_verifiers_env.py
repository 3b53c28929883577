"""Environments of the verifiers package, before its version 0.4, where it is installed: its loop, our answers."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import ConfigError
from gnomon.tasks.env_server import EnvServer
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.tasks.verifiers_env import write_questions

MINE = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


class Guess(vf.MultiTurnEnv):
    """Say the number; three turns."""

    async def setup_state(self, state, **more):
        state["left"] = 3
        return state

    @vf.stop
    async def solved(self, state):
        said = state["trajectory"] and state["trajectory"][-1]["completion"][-1]["content"]
        return said == state["answer"]

    async def env_response(self, messages, state, **more):
        state["left"] -= 1
        return [{"role": "user", "content": f"wrong, {state['left']} left"}]


async def right(completion, answer):
    return float(answer in completion[-1]["content"])


async def best(completions, answers):
    return [1.0 for _ in completions]


def load_environment(tools: bool = False, joint: bool = False):
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "answer": str(n)} for n in range(4)]
    common = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right]), "max_turns": 3}
    if joint:
        common["rubric"] = vf.RubricGroup([common["rubric"], vf.Rubric(funcs=[right, best])])
    return vf.ToolEnv(tools=[add], **common) if tools else Guess(**common)
'''


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment that the package finds."""
    pytest.importorskip("verifiers")
    if not version("verifiers").startswith("0.1."):
        pytest.skip("pip install verifiers==0.1.9")
    (tmp_path / "gnomon_guess.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "gnomon_guess"


def talk(name: str, *answers: str, **settings: Any) -> list[dict[str, Any]]:
    """What it says to a reset, to each answer, and at its end."""
    host = EnvServer(EnvironmentConfig(kind="verifiers", use=name, settings=settings))
    host.prepare()
    requests = [{"do": "reset", "seed": 0, "prompt": "say 2", "columns": {"answer": "2"}}]
    requests += [{"do": "step", "text": text} for text in answers]
    return [host.answer(request) for request in [*requests, {"do": "close"}]]


def test_its_loop_replies_stops_and_scores(name: str):
    """A wrong answer is replied to by env_response, the right one meets its stop, and the rubric rewards it."""
    begun, wrong, right, end = talk(name, "1", "2")

    assert begun == {"fault": None, "messages": [], "reward": None, "is_done": False}
    assert wrong["messages"] == [["user", "wrong, 2 left"]]
    assert right["is_done"]
    assert end == {"fault": None, "reward": 1.0}


def test_its_own_budget_ends_it_and_ours_leaves_it_scored(name: str):
    """Its third turn is the last; a conversation that we end before is scored as it stands."""
    assert [said["is_done"] for said in talk(name, "1", "0", "5")[1:-1]] == [False, False, True]
    assert talk(name, "1")[-1] == {"fault": None, "reward": 0.0}
    assert talk(name)[-1]["fault"] is None


def test_its_tools_are_described_called_and_answered(name: str):
    """A call in our form becomes one of its messages; its result comes back in the role of a tool."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    _, called, last, end = talk(name, call, "it is 2", tools=True)

    assert called["messages"] == [["tool", "2"]]
    assert (last["is_done"], end["reward"]) == (True, 1.0)
    described = EnvServer(EnvironmentConfig(kind="verifiers", use=name, settings={"tools": True})).answer(
        {"do": "describe"}
    )
    assert [schema["function"]["name"] for schema in described["schemas"]] == ["add"]


def test_rewards_of_whole_groups_are_refused_by_name(name: str):
    """Before a model loads: the package scores one rollout only without them."""
    with pytest.raises(ConfigError, match=r"functions of a whole group \(best\)[^$]*function = \"gnomon_guess:best\""):
        talk(name, joint=True)


def test_its_questions_can_be_written_down(name: str, tmp_path: Path):
    """One JSON object a line, with prompt and answer."""
    path = tmp_path / "questions.jsonl"

    assert write_questions(name, path) == 4
    assert path.read_text().splitlines()[2].startswith('{"prompt": [{"role": "user", "content": "say 2"}]')


def test_an_environment_that_is_not_there_is_one_message(name: str):
    """Its name, and what the package says."""
    with pytest.raises(ConfigError, match="verifiers cannot load the environment 'gnomon_none'"):
        talk("gnomon_none")
