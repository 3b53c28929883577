"""Moments of Adam in 8 bits: what a code stands for, that nothing is lost on the way, and that it learns as before."""

from typing import Any

import pytest
import torch
from torch import nn

from gnomon.learner.optimizer import CodedMoment, Optimizer
from gnomon.learner.sections import OptimizerConfig


def test_levels_are_powers_of_an_eighth_of_a_halving():
    """By hand: of a block with the largest 4, levels 4, 4 * 2^(-1/8), ... -2 is eight levels down, 1e-9 is zero."""
    moment = CodedMoment(torch.zeros(4), is_signed=True)
    moment.copy_(torch.tensor([4.0, -2.0, 4 * 2 ** (-3 / 8), 1e-9]))

    assert moment.codes[0, :4].tolist() == [1, -9, 4, 0]
    torch.testing.assert_close(moment.decoded(), torch.tensor([4.0, -2.0, 4 * 2 ** (-3 / 8), 0.0]))
    positive = CodedMoment(torch.zeros(2), is_signed=False)
    positive.copy_(torch.tensor([4.0, 1e-30]))
    assert positive.decoded()[1] > 0  # a second moment that is not zero never becomes it


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_was_decoded_is_coded_to_the_same_bits(is_signed: bool):
    """So that a checkpoint in float32 gives back the codes, of random sizes and magnitudes."""
    torch.manual_seed(0)
    values = torch.randn(7, 113) * 10.0 ** torch.randint(-6, 3, (7, 113))
    one, other = (CodedMoment(values, is_signed) for _ in range(2))
    one.copy_(values if is_signed else values.square())
    other.copy_(one.decoded())

    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.decoded(), other.decoded())


def test_rounding_at_random_has_the_value_as_its_mean():
    """Of 4,000 roundings of 0.7: the mean is within five standard errors, and both neighbors occur."""
    moment, generator, drawn = (
        CodedMoment(torch.zeros(256), True),
        torch.Generator().manual_seed(0),
        list[torch.Tensor](),
    )
    values = torch.full((256,), 0.7)
    values[0] = 1.0
    for _ in range(16):
        moment.copy_(values, generator)
        drawn.append(moment.decoded()[1:])
    found = torch.stack(drawn)

    assert len(found.unique()) == 2
    assert abs(float(found.mean()) - 0.7) < 5 * float(found.std()) / found.numel() ** 0.5


def descend(moments: Any, steps: int = 300) -> float:
    """Return the loss of a regression after so many steps."""
    torch.manual_seed(0)
    inputs, model = torch.randn(256, 16), nn.Linear(16, 4)
    targets = inputs @ torch.randn(16, 4) + 0.1 * torch.randn(256, 4)
    optimizer = Optimizer([*model.named_parameters()], OptimizerConfig(moments=moments, max_gradient_norm=float("inf")))
    for step in range(steps):
        rows = torch.arange(step * 32, step * 32 + 32) % 256
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step(0.02)
    return float(nn.functional.mse_loss(model(inputs), targets).detach())


def test_it_learns_as_with_moments_in_float32():
    """A regression from small batches comes to within a fifth of the same loss; both are far below where they began."""
    exact, coded = descend("float32"), descend("8bit")

    assert exact < 0.02
    assert coded < 1.2 * exact


def test_a_restored_optimizer_makes_the_same_step():
    """State in float32, codes and what the next step draws: weights are equal to the bit; float32 moments go on too."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(40, 30) for _ in range(3))
    ours, theirs = (Optimizer([*m.named_parameters()], OptimizerConfig(moments="8bit")) for m in (first, second))
    plain = Optimizer([*third.named_parameters()], OptimizerConfig())
    gradients = [torch.randn_like(first.weight) for _ in range(3)]
    for gradient in gradients[:2]:
        first.weight.grad, first.bias.grad = gradient.clone(), gradient[:, 0].clone()
        ours.step(1e-2)
    for optimizer in (theirs, plain):
        optimizer.restore(ours.state())
    assert torch.equal(plain.state().tensors["moment2/weight"], ours.state().tensors["moment2/weight"])
    for optimizer, model in ((ours, first), (theirs, second)):
        model.weight.grad, model.bias.grad = gradients[2].clone(), gradients[2][:, 0].clone()
        optimizer.step(1e-2)

    assert torch.equal(first.weight, second.weight)
    copies = [tensor.clone() for tensor in ours.changing()]
    first.weight.grad, first.bias.grad = gradients[0].clone(), gradients[0][:, 0].clone()
    ours.step(1e-2)
    ours.put_back(copies)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(ours.state().tensors["moment1/weight"], theirs.state().tensors["moment1/weight"])
