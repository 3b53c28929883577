"""Which weights are asked which questions."""

import json
import re
from pathlib import Path

import pytest

from gnomon.core.errors import ConfigError, RunDirectoryError
from gnomon.records.checkpoints import Checkpoints
from gnomon.training.eval_spec import WHOLE, EvalSpec, EvalTarget, find_weights

EXPERIMENT = """
model = "tiny"
algorithm = "grpo"
system = "Be brief."
[task]
kind = "arithmetic"
highest = 4
[held_out]
size = 5
[evaluation]
every = 3
[lora]
rank = 2
"""


def begun(folder: Path, *steps: int, best: int | None = None) -> Path:
    """Return a run with checkpoints that hold one file each."""
    run = folder / "run"
    run.mkdir()
    (run / "experiment.toml").write_text(EXPERIMENT)
    checkpoints = Checkpoints(run / "checkpoints", keep_last=9)
    for step in steps:
        checkpoints.save(step, {}, lambda path: (path / "config.json").write_text("{}"), is_best=step == best)
    return run


def test_checkpoints_have_names_and_numbers(tmp_path: Path):
    """The newest, the best, and the one after step 4; 0 is the model before training, which has no checkpoint."""
    run = begun(tmp_path, 2, 4, 6, best=2)
    steps = [find_weights(EvalTarget(run, each)).step for each in ("newest", "best", 4, 0)]

    assert steps == [6, 2, 4, 0]
    assert find_weights(EvalTarget(run, 4)).model == str(run / "checkpoints" / "step-4")
    assert find_weights(EvalTarget(run, 0)).model == "tiny"


def test_what_a_run_does_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A checkpoint that was not kept: those that were are named. No best one: what that means is said."""
    run = begun(tmp_path, 2, 4)
    with pytest.raises(RunDirectoryError, match=r"no checkpoint 3; it has those after steps: 2, 4"):
        find_weights(EvalTarget(run, 3))
    with pytest.raises(RunDirectoryError, match="no evaluation after a step was better than the one before training"):
        find_weights(EvalTarget(run, "best"))
    (run / "checkpoints" / "step-4" / "config.json").write_text("[]")
    with pytest.raises(RunDirectoryError, match=r"config\.json.*evaluate another checkpoint"):
        find_weights(EvalTarget(run, 4))
    assert find_weights(EvalTarget(run)).step == 2
    said = r"warning: .*step-4 is damaged and is not used.*; the one after step 2 is\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_names_that_mean_nothing_are_refused(tmp_path: Path):
    """A checkpoint is a number or one of two words, and only runs have any."""
    with pytest.raises(ConfigError, match="a checkpoint is best, newest or a number of steps such as 24, got 'last'"):
        EvalTarget(begun(tmp_path), "last")
    with pytest.raises(ConfigError, match="tiny has no checkpoint 4: no run directory was found there"):
        EvalTarget("tiny", 4)


def test_all_are_asked_as_the_first_run_asks(tmp_path: Path):
    """A model beside a run: the run's questions and system message, without its adapters, which are merged."""
    run = begun(tmp_path, 2)
    (plain, model), (trained, checkpoint) = EvalSpec(samples=3).experiments(
        [EvalTarget("other/model"), EvalTarget(run)]
    )

    assert (plain.model, model.step, model.run) == ("other/model", 0, None)
    assert (trained.model, checkpoint.step, checkpoint.run) == (str(run / "checkpoints" / "step-2"), 2, run)
    assert (plain.task, plain.system, plain.held_out) == (trained.task, trained.system, trained.held_out)
    assert (plain.lora, trained.lora) == (None, None)
    assert (plain.evaluation.samples, plain.system) == (3, "Be brief.")


def test_a_task_must_come_from_somewhere():
    """Models alone have no questions of their own."""
    with pytest.raises(ConfigError, match="tiny is no run, so the task must be named"):
        EvalSpec().experiments([EvalTarget("tiny"), EvalTarget("tiny")])


def test_a_model_alone_is_asked_several_sets_each_in_its_own_way(tmp_path: Path):
    """Samples, number and sampling of each set, as in a run's evaluation.tasks; --samples goes before its own."""
    sets = (
        'evaluation.tasks=["arithmetic", {task = "chain_sum", samples = 3, size = 7, sampling = {temperature = 0.6}}]'
    )
    (experiment, weights), *_ = EvalSpec(overrides=(sets,)).experiments([EvalTarget("tiny")])
    (again, _), *_ = EvalSpec(samples=2, overrides=(sets,)).experiments([EvalTarget("tiny")])

    copy = tmp_path / "copy.jsonl"
    copy.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}))
    (published, _), *_ = EvalSpec(overrides=(f'evaluation.tasks=["aime-24={copy}"]',)).experiments([EvalTarget("tiny")])

    assert (weights.model, published.evaluation.tasks[0].label) == ("tiny", "aime-24")
    assert [(e.label, e.samples, e.size) for e in experiment.evaluation.tasks] == [
        ("arithmetic", None, None), ("chain_sum", 3, 7),
    ]  # fmt: skip
    assert experiment.evaluation.tasks[1].sampling.temperature == 0.6
    assert (again.evaluation.samples, [e.samples for e in again.evaluation.tasks]) == (2, [None, None])
    with pytest.raises(ConfigError, match="--prompts 5 is of a task that is named with --task"):
        EvalSpec(prompts=5, overrides=(sets,)).experiments([EvalTarget("tiny")])


def test_a_named_task_brings_its_rewards_and_its_size(tmp_path: Path):
    """200 questions of a generator, so many as are said of a file, all of a benchmark; the run's rewards do not fit."""
    copy = tmp_path / "copy.jsonl"
    copy.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    tasks = {"chain_sum": None, str(copy): 7, f"gsm8k={copy}": None}
    sizes = [
        EvalSpec((task,), prompts=prompts).experiments([EvalTarget("tiny")])[0][0].held_out.size
        for task, prompts in tasks.items()
    ]

    assert sizes == [200, 7, WHOLE]
