"""Keys and values that outlive their rows, so that the next turn of a conversation computes its new tokens alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from gnomon.models.kv_cache import Prefix

Read = Callable[[int], tuple[Prefix, Tensor | None]]
"""Returns a copy of a row's keys and values, and its experts, from a position on."""


@dataclass(eq=False)
class _Node:
    """Some positions of one or several sequences, behind those of its parent.

    Attributes:
        tokens: Token of each position, at least one below the root.
        states: Keys and values of the positions.
        experts: Experts Int16[n L K] of the positions; None where they were not recorded.
        used: When it was used last; a node is used whenever one of its children is.
    """

    tokens: tuple[int, ...] = ()
    states: Prefix = ()
    experts: Tensor | None = None
    parent: "_Node | None" = None
    children: "dict[int, _Node]" = field(default_factory=dict)
    used: int = 0

    def cut(self, first: int, last: int) -> tuple[Prefix, Tensor | None]:
        """Return views of the positions from ``first`` to before ``last``."""
        states = [(keys[:, first:last], values[:, first:last]) for keys, values in self.states]
        return states, None if self.experts is None else self.experts[first:last]


@dataclass(frozen=True)
class Known:
    """The beginning of a sequence that need not be computed: pieces that follow each other.

    Attributes:
        length: Positions of all pieces.
        experts: Experts of each piece, None where they were not recorded.
    """

    length: int
    pieces: Sequence[Prefix]
    experts: Sequence[Tensor | None]

    @property
    def states(self) -> Prefix:
        """Keys and values of all positions."""
        layers = zip(*self.pieces, strict=True)
        return [(torch.cat([k for k, _ in layer], 1), torch.cat([v for _, v in layer], 1)) for layer in layers]

    def chosen(self, rest: Tensor | None = None) -> Tensor | None:
        """Return the experts of all positions, and of a ``rest`` behind them; None where any are not recorded."""
        pieces = [*self.experts, *(() if rest is None else (rest.cpu(),))]
        recorded = [piece for piece in pieces if piece is not None]
        return torch.cat(recorded) if recorded and len(recorded) == len(pieces) else None


class PrefixTree:
    """A radix tree of computed sequences: each common beginning is held once, and what was used longest ago goes first.

    Source: RadixAttention in Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs",
    section 3. Ours holds copies, not pages that rows read in place: a row's own cache stays contiguous.

    Attributes:
        size: Bytes that it holds.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._clock = 0
        self.size = 0

    def find(self, tokens: Sequence[int]) -> Known:
        """Return what is known of a sequence: its longest beginning in the tree."""
        pieces, experts, length = list[Prefix](), list[Tensor | None](), 0
        self._clock += 1
        for node, shared in self._path(tokens):
            node.used = self._clock
            states, chosen = node.cut(0, shared)
            pieces.append(states)
            experts.append(chosen)
            length += shared
        return Known(length, pieces, experts)

    def keep(self, tokens: tuple[int, ...], read: Read, most: int) -> None:
        """Hold a sequence, and drop what was used longest ago beyond ``most`` bytes."""
        self._clock += 1
        node, at = self._root, 0
        for found, shared in list(self._path(tokens)):
            at += shared
            node = self._split(found, shared) if at < len(tokens) and shared < len(found.tokens) else found
            node.used = self._clock
        if at < len(tokens):
            states, experts = read(at)
            made = _Node(tokens[at:], states, experts, node, used=self._clock)
            node.children[tokens[at]] = made
            self.size += _bytes(states)
        while self.size > most:
            self._drop(min(self._leaves(), key=lambda leaf: leaf.used))

    def clear(self) -> None:
        """Drop everything."""
        self._root, self.size = _Node(), 0

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes along a sequence, each with the number of its positions that the sequence has too."""
        node, at = self._root, 0
        while at < len(tokens) and (found := node.children.get(tokens[at])) is not None:
            shared = _common(found.tokens, tokens[at : at + len(found.tokens)])
            yield found, shared
            if shared < len(found.tokens):
                return
            node, at = found, at + shared

    def _split(self, node: _Node, first: int) -> _Node:
        """Cut a node in two, in memory of their own; return the part with the first positions."""
        assert node.parent is not None
        whole = len(node.tokens)
        upper, lower = (_own(*node.cut(*part)) for part in ((0, first), (first, whole)))
        front = _Node(node.tokens[:first], *upper, node.parent, {node.tokens[first]: node}, node.used)
        node.parent.children[node.tokens[0]] = front
        node.tokens, node.parent = node.tokens[first:], front
        node.states, node.experts = lower
        return front

    def _drop(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.tokens[0]]
        self.size -= _bytes(leaf.states)

    def _leaves(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if not node.children:
                yield node


class _BegunLayer(DynamicLayer):
    """One layer of rows that begin with known positions; all rows end at the last column, as in `AlignedCache`.

    Args:
        begun: Pieces of each row's keys and values.
        news: Positions of each row that are computed now; the new columns before them are of no row.
        columns: Length of the longest row.
    """

    def __init__(self, begun: Sequence[Sequence[tuple[Tensor, Tensor]]], news: Sequence[int], columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._begun, self._news, self._columns = begun, news, columns

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return all columns, the new ones behind the known ones."""
        self.keys, self.values = self._placed(key_states, 0), self._placed(value_states, 1)
        self._begun = ()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the columns before the new ones."""
        return self._columns - max(self._news)

    def _placed(self, new: Tensor, side: int) -> Tensor:
        rows, heads, _, size = new.shape
        placed = new.new_zeros(rows, heads, self._columns, size)
        for row, (pieces, count) in enumerate(zip(self._begun, self._news, strict=True)):
            end = self._columns - count
            placed[row, :, end:] = new[row, :, -count:]
            for piece in reversed(pieces):
                placed[row, :, end - piece[side].shape[1] : end] = piece[side]
                end -= piece[side].shape[1]
        return placed


def begun_cache(known: Sequence[Known], news: Sequence[int], layers: int) -> tuple[Cache, Tensor]:
    """Return a cache of rows that begin with what is known of them, and their mask Int[R C], 0 before a row's begin."""
    lengths = [each.length + count for each, count in zip(known, news, strict=True)]
    columns = max(lengths)
    made: list[Any] = [
        _BegunLayer([[piece[layer] for piece in each.pieces] for each in known], news, columns)
        for layer in range(layers)
    ]
    return Cache(layers=made), (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]).long()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _own(states: Prefix, experts: Tensor | None) -> tuple[Prefix, Tensor | None]:
    return [(keys.clone(), values.clone()) for keys, values in states], None if experts is None else experts.clone()


def _bytes(states: Prefix) -> int:
    return sum(part.nbytes for pair in states for part in pair)
