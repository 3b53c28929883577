"""F12: SIGKILL in the middle of a publication of weights, twenty times: nobody ever answers with a mixture of them.

The whole run is killed while its engines copy, or one process of its learner while weights are collected. An engine of
a cluster that dies in the middle of its copy is in tests/cluster/test_mid_exchange.py.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.killed import attempt
from tests.training.runs import same, trace
from tests.training.test_ledger import STEPS as OVERLAPPED_STEPS
from tests.training.test_ledger import Books, check_nothing_lost, check_nothing_twice, measured, overrides

from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.core.errors import LearnerError
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import tiny_model
from gnomon.training.api import train_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, KILLS = 3, 20
# Weights are sent once before the first step and once after each.
PUBLICATIONS = STEPS + 1
TENSORS = len(list(merged_tensors(tiny_model())))
COMMON = (
    "rewards=[{kind='format', pattern='[!-P].*'}]", f"steps={STEPS}", "task.size=40", "rollouts_per_step=8",
    "algorithm.num_generations=2", "evaluation.before=false", "held_out.size=4", "grading.workers=1",
    "checkpoints.every=1", "checkpoints.keep_last=9", "grading.deadline_seconds=600", "engine.timeout_seconds=600",
)  # fmt: skip
ENGINES = {"two engines": ("engine.count=2",), "rounded weights": ("engine.rounding=int8",)}


def spread(most: int, count: int) -> list[int]:
    """Return so many different numbers from 1 to ``most``, the first and the last among them."""
    return [1 + number * (most - 1) // (count - 1) for number in range(count)]


def whole(tmp_path_factory: pytest.TempPathFactory, *more: str) -> Path:
    """Return a run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert attempt(run, [*COMMON, *more]) == 0
    return run


@pytest.mark.parametrize("engines", ENGINES)
def test_a_run_killed_in_the_middle_of_a_copy_is_the_run_that_was_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, engines: str
):
    """Ten times each, from the first tensor of the first publication to the last of the last: byte for byte."""
    kept = trace(whole(tmp_path_factory, *ENGINES[engines]), STEPS)
    copies = PUBLICATIONS * TENSORS * (2 if engines == "two engines" else 1)
    for count in spread(copies, KILLS // 2):
        run = tmp_path / str(count)
        assert attempt(run, [*COMMON, *ENGINES[engines]], f"exchange:{count}") == -signal.SIGKILL, count
        assert attempt(run, [*COMMON, *ENGINES[engines]]) == 0

        same(trace(run, STEPS), kept)


@pytest.mark.parametrize("count", spread((OVERLAPPED_STEPS + 1) * TENSORS, 5))
def test_an_asynchronous_run_killed_in_the_middle_of_a_copy_keeps_its_books(tmp_path: Path, count: int):
    """While answers are on their way, five times: each is of versions that were published, and none is lost."""
    options = overrides("in the middle", 0)
    run = tmp_path / "run"
    assert attempt(run, options, f"exchange:{count}") == -signal.SIGKILL
    assert attempt(run, options) == 0
    books = Books.of(run)

    check_nothing_twice(books)
    check_nothing_lost(books, sum(row["stream/stale_rollouts"] for row in measured(run / "metrics.jsonl")))
    for step, rows in books.steps.items():
        for row in rows:
            assert 0 <= row.rollout.oldest_version <= row.rollout.newest_version <= step


@pytest.mark.parametrize("point", [*(f"collect:{n}" for n in spread(PUBLICATIONS * TENSORS, 4)), "model:2"])
def test_a_learner_that_dies_while_its_weights_are_collected_or_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_two: Callable[[], Path], point: str
):
    """In words; the same command goes on, and is byte for byte the run that nobody killed."""
    run = tmp_path / "run"
    loaded = load(RANDOM, [*COMMON, "learner.processes=2"])
    monkeypatch.setenv(failpoints.VARIABLE, point)
    with pytest.raises(LearnerError, match=r"(?s)process \d of the learner's 2 is gone: it was killed by SIGKILL"):
        train_experiment(loaded, run)
    monkeypatch.delenv(failpoints.VARIABLE)
    train_experiment(loaded, run)

    same(trace(run, STEPS), trace(in_two(), STEPS))


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function to the run of two processes that nothing interrupted."""
    made: list[Path] = []

    def run() -> Path:
        if not made:
            train_experiment(load(RANDOM, [*COMMON, "learner.processes=2"]), tmp_path_factory.mktemp("two") / "run")
            made.append(next(tmp_path_factory.getbasetemp().glob("two*")) / "run")
        return made[0]

    return run
