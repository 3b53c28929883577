"""The pieces of one's own in examples/: each is short, passes its trial, and computes what its docstring says."""

from math import exp
from pathlib import Path

import pytest
import torch
from examples.own_advantage import MEDIAN
from examples.own_piece import FADING

from gnomon.algorithms import resolve
from gnomon.testing import loss_and_gradient, make_batch, try_pieces

FOLDER = Path(__file__).parents[2] / "examples"
RECIPES = {"own_advantage.py": "MEDIAN", "own_piece.py": "FADING", "own_statistics.py": "POSITIVE_CAP"}


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_is_short_and_passes_its_trial(file: str):
    """At most 30 lines, and what `gnomon plan` asks of any piece."""
    assert len((FOLDER / file).read_text(encoding="utf-8").splitlines()) <= 30
    try_pieces(resolve(f"examples/{file}:{RECIPES[file]}"))


def test_the_median_is_of_the_graded_answers_of_a_group():
    """Of 1, 0, 0 it is 0; of 1, 0.5 and an error 0.5, the lower of two; a group of errors has advantage 0."""
    batch = make_batch([1.0, 0.0, 0.0, 1.0, 0.5, None, None], [[1]] * 7, [0, 0, 0, 1, 1, 1, 2])

    assert MEDIAN.prepare(batch).advantages.flatten().tolist() == [1.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_a_token_that_moved_counts_less():
    """Ratios e^0.5 and e^-1 weigh e^0.5 e^-0.5 = 1 and e^-1 e^-2 = e^-3, with advantages a and -a."""
    batch = make_batch([1.0, 0.0], [[1], [1]], behavior=[[-2.0], [-2.0]], proximal=[[-2.0], [-2.0]])
    _, slope = loss_and_gradient(FADING, FADING.prepare(batch), torch.tensor([[-1.5], [-3.0]], dtype=torch.float64))
    a = 0.5 / (0.5**0.5 + 1e-6)

    assert slope.flatten().tolist() == pytest.approx([-a / 2, exp(-3) * a / 2])
