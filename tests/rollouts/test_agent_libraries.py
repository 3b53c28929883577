"""Agents of installed libraries (`make test-full`) call the policy as they would call a hosted model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.rollouts.test_agent import TEMPLATES, Parrot, played, say, spelled, task_of

from gnomon.config.experiment import load
from gnomon.tasks.environment import EnvironmentConfig
from gnomon.training.api import train_experiment

EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'
LAST = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "done"}}\n</tool_call>'
LEARNING = '''
import os

from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


async def legible(prompt):
    """Two turns of one conversation; an answer that begins with a sign between ! and P is right."""
    agent = Agent("solver", model=os.environ["OPENAI_MODEL"])
    first = await Runner.run(agent, prompt)
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "again"}])
    return sum(0.5 * ("!" <= str(each.final_output)[:1] <= "P") for each in (first, second))
'''


@pytest.mark.parametrize(
    ("library", "name", "answers"),
    [
        ("agents", "by_openai_agents", [CALL, "done"]),
        ("smolagents", "by_smolagents", [CALL, LAST]),
    ],
)
def test_a_library_s_agent_calls_its_tool(library: str, name: str, answers: Sequence[str]):
    """Its first call's tool is called, and what was sampled is trained on.

    It is one conversation where the library sends back what was said, and a segment a turn where it writes calls anew.
    """
    pytest.importorskip(library)
    roomy = replace(TEMPLATES, tokenizer=replace(TEMPLATES.tokenizer, context_length=10_000))
    use = f"{EXAMPLES / 'agent_libraries.py'}:{name}"
    plan = EnvironmentConfig(kind="agent", use=use, timeout_seconds=60.0, max_reply_tokens=20000)
    [rollout] = played(plan, [task_of()], Parrot([say(answer) for answer in answers]), templates=roomy)

    assert (rollout.ending.by, rollout.ending.turns, rollout.ending.cause) == ("done", 2, None)
    sampled = [token for row in rollout.rows for token, chosen in zip(row.response, row.mask, strict=True) if chosen]
    assert sampled == [token for answer in answers for token in say(answer)]
    assert len(rollout.rows) == {"agents": 1, "smolagents": 2}[library]
    assert "42" in spelled((*rollout.rows[-1].prompt, *rollout.rows[-1].response))


def test_a_library_s_agent_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over 12 steps the reward of an agent of OpenAI's SDK rises; its second turn extends the first: one row."""
    pytest.importorskip("agents")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LEARNING)
    options = [
        "algorithm.num_generations=4", "rollouts_per_step=32", "task.size=60", "evaluation.before=false", "steps=12",
        "learner.precision=fp32", "sampling.max_completion_length=60", "environment.kind=agent",
        "environment.max_turn_tokens=2", "environment.max_reply_tokens=50", "environment.use=mine.py:legible",
        'rewards=[{kind = "environment"}]',
    ]  # fmt: skip
    train_experiment(load(RANDOM, options), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in metrics]

    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert {row["turns/segments_mean"] for row in metrics} == {1.0}
    assert max(row["mismatch/logprob_abs_mean_nats"] for row in metrics) < 1e-5
