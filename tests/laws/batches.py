"""Batches to draw: what the laws hold for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.algorithms import PRESETS, Algorithm, LossInputs, PolicyGradient
from gnomon.algorithms.protocols import PieceResult
from gnomon.algorithms.ratios import Statistics
from gnomon.core.metrics import Metrics
from gnomon.core.types import TOKEN_FIELDS, Batch
from gnomon.testing import make_batch

# A tenth and a twentieth of the profile's examples: `HYPOTHESIS_PROFILE=search` looks further.
few = settings(max_examples=settings().max_examples // 10)
fewer = settings(max_examples=settings().max_examples // 20)


@dataclass(frozen=True)
class Drawn:
    """A scored batch, the current log-probabilities, and a way to cut its rows."""

    batch: Batch
    current: Tensor
    cuts: list[list[int]]

    def of(self, algorithm: Algorithm) -> "Drawn":
        """Return the draw as answers that the algorithm's dataset would have given; itself where a policy samples.

        Pairs of rows are one group: a chosen and a rejected answer, in either order and one at the end maybe alone, or
        a labelled answer and one without a reward, whose tokens count.
        """
        rows, columns = torch.arange(len(self.batch)), torch.arange(self.batch.width)
        is_first = rows % 2 == 0
        if algorithm.samples == "pairs":
            rewards = (is_first ^ (rows // 2 % 2 == 0)).double()
            return replace(self, batch=self.batch.with_fields(group=rows // 2, rewards=rewards))
        if algorithm.samples == "labels":
            answered = columns < (self.batch.lengths - self.batch.prompt_lengths)[:, None]
            mask = torch.where(self.batch.is_graded[:, None], self.batch.mask, answered)
            rewards = torch.where(self.batch.rewards > 0, 1.0, -1.0).double() * is_first
            return replace(
                self, batch=self.batch.with_fields(group=rows // 2, rewards=rewards, is_graded=is_first, mask=mask)
            )
        return self


@st.composite
def drawn(draw: st.DrawFn, all_graded: bool = False, wild: bool = False) -> Drawn:
    """Draw groups of 1 to 4 responses of 1 to 5 tokens with holes, some ungraded, four policies and a critic.

    wild: some have probabilities from e^-35 to nearly 1, and policies that are up to 30 nats apart.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    rewards = [draw(st.sampled_from([0.0, 1.0, 0.25] + ([] if all_graded else [None]))) for _ in group]
    mask = [draw(st.lists(st.booleans(), min_size=1, max_size=5)) for _ in group]
    shape = (len(group), max(map(len, mask)))
    is_wild = wild and draw(st.booleans())
    apart = 10.0 if is_wild else 0.3
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def shifted(base: Tensor, size: float) -> Tensor:
        step = (size * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(-15, 15)
        return torch.minimum(base + step, torch.tensor(-1e-6, dtype=torch.float64))

    anywhere = -35 * torch.rand(shape, generator=generator, dtype=torch.float64)
    behavior = anywhere if is_wild else shifted(torch.full(shape, -2.0, dtype=torch.float64), 0.5)
    proximal = shifted(behavior, apart)
    batch = make_batch(
        rewards,
        mask,
        group,
        behavior=behavior.tolist(),
        proximal=proximal.tolist(),
        reference=shifted(behavior, apart).tolist(),
        sharpened=shifted(behavior, apart).tolist(),
        values=torch.rand(shape, generator=generator, dtype=torch.float64).tolist(),
        baseline=torch.rand(len(group), generator=generator, dtype=torch.float64).tolist(),
        bootstrap=torch.rand(len(group), generator=generator, dtype=torch.float64).tolist(),
        is_truncated=[draw(st.booleans()) for _ in group],
        component_rewards=[[r or 0.0, draw(st.sampled_from([0.0, 1.0]))] for r in rewards],
        components=("a", "b"),
        component_weights=(1.0, 0.5),
    )
    part = [draw(st.integers(0, 3)) for _ in group]
    cuts = [[i for i, p in enumerate(part) if p == k] for k in range(4)]
    return Drawn(batch, shifted(proximal, apart), [c for c in cuts if c])


def prompted(batch: Batch, length: int = 3, vocabulary: int = 200) -> Batch:
    """Return the batch in float32, with tokens that a model can read: one prompt of ``length`` a group.

    All policies are moved down to what an untrained model gives one of 259 tokens, so that ratios are near 1.
    """
    generator = torch.Generator().manual_seed(len(batch) + batch.width)
    proximal, reference = scored(batch)

    def tokens(rows: int, columns: int) -> Tensor:
        return torch.randint(1, vocabulary, (rows, columns), generator=generator)

    def untrained(policy: Tensor) -> Tensor:
        return (policy - 3.6).float()

    prompts = tokens(int(batch.group.max()) + 1, length)[batch.group]
    answers = torch.where(torch.arange(batch.width) < batch.lengths[:, None] - 1, tokens(len(batch), batch.width), 0)
    return batch.with_fields(
        tokens=torch.cat([prompts, answers], 1),
        prompt_lengths=torch.full((len(batch),), length),
        lengths=batch.lengths + length - 1,
        behavior=untrained(batch.behavior),
        full_behavior=untrained(batch.full_behavior),
        proximal=untrained(proximal),
        reference=untrained(reference),
        sharpened=None if batch.sharpened is None else untrained(batch.sharpened),
        values=valued(batch).float(),
    )


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


def size_of(loss: float, gradient: Tensor, current: Tensor) -> float:
    """Return how large the numbers are that a loss is summed from: rounding errors are relative to that."""
    return 1.0 + abs(loss) + float((gradient.abs() * (1 + current.abs())).sum())


@dataclass(frozen=True)
class Held:
    """The bounded ratio that was believed at one point, whatever the ratio is now: a stopped gradient, frozen."""

    weight: Tensor

    def __call__(self, ratio: Tensor, statistics: Statistics) -> Tensor:
        """Return the weight."""
        return self.weight


@dataclass(frozen=True)
class HeldFactor:
    """The factor of a correction at one point, frozen likewise."""

    factor: Tensor
    is_filter: ClassVar[bool] = True

    def __call__(self, view: LossInputs) -> PieceResult:
        """Return the factor."""
        return self.factor, Metrics()


def frozen(algorithm: Algorithm, current: Tensor, weighed: Batch, statistics: Statistics) -> Algorithm:
    """Return the algorithm whose weights, where they have a stopped gradient, stay what they are at ``current``.

    Who sampled the answers does not enter the loss, and of given answers a frozen weight would be refused.
    """
    view = algorithm.view(current, -current / 2, weighed, statistics)
    if algorithm.correction is not None:
        algorithm = replace(algorithm, correction=HeldFactor(algorithm.correction(view)[0]))
    if not isinstance(algorithm.surrogate, PolicyGradient):
        return algorithm
    return replace(algorithm, samples="policy", surrogate=PolicyGradient(Held(algorithm.surrogate.weight(view))))


def presets(*names: str) -> Sequence[Algorithm]:
    """Return the presets of these names; all of them without any."""
    return [PRESETS[name] for name in names] if names else list(PRESETS.values())


def segmented(d: Drawn, places: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
    """Return the batch with each response in two rows, the second after ``places`` tokens of it; row, column of each.

    A place at an end of the response leaves one of the rows empty.
    """
    batch, width = d.batch, d.batch.width
    lengths = (batch.lengths - batch.prompt_lengths).tolist()
    places = [min(place, length) for place, length in zip(places, lengths, strict=False)]
    source = torch.full((2 * len(batch), width), -1)
    for row, (place, length) in enumerate(zip(places, lengths, strict=True)):
        source[2 * row, :place] = row * width + torch.arange(place)
        source[2 * row + 1, : length - place] = row * width + torch.arange(place, length)
    inside, whole = source >= 0, torch.arange(2 * len(batch)) // 2

    def moved(tensor: Tensor) -> Tensor:
        return torch.where(inside, tensor.flatten()[source.clamp(min=0)], torch.zeros_like(tensor[:1, :1]))

    fields = {name: moved(value) for name in TOKEN_FIELDS if (value := getattr(batch, name)) is not None}
    cut = batch.rows(whole).with_fields(**fields, lengths=1 + inside.sum(1), rollout_id=whole)
    return cut, moved(d.current), source
