"""Rounded weights: how far from the true ones, the same when rounded again, and nothing else is touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.types import Snapshot
from gnomon.models.transfer.rounding import LEVELS, ROUNDINGS, round_matrix, rounded

KINDS = sorted(ROUNDINGS)
SEEDS = st.integers(0, 2**31)
SCALES = st.sampled_from([1e-20, 1e-6, 0.02, 1.0, 3e4])


def weights(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 8 channels of 32 weights, each channel with a spread of its own, one of them of zeros."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.randn(8, 1, generator=generator) * scale
    spread[3] = 0
    return (torch.randn(8, 32, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, scale=SCALES)
def test_rounding_twice_is_rounding_once(kind, seed, scale):
    """To the bit in float32: what is rounded lies on the grid that its own largest number gives."""
    once = round_matrix(weights(seed, scale), kind)

    assert torch.equal(round_matrix(once, kind), once)


@given(seed=SEEDS, scale=SCALES)
def test_fp8_is_exact_in_bfloat16(seed, scale):
    """Four significant bits times a power of two: bfloat16 holds what float32 does, and rounding is idempotent."""
    sent = weights(seed, scale, torch.bfloat16)
    once = round_matrix(sent, "fp8")

    assert once.dtype == torch.bfloat16
    assert torch.equal(once.float(), round_matrix(sent.float(), "fp8"))
    assert torch.equal(round_matrix(once, "fp8"), once)


@given(seed=SEEDS, scale=SCALES)
def test_fp8_is_torchs_own_cast(seed, scale):
    """Scaled by the same power of two, bit for bit, ties and numbers below the normal ones too."""
    exact = weights(seed, scale)
    exact[0] = torch.arange(32) * 2.0**-11
    exact[0, 31] = 448
    top = (exact.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-100).log2().ceil().exp2()

    assert torch.equal(round_matrix(exact, "fp8"), (exact / top).to(torch.float8_e4m3fn).float() * top)


@given(seed=SEEDS, scale=SCALES)
def test_the_error_of_fp8_is_relative(seed, scale):
    """At most a sixteenth of a weight, or a 2^17th of the channel's largest one, with its sign."""
    exact = weights(seed, scale)
    error = (round_matrix(exact, "fp8") - exact).abs()
    largest = exact.abs().amax(1, keepdim=True)

    # s <= max / 224, and s / 1024 is half of the least step.
    assert bool((error <= torch.maximum(exact.abs() / 16, largest / 224 / 1024)).all())


@pytest.mark.parametrize("kind", sorted(LEVELS))
@given(seed=SEEDS, scale=SCALES)
def test_the_error_of_integers_is_half_a_step(kind, seed, scale):
    """Of each channel's own step, max / levels, and no more than 2 levels + 1 numbers are left."""
    exact = weights(seed, scale)
    once = round_matrix(exact, kind)
    step = exact.abs().amax(1, keepdim=True) / LEVELS[kind]

    assert bool(((once - exact).abs() <= step / 2 * (1 + 1e-4)).all())
    assert max(len(row.unique()) for row in once) <= 2 * LEVELS[kind] + 1


def test_golden_numbers():
    """fp8: 7.5 lies at 480 of 2^-6, above 448, so s = 2^-5: 240 is on the grid, 1.03 = 32.96 s goes to 32 of (32, 36).

    int4: s = 7 / 7 = 1, ties go to even; int8: s = 127 / 127.
    """
    assert round_matrix(torch.tensor([[7.5, 1.03, -0.3]]), "fp8").tolist() == [[7.5, 1.0, -0.3125]]
    assert round_matrix(torch.tensor([[7.0, 2.5, -1.2, 3.5]]), "int4").tolist() == [[7.0, 2.0, -1.0, 4.0]]
    assert round_matrix(torch.tensor([[-127.0, 2.6, 0.4]]), "int8").tolist() == [[-127.0, 3.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_channel_has_a_scale_of_its_own(kind):
    """Along whichever axis the inputs run; experts are separate channels too."""
    exact = weights(5)
    once = round_matrix(exact, kind)
    parts = torch.stack([round_matrix(row[None], kind)[0] for row in exact])

    assert torch.equal(once, parts)
    assert torch.equal(round_matrix(exact.T, kind, 0), once.T)
    assert torch.equal(round_matrix(exact.view(2, 4, 32), kind), once.view(2, 4, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_snapshot_leaves_the_learner_alone(kind):
    """Named matrices are rounded copies in their own precision; the others are the same tensors, in the same order."""
    own = {"norm": torch.ones(3), "matrix": weights(1), "head": weights(2)}
    before = {name: tensor.clone() for name, tensor in own.items()}
    sent = rounded(Snapshot(7, lambda: iter(own.items())), kind, {"matrix": -1})

    tensors = dict(sent.tensors())
    assert (sent.version, list(tensors)) == (7, list(own))
    assert tensors["norm"] is own["norm"]
    assert tensors["head"] is own["head"]
    assert torch.equal(tensors["matrix"], round_matrix(own["matrix"], kind))
    assert not torch.equal(tensors["matrix"], own["matrix"])
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert [n for n, _ in sent.tensors()] == list(own)
