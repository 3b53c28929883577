"""F8, F15: a run is asked what it began with, and nothing in it leads to files of others."""

import json
from pathlib import Path

import pytest
from tests.random_model import RANDOM

from gnomon.cli.main import main
from gnomon.config.experiment import load
from gnomon.core.errors import CheckpointError, DatasetError, RunDirectoryError, UserError
from gnomon.core.types import Task
from gnomon.insight.report.write import write_report
from gnomon.records.checkpoints import Checkpoints
from gnomon.records.directory import RunDirectory
from gnomon.records.run_card import run_card, write_card
from gnomon.tasks.question import dataset_fingerprint
from gnomon.tasks.tables import TableTask
from gnomon.training.api import export, resume, train_experiment
from gnomon.training.python_api import evaluate
from gnomon.training.run import StopRequest

TINY = ["rollouts_per_step=8", "held_out.size=4", "grading.workers=1", "algorithm.num_generations=4", "steps=4"]
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def begun(folder: Path) -> Path:
    """Return a run on a table of its own that was asked to stop after its first step."""
    path = table(folder / "rows.jsonl", ROWS)
    own = [*TINY, f"task={path}", "rewards=[{kind='numeric'}]"]
    with pytest.raises(Exception, match="stopped after step 1 of 4"):
        train_experiment(load(RANDOM, own), folder / "run", StopRequest(15, after=1))
    return folder / "run"


@pytest.mark.parametrize("change", ["answer", "order", "fewer", "prompt"])
def test_a_dataset_that_changed_between_two_sessions_is_refused(tmp_path: Path, change: str):
    """Another answer, order, number or question: nothing is trained on other questions under the same name."""
    run = begun(tmp_path)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    other = {
        "answer": [*ROWS[:-1], {**ROWS[-1], "answer": "0"}],
        "order": [*ROWS[1:], ROWS[0]],
        "fewer": ROWS[:-1],
        "prompt": [{**ROWS[0], "prompt": "2+2="}, *ROWS[1:]],
    }
    # What is held out by its content moves as well, so all rows but one can still be the same.
    table(tmp_path / "rows.jsonl", other[change])

    with pytest.raises(UserError, match=r"not those that it began with|rows of"):
        resume(run)

    assert {path: path.read_bytes() for path in files} == files
    table(tmp_path / "rows.jsonl", ROWS)
    assert resume(run).steps == 4


@pytest.mark.parametrize("change", ["answers", "order", "fewer", "prompts"])
def test_a_run_is_not_asked_other_questions_as_those_that_it_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
):
    """A table that changed is refused by name, since what it holds out now was trained on, or has other gold answers.

    It can be asked on purpose, and then nobody says that nothing of it was trained on.
    """
    run = begun(tmp_path)
    other = {
        "answers": [{**row, "answer": "7"} for row in ROWS],
        "order": ROWS[::-1],
        "fewer": ROWS[:20],
        "prompts": [{**row, "prompt": f"Say {row['prompt']}"} for row in ROWS],
    }
    path = table(tmp_path / "rows.jsonl", other[change])

    for settings in ([], ["sampling.temperature=0.5"], ["system=Add."]):
        with pytest.raises(DatasetError, match=rf"are not those that it began with: a row of {path}.*--task FILE"):
            evaluate(run, overrides=settings)
    for asked in ({"task": str(path), "prompts": 8}, {"overrides": [f"task.path={path}"]}):
        assert evaluate(run, **asked).prompts
        assert f"whether {run} was trained on these questions cannot be told" in capsys.readouterr().err
    table(tmp_path / "rows.jsonl", ROWS)
    # Other words around the same questions are the user's own setting.
    for settings in ([], ["system=Add."]):
        assert evaluate(run, overrides=settings).prompts == 4
        assert "cannot be told" not in capsys.readouterr().err


def test_an_evaluation_by_another_code_than_the_run_s_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file of a reward, or of a reward of one of several held-out sets; a reward that is named is meant."""
    own, theirs = tmp_path / "own.py", tmp_path / "theirs.py"
    for each in (own, theirs):
        each.write_text("def pay(completion, **columns):\n    return float(len(completion) % 2)\n")
    table(tmp_path / "rows.jsonl", ROWS)
    sets = f"evaluation.tasks=[{{task='{tmp_path}/rows.jsonl',size=2,rewards=['{theirs}:pay']}}]"
    with pytest.raises(Exception, match="stopped after step 1 of 4"):
        train_experiment(load(RANDOM, [*TINY, f"rewards=['{own}:pay']", sets]), tmp_path / "run", StopRequest(15, 1))
    evaluate(tmp_path / "run")
    assert "has changed" not in capsys.readouterr().err

    for each in (own, theirs):
        each.write_text(f"{each.read_text()}# corrected\n")
        evaluate(tmp_path / "run")
        assert f"{each} has changed since {tmp_path / 'run'} last used it: these scores are" in capsys.readouterr().err
    evaluate(tmp_path / "run", overrides=["rewards=['numeric']", "evaluation.tasks=[]"])
    assert "has changed" not in capsys.readouterr().err


def test_scores_by_two_codes_are_not_set_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Neither before and after of a run whose reward changed while it went on, nor two runs with other rewards."""
    code = "def pay(completion, **columns):\n    return float(len(completion) % 2)\n"
    (tmp_path / "own.py").write_text(f"{code}{code.replace('pay', 'fee')}")
    own = [*TINY, "evaluation.before=true"]
    for name, function in (("run", "pay"), ("fee", "fee"), ("pay", "pay")):
        with pytest.raises(Exception, match="stopped after step 1 of 4"):
            train_experiment(
                load(RANDOM, [*own, f"rewards=['{tmp_path}/own.py:{function}']"]), tmp_path / name, StopRequest(15, 1)
            )
    runs = {name: str(tmp_path / name) for name in ("run", "fee", "pay")}
    capsys.readouterr()
    for other, is_other in (("fee", True), ("pay", False)):
        assert main(["compare", "--logs", runs["run"], runs[other], "--out", str(tmp_path / f"{other}.html")]) == 0
        assert ("the runs were judged by different rewards (pay (" in capsys.readouterr().out) is is_other
        page = write_report([Path(runs["run"]), Path(runs[other])], tmp_path / f"report-{other}.html").path.read_text()
        assert ("judged by different rewards" in page) is is_other
    (tmp_path / "own.py").write_text(f"{code}# corrected\n")
    assert main(["resume", runs["run"]]) == 0

    said = capsys.readouterr().out
    assert f"pay is not compared: {tmp_path / 'own.py'} changed while the run went on, so two codes judged it" in said
    assert "shared prompts" not in said
    assert "so two codes judged it" in (tmp_path / "run" / "report.html").read_text()
    main(["compare", "--logs", runs["run"], runs["pay"], "--out", str(tmp_path / "changed.html")])
    said = capsys.readouterr().out
    assert "own.py changed while it went on: two codes judged it" in said
    assert "judged by different rewards" in said


def test_what_changed_between_two_sessions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Versions of packages, threads and the user's own code: a warning each, and the run goes on; the third session,
    in which nothing changed, says nothing.
    """
    reward = tmp_path / "mine.py"
    reward.write_text("def pay(completion, **columns):\n    return float(len(completion) % 2)\n")
    own = [*TINY, f"rewards=[{{kind='function', function='{reward}:pay'}}]"]
    with pytest.raises(Exception, match="stopped after step 1 of 4"):
        train_experiment(load(RANDOM, own), tmp_path / "run", StopRequest(15, after=1))
    path = tmp_path / "run" / "run.json"
    card = json.loads(path.read_text())
    path.write_text(json.dumps({**card, "versions": {**card["versions"], "torch": "0.1", "transformers": "0.2"}}))
    reward.write_text(f"{reward.read_text()}# corrected\n")
    said = []
    for step in (2, 3):
        with pytest.raises(Exception, match=f"stopped after step {step} of 4"):
            resume(tmp_path / "run", StopRequest(15, after=1))
        said.append(capsys.readouterr().err)

    versions = card["versions"]
    assert (
        f"since the last session torch went from 0.1 to {versions['torch']}, transformers went from 0.2 to "
        f"{versions['transformers']}: numbers can come out otherwise than without\n"
    ) in said[0]
    assert f"warning: {reward} has changed since this run last used it: earlier steps were made with" in said[0]
    assert "since the last session" not in said[1]
    assert "has changed" not in said[1]


def test_a_stamp_is_of_everything_that_is_asked():
    """Id, prompt tokens, text, columns, order and number."""
    tasks = [Task("a", (1, 2), "x", {"answer": 1}), Task("b", (3,), "y")]

    class Listed(list[Task]):
        name = "listed"

    others = [
        [Task("c", (1, 2), "x", {"answer": 1}), tasks[1]],
        [Task("a", (1, 3), "x", {"answer": 1}), tasks[1]],
        [Task("a", (1, 2), "z", {"answer": 1}), tasks[1]],
        [Task("a", (1, 2), "x", {"answer": 2}), tasks[1]],
        tasks[::-1],
        tasks[:1],
    ]
    stamps = {dataset_fingerprint(Listed(t)) for t in [tasks, *others]}

    assert dataset_fingerprint(Listed(tasks)) == dataset_fingerprint(Listed(list(tasks)))
    assert len(stamps) == 1 + len(others)


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_checked(tmp_path: Path):
    """Each thousandth row is bad in one of five ways; all hundred are counted."""
    bad = [{"prompt": 3}, {"answer": "1"}, {"prompt": "\ud800", "answer": "1"}, {"prompt": "x", "answer": None}, []]
    rows = [bad[n // 1000 % 5] if n % 1000 == 0 else {"prompt": f"{n}?", "answer": str(n)} for n in range(100_000)]
    table(tmp_path / "big.jsonl", rows)  # type: ignore[arg-type]

    with pytest.raises(DatasetError, match="100 of 100000 rows"):
        TableTask(str(tmp_path / "big.jsonl")).questions()


@pytest.mark.parametrize("name", ["checkpoints", "rollouts", "batches", "metrics.jsonl", "evaluations.jsonl"])
def test_a_link_out_of_a_run_is_refused_and_what_it_leads_to_is_untouched(tmp_path: Path, name: str):
    """What a resume would remove or replace must be the run's own; a link inside of it is."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "experiment.toml").write_text("")
    elsewhere.mkdir()
    (elsewhere / ".tmp-1-a").write_text("precious")
    (run / name).symlink_to(elsewhere)

    with pytest.raises(RunDirectoryError, match="is a link that leads out of the run"):
        RunDirectory.reopen(run)

    assert (elsewhere / ".tmp-1-a").read_text() == "precious"
    (run / name).unlink()
    (run / "kept").touch() if name.endswith(".jsonl") else (run / "kept").mkdir()
    (run / name).symlink_to(run / "kept")
    RunDirectory.reopen(run).close()


def test_a_run_may_itself_be_a_link(tmp_path: Path):
    """Whoever links a whole run means it."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "experiment.toml").write_text("")
    (tmp_path / "here").symlink_to(tmp_path / "there")

    RunDirectory.reopen(tmp_path / "here").close()


def test_a_checkpoint_that_is_a_link_is_not_used(tmp_path: Path):
    """A sound checkpoint of another run under this run's name is none of its own."""
    from gnomon.core.types import State

    other = Checkpoints(tmp_path / "other")
    path = other.save(5, {"part": State(values={"a": 1})}, lambda folder: None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "step-5").symlink_to(path)

    with pytest.raises(CheckpointError, match="it is a link to somewhere else"):
        Checkpoints(tmp_path / "mine").newest()


@pytest.mark.parametrize("best", ['{"step": "../../x"}', '{"step": Infinity}', '{"step": -1}', "[]", "{"])
def test_what_is_called_best_is_a_checkpoint_of_this_run(tmp_path: Path, best: str):
    """A number, or nothing."""
    (tmp_path / "best.json").write_text(best)

    assert Checkpoints(tmp_path).best() is None


@pytest.mark.parametrize("content", ["{", "[]", '{"resumed": 3}', '{"a": NaN}', "[" * 100_000])
def test_a_damaged_card_ends_no_run_and_is_kept(tmp_path: Path, content: str):
    """It is set aside, and the session writes its own."""
    (tmp_path / "run.json").write_text(content)

    write_card(tmp_path / "run.json", run_card("cpu", 1, {"run": 0}, "fp32"))

    assert json.loads((tmp_path / "run.json").read_text())["device"] == "cpu"
    assert [path.read_text() for path in tmp_path.glob("damaged-*-run.json")] == [content]


def test_an_export_leaves_nothing_outside_of_its_folder(tmp_path: Path):
    """A folder that holds something is refused, also through a link."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "full")

    for target in ("full", "link"):
        with pytest.raises(RunDirectoryError, match="exists and is not empty"):
            export(tmp_path / "run", tmp_path / target)
    assert (tmp_path / "full" / "x").read_text() == "precious"
