"""``python -m benchmarks.attention``: scores that attention over packed rows computes, beside those needed; counted.

Nothing is timed. A block mask computes every block in which a pair is visible, so partial blocks count whole. Blocks by
SDPA pad answers to similar lengths. Parts joined by log-sum-exp are the least that a kernel with causal tiles of the
same size can compute: an answer's own triangle and, apart from it, its rectangle with the prompt; no such kernel is
used, since the gradient of the joint has no public interface in PyTorch. A dense mask computes the square of each
packed row.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from gnomon.models.cpu.prefix_attention import PrefixLayout, Span, rounded
from gnomon.models.packed_attention import BLOCK, visible_pairs

MOST = 1.1
"""Scores computed over scores needed, at most, of the first eight shapes."""


@dataclass(frozen=True)
class PackedShape:
    """``groups`` prompts of ``prompt`` tokens with answers of these lengths each."""

    groups: int
    prompt: int
    answers: tuple[int, ...]

    def __str__(self) -> str:
        least, most, count = min(self.answers), max(self.answers), len(self.answers)
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{f'{self.groups} x ' * (self.groups > 1)}{self.prompt:,} + {count} x {each}"

    @property
    def length(self) -> int:
        """Tokens of a packed row."""
        return self.prompt + sum(self.answers)

    @property
    def layout(self) -> PrefixLayout:
        """All groups in one row."""
        starts = [self.prompt + sum(self.answers[:n]) for n in range(len(self.answers))]
        firsts = [number * self.length for number in range(self.groups)]
        spans = [
            Span(first, self.prompt, [(first + s, n) for s, n in zip(starts, self.answers, strict=True)])
            for first in firsts
        ]
        return PrefixLayout(spans, self.groups * self.length)


EVEN = tuple(PackedShape(*each) for each in (
    (1, 512, (2048,) * 8), (1, 256, (1024,) * 16), (1, 1024, (1024,) * 8), (1, 2048, (512,) * 16),
    (1, 128, (2048,) * 8), (1, 512, (4096,) * 4), (1, 512, tuple(range(256, 4096, 512))), (4, 300, (3700,)),
))  # fmt: skip
SHORT = (PackedShape(2, 128, (1024,) * 8), PackedShape(4, 512, (64,) * 8))
"""Shapes in which blocks of 128 cost more than a tenth, and attention is a few percent of an update."""


@dataclass(frozen=True)
class ScoreCounts:
    """Scores of one head: those needed, and those that each way computes; bytes of masks."""

    needed: int
    dense: int
    padded: int
    joined: int
    blocks: int
    dense_bytes: int
    block_bytes: int


def counted(shape: PackedShape) -> ScoreCounts:
    """Return the counts of one shape."""
    pairs = visible_pairs(shape.layout)
    filled, count = int((pairs > 0).sum()), len(pairs)
    wide, own = rounded(shape.prompt), sum(rounded(n) * (rounded(shape.prompt) + rounded(n)) for n in shape.answers)
    joined = _causal(shape.prompt) + sum(_causal(n) for n in shape.answers)
    joined += _tiles(sum(shape.answers)) * _tiles(shape.prompt) * BLOCK**2
    return ScoreCounts(
        needed=int(pairs.sum()),
        dense=shape.groups * shape.length**2,
        padded=shape.groups * (wide**2 + own),
        joined=shape.groups * joined,
        blocks=filled * BLOCK**2,
        # A boolean mask and one in bfloat16; four tables of a block mask, and those of its transpose.
        dense_bytes=3 * shape.groups * shape.length**2,
        block_bytes=2 * 2 * 4 * count * (count + 1),
    )


def _tiles(count: int) -> int:
    return -(-count // BLOCK)


def _causal(count: int) -> int:
    return _tiles(count) * (_tiles(count) + 1) // 2 * BLOCK**2


def lines() -> Iterator[str]:
    """Yield the page's lines."""
    yield "# Scores computed by attention over packed rows, over scores needed"
    yield ""
    yield (
        f"Counted by `python -m benchmarks.attention`, not timed. Prompt tokens + answers x their tokens; blocks of "
        f"{BLOCK} queries by {BLOCK} keys, partial ones counted whole."
    )
    yield ""
    heads = ("shape", "needed, a head", "dense mask", "padded blocks", "parts joined by lse", "block mask")
    yield f"| {' | '.join(heads)} | masks, dense | block |"
    yield "|---|---|---|---|---|---|---|---|"
    for shape in EVEN + SHORT:
        found = counted(shape)
        ways = (found.dense, found.padded, found.joined, found.blocks)
        ratios = " | ".join(f"{way / found.needed:.2f}" for way in ways)
        masks = f"{found.dense_bytes / 2**20:,.0f} MiB | {found.block_bytes / 2**20:.2f} MiB"
        yield f"| {shape} | {found.needed / 1e6:,.1f} M | {ratios} | {masks} |"
    yield ""
    yield (
        f"The first eight are at most {MOST} with the block mask; in the last two blocks of {BLOCK} are coarse for "
        "answers so short, where attention is a small part of an update."
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
