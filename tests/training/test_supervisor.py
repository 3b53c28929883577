"""A run that is told to goes on by itself after a fault, and ends where going on would help nobody."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import same, trace

from gnomon.config.experiment import load
from gnomon.core.failpoints import VARIABLE
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment

QUICK = ["steps=4", "evaluation.before=false", "evaluation.every=0", "checkpoints.every=1", "checkpoints.keep_last=9"]
PROGRAM = "import sys; from gnomon.cli.main import main; sys.exit(main())"
PATIENCE = 60


def begun(folder: Path, *arguments: str, dies_at: str = "") -> subprocess.Popen[str]:
    """Return ``gnomon ARGUMENTS`` at work in ``folder``, whose runs die at a failpoint, each of them anew."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *arguments],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, VARIABLE: dies_at, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def ended(program: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return its exit code, and what the watcher said."""
    _, said = program.communicate(timeout=PATIENCE)
    return program.returncode, [line for line in said.splitlines() if line.startswith(("gnomon train:", "gnomon res"))]


def wait_for_a_step(run: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not ((run / "metrics.jsonl").exists() and RunRecord.of(run).metrics()):
        assert time.monotonic() < until, f"{run} never made a step"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_is_the_run_that_was_not(tmp_path: Path):
    """Its process dies at its third update, and so does the one after it; the one after that gets to the end."""
    code, said = ended(
        begun(tmp_path, "train", RANDOM, *QUICK, "--run-dir", "run", "--restarts", "3", dies_at="update:3")
    )
    train_experiment(load(RANDOM, QUICK), tmp_path / "whole")

    assert code == 0
    reached = [int(re.search(r"ended by SIGKILL after step (\d); going on in [12] s", line)[1]) for line in said]
    assert 0 < len(reached) <= 3
    assert reached == sorted(set(reached))
    same(trace(tmp_path / "run", 4), trace(tmp_path / "whole", 4))


@pytest.mark.slow
def test_a_run_that_dies_twice_in_one_step_is_not_tried_a_third_time(tmp_path: Path):
    """However many restarts are left; the exit code is the process's own, as a shell says it."""
    code, said = ended(begun(tmp_path, "train", RANDOM, *QUICK, "--restarts", "9", dies_at="ask:1"))

    assert code == 128 + signal.SIGKILL
    assert said == [
        "gnomon train: the run's process was ended by SIGKILL after step 0; going on in 1 s (restart 1 of 9)",
        "gnomon train: the run's process was ended by SIGKILL at step 0 for the second time in a row, so it is not "
        "tried again",
    ]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_restarts_are_used_up(tmp_path: Path):
    """One restart, and a process that makes one step in its life."""
    code, said = ended(begun(tmp_path, "train", RANDOM, *QUICK, "--restarts", "1", dies_at="update:2"))

    assert code == 128 + signal.SIGKILL
    assert len(said) == 2
    assert said[0].endswith("going on in 1 s (restart 1 of 1)")
    assert said[1].endswith("; its one restart is used up")


def test_wrong_input_is_not_tried_again_and_leaves_nothing(tmp_path: Path):
    """Another try would say the same."""
    code, said = ended(begun(tmp_path, "train", RANDOM, "steps=none", "--restarts", "5"))

    assert code == 2
    assert len(said) == 1
    assert "steps" in said[0]
    assert list(tmp_path.rglob("tiny*")) == []


def test_a_number_below_zero_is_refused(tmp_path: Path):
    """Before anything is begun."""
    code, said = ended(begun(tmp_path, "train", RANDOM, "--restarts=-1"))

    assert code == 2
    assert said == ["gnomon train: error: argument --restarts: a number from 0 on, not '-1'"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_checkpoints_that_cannot_be_trusted_are_not_tried_again(tmp_path: Path):
    """The files would be the same."""
    train_experiment(load(RANDOM, [*QUICK, "steps=1"]), tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-1" / "manifest.json"
    manifest.write_text("{}")

    code, said = ended(begun(tmp_path, "resume", "run", "--restarts", "5"))

    assert code == 1
    assert len(said) == 1
    assert "can be trusted" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_run_and_is_the_end(tmp_path: Path, number: signal.Signals):
    """The step is finished and saved; the watcher's exit code is the run's."""
    program = begun(tmp_path, "train", RANDOM, "steps=100000", "--run-dir", "run", "--restarts", "5")
    wait_for_a_step(tmp_path / "run")
    program.send_signal(number)
    code, said = ended(program)

    assert code == 128 + number
    assert [line for line in said if "going on" in line] == []
    assert RunRecord.of(tmp_path / "run").state() == "stopped"


@pytest.mark.slow
def test_a_signal_between_two_tries_is_the_end_at_once(tmp_path: Path):
    """Nobody is at work then: nothing is to be saved."""
    program = begun(tmp_path, "train", RANDOM, *QUICK, "--run-dir", "run", "--restarts", "5", dies_at="ask:1")
    assert program.stderr is not None
    for line in program.stderr:
        if "going on in" in line:
            program.terminate()
            break

    assert ended(program)[0] == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at a parent's death")
def test_a_run_whose_watcher_is_killed_stops_and_saves(tmp_path: Path):
    """Nobody would look after it any more, and the same command goes on with it."""
    program = begun(tmp_path, "train", RANDOM, "steps=100000", "--run-dir", "run", "--restarts", "5")
    wait_for_a_step(tmp_path / "run")
    program.kill()
    # Both had the pipes, so this waits for the run as well.
    program.communicate(timeout=PATIENCE)
    record = RunRecord.of(tmp_path / "run")

    assert record.state() == "stopped"
    assert record.checkpoint_steps()[-1] == len(record.metrics())
