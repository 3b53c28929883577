"""Batches to draw: what the laws hold for."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.testing import make_batch
from gnomon.types import Batch

few = settings(max_examples=15)


@dataclass(frozen=True)
class Drawn:
    """A scored batch, the current log-probabilities, and a way to cut its rows."""

    batch: Batch
    current: Tensor
    cuts: list[list[int]]


@st.composite
def drawn(draw: st.DrawFn, all_graded: bool = False) -> Drawn:
    """Draw groups of 2 to 4 responses of 1 to 5 tokens with holes, some ungraded, and four policies."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    rewards = [draw(st.sampled_from([0.0, 1.0, 0.25] + ([] if all_graded else [None]))) for _ in group]
    mask = [draw(st.lists(st.booleans(), min_size=1, max_size=5)) for _ in group]
    width = max(map(len, mask))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def shifted(base: Tensor, size: float) -> Tensor:
        return base + size * torch.randn(base.shape, generator=generator, dtype=torch.float64)

    behavior = shifted(torch.full((len(group), width), -2.0, dtype=torch.float64), 0.5)
    proximal = shifted(behavior, 0.3)
    batch = make_batch(
        rewards,
        mask,
        group,
        behavior=behavior.tolist(),
        proximal=proximal.tolist(),
        reference=shifted(behavior, 0.3).tolist(),
        values=torch.rand((len(group), width), generator=generator, dtype=torch.float64).tolist(),
        baseline=torch.rand(len(group), generator=generator, dtype=torch.float64).tolist(),
        is_truncated=[draw(st.booleans()) for _ in group],
    )
    part = [draw(st.integers(0, 3)) for _ in group]
    cuts = [[i for i, p in enumerate(part) if p == k] for k in range(4)]
    return Drawn(batch, shifted(proximal, 0.3), [c for c in cuts if c])


def scored(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return proximal and reference, which every drawn batch has."""
    assert batch.proximal is not None
    assert batch.reference is not None
    return batch.proximal, batch.reference


def valued(batch: Batch) -> Tensor:
    """Return the values, which every drawn batch has."""
    assert batch.values is not None
    return batch.values


def on_policy(batch: Batch) -> Batch:
    """Return the batch as if proximal and reference were behavior."""
    return batch.with_fields(proximal=batch.behavior, reference=batch.behavior)


def same(left: Tensor, right: Tensor, tolerance: float = 1e-11) -> None:
    """Assert equality up to rounding."""
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
