"""A report as tables: a case each, contenders side by side, for a terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.report import BenchMeasure, BenchReport, BenchResult

TITLES = {
    "roofline": "What the machine can do",
    "c1": "One training step, the fixed work",
    "engine": "Generation, every answer of the whole budget",
    "update": "One update on made-up rollouts",
    "learning": "The learner's half of a step: scoring, updates, critic, tracking",
    "growth": "How cost grows",
    "weights": "Weights on their way to engines, by seconds a GiB of model",
    "start": "From the command to the first token",
}
_NOISY = 0.25


@dataclass(frozen=True)
class Grid:
    """A table in words: ``heads`` and ``rows`` have one length. notes: below it, one a line."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def grids(report: BenchReport) -> list[Grid]:
    """Return a grid for each case that has results, in their order; growth has one for each number that grows."""
    found: list[Grid] = []
    for case in dict.fromkeys(result.case for result in report.results):
        results = report.of(case)
        if case == "growth":
            found += [_alone(result, f"{TITLES[case]}: {result.contender}") for result in results]
        elif case in ("roofline", "start"):
            found += [_alone(result, TITLES[case]) for result in results]
        else:
            found.append(_next_to(results, TITLES.get(case, case)))
    return found


def head(report: BenchReport) -> str:
    """Return one line on the machine and one on the settings."""
    machine, settings = report.machine, report.settings
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{' '.join(machine['instructions']) or 'no vector instructions known'}; {versions}\n"
        f"size {settings['size']}, {settings['threads']} threads, medians of {settings['repeats']} "
        f"(smallest to largest), precision {machine['precision']}, one allocator setting for everybody"
    )


def show(report: BenchReport, console: Console) -> None:
    """Print everything."""
    console.print(Text(head(report)))
    for grid in grids(report):
        table = Table(box=None, padding=(0, 1), title=Text(f"\n{grid.title}", style="bold"), title_justify="left")
        for number, name in enumerate(grid.heads):
            table.add_column(Text(name), justify="left" if number == 0 else "right", no_wrap=number == 0)
        for row in grid.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        for note in grid.notes:
            console.print(Text(f" {note}"))


def markdown(report: BenchReport) -> str:
    """Return the same as a Markdown page."""
    lines = ["# Benchmarks", "", *(f"{line}  " for line in head(report).splitlines()), ""]
    for grid in grids(report):
        lines += [f"## {grid.title}", "", _line(grid.heads), _line(["---"] + ["---:"] * (len(grid.heads) - 1))]
        lines += [_line(row) for row in grid.rows]
        lines += ["", *(f"- {note}" for note in grid.notes), *([""] if grid.notes else [])]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _alone(result: BenchResult, title: str) -> Grid:
    """Return one contender's measures, with spread."""
    rows = tuple((m.name, m.unit, number(m.median), _spread(m)) for m in result.measures)
    return Grid(title, ("", "unit", "median", "spread"), rows, _notes([result]))


def _next_to(results: Sequence[BenchResult], title: str) -> Grid:
    """Return our medians with spread, the limit and how far off it we are, and others with what they take of ours."""
    ours = next((result for result in results if result.contender == "gnomon"), BenchResult("", "gnomon"))
    others = [result for result in results if result is not ours and result.measures]
    heads = ["", "unit", "gnomon", "spread", "limit", "gnomon / limit"]
    for other in others:
        heads += [other.contender, f"{other.contender} / gnomon"]
    names = list(dict.fromkeys(m.name for result in (ours, *others) for m in result.measures))
    rows = [tuple(_cells(name, ours, others)) for name in names]
    return Grid(title, tuple(heads), tuple(rows), _notes(results))


def _cells(name: str, ours: BenchResult, others: Sequence[BenchResult]) -> list[str]:
    own = ours.find(name)
    units = [m.unit for result in (ours, *others) if (m := result.find(name)) is not None]
    cells = [name, units[0], *((number(own.median), _spread(own)) if own is not None else ("-", "-"))]
    limit = None if own is None else own.limit
    cells += ["-", "-"] if limit is None or own is None else [number(limit), _times(own.slowdown(limit))]
    for other in others:
        theirs = other.find(name)
        cells.append("-" if theirs is None else number(theirs.median))
        known = theirs is not None and own is not None and own.median > 0 and own.unit != "tokens"
        cells.append(_times(theirs.slowdown(own.median)) if known and theirs is not None and own is not None else "-")
    return cells


def _notes(results: Sequence[BenchResult]) -> tuple[str, ...]:
    notes = []
    for result in results:
        if result.error is not None:
            notes.append(f"{result.contender}: no result, {result.error}")
        if "stopped" in result.facts:
            notes.append(f"{result.contender}: {result.facts['stopped']}, the numbers are of the repeats until then")
        # A start is ended at its first token, and what its graders used then counts as others'.
        if result.case != "start" and result.facts.get("other_cores", 0.0) > _NOISY:
            busy = result.facts["other_cores"]
            notes.append(
                f"{result.contender}: other programs kept {busy:g} cores busy meanwhile; measure again in quiet"
            )
        for name, passes in result.facts.get("more passes", {}).items():
            if passes:
                notes.append(f"{name}: reads {', '.join(passes)}")
    return tuple(notes)


def number(value: float) -> str:
    """Return a number with three figures that count.

    >>> number(0.012345), number(3.14159), number(1234.5)
    ('0.0123', '3.14', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(measure: BenchMeasure) -> str:
    low, high = measure.spread
    return "-" if len(measure.values) == 1 else f"{number(low)} to {number(high)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"
