"""What a reward or an environment draws is a function of the sample: not of the process, nor of what came before."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gnomon.core.processes.client import Limits
from gnomon.core.processes.seeding import seed_all
from gnomon.rewards.base import Sample
from gnomon.rewards.function import UserFunction
from gnomon.rewards.grader_pool import GradingPool
from gnomon.rewards.grading import Grading, WeightedReward

DRAWING = """
import random, time
import numpy as np

def pay(completion, **columns):
    time.sleep(0.02)
    if completion == "other":
        random.seed()
        np.random.seed()
    return random.random() + 2 * float(np.random.random())

def order(completion, **columns):
    return float("".join(str(n) for n in {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}.values()) == "12345") + hash("a") % 97
"""


@pytest.fixture
def kept():
    """Leave the process as it was for other tests."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def graded(folder: Path, function: str, samples: list[Sample]) -> list[float | None]:
    """Return the grades of a pool of two that is asked all at once."""
    (folder / "drawing.py").write_text(DRAWING)
    grading = Grading((WeightedReward(UserFunction(f"{folder}/drawing.py:{function}")),))

    async def body() -> list[float | None]:
        async with GradingPool(grading, Limits(workers=2, deadline_seconds=60.0)) as pool:
            return [grade.reward for grade in await asyncio.gather(*map(pool.grade, samples))]

    return asyncio.run(body())


def test_every_generator_begins_with_the_seed(kept):
    """Python's, NumPy's and torch's; another seed and another purpose give other numbers in each."""

    def drawn(seed: int, purpose: str) -> list[float]:
        seed_all(seed, purpose)
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    first = drawn(2**120 + 1, "reward")

    assert drawn(2**120 + 1, "reward") == first
    for other in (drawn(2**120 + 2, "reward"), drawn(2**120 + 1, "environment")):
        assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_reward_draws_the_same_for_the_same_sample(tmp_path: Path):
    """In whichever process, in whatever order, after one that seeded everything anew; equal answers draw apart."""
    samples = [Sample("p", "same", seed=seed) for seed in range(6)]
    stirring = [Sample("p", "other", seed=9)] * 3
    first = graded(tmp_path, "pay", samples)
    again = graded(tmp_path, "pay", [*stirring, *reversed(samples), *stirring])

    assert again[3:9][::-1] == first
    assert len(set(first)) == len(samples)


def test_texts_hash_alike_in_every_session(tmp_path: Path):
    """So a reward that walks a set of texts walks it in the same order when the run is resumed."""
    sample = [Sample("p", "c")]

    assert graded(tmp_path, "order", sample) == graded(tmp_path, "order", sample)
