"""Keys and values of rows that share a prompt, in blocks: the prompt once, then a column for each row, step by step.

A block holds up to `lanes` rows of one prompt, which joined together:

    p p p p  a b c d  a b c d  a b c d        a, b, c, d: the columns of four lanes

To a cache of aligned rows a block is one row that grows by ``lanes`` columns a step. Prompts are read once a block, and
attention multiplies ``lanes`` times as many query rows at once; each lane's mask leaves out the columns of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.models.cache import AlignedCache, AlignedLayer, Prefix

_WIDEST = 4
_LEAST_USE = 0.75


@dataclass(eq=False)
class Block:
    """A prompt of ``prompt`` positions and the rows that follow it. index: which row of the cache it is."""

    index: int
    prompt: int
    alive: int
    grown: int = 0


@dataclass(frozen=True)
class Layout:
    """How a step's rows lie in blocks.

    blocks: how many. columns: [start, end) are looked at, the last ``lanes`` of them written. places Int[R 1]: each
    row's position. hidden Bool[N L C]: what a lane must not see. rows Int[N L]: which row is in which lane, a dead lane
    has row 0; lanes Int[R]: and back, None for both where they are in one order.
    """

    blocks: int
    columns: slice
    written: slice
    places: Tensor
    hidden: Tensor
    rows: Tensor | None
    lanes: Tensor | None


class LaneCache:
    """Rows 0 .. R - 1 in blocks; rows join as whole blocks, and a block goes when its last row leaves."""

    def __init__(self, layers: int) -> None:
        self._cache = AlignedCache(layers)
        self._width = 1
        self._blocks: list[Block] = []
        self._rows: list[tuple[Block, int]] = []

    @property
    def layers(self) -> list[AlignedLayer]:
        """The layers' buffers, a row a block."""
        return self._cache.aligned

    def join(self, prefixes: Sequence[Prefix | None], counts: Sequence[int], room: int) -> None:
        """Append rows; see `AlignedCache.join`. The first to join an empty cache decide how wide blocks are."""
        if not self._rows:
            self._width = choose_width(counts)
        width = self._width
        pieces = [[min(width, count - at) for at in range(0, count, width)] for count in counts]
        self._cache.join(prefixes, [len(piece) for piece in pieces], room * width)
        for prefix, piece in zip(prefixes, pieces, strict=True):
            length = 0 if not prefix else int(prefix[0][0].shape[1])
            for alive in piece:
                block = Block(len(self._blocks), length, alive)
                self._blocks.append(block)
                self._rows += [(block, lane) for lane in range(alive)]

    def leave(self, slot: int) -> None:
        """Remove the row at ``slot``; the last row takes its place."""
        block, _ = self._rows[slot]
        self._rows[slot] = self._rows[-1]
        self._rows.pop()
        block.alive -= 1
        if not block.alive:
            last = self._blocks.pop()
            self._cache.leave(block.index)
            if last is not block:
                last.index, self._blocks[block.index] = block.index, last

    def release(self) -> None:
        """Free the buffers, unless there are rows in them."""
        self._cache.release()

    def before_step(self, room: int, rows: int) -> Layout:
        """Return the layout of the step that comes, with ``rows`` rows, of which those beyond the cache's are spare."""
        width, blocks, cache = self._width, self._blocks, self._cache
        cache.reserve(width, room * width)
        frame = cache.frame
        end = frame.end + width
        spare = [0] * (rows - len(self._rows))
        at = [block.index * width + lane for block, lane in self._rows]
        columns = torch.arange(frame.start, end)
        begins = torch.tensor([frame.end - n for n in cache.lengths])[:, None]
        own = columns - begins - torch.tensor([block.prompt for block in blocks])[:, None]
        hidden = (own[:, None] >= 0) & (own[:, None] % width != torch.arange(width)[:, None])
        hidden |= (columns < begins)[:, None]
        order = None
        if [*at, *spare] != list(range(len(blocks) * width)):
            order = torch.zeros(len(blocks) * width, dtype=torch.long)
            order[at] = torch.arange(len(at))
        return Layout(
            blocks=len(blocks),
            columns=slice(frame.start, end),
            written=slice(frame.end, end),
            places=torch.tensor([*(block.prompt + block.grown for block, _ in self._rows), *spare])[:, None],
            hidden=hidden,
            rows=order,
            lanes=None if order is None else torch.tensor([*at, *spare]),
        )

    def after_step(self) -> None:
        """Count the columns that the step wrote."""
        self._cache.after_step(self._width)
        for block in self._blocks:
            block.grown += 1


def choose_width(counts: Sequence[int]) -> int:
    """Return how many lanes blocks get for groups of so many rows: 4 or 2 where three quarters of them are used, or 1.

    >>> [choose_width(counts) for counts in ([8, 8], [3], [2, 2], [1, 1, 4])]
    [4, 4, 2, 2]
    """
    width = _WIDEST
    while width > 1 and sum(counts) < _LEAST_USE * width * sum(-(-count // width) for count in counts):
        width //= 2
    return width
