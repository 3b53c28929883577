"""Claims about drawing one token a row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnomon.engines.base import Sampling
from gnomon.engines.sampler import draw, truncate

BELOW_ONE = 1 - 2.0**-53


def uniform_grid(count: int) -> torch.Tensor:
    """The middles of ``count`` equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The truncated distribution of one row, written out with a full sort in float64."""
    tempered = logits.astype(np.float64) / sampling.temperature
    p = np.exp(tempered - tempered.max())
    p /= p.sum()
    if sampling.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(sampling.top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if sampling.top_p < 1:
        down = np.sort(p)[::-1]
        last = min(int(np.searchsorted(np.cumsum(down), sampling.top_p)), len(p) - 1)
        p = np.where(p >= down[last], p, 0)
        p /= p.sum()
    if sampling.min_p:
        p = np.where(p >= sampling.min_p * p.max(), p, 0)
        p /= p.sum()
    return p


@pytest.mark.usefixtures("way")
def test_golden_row():
    """Masses 8, 4, 2, 1, 1 of 16: u = 0.6 lies in [8, 12) / 16, so token 1, with probability 4/16."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log()

    drawn = draw(logits, torch.tensor([0.6], dtype=torch.float64), Sampling())

    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(math.log(4 / 16))
    assert drawn.full_logprobs.item() == pytest.approx(math.log(4 / 16))


@pytest.mark.usefixtures("way")
def test_greedy_takes_the_lowest_of_the_largest():
    """Masses 4, 8, 8, 4 of 24 at temperature 0: token 1 at any u, with probability 8/24 as at temperature 1."""
    logits = torch.tensor([[4.0, 8.0, 8.0, 4.0]]).log().expand(3, -1)

    drawn = draw(logits, torch.tensor([0.0, 0.5, BELOW_ONE], dtype=torch.float64), Sampling(temperature=0, top_p=0.1))

    assert drawn.tokens.tolist() == [1, 1, 1]
    assert drawn.logprobs.tolist() == pytest.approx([math.log(8 / 24)] * 3)
    assert drawn.full_logprobs.tolist() == drawn.logprobs.tolist()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), 2),
        (Sampling(top_p=0.7), 2),  # 8/16 is short of 0.7, 12/16 holds it
        (Sampling(top_p=0.75), 2),  # exactly 12/16
        (Sampling(top_k=3, top_p=0.85), 2),  # of 14 left by top-k, 8/14 is short and 12/14 = 0.857 holds it
        (Sampling(min_p=0.25), 3),  # a quarter of the likeliest is mass 2
        (Sampling(top_p=0.7, min_p=0.9), 1),
        (Sampling(top_k=4), 5),  # the two of mass 1 tie, so both stay
    ],
)
def test_truncation_keeps(sampling, kept):
    """Masses 8, 4, 2, 1, 1: what each truncation keeps, and the log-probability renormalized over it."""
    masses = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    grid = uniform_grid(400)

    drawn = draw(masses.log().expand(400, 5), grid, sampling)

    assert sorted(set(drawn.tokens.tolist())) == list(range(kept))
    expected = (masses / masses[:kept].sum()).log()[drawn.tokens]
    torch.testing.assert_close(drawn.logprobs, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(drawn.full_logprobs, (masses / 16).log()[drawn.tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.9), Sampling(top_k=20, min_p=0.02)], ids=str
)
def test_frequencies_are_the_analytic_ones(spread, sampling):
    """A chi-square test of 40,000 draws over 300 tokens does not reject (z < 4), and zeros are never drawn."""
    generator = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(1, 300, generator=generator)
    p = torch.from_numpy(reference(logits[0].numpy(), sampling))
    counts = torch.zeros(300)
    for _ in range(4):
        u = torch.rand(10_000, generator=generator, dtype=torch.float64)
        counts += torch.bincount(draw(logits.expand(10_000, 300), u, sampling).tokens, minlength=300)

    likely = p * 40_000 >= 5
    assert counts[p == 0].sum() == 0
    expected = p[likely] * 40_000
    freedom = int(likely.sum()) - 1
    if freedom > 0:
        chi2 = float(((counts[likely] - expected) ** 2 / expected).sum())
        assert (chi2 - freedom) / math.sqrt(2 * freedom) < 4


ROWS = st.lists(st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf)), min_size=1, max_size=150)
SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.3]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 70]),
    min_p=st.sampled_from([0.0, 0.1]),
)
UNIFORMS = st.one_of(st.sampled_from([0.0, 2.0**-53, 0.5, BELOW_ONE]), st.floats(0, 1, exclude_max=True))


@pytest.mark.usefixtures("way")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, SETTINGS, UNIFORMS)
def test_a_drawn_token_is_always_possible(row, sampling, u):
    """At any u, the borders included, the token has positive probability, and its log-probability is right."""
    if max(row) == -math.inf:
        row = [*row, 0.0]
    logits = torch.tensor([row], dtype=torch.float32)

    drawn = draw(logits, torch.tensor([u], dtype=torch.float64), sampling)

    token = int(drawn.tokens[0])
    assert row[token] > -math.inf
    untruncated = Sampling(temperature=sampling.temperature)
    # Truncation borders are decided in float32 here and float64 there: compare only where they agree on the set.
    exact = reference(logits[0].numpy(), sampling)
    if exact[token] > 0 and (exact > 0).sum() == _kept(logits, sampling):
        assert drawn.logprobs.item() == pytest.approx(math.log(exact[token]), abs=2e-5)
    full = reference(logits[0].numpy(), untruncated)[token]
    assert drawn.full_logprobs.item() == pytest.approx(math.log(full), abs=2e-5)
    assert drawn.logprobs.item() >= drawn.full_logprobs.item() - 1e-5


def _kept(logits: torch.Tensor, sampling: Sampling) -> int:
    shifted = (logits - logits.amax()) / sampling.temperature
    return int((truncate(shifted, shifted.exp(), sampling) > 0).sum())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("u", [0.0, BELOW_ONE])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000])
def test_borders_of_u_never_give_a_forbidden_token(u, width):
    """With the first and last tokens forbidden, u at its borders gives the first and last allowed ones."""
    logits = torch.full((1, width), -math.inf)
    allowed = range(width // 3, max(width // 3 + 1, 2 * width // 3))
    logits[0, list(allowed)] = torch.linspace(-3, 3, len(allowed))

    token = int(draw(logits, torch.tensor([u], dtype=torch.float64), Sampling()).tokens[0])

    assert token == (allowed[0] if u == 0.0 else allowed[-1])


@pytest.mark.usefixtures("way")
def test_many_rows_are_drawn_as_one_by_one():
    """A row's token and log-probabilities do not depend on the rows beside it, to the bit."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 1000, generator=generator)
    u = torch.rand(7, generator=generator, dtype=torch.float64)
    sampling = Sampling(top_p=0.9)

    together = draw(logits, u, sampling)

    for r in range(7):
        alone = draw(logits[r : r + 1], u[r : r + 1], sampling)
        assert alone.tokens[0] == together.tokens[r]
        assert alone.logprobs[0] == together.logprobs[r]


def test_a_nucleus_larger_than_the_first_candidates_is_found():
    """Over 5,000 equal tokens, top-p 0.99 needs thousands of candidates; the far ones are drawn too."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.01 * torch.randn(1, 5000, generator=generator)
    exact = reference(logits[0].numpy(), Sampling(top_p=0.5))

    drawn = draw(logits.expand(4000, 5000), uniform_grid(4000), Sampling(top_p=0.5))

    assert (exact[drawn.tokens.numpy()] > 0).all()
    assert len(set(drawn.tokens.tolist())) > 0.8 * (exact > 0).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_draw_the_same(dtype, temperature):
    """With functions in C and with torch alone: 400 rows, the same tokens, log-probabilities to 1e-6."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(400, 1037, generator=generator)).to(dtype)
    u = torch.rand(400, generator=generator, dtype=torch.float64)
    sampling = Sampling(temperature=temperature)

    ours = draw(logits, u, sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnomon.engines.sampler.kernels_of", lambda tensor: None)
        torchs = draw(logits, u, sampling)

    assert torch.equal(ours.tokens, torchs.tokens)
    assert torch.allclose(ours.logprobs, torchs.logprobs, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("way")
def test_a_row_that_is_not_finite_is_marked():
    """NaN logits give NaN log-probabilities instead of a plausible token."""
    logits = torch.tensor([[0.0, math.nan], [0.0, 1.0]])

    drawn = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), Sampling())

    assert math.isnan(drawn.logprobs[0])
    assert math.isfinite(drawn.logprobs[1])


@pytest.mark.usefixtures("way")
def test_half_precision_logits_are_drawn_in_float32():
    """bfloat16 logits are widened first: 512 equal tokens have log-probability -log 512 to float32 accuracy."""
    drawn = draw(torch.zeros(1, 512, dtype=torch.bfloat16), torch.tensor([0.3], dtype=torch.float64), Sampling())

    assert drawn.logprobs.item() == pytest.approx(-math.log(512), abs=1e-6)
    assert drawn.tokens.item() == int(0.3 * 512)
