"""What a step made of its rollouts is written beside them, and read back."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Batch, Grade, Group, Rollout, Task
from gnomon.records.rollouts import RolloutLog, TokenRecord, TokenStats, read_rollouts, read_taught, token_records
from gnomon.rollouts.collate import collate

TASK = Task("t1", (1, 2), "1 + 1 = ?")


def rollout(length: int, error: str | None = None, mask: tuple[bool, ...] | None = None) -> Rollout:
    """Return an answer of so many tokens."""
    numbers = (-0.5,) * length
    grade = Grade(None if error else 1.0, error=error)
    chosen = (True,) * length if mask is None else mask
    return Rollout("t1", (1, 2), (3,) * length, chosen, numbers, numbers, "x", grade, 0, 0, "stop")


def prepared(rollouts: list[Rollout], advantages: list[list[float]], **fields: torch.Tensor) -> Batch:
    """Return the batch of the rollouts with these advantages."""
    batch = collate([Group(TASK, tuple(rollouts))], 1.0)
    return batch.with_fields(advantages=torch.tensor(advantages), **fields)


def test_one_number_where_it_is_the_same_on_every_token():
    """A group baseline gives each answer one number; a critic gives each token its own; padding is left out."""
    batch = prepared([rollout(2), rollout(3)], [[0.5, 0.5, 9.0], [0.1, -0.2, 0.3]])

    assert [row["advantages"] for row in token_records(batch, [rollout(2), rollout(3)])] == [0.5, [0.1, -0.2, 0.3]]


def test_what_was_not_trained_on_has_no_advantage():
    """An error has an empty mask, and so no advantage; what a tool wrote has 0 among the others' numbers."""
    failed, called = rollout(2, error="timeout"), rollout(3, mask=(True, False, True))
    rows = list(token_records(prepared([failed, called], [[0.0] * 3, [1.0, 7.0, 2.0]]), [failed, called]))

    assert "advantages" not in rows[0]
    assert rows[1]["advantages"] == [1.0, 0.0, 2.0]


def test_numbers_are_short():
    """Five digits are kept: of the largest advantage of the step, and after the point of log-probabilities."""
    batch = prepared(
        [rollout(2)],
        [[0.000123456789, 0.00054321987]],
        proximal=torch.tensor([[-0.123456789, -7.7654321]]),
        baseline=torch.tensor([1 / 3], dtype=torch.float64),
    )
    (row,) = token_records(batch, [rollout(2)])

    assert row == {"advantages": [0.00012346, 0.00054322], "proximal": [-0.12346, -7.76543], "baseline": 0.33333}


def test_what_was_seen_of_some_rows_is_written_for_these(tmp_path: Path):
    """Entropy, and log-probabilities where no algorithm asked for any; what one asked for is not replaced."""
    rollouts = [rollout(2), rollout(3)]
    advantages = [[1.0] * 3, [-1.0] * 3]
    seen = TokenStats((1,), torch.tensor([[-0.1, -0.2, -0.3]]), torch.tensor([[0.123456, 0.5, math.inf]]))
    RolloutLog(tmp_path).write(1, [Group(TASK, tuple(rollouts))], batch=prepared(rollouts, advantages), seen=seen)
    first, second = read_rollouts(tmp_path / "step-000001.jsonl")
    own = prepared(rollouts, advantages, proximal=torch.full((2, 3), -0.7))
    asked = list(token_records(own, rollouts, seen))

    assert (first.taught.proximal, first.taught.entropy) == ((), ())
    assert second.taught.proximal == pytest.approx((-0.1, -0.2, -0.3))
    assert second.taught.entropy[:2] == (0.12346, 0.5)
    assert math.isnan(second.taught.entropy[2])
    assert asked[1]["proximal"] == [-0.7] * 3
    assert "entropy" not in asked[0]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path):
    """A refused step is written all the same, and read back as not a number."""
    batch = prepared([rollout(2)], [[math.nan, 1.0]], values=torch.tensor([[math.inf, 0.0]]))
    RolloutLog(tmp_path).write(1, [Group(TASK, (rollout(2),))], batch=batch)
    (found,) = read_rollouts(tmp_path / "step-000001.jsonl")

    assert math.isnan(found.taught.advantages[0])
    assert math.isnan(found.taught.values[0])
    assert found.taught.advantages[1] == 1.0


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=4))
def test_what_is_read_is_what_was_taught(advantages: list[list[float]]):
    """Each token's advantage comes back, to five digits of the largest."""
    rollouts = [rollout(len(row)) for row in advantages]
    width = max(map(len, advantages))
    batch = prepared(rollouts, [row + [0.0] * (width - len(row)) for row in advantages])
    largest = max(abs(value) for row in advantages for value in row)
    for row, one, said in zip(advantages, rollouts, token_records(batch, rollouts), strict=True):
        read = read_taught({"response": one.response, **json.loads(json.dumps(said))})
        assert read.advantages == pytest.approx(row, abs=1e-4 * largest + 1e-12)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_rows_in_another_order_are_written_beside_their_own_rollouts(order: list[int], kept: int):
    """A batch whose rows were shuffled or dropped says of each rollout what its own row says, or nothing."""
    rollouts = [replace(rollout(2), task_id=f"t{place}") for place in range(4)]
    batch = prepared(rollouts, [[float(place)] * 2 for place in range(4)]).rows(order[:kept])
    found = list(token_records(batch, rollouts))

    assert batch.task_ids == tuple(f"t{place}" for place in order[:kept])
    assert found == [{"advantages": float(place)} if place in order[:kept] else {} for place in range(4)]


def test_a_row_of_no_rollout_is_an_error():
    """A batch of other rollouts is refused with the ids of its rows, and is never left out in silence."""
    batch = prepared([rollout(2)], [[1.0, 1.0]])
    with pytest.raises(ConfigError, match=r"1 of 1 rows belong to no rollout of the step: \['t1'\]"):
        list(token_records(batch, [rollout(3)]))
    with pytest.raises(ConfigError, match="without task ids"):
        list(token_records(batch.with_fields(task_ids=()), [rollout(2)]))


def test_files_without_it_are_read_as_before(tmp_path: Path):
    """Rollouts that were written before this was, and those of refused groups, have nothing taught."""
    batch = prepared([rollout(1)], [[2.0]])
    RolloutLog(tmp_path).write(1, [Group(TASK, (rollout(1),))], [Group(TASK, (rollout(1),))], batch)
    kept, refused = read_rollouts(tmp_path / "step-000001.jsonl")

    assert kept.taught == TokenRecord(advantages=(2.0,))
    assert refused.taught == TokenRecord()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("advantages", [1.0], "the field advantages should be a list of 2 numbers"),
        ("advantages", "1.0", "the field advantages holds what is no number"),
        ("proximal", {"0": 1}, "the field proximal should be a list of 2 numbers"),
        ("values", [0.0, "x"], "the field values holds what is no number"),
        ("baseline", "high", "the field baseline is a str"),
        ("reward", 1e300, r"the reward is 1e\+300, where a number of float32 stands"),
        ("reward", -3.5e38, r"the reward is -3.5e\+38, where"),
        ("reward", math.nan, "the reward is nan, where"),
        ("stop", "wat", "the field stop is 'wat', where stop or length stands"),
    ],
)
def test_what_is_no_record_is_refused(field: str, value: object, said: str, tmp_path: Path):
    """A line with a field of another form is named with its place."""
    RolloutLog(tmp_path).write(1, [Group(TASK, (rollout(2),))])
    path = tmp_path / "step-000001.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}) + "\n")

    with pytest.raises(DatasetError, match=f"line 1: no rollout record: {said}"):
        list(read_rollouts(path))
