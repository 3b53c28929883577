"""Sums in float32 of what is in lower precision: the numbers of the plain sum, to the bit."""

import pytest
import torch

from gnomon.models.sums import add


@pytest.mark.parametrize("shape", [(3,), (7, 5), (2**20,), (1031, 2053)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_is_the_plain_one(shape, dtype):
    """Whatever the sizes are, whole blocks or not."""
    total, addend = torch.randn(shape), torch.randn(shape).to(dtype)
    wanted = total + addend

    add(total, addend)

    assert torch.equal(total, wanted)


def test_what_does_not_lie_in_one_piece_is_added_too():
    """A transposed addend, and a total that is every second column of another."""
    total, addend = torch.randn(40, 30), torch.randn(30, 40).bfloat16()
    wide = torch.zeros(40, 60)

    add(total, addend.T)
    add(wide[:, ::2], total.bfloat16())

    assert torch.equal(wide[:, ::2], total.bfloat16().float())
    assert wide[:, 1::2].eq(0).all()
