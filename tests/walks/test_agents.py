"""Runs whose rollouts are agents: they learn, and the learner's log-probabilities are the engine's."""

import json
from pathlib import Path

import pytest

from gnomon.config.experiment import load
from gnomon.training.api import train_experiment

MINE = '''
import json
import os
import urllib.request


def asked(messages):
    """One call of the policy, as any client makes it."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": messages}).encode()
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
'''
OPTIONS = [
    "name=agent", "algorithm.num_generations=4", "rollouts_per_step=32", "task.size=60", "evaluation.before=false",
    "learner.precision=fp32", "sampling.max_completion_length=60", "environment.kind=agent", "environment.max_turns=2",
    "environment.max_turn_tokens=2", "environment.max_reply_tokens=50", 'rewards=[{kind = "environment"}]',
]  # fmt: skip


@pytest.mark.parametrize("more", [[], pytest.param(["max_staleness=1"], marks=pytest.mark.slow)])
def test_what_an_agent_rewards_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]):
    """Over 12 steps the reward rises, synchronous or not; the learner's log-probabilities are the engine's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    train_experiment(load("tiny", [*OPTIONS, "environment.use=mine.py:legible", "steps=12", *more]), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in metrics]

    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert [row["turns/mean"] for row in metrics] == [2.0] * 12
    assert [row["turns/ended_by_done_fraction"] for row in metrics] == [1.0] * 12
    if not more:
        assert max(row["mismatch/logprob_abs_mean_nats"] for row in metrics) < 1e-5
