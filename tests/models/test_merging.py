"""Adapters merged to the same bits whatever sums them, and as near to the truth as float32 is."""

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.forked import Forked, ended

from gnomon.core.types import Adapted
from gnomon.models.lora import merged
from gnomon.models.transfer.fingerprint import fingerprint

_ELSEWHERE = """
import torch
from gnomon.models.lora import merged
from gnomon.models.transfer.fingerprint import fingerprint
from tests.models.test_merging import adapted
torch.set_num_threads({threads})
for rank in (1, 16, 70):
    one = adapted(0, 300, 401, rank)
    print(fingerprint(merged(one)))
    print(fingerprint(one.up @ one.down))
"""


def adapted(seed: int, outputs: int, inputs: int, rank: int, dtype: torch.dtype = torch.float32) -> Adapted:
    """A weight of 0.02 as networks begin with, and an adapter whose numbers differ by orders of magnitude."""
    # NumPy's draws do not hang on the processor.
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    up = normal(outputs, rank) * torch.from_numpy(generator.integers(1, 1000, (outputs, 1)))
    return Adapted(0.02 * normal(outputs, inputs).to(dtype), up, 1e-2 * normal(rank, inputs), 2.0)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_a_merged_weight_is_the_exact_one_to_rounding(rank: int):
    """Against W + scale * up @ down in rational numbers: half a unit of float32 in the sum, and in the update."""
    one = adapted(1, 3, 4, rank)
    found = merged(one)

    for i in range(3):
        for j in range(4):
            terms = [Fraction(float(one.up[i, k])) * Fraction(float(one.down[k, j])) for k in range(rank)]
            exact = Fraction(float(one.base[i, j])) + 2 * sum(terms)
            largest = float(one.up[i].abs().max() * one.down[:, j].abs().max())
            bound = 2.0**-24 * (abs(float(exact)) + 2 * abs(float(sum(terms)))) + rank * 2.0**-21 * largest
            assert abs(float(Fraction(float(found[i, j])) - exact)) <= bound


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 300), bits=st.integers(-120, 120))
def test_the_order_of_sums_changes_no_bit(seed: int, rank: int, bits: int):
    """With the rank's terms shuffled, the weight cut, or transposed, every bit is the same, near underflow too."""
    one = adapted(seed, 5, 7, rank)
    one = Adapted(one.base, one.up, one.down * 2.0**bits, 1.5)
    found = merged(one)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))

    assert fingerprint(merged(Adapted(one.base, one.up[:, order], one.down[order], 1.5))) == fingerprint(found)
    rows = [merged(Adapted(one.base[i : i + 1], one.up[i : i + 1], one.down, 1.5)) for i in range(5)]
    assert fingerprint(torch.cat(rows)) == fingerprint(found)
    across = merged(Adapted(one.base.T, one.up, one.down, 1.5, is_transposed=True))
    assert fingerprint(across.T) == fingerprint(found)


@pytest.mark.slow
def test_kernels_of_another_processor_merge_the_same_bits():
    """Intel's library in its compatible mode, with another number of threads, gives other bits of a plain product."""

    other = subprocess.run(  # which is told before it loads the library
        [sys.executable, "-c", _ELSEWHERE.format(threads=1)],
        env={**os.environ, "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    ways = ended(Forked([], _ELSEWHERE.format(threads=2))).stdout, other.stdout
    here, there = ((lines[::2], lines[1::2]) for lines in map(str.splitlines, ways))
    assert len(here[0]) == 3
    assert here[0] == there[0]
    if here[1] == there[1]:
        pytest.skip("this machine's kernels sum in one order whatever they are told, so that nothing was shown")


def test_the_precision_is_the_bases():
    """A base in bfloat16 gives bfloat16: the float32 sum, rounded once."""
    one = adapted(3, 40, 30, 8, torch.bfloat16)
    wide = merged(Adapted(one.base.float(), one.up, one.down, one.scale))

    assert merged(one).dtype == torch.bfloat16
    assert torch.equal(merged(one), wide.bfloat16())


def test_an_adapter_that_does_nothing_yet_leaves_the_weight():
    """Adapters begin with up = 0."""
    one = adapted(4, 6, 5, 2)
    assert torch.equal(merged(Adapted(one.base, 0 * one.up, one.down, 2.0)), one.base)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_hidden(wrong: float):
    """They become NaN everywhere, which no check of weights passes over."""
    one = adapted(5, 4, 4, 2)
    one.up[1, 0] = wrong
    assert bool(merged(one).isnan().all())
