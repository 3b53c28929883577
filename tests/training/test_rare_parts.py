"""Parts of the state that few runs need, each in a run that needs it: killed, it goes on; left out, it does not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.killed import attempt, killed
from tests.training.runs import broken_off, left_out, measured, same, trace

from gnomon.config.experiment import load
from gnomon.core.errors import CheckpointError
from gnomon.models.load import load_tokenizer, write_model
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.records.manifest import write_manifest
from gnomon.training.api import resume, train_experiment

pytestmark = pytest.mark.timeout(600)
STEPS = 3
COMMON = (
    f"steps={STEPS}", "task.size=40", "rollouts_per_step=8", "evaluation.before=false", "grading.workers=1",
    "checkpoints.every=1", "checkpoints.keep_last=9", "grading.deadline_seconds=600", "engine.timeout_seconds=600",
)  # fmt: skip
FORMAT = "rewards=[{kind='format', pattern='[!-P].*'}]"
GRPO = ("algorithm=grpo", "algorithm.num_generations=2")
# What a user may write: an estimate that is shaken by each of the generators that the whole process shares.
PIECE = """
import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from gnomon.algorithms import GRPO
from gnomon.algorithms.advantages import GroupRelative


@dataclass(frozen=True)
class Shaken:
    of: GroupRelative = GroupRelative()

    @property
    def needs(self):
        return self.of.needs

    @property
    def minimum_generations(self):
        return self.of.minimum_generations

    def center(self, batch):
        return self.of.center(batch)

    def __call__(self, batch):
        advantages, returns = self.of(batch)
        noise = random.gauss(0, 1) + np.random.normal() + torch.randn(()).item()
        return advantages * (1 + 0.1 * noise), returns


SHAKEN = replace(GRPO, name="shaken", advantage=Shaken())
"""
REWARD = """
import random

import numpy as np


def pay(completion, **columns):
    return random.random() + float(np.random.random())
"""
PHASE = (
    "algorithm=vapo", "algorithm.num_generations=2", "algorithm.updates.minibatches=2",
    "algorithm.critic.pretraining.steps=3", "algorithm.critic.updates.minibatches=2", "checkpoints.asynchronous=false",
)  # fmt: skip


def rough_model(folder: Path) -> Path:
    """Return the folder of a tiny model with large weights, so that bfloat16 is felt."""
    model = tiny_model(0, TinyConfig(spread=0.15))
    write_model(merged_tensors(model), model.config, folder)
    load_tokenizer("tiny").save(folder)
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the overrides of a run that needs each part."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "piece.py").write_text(PIECE)
    (folder / "reward.py").write_text(REWARD)
    reward = f"rewards=[{{kind='function', function='{folder}/reward.py:pay'}}]"
    return {
        "generators": [*COMMON, FORMAT, f"algorithm={folder}/piece.py:SHAKEN", "algorithm.num_generations=2"],
        "arrival": [*COMMON, FORMAT, *GRPO, f"model={rough_model(folder / 'rough')}", "learner.precision=bf16"],
        "pretraining": [*COMMON, FORMAT, *PHASE],
        "reward": [*COMMON, reward, *GRPO],
    }


@pytest.fixture(scope="module")
def whole(settings: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a setting to a run that nothing interrupted."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            assert attempt(made[name], settings[name]) == 0
        return made[name]

    return run


@pytest.mark.parametrize("name", ["generators", "arrival", "reward"])
def test_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, settings: dict[str, list[str]], whole: Callable[[str], Path], name: str
):
    """Killed in an update, begun again: a piece that draws, low precision, and a reward that draws, to the bit."""
    run = killed(tmp_path / "run", settings[name], "update")

    same(trace(run, STEPS), trace(whole(name), STEPS))


def test_generators_cannot_be_left_out(tmp_path: Path, settings: dict[str, list[str]], whole: Callable[[str], Path]):
    """With those of another seed, and all other parts restored, the rest of the run is another."""
    other = tmp_path / "other"
    train_experiment(load(RANDOM, [*settings["generators"], "steps=0", "seed=1"]), other)
    run = broken_off(whole("generators"), tmp_path / "run", 2)
    left_out(run, 2, "generators", other / "checkpoints" / "step-0" / "state")
    resume(run)

    assert trace(run, STEPS)["metrics"][:2] == trace(whole("generators"), STEPS)["metrics"][:2]
    assert trace(run, STEPS)["metrics"][2:] != trace(whole("generators"), STEPS)["metrics"][2:]


def test_what_engines_may_differ_by_cannot_be_left_out(tmp_path: Path, whole: Callable[[str], Path]):
    """Measured anew by whatever weights there are, it allows another difference for the rest of the run."""
    run = broken_off(whole("arrival"), tmp_path / "run", 2)
    checkpoint = run / "checkpoints" / "step-2"
    (checkpoint / "state" / "arrival.json").write_text(json.dumps({"first": None}) + "\n")
    write_manifest(checkpoint, 2)
    resume(run)

    assert trace(run, STEPS)["metrics"][2:] != trace(whole("arrival"), STEPS)["metrics"][2:]


def test_the_promise_has_a_number_in_low_precision(whole: Callable[[str], Path]):
    """What engines may differ by is above its floor there, or leaving it out could make no difference."""
    rows = trace(whole("arrival"), STEPS)["metrics"]
    first = json.loads((whole("arrival") / "checkpoints" / "step-1" / "state" / "arrival.json").read_text())["first"]

    assert 0.025 < 8 * first < 0.25
    assert {row["arrival/canary_allowed_nats"] for row in rows} == {8 * first}


def test_value_pretraining_goes_on_in_its_middle(
    tmp_path: Path, settings: dict[str, list[str]], whole: Callable[[str], Path]
):
    """Killed after its second batch of three: the rest is as it was; without its count it begins its batches again.

    That is noticed when one is to be saved over another: nothing is ever written into a checkpoint.
    """
    run = tmp_path / "run"
    assert attempt(run, settings["pretraining"], "grade:20") == -9  # eight answers a batch
    early = run / "pretraining" / "step-2"
    assert early.is_dir()
    assert json.loads((early / "state" / "pretraining.json").read_text())["batches"] == 2
    ablated = shutil.copytree(run, tmp_path / "ablated")
    assert attempt(run, settings["pretraining"]) == 0
    same(trace(run, STEPS), trace(whole("pretraining"), STEPS))

    state = ablated / "pretraining" / "step-2"
    (state / "state" / "pretraining.json").write_text(json.dumps({"batches": 0, "streak": 0}) + "\n")
    write_manifest(state, 2)
    with pytest.raises(CheckpointError, match="step-2"):
        resume(ablated)
    again = measured(ablated / "pretraining.jsonl")
    assert [row["step"] for row in again] == [1, 2, 1, 2]
    assert again[2:] != again[:2]
