"""Whole runs whose learner is several processes: the run of one, begun again with any number, and never a hang."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.random_model import RANDOM
from tests.training.runs import broken_off, gnomon, measured, same, trace

from gnomon.config.experiment import load
from gnomon.core import failpoints
from gnomon.core.errors import ConfigError, LearnerError
from gnomon.records.jsonl import read_rows
from gnomon.training.api import resume, train_experiment

pytestmark = pytest.mark.timeout(600)
STEPS = 3
# A first letter in half of the alphabet is rewarded, so that an untrained model's answers differ in it.
QUICK = [
    "rewards=[{kind='format', pattern='[!-P].*'}]",
    f"steps={STEPS}", "rollouts_per_step=16", "algorithm.num_generations=4", "checkpoints.every=1",
    "checkpoints.keep_last=9", "evaluation.before=false", "grading.workers=1",
]  # fmt: skip


def train(run: Path, processes: int, *more: str) -> Path:
    """Train the `tiny` experiment with so many processes."""
    train_experiment(load(RANDOM, [*QUICK, f"learner.processes={processes}", *more]), run)
    return run


def close(left: Path, right: Path) -> None:
    """Assert that two runs measured the same, up to rounding; positions computed depend on how rows are parted."""
    rows = zip(measured(left / "metrics.jsonl"), measured(right / "metrics.jsonl"), strict=True)
    for one, other in rows:
        # An engine of the same process is sent no weights.
        differing = ("computed", "arrival", "weights/sent")
        kept = {name for name in one if not any(word in name for word in differing)}
        assert kept == {name for name in other if not any(word in name for word in differing)}
        assert {n: other[n] for n in kept} == pytest.approx({n: one[n] for n in kept}, rel=1e-2, abs=1e-4)


@pytest.mark.slow
def test_a_run_is_the_same_in_any_number_of_processes(tmp_path: Path):
    """Two processes: bit for bit the same again, and when resumed; and the run of one, or resumed in three, nearly."""
    one, two, again = train(tmp_path / "one", 1), train(tmp_path / "two", 2), train(tmp_path / "again", 2)
    assert [row["learner/updates"] for row in read_rows(two / "metrics.jsonl")] == [1] * STEPS
    same(trace(two, STEPS), trace(again, STEPS))
    assert "2 learner processes" in (two / "run.json").read_text()

    resumed = broken_off(two, tmp_path / "resumed", 1)
    resume(resumed)
    same(trace(two, STEPS), trace(resumed, STEPS))
    close(one, two)

    for number in (1, 3):
        other = broken_off(two, tmp_path / f"in-{number}", 1)
        text = (other / "experiment.toml").read_text()
        (other / "experiment.toml").write_text(text.replace("processes = 2", f"processes = {number}"))
        resume(other)
        close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["backward:3", "optimizer:2", "update:1", "share:1"])
def test_a_learner_that_dies_ends_the_run(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the middle of a step, in all processes: a typed failure, no hang, and the run goes on from its checkpoint."""
    monkeypatch.setenv(failpoints.VARIABLE, point)

    with pytest.raises(
        LearnerError, match=r"(?s)process \d of the learner's 2 is gone: it was killed by SIGKILL.*resume"
    ) as lost:
        train(tmp_path / "run", 2)
    # What each wrote is kept with the run, and the message says where; a checkpoint goes on beside it.
    assert {p.name for p in (tmp_path / "run" / "learner").iterdir()} == {"process-0.log", "process-1.log"}
    assert re.search(rf"all that it wrote is in {tmp_path}/run/learner/process-\d.log", str(lost.value))

    monkeypatch.delenv(failpoints.VARIABLE)
    train(tmp_path / "run", 2)
    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == STEPS


def learners_of(pid: int) -> list[int]:
    """Return the processes that hold parts of the learner of the run with this number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"gnomon.learner.worker" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_processes_end_with_the_run(number: signal.Signals, tmp_path: Path):
    """However it ends, and within seconds; a stopped run has saved, and goes on."""
    command = gnomon("train", RANDOM, *QUICK, "steps=500", "learner.processes=2", "--run-dir", str(tmp_path / "run"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    learners = learners_of(program.pid)
    assert len(learners) == 2
    program.send_signal(number)
    program.communicate(timeout=60)

    assert program.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 143)
    until = time.monotonic() + 15
    while not all(map(is_gone, learners)) and time.monotonic() < until:
        time.sleep(0.05)
    assert [pid for pid in learners if not is_gone(pid)] == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("learner.processes=0", "learner.processes must be at least 1, got 0"),
        ("learner.offload=true", "this run computes on the CPU; set learner.offload = false"),
        ("algorithm.scope=micro_batch", 'cuts it otherwise than one process does; set algorithm.scope = "step"'),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_is_loaded(option: str, message: str, tmp_path: Path):
    """With what to do instead, and without a run directory."""
    options = [*QUICK, "device=cpu", "algorithm=p3o", "algorithm.num_generations=4", "learner.processes=2", option]

    with pytest.raises(ConfigError, match=message):
        train_experiment(load(RANDOM, options), tmp_path / "run")
    assert not (tmp_path / "run").exists()
