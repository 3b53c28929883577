"""A KV cache of rows with different lengths, aligned so that all rows end at the same column."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

_LEAST_ROOM = 64

Prefix = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of one prompt, one pair a layer, each [heads, positions, size]."""


@dataclass
class Frame:
    """The used part of the buffers: rows [0, rows) and columns [start, end).

    A row of length n has its positions in columns [end - n, end); the columns before are masked. ``columns`` and
    ``capacity`` are the allocated columns and rows.
    """

    rows: int = 0
    start: int = 0
    end: int = 0
    capacity: int = 0
    columns: int = 0


LayerState = Sequence[Tensor | None]
"""States of one row in one layer: of its convolutions, then of its recurrences; None where the layer has none."""
_TOLD = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class Rows(Protocol):
    """The KV cache of rows in slots 0 .. R - 1; see `AlignedCache`."""

    def join(self, prefixes: Sequence[Prefix | None], counts: Sequence[int], room: int) -> None:
        """Append rows."""

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""

    def read(self, slot: int, first: int) -> Prefix:
        """Return a copy of a row's keys and values from position ``first`` on."""

    def release(self) -> None:
        """Free memory that is cheap to fill again."""


class AlignedLayer(DynamicLayer):
    """One layer's KV cache in fixed buffers: a step writes one column and copies nothing.

    Buffers begin as zeros, because a masked value is multiplied by a weight of exactly zero, and 0 * NaN is NaN.
    """

    def __init__(self, frame: Frame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.frame = frame
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns and return views of all columns in use."""
        keys, values = self.buffers(key_states, value_states)
        rows, start, end = self.frame.rows, self.frame.start, self.frame.end
        last = end + key_states.shape[2]
        keys[:rows, :, end:last] = key_states
        values[:rows, :, end:last] = value_states
        return keys[:rows, :, start:last], values[:rows, :, start:last]

    def get_seq_length(self) -> int:
        """Return how many columns are in use."""
        return self.frame.end - self.frame.start

    def buffers(self, key_like: Tensor, value_like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers, made on first use with the heads and sizes of the examples."""
        if self.keys is None or self.values is None:
            self.keys = self._empty(key_like, self.frame)
            self.values = self._empty(value_like, self.frame)
            # By this flag transformers tells a cache in use from an empty one.
            self.is_initialized = True
        return self.keys, self.values

    def read(self, row: int, columns: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of a row's keys and values in some columns."""
        assert self.keys is not None, "a row that was computed is in the buffers"
        assert self.values is not None
        return self.keys[row, :, columns].clone(), self.values[row, :, columns].clone()

    def release(self) -> None:
        """Free the buffers."""
        self.keys = self.values = None
        self.is_initialized = False

    def gather(self, rows: int, places: Tensor, used: slice) -> None:
        """Fill columns ``used`` of the first ``rows`` rows from flat indices ``places`` over (row, head, column)."""
        for buffer in (b for b in (self.keys, self.values) if b is not None):
            found = buffer.view(-1, buffer.shape[-1]).index_select(0, places)
            buffer[:rows, :, used] = found.view(rows, buffer.shape[1], -1, buffer.shape[-1])

    def relocate(self, frame: Frame) -> None:
        """Move the used part into new buffers with the layout ``frame``."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._moved(self.keys, frame), self._moved(self.values, frame)

    def _moved(self, buffer: Tensor, frame: Frame) -> Tensor:
        made = self._empty(buffer, frame)
        used = slice(self.frame.start, self.frame.end)
        made[: self.frame.rows, :, frame.start : frame.end] = buffer[: self.frame.rows, :, used]
        return made

    @staticmethod
    def _empty(like: Tensor, frame: Frame) -> Tensor:
        return like.new_zeros(frame.capacity, like.shape[1], frame.columns, like.shape[3])


class AlignedCache(Cache):
    """The cache that a transformers model sees, and the operations by which rows join and leave.

    All layers have full attention. A sliding window is a matter of the mask, which transformers makes from column
    distances; these equal position distances in every row.
    """

    def __init__(self, layers: int) -> None:
        self.frame = Frame()
        self.lengths: list[int] = []
        self.aligned = [AlignedLayer(self.frame) for _ in range(layers)]
        super().__init__(layers=list(self.aligned))

    def join(self, prefixes: Sequence[Prefix | None], counts: Sequence[int], room: int) -> None:
        """Append ``counts[i]`` rows that begin with the positions of ``prefixes[i]`` (None: no position yet).

        Make at least ``room`` further columns available.
        """
        news = [n for p, count in zip(prefixes, counts, strict=True) for n in [_positions(p)] * count]
        self._make_room_for(news, room)
        at = self.frame.rows
        for prefix, count in zip(prefixes, counts, strict=True):
            # A prefix of no position has no layers.
            for layer, (key, value) in zip(self.aligned, prefix or (), strict=False):
                keys, values = layer.buffers(key[None], value[None])
                used = self._columns(key.shape[1])
                keys[at : at + count, :, used] = key
                values[at : at + count, :, used] = value
            at += count
        self.lengths += news
        self._fit()

    def leave(self, slot: int) -> None:
        """Remove the row at ``slot``; the last row takes its place."""
        last = self.frame.rows - 1
        # Rows stay dense: steps compute the first R rows of the buffers, so a hole would be computed too.
        if slot != last:
            used = slice(self.frame.start, self.frame.end)
            for buffer in (b for layer in self.aligned for b in (layer.keys, layer.values) if b is not None):
                buffer[slot, :, used] = buffer[last, :, used]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()
        self._fit()

    def read(self, slot: int, first: int) -> Prefix:
        """Return a copy of a row's keys and values from position ``first`` on."""
        own = self._columns(self.lengths[slot])
        return [layer.read(slot, slice(own.start + first, own.stop)) for layer in self.aligned]

    def release(self) -> None:
        """Free the buffers, unless there are rows in them."""
        if self.lengths:
            return
        for layer in self.aligned:
            layer.release()
        frame = self.frame
        frame.rows = frame.start = frame.end = frame.capacity = frame.columns = 0

    def before_step(self, room: int) -> tuple[Tensor, Tensor]:
        """Return position ids Int[R 1] and the attention mask Int[R columns + 1] of the step that comes."""
        self._make_room(self.frame.rows, 0, room)
        lengths = torch.tensor(self.lengths)[:, None]
        # Distance of each column to the one that comes; a row of length n sees the columns at most n before it.
        columns = torch.arange(self.frame.end - self.frame.start, -1, -1)
        return lengths, (columns[None] <= lengths).long()

    def reserve(self, columns: int, room: int, longest: int = 0) -> None:
        """Make room for so many more columns, for ``room`` further ones, and for rows as long as ``longest``."""
        self._make_room(self.frame.rows, longest, room, columns)

    def after_step(self, columns: int = 1) -> None:
        """Count the columns that the step wrote."""
        self.frame.end += columns
        self.lengths = [n + columns for n in self.lengths]

    def regroup(self, rows: Tensor, columns: Tensor, lengths: Sequence[int]) -> None:
        """Build new rows from positions of the current rows; there may not be more rows than before.

        Args:
            rows: Int[B C], buffer row of each position in the last C columns.
            columns: Int[B C], buffer column of each position.
            lengths: Lengths of the new rows. Positions before a row's begin are masked and may be any.
        """
        frame, used = self.frame, slice(self.frame.end - rows.shape[1], self.frame.end)
        for layer in self.aligned:
            if layer.keys is not None:
                heads = layer.keys.shape[1]
                # (B, heads, C), flat over (row, head, column) of the buffer.
                at = (rows[:, None] * heads + torch.arange(heads)[:, None]) * frame.columns + columns[:, None]
                layer.gather(len(lengths), at.flatten(), used)
        self.lengths = list(lengths)
        self._fit()

    def _columns(self, length: int) -> slice:
        """Return the columns of a row of so many positions."""
        return slice(self.frame.end - length, self.frame.end)

    def _make_room_for(self, news: Sequence[int], room: int) -> None:
        """Make room for further rows of these lengths, and for ``room`` further columns."""
        self._make_room(len(self.lengths) + len(news), max(news, default=0), room)

    def _fit(self) -> None:
        self.frame.rows = len(self.lengths)
        self.frame.start = self.frame.end - max(self.lengths, default=0)

    def _make_room(self, rows: int, longest: int, room: int, more: int = 1) -> None:
        """Make room for ``rows`` rows, a prefix of ``longest`` positions, and ``more`` columns (at most 64)."""
        now = self.frame
        # Without rows the end may be anywhere; here no column before the longest prefix is wasted.
        if not self.lengths:
            now.start = now.end = longest
        fits = rows <= now.capacity and longest <= now.end <= now.columns - more
        if fits:
            return
        used = now.end - now.start
        end = max(used, longest)
        # Buffers about double as rows grow, but not beyond what the rows may still need: copies cost as much as a few
        # steps, and unused columns memory.
        columns = max(now.columns, end + max(_LEAST_ROOM, min(room, max(end, 4 * _LEAST_ROOM))))
        # The used columns move to end at ``end``, with free columns behind them.
        made = Frame(now.rows, end - used, end, max(rows, now.capacity), columns)
        for layer in self.aligned:
            layer.relocate(made)
        now.start, now.end, now.capacity, now.columns = made.start, made.end, made.capacity, made.columns


class StateLayer(LinearAttentionLayer):
    """One layer's states, one a row: a step reads and writes them all."""

    def like(self, other: Any) -> None:
        """Take over what transformers notes of a layer that has computed."""
        # What transformers notes at a layer's first pass decides how the next one updates the states.
        for name in _TOLD:
            vars(self)[name] = copy(vars(other)[name])
        self.dtype, self.device = other.dtype, other.device

    def join(self, states: Sequence[LayerState], counts: Sequence[int]) -> None:
        """Append ``counts[i]`` rows with ``states[i]``."""
        for (kind, at), parts in zip(_places(self), zip(*states, strict=True), strict=True):
            news = [
                part[None].expand(n, *part.shape) for part, n in zip(parts, counts, strict=True) if part is not None
            ]
            if news:
                kind[at] = torch.cat(news if kind[at] is None else [kind[at], *news])

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its place."""
        for kind, at in _places(self):
            if kind[at] is not None:
                kind[at][slot] = kind[at][-1]
                kind[at] = kind[at][:-1]

    def release_states(self) -> None:
        """Free the memory of rows that are gone."""
        for kind, at in _places(self):
            kind[at] = None


def state_of(layer: Any, row: int) -> LayerState:
    """Return a copy of a row's states in a layer that carries some."""
    return [None if kind[at] is None else kind[at][row].clone() for kind, at in _places(layer)]


def _places(layer: Any) -> Iterator[tuple[Any, int]]:
    """Yield where a layer holds its states."""
    for kind in (layer.conv_states, layer.recurrent_states):
        for at in kind:
            yield kind, at


class MixedLayer(StateLayer, AlignedLayer):  # type: ignore[misc, override]
    """A layer with attention beside a state (Falcon-H1)."""

    def __init__(self, frame: Frame, number_of_states: int) -> None:
        StateLayer.__init__(self, number_of_states=number_of_states)
        AlignedLayer.__init__(self, frame)


class HybridCache(AlignedCache):
    """`AlignedCache` of a model in which layers carry a state, instead of attention or beside it.

    Args:
        like: The layers of the model's own cache.
    """

    def __init__(self, like: Sequence[Any]) -> None:
        super().__init__(0)
        self.layers = [self._aligned_like(layer) for layer in like]
        self.aligned = [layer for layer in self.layers if isinstance(layer, AlignedLayer)]
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def blank(self) -> Cache:
        """Return an empty cache of such layers for a prefill, in which windows keep all positions."""
        kinds: dict[type, Any] = {MixedLayer: LinearAttentionAndFullAttentionLayer, StateLayer: LinearAttentionLayer}
        made: list[Any] = []
        for layer in self.layers:
            states = {} if type(layer) is AlignedLayer else {"number_of_states": vars(layer)["number_of_states"]}
            made.append(kinds.get(type(layer), DynamicLayer)(**states))
        return Cache(layers=made)

    def read_states(self, cache: Cache, row: int) -> list[LayerState]:
        """Return a row's states after a prefill in `blank`."""
        found: list[Any] = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        for own, layer in zip(self.states, found, strict=True):
            own.like(layer)
        return [state_of(layer, row) for layer in found]

    def join_states(self, states: Sequence[Sequence[LayerState]], counts: Sequence[int]) -> None:
        """Append ``counts[i]`` rows with ``states[i]``, a state for each layer that carries one."""
        for layer, own in zip(self.states, zip(*states, strict=True), strict=True):
            layer.join(own, counts)

    def leave(self, slot: int) -> None:
        """Remove the row at ``slot``; the last row takes its place."""
        super().leave(slot)
        for layer in self.states:
            layer.leave(slot)

    def release(self) -> None:
        """Free the buffers, unless there are rows in them."""
        super().release()
        for layer in self.states if not self.lengths else ():
            layer.release_states()

    def _aligned_like(self, layer: Any) -> Any:
        attends, carries = (isinstance(layer, kind) for kind in (DynamicLayer, LinearAttentionCacheLayerMixin))
        if not carries:
            return AlignedLayer(self.frame)
        states = layer.number_of_states
        return MixedLayer(self.frame, states) if attends else StateLayer(number_of_states=states)


def _positions(prefix: Prefix | None) -> int:
    return 0 if not prefix else int(prefix[0][0].shape[1])
