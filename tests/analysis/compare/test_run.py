"""Real comparisons of tiny runs, from the command to the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.random_model import RANDOM

from gnomon.analysis.compare.run import FORMAT, Design, RunLimit, penalized
from gnomon.cli.main import main
from gnomon.config.experiment import Loaded
from gnomon.core.atomic_files import write_json
from gnomon.records.reading import RunRecord
from gnomon.training.api import train_experiment
from gnomon.training.evaluate import read_evaluations

Capture = pytest.CaptureFixture[str]

LIMIT = RunLimit(300, "tokens")
TINY = (RANDOM, "task.highest=9", "held_out.size=12", "rollouts_per_step=64", "grading.workers=1")


def asked(
    folder: Path, *more: str, algorithms: str = "grpo,p3o", limit: tuple[str, str] = ("--budget", "300")
) -> list[str]:
    """Return the command that compares."""
    return ["compare", *TINY, *more, "--algorithms", algorithms, *limit, "--out", str(folder), "--json"]


def parsed(capsys: Capture, command: list[str]) -> dict[str, Any]:
    """Return the one JSON object that a command prints."""
    code = main(command)
    said = capsys.readouterr()
    assert code == 0, said.err
    return dict(json.loads(said.out))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two algorithms and two seeds, trained in this process, where a comparison looks for them."""
    return trained(tmp_path_factory.mktemp("compare"), Design.of(RANDOM, TINY[1:], ["grpo", "p3o"], 2, LIMIT))


def trained(folder: Path, design: Design) -> Path:
    """Train a comparison's runs in this process, where a command looks for them, and return their folder."""
    write_json(folder / "study.json", {"format": FORMAT, "terms": design.terms()})
    for contestant in design.contestants:
        for seed in design.seed_numbers():
            job = design.job(contestant, seed, folder)
            train_experiment(Loaded(job.experiment(), ()), job.folder)
    return folder


def test_finished_runs_are_compared(study: Path, capsys: Capture):
    """Nothing is trained again; scores, curves and costs are those in the runs' files, the questions are the same."""
    found = parsed(capsys, asked(study, "--seeds", "2"))
    record = RunRecord(study / "runs" / "grpo" / "seed-1")
    last = read_evaluations(record.files.evaluations)[-1]
    rows = record.metrics()

    assert [standing["name"] for standing in found["standings"]] == ["grpo", "p3o"]
    assert found["standings"][0]["by_seed"][1] == pytest.approx(last.headline.mean)
    assert [(o["verdict"], o["questions"]) for o in found["orders"]] == [("same", 8 * len(rows))] * 2
    assert all(300 <= standing["cost"]["tokens"] < 300 + 3 * 64 for standing in found["standings"])
    assert all(len(standing["curve"]) >= 3 for standing in found["standings"])
    assert found["prompts"] == 12
    assert json.loads((study / "compare.json").read_text())["pairings"] == found["pairings"]
    assert (study / "compare.html").read_text().count('class="chart"') == 4
    for standing in found["standings"]:
        cost = standing["cost"]
        assert cost["trained"] + sum(cost["wasted"].values()) == pytest.approx(cost["tokens"])


def test_a_comparison_as_text(study: Path, capsys: Capture):
    """Words first, then tables; where the page is stands last."""
    assert main([part for part in asked(study, "--seeds", "2") if part != "--json"]) == 0
    said = capsys.readouterr().out

    assert re.match(
        r"This is 2 seeds and 12 held-out prompts, after 3\d\d.* generated tokens \(budget: 300\) a run", said
    )
    assert "2 pairs of runs agree question by question" in said
    assert f"page     {study / 'compare.html'}" in said


def test_one_seed_of_two_is_about_models(study: Path, capsys: Capture):
    """Fewer seeds are taken from what is there, and one is said to be one."""
    found = parsed(capsys, asked(study, "--seeds", "1"))

    assert [standing["seeds"] for standing in found["standings"]] == [[0], [0]]
    assert found["pairings"][0]["is_about_models_alone"] is True


def test_another_budget_is_another_comparison(study: Path, capsys: Capture):
    """What differs is named, and nothing starts."""
    assert main(asked(study, "--seeds", "2", limit=("--budget", "700"))) == 2
    assert "holds another comparison: limit is [300, 'tokens'] there and [700, 'tokens']" in capsys.readouterr().err


@pytest.mark.slow
def test_what_made_no_step_is_not_compared(tmp_path: Path, capsys: Capture):
    """Initial values of one token an answer would fit the budget, and theirs did not: SPO was never trained."""
    few = ("task.size=30", "sampling.max_completion_length=4", "rollouts_per_step=16")
    trained(tmp_path, Design.of(RANDOM, [*TINY[1:], *few], ["grpo", "spo"], 1, LIMIT))

    assert main(asked(tmp_path, *few, "--seeds", "1", algorithms="grpo,spo")) == 1
    assert "spo: 300 generated tokens were spent before the first step" in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


@pytest.mark.slow
def test_two_algorithms_two_seeds(tmp_path: Path, capsys: Capture):
    """The same questions in the same order, the same budget, page and numbers.

    Asked again nothing is trained; a third seed adds two runs to the four; another budget is another comparison.
    """
    folder = tmp_path / "study"
    found = parsed(capsys, asked(folder, "--seeds", "2"))
    steps = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    again = parsed(capsys, asked(folder, "--seeds", "2"))

    assert len(steps) == 4
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == steps
    assert [standing["name"] for standing in found["standings"]] == ["grpo", "p3o"]
    assert {order["verdict"] for order in found["orders"]} == {"same"}
    assert all(300 <= standing["cost"]["tokens"] < 300 + 3 * 64 for standing in found["standings"])
    assert all(len(standing["curve"]) >= 3 for standing in found["standings"])
    assert found["prompts"] == 12
    assert json.loads((folder / "compare.json").read_text())["pairings"] == found["pairings"]
    assert "<svg" in (folder / "compare.html").read_text()
    assert len(parsed(capsys, asked(folder, "--seeds", "3"))["standings"][0]["seeds"]) == 3
    assert main(asked(folder, "--seeds", "2", limit=("--budget", "700"))) == 2
    assert "holds another comparison: limit is [300, 'tokens'] there and [700, 'tokens']" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Every run is killed in its second step; the same command brings all of them to the end that they had without."""
    straight = parsed(capsys, asked(tmp_path / "straight", "--seeds", "1"))
    monkeypatch.setenv("GNOMON_FAIL_AT", "advantages:2")
    assert main(asked(tmp_path / "broken", "--seeds", "1")) == 1
    assert "no run of grpo, p3o finished" in capsys.readouterr().err
    monkeypatch.delenv("GNOMON_FAIL_AT")
    broken = parsed(capsys, asked(tmp_path / "broken", "--seeds", "1"))

    for name in ("scores", "curve", "by_seed"):
        pairs = zip(straight["standings"], broken["standings"], strict=True)
        assert all(one.get(name) == other.get(name) for one, other in pairs)


@pytest.mark.slow
def test_a_run_that_fails_is_left_out_and_told(tmp_path: Path, capsys: Capture):
    """One seed of two has a folder that something else lies in: the others are shown, and the exit code is 1."""
    folder = tmp_path / "study"
    blocked = folder / "runs" / "p3o" / "seed-1"
    parsed(capsys, asked(folder, "--seeds", "1"))
    blocked.mkdir(parents=True)
    (blocked / "note.txt").write_text("mine")

    assert main([part for part in asked(folder, "--seeds", "2") if part != "--json"]) == 1
    said = capsys.readouterr()
    assert "Runs that failed are left out" in said.out
    assert "1 of 4 runs failed" in said.err
    assert (blocked / "note.txt").read_text() == "mine"


@pytest.mark.slow
def test_steps_and_spo(tmp_path: Path, capsys: Capture):
    """At equal steps the tokens are told; SPO's initial values and its own choice of questions as well."""
    command = asked(
        tmp_path, "--seeds", "1", "algorithm.updates.minibatches=2", algorithms="grpo,spo", limit=("--steps", "3")
    )
    found = parsed(capsys, command)
    record = RunRecord(tmp_path / "runs" / "spo" / "seed-0")

    assert [standing["cost"]["steps"] for standing in found["standings"]] == [3.0, 3.0]
    assert found["standings"][1]["cost"]["before"] > 0
    assert found["setting"]["uniform"] == ["grpo"]
    assert len(record.metrics()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--algorithms", "grpo,grop", "--budget", "500"),
            "gnomon compare: grop: unknown algorithm 'grop'; did you mean",
        ),
        (("--algorithms", "grpo,spo", "--budget", "0"), "--budget must be a number above 0, got 0"),
        (("--algorithms", "grpo,spo", "--budget", "500", "--seeds", "0"), "--seeds must be 1 or more, got 0"),
        (
            ("--algorithms", "grpo,spo", "--budget", "500"),
            "spo: before its first step it asks 6,408 answers for initial values, of one token or more each (19,224 at "
            "most), so 500 generated tokens would be spent by then; give more, or set algorithm.tracker.initial=prior",
        ),
        (("--algorithms", "grpo,p3o", "--budget", "500", "--workers", "0"), "workers must be at least 1, got 0"),
        (("--algorithms", "grpo,vapo", "--budget", "500", "model=nowhere"), "nowhere"),
        (
            ("--algorithms", "grpo,p3o", "--budget", "60", "rollouts_per_step=64"),
            "grpo: a step asks 64 answers, of one token or more each, so 60 generated tokens are less than one step; "
            "give --budget 64 or more",
        ),
    ],
    ids=["unknown", "no budget", "no seeds", "initial values", "no workers", "no model", "less than a step"],
)
def test_one_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str, capsys: Capture
):
    """Exit code 2, what is wrong, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(["compare", RANDOM, *arguments, "--out", "x"]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_a_step_may_pass_is_warned_of(tmp_path: Path, capsys: Capture):
    """64 answers of up to 3 tokens may be 192: a budget of 100 is taken, and said to be little beforehand."""
    command = asked(tmp_path / "x", "--workers", "0", "sampling.max_completion_length=3", limit=("--budget", "100"))
    assert main(command) == 2
    assert "one step of grpo may generate up to 192 tokens, more than the budget of 100" in capsys.readouterr().err


def test_who_takes_a_penalty_off_rewards_is_known():
    """DAPO does and GRPO does not; DAPO beside itself is of one scale."""
    both = [
        Design.of(RANDOM, TINY[1:], names, 1, RunLimit(300, "tokens")) for names in (["grpo", "dapo"], ["grpo", "p3o"])
    ]

    assert [penalized(design) for design in both] == [("dapo",), ()]


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: Capture):
    """What is in it stays as it is."""
    (tmp_path / "thesis.tex").write_text("mine")

    assert main(asked(tmp_path)) == 2
    assert "holds something that is no comparison; name another folder: --out FOLDER" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("tiny", "--algorithms", "grpo,spo"),
            "arguments are required: one of --budget, --seconds and --steps; or --logs",
        ),
        (("tiny", "--algorithms", "a,b", "--budget", "5", "--steps", "5"), "not allowed with argument"),
        (("tiny", "--budget", "5"), "the following arguments are required: --algorithms; or --logs"),
    ],
)
def test_wrong_arguments_show_the_usage(arguments: tuple[str, ...], said: str, capsys: Capture):
    """Exit code 2, by the parser."""
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])

    assert ended.value.code == 2
    assert said in capsys.readouterr().err
