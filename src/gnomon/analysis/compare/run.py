"""A comparison from its design to its page: contestants, their runs a few at a time, and what came of them."""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from gnomon.algorithms import Uniform
from gnomon.algorithms import to_table as algorithm_table
from gnomon.analysis.compare.page import page
from gnomon.analysis.compare.records import Trained, Unit, read_trained
from gnomon.analysis.compare.statistics import ComparedSetting, Comparison, summarize
from gnomon.analysis.plan import RunEstimate, make_plan
from gnomon.config.experiment import Experiment, from_table, to_toml
from gnomon.config.reading import parse_override, read
from gnomon.core.atomic_files import real_path, write_durably, write_json
from gnomon.core.errors import ConfigError, DatasetError, RunDirectoryError, RunError, Stopped
from gnomon.core.redaction import without_secrets
from gnomon.core.sentences import many
from gnomon.core.tables import parse_toml, to_table
from gnomon.models.device import resolve_device
from gnomon.models.size import model_size
from gnomon.records.console import Console
from gnomon.records.memory import free_memory_bytes
from gnomon.records.ownership import check_own
from gnomon.training.api import checked, is_finished
from gnomon.training.build_data import questions
from gnomon.training.continuation import announce_user_code, differences, listed
from gnomon.training.notes import initial_answers
from gnomon.training.resolve import Resolved, resolve
from gnomon.training.run import StopRequest
from gnomon.training.signals import stop_on_signals

# Run many experiments, each as a `gnomon train` process, a few at a time.

# The process has its own group and dies with this program, however this program ends: the kernel closes the pipe that
# the process reads. At its end the process appends its CPU seconds to the file in its first argument.
# The child watches its own standard input: when this program ends, even by SIGKILL, the
# pipe closes and the child kills its group. A signal handler here could not do that.
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
        # Paths become absolute, because each run is a process that may be resumed from another folder.
        return resolve(from_table(self.table, self.overrides).experiment).with_absolute_paths().experiment

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


def run_jobs(
    jobs: Sequence[ComparisonJob],
    workers: int,
    console: Console,
    finished: Callable[[ComparisonJob], object] = lambda job: None,
) -> dict[str, Path]:
    """Train all jobs to their end.

    Finished runs are skipped and interrupted runs are resumed, so the same call again does the rest. A failed run does
    not stop the others. SIGTERM and SIGINT are passed on, and every run saves and ends; a second signal, or the end of
    this process, kills all runs.

    Args:
        jobs: The runs.
        workers: Runs at a time. Each process gets an equal share of the cores, at most ``OMP_NUM_THREADS``.
        console: For progress and warnings.
        finished: Called with each job whose run has just ended well.

    Returns:
        Job name to run directory.

    Raises:
        UserError: Before anything starts, also for a folder that holds another experiment.
        RunError: At the end, with the last lines of each failed run.
        Stopped: After a signal.
    """
    # All experiments are checked before the first one starts: a typo
    # in the last algorithm must not cost the hours of the others.
    experiments = check_jobs(jobs, workers)
    left = [job for job in jobs if not is_finished(job.folder, experiments[job.name])]
    for job in left:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        # The run is started from this file and not from the user's, which may be edited while earlier runs are at work.
        write_durably(job.file_with(".toml"), to_toml(experiments[job.name]).encode())
    if len(left) < len(jobs):
        console.say(f"{len(jobs) - len(left)} of {len(jobs)} runs are finished already")
    threads = _threads(min(workers, len(jobs)))
    stop = StopRequest()
    words = ("the current step of each run", "the same command")
    with (
        _Jobs() as worker_group,
        stop_on_signals(stop, console.say, *words),
        console.phase("training", len(left)) as phase,
    ):
        while left or worker_group.working:
            # Fill free places, pass a signal on, then collect what has ended; polling costs nothing beside training.
            while left and not stop.signal and len(worker_group.working) < workers:
                worker_group.start(left.pop(0), threads)
                phase.text = f"training {worker_group}"
            # After a signal no run begins. Those at work are asked once to
            # save and end, and the loop goes on until they have.
            if stop.signal:
                left = []
                worker_group.ask_to_end()
            time.sleep(_LOOK_SECONDS)
            for job, said in worker_group.collect():
                phase.advance()
                if not said:
                    finished(job)
                elif not stop.signal:
                    # A run that a signal ended is no failure of the run.
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
    # Each experiment is built with its defaults, so that it can be
    # compared with the complete record of a run that was begun.
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
            # The log is appended to by each attempt; an earlier attempt's lines must not explain this one's failure.
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
        # `-P` keeps the current folder out of the import path, where a
        # file named like a library would be imported instead.
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
                # A group of its own: Ctrl-C in the terminal reaches this program alone, which passes it on once.
                start_new_session=True,
            )
        self.working.append(_Worker(job, program, began))

    def collect(self) -> Iterator[tuple[ComparisonJob, str]]:
        """Yield each job whose process has ended since the last call, with a warning, or "" for a finished run."""
        for worker in [w for w in self.working if w.program.poll() is not None]:
            self.working.remove(worker)
            _close(worker.program.stdin)
            code = worker.program.returncode
            if code == 0:
                yield worker.job, ""
                continue
            self.failed[worker.job.name] = (
                f"{_ending(code)}:\n{worker.last_lines()}\n    ({worker.job.file_with('.log')})"
            )
            yield worker.job, f"{worker.job.name} {_ending(code)}; the others go on"

    def ask_to_end(self) -> None:
        """Send SIGTERM to every process, once."""
        # A second SIGTERM would end a run that is saving its checkpoint.
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
                # Only processes that are left when the context is left by an
                # error or a second signal; the group includes their graders.
                os.killpg(worker.program.pid, signal.SIGKILL)
            worker.program.wait()
            _close(worker.program.stdin)


def _search_path() -> str:
    """Return the process's import path, with this program's source first."""
    # An editable checkout that is not installed would otherwise not
    # be found by the child, or another installed version would be.
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
    # Without this every process would start a thread for each core, and runs side by side would slow each other down.
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
        # Equal text is the usual case and needs no parsing.
        if there == asked:
            return
        # A record of an earlier version may say the same in other words; then the form is named as the difference.
        found = listed(differences(parse_toml(there), tomllib.loads(asked))) or "in the form of its record"
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{begun} cannot be read: {error}; name another folder") from error
    raise RunDirectoryError(
        f"{folder} holds a run of another experiment, which differs: {found}; go on with what it was begun with, "
        "or name another folder"
    )


# The design of a comparison: one experiment, several algorithms, several seeds, and one budget per run.

MARKS = 8
"""Evaluations during training, spread evenly over the budget; two more come before and after."""
_MOST_STEPS = 10**6
_OURS = {
    "seed": "--seeds says how many there are",
    "steps": "--steps sets it for every run",
    "budget.tokens": "--budget sets it",
    "budget.seconds": "--seconds sets it",
    "algorithm": "--algorithms names them",
}


@dataclass(frozen=True)
class RunLimit:
    """The budget of each run: tokens generated for training, seconds of training, or steps.

    Raises:
        ConfigError: If the amount is not positive and finite.
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        if not 0 < self.amount < math.inf:
            option = "--budget" if self.unit == "tokens" else f"--{self.unit}"
            wanted = "finite" if self.amount == math.inf else "a number above 0"
            raise ConfigError(f"{option} must be {wanted}, got {self.amount:g}: what each run may spend")

    def __str__(self) -> str:
        what = "generated tokens" if self.unit == "tokens" else self.unit
        return f"{self.amount:,.10g} {what}"

    def overrides(self, rollouts_per_step: int) -> list[str]:
        """Return the overrides that end a run at this limit.

        Args:
            rollouts_per_step: Responses of a step.
        """
        if self.unit == "steps":
            # Steps are a setting of an experiment; tokens and seconds are
            # a budget that ends the run before its steps do.
            return [f"steps={int(self.amount)}"]
        # Every response has at least one token, so the budget ends the run before this number of steps.
        most = math.ceil(self.amount / rollouts_per_step) if self.unit == "tokens" else _MOST_STEPS
        amount = f"tokens={int(self.amount)}" if self.unit == "tokens" else f"seconds={float(self.amount)}"
        return [f"steps={most}", f"budget.{amount}"]

    def marks(self) -> dict[str, Any]:
        """Return the settings of evaluations during training; a user's own settings replace them."""
        if self.unit == "steps":
            return {"evaluation.every": max(1, int(self.amount) // MARKS)}
        return {"budget.evaluations": MARKS}


@dataclass(frozen=True)
class Contestant:
    """One algorithm of a comparison.

    Attributes:
        spec: The value of ``algorithm`` in an experiment.
    """

    name: str
    spec: Any

    @property
    def slug(self) -> str:
        """The name as a folder name."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.") or "algorithm"


@dataclass(frozen=True)
class Design:
    """A comparison before it runs. Make one with `Design.of`.

    Attributes:
        table: The experiment; its own algorithm is not used.
        overrides: Settings for every run.
        contestants: The algorithms.
        seeds: Number of seeds, counted from the experiment's own seed.
        limit: Budget of each run.
    """

    table: Mapping[str, Any]
    overrides: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    seeds: int
    limit: RunLimit

    @classmethod
    def of(
        cls, experiment: str | Path, overrides: Sequence[str], algorithms: Sequence[str], seeds: int, limit: RunLimit
    ) -> "Design":
        """Check and return a comparison.

        Args:
            experiment: TOML file or name of the experiment.
            overrides: Settings for every run.
            algorithms: Presets, FILE.py:NAME, or TOML files that differ from the experiment only by their algorithm.
            seeds: Number of seeds.
            limit: Budget of each run.

        Raises:
            ConfigError: If the algorithms cannot be compared.
        """
        if seeds < 1:
            raise ConfigError(f"--seeds must be 1 or more, got {seeds}; with one nothing is learned about another seed")
        # What differs between the runs, or is the same for all of them
        # by design, is set by the comparison's own options.
        for key, _ in map(parse_override, overrides):
            if key in _OURS:
                raise ConfigError(f"{key} cannot be set in a comparison: {_OURS[key]}")
        table = _own(experiment)
        named = [name for name in (part.strip() for part in algorithms) if name]
        if len(named) < 2:
            raise ConfigError("--algorithms needs two names or more, such as grpo,spo (`gnomon algorithms` lists them)")
        contestants = tuple(_contestant(name, table) for name in named)
        # Two names may have one folder name, "a b" and "a-b": their runs would be one run.
        for what, values in (("name", [e.name for e in contestants]), ("folder", [e.slug for e in contestants])):
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ConfigError(f"two algorithms have the {what} {twice[0]}; give a file of its own name for one")
        design = cls(table, tuple(overrides), contestants, seeds, limit)
        for contestant in contestants:
            # This builds each experiment, so settings that an algorithm refuses are found here.
            _check_schedule(design.experiment(contestant).learner.optimizer.schedule, contestant, limit)
        return design

    def seed_numbers(self) -> list[int]:
        """Return the seeds."""
        first = self.table.get("seed", 0)
        return [(first if type(first) is int else 0) + number for number in range(self.seeds)]

    def job(self, contestant: Contestant, seed: int, folder: Path) -> ComparisonJob:
        """Return the run of one algorithm with one seed, below the comparison's folder."""
        return ComparisonJob(
            f"{contestant.name}, seed {seed}",
            {**self.table, "algorithm": contestant.spec},
            self._settings(contestant, seed),
            folder / "runs" / contestant.slug / f"seed-{seed}",
        )

    def experiment(self, contestant: Contestant) -> Experiment:
        """Return one algorithm's experiment with the first seed.

        Raises:
            ConfigError: If the experiment is invalid; the message names the algorithm.
        """
        settings = self._settings(contestant, self.seed_numbers()[0])
        return _built({**self.table, "algorithm": contestant.spec}, settings, contestant.name)

    def terms(self) -> dict[str, Any]:
        """Return what all runs share: everything but algorithms and seeds."""
        shared = {key: value for key, value in self.table.items() if key not in ("algorithm", "seed", "name")}
        terms = {"experiment": shared, "overrides": list(self.overrides), "limit": [self.limit.amount, self.limit.unit]}
        # Through JSON and back, so that the terms of a new design equal those that were read from a file.
        return dict(json.loads(json.dumps(terms, default=str)))

    def digest(self) -> str:
        """Return a short hash of the terms, so that the same command finds its folder again."""
        return hashlib.blake2b(json.dumps(self.terms(), sort_keys=True).encode(), digest_size=4).hexdigest()

    def _settings(self, contestant: Contestant, seed: int) -> tuple[str, ...]:
        """Return the overrides of a run: the user's, the budget, the evaluations, the seed."""
        given = {key for key, _ in map(parse_override, self.overrides)}
        # budget.evaluations needs a budget, which is added below.
        # The experiment is built once without budget to learn how many
        # responses a step has, on which the most steps depend.
        plain = [o for o in self.overrides if parse_override(o)[0] != "budget.evaluations"]
        built = _built({**self.table, "algorithm": contestant.spec}, plain, contestant.name)
        marks = [f"{key}={value}" for key, value in self.limit.marks().items() if key not in given]
        return (*self.overrides, *self.limit.overrides(built.rollouts_per_step), *marks, f"seed={seed}")


def _built(table: Mapping[str, Any], overrides: Sequence[str], name: str) -> Experiment:
    try:
        return from_table(table, overrides).experiment
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _contestant(named: str, table: Mapping[str, Any]) -> Contestant:
    """Return the contestant for a preset, for FILE.py:NAME, or for an experiment that differs only by its algorithm."""
    # A preset's name, or FILE.py:NAME of an algorithm of the user's.
    if not named.endswith(".toml"):
        return Contestant(named.rpartition(":")[2] if ":" in named else named, named)
    own, path = _own(named), Path(named)
    theirs = _built(own, (), path.stem)
    # The comparison's experiment with the file's algorithm: were the rest of the file the same, the two would be equal.
    ours = _built({**table, "algorithm": algorithm_table(theirs.algorithm)}, (), path.stem)
    begun, given = (to_table(replace(one, name="")) | {"algorithm": None} for one in (ours, theirs))
    other = differences(begun, given)
    if other:
        raise ConfigError(
            f"{named} differs from the experiment in more than its algorithm, so a difference could come from there: "
            f"{'; '.join(other[:3])} ('there' is the experiment, 'here' the file)"
        )
    return Contestant(path.stem, algorithm_table(theirs.algorithm))


def _own(experiment: str | Path) -> dict[str, Any]:
    """Return an experiment's table. Raises ConfigError if it belongs to another user's run and names code."""
    table, folder = read(experiment), Path(experiment).parent
    if (folder / "run.json").exists():
        # A run's folder that belongs to another user names code that would be run here.
        check_own(folder, table)
    return table


def _check_schedule(schedule: str, contestant: Contestant, limit: RunLimit) -> None:
    if limit.unit != "steps" and schedule != "constant":
        raise ConfigError(
            f"{contestant.name}: the {schedule} schedule of the learning rate falls over a number of steps, and a "
            f"budget of {limit.unit} leaves that number open; set learner.optimizer.schedule=constant, or "
            "compare with --steps"
        )


PAGE, NUMBERS, TERMS = "compare.html", "compare.json", "study.json"
FORMAT = "gnomon-study/1"


def conduct(design: Design, folder: Path, workers: int | None, console: Console) -> Comparison:
    """Train the missing runs, write compare.html and compare.json into ``folder``, and return the comparison.

    The same call resumes an interrupted comparison; a call with more seeds or algorithms adds their runs. Failed runs
    are left out and named in `Comparison.failures`.

    Args:
        design: The comparison.
        folder: The comparison's folder.
        workers: Runs at a time; None for as many as cores and free memory allow, one at a time on a GPU.
        console: For progress and warnings.

    Raises:
        UserError: Before anything starts.
        RunError: If no run of some algorithm finished.
        Stopped: After a signal.
    """
    # Cheap checks first, and nothing is written before all of them have passed.
    _refuse_other_study(design, folder)
    _check_budget(design, console)
    plans = {contestant.name: _plan(design, contestant, console) for contestant in design.contestants}
    setting = _setting(design, plans)
    jobs = {(e.name, seed): design.job(e, seed, folder) for seed in design.seed_numbers() for e in design.contestants}
    # The plans say how much memory a run takes, so how many fit beside each other.
    at_once = _room(design, plans, len(jobs)) if workers is None else workers
    check_jobs(list(jobs.values()), at_once)
    # All checks are done, so a refused comparison leaves no files.
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / TERMS, {"format": FORMAT, "terms": design.terms()})
    # A run that failed is a finding of the comparison and does not hide what
    # the others found; only an algorithm without any run makes it meaningless.
    failures = ""
    try:
        run_jobs(list(jobs.values()), at_once, console)
    except Stopped:
        raise
    except RunError as error:
        failures = str(error)
    with console.phase("reading runs", len(jobs)) as phase:
        runs = []
        for (name, seed), job in jobs.items():
            runs += _read(name, seed, job)
            phase.advance()
    lost = [
        contestant.name for contestant in design.contestants if contestant.name not in {run.algorithm for run in runs}
    ]
    if lost:
        raise RunError(f"no run of {', '.join(lost)} finished, so there is nothing to compare with:\n{failures}")
    if idle := sorted({run.algorithm for run in runs if not run.cost.steps}):
        raise RunError(
            f"{', '.join(idle)}: {design.limit} were spent before the first step, for initial values or a critic, so "
            "nothing was learned that could be compared; give more, or leave it out"
        )
    # The order of the command line decides colors and the signs of
    # differences, so it must not depend on which seed came first.
    runs.sort(key=lambda run: list(plans).index(run.algorithm))
    found = summarize(setting, runs, failures)
    # Numbers first: a page can be drawn again from them.
    write_json(folder / NUMBERS, found.as_row())
    write_durably(folder / PAGE, page(found).encode())
    return found


def folder_of(design: Design, experiment: str | Path) -> Path:
    """Return the default folder: the same for the same experiment and budget."""
    return Path("runs") / f"compare-{Path(experiment).stem}-{design.digest()}"


def _read(name: str, seed: int, job: ComparisonJob) -> list[Trained]:
    return [read_trained(name, seed, job.folder)] if is_finished(job.folder, job.experiment()) else []


def _plan(design: Design, contestant: Contestant, console: Console) -> RunEstimate:
    """Make every check that a run of the algorithm makes before it starts, and return the plan.

    Raises:
        UserError: Naming the algorithm.
    """
    resolved = resolve(design.experiment(contestant))
    model, parent = resolved.experiment.model, resolved.experiment.continue_from
    if parent is not None:
        raise ConfigError(
            f"continue_from = '{parent}': the runs of a comparison begin with a model, from which their budgets are "
            "counted; leave it out, and name the checkpoint's folder as model"
        )
    with _named(contestant.name):
        asked, *_ = checked(resolved, console)
    return make_plan(resolved, asked, model_size(model, resolved.experiment.trust_remote_code))


def _check_budget(design: Design, console: Console) -> None:
    """Refuse a token budget that is too small. Raises ConfigError before any weight is read."""
    if design.limit.unit != "tokens":
        return
    resolved = {contestant.name: resolve(design.experiment(contestant)) for contestant in design.contestants}
    _check_steps(design, resolved, console)
    _refuse_spent(design, resolved, console)


def _check_steps(design: Design, resolved: Mapping[str, Resolved], console: Console) -> None:
    """Refuse a token budget below every run's first step, and warn if the first step may exceed the budget.

    Raises:
        ConfigError: Naming the smallest valid budget.
    """
    experiments = {name: one.experiment for name, one in resolved.items()}
    # The algorithm with the largest step decides whether all have at least one.
    name, most = max(((n, e.rollouts_per_step) for n, e in experiments.items()), key=lambda found: found[1])
    if design.limit.amount < most:
        raise ConfigError(
            f"{name}: a step asks {many(most, 'answer')}, of one token or more each, so {design.limit} are less than "
            f"one step; give --budget {most} or more, for a curve that of many steps, or lower rollouts_per_step"
        )
    longest = {n: e.rollouts_per_step * e.sampling.max_completion_length for n, e in experiments.items()}
    name, tokens = max(longest.items(), key=lambda found: found[1])
    if design.limit.amount < tokens and experiments[name].environment is None:
        console.warn(
            f"one step of {name} may generate up to {tokens:,} tokens, more than the budget of {design.limit}: its "
            "runs may end with their first step"
        )


def _refuse_spent(design: Design, resolved: Mapping[str, Resolved], console: Console) -> None:
    """Refuse a token budget that initial values would spend before the first step.

    Only the prompts are read for this check; they are the same for every algorithm.
    """
    # Asked for one prompt: which algorithms measure initial values at all. Most do not, and then no dataset is read.
    early = {name: one.experiment for name, one in resolved.items() if initial_answers(one.experiment, 1)}
    if not early:
        return
    name, first = next(iter(early.items()))
    announce_user_code(first, console)
    with console.phase("preparing tasks"), _named(name):
        prompts = len(questions(first).split.train)
    for name, experiment in early.items():
        answers = initial_answers(experiment, prompts)
        # Each answer has one token or more, so the budget is certainly spent.
        if answers >= design.limit.amount:
            most = answers * experiment.sampling.max_completion_length
            raise ConfigError(
                f"{name}: before its first step it asks {many(answers, 'answer')} for initial values, of one token or "
                f"more each ({most:,} at most), so {design.limit} would be spent by then; give more, or set "
                "algorithm.tracker.initial=prior in a file for it"
            )


@contextmanager
def _named(algorithm: str) -> Iterator[None]:
    """Add the algorithm's name to an error."""
    try:
        yield
    except (ConfigError, DatasetError) as error:
        raise type(error)(f"{algorithm}: {error}") from error


def _setting(design: Design, plans: dict[str, RunEstimate]) -> ComparedSetting:
    experiments = {contestant.name: design.experiment(contestant) for contestant in design.contestants}
    first = next(iter(experiments.values()))
    supervised = tuple(name for name, e in experiments.items() if e.algorithm.is_supervised)
    marks = first.budget.evaluations or MARKS
    if design.limit.unit == "steps":
        # A user may set how often is evaluated, and the caveats on the page name the true number.
        marks = max(1, int(design.limit.amount) // max(1, first.evaluation.every or int(design.limit.amount)))
    return ComparedSetting(
        experiment=first.name,
        model=first.model,
        task=first.task.name,
        limit=str(design.limit).replace("generated", "answer" if supervised else "generated"),
        unit=design.limit.unit,
        amount=design.limit.amount,
        # All runs have the same dataset, so any plan says how long an epoch is.
        epoch=plans[design.contestants[0].name].training_prompts,
        uniform=tuple(name for name, e in experiments.items() if isinstance(e.algorithm.sampler, Uniform)),
        marks=marks,
        samples=first.evaluation.samples,
        penalized=penalized(design),
        supervised=supervised,
    )


def penalized(design: Design) -> tuple[str, ...]:
    """Return the algorithms with a length penalty that others lack; their training rewards have a different scale."""
    penalties = {contestant.name: design.experiment(contestant).algorithm.overlong for contestant in design.contestants}
    is_alike = all(penalty == next(iter(penalties.values())) for penalty in penalties.values())
    return () if is_alike else tuple(name for name, penalty in penalties.items() if penalty is not None)


def _room(design: Design, plans: dict[str, RunEstimate], jobs: int) -> int:
    """Return the number of parallel runs: one per core while memory lasts, one on a GPU."""
    # Processes on one GPU would share its memory and take turns: together they are no faster than one after another.
    device = resolve_device(design.experiment(design.contestants[0]).device)
    if device.type != "cpu":
        return 1
    free = free_memory_bytes()
    fits = cores() if free is None else free // max(plan.memory_bytes for plan in plans.values())
    return max(1, min(cores(), int(fits), jobs))


def _refuse_other_study(design: Design, folder: Path) -> None:
    """Refuse a folder that does not hold this comparison, with these or other algorithms and seeds."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        said: dict[str, Any] = json.loads((folder / TERMS).read_text(encoding="utf-8"))
        terms = said["terms"] if said["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        terms = None
    if not isinstance(terms, dict):
        raise RunDirectoryError(f"{folder} holds something that is no comparison; name another folder: --out FOLDER")
    other = differences(terms, design.terms())
    if other:
        raise RunDirectoryError(
            f"{folder} holds another comparison: {'; '.join(other[:3])}; name another folder with --out FOLDER"
        )
