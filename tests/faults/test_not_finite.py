"""F7: a number that is not finite changes nothing, is kept to be looked at, and ends the run the third time."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM

from gnomon.algorithms import PRESETS, resolve
from gnomon.algorithms.sections import EmaProximal
from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import LearnerError, NotFiniteError
from gnomon.core.types import Batch
from gnomon.learner.learner import TorchLearner
from gnomon.learner.reference import ReferenceModels
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.critic import head_for, load_critic
from gnomon.models.tiny import tiny_model
from gnomon.records.batches import BatchLog, read_batch
from gnomon.records.checkpoints import Checkpoints
from gnomon.records.jsonl import read_rows
from gnomon.rewards.base import Sample
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.testing import make_batch
from gnomon.training.api import resume, train_experiment
from gnomon.training.nonfinite_guard import NonFiniteGuard, refused_in_a_row, unusable

# A term of the loss that is nothing, and not a number at the calls that it is told: one call an update here.
# What tries pieces before a model loads does so in the main thread, and is no update.
SPOIL = """
import threading
from dataclasses import dataclass
from gnomon.core.metrics import Metrics

calls = 0

@dataclass(frozen=True)
class Spoil:
    first: int
    last: int

    @property
    def name(self):
        return "spoil"

    @property
    def needs(self):
        return frozenset()

    def weights(self, batch, default):
        return default

    def __call__(self, view):
        global calls
        is_update = threading.current_thread() is not threading.main_thread()
        calls += is_update
        factor = float("inf") if is_update and self.first <= calls <= self.last else 0.0
        return view.current * factor, Metrics()
"""
REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
TINY = (REWARD, "task.size=40", "rollouts_per_step=16", "evaluation.before=false", "checkpoints.every=1")
# What some presets read beside the rewards.
KNOWN = {"proximal": [[-1.0], [-1.0]], "reference": [[-1.0], [-1.0]]}
KEPT = ("checkpoints.keep_last=100", "algorithm.num_generations=4")
SPO = ("algorithm=spo", "algorithm.tracker.initial=prior", "algorithm.num_generations=2")


def spoiled(folder: Path, first: int, last: int, *more: str) -> list[str]:
    """Return overrides of `tiny` with a loss that is not finite from one call of it to another, counted from 1."""
    (folder / "spoil.py").write_text(SPOIL)
    term = f"{{piece='{folder}/spoil.py:Spoil', first={first}, last={last}}}"
    return [*TINY, *more, *KEPT[:1], f"algorithm.regularizers=[{term}]"]


def files(checkpoint: Path) -> dict[str, bytes]:
    """Return what a checkpoint says of weights, moments and tracked values."""
    kept = [checkpoint / "model.safetensors", *(checkpoint / "state").glob("*.safetensors")]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in kept}


@pytest.mark.parametrize(
    "algorithm",
    [("algorithm.num_generations=4",), SPO, ("algorithm=ppo", "algorithm.critic.trunk=shared")],
    ids=["grpo", "spo", "ppo"],
)
def test_a_step_that_is_not_finite_changes_no_byte(tmp_path: Path, algorithm: tuple[str, ...], capsys: Any):
    """The second update of step 2 is spoiled: masters, moments, critic and tracker are those after step 1."""
    more = (*algorithm, "algorithm.updates.minibatches=2", "algorithm.updates.epochs=1")
    result = train_experiment(load(RANDOM, spoiled(tmp_path, 4, 4, "steps=3", *more)), tmp_path / "run")
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    steps = [files(tmp_path / "run" / "checkpoints" / f"step-{step}") for step in (1, 2, 3)]
    said = capsys.readouterr().err

    assert [row["learner/refused_steps"] for row in rows] == [0, 1, 0]
    assert (rows[1]["loss/policy"], rows[1]["not_finite"], rows[1]["learner/updates"]) == (None, ["loss/policy"], 0)
    assert steps[0].keys() == steps[1].keys()
    assert [name for name in steps[0] if steps[0][name] != steps[1][name]] == []
    assert steps[2] != steps[1]
    kept = tmp_path / "run" / "batches" / "step-000002.json"
    assert [kept] == list(kept.parent.iterdir())
    assert "step 2 changed nothing: the loss is not finite" in said
    assert f"gnomon dissect {kept} --algorithms" in said
    assert main(["dissect", str(kept), "--algorithms", "grpo"]) == 0
    assert result.steps == 3


def test_three_in_a_row_end_the_run_and_every_checkpoint_is_good(tmp_path: Path, capsys: Any):
    """Spoiled from step 2 on, the run ends at step 4 with exit code 1; what was saved holds the weights of step 1."""
    experiment = spoiled(tmp_path, 2, 99, "steps=9", KEPT[1])

    with pytest.raises(LearnerError, match="3 in a row, so the run ends, and the newest checkpoint stays"):
        train_experiment(load(RANDOM, experiment), tmp_path / "run")

    found = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert found is not None
    assert files(found.path) == files(tmp_path / "run" / "checkpoints" / "step-1")
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert refused_in_a_row(rows) == 2


def test_the_count_goes_on_in_a_resumed_run(tmp_path: Path):
    """Stopped after two refused steps and resumed, one more is the third."""
    experiment = spoiled(tmp_path, 2, 99, "steps=9", KEPT[1])
    with pytest.raises(LearnerError, match="3 in a row"):
        train_experiment(load(RANDOM, experiment), tmp_path / "run")

    with pytest.raises(LearnerError, match=r"3 in a row.*step 4 changed nothing"):
        resume(tmp_path / "run")


def run_of(learner: TorchLearner, folder: Path, said: list[str]) -> NonFiniteGuard:
    return NonFiniteGuard(learner, "ppo", BatchLog(folder), said.append)


def is_identical(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_that_fails_takes_the_policy_s_update_back(tmp_path: Path, kind: str):
    """The policy was updated, then the critic's loss overflows: both are what they were, and the next step works."""
    model = tiny_model(0)
    critic = head_for(model) if kind == "shared" else load_critic("tiny", "policy")
    learner, said = TorchLearner(model, LearnerConfig(), 10, critic=critic), []
    algorithm = resolve({"preset": "ppo"})
    rows = [[-5.0, -5.2], [-5.5]]
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], dtype=torch.float32, behavior=rows, proximal=rows)
    batch = batch.with_fields(tokens=batch.tokens + 3, values=torch.zeros(2, 2), bootstrap=torch.zeros(2))
    prepared = algorithm.prepare(batch)
    guard = run_of(learner, tmp_path, said)
    before = learner.state()

    async def learn(spoil: float) -> None:
        for minibatch in algorithm.minibatches(prepared, 0):
            await learner.update(minibatch, algorithm, 0)
        assert not is_identical(before.tensors, learner.state().tensors)
        assert prepared.returns is not None
        worse = prepared.with_fields(returns=prepared.returns * spoil + spoil)
        for minibatch in algorithm.value_minibatches(worse, 0):
            await learner.fit(minibatch, algorithm, 0)

    with guard.step(1) as guarded:
        guarded.check_finite(prepared)
        asyncio.run(learn(1e38))

    assert not guarded.is_learned
    assert is_identical(before.tensors, learner.state().tensors)
    assert ["step 1 changed nothing: the loss is not finite" in line for line in said] == [True]
    with guard.step(2) as guarded:
        asyncio.run(learn(1.0))
    assert guarded.is_learned
    assert guard.streak == 0


@pytest.mark.parametrize("kind", ["none", "shared", "separate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_that_a_step_changes_is_put_back_bit_for_bit(precision: str, kind: str):
    """Masters, moments, averages of policy and reference with their counts, and the module; at the first step too."""
    model = tiny_model(0).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    critic = {"none": None, "shared": head_for(model), "separate": load_critic("tiny", "policy")}[kind]
    plan = LearnerConfig(OptimizerConfig(learning_rate=1e-2), precision=precision)
    averaged = ReferenceModels(average=EmaProximal())
    learner = TorchLearner(model, plan, 9, averaged, critic, EmaProximal())
    for _ in range(2):
        before, module = learner.state(), {n: t.clone() for n, t in model.state_dict().items()}
        learner.keep()
        train_on_anything(learner)
        train_on_anything(learner)
        changed = learner.state()
        learner.undo()

        assert not any(torch.equal(t, changed.tensors[n]) for n, t in before.tensors.items() if t.numel())
        assert changed.values["proximal"] != before.values["proximal"]
        assert learner.state().values == before.values
        assert is_identical(learner.state().tensors, before.tensors)
        assert is_identical(model.state_dict(), module)
        train_on_anything(learner)


def train_on_anything(learner: TorchLearner) -> None:
    """Step every optimizer on a gradient of ones, and let the averages follow."""
    optimizers = {learner._optimizer} if learner._critic is None else {learner._optimizer, learner._critic.optimizer}
    for optimizer in optimizers:
        for parameter in optimizer.masters.module_parameters.values():
            torch.ones_like(parameter).mul(parameter).sum().backward()
        optimizer.step(1e-2)
    for average in (learner._average, learner._reference.average):
        assert average is not None
        average.follow(learner._optimizer.masters.parameters)


def scored(**more: Any) -> Batch:
    rows = [[-1.0, -2.0], [-1.0]]
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], behavior=rows, **more)
    return batch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["proximal", "reference", "values", "advantages", "returns", "behavior", "step_rewards"]
)
def test_every_field_of_a_token_is_looked_at(name: str, bad: float):
    """A token that counts is named with its row; the same number where nothing counts is none."""
    batch = make_batch([1.0, 0.0], [[1, 1], [1, 0]], **{name: [[-1.0, -2.0], [bad, -1.0]]})
    masked = make_batch([1.0, 0.0], [[1, 1], [1, 0]], **{name: [[-1.0, -2.0], [-1.0, bad]]})
    failed = make_batch([1.0, None], [[1, 1], [1, 0]], **{name: [[-1.0, -2.0], [bad, -1.0]]})

    assert f"{name} is not finite in 1 of 2 rows (counted from 0: 1)" in unusable(batch)
    assert unusable(masked) == unusable(failed) == []


@pytest.mark.parametrize("name", ["baseline", "bootstrap"])
def test_every_field_of_a_row_is_looked_at(name: str):
    """Rewards too."""
    assert unusable(scored(**{name: [0.0, math.nan]})) == [f"{name} is not finite in 1 of 2 rows (counted from 0: 1)"]
    spoiled = scored()
    spoiled.rewards[0] = math.inf
    assert unusable(spoiled) == ["rewards is not finite in 1 of 2 rows (counted from 0: 0)"]


@pytest.mark.parametrize("reward", [1e308, -1e308, 3.5e38, math.nan, math.inf])
@pytest.mark.parametrize("preset", ["grpo", "spo", "rloo", "reinforce-pp", "opo", "lite-ppo"])
def test_a_reward_whose_square_overflows_is_refused(preset: str, reward: float):
    """Its deviation would be infinite and every advantage a silent 0; the largest float32 is the largest reward."""
    batch = make_batch([1.0, reward], [[1], [1]], baseline=[0.0, 0.0], **KNOWN)
    fine = make_batch([1.0, 3.4e38], [[1], [1]], baseline=[0.0, 0.0], **KNOWN)

    with pytest.raises(NotFiniteError, match=r"a reward is not finite, or beyond 3.4e\+38"):
        PRESETS[preset].prepare(batch)
    advantages = PRESETS[preset].prepare(fine).advantages
    assert advantages is not None
    assert bool((advantages[1] > 0).all())


@pytest.mark.parametrize("value", ["1e308", "-1e308", "3.5e38"])
def test_a_verifier_that_returns_such_a_reward_is_an_error(tmp_path: Path, value: str):
    """It never becomes a reward, alone or as a sum of parts."""
    (tmp_path / "huge.py").write_text(f"def one(prompt, completion, **more):\n    return {value}\n")
    (tmp_path / "half.py").write_text("def one(prompt, completion, **more):\n    return 3e38\n")
    half = UserFunction(f"{tmp_path}/half.py:one")
    alone = Grading((WeightedReward(UserFunction(f"{tmp_path}/huge.py:one")),))(Sample("p", "c"))
    summed = Grading((WeightedReward(half), WeightedReward(half, name="two")))(Sample("p", "c"))

    assert "a reward is at most 3.4e+38 either way" in str(alone.error)
    assert "beyond the 3.4e+38 of float32" in str(summed.error)


def test_a_kept_batch_names_each_place_that_is_not_finite(tmp_path: Path, capsys: Any):
    """`dissect` of a batch with such log-probabilities says sequence, field and position, with exit code 2."""
    batch = scored(proximal=[[-1.0, math.nan], [-math.inf]])

    path = BatchLog(tmp_path).keep(7, batch.with_fields(task_ids=("a", "b")))

    assert path == tmp_path / "step-000007.json"
    assert main(["dissect", str(path), "--algorithms", "grpo"]) == 2
    said = capsys.readouterr().err
    assert 'sequence 0: "current" at position 1 should be a finite number, got "nan"' in said
    assert 'sequence 1: "current" at position 0 should be a finite number, got "-inf"\n  ... and 1 more' in said


def test_a_finite_batch_is_kept_as_it_is(tmp_path: Path):
    """What overflows later is taken apart as any other batch."""
    path = BatchLog(tmp_path).keep(1, scored(proximal=[[-1.0, -2.0], [-3.0]]))

    assert path is not None
    assert read_batch(path).current.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]


def test_weights_that_are_not_finite_are_never_published(tmp_path: Path):
    """A checkpoint of them is refused, the one before stays, and nothing half-made is left."""
    learner = TorchLearner(tiny_model(0), LearnerConfig(), 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"learner": learner.state()}, learner.write_model)
    with torch.no_grad():
        next(iter(learner._optimizer.masters.parameters.values()))[0] = math.inf

    with pytest.raises(NotFiniteError, match=r"is not finite .* these weights are not published"):
        checkpoints.save(2, {"learner": learner.state()}, learner.write_model)

    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_other_errors_pass(tmp_path: Path):
    """Only what is not finite is forgiven."""
    guard = run_of(TorchLearner(tiny_model(0), LearnerConfig(), 1), tmp_path, [])

    with pytest.raises(ZeroDivisionError, match="division"), guard.step(1):
        _ = 1 / 0


@pytest.mark.parametrize(
    ("counts", "expected"), [([], 0), ([1], 1), ([0, 1, 1], 2), ([1, 1, 0], 0), ([None, 1], 1)], ids=str
)
def test_refused_steps_are_counted_from_the_end(counts: Sequence[int | None], expected: int):
    """Rows of older runs say nothing of it."""
    assert refused_in_a_row([{"learner/refused_steps": c} if c is not None else {} for c in counts]) == expected


def test_a_learning_rate_that_explodes_ends_the_run_with_the_weights_of_before(tmp_path: Path):
    """1e9 times a step makes every later score infinite; no checkpoint of such weights is published."""
    overrides = [*TINY[:-1], *KEPT, "steps=9", "checkpoints.every=4", "learner.optimizer.learning_rate=1e9"]

    with pytest.raises(NotFiniteError, match="the weights of version 1 give log-probabilities that are not finite"):
        train_experiment(load(RANDOM, overrides), tmp_path / "run")

    assert list((tmp_path / "run").glob("checkpoints/*")) == []
