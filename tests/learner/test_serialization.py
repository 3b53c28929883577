"""What travels between processes comes out as it went in."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.batches import presets
from tests.learner.together import PLAN

from gnomon.algorithms import Algorithm
from gnomon.algorithms.imitation import imitation
from gnomon.algorithms.sections import SelfImitationBuffer
from gnomon.core.metrics import EffectiveSize, Last, Max, Mean, Metrics, Sum
from gnomon.learner.serialization import boxed, packed, unboxed, unpacked
from gnomon.learner.spec import LearnerSpec
from gnomon.testing import make_batch
from gnomon.training.critic_updates import monte_carlo

PPO = presets("ppo")[0]
DERIVED = [
    monte_carlo(PPO),
    imitation(SelfImitationBuffer()),
    imitation(replace(SelfImitationBuffer(), weigh="surplus"), PPO.critic),
]


def sent(value: object) -> object:
    with packed(value) as (text, file):
        return unpacked(text, os.dup(file))


def stored(value: object) -> object:
    """By way of an array that nobody may write to, such as a store of objects hands out."""
    text, memory = boxed(value)
    memory.flags.writeable = False
    return unboxed(text, memory)


@pytest.mark.parametrize("algorithm", [*presets(), *DERIVED], ids=lambda a: a.name)
def test_every_algorithm_travels(algorithm: Algorithm):
    """Presets, and those that a run makes of them: equal, piece for piece."""
    assert sent(algorithm) == algorithm


def test_a_recipe_travels():
    """With its plans."""
    recipe = LearnerSpec("tiny", PPO, PLAN, steps=3)

    assert sent(recipe) == recipe


@pytest.mark.parametrize("travel", [sent, stored])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 5)], ids=str)
def test_tensors_travel_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], travel: Callable[[object], Any]):
    """Of every type and shape, several in a row, also where one is a view with other strides."""
    tensor = (torch.randn(shape) * 3).to(dtype)
    turned = tensor.T if tensor.ndim == 2 else tensor

    for found, wanted in zip(travel([tensor, turned, tensor]), [tensor, turned, tensor], strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_what_was_boxed_is_read_where_it_lies():
    """Nothing is copied on the way out; each tensor begins at a multiple of 64 bytes, and the array lives as long."""
    text, memory = boxed([torch.arange(3), torch.ones(5)])
    start = memory.ctypes.data
    found = unboxed(text, memory)
    del memory

    assert [tensor.data_ptr() - start for tensor in found] == [0, 64]
    assert found[1].tolist() == [1.0] * 5


def test_a_tensor_that_arrived_is_ones_own():
    """Writing into it changes neither what was sent nor what another receives."""
    with packed({"x": torch.zeros(3)}) as (text, file):
        left, right = (unpacked(text, os.dup(file))["x"] for _ in range(2))
    left += 1

    assert right.tolist() == [0.0] * 3


def test_batches_and_metrics_travel():
    """A batch checks its shapes anew; measures are merged by whoever receives them."""
    batch = make_batch([1.0, None], [[1, 1], [1]], behavior=[[-1.0, -2.0], [-3.0]])
    batch = batch.with_fields(own_weights={"kl": torch.ones(2, 2)})
    metrics = Metrics.of({"a": Mean(1.5, 2), "b": Sum(3), "c": Max(4.0), "d": Last(5), "e": EffectiveSize(1, 2.0, 3.0)})

    found = sent({"batch": batch, "metrics": metrics})

    assert found["batch"].mask.tolist() == batch.mask.tolist()
    assert found["batch"].own_weights["kl"].shape == (2, 2)
    assert (found["metrics"] + metrics).values() == (metrics + metrics).values()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_plain_values_travel(value: object):
    """Tuples stay tuples."""
    assert sent({"it": (value, [value])}) == {"it": (value, [value])}


@dataclass(frozen=True)
class Holding:
    """Something that JSON does not have."""

    it: object


@pytest.mark.parametrize("what", [object(), {1}, b"", lambda: 1], ids=["object", "set", "bytes", "function"])
def test_what_cannot_travel_is_named(what: object):
    """No pickle: it is refused instead."""
    with pytest.raises(TypeError, match=f"a {type(what).__name__} cannot travel"), packed(Holding(what)):
        pass
