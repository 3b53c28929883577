"""Supervised fine-tuning: its loss, its runs, what they leave behind, and what is refused."""

import asyncio
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.random_model import RANDOM
from tests.training.runs import same, trace

import gnomon
from gnomon.algorithms import SFT, SequenceMean, resolve, to_table
from gnomon.algorithms.ratios import Statistics
from gnomon.cli.main import main
from gnomon.config.experiment import Loaded, load, supervised
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError, DatasetError, Stopped
from gnomon.core.types import Batch, Group, Task
from gnomon.diagnosis.catalog import SUPERVISED
from gnomon.diagnosis.doctor import Doctor
from gnomon.insight.report.rollouts import Reader, scan
from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.tiny import TinyConfig, tiny_model
from gnomon.records.jsonl import read_rows
from gnomon.records.reading import RunRecord
from gnomon.rollouts.collate import collate
from gnomon.rollouts.dataset_rollouter import DatasetRollouter
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.training.api import resume, train_experiment
from gnomon.training.python_api import evaluate
from gnomon.training.run import StopRequest

SHAPE = TinyConfig(width=16, heads=2, kv_heads=1)
SUMS = ("task={kind='arithmetic', lowest=0, highest=4}", "sampling.max_completion_length=3", "held_out.size=5")
QUICK = ("model=tiny", "rollouts_per_step=16", "learner.precision=fp32", "learner.optimizer.learning_rate=3e-3")


def of(*overrides: str) -> Loaded:
    """Return the experiment of ``gnomon sft`` with these settings and no file."""
    return supervised({"name": "sft"}, [parse_override(each) for each in overrides])


def answered(*responses: Sequence[int], masks: Sequence[Sequence[bool]] = ()) -> Batch:
    """Return a batch of the dataset's answers to prompts of different lengths, prepared and weighed."""
    groups: list[Group] = []
    for number, response in enumerate(responses):
        prompt = tuple(range(65, 67 + number))
        mask = tuple(masks[number]) if masks else (True,) * len(response)
        task = Task(f"t{number}", prompt, "", response=tuple(response), mask=mask)
        groups.append(asyncio.run(DatasetRollouter(str).run_group(task, 0, RolloutTimer())))
    return SFT.weigh(SFT.prepare(collate(groups, 1.0)))


def learner(max_tokens: int) -> TorchLearner:
    settings = LearnerConfig(OptimizerConfig(learning_rate=0.01), max_tokens_per_micro_batch=max_tokens)
    return TorchLearner(tiny_model(0, SHAPE), settings, steps=10)


RESPONSES = [(70, 71, 72), (80,), (90, 91, 92, 93, 94), (70, 71)]
MASKS = [(True, True, True), (True,), (True, False, False, True, True), (False, True)]


@pytest.mark.parametrize(
    ("aggregate", "slopes"), [("TokenMean", [-1 / 3, -1 / 3, -1 / 3]), ("SequenceMean", [-0.25, -0.25, -0.5])]
)
def test_the_loss_is_the_mean_negative_log_likelihood_of_answer_tokens(aggregate: str, slopes: list[float]):
    """Answers of 2 and 1 tokens with log-probabilities -1, -3 and -2: (1 + 3 + 2) / 3 = 2, and -1/3 at each token.

    With SequenceMean each answer counts the same: ((1 + 3) / 2 + 2) / 2 = 2, and -1/4, -1/4, -1/2.
    """
    algorithm = resolve({"preset": "sft", "aggregate": aggregate})
    batch = algorithm.weigh(algorithm.prepare(answered((70, 71), (80,))))
    current = torch.tensor([[-1.0, -3.0], [-2.0, 0.0]], requires_grad=True)

    found = algorithm.loss(current, torch.zeros(2, 2), batch, Statistics())
    found.total.backward()

    assert found.total.item() == pytest.approx(2.0)
    assert current.grad is not None
    assert current.grad[batch.mask].tolist() == pytest.approx(slopes)


def test_packed_rows_have_the_losses_of_each_row_alone():
    """Rows of several lengths with prompts and masks of their own, in one pass and one by one, to 1e-5 nats."""
    batch = answered(*RESPONSES, masks=MASKS)

    packed = asyncio.run(learner(10_000).logprobs(batch))

    for row in range(len(batch)):
        alone = batch.rows([row])
        width = len(RESPONSES[row])
        single = asyncio.run(learner(10_000).logprobs(alone))
        assert torch.allclose(packed[row, :width], single[0, :width], atol=1e-5)


@pytest.mark.parametrize("max_tokens", [8, 16, 10_000])
def test_no_cut_changes_the_update(max_tokens: int):
    """Loss and new weights are the same for every size of a micro-batch: sums over the step's tokens."""
    batch = answered(*RESPONSES, masks=MASKS)
    whole, cut = learner(10_000), learner(max_tokens)

    losses = [asyncio.run(each.update(batch, SFT, 0))["loss/policy"] for each in (whole, cut)]

    expected = asyncio.run(learner(10_000).logprobs(batch))[batch.mask].mean()
    assert losses == pytest.approx([-float(expected)] * 2, abs=1e-5)
    for name, tensor in whole.state().tensors.items():
        assert torch.allclose(tensor, cut.state().tensors[name], atol=1e-5), name


def test_few_rows_are_learned_and_answered(tmp_path: Path):
    """The loss of a tiny model on 8 sums comes near 0, and of its greedy answers to them all are right, none before."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = (*QUICK, "rollouts_per_step=8", f"task={path}", "held_out.size=0", "steps=60")

    run = train_experiment(of(*settings), tmp_path / "run")

    losses = run.metrics["loss/policy"]
    assert losses[0] > 3
    assert losses[-1] < 0.05
    assert run.metrics["loss/perplexity"][-1] == pytest.approx(math.exp(losses[-1]))
    greedy = ("sampling.temperature=0", "rewards=[{kind='numeric'}]")
    before, after = (evaluate(run.directory, str(path), checkpoint=at, overrides=greedy) for at in (0, "newest"))
    assert (before.headline.mean, after.headline.mean) == (0.0, 1.0)
    assert after.loss_nats == pytest.approx(losses[-1], abs=0.05)


def test_a_run_says_nothing_that_only_sampled_answers_have(tmp_path: Path):
    """No reward, ratio, mismatch or waste is recorded, and the page and the diagnosis are written without them."""
    run = train_experiment(of(*QUICK, *SUMS, "steps=12", "evaluation.samples=0"), tmp_path / "run")

    meant = re.compile(
        r"(loss/(policy|perplexity|entropy_nats)|rollout/length_.*|tokens/.*|learner/.*|time/.*|memory/.*)"
    )
    assert [name for name in run.metrics if not meant.fullmatch(name)] == []
    assert run.metrics["tokens/epochs"][-1] == pytest.approx(12 * 16 / _rows(run.directory))
    assert [each.scores.keys() for each in run.evaluations] == [{"likelihood"}, {"likelihood"}]
    assert [*read_rows(run.directory / "findings.jsonl")] == []
    assert "held out" in run.plot().svg
    page = (run.directory / "report.html").read_text()
    assert "held-out loss" in page
    assert "training reward" not in page
    recorded = [one.rollout for one in run.rollouts(1)]
    assert [(one.grade.reward, one.grade.error) for one in recorded] == [(None, None)] * 16
    assert all(math.isnan(number) for one in recorded for number in one.logprobs)
    [course] = Reader(RunRecord.of(run.directory), None, None).rollout_lists(scan(RunRecord.of(run.directory), []))
    assert (course.title, {one.reward for one in course.rollouts}) == ("Through the run", {None})
    assert not any("advantage" in fact or "nats" in fact for one in course.rollouts for fact in one.facts)


def _rows(run: Path) -> int:
    """Return the rows of a run's training set: of 1,000 sums all that are not held out."""
    from gnomon.training.build_data import questions

    return len(questions(load(run / "experiment.toml").experiment).split.train)


def test_the_loss_that_is_held_out_is_the_one_that_the_weights_have(tmp_path: Path):
    """`gnomon evaluate` of the run measures the same loss again, and a reading of the file gives it back."""
    run = train_experiment(of(*QUICK, *SUMS, "steps=4", "evaluation.samples=0"), tmp_path / "run")

    again = evaluate(run.directory)

    assert again.loss_nats == pytest.approx(run.evaluations[-1].loss_nats, abs=1e-6)
    assert gnomon.load(run.directory).evaluations[-1] == run.evaluations[-1]


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path):
    """Rows, losses, evaluations and the final state are those of a run that was never stopped."""
    settings = of(*QUICK, *SUMS, "steps=6", "evaluation.every=3", "checkpoints.every=2", "evaluation.samples=1")
    whole = train_experiment(settings, tmp_path / "whole")
    with pytest.raises(Stopped):
        train_experiment(settings, tmp_path / "parts", StopRequest(15, after=3))

    resume(tmp_path / "parts")

    same(trace(whole.directory, 6), trace(tmp_path / "parts", 6))


def test_reinforcement_learning_begins_with_the_weights_of_a_run(tmp_path: Path):
    """model = RUN is the run's newest checkpoint: its record names it, and the first score is the last of the run."""
    cold = train_experiment(of(*QUICK, *SUMS, "steps=40"), tmp_path / "cold")

    warm = train_experiment(load(RANDOM, [f"model={cold.directory}", "steps=0"]), tmp_path / "warm")

    assert load(warm.directory / "experiment.toml").experiment.model == str(cold.model)
    assert warm.evaluations[0].scores["answer"].mean == cold.evaluations[-1].scores["answer"].mean


def test_what_is_not_said_has_defaults_that_are_said():
    """Rate, schedule, warm-up and epochs; ten times the rate with adapters; what a file says of them stays."""
    plain, adapted = of(*QUICK[:1], *SUMS), of(*QUICK[:1], *SUMS, "lora={}")
    own = supervised({**to_dict("quickstart"), "steps": 7}, [])

    optimizer = plain.experiment.learner.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (2e-5, "linear", 0.03)
    assert plain.experiment.epochs == 3
    assert len([note for note in plain.notes if "gnomon sft" in note]) == 4
    assert adapted.experiment.learner.optimizer.learning_rate == pytest.approx(2e-4)
    assert (own.experiment.algorithm, own.experiment.steps, own.experiment.epochs) == (SFT, 7, None)
    assert own.experiment.learner.optimizer.learning_rate == 3e-5


def to_dict(name: str) -> dict[str, Any]:
    from gnomon.config.reading import read

    return read(name)


def test_epochs_become_steps_before_the_run(tmp_path: Path):
    """30 rows, 8 a step, 2 epochs: 8 steps, in the record too; the warm-up is a share of them."""
    rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(30)]
    settings = {"held_out": {"size": 0}, "rollouts_per_step": 8, "learner": {"precision": "fp32"}}

    run = gnomon.sft(model="tiny", dataset=rows, run_dir=tmp_path / "run", epochs=2, **settings)

    kept = load(run.directory / "experiment.toml").experiment
    assert (run.steps, kept.steps, kept.epochs) == (8, 8, None)
    assert run.metrics["learner/learning_rate"][:2] == pytest.approx([2e-5, 2e-5])
    assert run.metrics["learner/learning_rate"][-1] == pytest.approx(2e-5 / 7)


def test_long_rows_are_refused_or_left_out_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Beyond the model's context a row is refused with its tokens; max_length leaves longer ones out, with a count."""
    rows = [{"prompt": f"say {n}", "completion": "x" * (1500 if n == 3 else 5)} for n in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("model=tiny", f"task={path}", "held_out.size=0", "rollouts_per_step=4", "steps=1")

    with pytest.raises(
        DatasetError, match=r"1 of 20 rows of 'rows' are longer, .* context of 1024 tokens: .* \(15\d\d\)"
    ):
        train_experiment(of(*settings), tmp_path / "refused")
    train_experiment(of(*settings, "max_length=100"), tmp_path / "run")

    assert not (tmp_path / "refused").exists()
    assert "1 training and 0 held-out rows are longer than max_length = 100 and left out" in capfd.readouterr().err


WRONG = {
    "an algorithm that samples": (("algorithm=grpo",), "does not; leave it out, or run gnomon train"),
    "old answers": (("max_staleness=1",), "set max_staleness = 0"),
    "an environment": (("environment={kind='tools', tools=['python']}",), "remove environment"),
    "steps and epochs": (("steps=3", "epochs=2"), "both say how long"),
    "no epochs": (("epochs=0",), "epochs must be above 0"),
    "a length without room": (("max_length=1",), "max_length must be at least 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(case: str):
    """Each message names the setting and what to type."""
    overrides, said = WRONG[case]

    with pytest.raises(ConfigError, match=said):
        of(*QUICK, *SUMS, *overrides)


def test_settings_of_sft_are_refused_elsewhere():
    """max_length, and an evaluation without answers, mean nothing where answers are sampled."""
    for override, said in (("max_length=9", "rows of supervised fine-tuning"), ("evaluation.samples=0", "at least 1")):
        with pytest.raises(ConfigError, match=said):
            load(RANDOM, [override])


@pytest.mark.parametrize("change", ["num_generations=2", "updates.minibatches=2", "mask_truncated=true"])
def test_the_algorithm_refuses_what_is_about_sampled_answers(change: str):
    """samples = "data" leaves nothing but the aggregate to choose, and its table reads back as itself."""
    key, value = parse_override(change)

    with pytest.raises(ConfigError, match=f"{key.partition('.')[0]} is about sampled ones; set algorithm"):
        resolve({"preset": "sft", key: value})
    assert resolve(to_table(SFT)) == SFT
    assert resolve({"preset": "sft", "aggregate": "SequenceMean"}).aggregate == SequenceMean()


def test_plan_watch_and_doctor_speak_of_rows_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No prompt is asked and no reward shown; the doctor applies the rules that need neither."""
    run = train_experiment(of(*QUICK, *SUMS, "steps=3", "evaluation.samples=0"), tmp_path / "run")
    said = {}
    for verb in (
        ["plan", str(run.directory / "experiment.toml")],
        ["watch", str(run.directory), "--once"],
        ["doctor", str(run.directory)],
    ):
        capsys.readouterr()
        assert main(verb) == 0
        said[verb[0]] = capsys.readouterr().out

    assert "A step trains on 16 rows of the dataset in one optimizer update" in said["plan"]
    assert "whose mean negative log-likelihood is the loss. No answer is generated in it." in said["plan"]
    assert re.search(r"The answer of '.*' has 2 tokens, of which 2 are trained on, and reads", said["plan"])
    assert "if every answer uses its whole budget" not in said["plan"]
    assert re.search(r"(?m)^.*\bloss\b", said["watch"])
    assert "reward" not in said["watch"]
    assert {rule.name for rule in Doctor({"algorithm": to_table(SFT)})._rules} == SUPERVISED


def test_the_command_trains_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Settings alone describe a run; without a model or a task the message is a command that has both."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": str(n)}) + "\n" for n in range(8)))
    settings = ["rollouts_per_step=4", "held_out.size=0", "learner.precision=fp32"]

    code = main(
        [
            "sft",
            "model=tiny",
            f"task={path}",
            "--num_train_epochs",
            "2",
            *settings,
            "--run-dir",
            str(tmp_path / "run"),
            "--json",
        ]
    )
    shown = json.loads(capsys.readouterr().out)
    wrong = main(["sft", f"task={path}"])

    assert (code, shown["steps"]) == (0, 4)
    assert wrong == 2
    assert "model must be named: gnomon sft model=" in capsys.readouterr().err
