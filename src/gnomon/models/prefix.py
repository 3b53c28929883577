"""Compute a prompt once for all its responses.

Rows with one prompt become one packed row: the prompt, then each response. A response token sees the prompt and its own
response, at its original positions, so its hidden state is the same as in a separate row. With G responses the prompt
costs one G-th.

    prompt  first response  second response
    p p p   a a             b b b            position: 0 1 2  3 4  3 4 5

Attention that knows the branches (`packed_attention`) has no further cost. Other attention runs over the whole packed
row with a mask and multiplies responses with each other for nothing. Its cost grows with the square of the row's
length, that of everything else linearly. `pieces` splits a group where the square costs more than computing the prompt
again.

A backbone that computes each position independently takes all prompts with their responses in one row (`is_one_row`):
padding rows to the longest of a micro-batch cost a twelfth of an update. There, what all prompts begin with (a system
message, the chat template) is computed once too (`has_stem`): with one answer a prompt it is most of what rows share.

    stem  first prompt  its response  second prompt  its response
    s s   p p           a a           q              b b b         position: 0 1  2 3  4 5  2  3 4 5
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from gnomon.models.cpu.prefix_attention import PrefixLayout, Span
from gnomon.models.kv_cache import Prefix

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Packed:
    """Packed rows.

    Attributes:
        tokens: Int[N L].
        positions: Int[N L].
        spans: Each prompt with its responses, in positions over all rows; without the stem.
        rows: Int[B S], packed row of each original position.
        columns: Int[B S], packed column of each original position.
        is_placed: Bool[B S], false for positions that are not in a packed row.
        stem: Positions that all prompts begin with, the first of the only row.
    """

    tokens: Tensor
    positions: Tensor
    spans: Sequence[Span]
    rows: Tensor
    columns: Tensor
    is_placed: Tensor
    stem: int = 0

    @cached_property
    def branches(self) -> PrefixLayout:
        """The layout of branches, for attention that uses it."""
        return PrefixLayout(self.spans, self.tokens.numel(), self.stem)

    def index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return flat packed indices of original positions, Int[M] each, on their device."""
        at = (rows.cpu(), positions.cpu())
        return (self.rows[at] * self.tokens.shape[1] + self.columns[at]).to(rows.device)

    def place(self, experts: Tensor) -> Tensor | None:
        """Return ``experts`` Int[B S L K] of the original rows as Int[N L' L K] of the packed rows, -1 where none went.

        None if rows disagree about their shared prompt, which then cannot be computed once.
        """
        # Several rows write a shared prompt's positions; reading them back shows whether they agreed.
        to = (self.rows[self.is_placed], self.columns[self.is_placed])
        own = experts.cpu()[self.is_placed]
        placed = torch.full((*self.tokens.shape, *experts.shape[2:]), -1, dtype=experts.dtype)
        placed[to] = own
        return placed if torch.equal(placed[to], own) else None

    def take(self, experts: Tensor) -> Tensor:
        """Return ``experts`` Int[N L' L K] of the packed rows as Int[B S L K] of the original ones; see `place`."""
        found = experts.cpu()[self.rows, self.columns]
        return torch.where(self.is_placed[:, :, None, None], found, -1)


def pack(
    tokens: Tensor,
    prompt_lengths: Tensor,
    ends: Tensor,
    rounded: Callable[[int], int] = int,
    is_one_row: bool = False,
    has_stem: bool = False,
) -> Packed | None:
    """Return the rows with shared prompts, or None if no two rows have the same prompt.

    Args:
        tokens: Int[B S].
        prompt_lengths: Int[B].
        ends: Int[B]; positions before it are needed, at least the prompt's.
        rounded: Rounds up the length of packed rows.
        is_one_row: Put all prompts and responses into one row with padding only at its end, also rows without a shared
            prompt. Only for a backbone that computes positions independently and attention that knows branches.
        has_stem: In one row, compute once what all prompts begin with. Only for attention by the kernel.
    """
    together = _together(tokens, prompt_lengths)
    if len(together) == tokens.shape[0] and not is_one_row:
        return None
    stem = common_beginning(together) if is_one_row and has_stem else 0
    # Tokens of each group: its prompt without the stem, then all of its responses.
    widths = [len(p) - stem + sum(int(ends[r]) - len(p) for r in members) for p, members in together.items()]
    length = rounded(stem + sum(widths) if is_one_row else max(widths))
    shape = (1 if is_one_row else len(together), length)
    # Where each group begins, in positions over all packed rows.
    firsts = accumulate(widths if is_one_row else [length] * len(widths), initial=stem)
    spans = list(_spans(together, ends, firsts, stem))
    into, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    went = torch.zeros_like(tokens, device="cpu")
    for members, span in zip(together.values(), spans, strict=True):
        prompt = torch.cat([torch.arange(stem), span.first + torch.arange(span.prompt)])
        into.view(-1)[prompt] = tokens[members[0], : len(prompt)]
        positions.view(-1)[prompt] = torch.arange(len(prompt))
        for row, (start, own) in zip(members, span.responses, strict=True):
            steps = torch.arange(own)
            into.view(-1)[start + steps] = tokens[row, len(prompt) : len(prompt) + own]
            positions.view(-1)[start + steps] = len(prompt) + steps
            went[row, : len(prompt) + own] = torch.cat([prompt, start + steps])
    is_placed = torch.arange(tokens.shape[1]) < ends[:, None]
    return Packed(into, positions, spans, went // length, went % length, is_placed, stem)


def _spans(
    together: Mapping[tuple[int, ...], Sequence[int]], ends: Tensor, firsts: Iterable[int], stem: int
) -> Iterator[Span]:
    for (prompt, members), first in zip(together.items(), firsts, strict=False):
        lengths = [int(ends[row]) - len(prompt) for row in members]
        own = len(prompt) - stem
        starts = accumulate(lengths, initial=first + own)
        yield Span(first, own, list(zip(starts, lengths, strict=False)))


def common_beginning(prompts: Collection[tuple[int, ...]]) -> int:
    """Return how many tokens all of different prompts begin with, 0 for a single one.

    >>> common_beginning([(7, 8, 1), (7, 8, 2, 3), (7, 8)])
    2
    """
    if len(prompts) < 2:
        return 0
    # What the least and the greatest of sorted sequences begin with, all between them begin with too.
    least, most = min(prompts), max(prompts)
    return next((n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))


def number_prompts(tokens: Tensor, prompt_lengths: Tensor) -> tuple[list[int], int]:
    """Return the prompt number of each row of ``tokens`` Int[B S], numbered in the order of first rows, and what all of
    them begin with, see `common_beginning`.

    >>> number_prompts(torch.tensor([[7, 8, 1], [7, 9, 1], [7, 8, 2]]), torch.tensor([2, 2, 2]))
    ([0, 1, 0], 1)
    """
    numbers = [0] * len(tokens)
    together = _together(tokens, prompt_lengths)
    for number, rows in enumerate(together.values()):
        for row in rows:
            numbers[row] = number
    return numbers, common_beginning(together)


def crossing_tokens(width: int) -> int:
    """Return the packed length L at which attention costs what everything else in a layer of that width d costs.

    A layer has about 12 d^2 weights, 24 d^2 operations a token; attention with a dense mask makes 4 L d a token, masked
    pairs included. They are equal at L = 6 d. Attention reaches about two thirds of the speed of a matrix product.

    >>> crossing_tokens(576)
    2304
    """
    return 4 * width


def pieces(prompt: int, responses: Sequence[int], max_tokens: int, crossing: float) -> list[list[int]]:
    """Return positions of ``responses`` in packed rows that are cheapest together, each of ``max_tokens`` at most.

    A packed row of L = prompt + its responses costs L + L^2 / crossing: the linear part, then attention. Every number
    of rows that keeps the limit is tried, and the fewest of the cheapest is taken. Responses are spread evenly, longest
    first into the emptiest row, since unequal squares sum to more than equal ones. A single response may be above the
    limit. The answer is the same for the same lengths.

    Without attention's part, one row is always cheapest, and the limit alone decides:

    >>> pieces(512, [64] * 8, max_tokens=2048, crossing=2304)
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    >>> pieces(512, [64] * 8, max_tokens=720, crossing=2304)
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    >>> pieces(100, [1000] * 4, max_tokens=8192, crossing=2304)
    [[0], [1], [2], [3]]
    """
    order = sorted(range(len(responses)), key=lambda position: -responses[position])
    best: list[list[int]] = []
    least = float("inf")
    for count in range(1, len(responses) + 1):
        rows, lengths = _spread(order, responses, prompt, count)
        if max(lengths) > max_tokens and count < len(responses):
            continue
        cost = sum(length + length**2 / crossing for length in lengths)
        # The cost falls with the number of rows and then rises, so the first that is not cheaper ends the search.
        if cost >= least:
            break
        best, least = [row for row in rows if row], cost  # empty responses leave a row without members
    return best


def windows(model: Any) -> list[int | None] | None:
    """Return each layer's attention window according to the config, None without one.

    None if a layer has a state, or keeps so many keys of all that lie in a row (Doge).
    """
    config = model.config.get_text_config()
    if "keep_window_size" in vars(config):
        return None
    has_window = vars(config).get("use_sliding_window", True)
    window = vars(config).get("sliding_window") if has_window else None
    layers = vars(config).get("layer_types") or [_KINDS[window is not None]] * int(config.num_hidden_layers)
    return [window if kind == _KINDS[1] else None for kind in layers] if set(layers) <= set(_KINDS) else None


def attends_fully(model: Any) -> bool:
    """Whether every layer attends to all positions according to the config: no window, no recurrent state."""
    found = windows(model)
    return found is not None and not any(found)


def _together(tokens: Tensor, prompt_lengths: Tensor) -> dict[tuple[int, ...], list[int]]:
    """Return each prompt's tokens, and the rows that begin with it."""
    together: dict[tuple[int, ...], list[int]] = {}
    listed = tokens.tolist()
    for row, length in enumerate(prompt_lengths.tolist()):
        together.setdefault(tuple(listed[row][:length]), []).append(row)
    return together


def _spread(
    order: Sequence[int], responses: Sequence[int], prompt: int, count: int
) -> tuple[list[list[int]], list[int]]:
    """Return positions in ``count`` rows of nearly one length, and those lengths with the prompt."""
    rows: list[list[int]] = [[] for _ in range(count)]
    lengths = [prompt] * count
    for position in order:
        emptiest = lengths.index(min(lengths))
        rows[emptiest].append(position)
        lengths[emptiest] += responses[position]
    return rows, lengths


# Keys and values that outlive their rows, so that the next turn of a conversation computes its new tokens alone.

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
        # Only the new positions are copied from the row: those before are in the tree already.
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
            # The sequence leaves the tree in the middle of this node.
            if shared < len(found.tokens):
                return
            node, at = found, at + shared

    def _split(self, node: _Node, first: int) -> _Node:
        """Cut a node in two, in memory of their own; return the part with the first positions."""
        assert node.parent is not None
        whole = len(node.tokens)
        # Copies, since a view would keep the memory of both parts as long as either lives.
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
        # Zeros and not empty: masked values are multiplied by 0, and 0 * NaN is NaN.
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
