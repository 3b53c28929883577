"""What an evaluation says of graded answers, and what a run keeps of its evaluations."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.random_model import RANDOM

import gnomon
from gnomon.analysis.paired import compare, read_answered
from gnomon.config.experiment import load
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.console import Console
from gnomon.records.jsonl import JsonLines
from gnomon.rollouts.metrics import measure_round
from gnomon.rollouts.rollout import RolloutTimer
from gnomon.rollouts.scheduler import RolloutBatch
from gnomon.training.api import train_experiment
from gnomon.training.evaluate import Evaluation, read_evaluations, summarize
from gnomon.training.run_logger import RunLogger


def group(name: str, *grades: Grade, tokens: int = 2) -> Group:
    """Return a prompt's graded samples, of ``tokens`` tokens each."""
    nothing = (0.0,) * tokens
    rollouts = (
        Rollout(name, (1,), (2,) * tokens, (True,) * tokens, nothing, nothing, "", grade, 0, 0, "stop")
        for grade in grades
    )
    return Group(Task(name, (1,), name), tuple(rollouts))


def graded(score: float, answer: str | None, form: float = 1.0) -> Grade:
    return Grade(score, {"answer": score, "format": form}, answer=answer)


TWO = (
    group("a", graded(1, "7"), graded(1, "7"), graded(0, "8"), graded(0, None, form=0), tokens=2),
    group("b", graded(0, "5"), graded(0, "5"), graded(1, "6"), Grade(None, error="slow"), tokens=4),
)


def test_an_evaluation_of_two_prompts():
    """(2/4 + 1/3) / 2 answers; given the form (2/3 + 1/3) / 2; 3 tokens; b has 3 graded samples, so no pass@4."""
    found = summarize(TWO, 8, "sums", 4)

    assert found.headline.mean == pytest.approx(5 / 12)
    assert found.scores["answer given format"].mean == pytest.approx(1 / 2)
    assert found.length_tokens_mean == 3.0
    assert (found.prompts, found.samples, found.errors, found.truncated_fraction) == (2, 4, 1, 0.0)
    assert found.pass_at == {"1": pytest.approx(5 / 12), "2": pytest.approx((5 / 6 + 2 / 3) / 2)}


def test_the_length_of_an_answer_is_that_of_all_its_segments():
    """Segments of 2 and 6 tokens are 8 tokens, in the evaluation and in the record of the prompt; a training step says
    the same of them.
    """
    whole, rest = (group("a", graded(1, "7"), tokens=tokens) for tokens in (2, 6))
    parted = replace(whole, rollouts=(replace(whole.rollouts[0], segments=rest.rollouts),))
    found = summarize((parted,), 8, "sums", 1)

    assert found.length_tokens_mean == found.answered[0].measure("tokens") == 8.0
    watch = RolloutTimer()
    assert measure_round(RolloutBatch(0, (parted,), (), watch), 0)["rollout/length_tokens_mean"] == 8.0


def test_what_could_not_be_graded_is_said():
    """One sample of eight; of two prompts one with none at all; nothing where all were graded."""
    lost = group("c", *(Grade(None, error="not a number"),) * 4)

    assert summarize(TWO, 0, "sums", 4).ungraded == "1 of 8 samples could not be graded and are in no score"
    assert summarize((TWO[0], lost), 0, "sums", 4).ungraded.startswith("4 of 8 samples could not be graded")
    assert str(summarize((lost,), 0, "sums", 4)) == "reward - on 1 prompts of 'sums' after step 0", "a dash is no zero"
    assert summarize((TWO[0], lost), 0, "sums", 4).ungraded.endswith("on 1 of 2 prompts none could")
    assert summarize(TWO[:1], 0, "sums", 4).ungraded == ""


def test_the_line_of_an_evaluation_says_what_could_not_be_graded(tmp_path: Path):
    """Beside the score, while the run trains."""
    shown = io.StringIO()
    journal = RunLogger(Console(stream=shown), [], JsonLines(tmp_path / "evaluations.jsonl"))
    journal.write_evaluation(summarize(TWO, 3, "sums", 4))
    journal.close()

    assert "after step 3 (1 of 8 samples could not be graded" in " ".join(shown.getvalue().split())


def test_a_reward_that_does_not_apply_is_no_zero():
    """TRL's None: the score is the experiment's first part on the prompts that it applies to, in any order of prompts.

    Of b's samples it applies to two of three; none of a's are in pass@k, and the form is judged everywhere.
    """
    form, both = Grade(0.0, {"form": 1.0}, answer="z"), Grade(1.0, {"math": 1.0, "form": 1.0}, answer="7")
    rows = (group("a", form, form, form), group("b", both, form, both))
    for asked in (rows, rows[::-1]):
        found = summarize(asked, 0, "sums", 3, ("math", "form"))
        answered = {row.prompt_id: row for row in found.answered}

        assert [*found.scores] == ["math", "form", "math given form", "reward"]
        assert (found.headline.mean, found.scores["math given form"].mean, found.errors) == (1.0, 1.0, 0)
        assert found.pass_at == {"1": 1.0, "2": 1.0}
        assert (answered["a"].scores, answered["b"].scores, answered["b"].samples) == ((), (1.0, 1.0), 3)
    none = summarize((group("c", Grade(None, error="slow")), rows[0]), 0, "sums", 3, ("math", "form"))
    assert (none.headline.mean, none.ungraded.endswith("on 1 of 2 prompts none could")) == (1.0, True)


def test_answers_vote_in_the_form_of_the_verifier():
    """Of four samples of a, 7 wins with two votes against one, and one sample has no vote; of b's, 5 wins: 1/2."""
    rows = (TWO[0], group("b", *(graded(0, "5"),) * 2, graded(1, "6"), graded(1, "6.0")))

    assert summarize(rows, 0, "sums", 4).maj_at["4"] == pytest.approx(1 / 2)


def test_without_a_right_or_wrong_there_is_no_majority():
    """Scores between 0 and 1 have a mean, and neither pass@k nor maj@k."""
    found = summarize((group("a", graded(0.5, "x"), graded(0.25, "y")),), 0, "sums", 2)

    assert (found.headline.mean, found.pass_at, found.maj_at) == (0.375, {}, {})
    assert set(found.intervals) == {"tokens", "truncated"}


def test_every_number_has_an_interval_that_holds_it():
    """40 prompts of unlike difficulty: pass@k, maj@k, length and truncation lie in their 95% intervals."""
    drawn = random.Random(0)
    rows = [
        group(str(n), *(graded(float(drawn.random() < n / 40), str(drawn.randrange(3))) for _ in range(8)), tokens=n)
        for n in range(1, 41)
    ]
    found = summarize(rows, 0, "sums", 8)
    values = {f"pass@{k}": v for k, v in found.pass_at.items()} | {f"maj@{k}": v for k, v in found.maj_at.items()}
    values |= {"tokens": found.length_tokens_mean, "truncated": found.truncated_fraction}

    assert set(values) == set(found.intervals)
    assert set(values) == {"pass@1", "pass@2", "pass@4", "pass@8", "maj@2", "maj@4", "maj@8", "tokens", "truncated"}
    assert [name for name, v in values.items() if not found.intervals[name][0] <= v <= found.intervals[name][1]] == []
    assert found.pass_at["1"] == pytest.approx(found.headline.mean)


def test_an_evaluation_is_read_as_it_was_written(tmp_path: Path):
    """All but how each prompt was answered, which has a file of its own; rows without intervals are read as well."""
    found = summarize(TWO, 8, "sums", 4)
    lines = JsonLines(tmp_path / "evaluations.jsonl")
    older = {name: value for name, value in found.as_row().items() if name != "intervals"}
    slow = {**found.as_row(), "slow": ["no cache: 164 times"]}
    for row in (found.as_row(), older, {**found.as_row(), "intervals": {"tokens": [1]}}, slow):
        lines.append(row)
    lines.close()
    read = read_evaluations(tmp_path / "evaluations.jsonl")

    assert [e.as_row() for e in read] == [
        found.as_row(),
        {**older, "intervals": {}},
        {**slow, "slow": ("no cache: 164 times",)},
    ]
    assert isinstance(read[0], Evaluation)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns too fast, is evaluated after each step, and keeps one checkpoint beside the best."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    overrides = ["steps=4", "seed=1", "rollouts_per_step=64", "learner.optimizer.learning_rate=0.03"]
    overrides += ["evaluation.every=1", "evaluation.samples=8", "checkpoints.keep_last=1"]
    train_experiment(load(RANDOM, overrides), folder)
    return folder


def test_the_best_checkpoint_is_kept(run: Path):
    """Of 5 evaluations the first with the highest score after a step; only it and the last have a checkpoint."""
    evaluations = read_evaluations(run / "evaluations.jsonl")
    best = max(evaluations, key=lambda e: (e.headline.mean, -e.step))

    assert [e.step for e in evaluations] == list(range(5))
    assert 0 < best.step < 4, "choose another learning rate or seed: nothing is tested"
    assert json.loads((run / "checkpoints" / "best.json").read_text()) == {"step": best.step}
    kept = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best.step}", "step-4"}
    again = gnomon.evaluate(run, checkpoint="best", samples=8)
    assert {**again.as_row(), "seconds": 0} == {**best.as_row(), "seconds": 0}


def test_each_evaluation_keeps_how_each_prompt_was_answered(run: Path):
    """One file an evaluation, equal to what asking again says; two of them are paired without asking."""
    files = sorted(path.name for path in (run / "evaluations").iterdir())
    first, last = (read_answered(run / "evaluations" / f"step-{step:06d}.jsonl") for step in (0, 4))
    rows = read_evaluations(run / "evaluations.jsonl")

    assert files == [f"step-{step:06d}.jsonl" for step in range(5)]
    assert gnomon.evaluate(run, samples=8).answered == last
    assert compare(first, last).mean == pytest.approx(rows[4].headline.mean - rows[0].headline.mean)
    assert compare(first, last).prompts == rows[0].prompts == 5


def test_the_model_before_training_is_checkpoint_0(run: Path):
    """It has no checkpoint of its own and is what the run began with: the first evaluation, to the digit."""
    first = read_evaluations(run / "evaluations.jsonl")[0]

    assert {**gnomon.evaluate(run, checkpoint=0, samples=8).as_row(), "seconds": 0} == {**first.as_row(), "seconds": 0}
