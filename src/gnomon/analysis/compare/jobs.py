"""Run many experiments, each as a `gnomon train` process, a few at a time."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gnomon.config.experiment import Experiment, from_table, to_toml
from gnomon.core.atomic_files import real_path, write_durably
from gnomon.core.errors import ConfigError, RunDirectoryError, RunError, Stopped
from gnomon.core.redaction import without_secrets
from gnomon.core.tables import parse_toml
from gnomon.records.console import Console
from gnomon.training.api import is_finished
from gnomon.training.provenance import differences, listed
from gnomon.training.resolve import resolve
from gnomon.training.run import StopRequest
from gnomon.training.signals import stopping

# The process has its own group and dies with this program, however this program ends: the kernel closes the pipe that
# the process reads. At its end the process appends its CPU seconds to the file in its first argument.
_BEGIN = """
import atexit, os, signal, sys, threading

def spent(path):
    with open(path, "a") as file:
        file.write(f"{sum(os.times()[:4]):.2f}\\n")

atexit.register(spent, sys.argv.pop(1))

def watch():
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)

threading.Thread(target=watch, daemon=True).start()
from gnomon.cli.main import main
sys.exit(main())
"""
CPU = ".cpu"
_LOOK_SECONDS = 0.1
_LAST_LINES = 8
_LAST_BYTES = 4096


@dataclass(frozen=True)
class ComparisonJob:
    """One run of a study.

    Beside the run's folder lie FOLDER.toml, the process's experiment; FOLDER.log, its output; and FOLDER.cpu, the CPU
    seconds of each process that worked on the run.

    Attributes:
        name: Unique in the study.
        table: As `gnomon.config.experiment.from_table` takes it.
        overrides: As `gnomon.config.experiment.from_table` takes them.
        folder: The run directory.
    """

    name: str
    table: Mapping[str, Any]
    overrides: tuple[str, ...]
    folder: Path

    def experiment(self) -> Experiment:
        """Return the experiment as the run will record it.

        Raises:
            UserError: If the experiment is invalid.
        """
        return resolve(from_table(self.table, self.overrides).experiment).anchored().experiment

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of all the run's processes; None if they are not recorded."""
        try:
            return sum(map(float, self.file_with(CPU).read_text().split()))
        except (OSError, ValueError):
            return None

    def charge(self, seconds: float) -> None:
        """Add CPU seconds, for a caller that trains the run in its own process."""
        with self.file_with(CPU).open("a") as file:
            file.write(f"{seconds:.2f}\n")

    def file_with(self, suffix: str) -> Path:
        """Return the file beside the run's folder with the folder's name and this suffix."""
        return self.folder.with_name(self.folder.name + suffix)


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def run_jobs(jobs: Sequence[ComparisonJob], workers: int, console: Console) -> dict[str, Path]:
    """Train all jobs to their end.

    Finished runs are skipped and interrupted runs are resumed, so the same call again does the rest. A failed run does
    not stop the others. SIGTERM and SIGINT are passed on, and every run saves and ends; a second signal, or the end of
    this process, kills all runs.

    Args:
        jobs: The runs.
        workers: Runs at a time. Each process gets an equal share of the cores, at most ``OMP_NUM_THREADS``.
        console: For progress and warnings.

    Returns:
        Job name to run directory.

    Raises:
        UserError: Before anything starts, also for a folder that holds another experiment.
        RunError: At the end, with the last lines of each failed run.
        Stopped: After a signal.
    """
    experiments = check_jobs(jobs, workers)
    left = [job for job in jobs if not is_finished(job.folder, experiments[job.name])]
    for job in left:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        write_durably(job.file_with(".toml"), to_toml(experiments[job.name]).encode())
    if len(left) < len(jobs):
        console.say(f"{len(jobs) - len(left)} of {len(jobs)} runs are finished already")
    threads = _threads(min(workers, len(jobs)))
    stop = StopRequest()
    words = ("the step at hand of each run", "the same command")
    with _Jobs() as worker_group, stopping(stop, console.say, *words), console.phase("training", len(left)) as phase:
        while left or worker_group.working:
            while left and not stop.signal and len(worker_group.working) < workers:
                worker_group.start(left.pop(0), threads)
                phase.text = f"training {worker_group}"
            if stop.signal:
                left = []
                worker_group.ask_to_end()
            time.sleep(_LOOK_SECONDS)
            for said in worker_group.collect():
                phase.advance()
                if said and not stop.signal:
                    console.warn(said)
    if stop.signal:
        raise Stopped("stopped, and every run that was at work saved; the same command goes on", stop.signal)
    if worker_group.failed:
        raise RunError(_report(worker_group.failed, len(jobs)))
    return {job.name: job.folder for job in jobs}


def check_jobs(jobs: Sequence[ComparisonJob], workers: int) -> dict[str, Experiment]:
    """Make every check of `run_jobs` without writing anything, and return the experiments by job name.

    Raises:
        UserError: If a check fails.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    _refuse_shared(jobs)
    experiments = {job.name: job.experiment() for job in jobs}
    for job in jobs:
        _refuse_other(job.folder, to_toml(experiments[job.name]))
    return experiments


@dataclass
class _Worker:
    """A process that works on a job; its output begins at byte ``began`` of the job's log."""

    job: ComparisonJob
    program: "subprocess.Popen[bytes]"
    began: int

    def last_lines(self) -> str:
        """Return the end of the process's output without control characters."""
        with self.job.file_with(".log").open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.began, size - _LAST_BYTES))
            lines = without_secrets(log.read().decode(errors="replace")).splitlines()[-_LAST_LINES:]
        return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line).rstrip() for line in lines)


@dataclass
class _Jobs:
    """The running processes, which end with the context. ``failed`` holds exit codes and last lines by job name."""

    working: list[_Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    _are_asked: bool = False

    def start(self, job: ComparisonJob, threads: int) -> None:
        """Start or resume the job's run."""
        command = [sys.executable, "-P", "-c", _BEGIN, str(real_path(job.file_with(CPU))), "train"]
        command += [str(job.file_with(".toml")), "--run-dir", str(job.folder)]
        with job.file_with(".log").open("ab") as log:
            began = log.tell()
            program = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": _search_path()},
                start_new_session=True,
            )
        self.working.append(_Worker(job, program, began))

    def collect(self) -> Iterator[str]:
        """Yield one text for each process that has ended since the last call: a warning, or "" for a finished run."""
        for worker in [w for w in self.working if w.program.poll() is not None]:
            self.working.remove(worker)
            _close(worker.program.stdin)
            code = worker.program.returncode
            if code == 0:
                yield ""
                continue
            self.failed[worker.job.name] = (
                f"{_ending(code)}:\n{worker.last_lines()}\n    ({worker.job.file_with('.log')})"
            )
            yield f"{worker.job.name} {_ending(code)}; the others go on"

    def ask_to_end(self) -> None:
        """Send SIGTERM to every process, once."""
        for worker in () if self._are_asked else self.working:
            worker.program.send_signal(signal.SIGTERM)
        self._are_asked = True

    def __str__(self) -> str:
        return "; ".join(worker.job.name for worker in self.working)

    def __enter__(self) -> "_Jobs":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.working:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.program.pid, signal.SIGKILL)
            worker.program.wait()
            _close(worker.program.stdin)


def _search_path() -> str:
    """Return the process's import path, with this program's source first."""
    own = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join(place for place in (own, os.environ.get("PYTHONPATH", "")) if place)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"failed with exit code {code}"


def _report(failed: Mapping[str, str], count: int) -> str:
    runs = "\n  ".join(f"{name} {how}" for name, how in failed.items())
    return f"{len(failed)} of {count} runs failed, and the same command tries them again:\n  {runs}"


def _threads(workers: int) -> int:
    """Return the threads of each of so many processes: an equal share of the cores, at most OMP_NUM_THREADS."""
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    each = max(1, cores() // max(1, workers))
    return min(each, int(allowed)) if allowed.isdigit() and int(allowed) else each


def _refuse_shared(jobs: Sequence[ComparisonJob]) -> None:
    for what, values in (("name", [j.name for j in jobs]), ("folder", [str(real_path(j.folder)) for j in jobs])):
        shared = sorted({value for value in values if values.count(value) > 1})
        if shared:
            raise ConfigError(f"two runs of a study have the {what} {shared[0]}; give each its own")


def _refuse_other(folder: Path, asked: str) -> None:
    """Refuse a folder that holds a run of another experiment."""
    begun = folder / "experiment.toml"
    if not begun.exists():
        return
    try:
        there = begun.read_text(encoding="utf-8")
        if there == asked:
            return
        found = listed(differences(parse_toml(there), tomllib.loads(asked))) or "in the form of its record"
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{begun} cannot be read: {error}; name another folder") from error
    raise RunDirectoryError(
        f"{folder} holds a run of another experiment, which differs: {found}; go on with what it was begun with, "
        "or name another folder"
    )
