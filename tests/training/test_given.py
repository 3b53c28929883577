"""The dataset's answers beside the policy's own: a run of it, and what is refused."""

import json
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.algorithms import resolve
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.types import GIVEN
from gnomon.training.api import train_experiment


def test_one_answer_of_each_group_is_the_datasets(tmp_path: Path):
    """It is judged like the others, recorded as given, taught by SRFT's two terms, and in no measure of staleness."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = (f"task={path}", "rewards=[{kind='numeric'}]", "held_out.size=0", "rollouts_per_step=16", "steps=3")
    quick = ("learner.precision=fp32", "grading.workers=1", "evaluation.before=false", "checkpoints.every=0")
    more = ("algorithm=srft", "algorithm.num_generations=4", "sampling.max_completion_length=3", "max_staleness=1")

    run = train_experiment(load(RANDOM, [*settings, *quick, *more]), tmp_path / "run")

    rows = run.rollouts(2)
    given = [row for row in rows if row.rollout.oldest_version == GIVEN]
    assert len(given) == 4
    assert {row.group for row in given} == {0, 1, 2, 3}
    assert all(row.rollout.grade.reward == 1 for row in given)
    assert max(run.metrics["stream/staleness_steps_max"]) <= 1
    assert min(run.metrics["loss/given_nll_nats"]) > 1
    assert run.metrics["mismatch/logprob_abs_max_nats"][0] < 0.01  # of a given token it would be above 5


def test_what_was_given_is_no_success_of_the_policy(tmp_path: Path):
    """No sampled answer is right: the tracked rates stay 0, nothing is imitated, nobody's zeros are a mismatch, and a
    correction leaves the demonstration in the loss.
    """
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = (f"task={path}", "rewards=[{kind='numeric'}]", "held_out.size=0", "rollouts_per_step=16", "steps=3")
    quick = ("learner.precision=fp32", "grading.workers=1", "evaluation.before=false", "checkpoints.every=0")
    tracked = ("algorithm.sampler=Prioritized", "algorithm.tracker={piece='TrackerConfig', prior=0, drift='replayed'}")
    more = ("algorithm=luffy", "algorithm.num_generations=4", "sampling.max_completion_length=3", *tracked)
    pieces = ("algorithm.correction=MaskedIS", "algorithm.replay={every=1}")

    run = train_experiment(load(RANDOM, [*settings, *quick, *more, *pieces]), tmp_path / "run")

    assert run.metrics["rollout/reward_mean"] == [0.0] * 3
    assert run.metrics["rollout/all_equal_zero_fraction"] == [1.0] * 3
    assert run.metrics["tracker/value_mean"] == [0.0] * 3
    assert run.metrics["imitation/buffer"] == [0.0] * 3
    assert max(run.metrics["mismatch/total_abs_nats"]) < 0.01
    assert min(run.metrics["learner/gradient_norm"]) > 0


@pytest.mark.parametrize("preset", ["ppo", "vc-ppo", "vapo"])
def test_a_critic_learns_nothing_from_what_was_given(preset: str, tmp_path: Path):
    """No sampled answer is right and every value stays 0, so a demonstration's advantage stays its whole reward."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = (f"task={path}", "rewards=[{kind='numeric'}]", "held_out.size=0", "rollouts_per_step=16", "steps=3")
    quick = ("learner.precision=fp32", "grading.workers=1", "evaluation.before=false", "checkpoints.every=0")
    more = ("algorithm.demonstrated=true", "algorithm.num_generations=4", "sampling.max_completion_length=3")
    critic = ("algorithm.critic.pretraining=none", "algorithm.critic.order=before")

    run = train_experiment(load(RANDOM, [f"algorithm={preset}", *settings, *quick, *more, *critic]), tmp_path / "run")

    assert run.metrics["rollout/reward_mean"] == [0.0] * 3
    assert run.metrics["critic/return_mean"] == [0.0] * 3
    assert run.metrics["critic/value_mean"] == [0.0] * 3
    assert min(run.metrics["learner/gradient_norm"]) > 0


def test_a_reward_that_compares_answers_sees_the_datasets_beside_the_policys(tmp_path: Path):
    """It is paid the number of answers that it sees: 4 for each of a group of 4, the given one among them."""
    path, pays = tmp_path / "sums.jsonl", tmp_path / "pays.py"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    pays.write_text(
        "def pay(prompts, completions, **columns):\n    return [float(len(completions))] * len(completions)\n"
    )
    settings = (
        f"task={path}",
        f"rewards=[{{kind='function', function='{pays}:pay', over='group'}}]",
        "held_out.size=0",
        "steps=1",
    )
    quick = ("learner.precision=fp32", "grading.workers=1", "evaluation.before=false", "checkpoints.every=0")
    more = ("algorithm=luffy", "algorithm.num_generations=4", "rollouts_per_step=8", "sampling.max_completion_length=3")

    rows = train_experiment(load(RANDOM, [*settings, *quick, *more]), tmp_path / "run").rollouts(1)

    assert [row.rollout.grade.reward for row in rows] == [4.0] * 8
    assert sum(row.rollout.oldest_version == GIVEN for row in rows) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preset": "luffy", "num_generations": 1}, "num_generations = 2"),
        ({"preset": "grpo", "surrogate": "GivenShaping"}, "no response is given, .* algorithm.demonstrated = true"),
        ({"preset": "grpo", "regularizers": ["GivenNll"]}, "algorithm.demonstrated = true"),
        ({"preset": "sft", "demonstrated": True}, "demonstrated is about sampled ones"),
    ],
)
def test_compositions_without_a_given_answer_are_refused(change: dict[str, object], said: str):
    """Each message names the setting that mends it."""
    with pytest.raises(ConfigError, match=said):
        resolve(change)


def test_a_measured_staleness_is_refused():
    """What nobody sampled has no effective sample size."""
    with pytest.raises(ConfigError, match="set max_staleness to a number"):
        load(RANDOM, ["algorithm=luffy", "max_staleness=measured"])
