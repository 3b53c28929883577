"""Whatever stands in one file of a run: reports, live views and diagnoses show the rest of it, and never fall over."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.test_files import NASTY, ODD, changed, odd_line, places, spliced
from tests.insight.made_runs import finding, made_run

from gnomon.core.errors import RunError, UserError
from gnomon.diagnosis import diagnose
from gnomon.diagnosis.current_findings import written
from gnomon.insight.report.write import run_page
from gnomon.insight.watch.watcher import Watcher, read_samples
from gnomon.records.corruption import damaged
from gnomon.records.directory import RunDirectory, lock_owner
from gnomon.records.eval_records import read_answered
from gnomon.records.reading import RunRecord
from gnomon.rewards.base import VerifierError
from gnomon.rewards.code.cases import read_cases
from gnomon.tasks.tools import find_calls
from gnomon.training.continuation import latest_session

QUICK, THOROUGH = 40, 1000
STEP = 4
ROLLOUTS, ANSWERS = f"rollouts/step-{STEP:06d}.jsonl", f"evaluations/step-{STEP:06d}.jsonl"
CARD = {
    "started": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.13.0"}, "reproducibility": "R0 exact: x",
    "code": {"gnomon": {"commit": "0a", "dirty": True}}, "sources": {"judge.py": "0a"},
    "resumed": [{"reproducibility": "R0 exact: x", "ended": "x"}],
    "questions": "q", "foreign_code": ["reward judge.py:score"], "seeds": {"run": 0}, "cpu_count": 2,
}  # fmt: skip
ANSWERED = {
    "prompt_id": "a", "question": "q", "scores": [1.0, 0.0], "answers": ["4", None], "lengths": [3, 9],
    "truncated": 0, "errors": 0,
}  # fmt: skip
JSON_FILES = ("metrics.jsonl", "evaluations.jsonl", "findings.jsonl", "diagnosis.json", "run.json", ".lock", ROLLOUTS)
FILES = (*JSON_FILES, ANSWERS, "experiment.toml")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with every kind of record."""
    run = made_run(tmp_path_factory.mktemp("sound") / "run", done=STEP)
    (run / "run.json").write_text(json.dumps(CARD))
    (run / "findings.jsonl").write_text(json.dumps(finding("a", "warning", 3)) + "\n")
    (run / "diagnosis.json").write_text(json.dumps({"findings": [finding("a", "severe", 4)]}))
    (run / "evaluations").mkdir()
    (run / ANSWERS).write_text(json.dumps(ANSWERED) + "\n")
    return run


def or_ours(read: Callable[[], Any]) -> None:
    """Read, and let nothing be raised but one short message of ours."""
    try:
        read()
    except (UserError, RunError, VerifierError) as error:
        said = str(error)
    else:
        said = "nothing"
    assert 0 < len(said) < 20_000


def look(run: Path) -> None:
    """Show a run in every way there is."""
    Watcher(run).look()
    lock_owner(run)
    written(RunDirectory(run))
    damaged(RunDirectory(run))
    latest_session(run)
    read_samples(run / ROLLOUTS, STEP)
    or_ours(lambda: read_answered(run / ANSWERS))
    or_ours(lambda: run_page(RunRecord.of(run)))
    or_ours(lambda: diagnose(RunRecord.of(run)))


def with_file(sound: Path, run: Path, name: str, content: bytes) -> Path:
    """Return a copy of a run in which one file has this content."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run)
    (run / name).write_bytes(content)
    return run


def test_a_sound_run_is_shown(sound: Path):
    """Its page, its findings, its answers: so that passing all over would be noticed."""
    look(sound)
    record = RunRecord.of(sound)

    assert [f.severity for f in written(RunDirectory(sound))] == ["severe"]
    assert len(read_answered(sound / ANSWERS)) == 1
    assert len(record.rollouts(STEP)) == 8
    assert "R0 exact: x" in run_page(record)


@pytest.mark.parametrize("name", FILES)
def test_nasty_contents_spoil_no_view(tmp_path: Path, sound: Path, name: str):
    """Alone in the file, and as one more line of it."""
    for content in NASTY:
        look(with_file(sound, tmp_path / "run", name, content))
        look(with_file(sound, tmp_path / "run", name, (sound / name).read_bytes() + content + b"\n"))


def _mutate(run: Path, sound: Path, data: st.DataObject) -> None:
    """Change one value of one line of one file, or some of its bytes."""
    name = data.draw(st.sampled_from(FILES))
    content = (sound / name).read_bytes()
    if name != "experiment.toml" and data.draw(st.booleans()):
        content = odd_line(content, data)
    else:
        content = spliced(content, data)
    look(with_file(sound, run, name, content))


@given(data=st.data())
@settings(max_examples=QUICK)
def test_any_change_spoils_no_view(tmp_path_factory: pytest.TempPathFactory, sound: Path, data: st.DataObject):
    """One value, or a few bytes, of one file of a run are another."""
    _mutate(tmp_path_factory.mktemp("fuzz") / "run", sound, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=THOROUGH)
def test_any_change_spoils_no_view_very_often(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, data: st.DataObject
):
    """The same, 1,000 times."""
    _mutate(tmp_path_factory.mktemp("fuzz") / "run", sound, data)


IMPOSSIBLE = {
    "response": [[-1], [2**31], [2**70]], "prompt": [[-1], [2**40]], "reward": [10**400],
    "newest_version": [2**70], "oldest_version": [-(2**64)], "step": [2**63], "group": [2**70],
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_whole_number_that_nothing_holds_is_no_rollout(tmp_path: Path, sound: Path, name: str):
    """Tokens that no tokenizer has, and counts beyond 63 bits: the line is damaged, and the page is drawn."""
    row = json.loads((sound / ROLLOUTS).read_bytes().splitlines()[0])
    for value in IMPOSSIBLE[name]:
        wrong = value * len(row[name]) if isinstance(value, list) else value
        run = with_file(sound, tmp_path / "run", ROLLOUTS, json.dumps({**row, name: wrong}).encode() + b"\n")

        look(run)
        assert RunRecord.of(run).rollouts(STEP) == []


CASES: list[Any] = [
    {"inputs": ["1\n", [2]], "outputs": ["1", 2], "fn_name": "f"},
    [{"input": "[1]", "output": "2", "testtype": "functional", "fn_name": "A.f"}, {"input": "x", "output": "y"}],
    ["assert f(1) == 2", "assert f(2)"],
    "def check(candidate):\n    assert candidate(1) == 2\n",
]


@given(data=st.data())
@settings(max_examples=4 * QUICK)
def test_cases_of_a_dataset_are_read_or_refused(data: st.DataObject):
    """Of every known form, with something odd in any place: cases, or an error of that row."""
    tests = data.draw(st.sampled_from(CASES))
    tests = changed(tests, data.draw(st.sampled_from(places(tests))), data.draw(ODD))
    tests = json.dumps(tests) if data.draw(st.booleans()) else tests
    entry = data.draw(ODD)
    or_ours(lambda: read_cases(tests, {"entry_point": entry}))


@given(st.recursive(ODD, lambda inner: st.dictionaries(st.sampled_from(["name", "arguments", "x"]), inner)), st.text())
@settings(max_examples=4 * QUICK)
def test_what_a_model_calls_is_a_call_or_says_what_is_wrong(call: Any, text: str):
    """Whatever an answer has between the marks of a call."""
    check_calls(json.dumps(call))
    check_calls(text)


def test_a_call_without_end_is_a_call_that_says_so():
    """Nested as deeply as an answer may be long."""
    check_calls("[" * 100_000)


def check_calls(inner: str) -> None:
    """Read what stands between the marks of a call."""
    for found in find_calls(f"<tool_call>{inner}</tool_call>"):
        assert isinstance(found.name, str)
        assert isinstance(found.arguments, dict)
