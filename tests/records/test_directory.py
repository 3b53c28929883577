"""One run, one directory, one process."""

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gnomon.core.errors import RunDirectoryError
from gnomon.records.directory import LOCK, RunDirectory

SOURCE = Path(__file__).resolve().parents[2] / "src"
HOLD = """
import os, sys, time
from pathlib import Path
from gnomon.records.directory import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]))
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, b"child %d\\n" % os.getpid())
    time.sleep(60)
os.write(1, b"held\\n")
time.sleep(60)
"""


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[None]:
    """Lose the rights of root, which no file permission binds, and the right to write here."""
    tmp_path.chmod(0o500)
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def holding(path: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that takes the run and sleeps."""
    command = [sys.executable, "-c", HOLD, str(path), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SOURCE) as owner:
        try:
            yield owner
        finally:
            owner.kill()


def line(owner: "subprocess.Popen[str]") -> str:
    """Return the next line that it says."""
    assert owner.stdout is not None
    return owner.stdout.readline().strip()


def test_a_new_run_is_made_and_locked(tmp_path: Path):
    """Parents are made, the lock is there, and the contract's files have their names."""
    with RunDirectory.create(tmp_path / "runs" / "a") as run:
        assert (run.path / LOCK).is_file()
        assert run.experiment == tmp_path / "runs" / "a" / "experiment.toml"
        assert [run.card.name, run.metrics.name, run.evaluations.name] == [
            "run.json", "metrics.jsonl", "evaluations.jsonl",
        ]  # fmt: skip
        assert [run.rollouts.name, run.checkpoints.name, run.batches.name] == ["rollouts", "checkpoints", "batches"]
        assert run.report.name == "report.html"


def test_an_empty_directory_is_taken_and_an_abandoned_lock_is_no_run(tmp_path: Path):
    """A directory with nothing but the lock of a process that is gone is free."""
    RunDirectory.create(tmp_path).close()

    RunDirectory.create(tmp_path).close()


def test_an_existing_run_is_never_overwritten(tmp_path: Path):
    """The message names both ways on."""
    (tmp_path / "experiment.toml").write_text("")

    with pytest.raises(RunDirectoryError, match=r"holds a run already.*gnomon resume .*--run-dir"):
        RunDirectory.create(tmp_path)


def test_a_folder_of_other_things_is_refused_untouched(tmp_path: Path):
    """Somebody's documents are no place for a run, and not even a lock is left there."""
    (tmp_path / "thesis.tex").write_text("x")

    with pytest.raises(RunDirectoryError, match=r"holds files already.*--run-dir"):
        RunDirectory.create(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_is_no_directory(tmp_path: Path):
    """A path that is a file, or leads through one, is said to be so."""
    (tmp_path / "f").write_text("x")

    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "f")
    with pytest.raises(RunDirectoryError, match=r"cannot be written: Not a directory.*--run-dir"):
        RunDirectory.create(tmp_path / "f" / "run")


@pytest.mark.usefixtures("nobody")
def test_no_permission_is_one_clear_message(tmp_path: Path):
    """The path, the reason and the way out are said."""
    with pytest.raises(RunDirectoryError, match=r"cannot be written: Permission denied.*--run-dir"):
        RunDirectory.create(tmp_path / "run")


def test_a_second_process_is_refused_with_pid_and_host(tmp_path: Path):
    """Whoever has the run is named, for a new start and for a resume; when killed, the run is free at once."""
    with holding(tmp_path / "run") as owner:
        assert line(owner) == "held"
        (tmp_path / "run" / "experiment.toml").write_text("")

        said = rf"in use by process {owner.pid} on {os.uname().nodename} since 2"
        with pytest.raises(RunDirectoryError, match=said):
            RunDirectory.create(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match=said):
            RunDirectory.reopen(tmp_path / "run")

        owner.kill()
        owner.wait()
        RunDirectory.reopen(tmp_path / "run").close()


def test_a_worker_that_outlives_a_killed_run_does_not_hold_its_lock(tmp_path: Path):
    """A forked child lets go of the lock that it inherited."""
    with holding(tmp_path / "run", "fork") as owner:
        child = int(sorted([line(owner), line(owner)])[0].split()[1])
        (tmp_path / "run" / "experiment.toml").write_text("")
        owner.kill()
        owner.wait()
        try:
            RunDirectory.reopen(tmp_path / "run").close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_same_process_cannot_take_a_run_twice_either(tmp_path: Path):
    """Two trainings of one program on one run are as wrong as two programs."""
    with RunDirectory.create(tmp_path), pytest.raises(RunDirectoryError, match="in use by process"):
        RunDirectory.create(tmp_path)


def test_closing_twice_closes_nothing_else(tmp_path: Path):
    """A file descriptor's number is used again: closing a run twice leaves the next file open."""
    run = RunDirectory.create(tmp_path / "a")
    run.close()
    with open(tmp_path / "other", "w") as other:
        run.close()
        other.write("still open")

    assert (tmp_path / "other").read_text() == "still open"


def test_names_carry_the_time_and_collisions_a_number(tmp_path: Path):
    """Three runs in one second get three directories."""
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    runs = [RunDirectory.named("quick start/é", tmp_path / "runs", now) for _ in range(3)]

    assert [run.path.name for run in runs] == [
        "quick-start-20260102-030405",
        "quick-start-20260102-030405-2",
        "quick-start-20260102-030405-3",
    ]
    for run in runs:
        run.close()


def test_a_name_cannot_leave_its_root(tmp_path: Path):
    """Dots and slashes do not climb."""
    with RunDirectory.named("../../etc", tmp_path) as run:
        assert run.path.parent == tmp_path


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path):
    """A missing run names the nearest one; a folder without an experiment is said to be none."""
    (tmp_path / "quick-1").mkdir()
    (tmp_path / "quick-1" / "experiment.toml").write_text("")

    with pytest.raises(RunDirectoryError, match=r"unknown run .*quick-2'; did you mean '.*quick-1'"):
        RunDirectory.reopen(tmp_path / "quick-2")
    with pytest.raises(RunDirectoryError, match="is no run"):
        RunDirectory.reopen(tmp_path)
    with pytest.raises(RunDirectoryError, match="there is no run"):
        RunDirectory.reopen(tmp_path / "nowhere" / "run")


def test_a_run_that_never_began_is_taken_back(tmp_path: Path):
    """Its name is free again; one that has a card, or holds something else, stays."""
    for name in ("new", "begun", "foreign"):
        with RunDirectory.create(tmp_path / name) as run:
            run.experiment.write_text("steps = 1\n")
            if name == "begun":
                run.card.write_text("{}")
            if name == "foreign":
                (run.path / "note").write_text("mine")
            run.discard()

    assert sorted(p.name for p in tmp_path.iterdir()) == ["begun", "foreign"]
    assert (tmp_path / "begun" / "experiment.toml").exists()
    assert [p.name for p in (tmp_path / "foreign").iterdir()] == ["note"]


def test_an_empty_experiment_is_none(tmp_path: Path):
    """A file cut to nothing says as little as one that cannot be read."""
    (tmp_path / "experiment.toml").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be read: it is empty"):
        RunDirectory(tmp_path).table()
