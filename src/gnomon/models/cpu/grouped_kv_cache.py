"""A KV cache of rows that share prompts, in blocks: the prompt once, then one column per row and step.

A block holds up to ``width`` rows of one prompt that joined together:

    p p p p  a b c d  a b c d  a b c d        a, b, c, d: the columns of four lanes

To a cache of aligned rows a block is one row that grows by ``width`` columns per step. Native attention, which knows
    where
a row's columns are, reads only these. Masked attention reads a prompt once per block and multiplies ``width`` times as
    many
query rows at once; each lane's mask excludes the columns of the others. Columns of rows that have left are then still
    read.
When they cost a quarter of the attention, the remaining rows move into fewer or narrower blocks.
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
# Cost of attention in columns read by one lane, measured on a CPU with heads of 64.
_BLOCK, _LANE, _QUERY = 45.0, 9.0, 0.14


@dataclass(eq=False)
class CacheBlock:
    """A prompt of ``prompt`` positions and the rows that follow it.

    Attributes:
        index: Row of the cache.
        family: The same number for blocks whose rows joined together behind one prompt.
    """

    index: int
    family: int
    prompt: int
    alive: int
    grown: int = 0


@dataclass(frozen=True)
class PrefixGroups:
    """The positions of a step's rows in blocks of ``width`` lanes.

    Attributes:
        rows: Int64[P 5], each row's block, its prompt's first column, the prompt's length, the tokens after the prompt,
            and
            the row's lane.
        spare: Padding rows after these.
        begins: Int[N 1], a block's first column.
        prompts: Int[N 1], a block's prompt length.
        start: First column of all blocks.
        end: Column at which all blocks will end.
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
        """Number of blocks."""
        return len(self.begins)

    @property
    def positions(self) -> Tensor:
        """Each row's position Int[R 1], 0 for padding rows."""
        return functional.pad(self.rows[:, 2] + self.rows[:, 3], (0, self.spare))[:, None]

    @property
    def columns(self) -> slice:
        """The columns that the step reads."""
        return slice(self.start, self.end)

    @property
    def written(self) -> slice:
        """The columns that the step writes."""
        return slice(self.end - self.width, self.end)

    @cached_property
    def hidden(self) -> Tensor:
        """The columns that a lane must not see, Bool[N L C]."""
        columns = torch.arange(self.start, self.end)
        own = columns - self.begins - self.prompts
        hidden = (own[:, None] >= 0) & (own[:, None] % self.width != torch.arange(self.width)[:, None])
        return hidden | (columns < self.begins)[:, None]

    @cached_property
    def lane_order(self) -> Tensor | None:
        """The lane of each row over all blocks, Int[R]; None if lanes and rows have one order."""
        at = functional.pad(self.rows[:, 0] * self.width + self.rows[:, 4], (0, self.spare))
        is_plain = len(at) == self.blocks * self.width and bool((at == torch.arange(len(at))).all())
        return None if is_plain else at

    @cached_property
    def order(self) -> Tensor | None:
        """The inverse: the row of each lane, Int[N L], row 0 for an empty lane; None likewise."""
        if self.lane_order is None:
            return None
        order = torch.zeros(self.blocks * self.width, dtype=torch.long)
        order[self.lane_order[: len(self.rows)]] = torch.arange(len(self.rows))
        return order


class GroupedKVCache:
    """Rows 0 .. R - 1 in blocks; rows join as whole blocks, and a block is freed when its last row leaves.

    Args:
        thins: Whether remaining rows move into fewer blocks, for attention that reads columns of former rows.
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
        """The layers' buffers, one row per block."""
        return self._cache.aligned

    def join(self, prefixes: Sequence[Prefix | None], counts: Sequence[int], room: int) -> None:
        """Append rows; see `AlignedCache.join`. The first rows of an empty cache decide the width of blocks."""
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

    def read(self, slot: int, first: int) -> Prefix:
        """Return a copy of a row's keys and values from position ``first`` on."""
        block, lane = self._rows[slot]
        grown = block.prompt + lane + self._width * torch.arange(block.grown)
        columns = torch.cat([torch.arange(block.prompt), grown])[first:]
        columns += self._cache.frame.end - self._cache.lengths[block.index]
        return [layer.read(block.index, columns) for layer in self._cache.aligned]

    def release(self) -> None:
        """Free the buffers, unless there are rows in them."""
        self._cache.release()

    def before_step(self, room: int, rows: int) -> PrefixGroups:
        """Return the layout of the next step with ``rows`` rows, of which those beyond the cache's rows are padding."""
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
        """Move the rows into other blocks of the same buffers if attention becomes cheaper by a quarter."""
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
        """Move the rows into blocks of ``width`` lanes, with one family per block."""
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
    """Return the cost of a block with ``width`` lanes and so many columns, in columns read by one lane."""
    return _BLOCK + _LANE * width + columns * (1 + _QUERY * width)


def choose_width(counts: Sequence[int]) -> int:
    """Return the lanes per block for groups of these sizes: 4 or 2 if three quarters of them are used, otherwise 1.

    >>> [choose_width(counts) for counts in ([8, 8], [3], [2, 2], [1, 1, 4])]
    [4, 4, 2, 2]
    """
    width = _WIDEST
    while width > 1 and sum(counts) < _LEAST_USE * width * sum(-(-count // width) for count in counts):
        width //= 2
    return width
