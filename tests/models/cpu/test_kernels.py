"""Functions in C give what the operations of torch give that they replace."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from gnomon.models.cpu.kernels import kernels_for, kernels_of

TYPES = [torch.float32, torch.bfloat16]
SIZES = st.integers(1, 70)
pytestmark = pytest.mark.skipif(kernels_for(torch.float32) is None, reason="there is no C compiler here")


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers are the exact ones, rounded to ``dtype`` at most three times."""
    relative = 2e-6 if dtype == torch.float32 else 2e-2
    scale = exact.abs().max().clamp(min=1e-3)
    return bool(((found.double() - exact.double()).abs() <= relative * scale).all())


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@given(rows=SIZES, width=st.integers(8, 70))
@settings(max_examples=30)
def test_a_norm_and_its_gradients(dtype, rows, width):
    """Of any number of rows and width, and what was returned is returned again, to the bit."""
    kernels = kernels_for(dtype)
    states, weight, back = drawn(1, dtype, rows, width), 1 + drawn(2, dtype, width), drawn(3, dtype, rows, width)
    exact, scale = states.double().requires_grad_(), weight.double().requires_grad_()
    wanted = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    wanted.backward(back.double())

    normed, factor = kernels.norm(states, weight, 1e-5)
    d_states, d_weight, again = kernels.norm_back(back, states, factor, weight, again=True)

    assert near(normed, wanted.detach(), dtype)
    assert torch.equal(again, normed)
    assert near(d_states, exact.grad, dtype)
    assert near(d_weight, scale.grad, dtype)
    assert kernels.norm_back(back, states, factor, weight, again=False)[2] is None


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_are_normed_in_place(dtype):
    """The first heads, each with its own weights; the others stay."""
    made, weight = drawn(1, dtype, 5, 7, 24), 1 + drawn(2, dtype, 4, 24)
    wide = made[:, :4].double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    rest = made[:, 4:].clone()

    kernels_for(dtype).norm_heads_(made, weight, 1e-6)

    assert near(made[:, :4], wanted, dtype)
    assert torch.equal(made[:, 4:], rest)


@pytest.mark.parametrize("dtype", TYPES)
@given(rows=SIZES, half=st.integers(1, 40))
@settings(max_examples=20)
def test_turning_back_undoes_turning(dtype, rows, half):
    """Halves turn by their angle, other heads stay, and the gradient of a turn is the turn back."""
    kernels, made = kernels_for(dtype), drawn(1, dtype, rows, 5, 2 * half)
    angle = drawn(2, torch.float32, rows, half).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    left, right = made[:, :3].double().chunk(2, dim=-1)
    c, s = cos[:, None, :half].double(), sin[:, None, :half].double()

    turned = kernels.turn(made, 3, cos, sin, 1)

    assert near(turned[:, :3], torch.cat((left * c - right * s, right * c + left * s), -1), dtype)
    assert torch.equal(turned[:, 3:], made[:, 3:])
    assert near(kernels.turn(turned, 3, cos, sin, -1), made.double(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@given(rows=SIZES, width=SIZES)
@settings(max_examples=20)
def test_a_gate_and_its_gradients(dtype, rows, width):
    """silu(gate) * up, also of large numbers; and again in the backward pass, to the bit."""
    kernels, opened, back = kernels_for(dtype), 20 * drawn(1, dtype, rows, 2 * width), drawn(2, dtype, rows, width)
    exact = opened.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    wanted = functional.silu(gate) * up
    wanted.backward(back.double())

    found = kernels.gate(opened)
    again, d_opened = kernels.gate_back(opened, back)

    assert near(found, wanted.detach(), dtype)
    assert torch.equal(again, found)
    assert near(d_opened, exact.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@given(rows=st.integers(1, 5), width=st.integers(2, 700), temperature=st.sampled_from([1.0, 0.5, 1.7]))
@settings(max_examples=30)
def test_a_row_of_logits_and_its_slope(dtype, rows, width, temperature):
    """Log-probability, entropy and their gradient, by parts of the vocabulary."""
    kernels, logits = kernels_for(dtype), 4 * drawn(width, dtype, rows, width)
    targets = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(rows))
    exact = logits.double().requires_grad_()
    policy = (exact / temperature).log_softmax(-1)
    entropy, chosen = -(policy.exp() * policy).sum(-1), policy.gather(1, targets[:, None])[:, 0]
    g, h = drawn(1, torch.float32, rows), drawn(2, torch.float32, rows)

    for with_entropy in (True, False):
        found = [torch.empty(rows) for _ in range(4)]
        kernels.head(logits, targets, found if with_entropy else [*found[:3], None], temperature)
        loss = (chosen * g).sum() + (entropy * h).sum() * with_entropy
        (wanted,) = torch.autograd.grad(loss, exact, retain_graph=True)
        slopes = logits.clone()
        for part in slopes.split(300, 1):
            given = (targets, *found[:2], found[3], g, h if with_entropy else None)
            own = part.contiguous()
            kernels.head_back_(own, part.storage_offset(), given, temperature)
            part.copy_(own)
        assert torch.allclose(found[2].double(), chosen.detach(), rtol=1e-6, atol=1e-6)
        assert not with_entropy or torch.allclose(found[3].double(), entropy.detach(), rtol=1e-6, atol=2e-6)
        assert near(slopes, torch.where(wanted.abs() > 1e-9, wanted, 0.0), dtype)


def test_a_forbidden_token_has_no_mass_and_no_gradient():
    """Of minus infinity: 0 * inf appears nowhere; and a NaN makes its own row NaN."""
    kernels, logits = kernels_for(torch.float32), torch.tensor([[-math.inf, 1.0, 1.0], [0.0, math.nan, 0.0]])
    targets, found, ones = torch.tensor([1, 0]), [torch.empty(2) for _ in range(4)], torch.ones(2)

    kernels.head(logits, targets, found, 1.0)
    kernels.head_back_(logits, 0, (targets, *found[:2], found[3], ones, ones), 1.0)

    assert found[2][0].item() == pytest.approx(-math.log(2))
    assert found[3][0].item() == pytest.approx(math.log(2))
    assert logits[0].tolist() == pytest.approx([0.0, 0.5, -0.5])
    assert found[2][1].isnan()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "shared", "size"), [(6, 2, 64), (5, 1, 128), (4, 4, 16), (7, 1, 80), (3, 3, 6)])
def test_a_row_attends_to_its_prompt_and_its_own_columns(dtype, heads, shared, size):
    """Whatever else is in the block; and its key and value are written where the layout says."""
    kernels, lanes, columns, begin, prompt, grown = kernels_for(dtype), 4, 60, 3, 9, 6
    keys, values = (5 * drawn(seed, dtype, 2, shared, columns, size) for seed in (1, 2))
    made = drawn(3, dtype, 3, heads + 2 * shared, size)
    places = torch.tensor([(1, begin, prompt, grown, 2), (0, begin, prompt, 0, 0)])
    still = torch.ones(3, size).to(dtype), torch.zeros(3, size).to(dtype)
    before = keys.clone()

    found = kernels.attend(made, still, places, (keys, values), lanes, 0.3).view(3, heads, size)

    for row, (block, _, _, count, lane) in enumerate(places.tolist()):
        own = [begin + prompt + n * lanes + lane for n in range(count + 1)]
        seen = [*range(begin, begin + prompt), *own]
        assert torch.equal(keys[block, :, own[-1]], made[row, heads : heads + shared])
        assert torch.equal(values[block, :, own[-1]], made[row, heads + shared :])
        key, value = (each[block, :, seen].double().repeat_interleave(heads // shared, 0) for each in (keys, values))
        wanted = ((made[row, :heads, None].double() @ key.transpose(1, 2)) * 0.3).softmax(-1) @ value
        assert near(found[row], wanted[:, 0], dtype)
    assert not found[2].any()
    changed = (keys != before).any(-1).any(1).nonzero().tolist()
    assert sorted(changed) == [[0, begin + prompt], [1, begin + prompt + grown * lanes + 2]]


@pytest.mark.skipif(
    not getattr(kernels_for(torch.bfloat16), "has_pairs", False), reason="this processor multiplies otherwise"
)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 100), half=st.integers(1, 40), adds=st.integers(0, 3))
@settings(max_examples=60)
def test_a_product_with_packed_weights(rows, outputs, half, adds):
    """Of any size, with and without bias and residual, rounded once; a row's bits do not depend on the others."""
    kernels, kind = kernels_for(torch.bfloat16), torch.bfloat16
    weight, inputs = drawn(1, kind, outputs, 2 * half), drawn(2, kind, rows, 2 * half)
    bias = drawn(3, kind, outputs) if adds & 1 else None
    residual = drawn(4, kind, rows, outputs) if adds & 2 else None
    wanted = inputs.double() @ weight.double().T
    wanted = wanted + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())
    packed = kernels.packed(weight)

    found = kernels.linear(inputs, packed, bias, outputs, residual)
    last = kernels.linear(inputs[-1:], packed, bias, outputs, None if residual is None else residual[-1:])

    assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4).all()
    assert torch.equal(found[-1:], last)


def test_rows_are_the_same_bits_however_many_there_are():
    """A row does not depend on the others, nor on how many threads share them."""
    kernels = kernels_for(torch.bfloat16)
    states, opened, weight = (drawn(n, torch.bfloat16, *s) for n, s in enumerate([(67, 576), (67, 256), (576,)]))
    whole = kernels.norm(states, weight, 1e-5)[0], kernels.gate(opened)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = kernels.norm(states, weight, 1e-5)[0], kernels.gate(opened)
    finally:
        torch.set_num_threads(threads)
    alone = kernels.norm(states[5:6], weight, 1e-5)[0], kernels.gate(opened[5:6])

    assert all(torch.equal(a, b) for a, b in zip(whole, shared, strict=True))
    assert all(torch.equal(a[5:6], b) for a, b in zip(whole, alone, strict=True))


def test_other_tensors_are_left_to_torch():
    """Double precision, another device, a subclass of tensors."""

    class Own(torch.Tensor):
        pass

    assert kernels_of(torch.zeros(1)) is kernels_for(torch.float32)
    assert kernels_of(torch.nn.Parameter(torch.zeros(1))) is kernels_for(torch.float32)
    assert kernels_of(torch.zeros(1, dtype=torch.float64)) is None
    assert kernels_of(torch.zeros(1, device="meta")) is None
    assert kernels_of(torch.zeros(1).as_subclass(Own)) is None


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_that_is_no_token_is_refused(target):
    """Memory beyond the row is never read."""
    found = [torch.empty(1) for _ in range(3)]
    with pytest.raises(IndexError, match=r"targets must be in \[0, 7\)"):
        kernels_for(torch.float32).head(torch.zeros(1, 7), torch.tensor([target]), [*found, None], 1.0)


def test_a_tensor_that_is_not_dense_is_refused():
    """What would be read as something else is an error, and not a wrong number."""
    with pytest.raises(AssertionError, match="dense"):
        kernels_for(torch.float32).gate(torch.zeros(4, 8).T)
