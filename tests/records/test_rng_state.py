"""The random numbers that belong to the whole process."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gnomon.core.errors import CheckpointError
from gnomon.core.types import State
from gnomon.records.rng_state import Generators


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Leave the process as it was for other tests."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def drawn() -> list[float]:
    """Return numbers of all three, normal ones among them, which are made in pairs."""
    return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]


def test_a_run_begins_with_its_seed():
    """The same seed gives the same numbers, another one others, in all three."""
    first, again, other = [drawn() for seed in (5, 5, 6) if Generators(seed)]

    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_it_goes_on_where_it_was():
    """Also in the middle of a pair of normal numbers, and after the trip through JSON that a checkpoint makes."""
    generators = Generators(0)
    drawn()
    state = generators.state()
    following = [drawn() for _ in range(400)]
    drawn()
    generators.restore(State(state.tensors, json.loads(json.dumps(state.values))))

    assert [drawn() for _ in range(400)] == following


def test_the_state_of_another_python_is_refused():
    """Rather than going on with other numbers."""
    generators = Generators(0)
    state = generators.state()

    with pytest.raises(CheckpointError, match="of another Python"):
        generators.restore(State(state.tensors, {**state.values, "python": [99, [1, 2, 3], None]}))
