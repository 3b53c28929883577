"""What may be compared, and what is refused before anything starts."""

from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.algorithms import Uniform
from gnomon.analysis.compare.run import MARKS, Contestant, Design, RunLimit
from gnomon.config.experiment import load, to_toml
from gnomon.core.errors import ConfigError

TOKENS = RunLimit(5000, "tokens")


def design(*overrides: str, algorithms: str = "grpo,spo", seeds: int = 2, limit: RunLimit = TOKENS) -> Design:
    """Return a comparison on the tiny experiment."""
    return Design.of(RANDOM, overrides, algorithms.split(","), seeds, limit)


def test_runs_differ_in_algorithm_and_seed_alone(tmp_path: Path):
    """Four runs, each with its folder; the same budget, marks, task and model for all."""
    found = design("evaluation.samples=4")
    jobs = [found.job(contestant, seed, tmp_path) for contestant in found.contestants for seed in found.seed_numbers()]
    experiments = [job.experiment() for job in jobs]

    assert [job.name for job in jobs] == ["grpo, seed 0", "grpo, seed 1", "spo, seed 0", "spo, seed 1"]
    assert len({job.folder for job in jobs}) == 4
    assert [(e.algorithm.name, e.seed) for e in experiments] == [("grpo", 0), ("grpo", 1), ("spo", 0), ("spo", 1)]
    assert {(e.budget.tokens, e.budget.evaluations, e.evaluation.samples, e.task, e.model) for e in experiments} == {
        (5000, MARKS, 4, experiments[0].task, "tiny")
    }


def test_steps_bound_a_run_that_its_budget_ends():
    """Every answer has a token at least: 5,000 tokens at 128 answers a step are over in 40 steps."""
    assert design().experiment(Contestant("grpo", "grpo")).steps == 40


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (RunLimit(40, "steps"), {"steps": 40, "every": 5, "tokens": 0, "seconds": 0.0}),
        (RunLimit(30, "seconds"), {"steps": 10**6, "every": 0, "tokens": 0, "seconds": 30.0}),
        (RunLimit(5000, "tokens"), {"steps": 40, "every": 0, "tokens": 5000, "seconds": 0.0}),
    ],
    ids=["steps", "seconds", "tokens"],
)
def test_each_limit_ends_a_run(limit: RunLimit, expected: dict[str, float]):
    """Steps by their number, with an evaluation each eighth of them; tokens and seconds by the budget."""
    experiment = design(limit=limit).experiment(Contestant("grpo", "grpo"))
    found = {
        "steps": experiment.steps,
        "every": experiment.evaluation.every,
        "tokens": experiment.budget.tokens,
        "seconds": experiment.budget.seconds,
    }

    assert found == expected


def test_marks_may_be_chosen():
    """A user's own number of evaluations stays."""
    assert design("budget.evaluations=3").experiment(Contestant("grpo", "grpo")).budget.evaluations == 3
    assert (
        design("evaluation.every=7", limit=RunLimit(40, "steps")).experiment(Contestant("a", "grpo")).evaluation.every
        == 7
    )


def test_a_file_stands_for_its_algorithm(tmp_path: Path):
    """An experiment that differs in the algorithm alone is an algorithm, called as its file."""
    path = tmp_path / "careful.toml"
    path.write_text(to_toml(load(RANDOM, ["algorithm.surrogate.trust.high=0.28"]).experiment))
    found = design(algorithms=f"grpo,{path}")

    assert [contestant.name for contestant in found.contestants] == ["grpo", "careful"]
    assert "high=0.28" in repr(found.experiment(found.contestants[1]).algorithm)
    assert isinstance(found.experiment(found.contestants[1]).algorithm.sampler, Uniform)


def test_a_file_that_differs_in_more_is_refused(tmp_path: Path):
    """Another learning rate could be what makes the difference, so it is named."""
    path = tmp_path / "fast.toml"
    path.write_text(to_toml(load(RANDOM, ["learner.optimizer.learning_rate=0.5"]).experiment))
    with pytest.raises(ConfigError, match=r"more than its algorithm.*learning_rate is 0\.003 there and 0\.5 here"):
        design(algorithms=f"spo,{path}")


def test_the_folder_is_found_again_by_the_terms():
    """More seeds or algorithms are the same comparison; another budget or setting is another one."""
    assert design().digest() == design(seeds=5, algorithms="dapo,gspo,grpo").digest()
    assert design().digest() != design(limit=RunLimit(5001, "tokens")).digest()
    assert design().digest() != design("evaluation.samples=2").digest()


@pytest.mark.parametrize(
    ("amount", "unit", "message"),
    [
        (0, "tokens", "--budget must be a number above 0, got 0"),
        (-5, "steps", "--steps must be a number above 0, got -5"),
        (0.0, "seconds", "--seconds must be a number above 0"),
        (float("inf"), "seconds", "--seconds must be finite, got inf"),
        (float("nan"), "seconds", "--seconds must be a number above 0, got nan"),
    ],
)
def test_no_budget_is_no_comparison(amount: float, unit: str, message: str):
    """Nothing to spend."""
    with pytest.raises(ConfigError, match=message):
        RunLimit(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "algorithms", "seeds", "message"),
    [
        ((), "grpo,spo", 0, "--seeds must be 1 or more, got 0"),
        ((), "grpo", 2, "--algorithms needs two names or more"),
        ((), " , ", 2, "--algorithms needs two names or more"),
        ((), "grpo,grop", 2, "grop: unknown algorithm 'grop'; did you mean 'grpo'"),
        ((), "grpo,grpo", 2, "two algorithms have the name grpo"),
        ((), "grpo,nowhere.toml", 2, "cannot read the experiment nowhere.toml"),
        (("seed=3",), "grpo,spo", 2, "seed cannot be set in a comparison: --seeds says how many"),
        (("steps=3",), "grpo,spo", 2, "steps cannot be set in a comparison: --steps sets it"),
        (("algorithm=ppo",), "grpo,spo", 2, "algorithm cannot be set in a comparison: --algorithms names them"),
        (("algorithm.critic.updates.epochs=2",), "ppo,grpo", 2, "grpo: "),
        (("learner.optimizer.schedule=cosine",), "grpo,spo", 2, "the cosine schedule of the learning rate falls over"),
        (("rollouts_per_step=20",), "grpo,dapo", 2, "grpo: rollouts_per_step = 20 is not a multiple of the 8"),
        (("max_step=3",), "grpo,spo", 2, "unknown key 'max_step'"),
    ],
)
def test_what_cannot_be_compared(overrides: tuple[str, ...], algorithms: str, seeds: int, message: str):
    """One clear error, with the algorithm that it is about."""
    with pytest.raises(ConfigError, match=message):
        design(*overrides, algorithms=algorithms, seeds=seeds)


def test_a_falling_learning_rate_goes_with_steps():
    """A number of steps is what a schedule needs."""
    found = design("learner.optimizer.schedule=cosine", limit=RunLimit(10, "steps"))

    assert found.experiment(found.contestants[0]).steps == 10
