"""Sums in float32 of what is in lower precision: the numbers of the plain sum, to the bit."""

import pytest
import torch
from torch import nn

from gnomon.models.cpu.gradient_sum import add, add_up, sum_of, weight_gradients
from gnomon.models.cpu.kernels import kernels_for


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_a_gradient_go_where_it_is_added_up(dtype):
    """Whole ones, and rows that come several times, in any order; nothing where nobody adds up."""
    master, parts = nn.Parameter(torch.zeros(4, 3)), torch.randn(3, 3).to(dtype)
    weight = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
    assert sum_of(weight) is None
    total = add_up(weight, master)
    assert sum_of(weight) is total

    total.add_rows(torch.tensor([2, 0, 2]), parts)
    total.add(torch.ones(4, 3, dtype=dtype))

    rows = torch.stack([parts[1], torch.zeros(3), parts[0].float() + parts[2], torch.zeros(3)])
    assert torch.equal(master.grad, rows + 1)
    found, is_new = total.begin()
    assert found is master.grad
    assert not is_new


def test_a_new_sum_owns_its_numbers():
    """What was added to it first is not changed by what comes after."""
    weight, first = nn.Parameter(torch.zeros(2)), torch.ones(2)
    total = add_up(weight, weight)

    total.add(first)
    total.add(first)

    assert first.tolist() == [1, 1]
    assert weight.grad.tolist() == [2, 2]


@pytest.mark.skipif(
    not getattr(kernels_for(torch.bfloat16), "has_pairs", False), reason="this processor multiplies otherwise"
)
@pytest.mark.parametrize(("rows", "width"), [(32, 64), (288, 32), (320, 96)])
def test_matrix_registers_add_to_float32_sums(rows, width):
    """Of weights side by side, one of which has a part already; the bits do not depend on the number of threads."""
    sizes, threads = (160, 32, 64), torch.get_num_threads()
    weights = [nn.Parameter(torch.zeros(size, width)) for size in sizes]
    sums, first = [add_up(weight, weight) for weight in weights], torch.randn(32, width)
    gradient, inputs = torch.randn(rows, sum(sizes)).bfloat16(), torch.randn(rows, width).bfloat16()
    made = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for weight in weights:
                weight.grad = None
            sums[1].add(first)
            assert weight_gradients(gradient, inputs, sizes, sums) == [None] * 3
            made.append(torch.cat([weight.grad for weight in weights]))
    finally:
        torch.set_num_threads(threads)

    wanted = gradient.double().T @ inputs.double()
    wanted[160:192] += first
    assert torch.equal(*made)
    assert (made[0] - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_gradients_of_weights_without_sums_are_returned():
    """And of numbers of rows that matrix registers do not take."""
    gradient, inputs = torch.randn(32, 96).bfloat16(), torch.randn(32, 64).bfloat16()
    weight = nn.Parameter(torch.zeros(32, 64))

    parts = weight_gradients(gradient, inputs, (64, 32), [None, add_up(weight, weight)])
    (last,) = weight_gradients(gradient[:31, :32], inputs[:31], (32,), [sum_of(weight)])

    assert weight.grad is None
    assert torch.equal(torch.cat(parts), gradient.T @ inputs)
    assert torch.equal(last, gradient[:31, :32].T @ inputs[:31])
