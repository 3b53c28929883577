"""Rollouts are written whole, and read back as they were."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.atomic_files import drop_step_files, step_files
from gnomon.core.errors import DatasetError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.records.rollouts import RolloutLog, read_rollouts

TASK = Task("t1", (1, 2), "1 + 1 = ?")
GRADES = st.one_of(
    st.builds(Grade, st.floats(-10, 10), st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=2)),
    st.builds(Grade, st.none(), st.just({}), st.text(min_size=1)),
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Any rollout: empty answers, tool tokens, every text that UTF-8 can hold."""
    length = draw(st.integers(0, 5))
    numbers = st.tuples(*[st.floats(-50, 0)] * length)
    return Rollout(
        task_id=draw(st.text(max_size=8)),
        prompt=draw(st.tuples(st.integers(0, 200_000))),
        response=draw(st.tuples(*[st.integers(0, 200_000)] * length)),
        mask=draw(st.tuples(*[st.booleans()] * length)),
        logprobs=draw(numbers),
        full_logprobs=draw(numbers),
        text=draw(st.text(st.characters(codec="utf-8"))),
        grade=draw(GRADES),
        oldest_version=draw(st.integers(0, 9)),
        newest_version=draw(st.integers(0, 9)),
        stop=draw(st.sampled_from(["stop", "length"])),
    )


def rollout(reward: float | None = 1.0, logprob: float = -0.5, text: str = "2") -> Rollout:
    """Return a plain answer of one token."""
    grade = Grade(reward, error="no answer" if reward is None else None)
    return Rollout("t1", (1, 2), (3,), (True,), (logprob,), (logprob,), text, grade, 4, 4, "stop")


@given(st.lists(rollouts(), min_size=1, max_size=3), st.lists(rollouts(), max_size=2))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, kept: list[Rollout], cut: list[Rollout]
):
    """Every field of every rollout comes back equal, with its group and whether it was kept."""
    directory = tmp_path_factory.mktemp("rollouts")
    RolloutLog(directory).write(12, [Group(TASK, tuple(kept))], [Group(TASK, (r,)) for r in cut])
    read = list(read_rollouts(directory / "step-000012.jsonl"))

    assert [row.rollout for row in read] == kept + cut
    assert [row.group for row in read] == [0] * len(kept) + list(range(1, len(cut) + 1))
    assert [row.is_kept for row in read] == [True] * len(kept) + [False] * len(cut)
    assert {(row.step, row.question) for row in read} == {(12, "1 + 1 = ?")}


def test_a_line_says_what_a_person_wants_to_know(tmp_path: Path):
    """Reward or error, text, tokens, log-probabilities, versions and stop reason are named fields."""
    RolloutLog(tmp_path).write(1, [Group(TASK, (rollout(None),))])
    row = json.loads((tmp_path / "step-000001.jsonl").read_text())

    assert row == {
        "step": 1, "group": 0, "kept": True, "question": "1 + 1 = ?", "task_id": "t1", "text": "2",
        "reward": None, "error": "no answer", "parts": {}, "answer": None, "stop": "stop", "oldest_version": 4,
        "newest_version": 4, "prompt": [1, 2], "response": [3], "logprobs": [-0.5],
    }  # fmt: skip


def test_nan_is_null_and_half_a_character_is_spelled_out(tmp_path: Path):
    """Neither a log-probability that is not a number nor text that UTF-8 cannot hold stops a run."""
    RolloutLog(tmp_path).write(1, [Group(TASK, (rollout(logprob=math.nan, text="\ud800"),))])
    (row,) = read_rollouts(tmp_path / "step-000001.jsonl")

    assert math.isnan(row.rollout.logprobs[0])
    assert row.rollout.text == "\ud800"


def test_a_resume_removes_later_steps_and_torn_files(tmp_path: Path):
    """Steps 1 to 4 and what a killed writer left, resumed at 2: files 1 and 2 remain, and what is not ours."""
    log = RolloutLog(tmp_path)
    for step in range(1, 5):
        log.write(step, [Group(TASK, (rollout(),))])
    (tmp_path / ".step-000005.jsonl.ab12.tmp").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    drop_step_files(tmp_path, "jsonl", 2)

    assert [step for step, _ in step_files(tmp_path, "jsonl")] == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-000001.jsonl", "step-000002.jsonl"]
    drop_step_files(tmp_path / "none", "jsonl", 2)


def test_a_full_disk_costs_rollouts_and_not_the_run(tmp_path: Path):
    """A folder that cannot be made is warned of once, counted twice."""
    (tmp_path / "rollouts").write_text("in the way")
    said: list[str] = []
    log = RolloutLog(tmp_path / "rollouts", said.append)
    log.write(1, [])
    log.write(2, [])

    assert (len(said), log.lost) == (1, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1: no rollout record"), ("[]", "line 1: no rollout record"), ('{"step": 1}', "'group' is missing")],
)
def test_a_damaged_file_names_line_and_field(tmp_path: Path, line: str, message: str):
    """The reader says where and what."""
    (tmp_path / "x.jsonl").write_text(line)

    with pytest.raises(DatasetError, match=message):
        list(read_rollouts(tmp_path / "x.jsonl"))
