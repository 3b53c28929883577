"""What a claim's page says by itself: of a doubtful setting, of timing, and of remarks on other numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.claims.arms import Arm, Number, Runs
from experiments.claims.definition import Claim, Level, Workplace, ratio
from experiments.claims.estimates import MeasuredValues, NotMeasured
from experiments.claims.folders import Tested as Latest
from experiments.claims.pages import appendix
from tests.claims.test_claim import TOY, clone

from gnomon.cli.main import main
from gnomon.records.console import Console
from gnomon.records.reading import RunRecord


def test_nothing_that_holds_is_no_refutation_where_the_setting_is_in_doubt(tmp_path: Path):
    """b - a is surely not above 2, but whether a is above 1.05 is undecided: so is the claim, and the page says why."""
    check = 'checks=(Level("a is large", "a", "x", above=1.05),),'
    wanted = TOY.replace('Gain("b is more", "a", "b", "x", above=0.0), ', "")
    source = wanted.replace("expectations=", f"{check} expectations=").replace("above=2.0)),", "above=2.0),),")
    root = clone(tmp_path, source=source.replace("import Claim,", "import Claim, Level,"))
    assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work")]) == 0

    said = (root / "toy" / "README.md").read_text()
    assert "**Verdict: undecided**" in said
    assert "or an undecided check leaves open whether the cause is there" in said
    assert "b minus a 1.000 [1.000, 1.000] | fails |" in said


def test_runs_that_timing_decides_are_named_on_the_page(tmp_path: Path):
    """Of two runs one overlaps generation and training: page and results say it, from the cards alone."""
    cards = {"exact": "R0 exact: bit for bit", "timed": "R2 lossless: timing decides which weights answer"}
    arms = [Arm(name, {"steps": number}) for number, name in enumerate(cards)]
    runs = Runs(lambda folder, seed: arms, numbers={}, curves={}, seeds=(0,), train=lambda jobs, place: None)
    with Console() as console:
        place = Workplace(tmp_path, tmp_path, console)
        for name, record in runs.records(tmp_path, 0).items():
            record.path.mkdir(parents=True)
            record.files.card.write_text(json.dumps({"reproducibility": cards[name]}))
        measured = runs(place)
    claim = Claim("t", "c", "s", "p", runs, (Level("more", "a", "x", above=0.0),))
    row = json.loads(json.dumps(measured.as_row()))
    tested = Latest(MeasuredValues.of_row(row), "2026-01-01", "m", {}, 1.0)
    said = appendix(claim, tested)

    assert measured.inexact == ("1 of 2 runs: R2 lossless: timing decides which weights answer",)
    assert "**Not repeatable.** The same seeds give other numbers another time. 1 of 2 runs: R2 lossless" in said
    assert "Not repeatable" not in appendix(claim, replace(tested, measured=MeasuredValues()))


def test_remarks_on_other_numbers_are_marked_until_they_are_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Remarks stand on 2.0; measured again b is 3.0: page and command warn, again and again, until the text changes."""
    source = TOY.replace("expectations=", 'remarks="b is two.", expectations=')
    other = source.replace("0: 2.0, 1: 2.1", "0: 3.0, 1: 3.1")
    results, warnings = "", []

    def look(written: str, *more: str) -> None:
        """Ask in a folder of its own, since a file is executed once in a process, and keep what was found."""
        nonlocal results
        root = clone(tmp_path / str(len(warnings)), source=written)
        if results:
            (root / "toy" / "results.json").write_text(results)
        assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work"), *more]) == 0
        results, shown = ((root / "toy" / name).read_text() for name in ("results.json", "README.md"))
        said = "written for other numbers"
        warnings.append((said in shown, said in capsys.readouterr().out))

    look(source)
    look(source)
    # As a folder from before: nothing stands beside the numbers.
    results = json.dumps({key: value for key, value in json.loads(results).items() if key != "remarks"})
    look(other)
    look(other, "--write")
    look(other)
    look(other.replace("b is two", "b is three"), "--write")
    look(other.replace("b is two", "b is three"))

    assert warnings == [(False, False)] * 2 + [(True, True)] * 3 + [(False, False)] * 2


@pytest.mark.parametrize(
    ("values", "is_rate", "said"),
    [
        (
            {0: 0.1, 1: 0.9},
            False,
            "interval of it. The t interval is not truncated to [0, 1]: that of a rate or a fraction may reach beyond",
        ),
        ({0: 0.0, 1: 1.0}, True, "0 or 1. Shares of runs are judged by Wilson's interval, which does not."),
        ({0: 0.1, 1: 1.2}, False, "mean over 2 seeds and Student's 95% interval of it:"),
        ({0: 0.5}, False, "mean over 1 seeds and Student's 95% interval of it:"),
    ],
)
def test_a_page_says_that_intervals_of_shares_know_no_range(values: dict[int, float], is_rate: bool, said: str):
    """0.1 and 0.9 are 0.5 +- 12.7 x 0.4, far beyond 0 and 1; 1.2 is no share, and one seed has no interval."""
    claim = Claim(
        "t", "c", "s", "p", lambda place: MeasuredValues(), (Level("more", "a", "x", above=0.0, is_rate=is_rate),)
    )
    tested = Latest(MeasuredValues({"a": {"x": values}}), "2026-01-01", "m", {}, 1.0)

    assert said in appendix(claim, tested)


def test_a_page_names_the_code_that_made_its_runs(tmp_path: Path):
    """One run by a commit, gone on with by other code, one outside of any repository; old results say nothing of it."""
    begun = {"code": {"gnomon": {"commit": "a" * 40, "dirty": False}}}
    went_on = {"resumed": [{"code": {"gnomon": {"commit": "b" * 40, "dirty": True}}}]}
    cards = [begun | went_on, begun, {"code": {"gnomon": None}}]
    runs, measured = looked_at(tmp_path, cards, {})
    claim = Claim("t", "c", "s", "p", runs, (Level("more", "a", "x", above=0.0),))
    row = json.loads(json.dumps(measured.as_row()))
    tested = Latest(MeasuredValues.of_row(row), "2026-01-01", "m", {"gnomon": "0.1.0", "torch": "2"}, 1.0)
    del row["code"]
    before = replace(tested, measured=MeasuredValues.of_row(row))

    assert measured.code == ("aaaaaaaaaa", "bbbbbbbbbb and changes", "no commit")
    assert "gnomon 0.1.0 (code of aaaaaaaaaa, bbbbbbbbbb and changes, no commit), torch 2." in appendix(claim, tested)
    assert "gnomon 0.1.0 (of which commit is not recorded), torch 2." in appendix(claim, before)


def test_cells_with_fewer_seeds_are_named_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The second seed does not give x: page and console name it, with the reason; y, which no seed has, is no gap."""

    def x(record: RunRecord) -> float:
        if record.card()["seed"] == 1:
            raise NotMeasured("the step changed nothing")
        return 1.0

    def y(record: RunRecord) -> float:
        raise NotMeasured("no step has it")

    runs, measured = looked_at(tmp_path, [{"seed": 0}, {"seed": 1}], {"x": x, "y": y, "z": lambda record: 2.0})
    claim = Claim("t", "c", "s", "p", runs, (Level("more", "arm", "x", above=0.0),))
    said = appendix(claim, Latest(measured, "2026-01-01", "m", {}, 1.0))
    warned = " ".join(capsys.readouterr().err.split())

    assert "x of arm: seed 1." in said
    assert "y of arm" not in said
    assert "a cell has fewer seeds: x of arm, seed 1: the step changed nothing" in warned
    assert "no step has it" not in warned


def test_a_ratio_leaves_out_no_seed_that_would_divide_by_zero():
    """Ratios of 4 and of 4 / 0: without the second seed the mean would be 4, which is too little."""
    measured = MeasuredValues({"a": {"cost": {0: 1.0, 1: 0.0}}, "b": {"cost": {0: 4.0, 1: 4.0}}, "none": {"cost": {}}})
    expected = ratio("b costs more", "a", "b", "cost", above=5.0)
    claim = Claim("t", "c", "s", "p", lambda place: measured, (expected,))

    with pytest.raises(NotMeasured, match="cost of a is 0 for seed 1, so there is no ratio"):
        measured.ratio("a", "b", "cost")
    assert expected(measured).word == "not run"
    said = appendix(claim, Latest(measured, "2026-01-01", "m", {}, 1.0))
    assert "| b | 4.000 [4.000, 4.000] |" in said
    assert "| none |" not in said


def looked_at(folder: Path, cards: list[dict[str, Any]], numbers: dict[str, Number]) -> tuple[Runs, MeasuredValues]:
    """Return what is measured of one run a card, each a seed of one arm that came as far as its first step."""
    seeds = tuple(range(len(cards)))
    runs = Runs(lambda where, seed: [Arm("arm", {})], numbers, {}, seeds, train=lambda jobs, place: None)
    with Console() as console:
        for seed, card in zip(seeds, cards, strict=True):
            record = runs.records(folder, seed)["arm"]
            record.path.mkdir(parents=True)
            record.files.card.write_text(json.dumps(card))
            record.files.metrics.write_text('{"step": 1}\n')
        return replace(runs, is_partial=True), replace(runs, is_partial=True)(Workplace(folder, folder, console))
