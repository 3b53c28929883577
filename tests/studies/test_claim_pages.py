"""What a claim's page says by itself: of a doubtful setting, of timing, and of remarks on other numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.studies.test_claims import TOY, clone

from gnomon.cli.main import main
from gnomon.records.console import Console
from gnomon.studies.arms import Arm, Runs
from gnomon.studies.claim_folders import Tested as Latest
from gnomon.studies.claim_pages import page
from gnomon.studies.claims import Claim, Level, Workplace
from gnomon.studies.measured import Measured


def test_nothing_that_holds_is_no_refutation_where_the_setting_is_in_doubt(tmp_path: Path):
    """b - a is surely not above 2, but whether a is above 1.05 is undecided: the page says open, and why."""
    check = 'checks=(Level("a is large", "a", "x", above=1.05),),'
    wanted = TOY.replace('Gain("b is more", "a", "b", "x", above=0.0), ', "")
    source = wanted.replace("expectations=", f"{check} expectations=").replace("above=2.0)),", "above=2.0),),")
    root = clone(tmp_path, source=source.replace("import Claim,", "import Claim, Level,"))
    assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work")]) == 0

    said = (root / "toy" / "README.md").read_text()
    assert (
        "**Verdict: open: nothing holds, but a check is undecided, so the setting may lack the effect's cause.**"
        in said
    )


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
    tested = Latest(Measured.of_row(row), "2026-01-01", "m", {}, 1.0)
    said = page("t", claim, tested)

    assert measured.inexact == ("1 of 2 runs: R2 lossless: timing decides which weights answer",)
    assert "**Not repeatable.** The same seeds give other numbers another time. 1 of 2 runs: R2 lossless" in said
    assert "Not repeatable" not in page("t", claim, replace(tested, measured=Measured()))


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
            "interval of it. It knows of no range: that of a rate or a fraction may reach beyond",
        ),
        ({0: 0.0, 1: 1.0}, True, "0 or 1. Shares of runs are judged by Wilson's interval, which does not."),
        ({0: 0.1, 1: 1.2}, False, "mean over 2 seeds and Student's 95% interval of it:"),
        ({0: 0.5}, False, "mean over 1 seeds and Student's 95% interval of it:"),
    ],
)
def test_a_page_says_that_intervals_of_shares_know_no_range(values: dict[int, float], is_rate: bool, said: str):
    """0.1 and 0.9 are 0.5 +- 12.7 x 0.4, far beyond 0 and 1; 1.2 is no share, and one seed has no interval."""
    claim = Claim("t", "c", "s", "p", lambda place: Measured(), (Level("more", "a", "x", above=0.0, is_rate=is_rate),))
    tested = Latest(Measured({"a": {"x": values}}), "2026-01-01", "m", {}, 1.0)

    assert said in page("t", claim, tested)
