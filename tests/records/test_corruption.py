"""Damaged lines are counted alike, whatever is wrong with them."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gnomon.records.corruption import chosen_rollouts, damaged, damaged_rows, in_words, rollout_row
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord

ROLLOUT = {"step": 1, "group": 0, "task_id": "t", "question": "q", "reward": None}


def test_what_is_no_row_is_counted_and_what_is_not_whole_yet_is_not(tmp_path: Path):
    """Text, a list, an object without a step, one with half a step: 4; a row counts as none, nor does half a line."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\nnonsense\n[1]\n{}\n{"step": 1.5}\n{"step": 2}\n{"step": 3, "a')

    assert damaged_rows(path) == 4
    assert damaged_rows(tmp_path / "none.jsonl") == 0


@given(st.binary(max_size=60))
def test_no_bytes_stop_the_count(line: bytes):
    """Whatever a line holds, it is a rollout or it is none."""
    assert rollout_row(line) is None or isinstance(rollout_row(line), dict)


def test_a_rollout_needs_a_group_a_reward_and_texts():
    """Without any of these nothing can be said of it; an error has no reward, and is a rollout."""
    assert rollout_row(json.dumps(ROLLOUT).encode()) == ROLLOUT
    for name in ("group", "task_id", "question", "reward"):
        assert rollout_row(json.dumps({k: v for k, v in ROLLOUT.items() if k != name}).encode()) is None
    assert rollout_row(json.dumps(ROLLOUT | {"reward": "1"}).encode()) is None


def test_every_file_of_a_run_is_looked_through(tmp_path: Path):
    """Two lines of metrics, one of a rollout file; the sound files are not named, and nothing is written."""
    run = RunDirectory(tmp_path)
    run.metrics.write_text("x\n\n" + '{"step": 1}\n')
    run.evaluations.write_text('{"step": 0}\n')
    run.rollouts.mkdir()
    (run.rollouts / "step-000001.jsonl").write_text(json.dumps(ROLLOUT) + "\n{\n")
    (run.rollouts / ".step-000002.jsonl.tmp").write_text("being written")

    assert damaged(run) == {"metrics.jsonl": 2, "rollouts": 1}
    assert damaged(run, rollouts=0) == {"metrics.jsonl": 2}
    assert (run.rollouts / ".step-000002.jsonl.tmp").exists()
    assert [row["step"] for row in RunRecord(tmp_path).metrics()] == [1]


def test_of_many_rollouts_evenly_spaced_steps_are_read(tmp_path: Path):
    """Ten files of 100 bytes with room for 300: every fourth, and the last; with room for all of them all."""
    run = RunDirectory(tmp_path)
    run.rollouts.mkdir()
    for step in range(1, 11):
        (run.rollouts / f"step-{step:06d}.jsonl").write_bytes(b"x" * 100)

    assert list(chosen_rollouts(run, 300)) == [1, 5, 9, 10]
    assert list(chosen_rollouts(run, 300, also=[2, 99])) == [1, 2, 5, 9, 10]
    assert len(chosen_rollouts(run)) == 10


def test_one_sentence_says_it():
    """One line, several files; nothing of sound ones."""
    assert in_words({}) == ""
    assert in_words({"rollouts": 1}) == "1 damaged line in rollouts was passed over"
    said = in_words({"metrics.jsonl": 1, "evaluations.jsonl": 2, "rollouts": 3})
    assert said == "1 damaged line in metrics.jsonl, 2 in evaluations.jsonl and 3 in rollouts were passed over"
