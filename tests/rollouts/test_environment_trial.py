"""Environments of a user's own that are wrong, played with made answers before a model loads."""
# ruff: noqa: E501

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnomon.core.errors import ConfigError, GradingError
from gnomon.rewards.base import Sample
from gnomon.rewards.budget import FaultBudget
from gnomon.rewards.reward_trial import made_answers
from gnomon.rollouts.env_workers import try_environment
from gnomon.tasks.environment import EnvironmentConfig

HEAD = """
import time
from gnomon.tasks.environment import Reply
class Mine:
"""
RESET = "    def reset(self, answer, **columns): self.answer = answer\n"
Plan = Callable[..., EnvironmentConfig]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return a function that writes a class to a file and returns the plan with it."""

    def written(body: str, **settings: Any) -> EnvironmentConfig:
        path = tmp_path / "mine.py"
        path.write_text(f"{HEAD}{body}\n")
        return EnvironmentConfig(use=f"{path}:Mine", **settings)

    return written


def questions() -> list[list[Sample]]:
    """Return made answers to one question."""
    return [made_answers("6 * 7?", {"answer": "42"}, ())]


WRONG = [
    (f"{RESET}    def step(self, text): return None", "step returned NoneType, expected a Reply or a text"),
    (f"{RESET}    def step(self, text): return 'ok', 1.0, True, {{}}", "step returned tuple, expected a Reply"),
    (f"{RESET}    def step(self, text): return {{'text': 'ok'}}", "step returned dict, expected a Reply"),
    (f"{RESET}    def step(self, text): return 1.0", "step returned float"),
    (f"{RESET}    def step(self, text): return Reply('x', reward=float('nan'))", "the reward of a reply: returned nan"),
    (f"{RESET}    def step(self, text): return Reply('x', reward='1')", "the reward of a reply: returned '1'"),
    (f"{RESET}    def step(self, text): return Reply('x', is_done='no')", "is_done = 'no', expected True or False"),
    (f"{RESET}    def step(self, text): return Reply(None)", "a Reply without text"),
    (f"{RESET}    def step(self, text): return Reply('x', role='system')", "a role that is none"),
    (f"{RESET}    def step(self): return 'x'", "takes 1 positional argument but 2 were given"),
    (f"{RESET}    def step(self, text): return Reply('x', done=True)", "unexpected keyword argument 'done'"),
    ("    def reset(self, **c): return 'x', {}\n    def step(self, text): return 'x'", "reset failed.*reset returned tuple"),
    ("    def reset(self, gold): pass\n    def step(self, text): return 'x'", "missing 1 required positional argument: 'gold'"),
    (f"{RESET}    def step(self, text): return self.state", "has no attribute 'state' .mine.py:\\d+ in step"),
    (f"{RESET}    def step(self, text): time.sleep(9)", "step failed to the answer '': no reply after 0.3 s"),
    (f"{RESET}    def step(self, text): return 'x'\n    def close(self): raise OSError('busy')", "close failed.*OSError: busy"),
    (f"{RESET}    def step(self, text):\n        import os\n        os._exit(1)", "its process exited with status 1"),
    (f"{RESET}    def step(self, text):\n        import os\n        os.abort()", "its process was killed by SIGABRT"),
    (f"{RESET}    def step(self, text): return None if text else 'x'", "step returned NoneType.*so it was in 2 of the 3"),
    (f"{RESET}    def step(self, text): return 'x' if text else Reply('x', float('nan'))", "returned nan.*so it was in 1 of"),
    (f"{RESET}    def step(self, text): return '\\ud800'", "step returned a text with half a surrogate pair at character 1"),
    ("    def reset(self, **c): return 'a\\udc00'\n    def step(self, text): return 'x'", "reset returned a text with half"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), WRONG)
def test_an_environment_that_is_wrong_names_the_protocol(plan: Plan, body: str, said: str):
    """What it returns, takes, raises or waits for, with the answer, the row's columns and the protocol's line."""
    with pytest.raises(ConfigError, match=f"(?s)environment '.*mine.py:Mine': .*{said}.*columns are answer") as caught:
        try_environment(plan(body, timeout_seconds=0.3), questions())

    assert "an environment is `reset(**columns) -> str | None` and `step(text: str) -> Reply | str`" in str(
        caught.value
    )
    assert len(str(caught.value).splitlines()) <= 5


RIGHT = [
    f"{RESET}    def step(self, text): return Reply('', reward=float(text == self.answer), is_done=True)",
    f"{RESET}    async def step(self, text): return 'go on'",
    "    def reset(self, **columns): return 'begin'\n    def step(self, text): return Reply('x', 1)",
]


@pytest.mark.parametrize("body", RIGHT)
def test_an_environment_that_is_right_is_passed_in_silence(plan: Plan, body: str):
    """Each conversation has an instance of its own."""
    assert try_environment(plan(body), questions()) == ()


CHANGING = {
    "reset returned {'messages': [['user', '": "    def reset(self, **c): return str(time.time_ns())\n    def step(self, text): return 'x'",
    "step returned {'messages': [['user', 'x']], 'reward': 0.": f"{RESET}    def step(self, text): return Reply('x', __import__('random').SystemRandom().random())",
    "a resumed run plays another game": "    def reset(self, **c): return __import__('uuid').uuid4().hex\n    def step(self, text): return 'x'",
    "draw by the column seed, or by random": f"{RESET}    def step(self, text): return __import__('os').urandom(8).hex()",
}


@pytest.mark.parametrize("said", CHANGING)
def test_an_environment_that_is_another_each_time_is_said(plan: Plan, said: str):
    """With one seed, question and answer it opens, replies or pays otherwise: by a clock, or a generator of its own."""
    (note,) = try_environment(plan(CHANGING[said]), questions())

    assert said in note
    assert len(note) < 500


@pytest.mark.parametrize("drawn", ["Random(seed).random()", "random()"])
def test_an_environment_that_draws_by_its_seed_is_passed_in_silence(plan: Plan, drawn: str):
    """The seed of reset is one number whenever a rollout is asked for again, and Python's generator begins with it."""
    body = f"    def reset(self, seed, **c): return str(__import__('random').{drawn})\n"

    assert try_environment(plan(f"{body}    def step(self, text): return 'x'"), questions()) == ()


def test_an_environment_that_fails_on_odd_answers_is_said(plan: Plan):
    """A reply that fails is an end, and the policy's to learn from."""
    (said,) = try_environment(plan(f"{RESET}    def step(self, text): return str(int(text))"), questions())

    assert "fails in 2 of 3 conversations that were tried; step failed to the answer '': ValueError" in said


def test_most_conversations_failing_in_one_line_end_the_run():
    """Whatever the values in its message; other ends and other lines count against it."""
    budget = FaultBudget()
    for number in range(15):
        budget.observe(f"ValueError: bad {number} (mine.py:3 in step)")

    with pytest.raises(GradingError, match=r"16 of the last 16 conversations .* bad 15 \(mine.py:3 in step\)"):
        budget.observe("ValueError: bad 15 (mine.py:3 in step)")


def test_half_of_the_conversations_may_fail():
    """A policy may break its environment, and is graded for it."""
    budget = FaultBudget()
    for number in range(200):
        budget.observe(None if number % 2 == 0 else "ValueError: bad (mine.py:3 in step)")
        budget.observe(f"KeyError: {number} (mine.py:{number} in step)")
