"""Tools: functions to schemas, text to calls, calls to replies."""

import functools
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from gnomon.core.errors import ConfigError, RewardError
from gnomon.rewards.sandbox.base import Outcome
from gnomon.tasks.env_server import LONGEST_REPLY, EnvServer
from gnomon.tasks.environment import PACKAGES, EnvironmentConfig
from gnomon.tasks.python_tool import LONGEST_OUTPUT, shown
from gnomon.tasks.tools import ToolCall, describe_tools, find_calls, misfit, schema_of

MINE = '''
import asyncio


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def shout(text: str) -> str:
    """Say it loudly."""
    await asyncio.sleep(0)
    return text.upper()


def untold(a):
    """It has no types."""


def breaks(text: str) -> str:
    """It raises."""
    raise KeyError(text)


def floods(size: int) -> str:
    """It says too much."""
    return "x" * size


class Counter:
    """TRL's form: public methods are tools, and reset takes the columns."""

    def __init__(self, start: int = 0):
        self.start = start
        self.reward = 0.0

    def reset(self, answer: str, **columns):
        self.total = self.start
        return f"count to {answer}"

    def count(self, by: int) -> int:
        """Count on."""
        self.total += by
        self.reward = float(self.total)
        return self.total


class Own:
    """Ours: reset and step."""

    def reset(self, prompt, seed):
        self.prompt = prompt

    def step(self, text):
        return {"text": text} if text == "wrong" else self.prompt + text


class NoStep:
    """It cannot be talked to."""

    def reset(self):
        return None
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file of tools and environments."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool."""
    return f"I call <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def talk(plan: EnvironmentConfig, *answers: str, **columns: Any) -> list[dict[str, Any]]:
    """What an environment says to a reset, to each answer, and at its end."""
    host = EnvServer(plan)
    host.prepare()
    requests = [
        {"do": "reset", "seed": 0, "prompt": "q", "columns": columns},
        *({"do": "step", "text": a} for a in answers),
    ]
    return [host.answer(request) for request in [*requests, {"do": "close"}]]


def test_a_schema_says_what_annotations_and_docstring_say():
    """Types become JSON's, Google-style lines become descriptions, defaults become optional."""

    def search(words: list[str], kind: Literal["web", "news"], limit: int | None = None, exact: bool = False) -> str:
        """Search for words.

        Args:
            words: what to look for
            limit: how many at most
        """
        return ""

    function = schema_of(search)["function"]
    assert (function["name"], function["description"]) == ("search", "Search for words.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "description": "what to look for"},
            "kind": {"type": "string", "enum": ["web", "news"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "how many at most"},
            "exact": {"type": "boolean"},
        },
        "required": ["words", "kind"],
    }
    fine = {"words": ["a"], "kind": "web"}
    assert misfit(fine, schema_of(search)) is None
    assert misfit({**fine, "limit": 2, "exact": True}, schema_of(search)) is None
    assert misfit({**fine, "exact": 1}, schema_of(search)) == "exact should be boolean"
    assert misfit({**fine, "words": [1]}, schema_of(search)) == "words should be array"
    assert misfit({**fine, "kind": "x"}, schema_of(search)) == "kind should be 'web' or 'news'"
    assert misfit({"words": [], "more": 1}, schema_of(search)) == (
        "the arguments do not fit (missing: kind; unknown: more); it takes words, kind, limit, exact"
    )


def drawn(a: int):
    """Return nothing by itself."""
    yield a


class Called:
    """A class, whose call makes an object."""


def named(a: int) -> int:
    """Return it."""
    return a


named.__name__ = "a b"


def spelled(a: Literal[b"x"]) -> int:
    """Return a number."""
    return 1


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        (drawn, "is no plain function"),
        (Called, "is no plain function"),
        (functools.partial(named, 1), "is no plain function"),
        (named, "'a b' needs a name of letters"),
        (spelled, r"spelled\.a: .* is no type of JSON"),
    ],
)
def test_what_is_no_tool_is_refused(tool: Any, wrong: str):
    """What a call would make of it is an object's name in the reply, and nothing would be said."""
    with pytest.raises(ConfigError, match=wrong):
        schema_of(tool)


def test_a_function_without_docstring_or_types_is_no_tool():
    """The model could not know what it does, or what to pass."""

    def bare(a: int) -> int:
        return a

    def strange(a: object) -> int:
        """Take anything."""
        return 1

    with pytest.raises(ConfigError, match="'bare' needs a docstring"):
        schema_of(bare)
    with pytest.raises(ConfigError, match=r"strange\.a: <class 'object'> is no type of JSON"):
        schema_of(strange)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("4", []),
        (call("add", a=1) + call("add", a=2), [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})]),
        ('<tool_call>{"name": "add", "parameters": {}}', [ToolCall("add", {})]),
        ("<tool_call>{}</tool_call>", [ToolCall("", {}, 'a call is {"name": ..., "arguments": {...}}')]),
        ('<tool_call>{"name": "a", "arguments": 1}</tool_call>', [ToolCall("a", {}, "arguments must be an object")]),
        ("Now:\n```python\nprint(1)\n```", [ToolCall("python", {"code": "print(1)\n"})]),
        ("```python\nprint(1)", []),
    ],
)
def test_calls_are_read_from_text(text: str, calls: list[ToolCall]):
    """Tagged JSON, also without its end; a fenced block for Python; anything else is no call."""
    assert find_calls(text, "python") == calls


def test_a_fenced_block_is_no_call_without_the_python_tool():
    """It is then only text; and what is tagged but no JSON says why."""
    assert find_calls("```python\nprint(1)\n```") == []
    [broken] = find_calls("<tool_call>{name</tool_call>")
    assert broken.flaw is not None
    assert broken.flaw.startswith("the call is not JSON")


def test_each_call_is_answered_and_an_answer_without_one_is_the_last(mine: str):
    """Plain and asynchronous tools; results that are no text become JSON."""
    plan = EnvironmentConfig(kind="tools", tools=(f"{mine}:add", f"{mine}:shout"))
    first, second, last, end = talk(plan, call("add", a=2, b=3) + call("shout", text="hi"), "It is 5.")

    assert first["messages"] == []
    assert second["messages"] == [["tool", "5"], ["tool", "HI"]]
    assert (second["is_done"], last["is_done"], last["messages"]) == (False, True, [])
    assert end == {"fault": None, "reward": None}


def test_a_call_that_cannot_be_made_is_answered_with_what_is_wrong(mine: str):
    """The policy's mistakes are its own to learn from: they end nothing."""
    plan = EnvironmentConfig(kind="tools", tools=(f"{mine}:add",))
    wrong = [call("sub", a=1), call("add", a="1"), call("add"), "<tool_call>{</tool_call>"]
    replies = [said["messages"][0][1] for said in talk(plan, *wrong)[1:-1]]

    assert replies[0] == "error: there is no tool 'sub'; there are add"
    assert replies[1] == "error: a should be integer"
    assert replies[2] == "error: the arguments do not fit (missing: a); it takes a, b"
    assert replies[3].startswith("error: the call is not JSON")


def test_a_tool_that_raises_ends_the_rollout_or_is_answered(mine: str):
    """on_error says which; the cause names the tool and its line."""
    tools = (f"{mine}:breaks",)
    ended = talk(EnvironmentConfig(kind="tools", tools=tools), call("breaks", text="x"))[1]
    told = talk(EnvironmentConfig(kind="tools", tools=tools, on_error="reply"), call("breaks", text="x"))[1]

    assert ended["fault"].startswith("breaks: KeyError: 'x' (mine.py:")
    assert told["messages"] == [["tool", "error: KeyError: 'x'"]]


def test_a_flood_does_not_cross(mine: str):
    """Of a reply beyond the limit only its length is sent."""
    plan = EnvironmentConfig(kind="tools", tools=(f"{mine}:floods",))

    assert talk(plan, call("floods", size=LONGEST_REPLY + 1))[1] == {"fault": None, "flood": LONGEST_REPLY + 1}


def test_trl_environments_have_tools_for_methods_and_a_reward_for_an_attribute(mine: str):
    """reset's text is an observation; ``reward`` is read at the end."""
    plan = EnvironmentConfig(kind="trl", use=f"{mine}:Counter", settings={"start": 1})
    begun, counted, end = talk(plan, call("count", by=2), answer="3")

    assert begun["messages"] == [["user", "count to 3"]]
    assert counted["messages"] == [["tool", "3"]]
    assert end["reward"] == 3.0
    described = EnvServer(plan).answer({"do": "describe"})
    assert [schema["function"]["name"] for schema in described["schemas"]] == ["count"]


def test_an_environment_of_ones_own_gets_what_it_names(mine: str):
    """prompt and seed are offered beside the columns; a text is a reply, anything else a fault that says so."""
    plan = EnvironmentConfig(use=f"{mine}:Own")
    _, said, wrong, _ = talk(plan, "!", "wrong", seed=1)

    assert said == {"fault": None, "messages": [["user", "q!"]], "reward": None, "is_done": False}
    assert wrong["fault"].startswith("TypeError: step returned dict, expected a Reply or a text")


USE = {"openenv": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"use": "FILE:Ownn"}, RewardError, "environment 'FILE:Ownn': unknown class 'Ownn'; did you mean 'Own'"),
        ({"use": "FILE:NoStep"}, ConfigError, "has no step: a class with reset and step"),
        ({"use": "FILE:Own", "settings": {"x": 1}}, ConfigError, "do not fit 'FILE:Own' .*unexpected"),
        ({"kind": "tools", "tools": ("FILE:untold",)}, ConfigError, "'untold': the parameter 'a' needs a type"),
        ({"kind": "tools", "tools": ("no/file.py:a",)}, RewardError, "tool 'no/file.py:a': there is no file"),
        ({"kind": "tools"}, ConfigError, 'kind = "tools" needs tools'),
        ({"use": "Own"}, ConfigError, "'Own' is named as path.py:name"),
        ({"use": "a:B", "max_turns": 0}, ConfigError, "environment.max_turns must be at least 1, got 0"),
        *(
            (
                {"kind": kind, "use": "http://127.0.0.1:1" if kind == "openenv" else "x"},
                ConfigError,
                f"pip install {kind}=={tested}",
            )
            for kind, (_, tested) in PACKAGES.items()
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    mine: str, plan: dict[str, Any], error: type[Exception], message: str
):
    """Names, settings, types and missing packages: one message each."""
    placed = {
        key: tuple(v.replace("FILE", mine) for v in value)
        if isinstance(value, tuple)
        else value.replace("FILE", mine)
        if isinstance(value, str)
        else value
        for key, value in plan.items()
    }
    with pytest.raises(error, match=message.replace("FILE", mine)):
        EnvServer(EnvironmentConfig(**placed)).prepare()


def test_what_a_program_did_is_shown_and_cut_in_the_middle():
    """Output, errors and cause; of too much the beginning and the end."""
    assert shown(Outcome("4\n", "", None, 0.1)) == "4"
    assert shown(Outcome("", "", None, 0.1)) == "[no output]"
    assert shown(Outcome("a", "Traceback\n", "exit 1", 0.1)) == "a\nTraceback\n[ended: exit 1]"
    long = shown(Outcome("a" * LONGEST_OUTPUT + "b", "", None, 0.1))
    assert long.startswith("aaa")
    assert "\n[1 characters left out]\n" in long
    assert long.endswith("ab")


def test_a_model_without_a_tool_format_is_told_one():
    """The system message holds each schema on a line, and the form of a call."""

    def add(a: int) -> int:
        """Add."""
        return a

    told = describe_tools([schema_of(add)])
    assert '{"name": "add", "description": "Add."' in told
    assert "<tool_call>" in told
