"""Runs whose rollouts are agents: they learn, and the learner's log-probabilities are the engine's."""

import json
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.training.api import train_experiment

MINE = '''
import json
import os
import urllib.request


def asked(messages, name="policy"):
    """One call of the policy, as any client makes it."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": messages, "model": name}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as reply:
        return json.load(reply)["choices"][0]["message"]


def legible(prompt):
    """Two answers that begin with a sign between ! and P are right; what was wrong is said."""
    messages, reward = [{"role": "user", "content": prompt}], 0.0
    for _ in range(2):
        said = asked(messages)
        is_right = "!" <= said["content"][:1] <= "P"
        reward += 0.5 * is_right
        messages += [said, {"role": "user", "content": "ok" if is_right else f"<|eos|>{said['content']}"}]
    return reward


def summarizing(prompt):
    """The same, but the second call has a summary in place of the history: two segments."""
    said = asked([{"role": "user", "content": prompt}])["content"]
    again = asked([{"role": "user", "content": f"You said {said!r} to {prompt}"}])["content"]
    return sum(0.5 * ("!" <= text[:1] <= "P") for text in (said, again))


def two_roles(prompt):
    """A solver and a judge of the solver's answer, each with its own conversation of two answers."""
    solver, judge, reward = [], [], 0.0
    said = {"content": prompt}
    for _ in range(2):
        for name, messages in (("solver", solver), ("judge", judge)):
            messages.append({"role": "user", "content": f"{name}: {said['content']}"})
            said = asked(messages, name)
            messages.append(said)
            reward += 0.25 * ("!" <= said["content"][:1] <= "P")
    return reward
'''
OPTIONS = [
    "name=agent", "algorithm.num_generations=4", "rollouts_per_step=32", "task.size=60", "evaluation.before=false",
    "learner.precision=fp32", "sampling.max_completion_length=60", "environment.kind=agent",
    "environment.max_turn_tokens=2", "environment.max_reply_tokens=50", 'rewards=[{kind = "environment"}]',
]  # fmt: skip


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("agent", "segments", "turns", "more"),
    [
        ("legible", 1, 2, []),
        pytest.param("legible", 1, 2, ["max_staleness=1"], marks=SLOW),
        pytest.param("summarizing", 2, 2, [], marks=SLOW),
        pytest.param("two_roles", 2, 4, [], marks=SLOW),
    ],
)
def test_what_an_agent_rewards_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, segments: int, turns: int, more: list[str]
):
    """Over 12 steps the reward rises, synchronous or not; the learner's log-probabilities are the engine's.

    So it is where an agent puts a summary in place of its history, and where it plays two roles.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    options = [*OPTIONS, f"environment.use=mine.py:{agent}", f"environment.max_turns={turns}", "steps=12", *more]
    train_experiment(load(RANDOM, options), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in metrics]

    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert [row["turns/mean"] for row in metrics] == [turns] * 12
    assert [row["turns/segments_mean"] for row in metrics] == [segments] * 12
    assert [row["turns/ended_by_done_fraction"] for row in metrics] == [1.0] * 12
    roles = [row.get("turns/role_judge_answers_mean") for row in metrics]
    assert roles == [2.0 if agent == "two_roles" else None] * 12
    if not more:
        assert max(row["mismatch/logprob_abs_mean_nats"] for row in metrics) < 1e-5
