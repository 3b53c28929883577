"""Grids: many algorithms in several settings at equal tokens, for days, one command that can be stopped.

What is decided by a rule before anything is run: the tasks (of a list, the first that leave room for the untrained
model), each algorithm's learning rate in each setting (of three, on seeds of its own), the seeds, and the budget. Every
run is a `gnomon train` process whose folder stays; the same command does what is left, cell by cell.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.analysis.compare.records import read_trained
from gnomon.analysis.compare.run import ComparisonJob, RunLimit, cores, run_jobs
from gnomon.analysis.compare.statistics import contrast, mean_over
from gnomon.analysis.plan import make_plan
from gnomon.config.experiment import to_toml
from gnomon.config.reading import read
from gnomon.core.atomic_files import real_path, remove_tree, write_durably, write_json
from gnomon.core.errors import ConfigError, GnomonError, RunError, Stopped, UserError, unknown
from gnomon.core.statistics import SIGNIFICANCE, holm, in_words
from gnomon.core.svg import Series, chart, write_svg
from gnomon.models.size import model_size
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord, column
from gnomon.training.api import checked, is_finished
from gnomon.training.resolve import resolve

BEGIN, END = "<!-- begin: written by the command -->", "<!-- end: written by the command -->"
MORE = (("majority", 3), ("passed", 3), ("wasted", 3), ("seconds", 0))


@dataclass(frozen=True)
class GridRun:
    """One run of a grid; rate: of learning. Its folder is named after all of these."""

    arm: str
    cell: str
    task: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The run in words, unique in its grid."""
        return f"{self.cell}, {self.arm}, {self.task}, {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class GridScore:
    """One algorithm in one cell: held-out score over seeds and prompts, and what else the seeds measured on average."""

    cell: str
    arm: str
    rate: float
    seeds: int
    score: float
    low: float
    high: float
    majority: float | None
    passed: float | None
    wasted: float | None
    seconds: float | None


@dataclass(frozen=True)
class Grid:
    """Algorithms (arms) in settings (cells) on tasks.

    Attributes:
        base: The experiment, by name or as a table.
        arms, cells, tasks: Name to overrides.
        rates: Learning rates, of which each arm gets one in each cell.
        tokens: Generated for training by every run.
        seeds: Of the runs that count.
        pilots: Seeds on which rates are chosen; never one of ``seeds``.
        room: Score of the untrained model within which a task is taken.
        most_tasks: The first so many of the tasks with room are taken.
    """

    title: str
    base: str | Mapping[str, Any]
    arms: Mapping[str, tuple[str, ...]]
    cells: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, tuple[str, ...]]
    rates: tuple[float, ...]
    tokens: int
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    pilots: tuple[int, ...] = (1000, 1001)
    room: tuple[float, float] = (0.05, 0.6)
    most_tasks: int = 3

    def __post_init__(self) -> None:
        if set(self.seeds) & set(self.pilots):
            raise ConfigError(f"{self.title}: rates are chosen on seeds of their own, got {self.seeds}, {self.pilots}")

    @property
    def table(self) -> Mapping[str, Any]:
        """The experiment as a table."""
        return read(self.base) if isinstance(self.base, str) else self.base

    def job(self, run: GridRun, folder: Path) -> ComparisonJob:
        """Return a run as a job below ``folder``."""
        said = (*self.tasks[run.task], *self.arms[run.arm], *self.cells[run.cell])
        limit = RunLimit(self.tokens, "tokens").overrides(int(self.table.get("rollouts_per_step", 64)))
        rate = (f"learner.optimizer.learning_rate={run.rate:g}", f"seed={run.seed}")
        place = folder / "runs" / "".join(c if c.isalnum() else "-" for c in run.name)
        return ComparisonJob(run.name, self.table, (*said, *limit, *rate), place)

    def baseline(self, task: str, folder: Path) -> ComparisonJob:
        """Return the run of one step before which the untrained model is asked the held-out questions of a task."""
        name = f"untrained, {task}"
        said = (*self.tasks[task], "algorithm=grpo", "steps=1", "evaluation.before=true", "seed=0")
        return ComparisonJob(name, self.table, said, folder / "runs" / name.replace(", ", "-"))

    def chosen_tasks(self, folder: Path) -> list[str]:
        """Return the first tasks, in the order of the list, on which the untrained model has room.

        Raises:
            RunError: There is none.
        """
        scores = {task: self._score_before(task, folder) for task in self.tasks}
        found = [task for task, score in scores.items() if self.room[0] <= score <= self.room[1]]
        if not found:
            raise RunError(f"{self.title}: no task leaves room within {self.room} for the untrained model: {scores}")
        return found[: self.most_tasks]

    def _score_before(self, task: str, folder: Path) -> float:
        row = RunRecord(self.baseline(task, folder).folder).evaluations()[0]
        return float(row["scores"]["reward"]["mean"])

    def pilot_runs(self, cell: str, tasks: Sequence[str]) -> list[GridRun]:
        """Return the runs on which a cell's learning rates are chosen."""
        return [
            GridRun(arm, cell, task, rate, seed)
            for seed in self.pilots
            for arm in self.arms
            for task in tasks
            for rate in self.rates
        ]

    def runs(self, cell: str, tasks: Sequence[str], rates: Mapping[str, float]) -> list[GridRun]:
        """Return the runs of a cell that count, seed by seed, so that what is there first compares all arms."""
        return [
            GridRun(arm, cell, task, rates[arm], seed) for seed in self.seeds for arm in self.arms for task in tasks
        ]

    def chosen_rates(self, cell: str, tasks: Sequence[str], folder: Path) -> dict[str, float]:
        """Return each arm's rate by `best_rate`, of held-out scores over pilot seeds and tasks.

        A run that failed has the score 0: a rate at which an algorithm breaks is not its best.
        """
        by_arm: dict[str, dict[float, list[float]]] = {arm: {rate: [] for rate in self.rates} for arm in self.arms}
        for run in self.pilot_runs(cell, tasks):
            scores = self._scores(run, folder)
            by_arm[run.arm][run.rate].append(statistics.fmean(scores.values()) if scores else 0.0)
        return {arm: best_rate(rates) for arm, rates in by_arm.items()}

    def _scores(self, run: GridRun, folder: Path) -> Mapping[str, float]:
        job = self.job(run, folder)
        if not _is_done(job):
            return {}
        return read_trained(run.arm, run.seed, job.folder).scores

    def costs(self, folder: Path, console: Console) -> Iterator[str]:
        """Yield what each cell costs, in words: measured on runs that are there, else as `gnomon plan` estimates."""
        for cell in self.cells:
            count = len(self.arms) * min(self.most_tasks, len(self.tasks))
            pilots, runs = count * len(self.rates) * len(self.pilots), count * len(self.seeds)
            spent = [
                seconds
                for run in self.pilot_runs(cell, list(self.tasks))
                if (seconds := self.job(run, folder).cpu_seconds()) is not None
            ]
            each = statistics.fmean(spent) if spent else self._planned(cell, folder, console)
            how = f"as {len(spent)} runs took" if spent else "by gnomon plan, if all answers take their whole budget"
            yield (
                f"{cell}: {pilots} runs for rates and {runs} that count, {each / 60:.1f} CPU minutes each ({how}), "
                f"{(pilots + runs) * each / 3600:.1f} CPU hours in all"
            )

    def _planned(self, cell: str, folder: Path, console: Console) -> float:
        run = GridRun(next(iter(self.arms)), cell, next(iter(self.tasks)), self.rates[0], self.seeds[0])
        resolved = resolve(self.job(run, folder).experiment())
        asked, *_ = checked(resolved, console)
        plan = make_plan(resolved, asked, model_size(resolved.experiment.model, False))
        answer = resolved.experiment.sampling.max_completion_length
        return plan.step_seconds * math.ceil(self.tokens / (plan.rollouts_per_step * answer))

    def conduct(self, folder: Path, cells: Sequence[str], workers: int, console: Console) -> None:
        """Run what is missing, cell by cell; runs that fail are left out and said."""
        self._train([self.baseline(task, folder) for task in self.tasks], workers, console)
        tasks = self.chosen_tasks(folder)
        console.say(f"tasks with room for the untrained model: {', '.join(tasks)}")
        for cell in cells:
            self._train([self.job(run, folder) for run in self.pilot_runs(cell, tasks)], workers, console)
            rates = self.chosen_rates(cell, tasks, folder)
            console.say(f"{cell}: " + ", ".join(f"{arm} {rate:g}" for arm, rate in rates.items()))
            self._train([self.job(run, folder) for run in self.runs(cell, tasks, rates)], workers, console)

    def _train(self, jobs: Sequence[ComparisonJob], workers: int, console: Console) -> None:
        left = [job for job in jobs if not _is_done(job)]
        try:
            run_jobs(left, workers, console, _done) if left else None
        except Stopped:
            raise
        except RunError as error:
            console.warn(f"some runs failed, and the others count: {error}")

    def measured(self, folder: Path) -> dict[str, Any]:
        """Return rows and pairs of the cells that have runs, as JSON; Holm's correction is over all pairs together."""
        tasks = self.chosen_tasks(folder)
        rows: list[GridScore] = []
        found = []
        for cell in self.cells:
            rates = self.chosen_rates(cell, tasks, folder)
            tables = {arm: self._table(cell, arm, rates[arm], tasks, folder) for arm in self.arms}
            rows += [
                self._row(cell, arm, rates[arm], list(table), np.array([*table.values()]), tasks, folder)
                for arm, table in tables.items()
                if table
            ]
            for first, second in combinations([arm for arm in tables if tables[arm]], 2):
                shared = sorted(tables[first].keys() & tables[second].keys())
                if shared:
                    pair = contrast(*(np.array([tables[arm][seed] for seed in shared]) for arm in (first, second)))
                    found.append((cell, first, second, pair))
        corrected = holm([pair.p_value for *_, pair in found])
        pairs = [
            {"cell": cell, "first": first, "second": second, **asdict(pair), "corrected": p}
            for (cell, first, second, pair), p in zip(found, corrected, strict=True)
        ]
        return {"title": self.title, "tasks": tasks, "rows": [asdict(row) for row in rows], "pairs": pairs}

    def _table(self, cell: str, arm: str, rate: float, tasks: Sequence[str], folder: Path) -> dict[int, list[float]]:
        """Return of each seed that is there on every task the scores of all prompts, task by task."""
        found = {}
        for seed in self.seeds:
            each = [self._scores(GridRun(arm, cell, task, rate, seed), folder) for task in tasks]
            if all(each):
                found[seed] = [scores[prompt] for scores in each for prompt in sorted(scores)]
        return found

    def _row(
        self, cell: str, arm: str, rate: float, seeds: Sequence[int], table: Any, tasks: Sequence[str], folder: Path
    ) -> GridScore:
        interval = mean_over(table)
        jobs = [self.job(GridRun(arm, cell, task, rate, seed), folder) for seed in seeds for task in tasks]
        records = [RunRecord(job.folder) for job in jobs]
        ends = [record.evaluations()[-1] for record in records]
        metrics = [record.metrics() for record in records]
        more = {
            "majority": [_of_most(row["maj_at"]) for row in ends if row["maj_at"]],
            "passed": [_of_most(row["pass_at"]) for row in ends if row["pass_at"]],
            "wasted": [value for rows in metrics for _, value in column(rows, "tokens/wasted_fraction")],
            "seconds": [sum(value for _, value in column(rows, "time/step_seconds")) for rows in metrics],
        }
        means = {name: statistics.fmean(values) if values else None for name, values in more.items()}
        return GridScore(cell, arm, rate, len(seeds), float(table.mean()), interval.low, interval.high, **means)


def _done(job: ComparisonJob) -> None:
    """Keep the records of a run that has ended, and none of its checkpoints (gigabytes), which nothing reads again."""
    write_durably(job.file_with(".done"), to_toml(job.experiment()).encode())
    remove_tree(RunDirectory(job.folder).checkpoints, ".removed-checkpoints")


def _is_done(job: ComparisonJob) -> bool:
    """Whether this experiment's run has ended: its mark says so, or its last checkpoint."""
    mark, experiment = job.file_with(".done"), job.experiment()
    ended = mark.exists() and mark.read_text(encoding="utf-8") == to_toml(experiment)
    return ended or is_finished(job.folder, experiment)


def best_rate(by_rate: Mapping[float, Sequence[float]]) -> float:
    """Return the rate whose scores have the highest mean, of equal ones the lowest.

    >>> best_rate({1e-5: [0.25, 0.5], 3e-5: [0.5, 0.5], 1e-4: [0.25, 0.75]})
    3e-05
    """
    return min(by_rate, key=lambda rate: (-round(statistics.fmean(by_rate[rate]), 9), rate))


def _of_most(by_k: Mapping[str, float]) -> float:
    """Return the value at the largest k."""
    return by_k[max(by_k, key=int)]


def in_markdown(found: Mapping[str, Any]) -> str:
    """Return the table of scores, and the pairs that differ beyond noise."""
    lines = [
        f"Tasks: {', '.join(found['tasks'])}.",
        "",
        "| setting | algorithm | rate | seeds | avg@k | 95% interval | maj@k | pass@k | tokens wasted | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        more = ["-" if row[name] is None else f"{row[name]:.{digits}f}" for name, digits in MORE]
        lines.append(
            f"| {row['cell']} | {row['arm']} | {row['rate']:g} | {row['seeds']} | {row['score']:.3f} "
            f"| [{row['low']:.3f}, {row['high']:.3f}] | {' | '.join(more)} |"
        )
    beyond = [pair for pair in found["pairs"] if pair["corrected"] <= SIGNIFICANCE]
    lines += ["", f"{len(beyond)} of {len(found['pairs'])} pairs differ beyond noise (Holm's correction over all):", ""]
    lines += [
        f"- {pair['cell']}: {pair['second']} less {pair['first']} is {pair['mean']:+.3f} "
        f"[{pair['interval']['low']:.3f}, {pair['interval']['high']:.3f}] ({in_words(pair['corrected'])})"
        for pair in beyond
    ]
    return "\n".join(lines)


def figure(found: Mapping[str, Any]) -> str:
    """Return the scores as SVG: a line an algorithm, over the settings in their order, in its 95% interval."""
    cells = list(dict.fromkeys(row["cell"] for row in found["rows"]))
    series = []
    for arm in dict.fromkeys(row["arm"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["arm"] == arm]
        xs = [float(cells.index(row["cell"]) + 1) for row in own]
        series.append(Series(arm, xs, *([row[name] for row in own] for name in ("score", "low", "high"))))
    return chart(series, found["title"], "; ".join(f"{n} {cell}" for n, cell in enumerate(cells, 1)), "held-out score")


def write(found: Mapping[str, Any], home: Path, name: str) -> None:
    """Write numbers and figure beside the page, and its table between the marks of the page."""
    write_json(home / f"{name}.json", found)
    write_svg(home / f"{name}.svg", figure(found))
    page = home / "README.md"
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    shown = f"{before}{mark}\n\n{in_markdown(found)}\n\n![{found['title']}]({name}.svg)\n\n{end}{after}"
    write_durably(page, shown.encode(), is_synced=False)


def main(grids: Mapping[str, Grid], home: Path, arguments: Sequence[str] | None = None) -> int:
    """Say what a grid costs, run what is missing of it, and write its page; return the exit code.

    Args:
        grids: By name.
        home: Folder of the page.
        arguments: Of the command line.
    """
    try:
        _conduct(grids, home, arguments)
    except GnomonError as error:
        print(error.args[0] if isinstance(error, Stopped) else error, file=sys.stderr)
        return 128 + error.args[1] if isinstance(error, Stopped) else 2 if isinstance(error, UserError) else 1
    return 0


def _conduct(grids: Mapping[str, Grid], home: Path, arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=f"The grids of {home.name}: {', '.join(grids)}.")
    parser.add_argument("grid", nargs="?", default=next(iter(grids)), help="which one (default: the first)")
    parser.add_argument("--work", type=Path, default=Path("runs") / home.name, help="where runs are kept")
    parser.add_argument("--cells", help="a;b: these settings alone, in this order (default: all)")
    parser.add_argument("--workers", type=int, default=cores(), help="runs at once")
    parser.add_argument("--cost", action="store_true", help="say what each setting costs, and run nothing")
    parser.add_argument("--write", action="store_true", help="run nothing: write numbers, figure and page")
    given = parser.parse_args(arguments)
    if given.grid not in grids:
        raise ConfigError(unknown("grid", given.grid, grids))
    grid, folder = grids[given.grid], real_path(given.work) / given.grid
    cells = [cell.strip() for cell in given.cells.split(";")] if given.cells else list(grid.cells)
    for cell in cells:
        if cell not in grid.cells:
            raise ConfigError(unknown("setting", cell, grid.cells))
    with Console() as console:
        if not given.write:
            for said in grid.costs(folder, console):
                console.say(said)
            if given.cost:
                return
            grid.conduct(folder, cells, given.workers, console)
        write(grid.measured(folder), home, given.grid)
