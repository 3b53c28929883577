"""The comparison of `experiments/group_free`: its claim holds on a small scale, its figure shows its numbers."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from experiments.group_free.waiting import LogNormal, QueueSetting, simulate

FOLDER = Path(__file__).parents[2] / "experiments" / "group_free"


def module(name: str) -> ModuleType:
    """Return a program of the experiment, which is no package."""
    spec = importlib.util.spec_from_file_location(f"group_free_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_a_long_tail_makes_group_free_more_than_4_35_times_as_fast():
    """Batches of 32, one answer in a hundred ten times the median: dropping the slow is enough, and so is waiting 16
    steps for them; when all answers take about as long, neither is.
    """

    def speed_up(sigma: float, **settings: object) -> float:
        latency = LogNormal(sigma)
        together = simulate(QueueSetting(32, 8), latency, 15)
        return (
            simulate(QueueSetting(32, 1, 2, **settings), latency, 15, 5).rollouts_per_second
            / together.rollouts_per_second
        )

    assert speed_up(1.0, bound=16) > 4.35
    assert speed_up(1.0, bound=1, stragglers="drop") > 4.35
    assert speed_up(0.1, bound=16) < 4.35


def test_what_is_on_record_says_what_the_appendix_says():
    """At sigma 1 in simulation, on real processes and on vLLM: the tables' own numbers."""
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    measured = json.loads((FOLDER / "measured.json").read_text())
    said = (FOLDER / "appendix.md").read_text()

    for name, found in simulated["tail"]["1.0"].items():
        assert f"| {name} | {found['speed_up']:.2f} |" in said
    for name, found in measured["found"].items():
        assert (
            f"| {name} | {found['seconds']:.2f} | {found['foretold_seconds']:.2f} | {found['speed_up']:.2f} |" in said
        )
    for name, found in json.loads((FOLDER / "vllm.json").read_text())["found"].items():
        assert f"| {name} | {found['speed_up']:.2f} ({found['lowest']:.2f} to {found['highest']:.2f}) |" in said


def test_the_figure_is_what_the_numbers_draw():
    """The committed SVG is the one that the committed numbers give, is XML, and has a line a contender and panel."""
    drawn = module("draw").figure(json.loads((FOLDER / "simulated.json").read_text())) + "\n"

    assert (FOLDER / "figure.svg").read_text() == drawn
    lines = [e for e in ElementTree.fromstring(drawn).iter() if e.get("stroke-width") == "2"]
    assert len(lines) == 3 * 4


def test_tools_that_sleep_are_real_and_foretold():
    """Four answers of 0.05 s each through processes take at least what the virtual clock says, and not much more."""
    program = module("run")
    setting, latency = QueueSetting(4, 2), LogNormal(0.5, median=0.05)
    real = asyncio.run(program.measure(setting, program.SleepingTools(latency), 3))
    foretold = simulate(setting, latency, 3)

    assert real.trained == foretold.trained == 12
    assert foretold.seconds <= real.seconds < foretold.seconds + 5
    assert real.latency_mean == pytest.approx(foretold.latency_mean)
