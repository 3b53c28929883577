"""Runs of TRL, verl and prime-rl are read as these libraries wrote them."""

import json
import os
import re
from pathlib import Path

import pytest
from tests import foreign

from gnomon.core.errors import DatasetError, RunDirectoryError
from gnomon.core.metric_meanings import metric_of
from gnomon.records import foreign as reader
from gnomon.records.foreign import is_foreign, read_foreign


def test_every_name_of_the_table_is_a_metric_of_gnomon():
    """And every pattern is a regular expression that has the brackets that its name asks for."""
    for table in reader._NAMES.values():
        for theirs, ours in table.items():
            pattern = re.compile(theirs)
            assert ours.count("\\") <= pattern.groups
            assert ours == reader.SCORE or metric_of(ours.replace("\\1", "some")) is not None, ours


def test_a_run_of_trl(tmp_path: Path):
    """Rows every second step; null, unknown names and the summary are left out; evaluations are apart."""
    run = read_foreign(foreign.trl(tmp_path / "r", [0.1, 0.2], {4: {"1+1?": [1.0, 0.0, None]}}))

    assert (run.library, run.steps, run.last_step, run.scores) == ("TRL", 4, 4, ((2, 0.5),))
    assert run.rows[1]["rollout/reward_mean"] == run.rows[1]["reward/right_mean"] == 0.2
    assert set(run.rows[0]) <= {"step"} | {ours for ours in run.rows[0] if metric_of(ours)}
    (group,) = run.groups(4)
    assert (group.task.text, group.rewards) == ("1+1?", (1.0, 0.0))
    assert group.rollouts[0].grade.parts == {"right": 1.0}
    assert group.rollouts[2].grade.error
    assert run.groups(2) == []


def test_the_newest_checkpoint_has_the_state(tmp_path: Path):
    """Without a state of its own a folder has the one of the checkpoint with the most steps: 10 is after 9."""
    for steps in (1, 5):
        foreign.trl(tmp_path / f"checkpoint-{steps * 2}", [0.1] * steps)

    assert read_foreign(tmp_path).last_step == 10


def test_several_rewards_are_added_and_said(tmp_path: Path):
    """TRL's weights are not in its files."""
    run = read_foreign(foreign.trl(tmp_path, [0.1], **{"rewards/format/mean": 0.5}))

    assert "reward_weights" in run.notes[-1]


def test_a_run_of_verl(tmp_path: Path):
    """The score before the KL penalty is the reward; validation has answers by prompt."""
    run = read_foreign(foreign.verl(tmp_path, [0.3, 0.4], {"1+1?": [1.0, 0.0]}))

    assert (run.library, run.last_step, run.scores) == ("verl", 2, ((0, 0.1), (2, 0.6)))
    assert run.rows[-1]["rollout/reward_mean"] == 0.4
    assert run.groups(2) == []
    assert run.groups(2, is_held_out=True)[0].rewards == (1.0, 0.0)


def test_a_resumed_run_repeats_steps(tmp_path: Path):
    """The last value of a step counts, and what was logged after it before is gone; NaN, also as text, is out."""
    rows = [foreign.verl_row(step, reward) for step, reward in ((1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9), (2, 0.5))]
    rows += [foreign.verl_row(3, 0.6, **{"actor/entropy": "NaN", "actor/grad_norm": float("nan")})]
    foreign.lines(tmp_path / "a.jsonl", rows)
    run = read_foreign(tmp_path)

    assert [(row["step"], row["rollout/reward_mean"]) for row in run.rows] == [(1, 0.1), (2, 0.5), (3, 0.6)]
    assert "loss/entropy_nats" not in run.rows[-1]
    assert "3 steps were logged again" in run.notes[0]
    assert "actor/entropy, actor/grad_norm" in run.notes[1]


def test_several_event_files_of_verl(tmp_path: Path):
    """A resumed run writes one more file; its steps replace those of the first."""
    foreign.event_file(tmp_path / "tb", [foreign.verl_row(step, 0.1) for step in (1, 2, 3)])
    foreign.event_file(tmp_path / "tb", [foreign.verl_row(step, 0.5) for step in (2, 3)])
    run = read_foreign(tmp_path)

    assert run.library == "verl"
    assert [row["rollout/reward_mean"] for row in run.rows] == pytest.approx([0.1, 0.5, 0.5])


def test_event_files_of_a_trainer(tmp_path: Path):
    """The Trainer writes train/ before TRL's names and eval/ for eval_."""
    rows = [{"step": 1, "data": {"train/reward": 0.5, "train/grad_norm": 0.1, "eval/reward": 0.25}}]
    foreign.event_file(tmp_path / "runs" / "host", rows)
    run = read_foreign(tmp_path)

    assert (run.library, run.scores) == ("TRL", ((1, 0.25),))
    assert run.rows[0]["learner/gradient_norm"] == pytest.approx(0.1)


def test_a_run_of_prime_rl(tmp_path: Path):
    """Rows of one step are one row; rewards have weights; of both kinds of traces the effective ones count."""
    run = read_foreign(foreign.prime_rl(tmp_path, [0.3, 0.4], {1: {"1+1?": [1.0, None]}}))

    assert (run.library, run.notes) == ("prime-rl", ())
    assert run.rows[1] == {
        "step": 1,
        "rollout/reward_mean": 0.4,
        "rollout/error_fraction": 0.0,
        "tokens/generated": 640.0,
        "stream/staleness_steps_mean": 1.0,
        "learner/gradient_norm": 0.3,
        "learner/learning_rate": 1e-6,
        "loss/entropy_nats": 0.6,
        "mismatch/k3_nats": 0.001,
    }
    (group,) = run.groups(1)
    assert group.rewards == (1.0,)
    assert group.rollouts[0].text == "answer 0"
    assert "effective" in str(run.answered[False][1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trainer_state.json", b"", "no state of a Trainer"),
        ("trainer_state.json", b"[1]", "no state of a Trainer"),
        ("trainer_state.json", b'{"log_history": 3}', "no state of a Trainer"),
        ("trainer_state.json", b"[" * 100_000, "no state of a Trainer"),
        ("trainer_state.json", b'{"log_history": [{"step": 1, "loss": 2.0}]}', "logs no metric"),
        ("log.jsonl", b"\x00\xff\n{}\n[]\n", "holds no run"),
        ("log.jsonl", b'{"step": 1, "data": {"mine": 2}}\n', "it has mine"),
        ("log.jsonl", b'{"step": "1", "data": {"critic/score/mean": 2}}\n', "holds no run"),
        ("events.out.tfevents.1.host", b"garbage" * 9, "event file of TensorBoard|holds no run"),
    ],
)
def test_hostile_files_end_in_words(tmp_path: Path, name: str, content: bytes, said: str):
    """Damaged, foreign and deep files are an error that names the folder or file."""
    (tmp_path / name).write_bytes(content)

    assert is_foreign(tmp_path)
    with pytest.raises(RunDirectoryError, match=said):
        read_foreign(tmp_path)


def test_hostile_answers_end_in_words(tmp_path: Path):
    """A table that is none is named; rows of other forms have no reward."""
    run = read_foreign(foreign.trl(tmp_path / "trl", [0.1], {2: {"1+1?": [1.0]}}))
    run.answered[False][2].write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"completions_00002\.parquet is no table"):
        run.groups(2)

    path = foreign.prime_rl(tmp_path / "prime", [0.3], {0: {}})
    odd = [{"traces": 3}, {"task": [], "traces": [{"rewards": [], "calls": {}, "nodes": [3]}, 7]}, {}]
    odd += [{"traces": [{"rewards": {"a": {"score": "inf"}, "b": {"score": 1, "weight": None}, "c": 3}}]}]
    foreign.lines(path / "rollouts/step_0/train/effective/traces.jsonl", odd)
    assert all(not group.rewards for group in read_foreign(path).groups(0))


def test_a_pipe_is_refused(tmp_path: Path):
    """What would never end is not read."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_foreign(tmp_path)


def test_a_run_of_gnomon_is_none(tmp_path: Path):
    """Also where its experiment is lost: the card says whose it is."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    (tmp_path / "run.json").write_text("{}")
    assert not is_foreign(tmp_path)
    assert not is_foreign(tmp_path / "nothing")
