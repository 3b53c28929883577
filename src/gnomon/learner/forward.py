"""Forward passes over the rows of a minibatch, in micro-batches within a token budget."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gnomon.core.errors import ConfigError, LearnerError
from gnomon.core.metrics import Metrics
from gnomon.core.progress import show_progress
from gnomon.core.tensor_files import extremes
from gnomon.core.types import SEQUENCE_FIELDS, TOKEN_FIELDS, Batch, TopLogprobs
from gnomon.learner.loss import ComputeStats
from gnomon.learner.mesh import Mesh, SingleProcess
from gnomon.learner.sections import DEVICE_SHARE, LearnerConfig, kept_numbers, token_budget
from gnomon.models.backbone import kept_for_backward
from gnomon.models.contexts import recomputing
from gnomon.models.critic import Values, ValueScorer
from gnomon.models.device import memory_of
from gnomon.models.head import chunk_for
from gnomon.models.logprobs import TokenScorer, TokenScores
from gnomon.models.prefix import crossing_tokens, number_prompts, pieces
from gnomon.models.routing import Routing, changed_fraction

# A *cut* is one micro-batch. Its size counts the tokens that will be computed, padding included.


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
    """The prompts of rows, and what the rows share of them.

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
        # A cut holds the stem once and is filled with rows of which the stem is taken off.
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
            # First fit: a cut costs its rows times its first row's length, which is the longest since rows come
            # longest first.
            shares_no_prompt = all(row.prompt != other.prompt for other in cut)
            if shares_no_prompt and (sum(other.rows for other in cut) + row.rows) * cut[0].length <= max_tokens:
                cut.append(row)
                break
        else:
            cuts.append([row])
    return _members(cuts)


def shard_rows(
    lengths: Sequence[int], ranks: int, prompts: PromptRows | None = None, rollouts: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the positions of ``lengths`` that each of ``ranks`` processes computes, none twice.

    Rows are dealt out longest first, each to the process with the fewest computed tokens so far, so that the busiest
    has at most one row more than its share. Rows of one prompt stay together up to a share, and are parted where they
    are more: computing a prompt twice costs less than a process that waits. Segments of one rollout are never parted.

    >>> shard_rows([9, 5, 4, 3], ranks=2)
    [[0, 3], [1, 2]]
    >>> shard_rows([4] * 6, ranks=2, prompts=PromptRows([0] * 6, [2] * 6, Sharing(1000, 100)))
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
    # Every process plans the cuts of all processes, so that all agree on how many passes there are without asking.
    for hand in shard_rows(lengths, place[1], prompts, rollouts):
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
    # TOKEN_FIELDS are [B T], of the response alone; SEQUENCE_FIELDS are [B S], prompt and response.
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
    # A lower bound of the number of cuts; one more is tried until the rows fit, since a prompt may not come twice in a
    # cut.
    count = max(1, halves, -(-sum(row.length for row in order) // max_tokens))
    while (cuts := _filled(order, max_tokens, count)) is None:
        count += 1
    return sorted(filter(None, cuts), key=lambda cut: -sum(row.length for row in cut))


def _filled(order: Sequence[_Row], max_tokens: int, count: int) -> list[list[_Row]] | None:
    """Return ``count`` cuts, some of which may be empty; None where they do not hold all rows."""
    cuts: list[list[_Row]] = [[] for _ in range(count)]
    prompts: list[set[int]] = [set() for _ in range(count)]
    # A heap of (tokens, cut), so that planning thousands of rows is quick: 0.05 s for 4,096.
    by_load = [(0, n) for n in range(count)]
    for row in order:
        passed = []
        # Cuts that hold this row's prompt are set aside, and put back once the row has its place.
        while by_load and row.prompt in prompts[by_load[0][1]]:
            passed.append(heappop(by_load))
        if not by_load:
            return None
        load, emptiest = by_load[0]
        # An empty cut takes any row: one above the budget goes alone.
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
            all_reduce_sum = prompt + sum(responses[position] for position in piece)
            packed.append(_Row(number, all_reduce_sum, [members[position] for position in piece]))
    return packed


# Packed rows with a long shared prompt may be this many times the token budget long (a budget chosen here only).
_STRETCH = 4


@dataclass(frozen=True)
class Prefetched:
    """Cuts of an update, which rows and those: one is computed, its gradient recorded, the others are still to be."""

    computed: tuple[Tensor, Batch, TokenScores]
    others: Sequence[tuple[Tensor, Batch]]


Found = TypeVar("Found", TokenScores, Values)


@dataclass(frozen=True)
class Begun(Generic[Found]):
    """A cut that was scored with its graph, for the update that learns from it before any weight is changed.

    Attributes:
        first: The rows of the first minibatch, as they were scored.
        index: Which of them the cut has.
        found: What the pass found, its gradient recorded.
    """

    first: Batch
    index: Tensor
    found: Found

    def within(self, minibatch: Batch, live: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return which rows Int[N] of ``minibatch`` need no forward pass, and where Int[N] the cut has them.

        None where it is another minibatch, or where more than a third of what was computed is not among ``live``
        Bool[B]: a backward pass through all of it costs more than a new pass through the rest.
        """
        own = self.first
        # Rows are known by their content, since a minibatch does not say which rows of the batch it has.
        pairs = ((minibatch.tokens, own.tokens), (minibatch.lengths, own.lengths), (minibatch.mask, own.mask))
        if not all(torch.equal(here, there) for here, there in pairs):
            return None
        chosen = live[self.index]
        lengths = own.lengths[self.index]
        # A new pass costs three units a kept token (forward 1, backward 2); going on costs two for every computed
        # token. So going on pays where 3 kept >= 2 computed.
        is_worth = 3 * int(lengths[chosen].sum()) >= 2 * int(lengths.sum())
        return (self.index[chosen], chosen.nonzero()[:, 0]) if is_worth else None


class ForwardRunner:
    """Forward passes of one learner, whichever model they go through.

    Args:
        plan: Its token budget, and whether activations are computed again.
        model: The policy; all models are on its device, and its shape decides how many tokens a cut holds and where the
            attention of shared prompts becomes dear.
        mesh: Whose processes part the rows among themselves. Each makes as many passes as every other, since each waits
            for the others in every layer; what is returned for all rows is put together again.
    """

    def __init__(self, plan: LearnerConfig, model: nn.Module, mesh: Mesh | None = None) -> None:
        self.work = ComputeStats()
        policy: Any = model
        self._plan = plan
        self.mesh: Mesh = SingleProcess() if mesh is None else mesh
        self._device = self.mesh.device or next(model.parameters()).device
        self.max_tokens = plan.max_tokens_per_micro_batch or default_budget(policy, self._device)
        # A budget chosen here stretches rather than compute a long prompt again; one that the user set does not.
        self._stretch = _STRETCH if plan.max_tokens_per_micro_batch is None else 1
        self._crossing = crossing_tokens(policy.config.get_text_config().hidden_size)
        self._vocabulary = int(policy.config.get_text_config().vocab_size)

    def halve(self) -> bool:
        """Let cuts hold half as many tokens from now on, and return whether that is possible.

        Not where other processes wait for this one in the middle of a pass.
        """
        if self.max_tokens < 2 or self.mesh.size > 1:
            return False
        self.max_tokens //= 2
        self.work.halvings += 1
        return True

    def cuts(self, batch: Batch, rows: Tensor, scorer: TokenScorer | ValueScorer) -> Iterator[tuple[Tensor, Batch]]:
        """Yield ``rows`` Int[N] of ``batch`` in cuts that ``scorer`` computes within the budget: which rows, and those
        on the device.

        Rows whose routing is replayed count whole: where they disagree about their prompt it cannot be shared. On a
        mesh these are the rows of this process; a cut without a row has to be computed all the same.
        """
        yield from self._placed(self._planned(batch, rows, scorer))

    def prefetch_first(
        self, batch: Batch, rows: Tensor, scorer: TokenScorer, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Prefetched]:
        """Return log-probabilities and entropies Float32[B T] of all rows that have a trained token, without gradient,
        and ``rows`` Int[N] to go on with, for a loss that reads a statistic of all of them.

        The first cut of ``rows``, which is filled first, is computed last and keeps its graph, so it need not be
        computed again, and no more is in memory at a time than in any step. Inside of `recording`.
        """
        first, *others = self._planned(batch, rows, scorer)
        # Rows without a gradient still count in the statistics, so they are computed too, without a graph.
        rest = batch.mask.any(1).index_fill(0, rows, False).nonzero()[:, 0]
        logprobs, entropy = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)

        def note(index: Tensor, cut: Batch, scores: TokenScores) -> None:
            logprobs[index, : cut.width] = scores.logprobs.detach().cpu()
            entropy[index, : cut.width] = scores.entropy.detach().cpu()

        with torch.no_grad():
            for index, cut in self._placed([*self._planned(batch, rest, scorer), *others]):
                note(index, cut, self.score(scorer, cut, with_entropy))
        index, cut = first[0], move(first[1], self._device)
        scores = self.score(scorer, cut)
        note(index, cut, scores)
        return (
            self.mesh.all_reduce_sum(logprobs),
            self.mesh.all_reduce_sum(entropy),
            Prefetched((index, cut, scores), others),
        )

    def begin(
        self, batch: Batch, rows: Tensor, scorer: TokenScorer, model: nn.Module
    ) -> tuple[Tensor, Begun[TokenScores] | None]:
        """Return `logprobs`, and the first cut of ``rows`` Int[N] with its graph, which lie in one pass then."""
        live = rows[batch.mask[rows].any(1)]
        if self.mesh.size > 1 or len(live) == 0:
            return self.logprobs(scorer, batch), None
        with self.recording(model):
            logprobs, _, prefetched = self.prefetch_first(batch, live, scorer)
        index, _, scores = prefetched.computed
        return logprobs, Begun(batch.rows(rows), torch.searchsorted(rows, index), scores)

    def resume(
        self, begun: Begun[TokenScores] | None, minibatch: Batch, live: Tensor, scorer: TokenScorer
    ) -> Prefetched | None:
        """Return the cut of ``begun`` as one of ``minibatch``, and the other ``live`` rows Bool[B] in cuts that are
        still to be computed; None where it is of no use.
        """
        known = None if begun is None else begun.within(minibatch, live)
        if begun is None or known is None:
            return None
        rows, at = known
        cut, found = move(trim(minibatch.rows(rows)), self._device), begun.found
        at, width = at.to(self._device), cut.width
        kl = None if found.anchor_kl is None else found.anchor_kl[at, :width]
        experts = found.experts
        if experts is not None:
            experts = experts[at.to(experts.device), : cut.tokens.shape[1]]
        scores = TokenScores(found.logprobs[at, :width], found.entropy[at, :width], experts=experts, anchor_kl=kl)
        rest = live.index_fill(0, rows, False).nonzero()[:, 0]
        return Prefetched((rows, cut, scores), self._planned(minibatch, rest, scorer))

    def with_grad(
        self, batch: Batch, rows: Tensor, scorer: TokenScorer, prefetched: Prefetched | None = None
    ) -> Iterator[tuple[Tensor, Batch, TokenScores]]:
        """Yield `cuts` with their scores, whose gradient is recorded; inside of `recording`.

        Args:
            prefetched: Rows before these rows.
        """
        if prefetched is not None:
            yield prefetched.computed
        cuts = self.cuts(batch, rows, scorer) if prefetched is None else self._placed(prefetched.others)
        for index, cut in cuts:
            yield index, cut, self.score(scorer, cut)

    def score(self, scorer: TokenScorer, cut: Batch, with_entropy: bool = True) -> TokenScores:
        """Return log-probabilities and entropies of one cut, its routing replayed where it has one.

        With entropies comes the KL to behavior, where the cut has behavior's likeliest tokens.
        """
        is_routed = cut.routing is not None or cut.free_routing is not None
        return self._score(scorer, cut, with_entropy, Routing(cut.routing) if is_routed else None)

    def value(self, scorer: ValueScorer, cut: Batch, is_head_only: bool = False) -> Values:
        """Return the values of one cut."""
        tensors = (cut.tokens, cut.prompt_lengths, cut.lengths, cut.mask)
        values = self.mesh.run(scorer.backbone, lambda: scorer(*tensors, is_head_only))
        self.work.add(cut, values.computed)
        return values

    def logprobs(self, scorer: TokenScorer, batch: Batch) -> Tensor:
        """Return Float32[B T] of all rows that have a trained token, without gradient."""
        return self._measured(scorer, batch, with_entropy=False)[0]

    def top(self, scorer: TokenScorer, batch: Batch, count: int) -> tuple[Tensor, TopLogprobs]:
        """Return `logprobs`, and the ``count`` likeliest tokens, all for 0; zeros where the mask is false."""
        count = min(count or self._vocabulary, self._vocabulary)
        logprobs, values = torch.zeros(batch.mask.shape), torch.zeros(*batch.mask.shape, count)
        tokens = values.int()
        with torch.no_grad():
            for index, cut in self.cuts(batch, batch.mask.any(1).nonzero()[:, 0], scorer):
                # A model may have more logits than tokens, and only tokens are kept.
                scores = self.score(scorer.keeping(count, self._vocabulary), cut, with_entropy=False)
                assert scores.top is not None, "what is asked for is kept"
                logprobs[index, : cut.width] = scores.logprobs.cpu()
                tokens[index, : cut.width], values[index, : cut.width] = (part.cpu() for part in scores.top)
        return self.mesh.all_reduce_sum(logprobs), TopLogprobs(
            self.mesh.all_reduce_sum(tokens), self.mesh.all_reduce_sum(values)
        )

    def token_stats(self, scorer: TokenScorer, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, and the entropies Float32[B T] of the same tokens; nothing is counted."""
        with self.not_counted():
            logprobs, entropy = self._measured(scorer, batch, with_entropy=True)
        return logprobs, self.mesh.all_reduce_sum(entropy)

    def routes(self, scorer: TokenScorer, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return `logprobs` with free routers, and which experts Int16[B S L K] they chose; None if dense.

        -1 where nothing went through the model: in rows without a trained token, and behind the last one of a row.
        """
        result, experts = torch.zeros(batch.mask.shape), None
        with torch.no_grad():
            rows = batch.mask.any(1).nonzero()[:, 0]
            for index, cut in self.cuts(batch.with_fields(routing=None), rows, scorer):
                scores = self._score(scorer, cut, False, Routing())
                result[index, : cut.width] = scores.logprobs.cpu()
                if scores.experts is None:
                    continue
                if experts is None:
                    # One more than the number of an expert, so that nothing is 0 and processes can add theirs up.
                    experts = torch.zeros((*batch.tokens.shape, *scores.experts.shape[2:]), dtype=torch.int32)
                experts[index, : cut.tokens.shape[1]] = scores.experts.cpu().int() + 1
        if experts is not None:
            experts = (self.mesh.all_reduce_sum(experts) - 1).to(torch.int16)
        return self.mesh.all_reduce_sum(result), experts

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Count nothing inside the block: what is computed there is no work of training."""
        work, self.work = self.work, ComputeStats()
        try:
            yield
        finally:
            self.work = work

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record gradients inside the block, with as few activations kept as the plan says."""
        saving: AbstractContextManager[None] = nullcontext()
        if self._plan.gradient_checkpointing:
            saving = recomputing(model)
        with torch.enable_grad(), saving:
            yield

    def _measured(self, scorer: TokenScorer, batch: Batch, with_entropy: bool) -> tuple[Tensor, Tensor]:
        logprobs, entropy = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)
        with torch.no_grad():
            for index, cut in self.cuts(batch, batch.mask.any(1).nonzero()[:, 0], scorer):
                scores = self.score(scorer, cut, with_entropy)
                logprobs[index, : cut.width] = scores.logprobs.cpu()
                if with_entropy:
                    entropy[index, : cut.width] = scores.entropy.cpu()
        return self.mesh.all_reduce_sum(logprobs), entropy

    def _planned(self, batch: Batch, rows: Tensor, scorer: TokenScorer | ValueScorer) -> list[tuple[Tensor, Batch]]:
        if len(rows) == 0:
            return []
        # An index beyond the embedding is an assert on a GPU, after which the process can do nothing; so it is checked
        # here.
        low, high = extremes(batch.tokens)
        if not 0 <= low <= high < self._vocabulary:
            raise LearnerError(
                f"tokens from {low} to {high} are to be learned from, and the model's vocabulary has "
                f"{self._vocabulary}; they are of an engine, a log of rollouts or a checkpoint that is not this model's"
            )
        is_shared = scorer.shares_prompts and batch.routing is None
        sharing = None
        if is_shared:
            is_in_line = scorer.is_row_packed(int(batch.lengths[rows].max()))
            # Row-packed attention skips pairs of different responses, so a longer row costs no more a token: no
            # crossing.
            crossing, longest = math.inf if is_in_line else self._crossing, self._stretch * self.max_tokens
            sharing = Sharing(crossing, longest, is_in_line, is_in_line and scorer.shares_beginnings())
        return micro_batches(batch, rows, self.max_tokens, sharing, (self.mesh.rank, self.mesh.size))

    def _placed(self, cuts: Sequence[tuple[Tensor, Batch]]) -> Iterator[tuple[Tensor, Batch]]:
        with show_progress("computing", sum(len(index) for index, _ in cuts), is_brief=True) as steps:
            for index, cut in cuts:
                yield index, move(cut, self._device)
                steps.advance(len(index))

    def _score(self, scorer: TokenScorer, cut: Batch, with_entropy: bool, routing: Routing | None) -> TokenScores:
        tensors = (cut.tokens, cut.prompt_lengths, cut.mask)
        if with_entropy and cut.top_tokens is not None and cut.top_logprobs is not None:
            scorer = scorer.against(TopLogprobs(cut.top_tokens, cut.top_logprobs))
        scores = self.mesh.run(scorer.model, lambda: scorer(*tensors, cut.temperature, with_entropy, routing))
        self.work.add(cut, scores.computed)
        return scores


def scorer_on(mesh: Mesh, model: nn.Module) -> TokenScorer:
    """Return what scores with a model that is whole still, and will compute where ``mesh`` does.

    Raises:
        ConfigError: The model is computed row by row, while every process must make equally many passes.
    """
    config: Any = model.config
    chunk = None if mesh.device is None else chunk_for(mesh.device, config.get_text_config().vocab_size)
    scorer = TokenScorer(model, chunk)
    if mesh.size > 1 and not scorer.is_split:
        raise ConfigError(
            f"{type(model).__name__} does more with its head's output than scaling or bounding it, so it is computed "
            "row by row, and processes that hold it together would have to have equally many; set learner.processes = 1"
        )
    return scorer


def measure_routing(scores: TokenScores, cut: Batch) -> Metrics:
    """Return how much of a cut's routing, replayed or not, the current router would choose otherwise."""
    with_grad = cut.free_routing if cut.routing is None else cut.routing
    if with_grad is None or scores.experts is None:
        return Metrics()
    changed = changed_fraction(scores.experts, with_grad, cut.prompt_lengths, cut.mask)
    return Metrics.of({"routing/changed_fraction": changed})


def default_budget(model: Any, device: torch.device | None = None) -> int:
    """Return the tokens of a micro-batch for a causal language model on ``device``, or where it is: see `token_budget`.

    A GPU needs more tokens to be busy, and has a memory of its own: an eighth of it is for activations.
    """
    config, parameter = model.config.get_text_config(), next(model.parameters())
    # 0 on a CPU, whose memory other programs share: `token_budget` then goes by the size of the training state.
    available = memory_of(device or parameter.device) // DEVICE_SHARE
    size = sum(p.numel() for p in model.parameters())
    # The fused forward pass knows exactly what it keeps; a model's own code can only be estimated.
    kept = kept_for_backward(model) or kept_numbers(config.num_hidden_layers, config.hidden_size)
    return token_budget(kept, parameter.dtype.itemsize, size, available)
