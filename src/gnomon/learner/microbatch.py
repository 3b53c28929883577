"""Rows of a minibatch to micro-batches that fit a token budget: the count is of tokens that will be computed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush, heapreplace
from typing import Any

import torch
from torch import Tensor

from gnomon.core.types import SEQUENCE_FIELDS, TOKEN_FIELDS, Batch
from gnomon.models.prefix import number_prompts, pieces


@dataclass(frozen=True)
class Sharing:
    """How a model computes a prompt once for all of its responses.

    Attributes:
        crossing: See `prefix.crossing_tokens`.
        longest: Tokens that one packed row may have; one above the budget of a cut goes alone, as a long row of the
            batch does.
        is_in_line: Packed rows lie one behind another, none is padded, and a cut computes the sum of their lengths.
        has_stem: In line, what all prompts begin with is computed once in a cut.
    """

    crossing: float
    longest: int
    is_in_line: bool = False
    has_stem: bool = False


@dataclass(frozen=True)
class PromptRows:
    """What rows share.

    Attributes:
        numbers: Which prompt each row has.
        lengths: Tokens of each row's prompt.
        stem: Tokens that all prompts begin with and that a cut computes once.
    """

    numbers: Sequence[int]
    lengths: Sequence[int]
    sharing: Sharing
    stem: int = 0

    def of(self, rows: Sequence[int]) -> "PromptRows":
        """Return what these rows share."""
        return replace(self, numbers=[self.numbers[n] for n in rows], lengths=[self.lengths[n] for n in rows])

    def within(self, max_tokens: int) -> tuple["PromptRows", int]:
        """Return these rows with the stem that cuts of ``max_tokens`` can count on, and the tokens that it leaves.

        At least half of the budget is left, where a cut may be so long; otherwise nothing is counted on.
        """
        left = max(max_tokens - self.stem, max_tokens // 2)
        is_near = self.sharing.is_in_line and self.stem + left <= self.sharing.longest
        return (self, left) if is_near else (replace(self, stem=0), max_tokens)


def cut_rows(
    lengths: Sequence[int],
    max_tokens: int,
    prompts: PromptRows | None = None,
    rollouts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return positions of ``lengths`` in cuts of at most ``max_tokens`` computed tokens.

    A cut computes its rows times the longest of them. Without ``prompts`` the rows are those of the batch, prompt and
    response. With them, rows of one prompt become one packed row, prompt + sum of responses, or several where its limit
    or attention's cost says so (`prefix.pieces`); those then go into different cuts, since in one they would be packed
    together. Where packed rows lie in line a cut computes their sum and the stem once, and as few cuts as hold all rows
    are filled evenly, the fullest first.

    Longest first, so that a cut holds rows of nearly one length (little padding) and a run that will not fit into
    memory fails at once. Every position comes exactly once; a row above the budget goes alone. Equal
    lengths keep their order, so the same lengths are always cut alike.

    Args:
        rollouts: Number of each row's rollout, whose segments are computed in one cut, as its loss is one; None where
            every row is a rollout. Without ``prompts``.

    >>> cut_rows([3, 9, 4, 2, 20], max_tokens=12)
    [[4], [1], [2, 0, 3]]
    >>> cut_rows([3, 9, 4, 4], max_tokens=18, prompts=PromptRows([0, 0, 1, 1], [2] * 4, Sharing(100, 18)))
    [[1, 0], [2, 3]]
    >>> cut_rows([3, 9, 4, 2], max_tokens=12, rollouts=[0, 1, 1, 0])
    [[1, 2], [0, 3]]
    """
    left = max_tokens
    if prompts is not None:
        prompts, left = prompts.within(max_tokens)
    rows = _single(lengths, rollouts) if prompts is None else _packed(lengths, prompts)
    if prompts is not None and prompts.sharing.is_in_line:
        return _members(_evenly(rows, left))
    cuts: list[list[_Row]] = []
    for row in sorted(rows, key=lambda r: -r.length):
        for cut in cuts:
            is_apart = all(row.prompt != other.prompt for other in cut)
            if is_apart and (sum(other.rows for other in cut) + row.rows) * cut[0].length <= max_tokens:
                cut.append(row)
                break
        else:
            cuts.append([row])
    return _members(cuts)


def deal_rows(
    lengths: Sequence[int], ranks: int, prompts: PromptRows | None = None, rollouts: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the positions of ``lengths`` that each of ``ranks`` processes computes, none twice.

    Rows are dealt out longest first, each to the process with the fewest computed tokens so far, so that the busiest
    has at most one row more than its share. Rows of one prompt stay together up to a share, and are parted where they
    are more: computing a prompt twice costs less than a process that waits. Segments of one rollout are never parted.

    >>> deal_rows([9, 5, 4, 3], ranks=2)
    [[0, 3], [1, 2]]
    >>> deal_rows([4] * 6, ranks=2, prompts=PromptRows([0] * 6, [2] * 6, Sharing(1000, 100)))
    [[0, 2, 4], [1, 3, 5]]
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    rows = _single(lengths, rollouts)
    if prompts is not None:
        # A group that is parted computes its prompt once more.
        share = -(-sum(row.length for row in _packed(lengths, prompts)) // ranks) + max(prompts.lengths, default=0)
        rows = _packed(lengths, replace(prompts, sharing=replace(prompts.sharing, longest=share)))
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda r: -r.length):
        rank = loads.index(min(loads))
        loads[rank] += row.rows * row.length
        hands[rank] += row.members
    return [sorted(hand) for hand in hands]


def micro_batches(
    batch: Batch, rows: Tensor, max_tokens: int, sharing: Sharing | None = None, place: tuple[int, int] = (0, 1)
) -> list[tuple[Tensor, Batch]]:
    """Return ``rows`` Int[N] of ``batch`` in cuts: which rows, and those trimmed to the longest of them.

    Where rollouts have segments their rows stay together, and every row is computed whole.

    Args:
        sharing: None where every row is computed whole.
        place: Rank, and of how many processes: only the cuts of that one, as many as every other has. Where it has
            fewer of its own, cuts without a row follow: two tokens, to be computed for nothing, since the others wait
            for this process in every pass.
    """
    lengths, rank = batch.lengths[rows].tolist(), place[0]
    prompts = rollouts = None
    if batch.rollout_id is not None:
        rollouts = batch.rollout_id[rows].tolist()
    elif sharing is not None:
        own = batch.prompt_lengths[rows]
        numbers, stem = number_prompts(batch.tokens[rows], own)
        prompts = PromptRows(numbers, own.tolist(), sharing, stem if sharing.has_stem else 0)
    dealt = []
    for hand in deal_rows(lengths, place[1], prompts, rollouts):
        own_prompts = None if prompts is None else prompts.of(hand)
        own_rollouts = None if rollouts is None else [rollouts[n] for n in hand]
        cuts = cut_rows([lengths[n] for n in hand], max_tokens, own_prompts, own_rollouts)
        dealt.append([rows[torch.tensor([hand[n] for n in cut])] for cut in cuts])
    found = [(index, trim(batch.rows(index))) for index in dealt[rank]]
    missing = max(map(len, dealt)) - len(found)
    return found + [(rows[:0], _two_tokens(batch, rows)) for _ in range(missing)]


def trim(batch: Batch) -> Batch:
    """Return the batch without the columns in which every row has ended."""
    sequence = int(batch.lengths.max())
    response = int((batch.lengths - batch.prompt_lengths).max())
    ends = dict.fromkeys(TOKEN_FIELDS, response) | dict.fromkeys(SEQUENCE_FIELDS, sequence)
    cut: dict[str, Any] = {n: vars(batch)[n][:, :end] for n, end in ends.items() if vars(batch)[n] is not None}
    own = {name: weights[:, :response] for name, weights in batch.own_weights.items()}
    return replace(batch, **cut, own_weights=own)


def move(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on ``device``."""
    moved: dict[str, Any] = {
        f.name: v.to(device) for f in fields(batch) if isinstance(v := vars(batch)[f.name], Tensor)
    }
    own = {name: weights.to(device) for name, weights in batch.own_weights.items()}
    return replace(batch, **moved, own_weights=own)


def _two_tokens(batch: Batch, rows: Tensor) -> Batch:
    """Return the first tokens of a row as a prompt of one and a response of one."""
    row = batch.rows(rows[:1])
    one = torch.ones_like(row.lengths)
    return trim(row.with_fields(prompt_lengths=one, lengths=2 * one, mask=torch.ones_like(row.mask)))


@dataclass(frozen=True)
class _Row:
    """What goes through the model as one: its prompt, how long it is, which rows of the batch it holds, and in how many
    rows of that length.
    """

    prompt: int
    length: int
    members: list[int]
    rows: int = 1


def _single(lengths: Sequence[int], rollouts: Sequence[int] | None) -> list[_Row]:
    """Return the rows as they are, those of one rollout together."""
    if rollouts is None:
        return [_Row(n, length, [n]) for n, length in enumerate(lengths)]
    together: dict[int, list[int]] = {}
    for position, number in enumerate(rollouts):
        together.setdefault(number, []).append(position)
    return [_Row(n, max(lengths[m] for m in rows), rows, len(rows)) for n, rows in enumerate(together.values())]


def _members(cuts: Sequence[Sequence[_Row]]) -> list[list[int]]:
    return [[member for row in cut for member in row.members] for cut in cuts]


def _evenly(rows: Sequence[_Row], max_tokens: int) -> list[list[_Row]]:
    """Return rows in as few cuts as hold them, about equally long, the longest first; each prompt once in a cut.

    Each row, longest first, goes into the emptiest cut that does not hold its prompt yet, if it fits there.
    """
    order = sorted(rows, key=lambda row: -row.length)
    # No two rows of more than half of the budget fit together.
    halves = sum(2 * row.length > max_tokens for row in order)
    count = max(1, halves, -(-sum(row.length for row in order) // max_tokens))
    while (cuts := _filled(order, max_tokens, count)) is None:
        count += 1
    return sorted(filter(None, cuts), key=lambda cut: -sum(row.length for row in cut))


def _filled(order: Sequence[_Row], max_tokens: int, count: int) -> list[list[_Row]] | None:
    """Return ``count`` cuts, some of which may be empty; None where they do not hold all rows."""
    cuts: list[list[_Row]] = [[] for _ in range(count)]
    prompts: list[set[int]] = [set() for _ in range(count)]
    by_load = [(0, n) for n in range(count)]
    for row in order:
        passed = []
        while by_load and row.prompt in prompts[by_load[0][1]]:
            passed.append(heappop(by_load))
        if not by_load:
            return None
        load, emptiest = by_load[0]
        if load and load + row.length > max_tokens:
            return None
        heapreplace(by_load, (load + row.length, emptiest))
        cuts[emptiest].append(row)
        prompts[emptiest].add(row.prompt)
        for each in passed:
            heappush(by_load, each)
    return cuts


def _packed(lengths: Sequence[int], prompts: PromptRows) -> list[_Row]:
    """Return packed rows in the order of their prompts, each prompt's longest first."""
    together: dict[int, list[int]] = {}
    for position, number in enumerate(prompts.numbers):
        together.setdefault(number, []).append(position)
    packed = []
    for number, members in together.items():
        prompt = prompts.lengths[members[0]] - prompts.stem
        responses = [lengths[member] - prompt - prompts.stem for member in members]
        for piece in pieces(prompt, responses, prompts.sharing.longest - prompts.stem, prompts.sharing.crossing):
            total = prompt + sum(responses[position] for position in piece)
            packed.append(_Row(number, total, [members[position] for position in piece]))
    return packed
