"""Claims: what several seeds measured, the rule of the verdict, folders, pages, and the verb."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from experiments.claims.arms import ArmLine, Curve, Lines
from experiments.claims.definition import Claim, ClaimOutcome, Derived, Expectation, Gain, Level, judge, ratio
from experiments.claims.estimates import MeasuredValues, NotMeasured, estimate
from experiments.claims.folders import ClaimFolder, chosen, claim_folders, experiments_folder
from experiments.claims.pages import TABLE, appendix, page, table
from hypothesis import given
from hypothesis import strategies as st

from gnomon.analysis.compare.run import ComparisonJob
from gnomon.cli.main import main
from gnomon.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
FOUND = MeasuredValues(
    {
        "a": {"score": {0: 0.1, 1: 0.2, 2: 0.3}, "cost": {0: 10.0, 1: 10.0, 2: 10.0}},
        "b": {"score": {0: 0.5, 1: 0.6, 2: 0.7}, "cost": {0: 40.0, 1: 41.0, 2: 39.0}},
        "once": {"score": {0: 0.9}},
    },
    {"a": {"reward": {0: [(1.0, 0.1), (2.0, 0.3)], 1: [(1.0, 0.3), (2.0, 0.5), (3.0, 0.9)]}}},
)
TOY = '''
"""A toy."""

from experiments.claims.definition import Claim, Gain, Workplace
from gnomon.analysis.compare.run import ComparisonJob
from experiments.claims.estimates import MeasuredValues


def counted(place: Workplace) -> MeasuredValues:
    return MeasuredValues({"a": {"x": {0: 1.0, 1: 1.1}}, "b": {"x": {0: 2.0, 1: 2.1}}})


CLAIM = Claim(
    title="A toy", claim="b is more than a.", source="ours", protocol="count", measure=counted, scale="tiny",
    expectations=(Gain("b is more", "a", "b", "x", above=0.0), Gain("by two", "a", "b", "x", above=2.0)),
)
'''
RUNS = '''
"""A toy that trains."""

from gnomon.config.reading import read
from experiments.claims.arms import Arm, Curve, Runs, last, trace
from experiments.claims.definition import Claim, Level

SMALL = ("steps=2", "rollouts_per_step=16", "algorithm.num_generations=4", "evaluation.before=false")

CLAIM = Claim(
    title="Two steps", claim="Training gives rewards.", source="ours", protocol="train",
    measure=Runs(
        lambda folder, seed: [Arm("GRPO", read("tiny"), SMALL),
                              Arm("refused", read("tiny"), (*SMALL, "grading.deadline_seconds=1e-9"))],
        numbers={"reward": last("rollout/reward_mean", 2), "nothing": last("no/such_metric", 2)},
        curves={"reward": trace("rollout/reward_mean")},
        seeds=(0, 1),
    ),
    expectations=(
        Level("a share", "GRPO", "reward", above=-1e9, below=1e9), Level("more", "refused", "reward", above=2.0),
    ),
    figure=Curve("reward", "Reward", "reward"),
)
'''


def clone(folder: Path, name: str = "toy", source: str = TOY) -> Path:
    """Make experiments beside documents, and return the folder of experiments."""
    (folder / "docs").mkdir(parents=True)
    (folder / "experiments" / name).mkdir(parents=True)
    (folder / "experiments" / name / "claim.py").write_text(source)
    return folder / "experiments"


def test_three_seeds_have_students_interval():
    """1, 2, 3: mean 2, s = 1, t = 4.303 for two degrees of freedom: 2 ± 4.303 / sqrt(3) = 2 ± 2.4843."""
    found = estimate([1.0, 2.0, 3.0])

    assert (found.mean, found.low, found.high) == pytest.approx((2.0, -0.48434, 4.48434), abs=1e-4)


def test_one_seed_says_nothing_of_the_next():
    """The interval of one value has no end, and that of none does not exist."""
    assert (estimate([1.0]).low, estimate([1.0]).high) == (-math.inf, math.inf)
    with pytest.raises(NotMeasured, match="no run gave it"):
        estimate([])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40), st.floats(-1e3, 1e3))
def test_an_interval_moves_with_its_values(values: list[float], shift: float):
    """Adding a constant to every seed moves the interval by it and changes no width."""
    one, other = estimate(values), estimate([v + shift for v in values])

    assert other.mean - one.mean == pytest.approx(shift, abs=1e-6)
    assert other.high - other.low == pytest.approx(one.high - one.low, rel=1e-6, abs=1e-6)


def test_a_gain_is_paired_by_seed():
    """0.5 - 0.1, 0.6 - 0.2 and 0.7 - 0.3 are all 0.4: seeds that move together leave no doubt of the difference."""
    gain = FOUND.gain("a", "b", "score")

    assert (gain.mean, gain.high - gain.low) == pytest.approx((0.4, 0.0))
    assert FOUND.gain("a", "once", "score").seeds == 1


def test_a_ratio_is_paired_by_seed():
    """40/10, 41/10 and 39/10 have the mean 4."""
    assert FOUND.ratio("a", "b", "cost").mean == pytest.approx(4.0)


def test_a_curve_is_where_all_seeds_are():
    """Seed 0 ends at 2, so nothing is said of 3."""
    assert FOUND.curve("a", "reward") == [(1.0, (0.1, 0.3)), (2.0, (0.3, 0.5))]
    assert FOUND.curve("b", "reward") == []


def test_what_was_measured_comes_back_from_json():
    """Numbers, curves and failures, with seeds as numbers again."""
    row = json.loads(json.dumps(MeasuredValues(FOUND.numbers, FOUND.curves, ("b, seed 1: ended",)).as_row()))

    assert MeasuredValues.of_row(row) == MeasuredValues(FOUND.numbers, FOUND.curves, ("b, seed 1: ended",))
    with pytest.raises(ConfigError, match="these are no measured numbers"):
        MeasuredValues.of_row({"numbers": {"a": 3}, "curves": {}, "failures": []})


@pytest.mark.parametrize(
    ("expectation", "word"),
    [
        (Level("", "a", "score", above=-0.1), "holds"),  # 0.2 ± 0.248: from -0.048
        (Level("", "a", "score", above=0.0), "undecided"),
        (Level("", "a", "score", above=0.5), "fails"),
        (Level("", "a", "score", below=-0.1), "fails"),
        (Level("", "a", "score", above=-0.1, below=0.5), "holds"),
        (Level("", "a", "speed", above=0.0), "not run"),
        (Level("", "c", "score", above=0.0), "not run"),
        (Level("", "once", "score", above=0.0), "undecided"),  # one seed
        (Gain("", "a", "b", "score", above=0.0), "holds"),
        (Gain("", "b", "a", "score", above=0.0), "fails"),
        (ratio("", "a", "b", "cost", above=3.0), "holds"),  # 4 ± 0.248
        (ratio("", "a", "b", "cost", above=4.0), "undecided"),
        (Derived("", lambda m: m.gain("a", "b", "score"), above=0.0), "holds"),
        (Derived("", lambda m: m.gain("a", "none", "score"), above=0.0), "not run"),
    ],
)
def test_an_expectation_holds_fails_or_is_undecided(expectation: Expectation, word: str):
    """It holds or fails when the whole interval says so."""
    assert expectation(FOUND).word == word


def said(word: Any) -> Expectation:
    """Return an expectation of this outcome."""
    bounds = {"holds": (0.0, 1.0), "fails": (1.0, 2.0), "undecided": (0.2, 2.0), "not run": (0.0, 1.0)}[word]
    return Level(word, "c" if word == "not run" else "a", "score", *bounds)


@pytest.mark.parametrize(
    ("headline", "verdict"),
    [
        (["holds"], "supported"),
        (["fails"], "contradicted"),
        (["undecided"], "undecided"),
        (["not run"], "not run"),
        (["holds", "holds"], "supported"),
        (["holds", "fails"], "contradicted"),
        (["undecided", "fails"], "contradicted"),
        (["holds", "undecided"], "undecided"),
        (["holds", "not run"], "undecided"),
    ],
)
@pytest.mark.parametrize("others", [[], ["fails", "fails"], ["holds", "undecided"]])
def test_the_headline_alone_makes_the_verdict(headline: list[str], verdict: str, others: list[str]):
    """All of its parts hold: supported. One fails: contradicted. The other expectations change nothing."""
    surely = MeasuredValues({"a": {"score": {0: 0.5, 1: 0.5001, 2: 0.4999}}})
    doubtful = MeasuredValues({"a": {"score": {0: 0.1, 1: 0.2, 2: 0.3}}})
    words = [*others, *headline]
    outcomes = [said(word)(doubtful if word == "undecided" else surely).word for word in words]
    places = range(len(others), len(words))
    found = judge([_Fixed(word) for word in words], surely, headline=places)

    assert outcomes == words
    assert found.word == verdict
    assert found.count("fails") == others.count("fails")
    assert found.outcomes[found.deciding].word == next(
        (word for word in ("fails", "undecided", "not run") if word in headline), "holds"
    )


@pytest.mark.parametrize(
    ("checks", "headline", "verdict"),
    [
        (["holds"], "holds", "supported"),
        (["holds", "holds"], "fails", "contradicted"),
        (["fails"], "holds", "cause absent"),
        (["holds", "fails"], "fails", "cause absent"),
        (["fails"], "not run", "cause absent"),
        (["undecided"], "holds", "supported"),
        (["not run"], "holds", "supported"),
        (["undecided"], "fails", "undecided"),
        (["holds", "not run"], "fails", "undecided"),
    ],
)
def test_a_check_that_fails_leaves_the_cause_absent(checks: list[str], headline: str, verdict: str):
    """Without the cause nothing can be concluded; in doubt, an effect that is missing refutes nothing."""
    found = judge([_Fixed(headline)], FOUND, [_Fixed(word) for word in checks])

    assert found.word == verdict
    assert ([o.word for o in found.outcomes], [o.word for o in found.checks]) == ([headline], checks)


class _Fixed:
    """An expectation whose outcome is known."""

    says = "so"

    def __init__(self, word: Any) -> None:
        self.word = word

    def __call__(self, measured: MeasuredValues) -> ClaimOutcome:
        return ClaimOutcome(self.word, "")


def test_a_picture_leaves_out_what_was_not_run():
    """Of two lines one has points: its name and its band are there, the other is not."""
    drawn = Lines("Reward", "r", (ArmLine("a", "reward", "first"), ArmLine("b", "reward", "second")))(FOUND)

    assert ">first<" in drawn or "first" in drawn
    assert "second" not in drawn
    assert Curve("reward", "Reward", "r")(FOUND).startswith("<svg")


def test_a_claim_is_measured_judged_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """b - a is 1 for both seeds: more than 0, the headline, not more than 2; results, page and table say so alike."""
    root = clone(tmp_path)
    assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work")]) == 0
    printed = capsys.readouterr().out
    results = json.loads((root / "toy" / "results.json").read_text())
    readme = (root / "toy" / "README.md").read_text()

    assert "verdict: supported" in printed
    assert results["verdict"] == "supported"
    assert [e["outcome"] for e in results["expectations"]] == ["holds", "fails"]
    assert results["numbers"]["b"]["x"] == {"0": 2.0, "1": 2.1}
    assert "**Verdict: supported**" in readme
    assert "Of the other expectations: 1 fail." in readme
    assert "| b is more | b minus a 1.000 [1.000, 1.000] | holds |" in readme
    row = "(`toy`) | supported | b is more | b minus a 1.000 [1.000, 1.000] | tiny, 2 seeds | 0, 1, 0 |"
    assert row in (tmp_path / TABLE).read_text()
    appendix = (root / "toy" / "appendix.md").read_text()
    assert "| by two | b minus a 1.000 [1.000, 1.000] | fails |" in appendix


def test_a_page_tells_checks_from_what_is_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A check that b is above 9 fails, so the cause is absent, and page, table and command say so."""
    check = 'checks=(Level("b is large", "b", "x", above=9.0), Level("a is there", "a", "x", above=0.0)),'
    source = TOY.replace("expectations=", check + " expectations=").replace("import Claim,", "import Claim, Level,")
    root = clone(tmp_path, source=source)
    assert main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work")]) == 0
    printed = capsys.readouterr().out
    results = json.loads((root / "toy" / "results.json").read_text())
    readme = (root / "toy" / "README.md").read_text()

    assert "fails     check: b is large" in printed
    assert (results["verdict"], [c["outcome"] for c in results["checks"]]) == ("cause absent", ["fails", "holds"])
    assert "**Verdict: cause absent**: a check fails, so the setting does not show the effect's cause." in readme
    appendix = (root / "toy" / "appendix.md").read_text()
    assert "| check of the setting, not of the claim | measured | |" in appendix
    assert "| 0, 1, 0 | 1 of 2 |" in (tmp_path / TABLE).read_text()


def test_what_runs_cost_is_kept(tmp_path: Path):
    """Two processes worked on one run, for 60 and 30 seconds; who wrote nothing down leaves it unknown."""
    job = ComparisonJob("grpo", {}, (), tmp_path / "grpo")
    assert job.cpu_seconds() is None
    job.file_with(".cpu").write_text("60.00\n30.00\n")

    assert job.cpu_seconds() == 90.0
    assert MeasuredValues(cpu_seconds=90.0).merged(MeasuredValues(cpu_seconds=1.0)).cpu_seconds == 91.0
    assert MeasuredValues(cpu_seconds=90.0).merged(MeasuredValues(cpu_seconds=None)).cpu_seconds is None


def test_the_list_shows_last_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What was never run is not run; --json is one object."""
    root = clone(tmp_path)
    assert main(["reproduce", "--list", "--experiments", str(root)]) == 0
    plain = capsys.readouterr().out
    main(["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work"), "--json"])
    result = json.loads(capsys.readouterr().out)
    main(["reproduce", "--list", "--json", "--experiments", str(root)])
    (listed,) = json.loads(capsys.readouterr().out)["claims"]

    assert plain.split() == ["toy", "not", "run", "A", "toy"]
    assert (result["claim"], result["verdict"]) == ("toy", "supported")
    assert (listed["claim"], listed["verdict"]) == ("toy", "supported")


def test_a_claim_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The list says of it what is wrong, and shows the rest."""
    root = clone(tmp_path)
    (root / "broken").mkdir()
    (root / "broken" / "claim.py").write_text("1 / 0")
    assert main(["reproduce", "--list", "--experiments", str(root)]) == 0
    first, second = capsys.readouterr().out.splitlines()

    assert first.startswith("broken  unreadable")
    assert "ZeroDivisionError" in first
    assert second.split() == ["toy", "not", "run", "A", "toy"]


def test_pages_are_written_again_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """--write makes the page of what was never run, too: it says so."""
    root = clone(tmp_path)
    assert main(["reproduce", "toy", "--write", "--experiments", str(root)]) == 0

    assert "Not run yet." in (root / "toy" / "README.md").read_text()
    assert not (root / "toy" / "results.json").exists()
    assert "verdict: not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reproduce", "toi"], "unknown claim 'toi'; did you mean 'toy'"),
        (["reproduce", "toy", "--workers", "0"], "--workers must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_one_message(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Exit code 2, before anything is run."""
    assert main([*arguments, "--experiments", str(clone(tmp_path))]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["reproduce"], ["reproduce", "toy", "--list"]])
def test_a_claim_or_the_list_must_be_asked_for(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    """Neither, and both, show the usage."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert "name a claim, or ask for --list" in capsys.readouterr().err


def test_without_a_clone_there_is_nothing_to_reproduce(tmp_path: Path):
    """The folder that was looked for is named, and what to type."""
    with pytest.raises(ConfigError, match=r"nowhere is no folder; clone the repository .* --experiments DIR"):
        experiments_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", r"says no CLAIM = Claim"),
        ("1 / 0", "cannot be run: ZeroDivisionError"),
        (TOY.replace('scale="tiny"', "headline=(2,)"), r"headline = \(2,\) names no expectation of 2"),
    ],
)
def test_a_file_that_is_no_claim_is_named(source: str, message: str, tmp_path: Path):
    """Whoever writes one is told what is wrong with it."""
    with pytest.raises(ConfigError, match=message):
        chosen("toy", clone(tmp_path, source=source)).claim()


def test_damaged_results_are_named(tmp_path: Path):
    """A torn file is no reason for a traceback."""
    root = clone(tmp_path)
    (root / "toy" / "results.json").write_text('{"date": ')

    with pytest.raises(ConfigError, match=r"results\.json cannot be read .* remove it and reproduce the claim again"):
        ClaimFolder(root / "toy").tested()


@pytest.mark.slow
def test_a_claim_trains_and_measures(tmp_path: Path):
    """Two arms with two seeds: what finished is measured, what failed is said, and a second time nothing is trained."""
    root = clone(tmp_path, source=RUNS)
    arguments = ["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work"), "--workers", "1"]
    assert main(arguments) == 0
    results = json.loads((root / "toy" / "results.json").read_text())
    written = sorted((tmp_path / "work").rglob("metrics.jsonl"))
    before = [path.stat().st_mtime_ns for path in written if "grpo" in str(path)]
    assert main(arguments) == 0

    assert set(results["numbers"]["GRPO"]["reward"]) == {"0", "1"}
    assert [x for x, _ in results["curves"]["GRPO"]["reward"]["0"]] == [1, 2]
    assert "nothing" not in results["numbers"]["GRPO"] or results["numbers"]["GRPO"]["nothing"] == {}
    assert len(results["failures"]) == 2
    assert results["failures"][0].startswith("refused, seed 0: ended after")
    assert 0 < results["cpu_minutes"] < 5
    assert "CPU minutes there." in (root / "toy" / "appendix.md").read_text()
    assert [e["outcome"] for e in results["expectations"]] == ["holds", "not run"]
    assert len(before) == 2
    assert [path.stat().st_mtime_ns for path in written if "grpo" in str(path)] == before
    assert (root / "toy" / "figure.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("name", claim_folders(EXPERIMENTS))
def test_every_claim_says_what_its_results_say(name: str):
    """Page, figure and verdict of each claim here are those of its results: `gnomon reproduce NAME --write`."""
    folder = ClaimFolder(EXPERIMENTS / name)
    claim, tested = folder.claim(), folder.tested()
    recorded = json.loads((folder.path / "results.json").read_text()) if tested is not None else folder.row(None)

    assert recorded["verdict"] == folder.verdict().word
    assert recorded["expectations"] == folder.row(tested)["expectations"]
    assert recorded["checks"] == folder.row(tested)["checks"]
    said = (folder.path / "README.md").read_text()
    assert said == page(name, claim, tested)
    assert len(said.split()) <= 500
    if not claim.is_own_page:
        assert (folder.path / "appendix.md").read_text() == appendix(claim, tested)
        assert (folder.path / "figure.svg").is_file() == (claim.figure is not None and tested is not None)


@pytest.mark.parametrize("name", claim_folders(EXPERIMENTS))
def test_every_claim_is_told_whole(name: str):
    """Claim, source, protocol and scale in words, at least one expectation, and which of them is the headline."""
    claim = ClaimFolder(EXPERIMENTS / name).claim()

    assert isinstance(claim, Claim)
    assert all((claim.title, claim.claim, claim.source, claim.protocol, claim.scale, claim.expectations))
    assert all(0 <= part < len(claim.expectations) for part in claim.headline)


def test_a_package_of_code_is_no_claim(tmp_path: Path):
    """experiments/claims has a claim.py too, which says what a claim is; the list does not show it."""
    for name in ("a_claim", "claims"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claim.py").touch()
    (tmp_path / "claims" / "__init__.py").touch()

    assert list(claim_folders(tmp_path)) == ["a_claim"]
    assert "claims" not in claim_folders(EXPERIMENTS)


def test_the_table_of_claims_is_up_to_date():
    """`gnomon reproduce --list --write` writes it."""
    assert (ROOT / TABLE).read_text() == table(claim_folders(EXPERIMENTS))


@pytest.mark.slow
def test_kept_runs_of_other_defaults_are_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A kept run whose experiment reads otherwise now is not trained over: --finished, --work or its folder."""
    root = clone(tmp_path, source=RUNS)
    arguments = ["reproduce", "toy", "--experiments", str(root), "--work", str(tmp_path / "work"), "--workers", "1"]
    assert main(arguments) == 0
    (kept, *_) = sorted((tmp_path / "work").rglob("grpo/*/experiment.toml"))
    kept.write_text(kept.read_text().replace("steps = 2", "steps = 3", 1))
    capsys.readouterr()

    assert main(arguments) == 2
    assert "--finished measures them as they are" in capsys.readouterr().err
    assert main([*arguments, "--finished"]) == 0
