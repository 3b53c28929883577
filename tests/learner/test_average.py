"""The averaged proximal policy follows the weights as the paper says, and is what `score` calls proximal."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gnomon.algorithms import GRPO, EmaProximal, Updates
from gnomon.analysis.dissect.verify import vectors
from gnomon.core.errors import CheckpointError
from gnomon.core.types import State
from gnomon.learner.learner import TorchLearner
from gnomon.learner.loss import MovingAverage
from gnomon.learner.sections import LearnerConfig, OptimizerConfig
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.logprobs import TokenScorer
from gnomon.models.lora import adapt

GOLDEN = vectors()["ewma_proximal"]
AVERAGED = replace(GRPO, name="grpo-ewma", proximal=EmaProximal(0.5), updates=Updates(minibatches=2))
PLAN = LearnerConfig(OptimizerConfig(learning_rate=1e-2))


def run(work: Any) -> Any:
    return asyncio.run(work)


class One(nn.Module):
    """A model of one weight."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], dtype=dtype))


def trace(dtype: torch.dtype) -> list[float]:
    first, *later = GOLDEN["theta"]
    average = MovingAverage(One(first, dtype), EmaProximal(GOLDEN["beta"]))
    found = [average.state().tensors["weight"].item()]
    for value in later:
        average.follow({"weight": torch.tensor([value])})
        found.append(average.state().tensors["weight"].item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_is_the_papers(dtype):
    """Golden: 1, 2, 4, 7 with decay 0.889 is 1, 1.52938, 2.45149, 3.79644, in float32 whatever the module is."""
    assert trace(dtype) == pytest.approx(GOLDEN["trace"], rel=1e-6)


def test_the_average_of_equal_weights_is_those():
    """What the weights count sums to one from the first step on."""
    average = MovingAverage(One(3.0), EmaProximal(0.9))
    for _ in range(5):
        average.follow({"weight": torch.tensor([3.0])})

    assert average.model.weight.item() == pytest.approx(3.0, abs=1e-6)


def test_only_adapters_are_averaged(make_model):
    """The base is the policy's own memory; the adapters are copies."""
    torch.manual_seed(0)
    policy = adapt(make_model(), LoraConfig(rank=2, alpha=4))

    average = MovingAverage(policy, EmaProximal())

    theirs = dict(policy.named_parameters())
    assert all(
        (p.data_ptr() == theirs[n].data_ptr()) == ("lora_" not in n) for n, p in average.model.named_parameters()
    )
    assert all("lora_" in name for name in average.state().tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_the_proximal_policy_are_of_the_averaged_weights(dtype, make_model, make_batch, make_minibatch):
    """After two steps: what a model with the average of the three sets of weights says; the policy is another."""
    policy, batch = make_model(dtype=dtype), make_batch()
    learner = TorchLearner(policy, PLAN, 10, proximal=EmaProximal(0.5))

    def masters() -> dict[str, torch.Tensor]:
        return {n: t for n, t in learner.state().tensors.items() if n.startswith("master/")}

    kept = [masters()]
    first = run(learner.score(batch, {"proximal"})).proximal
    for seed in (0, 1):
        run(learner.update(make_minibatch(AVERAGED, seed), AVERAGED, 0))
        kept.append(masters())
    wanted = make_model(dtype=dtype)
    for name, parameter in wanted.named_parameters():
        # Weights count 1/4, 1/2 and 1.
        parameters = [each[f"master/{name}"] for each in kept]
        parameter.data = ((parameters[0] / 4 + parameters[1] / 2 + parameters[2]) / 1.75).to(dtype)

    found = run(learner.score(batch, {"proximal"})).proximal

    def says(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return TokenScorer(model)(batch.tokens, batch.prompt_lengths, batch.mask, batch.temperature).logprobs

    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, says(wanted), rtol=0, atol=tolerance)
    assert float((found - says(policy)).abs().max()) > 0.1
    assert float((found - first).abs().max()) > 0.1


def test_the_current_policy_is_not_taken_for_the_average(make_model, make_batch):
    """Right after scoring the first step of the next batch has a drift: the average lags behind."""
    learner = TorchLearner(make_model(), PLAN, 10, proximal=EmaProximal(0.5))
    drifts = []
    for step in range(2):
        batch = make_batch(step)
        batch = AVERAGED.prepare(run(learner.score(batch, AVERAGED.needs)).into(batch))
        updates = [run(learner.update(m, AVERAGED, step)) for m in AVERAGED.minibatches(batch, step)]
        drifts.append(updates[0]["loss/drift_abs_nats"])

    assert drifts[0] == pytest.approx(0, abs=1e-5)
    assert drifts[1] > 1e-3


def test_an_average_of_another_model_is_refused(make_model):
    """Names and shapes must be those of the trained weights."""
    with pytest.raises(CheckpointError, match="belongs to another model"):
        MovingAverage(make_model(), EmaProximal()).restore(MovingAverage(One(1.0), EmaProximal()).state())


@pytest.mark.parametrize("count", [0, 0.5, -1.0, math.inf, math.nan, True, "x", None, [2.0]])
def test_a_count_that_no_average_has_is_refused(count: Any):
    """It begins at 1 and grows."""
    average = MovingAverage(One(1.0), EmaProximal())

    with pytest.raises(ValueError, match="the count of an average is"):
        average.restore(State(average.state().tensors, {"count": count}))


@pytest.mark.parametrize("weight", [torch.tensor([math.nan]), torch.tensor([math.inf]), torch.tensor([1])])
def test_an_average_of_numbers_that_are_none_is_refused(weight: torch.Tensor):
    """By the weight's name."""
    average = MovingAverage(One(1.0), EmaProximal())

    with pytest.raises(CheckpointError, match="average of weight in the saved state"):
        average.restore(State({"weight": weight}, {"count": 1.0}))
