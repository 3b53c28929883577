"""Run a comparison from its design to its page."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gnomon.algorithms import Uniform
from gnomon.analysis.compare.contestants import MARKS, Contestant, Design
from gnomon.analysis.compare.jobs import ComparisonJob, check_jobs, cores, run_jobs
from gnomon.analysis.compare.page import page
from gnomon.analysis.compare.records import Trained, read_trained
from gnomon.analysis.compare.statistics import ComparedSetting, Comparison, summarize
from gnomon.analysis.plan import RunEstimate, make_plan
from gnomon.core.atomic_files import write_durably, write_json
from gnomon.core.errors import ConfigError, DatasetError, RunDirectoryError, RunError, Stopped
from gnomon.models.device import resolve_device
from gnomon.models.size import model_size
from gnomon.records.console import Console
from gnomon.records.memory import free_memory_bytes
from gnomon.training.api import checked, is_finished
from gnomon.training.build_data import questions
from gnomon.training.notes import initial_answers, many
from gnomon.training.provenance import differences, say_whose_code
from gnomon.training.resolve import Resolved, resolve

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
    _refuse_other_study(design, folder)
    _check_budget(design, console)
    plans = {entrant.name: _plan(design, entrant, console) for entrant in design.entrants}
    setting = _setting(design, plans)
    jobs = {(e.name, seed): design.job(e, seed, folder) for seed in design.seed_numbers() for e in design.entrants}
    at_once = _room(design, plans, len(jobs)) if workers is None else workers
    check_jobs(list(jobs.values()), at_once)
    # All checks are done, so a refused comparison leaves no files.
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / TERMS, {"format": FORMAT, "terms": design.terms()})
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
    lost = [entrant.name for entrant in design.entrants if entrant.name not in {run.algorithm for run in runs}]
    if lost:
        raise RunError(f"no run of {', '.join(lost)} finished, so there is nothing to compare with:\n{failures}")
    if idle := sorted({run.algorithm for run in runs if not run.cost.steps}):
        raise RunError(
            f"{', '.join(idle)}: {design.limit} were spent before the first step, for initial values or a critic, so "
            "nothing was learned that could be compared; give more, or leave it out"
        )
    runs.sort(key=lambda run: list(plans).index(run.algorithm))
    found = summarize(setting, runs, failures)
    write_json(folder / NUMBERS, found.as_row())
    write_durably(folder / PAGE, page(found).encode())
    return found


def folder_of(design: Design, experiment: str | Path) -> Path:
    """Return the default folder: the same for the same experiment and budget."""
    return Path("runs") / f"compare-{Path(experiment).stem}-{design.digest()}"


def _read(name: str, seed: int, job: ComparisonJob) -> list[Trained]:
    return [read_trained(name, seed, job.folder)] if is_finished(job.folder, job.experiment()) else []


def _plan(design: Design, entrant: Contestant, console: Console) -> RunEstimate:
    """Make every check that a run of the algorithm makes before it starts, and return the plan.

    Raises:
        UserError: Naming the algorithm.
    """
    resolved = resolve(design.experiment(entrant))
    model, parent = resolved.experiment.model, resolved.experiment.continue_from
    if parent is not None:
        raise ConfigError(
            f"continue_from = '{parent}': the runs of a comparison begin with a model, from which their budgets are "
            "counted; leave it out, and name the checkpoint's folder as model"
        )
    with _named(entrant.name):
        asked, *_ = checked(resolved, console)
    return make_plan(resolved, asked, model_size(model, resolved.experiment.trust_remote_code))


def _check_budget(design: Design, console: Console) -> None:
    """Refuse a token budget that is too small. Raises ConfigError before any weight is read."""
    if design.limit.unit != "tokens":
        return
    resolved = {entrant.name: resolve(design.experiment(entrant)) for entrant in design.entrants}
    _check_steps(design, resolved, console)
    _refuse_spent(design, resolved, console)


def _check_steps(design: Design, resolved: Mapping[str, Resolved], console: Console) -> None:
    """Refuse a token budget below every run's first step, and warn if the first step may exceed the budget.

    Raises:
        ConfigError: Naming the smallest valid budget.
    """
    experiments = {name: one.experiment for name, one in resolved.items()}
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
    early = {name: one.experiment for name, one in resolved.items() if initial_answers(one.experiment, 1)}
    if not early:
        return
    name, first = next(iter(early.items()))
    say_whose_code(first, console)
    with console.phase("preparing tasks"), _named(name):
        prompts = len(questions(first).split.train)
    for name, experiment in early.items():
        answers = initial_answers(experiment, prompts)
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
    experiments = {entrant.name: design.experiment(entrant) for entrant in design.entrants}
    first = next(iter(experiments.values()))
    supervised = tuple(name for name, e in experiments.items() if e.algorithm.is_supervised)
    marks = first.budget.evaluations or MARKS
    if design.limit.unit == "steps":
        marks = max(1, int(design.limit.amount) // max(1, first.evaluation.every or int(design.limit.amount)))
    return ComparedSetting(
        experiment=first.name,
        model=first.model,
        task=first.task.name,
        limit=str(design.limit).replace("generated", "answer" if supervised else "generated"),
        unit=design.limit.unit,
        amount=design.limit.amount,
        epoch=plans[design.entrants[0].name].training_prompts,
        uniform=tuple(name for name, e in experiments.items() if isinstance(e.algorithm.sampler, Uniform)),
        marks=marks,
        samples=first.evaluation.samples,
        penalized=penalized(design),
        supervised=supervised,
    )


def penalized(design: Design) -> tuple[str, ...]:
    """Return the algorithms with a length penalty that others lack; their training rewards have a different scale."""
    penalties = {entrant.name: design.experiment(entrant).algorithm.overlong for entrant in design.entrants}
    is_alike = all(penalty == next(iter(penalties.values())) for penalty in penalties.values())
    return () if is_alike else tuple(name for name, penalty in penalties.items() if penalty is not None)


def _room(design: Design, plans: dict[str, RunEstimate], jobs: int) -> int:
    """Return the number of parallel runs: one per core while memory lasts, one on a GPU."""
    device = resolve_device(design.experiment(design.entrants[0]).device)
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
