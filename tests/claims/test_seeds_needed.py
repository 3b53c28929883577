"""How many seeds would settle what is undecided: arithmetic, pages and results."""

import json
import math
from pathlib import Path

import pytest
from experiments.claims.definition import Gain, Level
from experiments.claims.estimates import Estimate, MeasuredValues, estimate, student_t
from experiments.claims.seeds_needed import rates_to_settle, seeds_to_settle
from hypothesis import given
from hypothesis import strategies as st
from tests.claims.test_claim import TOY, clone

from gnomon.analysis.compare.run import ComparisonJob
from gnomon.cli.main import main
from gnomon.config.reading import read


@pytest.mark.parametrize(("freedom", "t"), [(2, 4.303), (30, 2.042), (40, 2.0211), (59, 2.0010), (120, 1.9799)])
def test_students_t_is_that_of_tables(freedom: int, t: float):
    """4.303, 2.042, 2.021, 2.001 and 1.980 stand in every table of Student's distribution."""
    assert student_t(freedom) == pytest.approx(t, abs=1e-4)


@pytest.mark.parametrize(
    ("above", "below", "said"),
    [
        # 0, 1, 2, 3: mean 1.5, s = 1.291. t(n - 1) s / sqrt(n) is 0.999 at n = 9 and 1.08 at 8; the way to 0.5 is 1.
        (0.5, math.inf, "about 9 seeds"),
        # 2.5 is as far above.
        (-math.inf, 2.5, "about 9 seeds"),
        # Inside of both, the nearer bound counts: 2 is 0.5 away; 0.504 at n = 28, 0.494 at 29.
        (0.5, 2.0, "about 29 seeds"),
        # Outside, the bound that was crossed counts and not the other one.
        (2.5, 2.6, "about 9 seeds"),
        (1.5, math.inf, "over 1,000 seeds"),
    ],
)
def test_the_nearest_bound_says_how_many_seeds(above: float, below: float, said: str):
    """The half-width falls with the root of n, and with Student's t."""
    assert seeds_to_settle(estimate([0.0, 1.0, 2.0, 3.0]), above, below) == said


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=8).filter(lambda values: max(values) - min(values) > 0.01),
    st.floats(-2, 2),
)
def test_so_many_seeds_of_the_same_spread_decide(values: list[float], bound: float):
    """At the number that is said the interval reaches the bound no more; with one seed less it still did."""
    found = estimate(values)
    said = seeds_to_settle(found, bound, math.inf)
    if not found.low < bound < found.high or not said.startswith("about") or int(said.split()[1]) > 100:
        return

    scale = (found.high - found.low) / 2 * math.sqrt(len(values)) / student_t(len(values) - 1)
    count, way = int(said.split()[1]), abs(found.mean - bound)
    assert student_t(count - 1) * scale / math.sqrt(count) <= way * (1 + 1e-9)
    assert count <= len(values) + 1 or student_t(count - 2) * scale / math.sqrt(count - 1) > way * (1 - 1e-9)


def test_shares_of_seeds_are_asked_of_wilson():
    """None of three: Wilson's interval ends at 3.84 / (n + 3.84), which is 0.49 at four seeds and 0.56 at three."""
    found = MeasuredValues({"a": {"crashed": {0: 0.0, 1: 0.0, 2: 0.0}}})

    assert rates_to_settle(found.rate("a", "crashed"), -math.inf, 0.5) == "about 4 seeds"
    assert Level("few", "a", "crashed", below=0.5, is_rate=True)(found).settled_by == "about 4 seeds"


def test_only_what_is_undecided_needs_seeds():
    """What holds, fails or was not run says nothing, nor does one seed, whose spread nobody knows."""
    found = MeasuredValues({"a": {"x": {0: 1.0, 1: 1.1}}, "b": {"x": {0: 2.0, 1: 2.1}}, "once": {"x": {0: 1.0}}})
    outcomes = [Gain("", "a", "b", "x", above=bound)(found) for bound in (0.0, 3.0)]
    outcomes += [Level("", "once", "x", above=0.5)(found), Level("", "nobody", "x", above=0.5)(found)]

    assert [outcome.word for outcome in outcomes] == ["holds", "fails", "undecided", "not run"]
    assert not any(outcome.settled_by for outcome in outcomes)
    assert seeds_to_settle(Estimate(0.0, -math.inf, math.inf, 1), 1.0, math.inf) == ""


def test_page_and_results_say_how_many_seeds(tmp_path: Path):
    """a is 1.0 and 1.1: whether it is above 1.0 takes more seeds, and page and results say about how many."""
    source = TOY.replace('Gain("by two", "a", "b", "x", above=2.0)', 'Level("a lot", "a", "x", above=1.0)')
    root = clone(tmp_path, source=source.replace("import Claim,", "import Claim, Level,"))
    assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work")]) == 0

    page = (root / "toy" / "appendix.md").read_text()
    said = json.loads((root / "toy" / "results.json").read_text())["expectations"]
    # s = 0.0707; t(n - 1) s / sqrt(n) is 0.0493 at n = 11 and 0.0506 at 10, the way is 0.05.
    assert "| undecided: about 11 seeds |" in page
    assert "*Undecided: about N seeds* says with how many" in page
    assert [row.get("settled_by") for row in said] == [None, "about 11 seeds"]


def test_who_trains_in_his_own_process_charges_the_run(tmp_path: Path):
    """Two sessions of 1.5 and 2.25 processor seconds are 3.75."""
    job = ComparisonJob("one", read("tiny"), (), tmp_path / "run")
    job.charge(1.5)
    job.charge(2.25)

    assert job.cpu_seconds() == 3.75
