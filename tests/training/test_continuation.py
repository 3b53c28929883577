"""A run that is continued with more steps is the longer run; what would give other numbers is refused."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked import FORKS
from tests.training.runs import same, trace

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.core.errors import ConfigError, RunDirectoryError, Stopped
from gnomon.training.api import continue_run, resume, train_experiment
from gnomon.training.run import StopRequest

MADE, STEPS = 2, 5
COMMON = (
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "rollouts_per_step=16", "evaluation.every=2",
    "checkpoints.every=1", "checkpoints.keep_last=9", "held_out.size=4",
)  # fmt: skip
ALGORITHMS = {
    "grpo": ("algorithm.num_generations=4", "learner.optimizer.warmup_steps=3"),
    "spo": ("algorithm=spo", "algorithm.tracker.n0=2", "algorithm.updates.minibatches=2"),
}


def options(algorithm: str, steps: int, *more: str) -> list[str]:
    """Return what the tests change about the `tiny` experiment."""
    return [f"steps={steps}", *COMMON, *ALGORITHMS[algorithm], *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function from algorithm and steps to a run that asked for so many steps at first."""
    runs: dict[tuple[str, int], Path] = {}

    def run(algorithm: str, steps: int) -> Path:
        if (algorithm, steps) not in runs:
            runs[algorithm, steps] = tmp_path_factory.mktemp(f"{algorithm}-{steps}") / "run"
            train_experiment(load("tiny", options(algorithm, steps)), runs[algorithm, steps])
        return runs[algorithm, steps]

    return run


@pytest.fixture
def short(made: Callable[[str, int], Path], tmp_path: Path) -> Path:
    """Return a copy of the finished short run."""
    return shutil.copytree(made("grpo", MADE), tmp_path / "run")


def _card(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_continued_run_is_the_longer_run(made: Callable[[str, int], Path], tmp_path: Path, algorithm: str):
    """Metrics, tokens, evaluations, values, moments and weights are those of the run that asked for all steps."""
    run = shutil.copytree(made(algorithm, MADE), tmp_path / "run")
    assert continue_run(run, [("steps", STEPS)]).steps == STEPS

    same(trace(run, STEPS), trace(made(algorithm, STEPS), STEPS))
    assert _card(run)["extended"] == [{"steps": [MADE, STEPS]}]
    assert load(run / "experiment.toml").experiment == load(made(algorithm, STEPS) / "experiment.toml").experiment


def test_a_run_is_continued_twice_and_stopped_between(
    short: Path, made: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
):
    """By two commands, the second of which is stopped and resumed; the evaluation at each end is one more."""
    continue_run(short, [("steps", 3)])
    with pytest.raises(Stopped, match="stopped after step 4 of 5, and saved"):
        continue_run(short, [("steps", STEPS)], StopRequest(signal.SIGTERM, after=1))
    capsys.readouterr()
    resume(short)

    assert "edited" not in capsys.readouterr().err
    assert _card(short)["extended"] == [{"steps": [MADE, 3]}, {"steps": [3, STEPS]}]
    mine, whole = trace(short, STEPS), trace(made("grpo", STEPS), STEPS)
    assert [row["step"] for row in mine["evaluations"]] == [0, 2, 3, 4, 5]
    mine["evaluations"] = [row for row in mine["evaluations"] if row["step"] != 3]
    same({name: part for name, part in mine.items() if name != "evaluations/step-000003.jsonl"}, whole)


def _continue(run: Path, dies_at: str) -> None:
    failpoints.arm(dies_at)
    continue_run(run, [("steps", STEPS)])


@pytest.mark.parametrize("point", ["start:1", "update:2", "checkpoint-rename:1"])
def test_a_run_that_is_killed_while_it_is_continued_goes_on(short: Path, made: Callable[[str, int], Path], point: str):
    """SIGKILL before the first new step, in one and after its checkpoint: the same command again does the rest."""
    child = FORKS.Process(target=_continue, args=(short, point))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL

    continue_run(short, [("steps", STEPS)])

    same(trace(short, STEPS), trace(made("grpo", STEPS), STEPS))
    assert _card(short)["extended"] == [{"steps": [MADE, STEPS]}]


def test_what_would_not_be_the_longer_run_is_refused(made: Callable[[str, int], Path], tmp_path: Path):
    """Fewer steps than are made, other settings, rates that depended on the steps, a run without a checkpoint."""
    run = shutil.copytree(made("grpo", MADE), tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match=rf"steps = 1 counts from the beginning .* {MADE} are made; type steps=3"):
        continue_run(run, [("steps", 1)])
    with pytest.raises(ConfigError, match="seed cannot change within a run"):
        continue_run(run, [("steps", 9), ("seed", 1)])
    with pytest.raises(
        ConfigError, match=r"gnomon continue .*run steps=200; to go on as it was begun, type gnomon resu"
    ):
        continue_run(run, [])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        continue_run(run, [("step", 9)])
    assert {path: path.read_bytes() for path in before} == before

    shutil.rmtree(run / "checkpoints")
    (run / ".saved").unlink()
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rollouts")
    with pytest.raises(ConfigError, match="has no checkpoint, so there is nothing to continue; gnomon resume"):
        continue_run(run, [("steps", 9)])
    with pytest.raises(RunDirectoryError, match="unknown run"):
        continue_run(tmp_path / "rum", [("steps", 9)])


def test_rates_that_depended_on_the_steps_are_refused(tmp_path: Path):
    """A linear schedule gave the second step another rate than it would have had in a longer run."""
    run = tmp_path / "run"
    train_experiment(
        load("tiny", options("grpo", 2, "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=0")), run
    )
    written = (run / "experiment.toml").read_bytes()

    with pytest.raises(ConfigError, match=r'schedule = "linear" made the learning rates of the 2 steps'):
        continue_run(run, [("steps", 4)])
    assert (run / "experiment.toml").read_bytes() == written


def test_a_spent_budget_can_be_raised(tmp_path: Path, made: Callable[[str, int], Path]):
    """A run that its budget of tokens ended makes its other steps, which are those of a run without a budget."""
    run = tmp_path / "run"
    train_experiment(load("tiny", options("grpo", STEPS, "budget.tokens=1", "budget.evaluations=0")), run)
    assert [row["step"] for row in trace(run, 1)["metrics"]] == [1]
    continue_run(run, [("budget.tokens", 100_000)])

    assert trace(run, STEPS)["metrics"] == trace(made("grpo", STEPS), STEPS)["metrics"]


def test_a_strangers_run_executes_nothing(
    tmp_path: Path, made: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
):
    """A run that another user began and that names code ends with exit code 2, and the code did not run."""
    run, own = shutil.copytree(made("grpo", MADE), tmp_path / "run"), tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(prompt, completion): return 1.0\n")
    text = (run / "experiment.toml").read_text()
    at, end = text.index("[[rewards]]"), text.index("[rewards.verifier]")
    end = text.index("\n[", end)
    text = f'{text[:at]}[[rewards]]\n[rewards.verifier]\nkind = "function"\nfunction = "{own}:score"\n{text[end:]}'
    (run / "experiment.toml").write_text(text)

    assert main(["continue", str(run), "steps=9"]) == 2
    assert f"names code: reward {own}:score" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
