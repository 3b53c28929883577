"""States come back bit for bit, from files that hold no code."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.errors import CheckpointError
from gnomon.core.types import State
from gnomon.records.checkpoints import check_form, read_states, write_states

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def through_files(folder: Path, state: State) -> State:
    """Return the state after it was written and read."""
    write_states(folder, {"part": state})
    return read_states(folder)["part"]


def raw(tensor: Tensor) -> list[int]:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def random_tensor(dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return a tensor of any bits, NaN and denormal numbers included; a bool has two."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(count) % 2 == 0).reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=random).view(dtype).reshape(shape)


@given(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3))
def test_every_type_and_shape_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int]
):
    """Scalars and empty tensors too, whatever the bits."""
    tensor = random_tensor(dtype, shape)
    back = through_files(tmp_path_factory.mktemp("s"), State({"x": tensor})).tensors["x"]

    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert raw(back) == raw(tensor)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_values_come_back_equal(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]):
    """Integers of any size and floats exactly: a float is written as the shortest text that reads back as itself."""
    back = through_files(tmp_path_factory.mktemp("s"), State(values=values)).values

    assert back == values
    assert repr(back) == repr(values)


def test_numbers_that_are_not_finite_come_back(tmp_path: Path):
    """A best score starts at minus infinity, and minus zero is not zero."""
    back = through_files(tmp_path, State(values={"best": -math.inf, "x": [math.nan, math.inf, -0.0]})).values

    assert back["best"] == -math.inf
    assert str(back["x"]) == "[nan, inf, -0.0]"


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path):
    """Tied weights, views, transposed and expanded tensors, and parameters: equal values, memory of their own."""
    base = torch.arange(6.0)
    tensors = {
        "base": base,
        "tied": base,
        "view": base[2:4],
        "row": base.view(2, 3)[1],
        "transposed": base.view(2, 3).T,
        "expanded": torch.tensor([1.0]).expand(3),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    back = through_files(tmp_path, State(tensors)).tensors

    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name
    back["tied"][0] = 9.0
    assert back["base"][0] == 0.0


def test_what_is_read_outlives_its_file(tmp_path: Path):
    """A checkpoint may be removed, or written over, while its tensors are in use."""
    state = through_files(tmp_path, State({"x": torch.ones(100_000)}))
    (tmp_path / "part.safetensors").write_bytes(b"\0" * 400_100)

    assert bool((state.tensors["x"] == 1).all())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"table": {1: 2.0}}, r"part\.table has the key 1"),
        ({"seen": [{1, 2}]}, r"part\.seen\[0\] is set, which JSON does not have"),
        ({"x": torch.zeros(1)}, "is a tensor; it belongs into State.tensors"),
    ],
)
def test_what_json_would_change_is_refused(tmp_path: Path, values: dict[str, Any], message: str):
    """A key 1 would come back as "1", silently: the path is named instead."""
    with pytest.raises(CheckpointError, match=message):
        write_states(tmp_path, {"part": State(values=values)})


@pytest.mark.parametrize("name", ["../out", "", "a.b", "a/b"])
def test_a_part_cannot_leave_its_folder(tmp_path: Path, name: str):
    """Names of parts are names of files."""
    with pytest.raises(CheckpointError, match="needs a name of letters"):
        write_states(tmp_path, {name: State()})


def test_a_reserved_name_is_refused(tmp_path: Path):
    """The file format keeps `__metadata__` for itself; a tensor of that name would be lost."""
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_states(tmp_path, {"part": State({"__metadata__": torch.zeros(1)})})


def test_values_are_json_for_any_reader(tmp_path: Path):
    """The file is one JSON object, readable without gnomon."""
    write_states(tmp_path, {"curriculum": State(values={"epoch": 3, "order": [2, 0, 1]})})

    assert json.loads((tmp_path / "curriculum.json").read_text()) == {"epoch": 3, "order": [2, 0, 1]}


@pytest.mark.parametrize(
    ("own", "forged"),
    [
        *((torch.zeros(3), torch.tensor([0.0, 1.0, bad])) for bad in (math.nan, math.inf, -math.inf)),
        *((torch.zeros(0), torch.tensor([bad])) for bad in (math.nan, math.inf)),
        *((torch.zeros(2, dtype=kind), torch.tensor([0, -1], dtype=kind)) for kind in (torch.int32, torch.int64)),
        (torch.zeros(0, dtype=torch.int64), torch.tensor([2**60])),
    ],
)
def test_numbers_that_no_part_writes_are_refused(own: Tensor, forged: Tensor):
    """What is finite stays so, and counts, positions and tokens are from 0 to 2^53."""
    with pytest.raises(ValueError, match="the tensor a has numbers that are not"):
        check_form(State({"a": forged}), State({"a": own}))


@pytest.mark.parametrize(
    ("own", "saved"),
    [
        (torch.tensor([math.nan, math.nan]), torch.tensor([math.nan, 1.0])),
        (torch.zeros(2, dtype=torch.int16), torch.tensor([-3, 3], dtype=torch.int16)),
        (torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2**31 - 1], dtype=torch.int32)),
    ],
)
def test_numbers_that_a_part_writes_are_taken(own: Tensor, saved: Tensor):
    """A value that is not known yet, a streak with a sign, an empty list, the largest count."""
    check_form(State({"a": saved}), State({"a": own}))
