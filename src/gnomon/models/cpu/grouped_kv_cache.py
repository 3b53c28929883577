"""Keys and values of rows that share a prompt, in blocks: the prompt once, then a column for each row, step by step.

A block holds up to `lane_order` rows of one prompt, which joined together:

    p p p p  a b c d  a b c d  a b c d        a, b, c, d: the columns of four lanes

To a cache of aligned rows a block is one row that grows by ``lane_order`` columns a step. Attention that knows where a
row's columns are (`native`) reads these alone. Attention with a mask reads prompts once a block and multiplies
``lane_order`` times as many query rows at once; each lane's mask leaves out the columns of the others. Columns of rows
that
have left are then still read: once that costs a quarter of what attention does, those that stay are put into fewer or
narrower blocks.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.models.kv_cache import AlignedCache, AlignedLayer, Prefix

_WIDEST = 4
_LEAST_USE = 0.75
_LEAST_GAIN = 0.75
# What attention costs, in columns read by one lane: measured on a CPU with heads of 64.
_BLOCK, _LANE, _QUERY = 45.0, 9.0, 0.14


@dataclass(eq=False)
class CacheBlock:
    """A prompt of ``prompt`` positions and the rows that follow it.

    index: which row of the cache it is. family: blocks whose rows joined together behind one prompt have the same.
    """

    index: int
    family: int
    prompt: int
    alive: int
    grown: int = 0


@dataclass(frozen=True)
class PrefixGroups:
    """How a step's rows lie in blocks of ``width`` lanes.

    rows Int64[P 5]: each row's block, the column where its prompt begins, the prompt's length, how many tokens followed
    it, and the row's lane. spare: rows beyond these. begins, prompts Int[N 1]: a block's first column and its prompt's
    length. start: the first column that any of them has. end: where they will all end.
    """

    width: int
    rows: Tensor
    spare: int
    begins: Tensor
    prompts: Tensor
    start: int
    end: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.begins)

    @property
    def positions(self) -> Tensor:
        """Each row's position Int[R 1], 0 for spare ones."""
        return functional.pad(self.rows[:, 2] + self.rows[:, 3], (0, self.spare))[:, None]

    @property
    def columns(self) -> slice:
        """The columns that are looked at."""
        return slice(self.start, self.end)

    @property
    def written(self) -> slice:
        """The columns that the step writes."""
        return slice(self.end - self.width, self.end)

    @cached_property
    def hidden(self) -> Tensor:
        """What a lane must not see, Bool[N L C]."""
        columns = torch.arange(self.start, self.end)
        own = columns - self.begins - self.prompts
        hidden = (own[:, None] >= 0) & (own[:, None] % self.width != torch.arange(self.width)[:, None])
        return hidden | (columns < self.begins)[:, None]

    @cached_property
    def lane_order(self) -> Tensor | None:
        """Which lane of all blocks has a row, Int[R]; None where they are in one order."""
        at = functional.pad(self.rows[:, 0] * self.width + self.rows[:, 4], (0, self.spare))
        is_plain = len(at) == self.blocks * self.width and bool((at == torch.arange(len(at))).all())
        return None if is_plain else at

    @cached_property
    def order(self) -> Tensor | None:
        """And back: the row of each lane, Int[N L], row 0 where it has none; None likewise."""
        if self.lane_order is None:
            return None
        order = torch.zeros(self.blocks * self.width, dtype=torch.long)
        order[self.lane_order[: len(self.rows)]] = torch.arange(len(self.rows))
        return order


class GroupedKVCache:
    """Rows 0 .. R - 1 in blocks; rows join as whole blocks, and a block goes when its last row leaves.

    thins: whether rows that stay are put together, for attention that reads the columns of those that left.
    """

    def __init__(self, layers: int, thins: bool = True) -> None:
        self._cache = AlignedCache(layers)
        self._thins = thins
        self._width = 1
        self._blocks: list[CacheBlock] = []
        self._rows: list[tuple[CacheBlock, int]] = []
        self._families = 0

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
            self._families += 1
            for alive in piece:
                block = CacheBlock(len(self._blocks), self._families, length, alive)
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

    def before_step(self, room: int, rows: int) -> PrefixGroups:
        """Return the layout of the step that comes, with ``rows`` rows, of which those beyond the cache's are spare."""
        if self._thins:
            self._thin()
        width, cache = self._width, self._cache
        cache.reserve(width, room * width)
        frame = cache.frame
        begins = [frame.end - n for n in cache.lengths]
        return PrefixGroups(
            width=width,
            rows=torch.tensor([(b.index, begins[b.index], b.prompt, b.grown, lane) for b, lane in self._rows]),
            spare=rows - len(self._rows),
            begins=torch.tensor(begins)[:, None],
            prompts=torch.tensor([block.prompt for block in self._blocks])[:, None],
            start=frame.start,
            end=frame.end + width,
        )

    def after_step(self) -> None:
        """Count the columns that the step wrote."""
        self._cache.after_step(self._width)
        for block in self._blocks:
            block.grown += 1

    def _thin(self) -> None:
        """Put the rows into other blocks, fitting the buffers, where that makes attention cheaper by a quarter."""
        families: dict[int, list[int]] = defaultdict(list)
        for slot, (block, _) in enumerate(self._rows):
            families[block.family].append(slot)
        firsts = [self._rows[slots[0]][0] for slots in families.values()]

        def cost(width: int) -> float:
            blocks = sum(-(-len(slots) // width) for slots in families.values())
            if blocks > self._cache.frame.capacity:
                return math.inf
            return blocks * attention_cost(width, max(each.prompt + each.grown * width for each in firsts))

        longest = max((block.prompt + block.grown * self._width for block in self._blocks), default=0)
        now = len(self._blocks) * attention_cost(self._width, longest)
        width = min((1, 2, _WIDEST), key=cost) if firsts else 1
        if firsts and cost(width) <= _LEAST_GAIN * now:
            self._regroup(list(families.values()), width)

    def _regroup(self, families: Sequence[Sequence[int]], width: int) -> None:
        """Put the rows in slots, those of a family together, into blocks of ``width`` lanes."""
        before, now = self._rows.copy(), self._width
        pieces = [slots[at : at + width] for slots in families for at in range(0, len(slots), width)]
        firsts = [before[piece[0]][0] for piece in pieces]
        lengths = [block.prompt + block.grown * width for block in firsts]
        self._cache.reserve(0, 0, max(lengths))
        end = self._cache.frame.end
        rows = torch.empty(len(pieces), max(lengths), dtype=torch.long)
        columns = torch.zeros_like(rows)
        self._blocks = []
        for piece, first in zip(pieces, firsts, strict=True):
            made = CacheBlock(len(self._blocks), first.family, first.prompt, len(piece), first.grown)
            self._blocks.append(made)
            grown, own = end - first.grown * now, max(lengths) - first.grown * width
            rows[made.index] = first.index
            columns[made.index, own - first.prompt : own] = torch.arange(grown - first.prompt, grown)
            for lane, slot in enumerate(piece):
                block, old = before[slot]
                rows[made.index, own + lane :: width] = block.index
                columns[made.index, own + lane :: width] = torch.arange(first.grown) * now + grown + old
                self._rows[slot] = (made, lane)
        self._cache.regroup(rows, columns, lengths)
        self._width = width


def attention_cost(width: int, columns: int) -> float:
    """Return what a block of ``width`` lanes and that many columns costs, in columns read by one lane."""
    return _BLOCK + _LANE * width + columns * (1 + _QUERY * width)


def choose_width(counts: Sequence[int]) -> int:
    """Return how many lanes blocks get for groups of so many rows: 4 or 2 where three quarters of them are used, or 1.

    >>> [choose_width(counts) for counts in ([8, 8], [3], [2, 2], [1, 1, 4])]
    [4, 4, 2, 2]
    """
    width = _WIDEST
    while width > 1 and sum(counts) < _LEAST_USE * width * sum(-(-count // width) for count in counts):
        width //= 2
    return width
