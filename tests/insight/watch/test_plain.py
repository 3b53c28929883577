"""`gnomon watch` without a screen: lines for logs, the state once, one object for programs."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.insight.made_runs import add_rows, evaluation, finding, fingerprint, made_run, metrics

from gnomon.cli.main import main
from gnomon.insight.watch.plain import follow
from gnomon.insight.watch.watcher import Watcher
from gnomon.records.directory import RunDirectory

Capture = pytest.CaptureFixture[str]


def followed(run: Path, *happenings: Callable[[], None]) -> list[str]:
    """Return what is said while things happen between looks; the run ends with the last of them."""
    left, said = list(happenings), list[str]()

    def sleep(seconds: float) -> None:
        assert seconds == 7.0
        left.pop(0)()

    follow(Watcher(run), 7.0, said.append, sleep)
    assert not left
    return said


def test_a_line_for_the_newest_step_and_one_for_each_event(tmp_path: Path):
    """Steps between two looks are one line; an evaluation and a finding each have their own, once."""
    run = made_run(tmp_path / "run", done=18)
    held = RunDirectory.reopen(run)

    def two_steps() -> None:
        add_rows(run / "metrics.jsonl", [metrics(19), metrics(20)])
        add_rows(run / "findings.jsonl", [finding("entropy", "warning", 19)])

    def again() -> None:
        add_rows(run / "findings.jsonl", [finding("entropy", "warning", 20)])
        add_rows(run / "evaluations.jsonl", [evaluation(20, 0.75)])

    said = followed(run, two_steps, again, held.close)

    assert said[0] == f"{run}: live; grpo · arithmetic · tiny"
    assert said[1].startswith("step 18/20  reward 0.835  entropy 2.000  length 9.500  truncated 25%  ESS 88%  300 tok")
    assert [line.split("  ")[0] for line in said[2:]] == [
        "evaluation after step 0: answer 0.250 [0.200, 0.300]",
        "step 20/20",
        "warning: entropy was seen at step 19",
        "evaluation after step 20: answer 0.750 [0.700, 0.800]",
        "finished after step 20",
    ]


def test_a_run_that_stops_is_told_with_how_it_goes_on(tmp_path: Path):
    """Killed at step 12 of 20: the last line has the command, and there is nothing after it."""
    run = made_run(tmp_path / "run", done=12)
    (run / "checkpoints" / "step-10").mkdir(parents=True)
    held = RunDirectory.reopen(run)
    said = followed(run, held.close)

    assert said[-1].startswith("It ended at step 12 of 20, and no process works on it.")
    assert said[-1].endswith(f"a checkpoint of step 10 and goes on from there with: gnomon resume {run}")


def test_a_run_that_is_not_there_is_waited_for(tmp_path: Path):
    """Later it comes, goes, and comes back finished."""
    run = tmp_path / "run"
    said = followed(run, lambda: None, lambda: shutil.rmtree(made_run(run, 3)), lambda: None, lambda: _made(run))

    assert said[0].startswith(f"{run}: not there yet; There is no run {run} yet")
    assert said[-1] == "finished after step 20"
    assert len([line for line in said if "not there yet" in line]) == 1


def _made(run: Path) -> None:
    made_run(run, 20)


def test_hostile_text_is_one_harmless_line(tmp_path: Path):
    """A finding and an evaluation with escapes and line feeds."""
    run = made_run(tmp_path / "run", done=20)
    add_rows(run / "findings.jsonl", [finding("x", "note", 1, summary="a\x1b[2J\nb\u202e")])
    said = followed(run)

    assert "note: a\\x1b[2J b\\u202e" in said
    assert not any(ord(c) < 32 for line in said for c in line)


def test_once_prints_the_state_and_ends(tmp_path: Path, capsys: Capture):
    """Exit code 0 for a stopped run too; no control sequence; nothing of the run is changed."""
    run = made_run(tmp_path / "run", done=12)
    before = fingerprint(run)
    assert main(["watch", str(run), "--once"]) == 0
    said = capsys.readouterr().out

    for text in ("■ stopped", "step 12/20", "reward", "entropy", "answer 7", "gnomon resume"):
        assert text in said
    assert "\x1b" not in said
    assert fingerprint(run) == before


def test_json_is_one_object(tmp_path: Path, capsys: Capture):
    """State, step, checkpoint, the latest metrics, evaluations, findings and samples; nothing else is printed."""
    run = made_run(tmp_path / "run", done=12)
    add_rows(run / "findings.jsonl", [finding("entropy", "severe", 9)])
    with RunDirectory.reopen(run):
        assert main(["watch", str(run), "--once", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)

    assert (row["state"], row["step"], row["steps"], row["checkpoint"], row["resume"]) == ("live", 12, 20, None, None)
    assert row["process"]["pid"] > 1
    assert row["metrics"]["loss/entropy_nats"] == 2.0
    assert row["evaluations"][0]["mean"] == 0.25
    assert row["findings"][0]["rule"] == "entropy"
    assert row["samples"]["best"][0]["response"] == "answer 7"


@pytest.mark.parametrize(("done", "code"), [(20, 0), (12, 1)])
def test_plain_says_by_its_exit_code_how_the_run_ended(tmp_path: Path, done: int, code: int, capsys: Capture):
    """0 at its last step, 1 before; a standard output that is no terminal gets lines without being asked for."""
    run = str(made_run(tmp_path / "run", done=done))

    assert main(["watch", run, "--plain", "--interval", "0.1"]) == code
    asked = capsys.readouterr().out
    assert main(["watch", run]) == code
    assert capsys.readouterr().out == asked


@pytest.mark.parametrize("form", [["--once"], ["--json"], ["--plain"], []])
def test_what_is_no_run_is_refused_where_nothing_is_waited_for(tmp_path: Path, capsys: Capture, form: list[str]):
    """In every form: exit code 2 at once, and the nearest run; where it could be waited for, how to do that."""
    made_run(tmp_path / "run-1", done=1)
    assert main(["watch", str(tmp_path / "run-2"), *form]) == 2
    said = capsys.readouterr().err

    assert f"did you mean '{tmp_path / 'run-1'}'?" in said
    assert (f"to wait until it begins: gnomon watch {tmp_path / 'run-2'} --wait" in said) == (
        form not in (["--once"], ["--json"])
    )


def test_a_folder_without_a_run_is_refused_and_one_that_is_being_made_is_not(tmp_path: Path, capsys: Capture):
    """What a process holds is a run that begins in this moment; it is seen until its end."""
    run = tmp_path / "run"
    run.mkdir()
    assert main(["watch", str(run), "--plain"]) == 2
    assert "is no run: it has no experiment.toml" in capsys.readouterr().err

    held = RunDirectory.create(run)

    def begin() -> None:
        for path in made_run(tmp_path / "made", done=20).iterdir():
            if path.name != ".lock":
                path.rename(run / path.name)
        held.close()

    threading.Timer(0.4, begin).start()
    assert main(["watch", str(run), "--plain", "--interval", "0.1"]) == 0
    assert "finished after step 20" in capsys.readouterr().out


def test_a_run_that_has_not_begun_is_waited_for_when_asked(tmp_path: Path, capsys: Capture):
    """--wait says that it is not there yet, and follows it once it is; a file can never be one."""
    run = tmp_path / "run"
    threading.Timer(0.5, lambda: made_run(tmp_path / "made", done=20).rename(run)).start()

    assert main(["watch", str(run), "--plain", "--wait", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "not there yet" in said
    assert "finished after step 20" in said
    (tmp_path / "file").write_text("")
    assert main(["watch", str(tmp_path / "file"), "--plain", "--wait"]) == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_rows_that_cannot_be_read_are_one_error_for_everybody(name: str, tmp_path: Path, capsys: Capture):
    """A folder in the place of a file: exit code 2, one line that names it and what to do, and no page."""
    run = made_run(tmp_path / "run", done=2)
    (run / name).unlink()
    (run / name).mkdir()

    for verb, *options in (["doctor"], ["report"], ["watch", "--once"], ["watch", "--plain"]):
        assert main([verb, str(run), *options]) == 2
        assert capsys.readouterr() == (
            "",
            f"gnomon {verb}: {run / name} cannot be read: it is a folder, not a file; it should be a file with one "
            "JSON object a line: bring it back, or move away what is there\n",
        )
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("how", [["--once"], ["--json"], ["--plain"], []])
def test_an_experiment_that_cannot_be_read_is_refused(how: list[str], tmp_path: Path, capsys: Capture):
    """Exit code 2 and the sentence that report and doctor have; nothing is shown of such a run."""
    run = made_run(tmp_path / "run", done=2)
    (run / "experiment.toml").write_text("steps = [")
    assert main(["doctor", str(run)]) == 2
    sentence = capsys.readouterr().err.partition(": ")[2]

    assert main(["watch", str(run), *how]) == 2
    assert capsys.readouterr() == ("", f"gnomon watch: {sentence}")
    assert f"{run}/experiment.toml cannot be read" in sentence


def test_damaged_lines_are_said_by_all_alike(tmp_path: Path, capsys: Capture):
    """One sentence in the report, the diagnosis and the view; one object of numbers for programs."""
    run = made_run(tmp_path / "run", done=20)
    with open(run / "metrics.jsonl", "a") as file:
        file.write("nonsense\n")
    with open(run / "rollouts" / "step-000020.jsonl", "a") as file:
        file.write("{}\n{\n")
    sentence = "1 damaged line in metrics.jsonl and 2 in rollouts were passed over"
    said = []
    for command in (["watch", str(run), "--once"], ["watch", str(run), "--plain"], ["doctor", str(run)]):
        assert main(command) == 0
        said.append(capsys.readouterr().out)
    objects = []
    for command in (["watch", str(run), "--json"], ["doctor", str(run), "--json"]):
        assert main(command) == 0
        objects.append(json.loads(capsys.readouterr().out)["damaged"])
    assert main(["report", str(run)]) == 0

    assert [text.count(sentence) for text in said] == [1, 1, 1]
    assert objects == [{"metrics.jsonl": 1, "rollouts": 2}] * 2
    assert f"{sentence}." in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plain", "--json"], "--json looks once and ends, and --plain is for looking again and again"),
        (["--plain", "--once"], "--once looks once and ends, and --plain is"),
        (["--json", "--interval", "5"], "--json looks once and ends, and --interval is"),
        (["--once", "--wait"], "--once looks once and ends, and --wait is"),
    ],
)
def test_what_would_be_ignored_is_refused(options: list[str], said: str, capsys: Capture):
    """Exit code 2, with the usage, before anything is looked at."""
    with pytest.raises(SystemExit, match="2"):
        main(["watch", "nowhere", *options])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "nan", "-1"])
def test_an_interval_that_cannot_be_meant_is_refused(seconds: str, capsys: Capture):
    """Exit code 2, with the usage."""
    with pytest.raises(SystemExit, match="2"):
        main(["watch", "run", "--interval", seconds])
    assert "--interval should be from 0.05 to 86400 seconds" in capsys.readouterr().err
