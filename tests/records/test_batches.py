"""The recorded batch: written, read, and refused with sequence, field and position."""

import copy
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.atomic_files import drop_step_files
from gnomon.core.errors import ConfigError, DatasetError
from gnomon.core.types import Batch
from gnomon.records.batches import BatchLog, parse_batch, read_batch, write_batch

CONTRACT = {
    "format": "gnomon-batch/1",
    "temperature": 0.7,
    "sequences": [
        {
            "prompt_id": "p0",
            "reward": 1.0,
            "truncated": False,
            "mask": [1, 1, 0, 1],
            "current": [-0.11, -1.2, 0.0, -0.4],
            "behavior": [-0.10, -1.3, 0.0, -0.5],
            "proximal": [-0.10, -1.2, 0.0, -0.5],
            "reference": [-0.20, -1.1, 0.0, -0.6],
            "values": [0.4, 0.5, 0.5, 0.7],
            "baseline": 0.35,
        },
    ],
}
SHORT = {"prompt_id": "p1", "reward": 0, "mask": [1], "current": [-1], "behavior": [-2]}


def changed(**changes: Any) -> dict[str, Any]:
    """Return the contract's file with fields of its sequence replaced; None takes one away."""
    content = copy.deepcopy(CONTRACT)
    sequence = content["sequences"][0]  # type: ignore[index]
    sequence.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del sequence[name]
    return content


def batch(rows: int, width: int, seed: int = 0) -> Batch:
    """Return a batch with every recorded field, answers of several lengths and holes in the mask."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    lengths[0] = width
    inside = torch.arange(width) < lengths[:, None]

    def matrix() -> Tensor:
        return -torch.rand(rows, width, generator=random, dtype=torch.float64)

    return Batch(
        tokens=torch.zeros(rows, width + 3, dtype=torch.long),
        prompt_lengths=torch.full((rows,), 3),
        lengths=lengths + 3,
        mask=inside & (torch.rand(rows, width, generator=random) < 0.8),
        rewards=torch.rand(rows, generator=random, dtype=torch.float64),
        is_graded=torch.ones(rows, dtype=torch.bool),
        is_truncated=torch.rand(rows, generator=random) < 0.5,
        group=torch.arange(rows) // 2,
        version=torch.zeros(rows, dtype=torch.long),
        behavior=matrix(),
        full_behavior=matrix(),
        temperature=0.7,
        baseline=torch.rand(rows, generator=random, dtype=torch.float64),
        bootstrap=torch.rand(rows, generator=random, dtype=torch.float64),
        proximal=matrix(),
        reference=matrix(),
        values=matrix(),
        teacher=matrix(),
    )


def further(written: Batch) -> Batch:
    """Return the batch with what turns, roles and several rewards add: rollouts 0 and 1 are one in two segments."""
    rows, width = written.mask.shape
    places = torch.arange(rows * width).reshape(rows, width)
    steps = torch.where(written.mask, 0.25 * (places % 5), 0.0).double()
    rollout = torch.arange(rows).clamp(min=1) - 1
    sums = torch.zeros(rows, dtype=torch.float64).index_add(0, rollout, steps.sum(1))
    return written.with_fields(
        rewards=sums[rollout],
        group=rollout // 2,
        component_rewards=torch.stack([sums[rollout], -sums[rollout]], 1),
        components=("right", "short"),
        component_weights=(2.0, 1.0),
        step_rewards=steps,
        sharpened=None if written.proximal is None else written.proximal / 2,
        turn=torch.where(written.mask, places % width // 2, 0),
        state=torch.where(written.mask, places % 3, 0),
        role=tuple("white" if row % 2 else "black" for row in range(rows)),
        rollout_id=rollout,
    )


def several(*rewards: Any) -> dict[str, Any]:
    """Return a file whose sequences have these component rewards."""
    return {"format": "gnomon-batch/1", "sequences": [SHORT | {"component_rewards": each} for each in rewards]}


def segments(*rewards: float) -> dict[str, Any]:
    """Return a file with one rollout in segments of these rewards."""
    rows = [SHORT | {"prompt_id": "p", "rollout_id": "x", "reward": each} for each in rewards]
    return {"format": "gnomon-batch/1", "sequences": rows}


def test_component_rewards_may_be_a_list_with_names_or_an_object():
    """A list with names and an object are the same; a weight that is not said is 1, a name the place in the list."""
    listed = several([0.5, 1], [0, 0]) | {"component_names": ["right", "short"], "component_weights": [2.0, 1.0]}
    named = several({"right": 0.5, "short": 1}, {"short": 0, "right": 0}) | {"component_weights": {"right": 2}}
    for content in (listed, named):
        read = parse_batch(content, "several").batch

        assert (read.components, read.component_weights) == (("right", "short"), (2.0, 1.0))
        assert read.component_rewards is not None
        assert read.component_rewards.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    bare = parse_batch(several([0.5, 1], [0, 0]) | {"component_weights": [2.0, 1.0]}, "several").batch
    assert (bare.components, bare.component_weights) == (("0", "1"), (2.0, 1.0))


def test_rollout_ids_are_told_apart_within_a_prompt():
    """Rollout 0 of prompt a and rollout 0 of prompt b are two, and a's two rows are one."""
    rows = [SHORT | {"prompt_id": name, "rollout_id": 0} for name in "aab"]
    read = parse_batch({"format": "gnomon-batch/1", "sequences": rows}, "ids").batch

    assert read.rollout_id is not None
    assert read.rollout_id.tolist() == [0, 0, 1]


def test_the_contract_s_example_is_read():
    """Masked positions are 0, everything else is in float64 as it stands in the file."""
    read = parse_batch(CONTRACT, "example")

    assert read.current.dtype == torch.float64
    assert read.current.tolist() == [[-0.11, -1.2, 0.0, -0.4]]
    assert read.batch.values is not None
    assert read.batch.values.tolist() == [[0.4, 0.5, 0.0, 0.7]]
    assert read.batch.mask.tolist() == [[True, True, False, True]]
    assert (read.batch.temperature, read.prompt_ids) == (0.7, ("p0",))
    assert read.batch.baseline is not None
    assert read.batch.baseline.tolist() == [0.35]


def test_what_may_be_left_out_has_its_default():
    """Temperature 1, not truncated, proximal as behavior; the rest stays None, so that a need can be named."""
    read = parse_batch({"format": "gnomon-batch/1", "sequences": [SHORT]}, "short").batch

    assert (read.temperature, read.is_truncated.tolist()) == (1.0, [False])
    assert read.proximal is not None
    assert read.proximal.tolist() == [[-2.0]]
    assert (read.reference, read.values, read.baseline) == (None, None, None)


def test_sequences_of_one_prompt_are_one_group_in_file_order():
    """Prompts b, a, b are groups 0, 1, 0, padded to the longest answer."""
    long = SHORT | {"mask": [1, 0], "current": [-1, -1], "behavior": [-1, -1]}
    sequences = [SHORT | {"prompt_id": "b"}, long | {"prompt_id": "a"}, SHORT | {"prompt_id": "b"}]
    content = {"format": "gnomon-batch/1", "sequences": sequences}
    read = parse_batch(content, "groups")

    assert read.batch.group.tolist() == [0, 1, 0]
    assert read.batch.mask.tolist() == [[True, False], [True, False], [True, False]]
    assert read.prompt_ids == ("b", "a", "b")


def test_masked_positions_may_hold_anything():
    """Null, text and NaN where the mask is 0 are read as 0."""
    anything = {"current": [-1, -1, None, -1], "behavior": [-1, -1, "x", -1], "values": [0, 0, float("nan"), 0]}
    read = parse_batch(changed(**anything), "any")

    assert (read.current[0, 2], read.batch.behavior[0, 2]) == (0.0, 0.0)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: int, width: int, seed: int):
    """Every recorded field comes back exactly, wherever the mask is true."""
    path = tmp_path_factory.mktemp("batch") / "b.json"
    written = further(batch(rows, width, seed))
    current = -torch.rand(rows, width, dtype=torch.float64)
    write_batch(path, written, current, [f"p{int(g)}" for g in written.group])
    read = read_batch(path)
    lengths = written.lengths - written.prompt_lengths

    whole = ("mask", "rewards", "is_truncated", "group", "baseline", "bootstrap", "temperature", "component_rewards")
    for name in (*whole, "turn", "rollout_id"):
        assert torch.equal(torch.as_tensor(getattr(read.batch, name)), torch.as_tensor(getattr(written, name))), name
    for name in ("behavior", "proximal", "sharpened", "reference", "values", "teacher", "step_rewards"):
        assert torch.equal(getattr(read.batch, name), torch.where(written.mask, getattr(written, name), 0.0)), name
    for name in ("components", "component_weights", "role"):
        assert getattr(read.batch, name) == getattr(written, name), name
    assert read.batch.state is not None
    assert written.state is not None
    chosen = list(zip(read.batch.state[read.batch.mask].tolist(), written.state[written.mask].tolist(), strict=True))
    assert len(set(chosen)) == len({mine for mine, _ in chosen}) == len({theirs for _, theirs in chosen})
    assert torch.equal(read.current, torch.where(written.mask, current, 0.0))
    assert read.batch.lengths.tolist() == lengths.tolist()
    absent = {f.name for f in fields(Batch) if getattr(read.batch, f.name) is None}
    assert absent == {
        "routing",
        "free_routing",
        "advantages",
        "returns",
        "weights",
        "top_tokens",
        "top_logprobs",
        "hints",
        "hint_lengths",
    }


def test_without_current_the_first_inner_step_is_meant(tmp_path: Path):
    """The current policy is then the proximal one, and without that the behavior."""
    for name, given_batch in [("proximal", batch(2, 3)), ("behavior", batch(2, 3).with_fields(proximal=None))]:
        write_batch(tmp_path / "b.json", given_batch)
        expected = torch.where(given_batch.mask, getattr(given_batch, name), 0.0)

        assert torch.equal(read_batch(tmp_path / "b.json").current, expected)


def test_rows_without_a_grade_are_left_out(tmp_path: Path):
    """They enter no statistic and no loss, so the recorded step is the same without them."""
    write_batch(tmp_path / "b.json", batch(4, 3).with_fields(is_graded=torch.tensor([True, False, True, True])))

    assert read_batch(tmp_path / "b.json").prompt_ids == ("0", "1", "1")


def test_ids_must_fit(tmp_path: Path):
    """Two ids for three rows say nothing about the third."""
    with pytest.raises(ConfigError, match=r"needs a prompt id per row.*got 2 ids"):
        write_batch(tmp_path / "b.json", batch(3, 2), prompt_ids=["a", "b"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior": None}, 'sequence 0: "behavior" is missing'),
        ({"reward": "1"}, 'sequence 0: "reward" should be a finite number, got "1"'),
        ({"reward": float("nan")}, '"reward" should be a finite number, got NaN'),
        ({"baseline": True}, '"baseline" should be a finite number, got true'),
        ({"truncated": 1}, '"truncated" should be true or false, got 1'),
        ({"mask": [1, 2, 0, 1]}, 'sequence 0: "mask" at position 1 should be 0 or 1, got 2'),
        ({"mask": "1101"}, '"mask" should be a list of 0 and 1, got a string'),
        ({"current": [-0.1, -1.2]}, 'sequence 0: "current" has 2 positions, and "mask" has 4'),
        ({"values": [0.1, "x", 0, 0]}, 'sequence 0: "values" at position 1 should be a finite number, got "x"'),
        ({"reference": [0.1, 0, 0, float("-inf")]}, '"reference" at position 3 should be a finite number'),
        ({"behavior": [-0.5, 0.4, 0, -1]}, '"behavior" at position 1 should be a log-probability, at most 0, got 0.4'),
        ({"current": [True, -1, 0, -1]}, '"current" at position 0 should be a finite number, got true'),
        ({"current": [10**400, -1, 0, -1]}, '"current" at position 0 should be a finite number'),
        ({"proximal": -0.1}, '"proximal" should be a list of numbers, got a number'),
        ({"proximals": [0, 0, 0, 0]}, '"proximals" is not known; did you mean "proximal"'),
        ({"prompt_id": [1]}, '"prompt_id" should be a string'),
        ({"teacher": [-1, 0.5, 0, -1]}, '"teacher" at position 1 should be a log-probability, at most 0, got 0.5'),
        ({"turn": [0, 1.5, None, 1]}, '"turn" at position 1 should be 0, 1, ..., got 1.5'),
        ({"turn": [1, 1, None, 0]}, '"turn" goes back'),
        ({"state": ["a", None, "b", "b"]}, '"state" at position 1 should be a whole number or a string, got null'),
        ({"role": 1}, '"role" should be a string, got 1'),
        ({"rollout_id": 1.5}, '"rollout_id" should be a whole number or a string, got 1.5'),
        ({"component_rewards": {"right": None}}, '"component_rewards" should be an object of names and finite numbers'),
        ({"step_rewards": [0, 0.25, 5, 0.5]}, '"step_rewards" of trained tokens add up to 0.75, and "reward" is 1'),
    ],
)  # fmt: skip
def test_a_malformed_sequence_names_itself_its_field_and_its_position(changes: dict[str, Any], message: str):
    """One message says where to look."""
    with pytest.raises(DatasetError) as raised:
        parse_batch(changed(**changes), "batch.json")

    assert message in str(raised.value)
    assert str(raised.value).startswith("batch.json is no usable batch:")


def test_a_conversation_that_is_left_out_of_the_loss_is_read_again(tmp_path: Path):
    """With mask_truncated a row has no trained token, so its turns earn nothing in the file; its reward stays."""
    whole = further(batch(4, 6))
    left = whole.with_fields(mask=whole.mask & (torch.arange(4) != 3)[:, None])
    write_batch(tmp_path / "b.json", left)
    read = read_batch(tmp_path / "b.json").batch

    assert (read.mask[3].any().item(), read.rewards.tolist()) == (False, whole.rewards.tolist())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected one JSON object, got a list"),
        ({"format": "gnomon-batch/2"}, '"format" should be "gnomon-batch/1", got "gnomon-batch/2"'),
        ({"format": "gnomon-batch/1", "sequences": []}, "at least one sequence"),
        ({"format": "gnomon-batch/1", "temperature": 0, "sequences": [SHORT]}, '"temperature" should be a number > 0'),
        ({"format": "gnomon-batch/1", "sequences": [3]}, "sequence 0: expected an object, got a number"),
        ({"format": "gnomon-batch/1", "sequences": [SHORT, SHORT | {"baseline": 0.5}]}, '"baseline" is missing'),
        (several({"a": 1, "b": 0}, {"a": 1}), "are not the same: b; a missing reward is no 0"),
        (several([1, 0], [1]), '"component_rewards" has 1 numbers, and there are 2 components: 0, 1'),
        (several([1, 0]) | {"component_names": ["a", "a"]}, '"component_names" should be a list of different strings'),
        (several({"a": 1}) | {"component_weights": {"a": "2"}}, "should be an object of names and numbers"),
        (several({"a": 1e39}), '"component_rewards" should be an object of names and finite numbers, or a list'),
        (several({"a": 1}) | {"component_weights": {"b": 2}}, 'are {"b": 2}, and the components a'),
        (segments(1, 0.5), '"reward" is 0.5 and that of sequence 0, of the same rollout_id, 1; each segment carries'),
    ],
)  # fmt: skip
def test_a_malformed_file_says_what_it_should_be(content: Any, message: str):
    """Format, temperature and sequences are checked first."""
    with pytest.raises(DatasetError) as raised:
        parse_batch(content, "batch.json")

    assert message in str(raised.value)


def test_three_problems_are_listed_and_the_others_counted(tmp_path: Path):
    """Thirty bad rewards: three of them, and how many more there are; five lines in all."""
    content = {"format": "gnomon-batch/1", "sequences": [SHORT | {"reward": None}] * 30}
    (tmp_path / "b.json").write_text(json.dumps(content))

    with pytest.raises(DatasetError) as raised:
        read_batch(tmp_path / "b.json")
    assert str(raised.value).count('"reward" should be') == 3
    assert str(raised.value).endswith("... and 27 more")


def test_a_file_that_is_no_json_or_not_there_is_said_to_be_so(tmp_path: Path):
    """The path and the reason, no traceback."""
    (tmp_path / "b.json").write_text("{")

    with pytest.raises(DatasetError, match=r"b.json is no JSON: .* line 1"):
        read_batch(tmp_path / "b.json")
    with pytest.raises(DatasetError, match=r"c.json cannot be read: No such file"):
        read_batch(tmp_path / "c.json")


def test_a_batch_that_cannot_be_written_does_not_end_the_run(tmp_path: Path):
    """A folder in the way, and a number that is none: each counted, the first said; later steps are written."""
    said: list[str] = []
    log = BatchLog(tmp_path / "batches", said.append)
    (tmp_path / "batches").write_text("in the way")
    log.write(1, batch(2, 2))
    (tmp_path / "batches").unlink()
    log.write(2, batch(2, 2).with_fields(rewards=torch.tensor([float("nan"), 0.0])))
    log.write(3, batch(2, 2))

    assert (len(said), log.lost) == (1, 2)
    assert os.listdir(tmp_path / "batches") == ["step-000003.json"]


def test_a_resume_removes_later_batches(tmp_path: Path):
    """Batches of steps 1 to 3, resumed at 1."""
    log = BatchLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, batch(2, 2))
    drop_step_files(tmp_path, "json", 1)

    assert os.listdir(tmp_path) == ["step-000001.json"]
