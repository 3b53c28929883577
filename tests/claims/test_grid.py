"""Grids: many algorithms in several settings at equal tokens, by rules that are fixed before anything runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.claims.grid import BEGIN, END, Grid, GridRun, best_rate, figure, in_markdown, main, write
from experiments.headlines import study as headlines
from experiments.losses import study as losses

from gnomon.core.errors import ConfigError

SMALL = Grid(
    title="Two losses",
    base="tiny",
    arms={"grpo": ("algorithm=grpo",), "dr-grpo": ("algorithm=dr-grpo",)},
    cells={"synchronous": ()},
    tasks={"sums": ("rollouts_per_step=16", "algorithm.num_generations=4", "held_out.size=8", "evaluation.samples=2")},
    rates=(1e-3, 3e-3),
    tokens=100,
    seeds=(0, 1),
    pilots=(7,),
    room=(0.0, 1.0),
)
FOUND: dict[str, Any] = {
    "title": "Two losses",
    "tasks": ["sums"],
    "code": ["0123abcd"],
    "processors": ["A processor"],
    "rows": [
        {"cell": cell, "arm": arm, "rate": 1e-5, "seeds": 2, "score": score, "low": 0.1, "high": 0.9, "majority": None,
         "passed": 0.5, "wasted": 0.25, "seconds": 61.0}
        for cell in ("synchronous", "stale")
        for arm, score in (("grpo", 0.25), ("spo", 0.75))
    ],
    "pairs": [
        {"cell": cell, "first": "grpo", "second": "spo", "mean": 0.5, "corrected": p,
         "interval": {"low": 0.1, "high": 0.9}}
        for cell, p in (("synchronous", 0.01), ("stale", 0.2))
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "name"),
    [(grid, name) for grids in (losses.GRIDS, headlines.GRIDS) for name, grid in grids.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_run_of_a_grid_is_an_experiment(grid: Grid, name: str, tmp_path: Path):
    """Each algorithm in each setting, and each task, with the budget of tokens and the rate said over it."""
    first = next(iter(grid.tasks))
    runs = [GridRun(arm, cell, first, 3e-5, 0) for arm in grid.arms for cell in grid.cells]
    runs += [GridRun(next(iter(grid.arms)), next(iter(grid.cells)), task, 3e-5, 0) for task in grid.tasks]
    jobs = [grid.job(run, tmp_path) for run in runs]

    assert len({job.folder for job in jobs}) == len(set(runs))
    for job in jobs:
        experiment = job.experiment()
        assert (experiment.budget.tokens, experiment.learner.optimizer.learning_rate) == (grid.tokens, 3e-5)
    for task in grid.tasks:
        assert grid.baseline(task, tmp_path).experiment().steps == 1


def test_the_best_rate_is_the_lower_of_equals():
    """Means of 0.5, 0.5 and 0.25."""
    assert best_rate({1e-4: [0.5, 0.5], 1e-5: [0.25, 0.75], 3e-5: [0.0, 0.5]}) == 1e-5


def test_rates_are_chosen_on_other_seeds():
    """A seed that counts is no seed on which something was chosen."""
    with pytest.raises(ConfigError, match="seeds of their own"):
        replace(SMALL, pilots=(1,))


def test_the_page_is_written_between_its_marks(tmp_path: Path):
    """What is around them stays, another grid's table too; a pair that Holm's correction leaves is listed, no other."""
    begin, end = BEGIN.format("two"), END.format("two")
    (tmp_path / "README.md").write_text(f"# Page\n\n{begin}\nbefore\n{end}\n\nEnd.\n")
    write(FOUND, tmp_path, "two")
    said = (tmp_path / "README.md").read_text()

    assert said.startswith(f"# Page\n\n{begin}\n\nTasks: sums. Code: 0123abcd. Processors: A processor.")
    assert said.endswith(f"![Two losses](two.svg)\n\n{end}\n\nEnd.\n")
    assert "| stale | spo | 1e-05 | 2 | 0.750 | [0.100, 0.900] | - | 0.500 | 0.250 | 61 |" in said
    assert "1 of 2 pairs differ" in in_markdown(FOUND)
    assert "- synchronous: spo less grpo is +0.500 [0.100, 0.900] (p = 0.010)" in said
    assert "1 synchronous; 2 stale" in figure(FOUND)
    assert (tmp_path / "two.svg").read_text().startswith("<svg")

    write(FOUND, tmp_path, "three")
    both = (tmp_path / "README.md").read_text()
    assert both.startswith(said.rstrip("\n"))
    assert both.count("| stale | spo |") == 2
    write(FOUND, tmp_path, "two")
    write(FOUND, tmp_path, "three")
    assert (tmp_path / "README.md").read_text() == both


@pytest.mark.parametrize("arguments", [["los"], ["small", "--cells", "stale"]])
def test_unknown_names_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In one message, before anything is made."""
    assert main({"small": SMALL}, tmp_path, [*arguments, "--work", str(tmp_path / "work")]) == 2
    assert capsys.readouterr().err.startswith("unknown ")
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_grid_runs_to_its_page_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Baseline, rates, and runs that count on tiny; the same command trains nothing again and writes the same page.

    Of a run that has ended its line and its records stay, and none of its checkpoints. The lines alone make the page,
    with no run there, and a run whose line is of other settings is made again.
    """
    (tmp_path / "README.md").write_text("# Page\n")
    arguments = ["small", "--work", str(tmp_path / "work"), "--workers", "2"]
    assert main({"small": SMALL}, tmp_path, [*arguments, "--cost"]) == 0
    assert "synchronous: 4 runs for rates and 4 that count" in " ".join(capsys.readouterr().err.split())
    assert main({"small": SMALL}, tmp_path, arguments) == 0
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("metrics.jsonl")}
    page = (tmp_path / "README.md").read_text()
    assert main({"small": SMALL}, tmp_path, arguments) == 0
    capsys.readouterr()

    assert len(written) == 9
    lines = (tmp_path / "small.jsonl").read_text().splitlines()
    assert len(lines) == 9
    assert not [*(tmp_path / "work").rglob("*.safetensors")]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert (tmp_path / "README.md").read_text() == page
    assert "of 1 pairs differ" in page
    assert page.count("| synchronous |") == 2
    assert main({"small": SMALL}, tmp_path, [*arguments, "--cost"]) == 0
    assert "as 4 runs took" in " ".join(capsys.readouterr().err.split())

    elsewhere = ["small", "--work", str(tmp_path / "elsewhere"), "--write"]
    assert main({"small": SMALL}, tmp_path, elsewhere) == 0
    assert (tmp_path / "README.md").read_text() == page
    (tmp_path / "small.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1].replace('"asked": "', '"asked": "0'))
    assert main({"small": SMALL}, tmp_path, elsewhere) == 0
    assert "| 1 |" in (tmp_path / "README.md").read_text()
    assert main({"small": SMALL}, tmp_path, [*elsewhere[:-1], "--workers", "1"]) == 0
    assert len([*(tmp_path / "elsewhere").rglob("metrics.jsonl")]) == 1
