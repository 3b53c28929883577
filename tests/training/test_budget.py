"""A run ends with the step that reaches its budget, as a run of that many steps ends."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.runs import same, trace

from gnomon.config.experiment import from_table, load, to_toml
from gnomon.core.errors import ConfigError, Stopped
from gnomon.core.sections import BudgetConfig
from gnomon.records.reading import RunRecord, column
from gnomon.training.api import is_finished, resume, train_experiment
from gnomon.training.budget import BudgetTracker
from gnomon.training.evaluate import read_evaluations
from gnomon.training.run import StopRequest

# A reward that an untrained model earns now and then, so that each step has something to learn.
REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
COMMON = (REWARD, "task.size=40", "rollouts_per_step=16", "algorithm.num_generations=4", "checkpoints.every=2")
# An answer is 1 to 3 tokens, so a step of 16 is 16 to 48: the budget is reached in step 3, 4 or 5 at the earliest.
TOKENS = 130


def tokens_of(run: Path) -> list[float]:
    """Return the tokens in all after each step."""
    return [value for _, value in column(RunRecord(run).metrics(), "tokens/generated_total")]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of at most 50 steps that its budget ends sooner."""
    run = tmp_path_factory.mktemp("budget") / "run"
    train_experiment(load("tiny", [*COMMON, "steps=50", f"budget.tokens={TOKENS}"]), run)
    return run


def test_the_step_that_reaches_the_budget_is_the_last(limited: Path):
    """Before the last step less was spent than the budget, after it as much or more; the total is the sum of all."""
    spent = tokens_of(limited)
    generated = [value for _, value in column(RunRecord(limited).metrics(), "tokens/generated")]

    assert spent[-2] < TOKENS <= spent[-1]
    assert spent[-1] == sum(generated)


def test_a_budget_ends_a_run_as_its_steps_do(limited: Path, tmp_path: Path):
    """A run of exactly as many steps and no budget leaves the same metrics, evaluations, rollouts, states, weights."""
    steps = len(tokens_of(limited))
    run = tmp_path / "run"
    result = train_experiment(load("tiny", [*COMMON, f"steps={steps}"]), run)

    same(trace(limited, steps), trace(run, steps))
    assert result.steps == steps


def test_a_resumed_run_ends_at_the_same_step(limited: Path, tmp_path: Path):
    """Stopped after each step, it still ends where the budget is spent, with the same everything; then it is over."""
    run, steps = tmp_path / "run", len(tokens_of(limited))
    experiment = load("tiny", [*COMMON, "steps=50", f"budget.tokens={TOKENS}"])
    with pytest.raises(Stopped, match="stopped after step 1 of 50"):
        train_experiment(experiment, run, StopRequest(signal.SIGTERM, after=1))
    assert not is_finished(run, experiment.experiment)
    for _ in range(2, steps):
        with pytest.raises(Stopped, match="stopped after step"):
            resume(run, StopRequest(signal.SIGTERM, after=1))
    ended = resume(run)

    same(trace(run, steps), trace(limited, steps))
    assert ended.steps == steps
    assert is_finished(run, experiment.experiment)
    assert RunRecord(run).state() == "finished"
    assert resume(run) == ended
    assert len(tokens_of(run)) == steps


def test_a_run_is_evaluated_at_equal_shares_of_its_budget(tmp_path: Path):
    """Four marks: an evaluation before, and one after the first step that reached each quarter of the tokens."""
    run = tmp_path / "run"
    train_experiment(load("tiny", [*COMMON, "steps=50", "budget={tokens=200, evaluations=4}"]), run)
    spent = tokens_of(run)
    expected = [
        next(step for step, total in enumerate(spent, start=1) if total >= mark) for mark in (50, 100, 150, 200)
    ]

    assert [e.step for e in read_evaluations(run / "evaluations.jsonl")] == [0, *dict.fromkeys(expected)]


def test_tokens_before_the_first_step_count(tmp_path: Path):
    """SPO's initial values, 2 answers to each of 35 questions, are in the total of the first step; with less: no step.

    70 answers are 70 tokens or more, so a budget of 60 is spent before the first step, and the run is over.
    """
    spo = (REWARD, "task.size=40", "rollouts_per_step=16", "algorithm=spo", "algorithm.tracker.n0=2")
    run = tmp_path / "run"
    train_experiment(load("tiny", [*spo, "algorithm.updates.minibatches=2", "steps=1"]), run)
    (row,) = RunRecord(run).metrics()
    before = row["tokens/generated_total"] - row["tokens/generated"]
    none = tmp_path / "none"
    result = train_experiment(
        load("tiny", [*spo, "algorithm.updates.minibatches=2", "steps=9", "budget.tokens=60"]), none
    )

    assert 70 <= before <= 210
    assert result.steps == 0
    assert [evaluation.step for evaluation in result.evaluations] == [0]
    assert resume(none) == result


def test_critic_pretraining_counts(tmp_path: Path):
    """Two batches of 16 answers for the critic come before the first step's 16; each batch says the tokens so far."""
    run = tmp_path / "run"
    critic = ("algorithm=vc-ppo", "algorithm.critic.pretraining.steps=2", "rollouts_per_step=16")
    train_experiment(load("tiny", [REWARD, "task.size=40", *critic, "algorithm.updates.minibatches=1", "steps=1"]), run)
    rows = [*RunRecord(run).metrics()]

    assert rows[0]["tokens/generated_total"] - rows[0]["tokens/generated"] >= 32


def test_seconds_end_a_run(tmp_path: Path):
    """A budget of a blink ends it after one step; its card promises no equal number of steps."""
    run = tmp_path / "run"
    result = train_experiment(load("tiny", [*COMMON, "steps=50", "budget.seconds=0.001"]), run)

    assert result.steps == 1
    assert "the clock decides which step is the last" in RunRecord(run).card()["reproducibility"]
    assert RunRecord(run).state() == "finished"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budget.tokens=-1", r"budget\.tokens must be 0 \(no limit\) or more, got -1"),
        ("budget.seconds=inf", r"budget\.seconds must be 0 \(no limit\) or more, and finite, got inf"),
        ("budget.evaluations=3", r"shares of a budget; set budget\.tokens or budget\.seconds"),
        ("budget.token=5", "unknown key 'token'; did you mean 'tokens'"),
    ],
)
def test_wrong_budgets_are_refused(override: str, message: str):
    """Each with what it needs."""
    with pytest.raises(ConfigError, match=message):
        load("tiny", [override])


def test_a_budget_comes_back_from_its_record():
    """TOML out, TOML in."""
    import tomllib

    experiment = load("tiny", ["budget.tokens=500", "budget.evaluations=2"]).experiment

    assert from_table(tomllib.loads(to_toml(experiment))).experiment == experiment
    assert experiment.budget == BudgetConfig(tokens=500, evaluations=2)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 400), st.integers(1, 9))
def test_marks_are_where_shares_of_the_budget_are_crossed(amounts: Sequence[int], budget: int, marks: int):
    """After the steps in which floor(marks * spent / budget) grew, whatever their sizes; a restored meter agrees."""
    meter = BudgetTracker(BudgetConfig(tokens=budget, evaluations=marks))
    total = 0
    for amount in amounts:
        before, total = int(total / budget * marks), total + amount
        resumed = BudgetTracker(meter.plan)
        resumed.restore(meter.state())
        for one in (meter, resumed):
            one.add(amount)

            assert one.is_at_mark == (int(total / budget * marks) > before)
            assert one.is_spent == (total >= budget)
