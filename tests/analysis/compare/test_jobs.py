"""Runs of a study: each a process, finished ones skipped, broken-off ones gone on with, none left behind."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.analysis.compare.run import ComparisonJob, cores, run_jobs
from gnomon.config.experiment import Loaded
from gnomon.config.reading import read
from gnomon.core.errors import ConfigError, RunDirectoryError, RunError
from gnomon.records.console import Console
from gnomon.records.reading import RunRecord
from gnomon.training.api import is_finished, train_experiment

QUICK = ("task.size=60", "rollouts_per_step=16", "algorithm.num_generations=4", "evaluation.before=false")
# A reward that is nobody's: the run fails before it starts.
BROKEN = "rewards=[{kind='function', function='nowhere.py:none'}]"


def job(folder: Path, name: str, *overrides: str, steps: int = 2) -> ComparisonJob:
    """Return a tiny run of a few steps."""
    return ComparisonJob(name, read(RANDOM), (*QUICK, f"steps={steps}", *overrides), folder / name)


def fleet(jobs: Sequence[ComparisonJob], workers: int = 2) -> tuple[dict[str, Path], str]:
    """Run them and return what came of it, and what was said."""
    said = io.StringIO()
    with Console(stream=said) as console:
        return run_jobs(jobs, workers, console), said.getvalue()


def made(one: ComparisonJob) -> Path:
    """Train the job's run in this process, which takes no time to start, and return its folder."""
    return train_experiment(Loaded(one.experiment(), ()), one.folder).directory


def test_finished_runs_are_skipped_and_others_trained(tmp_path: Path):
    """Of three runs two are finished, and nothing in them is touched; the third is the only one that starts."""
    jobs = [job(tmp_path, "a", steps=0), job(tmp_path, "b", "seed=1", steps=1)]
    kept = {path: path.stat().st_mtime_ns for one in jobs for path in made(one).rglob("*") if path.is_file()}
    found, said = fleet([*jobs, job(tmp_path, "c", steps=1)])

    assert found == {name: tmp_path / name for name in ("a", "b", "c")}
    assert RunRecord(found["c"]).state() == "finished"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "2 of 3 runs are finished already" in said
    assert "run " in (tmp_path / "c.log").read_text()


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path):
    """What was begun there is named with what differs, and nothing starts."""
    first = job(tmp_path, "a", steps=0)
    made(first)
    with pytest.raises(RunDirectoryError, match=r"a holds a run of another experiment.* seed is 0 there and 7 here; s"):
        fleet([job(tmp_path, "a", "seed=7", steps=3), job(tmp_path, "b")])

    assert not (tmp_path / "b").exists()
    assert is_finished(tmp_path / "a", first.experiment())


@pytest.mark.slow
def test_failures_are_told_at_the_end_and_hinder_nobody(tmp_path: Path):
    """One run has a reward that cannot be imported: the other finishes; the error has the first one's last words."""
    with pytest.raises(
        RunError, match=r"1 of 2 runs failed(.|\n)*bad failed with exit code 2:(.|\n)*nowhere\.py"
    ) as told:
        fleet([job(tmp_path, "bad", BROKEN), job(tmp_path, "good", steps=0)], workers=1)

    assert is_finished(tmp_path / "good", job(tmp_path, "good", steps=0).experiment())
    assert str(tmp_path / "bad.log") in str(told.value)


@pytest.mark.parametrize(
    ("names", "folders", "workers", "message"),
    [
        (("a", "a"), ("a", "b"), 1, "two runs of a study have the name a"),
        (("a", "b"), ("a", "a"), 1, "two runs of a study have the folder"),
        (("a", "b"), ("a", "b"), 0, "workers must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_a_fleet(
    tmp_path: Path, names: tuple[str, str], folders: tuple[str, str], workers: int, message: str
):
    """Names and folders are each run's own, and somebody has to work."""
    jobs = [
        ComparisonJob(name, read(RANDOM), QUICK, tmp_path / folder) for name, folder in zip(names, folders, strict=True)
    ]
    with pytest.raises(ConfigError, match=message):
        fleet(jobs, workers)


def test_a_wrong_experiment_starts_nothing(tmp_path: Path):
    """All experiments are read before the first process starts."""
    with pytest.raises(ConfigError, match="unknown key 'stepz'"):
        fleet([job(tmp_path, "a"), job(tmp_path, "b", "stepz=3")])
    assert list(tmp_path.iterdir()) == []


def test_there_is_a_core():
    """At least the one that this test runs on."""
    assert 1 <= cores() <= (os.cpu_count() or 1)


PROGRAM = """
import sys
from pathlib import Path
from gnomon.core.errors import Stopped
from gnomon.config.reading import read
from gnomon.records.console import Console
from gnomon.analysis.compare.run import ComparisonJob, run_jobs
folder = Path(sys.argv[1])
small = ("task.size=60", "steps=2000", "rollouts_per_step=16", "checkpoints.every=1")
jobs = [ComparisonJob(n, read("tiny"), small, folder / n) for n in ("a", "b")]
try:
    with Console() as console:
        run_jobs(jobs, 2, console)
except Stopped as stopped:
    print(stopped.args[0])
    sys.exit(128 + stopped.args[1])
"""


@pytest.fixture
def working(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A program that trains two endless runs, each of which has made a step."""
    place = os.pathsep.join(sys.path)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": place},
    )
    deadline = time.monotonic() + 120
    while not all((tmp_path / name / "checkpoints").is_dir() for name in "ab"):
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield program
    program.kill()
    program.communicate()


def is_at_work(run: Path) -> bool:
    """Whether some process holds the run's lock."""
    return RunRecord(run).state() == "live"


@pytest.mark.slow
def test_a_signal_lets_every_run_save_and_end(tmp_path: Path, working: "subprocess.Popen[str]"):
    """SIGTERM ends the program with 143; both runs were stopped after a step that is in a checkpoint."""
    working.send_signal(signal.SIGTERM)
    said, _ = working.communicate(timeout=120)

    assert working.returncode == 143
    assert "every run that was at work saved" in said
    for name in "ab":
        record = RunRecord(tmp_path / name)
        assert record.state() == "stopped"
        assert record.metrics()[-1]["step"] == record.checkpoint_steps()[-1]


@pytest.mark.slow
def test_no_run_outlives_a_killed_program(tmp_path: Path, working: "subprocess.Popen[str]"):
    """SIGKILL leaves the program no chance to say anything; its runs end all the same, and free their folders."""
    working.kill()
    working.wait()
    deadline = time.monotonic() + 20
    while any(is_at_work(tmp_path / name) for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_broken_off_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that was killed in its third step ends with the steps, metrics and weights of one that was not."""
    straight, broken = job(tmp_path, "straight", steps=4), job(tmp_path, "broken", steps=4)
    fleet([straight])
    monkeypatch.setenv("GNOMON_FAIL_AT", "advantages:3")
    with pytest.raises(RunError, match=r"broken was killed by SIGKILL"):
        fleet([broken])
    monkeypatch.delenv("GNOMON_FAIL_AT")
    fleet([broken])
    weights = [
        (tmp_path / name / "checkpoints" / "step-4" / "model.safetensors").read_bytes()
        for name in ("straight", "broken")
    ]

    assert [row["step"] for row in RunRecord(tmp_path / "broken").metrics()] == [1, 2, 3, 4]
    assert weights[0] == weights[1]
