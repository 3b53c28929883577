"""docs/pieces.md: each example is a piece that passes its trial, and each protocol is the one of the messages."""

import re
from pathlib import Path

import pytest
import torch

from gnomon.algorithms import Algorithm, resolve
from gnomon.algorithms.piece_calls import FORMS
from gnomon.testing import loss_and_gradient, make_batch, try_pieces

PAGE = (Path(__file__).parents[2] / "docs" / "pieces.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def made(title: str, folder: Path) -> Algorithm:
    """Return the algorithm of an example, from a file as a user has it."""
    file = folder / "mine.py"
    file.write_text(EXAMPLES[title], encoding="utf-8")
    return resolve(f"{file}:MINE")


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_passes_its_trial(title: str, tmp_path: Path):
    """As it is printed, on the made batch of `gnomon plan`."""
    try_pieces(made(title, tmp_path))


def test_every_protocol_is_on_the_page():
    """A message about a missing part quotes the line that stands there."""
    assert [name for name, form in FORMS.items() if f"`{form.line}`" not in PAGE and form.line not in PAGE] == []


@pytest.mark.parametrize("cuts", [[[0], [1], [2], [3]], [[0, 3], [1, 2]]])
def test_a_threshold_of_the_step_is_one_in_any_cuts(cuts: list[list[int]], tmp_path: Path):
    """Of eight tokens the two farthest are left out of the loss, in any micro-batches alike."""
    algorithm = made("Statistics of the step", tmp_path)
    far = torch.tensor([[0.05, 0.1], [0.15, 0.1], [1.0, 0.05], [0.1, 3.0]], dtype=torch.float64)
    batch = make_batch([1.0, 0.0, 1.0, 0.0], [[1, 1]] * 4, advantages=[[1.0, 1.0], [-1.0, -1.0]] * 2)
    whole, slope = loss_and_gradient(algorithm, batch, batch.behavior + far)
    parts, slopes = loss_and_gradient(algorithm, batch, batch.behavior + far, cuts)

    assert parts == pytest.approx(whole)
    assert torch.allclose(slopes, slope)
    assert (slope == 0).tolist() == (far >= 1).tolist()
