"""A prompt is computed once for all of its responses.

Rows that answer one prompt become one packed row: the prompt, then each response. A response token sees the prompt and
its own response, at the positions that it had, so its hidden state is what it was in a row of its own. With G responses
the prompt costs one G-th.

    prompt  first response  second response
    p p p   a a             b b b            position: 0 1 2  3 4  3 4 5

Where attention is told how the row branches (`branched`), that is all there is to it. Elsewhere it has a price:
attention runs over the whole packed row with a mask, so that responses are multiplied with each other for nothing. Its
cost grows with the square of the row, that of everything else with its length. `pieces` cuts a group where the square
begins to cost more than computing the prompt again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gnomon.models.branched import Branches, Span

_ATTENTION_ONLY = {"full_attention"}


@dataclass(frozen=True)
class Packed:
    """Packed rows. tokens, positions Int[N L]; mask Bool[N 1 L L], true where a token may look.

    rows, columns Int[B S]: where each position of each original row went. is_placed Bool[B S]: false where it went
    nowhere; the two then say anything. branches: the same as the mask, for attention that can use it.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    columns: Tensor
    is_placed: Tensor
    branches: Branches

    def index(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return where positions of original rows are in the flattened packed ones, Int[M] each, on their device."""
        at = (rows.cpu(), positions.cpu())
        return (self.rows[at] * self.tokens.shape[1] + self.columns[at]).to(rows.device)

    def place(self, experts: Tensor) -> Tensor | None:
        """Return ``experts`` Int[B S L K] of the original rows as Int[N L' L K] of the packed ones, -1 where none went.

        None when rows do not agree about the prompt that they share: it cannot then be computed once.
        """
        to = (self.rows[self.is_placed], self.columns[self.is_placed])
        own = experts.cpu()[self.is_placed]
        placed = torch.full((*self.tokens.shape, *experts.shape[2:]), -1, dtype=experts.dtype)
        placed[to] = own
        return placed if torch.equal(placed[to], own) else None

    def take(self, experts: Tensor) -> Tensor:
        """Return ``experts`` Int[N L' L K] of the packed rows as Int[B S L K] of the original ones; see `place`."""
        found = experts.cpu()[self.rows, self.columns]
        return torch.where(self.is_placed[:, :, None, None], found, -1)


def pack(tokens: Tensor, prompt_lengths: Tensor, ends: Tensor, multiple: int = 1) -> Packed | None:
    """Return the rows with prompts shared, or None when no two rows have the same prompt.

    tokens Int[B S]; prompt_lengths Int[B]; ends Int[B]: positions before it are needed, at least the prompt's.
    multiple: what the length of packed rows is rounded up to.
    """
    together = _together(tokens, prompt_lengths)
    if len(together) == tokens.shape[0]:
        return None
    widths = [len(p) + sum(int(ends[r]) - len(p) for r in members) for p, members in together.items()]
    shape = (len(together), -(-max(widths) // multiple) * multiple)
    packed = Packed(
        tokens=torch.zeros(shape, dtype=torch.long),
        positions=torch.zeros(shape, dtype=torch.long),
        mask=torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1)[:, None],
        rows=torch.zeros_like(tokens, device="cpu"),
        columns=torch.zeros_like(tokens, device="cpu"),
        is_placed=torch.arange(tokens.shape[1]) < ends[:, None],
        branches=Branches.of(list(_spans(together, ends)), shape[1]),
    )
    for number, (prompt, members) in enumerate(together.items()):
        length = len(prompt)
        packed.tokens[number, :length] = torch.tensor(prompt)
        packed.positions[number, :length] = torch.arange(length)
        packed.mask[number, 0, :length, :length] = _causal(length)
        start = length
        for row in members:
            own = int(ends[row]) - length
            stop = start + own
            packed.tokens[number, start:stop] = tokens[row, length : length + own]
            packed.positions[number, start:stop] = torch.arange(length, length + own)
            packed.mask[number, 0, start:stop, :length] = True
            packed.mask[number, 0, start:stop, start:stop] = _causal(own)
            packed.rows[row] = number
            packed.columns[row, :length] = torch.arange(length)
            packed.columns[row, length : length + own] = torch.arange(start, stop)
            start = stop
    return packed


def _spans(together: Mapping[tuple[int, ...], Sequence[int]], ends: Tensor) -> Iterator[Span]:
    for prompt, members in together.items():
        lengths = [int(ends[row]) - len(prompt) for row in members]
        starts = accumulate(lengths, initial=len(prompt))
        yield Span(len(prompt), list(zip(starts, lengths, strict=False)))


def number_prompts(tokens: Tensor, prompt_lengths: Tensor) -> list[int]:
    """Return which prompt each row of ``tokens`` Int[B S] has, numbered in the order of their first rows.

    >>> number_prompts(torch.tensor([[7, 8, 1], [7, 9, 1], [7, 8, 2]]), torch.tensor([2, 2, 2]))
    [0, 1, 0]
    """
    numbers = [0] * len(tokens)
    for number, rows in enumerate(_together(tokens, prompt_lengths).values()):
        for row in rows:
            numbers[row] = number
    return numbers


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
        if cost >= least:
            break
        best, least = [row for row in rows if row], cost  # empty responses leave a row without members
    return best


def attends_fully(model: Any) -> bool:
    """Whether, as its config says, every layer attends to all positions: no window, no state that is carried along."""
    config = model.config.get_text_config()
    layers = vars(config).get("layer_types") or ["full_attention"]
    has_window = vars(config).get("sliding_window") is not None and vars(config).get("use_sliding_window", True)
    return set(layers) <= _ATTENTION_ONLY and not (has_window and "layer_types" not in vars(config))


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


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()
