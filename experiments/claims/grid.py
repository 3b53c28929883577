"""Grids: many algorithms in several settings at equal tokens, for days, one command that can be stopped.

What is decided by a rule before anything is run: the tasks (of a list, the first that leave room for the untrained
model), each algorithm's learning rate in each setting (of three, on seeds of its own), the seeds, and the budget. Every
run is a `gnomon train` process; the same command does what is left, cell by cell. Of each run that has ended one line
stays beside the page, NAME.jsonl, from which alone the page is written: a grid that takes days goes on in any clone.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.analysis.compare.records import read_trained
from gnomon.analysis.compare.run import ComparisonJob, RunLimit, cores, run_jobs
from gnomon.analysis.compare.statistics import contrast, mean_over
from gnomon.analysis.plan import make_plan
from gnomon.config.reading import read
from gnomon.core.atomic_files import real_path, remove_tree, write_durably, write_json
from gnomon.core.errors import ConfigError, GnomonError, RunError, Stopped, UserError, unknown
from gnomon.core.statistics import SIGNIFICANCE, holm, in_words
from gnomon.core.svg import Series, chart, write_svg
from gnomon.models.size import model_size
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import JsonLines, read_rows
from gnomon.records.reading import RunRecord, column
from gnomon.training.api import checked, is_finished
from gnomon.training.resolve import resolve

BEGIN, END = "<!-- begin: {}, written by the command -->", "<!-- end: {} -->"
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
class KeptRun:
    """What stays of a run that has ended.

    Attributes:
        name: `GridRun.name`, or "untrained, TASK".
        asked: Digest of the experiment and the settings that were asked for.
        code: Commit of gnomon, with "+" where files differed from it.
        cpu: What the processor calls itself.
        points: Of each evaluation: tokens generated until then, seconds, steps, held-out score.
        scores: Prompt to mean score of the last evaluation.
        majority, passed: At the largest k of the last evaluation.
        wasted: Mean share of a step's tokens that had no gradient.
        seconds: Of all steps, by the clock.
        cpu_seconds: Of all processes of the run.
    """

    name: str
    asked: str
    code: str
    cpu: str
    points: Sequence[Sequence[float]]
    scores: Mapping[str, float]
    majority: float | None
    passed: float | None
    wasted: float | None
    seconds: float
    cpu_seconds: float | None

    @classmethod
    def of(cls, job: ComparisonJob) -> "KeptRun":
        """Return what stays of a finished run."""
        trained, record = read_trained(job.name, 0, job.folder), RunRecord(job.folder)
        rows, end, card = record.metrics(), record.evaluations()[-1], record.card()
        wasted = [value for _, value in column(rows, "tokens/wasted_fraction")]
        code = (card.get("code") or {}).get("gnomon") or {}
        return cls(
            name=job.name,
            asked=digest(job),
            code=str(code.get("commit", "unknown"))[:8] + "+" * bool(code.get("dirty")),
            cpu=str(card.get("cpu", "unknown")),
            points=[(point.tokens, round(point.seconds, 1), point.steps, point.score) for point in trained.points],
            scores=trained.scores,
            majority=_of_most(end["maj_at"]),
            passed=_of_most(end["pass_at"]),
            wasted=statistics.fmean(wasted) if wasted else None,
            seconds=round(sum(value for _, value in column(rows, "time/step_seconds")), 1),
            cpu_seconds=job.cpu_seconds(),
        )


@dataclass
class KeptRuns:
    """The runs of a grid that have ended, a line each in a file, and the folder in which runs are made.

    Attributes:
        path: The file; it need not exist.
        folder: Of runs under way.
    """

    path: Path
    folder: Path
    _runs: dict[str, KeptRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in read_rows(self.path):
            self._runs[row["name"]] = KeptRun(**row)

    def of(self, job: ComparisonJob) -> KeptRun | None:
        """Return what stays of a job's run; None if it has not ended or something else was asked of it."""
        found = self._runs.get(job.name)
        return found if found and found.asked == digest(job) else None

    def add(self, job: ComparisonJob) -> None:
        """Keep a run that has just ended: its line, its records in the folder, none of its checkpoints (gigabytes)."""
        kept = self._runs[job.name] = KeptRun.of(job)
        lines = JsonLines(self.path, is_synced=True)
        lines.append(asdict(kept))
        lines.close()
        remove_tree(RunDirectory(job.folder).checkpoints, ".removed-checkpoints")


def digest(job: ComparisonJob) -> str:
    """Return what tells apart two jobs that ask for different things: whatever a later gnomon adds is no part of it."""
    asked = json.dumps([job.table, job.overrides], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:12]


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

    def chosen_tasks(self, kept: KeptRuns) -> list[str]:
        """Return the first tasks, in the order of the list, on which the untrained model has room.

        Raises:
            RunError: There is none.
        """
        scores = {task: self._score_before(task, kept) for task in self.tasks}
        found = [task for task, score in scores.items() if self.room[0] <= score <= self.room[1]]
        if not found:
            raise RunError(f"{self.title}: no task leaves room within {self.room} for the untrained model: {scores}")
        return found[: self.most_tasks]

    def _score_before(self, task: str, kept: KeptRuns) -> float:
        run = kept.of(self.baseline(task, kept.folder))
        if run is None:
            raise RunError(f"{self.title}: the untrained model has not been asked about {task}; run the grid first")
        return run.points[0][-1]

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

    def chosen_rates(self, cell: str, tasks: Sequence[str], kept: KeptRuns) -> dict[str, float]:
        """Return each arm's rate by `best_rate`, of held-out scores over pilot seeds and tasks.

        A run that failed has the score 0: a rate at which an algorithm breaks is not its best.
        """
        by_arm: dict[str, dict[float, list[float]]] = {arm: {rate: [] for rate in self.rates} for arm in self.arms}
        for run in self.pilot_runs(cell, tasks):
            ended = kept.of(self.job(run, kept.folder))
            by_arm[run.arm][run.rate].append(statistics.fmean(ended.scores.values()) if ended else 0.0)
        return {arm: best_rate(rates) for arm, rates in by_arm.items()}

    def costs(self, kept: KeptRuns, console: Console) -> Iterator[str]:
        """Yield what each cell costs, in words: measured on runs that are there, else as `gnomon plan` estimates."""
        for cell in self.cells:
            count = len(self.arms) * min(self.most_tasks, len(self.tasks))
            pilots, runs = count * len(self.rates) * len(self.pilots), count * len(self.seeds)
            ended = [kept.of(self.job(run, kept.folder)) for run in self.pilot_runs(cell, list(self.tasks))]
            spent = [run.cpu_seconds for run in ended if run and run.cpu_seconds is not None]
            each = statistics.fmean(spent) if spent else self._planned(cell, kept.folder, console)
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

    def conduct(self, kept: KeptRuns, cells: Sequence[str], workers: int, console: Console) -> None:
        """Run what is missing, cell by cell; runs that fail are left out and said."""
        self._train([self.baseline(task, kept.folder) for task in self.tasks], kept, workers, console)
        tasks = self.chosen_tasks(kept)
        console.say(f"tasks with room for the untrained model: {', '.join(tasks)}")
        for cell in cells:
            self._train([self.job(run, kept.folder) for run in self.pilot_runs(cell, tasks)], kept, workers, console)
            rates = self.chosen_rates(cell, tasks, kept)
            console.say(f"{cell}: " + ", ".join(f"{arm} {rate:g}" for arm, rate in rates.items()))
            self._train([self.job(run, kept.folder) for run in self.runs(cell, tasks, rates)], kept, workers, console)

    def _train(self, jobs: Sequence[ComparisonJob], kept: KeptRuns, workers: int, console: Console) -> None:
        for job in jobs:
            if kept.of(job) is None and is_finished(job.folder, job.experiment()):
                kept.add(job)
        left = [job for job in jobs if kept.of(job) is None]
        try:
            run_jobs(left, workers, console, kept.add) if left else None
        except Stopped:
            raise
        except RunError as error:
            console.warn(f"some runs failed, and the others count: {error}")

    def measured(self, kept: KeptRuns) -> dict[str, Any]:
        """Return rows and pairs of the cells that have runs, as JSON; Holm's correction is over all pairs together."""
        tasks = self.chosen_tasks(kept)
        rows: list[GridScore] = []
        found, used = [], []
        for cell in self.cells:
            rates = self.chosen_rates(cell, tasks, kept)
            ended = {arm: self._ended(cell, arm, rates[arm], tasks, kept) for arm in self.arms}
            tables = {arm: {seed: _prompts(runs) for seed, runs in by_seed.items()} for arm, by_seed in ended.items()}
            for arm, by_seed in ended.items():
                runs = [run for of_tasks in by_seed.values() for run in of_tasks]
                rows += [_row(cell, arm, rates[arm], tables[arm], runs)] if runs else []
                used += runs
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
        made = {"code": sorted({run.code for run in used}), "processors": sorted({run.cpu for run in used})}
        return {"title": self.title, "tasks": tasks, **made, "rows": [asdict(row) for row in rows], "pairs": pairs}

    def _ended(
        self, cell: str, arm: str, rate: float, tasks: Sequence[str], kept: KeptRuns
    ) -> dict[int, list[KeptRun]]:
        """Return the runs of each seed that has ended on every task, task by task."""
        found = {}
        for seed in self.seeds:
            each = [kept.of(self.job(GridRun(arm, cell, task, rate, seed), kept.folder)) for task in tasks]
            runs = [run for run in each if run is not None]
            if len(runs) == len(tasks):
                found[seed] = runs
        return found


def _prompts(runs: Sequence[KeptRun]) -> list[float]:
    return [run.scores[prompt] for run in runs for prompt in sorted(run.scores)]


def _row(cell: str, arm: str, rate: float, table: Mapping[int, Sequence[float]], runs: Sequence[KeptRun]) -> GridScore:
    scores = np.array([*table.values()])
    interval = mean_over(scores)
    more = {name: [value for run in runs if (value := getattr(run, name)) is not None] for name, _ in MORE}
    means = {name: statistics.fmean(values) if values else None for name, values in more.items()}
    return GridScore(cell, arm, rate, len(table), float(scores.mean()), interval.low, interval.high, **means)


def best_rate(by_rate: Mapping[float, Sequence[float]]) -> float:
    """Return the rate whose scores have the highest mean, of equal ones the lowest.

    >>> best_rate({1e-5: [0.25, 0.5], 3e-5: [0.5, 0.5], 1e-4: [0.25, 0.75]})
    3e-05
    """
    return min(by_rate, key=lambda rate: (-round(statistics.fmean(by_rate[rate]), 9), rate))


def _of_most(by_k: Mapping[str, float]) -> float | None:
    """Return the value at the largest k, None where there is none."""
    return by_k[max(by_k, key=int)] if by_k else None


def in_markdown(found: Mapping[str, Any]) -> str:
    """Return the table of scores, and the pairs that differ beyond noise."""
    lines = [
        " ".join(f"{name.capitalize()}: {', '.join(found[name])}." for name in ("tasks", "code", "processors")),
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
    lines += ["", f"{len(beyond)} of {len(found['pairs'])} pairs differ beyond noise (Holm's correction over all)"]
    lines[-1] += ":" if beyond else "."
    lines += [""] if beyond else []
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
    """Write numbers and figure beside the page, and the grid's table between its marks of the page, else at its end."""
    write_json(home / f"{name}.json", found)
    write_svg(home / f"{name}.svg", figure(found))
    page, begin, end = home / "README.md", BEGIN.format(name), END.format(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    before = before if rest else before.rstrip("\n") + "\n\n"
    shown = f"{before}{begin}\n\n{in_markdown(found)}\n\n![{found['title']}]({name}.svg)\n\n{end}{after or chr(10)}"
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
    kept = KeptRuns(home / f"{given.grid}.jsonl", folder)
    with Console() as console:
        if not given.write:
            for said in grid.costs(kept, console):
                console.say(said)
            if given.cost:
                return
            grid.conduct(kept, cells, given.workers, console)
        write(grid.measured(kept), home, given.grid)
