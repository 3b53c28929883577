"""A fingerprint changes with any bit, place, shape or precision, and with nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.models.transfer.fingerprint import differences, expected, fingerprint, fingerprints

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SHAPES = st.sampled_from([(1,), (7,), (3, 5), (64, 33), (300, 257), (2, 3, 4)])


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=50)
@given(SHAPES, DTYPES, st.integers(0, 2**31), st.integers(0, 63))
def test_one_changed_bit_is_seen(shape, dtype, seed, bit):
    """Whichever bit of whichever element flips, the digest is another one."""
    weights = noise(shape, dtype, seed)
    changed = weights.clone()
    bytes_ = changed.view(-1).view(torch.uint8)
    bytes_[(seed * 8 + bit // 8) % len(bytes_)] ^= 1 << bit % 8

    assert fingerprint(changed) != fingerprint(weights)


@settings(max_examples=50)
@given(SHAPES.filter(lambda s: s != (1,)), DTYPES, st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_elements_that_changed_places_are_seen(shape, dtype, seed, left, right):
    """Also when they differ in the sign alone, the highest bit of all."""
    weights = noise(shape, dtype, seed).reshape(-1)
    left, right = left % len(weights), right % len(weights)
    if left == right:
        return
    weights[right] = -weights[left]
    changed = weights.clone()
    changed[left], changed[right] = weights[right], weights[left]

    assert fingerprint(changed) != fingerprint(weights)


@settings(max_examples=50)
@given(st.integers(0, 2**31), DTYPES)
def test_rows_columns_and_layers_that_changed_places_are_seen(seed, dtype):
    """Reversed, rolled, transposed: none has the fingerprint of another; nor have blocks that changed places."""
    weights = noise((16, 16), dtype, seed)
    moved = [weights, weights.flip(0), weights.flip(1), weights.roll(1, 0), weights.roll(1, 1), weights.T]
    large = noise((4, 1 << 16), torch.float32, seed)

    assert len({fingerprint(each) for each in moved}) == len(moved)
    assert fingerprint(large) != fingerprint(large[[1, 0, 2, 3]])


def test_shape_and_precision_count():
    """Zeros of another shape or type are other weights, and so are none at all."""
    made = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(5)]

    assert len({fingerprint(each) for each in made}) == len(made)


@settings(max_examples=50)
@given(SHAPES, DTYPES, st.integers(0, 2**31))
def test_only_the_values_count(shape, dtype, seed):
    """A copy, a strided view, a view at an odd offset and an inference tensor have the original's fingerprint."""
    weights = noise(shape, dtype, seed)
    wide = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
    wide[..., ::2] = weights
    shifted = torch.zeros(weights.numel() + 1, dtype=dtype)
    shifted[1:] = weights.view(-1)
    with torch.inference_mode():
        inferred = weights.clone()
    alike = [weights.clone(), wide[..., ::2], shifted[1:].view(shape), inferred]

    assert {fingerprint(each) for each in alike} == {fingerprint(weights)}


def test_a_fingerprint_is_the_sum_that_is_documented():
    """By hand: 1.0 is 0x3f800000, -2.0 is 0xc0000000, one word; 3.0 and padding are the next, in the same row.

    The row's sum is that of both words, and each has a column of its own, with odd numbers 1 K and 3 K.
    """
    place, first, second = 0x9E3779B97F4A7C15, 0xC00000003F800000, 0x40400000

    def mixed(total: int) -> int:
        signed = total - (1 << 64) if total >> 63 else total
        return total ^ signed >> 32 % 2**64

    rows = mixed(first + second) * place
    columns = mixed(first) * place + mixed(second) * 3 * place
    digest = rows % 2**64 << 64 | columns % 2**64

    assert fingerprint(torch.tensor([1.0, -2.0, 3.0])).digest == digest


def test_an_engine_may_cast():
    """What is expected has the precision that the engine says it holds; other numbers are still other weights."""
    sent = {"a": torch.tensor([1.001]), "b": torch.tensor([3]), "c": torch.tensor([1.001])}
    held = fingerprints({"a": sent["a"].bfloat16(), "b": sent["b"]}.items())

    assert expected(sent.items(), held) == held | {"c": fingerprint(sent["c"])}
    assert expected({"a": sent["a"] + 1}.items(), held) != held


def test_differences_name_the_tensor():
    """Missing, never sent, and other than sent."""
    sent = fingerprints({"a": torch.ones(2), "b": torch.ones(2)}.items())
    held = fingerprints({"b": torch.zeros(2), "c": torch.ones(2)}.items())

    missing, other, unknown = differences(sent, held)
    assert (missing, unknown) == ("a is missing", "c was never sent")
    assert other.startswith("b is float32[2] 00000000000000000000000000000000, sent was float32[2] ")
    assert differences(sent, sent) == []


@pytest.mark.parametrize("size", [0, 1, 2, 3, 511, 512, 513, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 3 << 17])
def test_every_length_is_read_to_its_end(size):
    """At the edges of words, rows and blocks the last element counts."""
    weights = torch.ones(size, dtype=torch.bfloat16)
    changed = weights.clone()
    changed[-1:] = 2

    assert (fingerprint(changed) != fingerprint(weights)) == (size > 0)
