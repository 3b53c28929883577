"""Findings as they stand: written where they change, read as they were, and in the words of the newest step."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.diagnosis import Finding, FindingSample
from gnomon.diagnosis.current_findings import CurrentFindings, read_current_findings, written
from gnomon.records.directory import RunDirectory
from gnomon.records.jsonl import JsonLines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def found(rule: str = "all-wrong", step: int = 8, summary: str = "nothing is right") -> Finding:
    """Return a finding with one sample."""
    sample = FindingSample(step, "t1", "1+1=", "3", 0.0)
    return Finding(rule, "warning", 1, step, summary, {"share": 1.0}, "It means this.", ("try that",), (sample,))


def test_what_stands_is_read_as_it_was_written(tmp_path: Path):
    """Findings, their samples, their order; an empty list where all that was found is cut off again."""
    run = RunDirectory(tmp_path)
    standing = CurrentFindings(run.diagnosis, pytest.fail)
    standing.write([])
    assert not run.diagnosis.exists()
    standing.write([found(), found("throughput")])
    assert written(run) == [found(), found("throughput")]
    standing.write([])
    assert written(run) == []


def test_a_file_is_written_where_something_changed(tmp_path: Path):
    """The same findings again leave the file as it is; a newer sentence replaces it."""
    path = tmp_path / "diagnosis.json"
    standing = CurrentFindings(path, pytest.fail)
    standing.write([found()])
    before = path.stat().st_ino
    standing.write([found()])
    assert path.stat().st_ino == before
    standing.write([found(step=9, summary="still nothing")])
    assert [finding.summary for finding in written(RunDirectory(tmp_path))] == ["still nothing"]


def test_a_disk_that_takes_nothing_is_said_once(tmp_path: Path):
    """The run goes on."""
    said: list[str] = []
    standing = CurrentFindings(tmp_path / "gone" / "diagnosis.json", said.append)
    standing.write([found()])
    standing.write([found(step=9)])

    assert standing.lost == 2
    assert len(said) == 1
    assert "the run goes on without its newest findings" in said[0]


def test_without_it_the_news_are_read(tmp_path: Path):
    """A run of before has findings.jsonl alone: the last of each rule, what is no finding left out."""
    run = RunDirectory(tmp_path)
    lines = JsonLines(run.findings)
    for row in (found().as_row(), {"step": 3}, found(step=9, summary="newer").as_row()):
        lines.append(row)
    lines.close()

    assert [finding.summary for finding in written(run)] == ["newer"]
    run.diagnosis.write_text("[[[")
    assert [finding.summary for finding in written(run)] == ["newer"]


@given(JSON, st.sampled_from(["severity", "step", "evidence", "advice", "samples", "rule"]))
def test_no_field_of_another_kind_is_a_finding(value: object, name: str):
    """Whatever stands in a file, what is read has the fields that it should have."""
    read = Finding.of_row(found().as_row() | {name: value})

    assert read is None or read.as_row() == Finding.of_row(read.as_row()).as_row()  # type: ignore[union-attr]
    assert Finding.of_row(value) is None
    assert read_current_findings(b"{}") is None


def test_looking_at_findings_loads_no_tensors():
    """Whoever watches a run starts at once: torch and numpy stay where they are, until something is diagnosed."""
    code = (
        "import sys; from gnomon.diagnosis import Finding; from gnomon.diagnosis.current_findings import written; "
        "from gnomon.insight.watch.watcher import Watcher; print({'torch', 'numpy'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "set()"


def test_diagnose_is_found_where_it_is_named():
    """`gnomon.diagnosis.diagnose` is the function; what is not there is said."""
    import gnomon.diagnosis
    from gnomon.diagnosis.recorded import diagnose

    assert gnomon.diagnosis.diagnose is diagnose
    with pytest.raises(AttributeError, match="no attribute 'cure'"):
        gnomon.diagnosis.cure  # noqa: B018
