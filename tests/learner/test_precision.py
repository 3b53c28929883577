import pytest
import torch
from torch import nn

from gnomon.learner.precision import Masters, dtype_of, is_bf16_faster, resolve_precision


def test_automatic_precision_is_one_of_the_two():
    """ "auto" becomes a value that can be written down, and it is bf16 exactly where that is faster."""
    assert resolve_precision("auto") == ("bf16" if is_bf16_faster() else "fp32")


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_a_stated_precision_is_kept(asked):
    """What was asked for is what is used."""
    assert resolve_precision(asked) == asked
    assert dtype_of(asked).is_floating_point


def test_float32_parameters_are_their_own_masters():
    """Nothing is copied in float32."""
    weight = nn.Parameter(torch.ones(2))

    assert Masters([("w", weight)]).parameters["w"] is weight


def test_gradients_of_bfloat16_parameters_add_up_in_float32():
    """256 + 1 = 257, which bfloat16 would round to 256; and the bfloat16 gradients are freed."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters([("w", weight)])

    (256 * weight).sum().backward()
    weight.sum().backward()

    assert weight.grad is None
    assert masters.parameters["w"].grad.item() == 257.0


def test_rounding_writes_into_the_tensor_that_others_hold():
    """An engine that holds a view of the parameter sees the new weights."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    masters, view = Masters([("w", weight)]), weight.detach()[1:]

    masters.parameters["w"].data += 1.001
    masters.round_into_module()

    assert view.item() == 1.0


def test_dropping_gradients_drops_all_of_them():
    """Neither masters nor module keep one."""
    weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    masters = Masters([("a", weights[0]), ("b", weights[1])])
    (weights[0] + weights[1]).sum().backward()

    masters.drop_gradients()

    assert [master.grad for master in masters.parameters.values()] == [None, None]
    assert weights[0].grad is None
