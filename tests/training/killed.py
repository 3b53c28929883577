"""Runs in processes that die at a named point, begun again with the same command until they are through."""

import signal
from pathlib import Path

from tests.forked import FORKS
from tests.random_model import RANDOM

from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.training.api import train_experiment

SECONDS = 300

# Every point, and how often it is passed: so often that a run of three steps with a checkpoint each has published one,
# except where its first time says more.
POINTS = {
    "start": 1,
    "ask": 2,
    "decode": 9,
    "grade": 21,
    "advantages": 2,
    "backward": 3,
    "optimizer": 3,
    "update": 3,
    "deliver": 3,
    "record": 2,
    "checkpoint-file": 6,
    "checkpoint-manifest": 2,
    "checkpoint-rename": 2,
    "checkpoint-retire": 1,
}
# What runs with an engine that has weights of its own, or a learner of several processes, pass besides: tried in
# tests/faults/test_mid_sync.py.
RARE = ("exchange", "collect", "share", "model")


def _train(run: Path, options: list[str], dies_at: str) -> None:
    failpoints.arm(dies_at)
    train_experiment(load(RANDOM, options), run)


def attempt(run: Path, options: list[str], dies_at: str = "") -> int:
    """Train the `tiny` experiment with ``options`` in ``run``, or go on with it; return the exit code.

    dies_at: as `failpoints.arm` takes it.
    """
    child = FORKS.Process(target=_train, args=(run, options, dies_at))
    child.start()
    child.join(SECONDS)
    assert child.exitcode is not None, f"still at work after {SECONDS} s"
    return child.exitcode


def killed(run: Path, options: list[str], point: str) -> Path:
    """Return a finished run that SIGKILL ended once, at ``point``, and that the same command went on with."""
    assert attempt(run, options, f"{point}:{POINTS[point]}") == -signal.SIGKILL, f"{point} was not reached"
    assert attempt(run, options) == 0
    return run
