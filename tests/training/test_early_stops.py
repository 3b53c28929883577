"""A run that is asked to stop before its first step makes none, and goes on as if it had not been asked."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import gnomon, same, trace

from gnomon.config.experiment import load
from gnomon.core.errors import Stopped
from gnomon.records.jsonl import read_rows
from gnomon.training.api import resume, train_experiment
from gnomon.training.checkpointing import STATELESS
from gnomon.training.run import StopRequest

STEPS = 2
COMMON = (
    "rewards=[{kind='format', pattern='[!-P].*'}]", "task.size=40", "rollouts_per_step=8", "held_out.size=4",
    "grading.workers=1", f"steps={STEPS}",
)  # fmt: skip
ALGORITHMS = {
    "grpo": ("algorithm.num_generations=4",),
    "spo": ("algorithm=spo", "algorithm.updates.minibatches=2", "algorithm.tracker.n0=2"),
    "vapo": (
        "algorithm=vapo", "algorithm.num_generations=2", "algorithm.updates.minibatches=2",
        "algorithm.critic.updates.minibatches=2", "algorithm.critic.pretraining.steps=2",
    ),
}  # fmt: skip
MOST_LOOKS = 20


@dataclass
class Noticed(StopRequest):
    """A request that a run notices when it looks for the ``look``-th time, from 1."""

    look: int = 1

    def is_due(self, made: int) -> bool:
        """Count one look."""
        self.look -= 1
        return self.look < 1


def overrides(algorithm: str, *more: str) -> list[str]:
    """Return what is changed about the `tiny` experiment."""
    return [*COMMON, *ALGORITHMS[algorithm], *more]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "spo", "vapo"])
def test_a_stop_is_noticed_before_the_first_step_too(
    tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Whichever look notices it: before anything was made, before and after evaluation and the critic's own phase.

    No step is made but where only the look after it notices, and all go on as the uninterrupted run.
    """
    monkeypatch.setitem(STATELESS, Noticed, "is about this process, as every request to stop")  # type: ignore[arg-type]
    train_experiment(load(RANDOM, overrides(algorithm)), tmp_path / "whole")
    whole, done, look = trace(tmp_path / "whole", STEPS), 0, 0
    while done == 0 and look < MOST_LOOKS:
        look += 1
        run = tmp_path / str(look)
        with pytest.raises(Stopped, match=r"stopped (before|after).*(and saved|nothing was made yet that could be)"):
            train_experiment(load(RANDOM, overrides(algorithm)), run, Noticed(signal.SIGTERM, look=look))
        is_saved = any(run.glob("*/step-*/manifest.json"))
        done = len(list(read_rows(run / "metrics.jsonl")))
        capsys.readouterr()
        resume(run)

        assert ("begins again at step 0" in capsys.readouterr().err) == (not is_saved)
        assert is_saved == (look > 1)
        same(trace(run, STEPS), whole)
    assert done == 1
    assert look >= 4


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_makes_none(tmp_path: Path):
    """While the first evaluation is under way: that is finished and saved, no step is made, exit code 130."""
    run = tmp_path / "run"
    command = gnomon("train", RANDOM, *overrides("grpo"), "evaluation.samples=400", "--run-dir", str(run))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + 60
    while not (run / "run.json").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=120)

    assert program.returncode == 130, err
    assert f"stopped before step 1 of {STEPS}" in err.splitlines()[-1]
    assert not list(read_rows(run / "metrics.jsonl"))


def test_a_program_takes_a_run_as_many_steps_further_as_it_says(tmp_path: Path):
    """With ``after=1`` every session makes one step, and then stops; without, one that was asked before makes none."""
    run = tmp_path / "run"
    with pytest.raises(Stopped, match=f"stopped after step 1 of {STEPS}, and saved"):
        train_experiment(load(RANDOM, overrides("grpo")), run, StopRequest(signal.SIGTERM, after=1))
    with pytest.raises(Stopped, match=f"stopped before step 2 of {STEPS}, and saved"):
        resume(run, StopRequest(signal.SIGTERM))
    assert resume(run, StopRequest(signal.SIGTERM, after=1)).steps == STEPS
