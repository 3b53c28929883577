"""Every algorithm learns: a tiny model made from scratch is asked to copy a digit, on the path that a real run takes.

The prompt is a letter and a digit, the answer is the digit. Whoever answers without reading the prompt earns 0.1 at
most, so no algorithm can pass by learning the form of an answer alone.
"""

import json
import string
from pathlib import Path
from statistics import fmean

import pytest

from gnomon.algorithms import PRESETS
from gnomon.config.experiment import load
from gnomon.training.api import train_experiment

BLIND = 0.1
STEPS = 40
QUICK = {"reinforce": 20, "p3o": 40}
"""After how many steps it reads. GRPO, SPO and VAPO learn in test_walks.py and test_critic_walks.py; the others, made
of the same pieces, are slow together."""
LONGER = {"gdpo": 70}
"""Dividing by the batch's deviation, which is small while most groups agree, makes the first steps wilder."""
EXPERIMENT = """
name = "copy"
model = "tiny"
rollouts_per_step = 128
rewards = [{kind = "numeric"}]
checkpoints = {every = 0}
evaluation = {before = false}
held_out = {size = 10}
sampling = {max_completion_length = 2}
learner = {precision = "fp32", optimizer = {learning_rate = 3e-3}}
"""
FEWER_UPDATES = ("algorithm.updates.minibatches=4",)
BESIDE = ("expert-iteration", "raft", "luffy", "srft")
"""They learn from rewards too, though no recorded batch has enough for them."""
TAUGHT = {"opd"}
"""They follow a teacher and no reward, and walk in tests/training/test_teacher.py."""
SHORT_PRETRAINING = ("algorithm.critic.pretraining.steps=6",)
# What a setting for long answers, large batches or long runs must give up for two tokens and forty steps.
SETTINGS: dict[str, tuple[str, ...]] = {
    "a-star-po": ("algorithm.surrogate.beta=0.05",),
    "dapo": ("algorithm.overlong=none", *FEWER_UPDATES),
    "p3o-two-anchor": ("algorithm.updates.minibatches=2",),
    "dppo": ("algorithm.aggregate.length=2", *FEWER_UPDATES),
    "dppo-kl": ("algorithm.aggregate.length=2", *FEWER_UPDATES),
    "dr-grpo": ("algorithm.aggregate.length=2",),
    "fipo": ("algorithm.overlong=none", *FEWER_UPDATES),
    "high-entropy": ("algorithm.overlong=none", "algorithm.correction.share=0.6", *FEWER_UPDATES),
    "kl-cov": ("algorithm.updates.minibatches=2",),
    "luspo": ("algorithm.updates.minibatches=2",),
    "clip-cov": ("algorithm.updates.minibatches=2",),
    "bapo": ("algorithm.updates.epochs=1", "algorithm.updates.minibatches=1"),
    "vapo": ("algorithm.advantage.policy_lambda.alpha=1.0", *FEWER_UPDATES, *SHORT_PRETRAINING),
    "vapo-review": SHORT_PRETRAINING,
    "vc-ppo": SHORT_PRETRAINING,
}


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an experiment over 260 prompts."""
    folder = tmp_path_factory.mktemp("copy")
    rows = [
        {"prompt": f"{letter}{digit}", "answer": str(digit)} for letter in string.ascii_lowercase for digit in range(10)
    ]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "copy.toml"
    path.write_text(f'{EXPERIMENT}task = {{kind = "table", path = "{folder / "digits.jsonl"}"}}\n')
    return path


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*PRESETS, *BESIDE) if n not in TAUGHT],
)
def test_every_preset_learns_to_read_its_prompt(name: str, copying: Path, tmp_path: Path):
    """Over its last five steps each algorithm earns clearly more than the best answer that ignores the prompt."""
    steps = QUICK.get(name, LONGER.get(name, STEPS))
    experiment = load(str(copying), [f"algorithm={name}", f"steps={steps}", *SETTINGS.get(name, ())])
    train_experiment(experiment, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward_mean"] for row in rows]
    for row in rows:
        causes = {name: share for name, share in row.items() if name.startswith("waste/")}
        assert sum(causes.values()) == pytest.approx(row["tokens/wasted_fraction"]), causes
        assert min(causes.values()) >= 0, causes

    assert len(rewards) == steps
    assert fmean(rewards[:3]) < BLIND
    assert fmean(rewards[-5:]) > 1.5 * BLIND
