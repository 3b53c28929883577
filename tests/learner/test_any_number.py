"""A checkpoint of three processes is gone on from by two, by one, and by three again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.conftest import build_batch
from tests.learner.together import alone, moved, recipe_for, together, walk

from gnomon.algorithms import GRPO
from gnomon.core.types import State
from gnomon.records.checkpoints import Checkpoints, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = recipe_for(GRPO, 3)


def test_a_checkpoint_is_of_no_number_of_processes(tmp_path: Path):
    """3 -> 2 -> 1 -> 3: each writes its shares, and what the next one reads is every bit of it."""
    batches = [build_batch(seed, 3, 3) for seed in range(2)]
    checkpoints = Checkpoints(tmp_path, keep_last=9)

    def saved(learner: Any, step: int) -> State:
        checkpoints.save(step, {"learner": learner.lend()}, lambda folder: None)
        return load(tmp_path / f"step-{step}", lazily=("learner",))["learner"]

    with together(RECIPE) as three:
        walk(three, GRPO, batches[:1])
        wanted = three.state()
        state = saved(three, 1)
        with together(recipe_for(GRPO, 2)) as two:
            two.restore(state)
            assert_same(two.state(), wanted)
            state = saved(two, 2)
        one = alone(recipe_for(GRPO, 1))
        one.restore(state)
        assert_same(one.state(), wanted)
        state = saved(one, 3)
        walk(three, GRPO, batches[1:], 1)
        assert moved(three.state().tensors, wanted.tensors) > 1e-4
        three.restore(state)
        assert_same(three.state(), wanted)
    files = {step: len(list((tmp_path / f"step-{step}" / "state").rglob("*.safetensors"))) for step in (1, 2, 3)}
    assert files == {1: 3, 2: 2, 3: 1}


def assert_same(left: State, right: State) -> None:
    """Assert that values and every bit of the tensors are equal."""
    assert left.values == right.values
    assert left.tensors.keys() == right.tensors.keys()
    assert all(torch.equal(tensor, right.tensors[name]) for name, tensor in left.tensors.items())
