"""The plan against what was measured: the page has what the command prints, and it is as right as the page says."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.report import BenchMeasure, BenchResult
from experiments.capacity.check import calibrated, machine_of, place_of_work, processor, published

from gnomon.analysis.planner.hardware import PUBLISHED
from gnomon.analysis.planner.layout import Layout, answering, update_seconds

FOLDER = Path(__file__).resolve().parents[3] / "experiments" / "capacity"
WRITTEN = json.loads((FOLDER / "results.json").read_text())
ALONE = Layout(1, 1, micro=324, is_recomputed=False)


@pytest.fixture(scope="module")
def program() -> Any:
    """Return experiments/capacity/run.py as a module."""
    spec = importlib.util.spec_from_file_location("capacity_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_is_what_the_command_finds_now(program: Any):
    """Recorded benchmarks, published numbers and waits: no formula has changed without its page."""
    for name, rows in (("recorded", program.recorded()), ("published", published()), ("waits", program.waits())):
        assert [row.as_row() for row in rows] == WRITTEN[name]


def test_the_page_has_the_numbers_that_are_written():
    """Each error of recorded benchmarks and waits stands in the README, in its order, rounded to a percent."""
    page = (FOLDER / "README.md").read_text()
    place = 0

    for row in [*WRITTEN["recorded"][2:5], *WRITTEN["recorded"][6:], WRITTEN["recorded"][5], *WRITTEN["waits"]]:
        place = page.index(f"{row['error']:+.0%}", place) + 1


def test_formulas_are_as_right_as_the_page_says():
    """Updates to 12%, a whole step to 14%, its generation to 32%, waits to 17%; fitted numbers come out."""
    allowed = {"update: ": 0.12, "c1: total": 0.14, "c1: generate": 0.32, "c1: update": 0.12, "10 steps": 0.17}

    for row in [*WRITTEN["recorded"], *WRITTEN["waits"]]:
        limit = 1e-6 if row["fitted"] else next(v for name, v in allowed.items() if row["what"].startswith(name))
        assert abs(row["error"]) <= limit, row


def test_a_calibration_gives_back_what_it_was_made_from():
    """With efficiencies that are known, seconds of two decodings and an update lead back to them."""
    machine = processor(1e11, 3e10, 24e9)
    few, many, update = (
        place_of_work({"prompts": [50] * n, "lengths": [64] * 8 * n}, machine, PUBLISHED) for n in (1, 8, 4)
    )
    true = calibrated([(few, 3.0), (many, 15.0)], (update, 20.0))

    def seconds(place: Any) -> float:
        return answering(type(place)(place.shape, machine, place.job, true, 1), ALONE)

    assert (seconds(few), seconds(many)) == (pytest.approx(3.0), pytest.approx(15.0))
    assert update_seconds(type(update)(update.shape, machine, update.job, true, 1), ALONE)[0] == pytest.approx(20.0)
    assert true.decode_step > 0


def test_a_machine_is_its_roofline():
    """The best product of a training step's shapes in the precision asked for, and the best read."""
    measures = (
        BenchMeasure("fp32 training", "GFLOP/s", (100.0, 120.0)),
        BenchMeasure("bf16 training", "GFLOP/s", (360.0,)),
        BenchMeasure("memory read", "GB/s", (30.0, 31.0)),
    )
    roofline = BenchResult("roofline", "gnomon", measures)

    assert (machine_of(roofline).operations, machine_of(roofline).bandwidth) == (1.2e11, 3.1e10)
    assert machine_of(roofline, "bf16").operations == 3.6e11
