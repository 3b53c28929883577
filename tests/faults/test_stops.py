"""F10 and F14: a run that is asked to stop, wherever it is, stops where it can go on; two never work on one."""

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.forked import FORKS
from tests.random_model import RANDOM
from tests.training.runs import same, trace

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.records.checkpoints import Checkpoints
from gnomon.records.jsonl import read_rows
from gnomon.training.api import resume, train_experiment

REWARD = "rewards=[{kind='format', pattern='[!-P].*'}]"
TINY = [
    REWARD, "task.size=40", "rollouts_per_step=8", "held_out.size=4", "grading.workers=1", "steps=12",
    "algorithm.num_generations=4", "checkpoints.every=3", "grading.deadline_seconds=600", "engine.timeout_seconds=600",
]  # fmt: skip
STOPS = 50


def _work(verb: list[str], log: str) -> None:
    sys.stderr = open(log, "w")  # noqa: SIM115 - it ends with the process
    code = main(verb)
    sys.stderr.flush()
    os._exit(code)


def stopped(verb: list[str], log: Path, seconds: float, numbers: tuple[signal.Signals, ...]) -> tuple[int, float]:
    """Run a verb, signal it after so many seconds of work, and return exit code and seconds from then to its end."""
    child = FORKS.Process(target=_work, args=(verb, str(log)))
    child.start()
    time.sleep(seconds)
    began = time.monotonic()
    for number in numbers:
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, number)
            time.sleep(0.05)
    child.join(120)
    assert child.exitcode is not None, log.read_text()
    return child.exitcode, time.monotonic() - began


@dataclass(frozen=True)
class Whole:
    """What a run leaves that nobody stopped, and the seconds that it takes."""

    left: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Run it twice: the first also starts the server that later ones are forked from."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("first", "run"):
        began = time.monotonic()
        child = FORKS.Process(
            target=_work, args=(["train", RANDOM, *TINY, "--run-dir", str(folder / name)], os.devnull)
        )
        child.start()
        child.join(300)
        assert child.exitcode == 0
    return Whole(trace(folder / "run", 12), time.monotonic() - began)


def finished(run: Path) -> Path:
    """Go on with a run, or begin it where its directory was not made yet."""
    if not (run / "experiment.toml").exists():
        train_experiment(load(RANDOM, TINY), run)
    else:
        resume(run)
    return run


def try_stops(tmp_path: Path, whole: Whole, count: int, seed: int) -> tuple[list[float], int]:
    """Stop ``count`` runs at any time of their lives with SIGTERM, SIGINT, or SIGTERM twice.

    Returns: the seconds that each took to end, and how many ended sooner than by themselves.
    """
    chosen, took, ended_early = random.Random(seed), [], 0
    for number in range(count):
        run, log = tmp_path / str(number), tmp_path / f"{number}.log"
        numbers = chosen.choice([(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
        code, seconds = stopped(
            ["train", RANDOM, *TINY, "--run-dir", str(run)], log, chosen.uniform(0, whole.seconds), numbers
        )
        took.append(seconds)
        ended_early += code != 0
        # Before its handlers are set a process ends as any does; after them it has saved, or was asked twice.
        assert code in (0, 130, 143, -signal.SIGTERM, -signal.SIGINT), log.read_text()
        if code in (130, 143) and len(numbers) == 1 and "and saved; go on with: gnomon resume" in log.read_text():
            assert Checkpoints(run / "checkpoints").newest() is not None
        same(trace(finished(run), 12), whole.left)
        assert not list((run / "checkpoints").glob(".tmp-*"))
        shutil.rmtree(run)
    return took, ended_early


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_runs_that_are_stopped_at_any_time_go_on(tmp_path: Path, whole: Whole, capsys: Any):
    """SIGTERM or SIGINT, once or twice, at random times: resumed, each is the uninterrupted run.

    The times are of one run's whole life, so nearly all of them are hit while they live.
    """
    took, ended_early = try_stops(tmp_path, whole, STOPS, seed=2)

    middle = sorted(took)[len(took) // 2]
    with capsys.disabled():
        print(f"\nstopped {len(took)} times, {ended_early} of these while at work")
        print(f"ended within {max(took):.1f} s, median {middle:.1f} s")
    assert ended_early >= 0.7 * STOPS


def test_a_second_start_on_a_running_run_is_refused_and_disturbs_nothing(tmp_path: Path):
    """While one trains, `resume` and `train` are told who is at work; the first ends as if alone."""
    run, log = tmp_path / "run", tmp_path / "log"
    child = FORKS.Process(target=_work, args=(["train", RANDOM, *TINY, "--run-dir", str(run)], str(log)))
    child.start()
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert child.is_alive(), log.read_text()
        time.sleep(0.01)
    os.kill(child.pid or 0, signal.SIGSTOP)
    try:
        codes = [main(["resume", str(run)]), main(["train", RANDOM, "--run-dir", str(run)])]
    finally:
        os.kill(child.pid or 0, signal.SIGCONT)
    child.join(120)

    assert codes == [2, 2]
    assert child.exitcode == 0, log.read_text()
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 13))
