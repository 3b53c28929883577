"""The claims of GSPO, P3O and VAPO: their questions, their arms, and what they read of a run."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.claims.critic_arms import CRITIC_ARMS, TrainingPace, explained
from experiments.claims.estimates import MeasuredValues, NotMeasured
from experiments.claims.folders import ClaimFolder, experiments_folder
from experiments.claims.gradient_noise import noise_by_length, weights_add
from experiments.claims.lengths import LETTERS, lowest_after_best, write_stretches
from experiments.claims.mixtures import share as mean_share
from experiments.claims.rescoring import Answers, routers_share, won_back
from tests.random_model import RANDOM

from gnomon.config.experiment import load, to_toml
from gnomon.core.types import Grade, Rollout
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tiny import TinyConfig, save_tiny, tiny_model
from gnomon.records.batches import write_batch
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord
from gnomon.tasks.split import HeldOut
from gnomon.tasks.tables import TableTask
from gnomon.testing import make_batch
from gnomon.training.api import train_experiment

CLAIMS = (
    "gspo_clipping",
    "gspo_engine",
    "gspo_experts",
    "gspo_noise",
    "gspo_replay",
    "p3o_clip",
    "p3o_low_precision",
    "p3o_staleness",
    "p3o_temperature",
    "vapo_ablation",
    "vapo_crashes",
    "vapo_forms",
    "vapo_values",
)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_was_not_run_says_so(name: str):
    """Each can be read, expects something, and makes nothing of no numbers."""
    claim = ClaimFolder(experiments_folder() / name).claim()
    verdict = claim.judge(MeasuredValues())

    assert verdict.word == "not run"
    assert len(verdict.outcomes) >= 3
    assert {outcome.word for outcome in verdict.outcomes} == {"not run"}


def test_answers_differ_tenfold_in_length(tmp_path: Path):
    """323 questions, of 2 to 20 letters; each answer runs from the first letter of its question to the last."""
    task = write_stretches(tmp_path)
    rows = [json.loads(line) for line in Path(task.path).read_text().splitlines()]
    questions = task.questions()

    assert len(rows) == len({row["question"] for row in rows}) == len(questions) == 323
    assert (min(row["difficulty"] for row in rows), max(row["difficulty"] for row in rows)) == (2, 20)
    for row in rows:
        assert row["answer"] in LETTERS
        assert row["question"] == f"{row['answer'][0]}-{row['answer'][-1]}:"
        assert len(row["answer"]) == row["difficulty"]


def test_a_mistake_is_marked_by_a_capital(tmp_path: Path):
    """Where models are taught to be wrong, one letter is a capital and nothing else differs."""
    rows = [json.loads(line) for line in Path(write_stretches(tmp_path, is_marked=True).path).read_text().splitlines()]

    for row in rows:
        assert [sum(map(str.isupper, text)) for text in row["wrong"]] == [1] * row["difficulty"]
        assert {text.lower() for text in row["wrong"]} == {row["answer"]}


@pytest.mark.parametrize("name", CRITIC_ARMS)
def test_every_arm_of_the_ablation_is_an_experiment(name: str):
    """What it says over the table is understood, and is another algorithm than VAPO's own."""
    algorithm = load(RANDOM, CRITIC_ARMS[name]).experiment.algorithm

    assert algorithm.updates.total == 4
    assert (algorithm == load(RANDOM, CRITIC_ARMS["vapo"]).experiment.algorithm) == (name == "vapo")


@pytest.mark.parametrize("name", ["vapo", "ppo", "grpo", "the review's"])
def test_a_pace_says_how_many_updates_a_step_has(name: str):
    """Four are each arm's own; two are said over them, of the policy and of a critic where there is one."""
    two = load(RANDOM, CRITIC_ARMS[name] + TrainingPace(minibatches=2).overrides(name)).experiment.algorithm

    assert TrainingPace().overrides(name) == ()
    assert two.updates.total == 2
    assert (two.critic.updates.total if two.critic else None) == (None if name == "grpo" else 2)


def test_what_is_kept_of_the_best_reward(tmp_path: Path):
    """Means of two steps are 0.3, 0.7, 0.6, 0.3: after the best one 0.3 / 0.7 is the lowest."""
    rows = [{"step": n, "reward": r} for n, r in enumerate((0.2, 0.4, 1.0, 0.2, 0.4), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert lowest_after_best("reward", 2)(RunRecord(tmp_path)) == pytest.approx(0.3 / 0.7)
    with pytest.raises(NotMeasured, match="absent"):
        lowest_after_best("absent", 2)(RunRecord(tmp_path))


def test_explained_variance_by_quarter(tmp_path: Path):
    """Two responses of four tokens, rewards 1 and 0: values of 1/2 explain nothing, the rewards themselves all of it,
    and values half-way between leave a quarter of the variance."""
    batch = make_batch([1.0, 0.0], [[1, 1, 1, 1], [1, 1, 1, 1]])
    values = torch.tensor([[0.5, 0.75, 1.0, 1.0], [0.5, 0.25, 0.0, 0.0]])
    batch = batch.with_fields(values=values, lengths=batch.prompt_lengths + 4)
    (tmp_path / "batches").mkdir()
    write_batch(tmp_path / "batches" / "step-000001.json", batch)
    record = RunRecord(tmp_path)

    assert [explained(quarter, 1, 1)(record) for quarter in range(4)] == pytest.approx([0.0, 0.75, 1.0, 1.0])
    with pytest.raises(NotMeasured, match="step 2"):
        explained(0, 1, 2)(record)


def answer(length: int) -> Answers:
    """One answer of ``length`` tokens to a prompt of three."""
    tokens = tuple(range(10, 10 + length))
    rollout = Rollout(
        task_id="t", prompt=(1, 2, 3), response=tokens, mask=(True,) * length, logprobs=(-1.0,) * length,
        full_logprobs=(-1.0,) * length, text="", grade=Grade(1.0), oldest_version=0, newest_version=0, stop="stop",
    )  # fmt: skip
    return Answers.of([rollout], [0])


@pytest.mark.parametrize("length", [1, 5])
def test_what_weights_add_where_every_token_changed_alike(length: int):
    """Ratios of 1.1 throughout: tokens and the response add 0.1^2, the product (1.1^L - 1)^2, a clip at 1.27 nothing
    more; an advantage of 2 cancels in the share."""
    scorer = TokenScorer(tiny_model(0, TinyConfig(width=16, heads=2, kv_heads=1)))
    one = answer(length)
    before = one.scored(scorer).logprobs[0].detach() - math.log(1.1)
    sizes, changes = weights_add(scorer, one, before, 2.0)
    token, clipped, response, product = (sizes[1:] / sizes[0]).tolist()

    assert changes.tolist() == pytest.approx([math.log(1.1)] * length, abs=1e-6)
    assert (token, clipped, response) == pytest.approx((0.01, 0.01, 0.01), rel=1e-4)
    assert product == pytest.approx((1.1**length - 1) ** 2, rel=1e-4)


def test_a_clip_takes_tokens_out_by_the_sign_of_the_advantage():
    """At ratios of 1.4 an answer that was right is clipped, so that its whole gradient is taken away; a wrong one is
    not."""
    scorer = TokenScorer(tiny_model(0, TinyConfig(width=16, heads=2, kv_heads=1)))
    one = answer(3)
    before = one.scored(scorer).logprobs[0].detach() - math.log(1.4)
    right, wrong = (weights_add(scorer, one, before, sign)[0] for sign in (1.0, -1.0))

    assert float(right[2] / right[0]) == pytest.approx(1.0, rel=1e-4)
    assert float(wrong[2] / wrong[0]) == pytest.approx(0.16, rel=1e-4)


@pytest.mark.slow
def test_replay_takes_the_routers_share_of_a_ratio_away(tmp_path: Path):
    """Over a step of a mixture some of the variance of log-ratios is the routers' and not all of it.

    A step that changed nothing moved by 0 and has no share, and a mean leaves it out; a run without the weights before
    and after, or without experts, has none either.
    """
    reward = '[{kind="function",function="examples/own_reward.py:starts_with_a_digit"}]'
    kept = (
        "steps=3",
        "checkpoints.every=1",
        "checkpoints.keep_last=3",
        "evaluation.before=false",
        "rollouts_per_step=32",
        "task.size=60",
    )
    for model in ("tiny-moe", "tiny"):
        train_experiment(load(RANDOM, [*kept, f"model={model}", f"rewards={reward}"]), tmp_path / model)

    share = routers_share(tmp_path / "tiny-moe", 1)
    assert share.tokens < 1.0
    assert share.responses < 1.0
    checkpoints = RunDirectory(tmp_path / "tiny-moe").checkpoints
    shutil.copytree(checkpoints / "step-1", checkpoints / "step-2", dirs_exist_ok=True)
    assert routers_share(tmp_path / "tiny-moe", 2).moved == 0.0
    assert mean_share(lambda found: found.tokens, (1, 2))(RunRecord(tmp_path / "tiny-moe")) == share.tokens
    assert mean_share(lambda found: found.moved, (1, 2))(RunRecord(tmp_path / "tiny-moe")) == share.moved / 2
    with pytest.raises(NotMeasured, match="no step"):
        mean_share(lambda found: found.tokens, (2,))(RunRecord(tmp_path / "tiny-moe"))
    for path, step, why in ((tmp_path / "tiny-moe", 3, "answers of step 4"), (tmp_path / "tiny", 1, "no routers")):
        with pytest.raises(NotMeasured, match=why):
            routers_share(path, step)


def test_what_choices_win_back_is_told_from_weights(tmp_path: Path):
    """Weights that did not change win nothing back with the choices before them; other ones win or lose something;
    a dense model has no choices."""
    shapes = {"moe": TinyConfig(architecture="qwen3_moe"), "dense": TinyConfig()}
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps({"question": f"{n}=", "answer": str(n % 7)}) + "\n" for n in range(60)))
    for name, shape in shapes.items():
        base = load(RANDOM, [f"model={save_tiny(tmp_path / name, 0, shape)}", "steps=2", 'rewards=[{kind="exact"}]'])
        experiment = replace(base.experiment, task=TableTask(str(table)), held_out=HeldOut(size=1, fraction=0.2))
        run = RunDirectory(tmp_path / f"run-{name}")
        run.path.mkdir()
        run.experiment.write_text(to_toml(experiment))
        for step, seed in ((1, 0), (2, 1)):
            save_tiny(run.checkpoints / f"step-{step}", seed, shape)

    assert won_back(tmp_path / "run-moe", 1) == 0.0
    assert won_back(tmp_path / "run-moe", 2) != 0.0
    with pytest.raises(NotMeasured, match="no routers"):
        won_back(tmp_path / "run-dense", 1)


def test_the_noise_of_weights_was_measured_where_timing_decides_nothing():
    """No run card behind the committed numbers speaks of anything but bitwise repetition."""
    tested = ClaimFolder(experiments_folder() / "gspo_noise").tested()

    assert tested is not None
    assert (tested.measured.inexact, tested.measured.failures) == ((), ())


@pytest.mark.slow
def test_the_noise_of_weights_follows_from_the_seed(tmp_path: Path):
    """One step of a model beside the same model asked on: the same numbers twice, from files that were made twice;
    without answers after the first step there is nothing to measure, and a run of another model does not pair."""
    reward = '[{kind="function",function="examples/own_reward.py:starts_with_a_digit"}]'
    base = ["evaluation.before=false", "rollouts_per_step=32", "task.size=60", f"rewards={reward}", "model=tiny"]
    trained = [*base, "steps=1", "checkpoints.every=1", "learner.optimizer.learning_rate=1e-3"]
    arms = {"trained": trained, "asked": [*base, "steps=2", "learner.optimizer.learning_rate=1e-30"]}
    found = []
    for place in (tmp_path / "one", tmp_path / "two"):
        for name, settings in arms.items():
            train_experiment(load(RANDOM, settings), place / name)
        found.append(noise_by_length(RunRecord(place / "asked"), RunRecord(place / "trained"), 5))

    assert str(found[0]) == str(found[1])
    assert 0 < sum(noise.count for noise in found[0]) <= 15
    assert all(noise.sequence < noise.token for noise in found[0] if noise.count)
    with pytest.raises(NotMeasured, match="no answers after its first step"):
        noise_by_length(RunRecord(tmp_path / "one" / "trained"), RunRecord(tmp_path / "one" / "trained"), 5)
