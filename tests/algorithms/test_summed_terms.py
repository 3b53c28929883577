"""Statistics of the step that a user's own piece asks for: sums of named terms, one number however rows are cut."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.own_statistics import POSITIVE_CAP

from gnomon.algorithms import GRPO, LossInputs, Ratio
from gnomon.algorithms.ratios import Statistics
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.core.metrics import Metrics
from gnomon.testing import loss_and_gradient, make_batch
from gnomon.training.api import train_experiment


def test_the_sums_are_those_of_the_hand():
    """Ratios 2, 1 and 4 with advantages 1, 1 and -1: n = 2, sum 3, squares 5, so the cap is 9 / 10.

    Loss at current = ln 2 - 1, -1, ln 4 - 1 and weights 1/3: -(0.9 (ln 2 - 1) + 0.9 (-1) - 4 (ln 4 - 1)) / 3.
    """
    logs = torch.tensor([[2.0], [1.0], [4.0]], dtype=torch.float64).log()
    batch = make_batch([1.0, 1.0, 0.0], [[1], [1], [1]], advantages=[[1.0], [1.0], [-1.0]])
    batch = batch.with_fields(behavior=torch.full_like(batch.behavior, -1.0))
    statistics = POSITIVE_CAP.statistics(logs - 1, POSITIVE_CAP.weigh(batch))
    loss, gradient = loss_and_gradient(POSITIVE_CAP, batch, logs - 1)
    weights = [float(w) for w in -3 * gradient.flatten()]

    sums = {name: statistics.total(name) for name in ("up", "up_ratio", "up_square")}
    assert sums == pytest.approx({"up": 2.0, "up_ratio": 3.0, "up_square": 5.0})
    assert weights == pytest.approx([0.9, 0.9, -4.0])
    assert loss == pytest.approx(float(-(0.9 * (logs[0] - 1) + 0.9 * (logs[1] - 1) - 4 * (logs[2] - 1))) / 3)


@pytest.mark.parametrize("cuts", [[[0], [1], [2], [3]], [[0, 3], [1, 2]], [[3, 2, 1], [0]]])
def test_cuts_change_nothing(cuts: list[list[int]]):
    """Loss and gradient are those of the whole, in any micro-batches."""
    generator = torch.Generator().manual_seed(0)
    masks = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    batch = make_batch([1.0, 0.0, 1.0, 0.0], masks, advantages=[[a] * 3 for a in (1.0, -1.0, 0.5, -0.5)])
    current = batch.behavior + 0.3 * torch.randn(4, 3, generator=generator, dtype=batch.behavior.dtype)
    whole, slope = loss_and_gradient(POSITIVE_CAP, batch, current)
    parts, slopes = loss_and_gradient(POSITIVE_CAP, batch, current, cuts)

    assert parts == pytest.approx(whole)
    assert torch.allclose(slopes, slope)


def test_terms_add_up_by_name():
    """Also where one side has a name that the other has not; an unknown name says which there are."""
    one, two, three = (torch.tensor([number], dtype=torch.float64) for number in (1.0, 2.0, 3.0))
    added = Statistics(terms=(("a", one),)) + Statistics(terms=(("b", two), ("a", three)))

    assert added.values("a").tolist() == [1.0, 3.0]
    assert (added.total("a"), added.mean("a"), added.total("b")) == (4.0, 2.0, 2.0)
    with pytest.raises(ConfigError, match="unknown term 'c'"):
        added.total("c")


@dataclass(frozen=True)
class Asks:
    """Asks for a term of a shape, under a name."""

    shape: str = "token"
    name: str = "asked"

    def terms(self, view: LossInputs) -> Any:
        term = view.log_ratio.detach()
        others = {"number": term.sum(), "float": 3.0}
        return [term] if self.shape == "list" else {self.name: others.get(self.shape, term)}

    def __call__(self, view: LossInputs) -> Any:
        return -view.advantages * view.log_ratio.exp(), Metrics()


def test_what_cannot_be_summed_is_refused():
    """A term that is one number or no tensor, no names, two pieces with one name, and sums of a step not kept."""
    batch = make_batch([1.0, 0.0], [[1], [1]], advantages=[[1.0], [-1.0]])
    with pytest.raises(ConfigError, match=r"'asked' has the shape \(\) and not \(2, 1\)"):
        replace(GRPO, surrogate=Asks("number")).statistics(batch.behavior, batch)
    with pytest.raises(
        ConfigError, match=r"'asked' has the shape of a float and not \(2, 1\): return a number for each"
    ):
        replace(GRPO, surrogate=Asks("float")).statistics(batch.behavior, batch)
    with pytest.raises(ConfigError, match=r"Asks.terms returned a list and not names .*: return \{name: a number"):
        replace(GRPO, surrogate=Asks("list")).statistics(batch.behavior, batch)
    with pytest.raises(ConfigError, match="'asked' is asked for by two pieces"):
        replace(GRPO, surrogate=Asks(), correction=Asks()).statistics(batch.behavior, batch)
    with pytest.raises(ConfigError, match="asks for sums of its own"):
        replace(GRPO, surrogate=Asks(), ratio=Ratio(anchor="behavior"), scope="lagged")


def test_a_run_hands_them_over(tmp_path: Path):
    """Through the learner, two updates a step in micro-batches of any size, the cap is in (0, 1] and the same."""
    found = []
    for number, tokens in enumerate((64, 4096)):
        overrides = ["algorithm=examples/own_statistics.py:POSITIVE_CAP", "steps=2", "rollouts_per_step=32"]
        overrides += ["algorithm.updates.minibatches=2", f"learner.max_tokens_per_micro_batch={tokens}"]
        train_experiment(load("tiny", overrides), tmp_path / str(number))
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found.append([row[name] for row in rows if (name := "loss/positive_ess_fraction") in row])

    assert found[0], "no step had an answer that was right: choose another seed"
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert all(0 < value <= 1 for value in found[0])
