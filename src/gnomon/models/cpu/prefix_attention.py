"""Shared-prefix attention over packed rows: each response attends to its prompt and to itself.

A dense mask over the packed row multiplies every response with every other and discards the product, and SDPA's
backward pass on a CPU at these sizes runs at a tenth of a matrix product's speed. Here each response's queries meet the
keys of its prompt and its own keys, side by side:

    keys of a response:  p p p p | r r r        queries: r r r

The C kernel takes a prompt and its responses one after another, and a beginning that all prompts have as a part of each
(`PrefixLayout.stem`). Without the kernel, on any device, responses of similar length form a padded block, and the
backward pass is a few matrix products. Scores are float32 in both directions, as in SDPA. With a window of w a query
sees only keys whose position is less than w before its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gnomon.models.cpu.kernels import BranchTable, Kernels, kernels_of

_CPU = torch.device("cpu")
_LEAST = 32
_MOST_SCORES = 1 << 23
"""Scores that exist at one time in a backward pass (32 MiB of float32); one response alone may have twice as many."""


_Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, and the gradient of what they attend to."""


@dataclass(frozen=True)
class Span:
    """A prompt with its responses: first position and length of the prompt, and of each response."""

    first: int
    prompt: int
    responses: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class PrefixBlock:
    """Prompts, or responses of similar length.

    Attributes:
        queries: Int[G n], positions in the flattened packed rows.
        keys: Int[G prefix + n]; the last n keys are the queries' own, those before them the prompt's.
        is_query: Bool[G n], false for padding.
        bias: Float32[G 1 n K], 0 where a query may look, -inf elsewhere.
        rows: Int[G], the span of each.
        prefix: Keys of the prompt.
    """

    queries: Tensor
    keys: Tensor
    is_query: Tensor
    bias: Tensor
    rows: Tensor
    prefix: int


@dataclass(frozen=True)
class PrefixLayout:
    """The branches of packed rows.

    Attributes:
        spans: Each prompt with its responses.
        positions: Of the packed rows; those outside of all spans and the stem are padding.
        stem: Every prompt begins with positions [0, stem), which are in no span; for the kernel alone.
        device: Where the indices and masks are that it returns.
        kernel: What computes attention over it; see `packed_attention`.
        windows: The attention window of each call so far, None without one.
    """

    spans: Sequence[Span]
    positions: int
    stem: int = 0
    device: torch.device = _CPU
    kernel: str = "branches"
    windows: list[int | None] = field(default_factory=list, compare=False)
    _known: dict[Any, Any] = field(default_factory=dict, compare=False)

    def on(self, device: torch.device, kernel: str = "branches") -> "PrefixLayout":
        """Return the same layout for tensors on ``device`` and for this kernel."""
        is_same = (device, kernel) == (self.device, self.kernel)
        # What was computed for another device or kernel lies elsewhere.
        return self if is_same else replace(self, device=device, kernel=kernel, _known={})

    @property
    def is_shared(self) -> bool:
        """Whether a prompt has several responses; otherwise every span is one causal row."""
        return any(len(span.responses) > 1 for span in self.spans)

    def sight(self, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what each position sees: itself and back to ``own``, and its prompt from ``low`` to before ``end``.

        Args:
            window: Keys whose position in their sequence is at least this far before the query's are not seen.

        Returns:
            Three times Int64[positions] on the CPU: own, low, end. Prompts and padding have low = end.
        """
        own = torch.arange(self.positions)
        low, end = own.clone(), own.clone()
        for span in self.spans:
            own[span.first : span.first + span.prompt] = span.first
            for start, length in span.responses:
                own[start : start + length] = start
                low[start : start + length] = span.first
                end[start : start + length] = span.first + span.prompt
        if window is not None:
            places = torch.arange(self.positions)
            # A response's position in its sequence is its prompt's length plus its offset, so a window reaches so far
            # back into the prompt.
            low = torch.maximum(low, torch.minimum(end, end + places - own - window + 1))
            own = torch.maximum(own, places - window + 1)
        return own, low, end

    @cached_property
    def table(self) -> BranchTable:
        """Spans Int64[N 4]: position, prompt length, first response, responses; responses Int64[M 2]: start, length;
        the stem.
        """
        counts = [len(span.responses) for span in self.spans]
        firsts = [0, *accumulate(counts)]
        rows = [(s.first, s.prompt, at, n) for s, at, n in zip(self.spans, firsts, counts, strict=False)]
        responses = [response for span in self.spans for response in span.responses]
        return torch.tensor(rows).view(-1, 4), torch.tensor(responses, dtype=torch.long).view(-1, 2), self.stem

    @cached_property
    def blocks(self) -> tuple[PrefixBlock, ...]:
        """The prompts, one per row, then responses of similar length."""
        assert not self.stem, "only the kernel knows a stem, and rows are packed with one where it is"
        spans = self.spans
        prompts = [(row, span.first, span.prompt) for row, span in enumerate(spans)]
        grouped: dict[int, list[tuple[int, int, int]]] = {}
        for row, span in enumerate(spans):
            for start, length in span.responses:
                if length > 0:
                    # Responses of one rounded length form one block: few shapes, little padding.
                    grouped.setdefault(rounded(length), []).append((row, start, length))
        prefix = rounded(max(span.prompt for span in spans))
        blocks = [_block(prompts, [replace(span, prompt=0) for span in spans], prefix, 0)]
        blocks += [_block(members, spans, size, prefix) for size, members in sorted(grouped.items())]
        return tuple(blocks)

    def bias(self, number: int, repeats: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return the bias of a block for ``repeats`` query heads that share a key, [G 1 repeats * n K]."""
        key = (number, repeats, dtype, window)
        return self._once(key, lambda: self._windowed(number, window).to(dtype).repeat(1, 1, repeats, 1))

    def _windowed(self, number: int, window: int | None) -> Tensor:
        block = self.blocks[number]
        if window is None:
            return block.bias
        before = torch.tensor([self.spans[row].prompt for row in block.rows.tolist()]) * bool(block.prefix)
        own = before[:, None] + torch.arange(block.queries.shape[1])
        keys = torch.cat([torch.arange(block.prefix).expand(len(own), -1), own], 1)
        return block.bias.masked_fill((own[:, :, None] - keys[:, None] >= window)[:, None], -torch.inf)

    def rows(self, number: int) -> Tensor:
        """Return the span of each item of a block, Int[G]."""
        return self._once(("rows", number), lambda: self.blocks[number].rows)

    def taking(self, number: int, columns: "Columns", heads: "Heads") -> Tensor:
        """Return the indices into rows [P * total, d] that give a block's [G n d] of these heads."""
        block = self.blocks[number]
        where = block.keys if columns.is_key else block.queries
        own = torch.arange(columns.first, columns.first + columns.count)[:, None]
        return self._once((number, columns, heads), lambda: (where[:, None] * heads.total + own).flatten())

    def homes(self, parts: "Sequence[Columns]", total: int) -> Tensor:
        """Return the inverse: for each head of each position, Int[P * total], its row in all blocks' ``parts``.

        Padding points behind the last row.
        """
        return self._once((*parts, total), lambda: self._find(parts, total))

    def _find(self, parts: "Sequence[Columns]", total: int) -> Tensor:
        homes = torch.zeros(self.positions, total, dtype=torch.long) - 1
        first = 0
        for block in self.blocks:
            items, own = block.queries.shape
            for part in parts:
                each = block.keys.shape[1] if part.is_key else own
                places = torch.arange(first, first + items * part.count * each).view(items, part.count, each)
                found = places[:, :, each - own :].transpose(1, 2)[block.is_query]
                # Each real position is a query of exactly one block, and its key is among that block's own keys: a
                # prompt's keys that responses repeat have no home of their own.
                homes[block.queries[block.is_query], part.first : part.first + part.count] = found
                first += places.numel()
        return torch.where(homes < 0, first, homes).flatten()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned the first time for this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        found: Tensor = self.once(key, lambda: make().to(self.device))
        return found


def rounded(length: int) -> int:
    """Return the padded length. Few different lengths let responses share blocks.

    Each new shape of a low-precision product costs milliseconds, and memory that is never freed.

    >>> [rounded(n) for n in (1, 32, 33, 50, 65, 100, 300, 1000)]
    [32, 32, 64, 64, 96, 128, 384, 1024]
    """
    size = _LEAST
    while size < length:
        # 32, 64, 96, 128, 192, 256, 384, ...
        size = 2 * size if size == _LEAST else size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def branched_attention(
    made: Tensor, heads: int, branches: PrefixLayout, scale: float, window: int | None = None
) -> Tensor:
    """Return the attention's output for each position of packed rows, Float[P H d]; padding gets zeros.

    Sums are those of SDPA with a dense mask in another order: equal up to rounding.

    Args:
        made: Float[P (H + 2 K) d], queries of H heads, then keys and values of K heads that H / K query heads share.
        heads: The layout of the heads.
        branches: The layout of prompts and responses.
        scale: Of the scores.
        window: Positions that a query sees, itself included; None for all.
    """
    kernels = kernels_of(made) if window is None else None
    if kernels is not None:
        result: Tensor = _Native.apply(made, heads, branches, scale, kernels)  # type: ignore[no-untyped-call]
    else:
        result = _Branched.apply(made, heads, branches, scale, window)  # type: ignore[no-untyped-call]
    return result


def altered_attention(
    made: Tensor, queries: int, branches: PrefixLayout, scale: float, altered: "Alteration"
) -> Tensor:
    """Return what `branched_attention` does, with bounded scores and sinks; all scores are kept for the backward pass.

    Args:
        made: As `branched_attention` has it, like the three that follow.
        queries: Heads of queries.
        branches: The layout of prompts and responses.
        scale: Of the scores.
        altered: What becomes of scores.
    """
    heads, found = Heads(made.shape[1], queries), []
    for number in range(len(branches.blocks)):
        query, key, value = _block_of(made, number, branches, heads)
        scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
        if altered.softcap is not None:
            scores = altered.softcap * torch.tanh(scores / altered.softcap)
        scores = scores + branches.bias(number, queries // heads.shared, torch.float32, altered.window)
        if altered.sinks is not None:
            own = altered.sinks.float().repeat_interleave(scores.shape[2] * heads.shared // queries)
            scores = torch.cat([scores, own.view(1, heads.shared, -1, 1).expand(len(scores), -1, -1, -1)], -1)
        # The sink takes its share of the sum and adds no value.
        policy = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
        found.append((policy @ value).flatten(0, 2))
    return _brought_home(found, branches.homes(heads.parts[:1], queries)).view(len(made), queries, -1)


@dataclass(frozen=True)
class Alteration:
    """What a layer does to its scores.

    Attributes:
        window: Positions that a query sees, itself included; None for all.
        softcap: Scores s become softcap * tanh(s / softcap).
        sinks: One more score for each head of queries, Float[H], of a key whose value is 0.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are as they come, within the window."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Columns:
    """``count`` heads from ``first`` on, of queries or (``is_key``) of keys or values."""

    first: int
    count: int
    is_key: bool


@dataclass(frozen=True)
class Heads:
    """The heads of a position: ``queries`` of them, then as many keys as values."""

    total: int
    queries: int

    @property
    def shared(self) -> int:
        """Number of key heads, and of value heads."""
        return (self.total - self.queries) // 2

    @property
    def parts(self) -> tuple[Columns, Columns, Columns]:
        """Queries, keys, values."""
        count = self.shared
        keys = Columns(self.queries, count, True)
        return Columns(0, self.queries, False), keys, Columns(self.queries + count, count, True)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, heads: int, branches: PrefixLayout, scale: float, kernels: Kernels) -> Tensor:
        made = made.contiguous()
        result, sums = kernels.branched(made, heads, branches.table, scale)
        ctx.save_for_backward(made, sums)
        ctx.kernels, ctx.table, ctx.scale = kernels, branches.table, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made, sums = ctx.saved_tensors
        found = ctx.kernels.branched_back(made, gradient.contiguous(), sums, ctx.table, ctx.scale)
        return found, None, None, None, None


class _Branched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, made: Tensor, queries: int, branches: PrefixLayout, scale: float, window: int | None
    ) -> Tensor:
        heads = Heads(made.shape[1], queries)
        found = []
        for number in range(len(branches.blocks)):
            bias = branches.bias(number, queries // heads.shared, made.dtype, window)
            given = _block_of(made, number, branches, heads)
            found.append(functional.scaled_dot_product_attention(*given, attn_mask=bias, scale=scale).flatten(0, 2))
        ctx.save_for_backward(made)
        ctx.heads, ctx.branches, ctx.scale, ctx.window = heads, branches, scale, window
        return _brought_home(found, branches.homes(heads.parts[:1], queries)).view(len(made), queries, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (made,) = ctx.saved_tensors
        heads: Heads = ctx.heads
        branches: PrefixLayout = ctx.branches
        alone = Heads(heads.queries, heads.queries)
        to_out = gradient.reshape(-1, gradient.shape[-1])
        found: list[Tensor] = []
        of_prompts: list[Tensor] = []
        for number, block in enumerate(branches.blocks):
            given = _block_of(made, number, branches, heads)
            # A query of padding sees its own place alone, so its gradient reaches no other position.
            out = to_out.index_select(0, branches.taking(number, heads.parts[0], alone)).view(*given[0].shape[:3], -1)
            bias = branches.bias(number, heads.queries // heads.shared, torch.float32, ctx.window)
            d_query, *d_keys = _gradients((*given, out), bias, ctx.scale)
            if number == 0:
                # Prompts are block 0. Gradients of their keys come from every response as well, and are added up in
                # float32.
                of_prompts = [d_key.float() for d_key in d_keys]
            else:
                for of_prompt, d_key in zip(of_prompts, d_keys, strict=True):
                    of_prompt.index_add_(0, branches.rows(number), d_key[:, :, : block.prefix].float())
            found += [each.flatten(0, 2) for each in (d_query, *d_keys)]
        # Only now are the keys of prompts complete.
        found[1:3] = [of_prompt.to(made.dtype).flatten(0, 2) for of_prompt in of_prompts]
        return _brought_home(found, branches.homes(heads.parts, heads.total)).view_as(made), None, None, None, None


def _block_of(made: Tensor, number: int, branches: PrefixLayout, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's queries Float[G K r * n d], query heads of a key one after another, keys and values."""
    rows, items = made.view(-1, made.shape[-1]), len(branches.blocks[number].queries)
    query, key, value = (
        rows.index_select(0, branches.taking(number, part, heads)).view(items, heads.shared, -1, rows.shape[-1])
        for part in heads.parts
    )
    return query, key, value


def _brought_home(parts: Sequence[Tensor], homes: Tensor) -> Tensor:
    """Return the rows of ``parts`` at ``homes``; zeros behind the last row."""
    return torch.cat([*parts, parts[0].new_zeros(1, parts[0].shape[1])]).index_select(0, homes)


def _gradients(given: _Given, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values Float[G K . d]; ``given`` ends with that of the result."""
    query, key = given[0], given[1]
    each = query.shape[1] * query.shape[2] * key.shape[2]
    if each > 2 * _MOST_SCORES:
        return _recomputed(given, bias, scale)
    items = max(1, _MOST_SCORES // each)
    parts = [
        _by_products((query[cut], key[cut], given[2][cut], given[3][cut]), bias[cut], scale)
        for cut in (slice(first, first + items) for first in range(0, query.shape[0], items))
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(same) for same in zip(*parts, strict=True))


def _by_products(given: _Given, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
    query, key, value, to_out = given
    policy = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(scale).add_(bias).softmax(-1)
    rounded_policy = policy.to(query.dtype)
    d_value = rounded_policy.transpose(-1, -2) @ to_out
    d_policy = (to_out @ value.transpose(-1, -2)).float()
    d_scores = torch._softmax_backward_data(d_policy, policy, -1, policy.dtype).mul_(scale).to(query.dtype)
    return d_scores @ key, d_scores.transpose(-1, -2) @ query, d_value


def _recomputed(given: _Given, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The same for long responses by SDPA, which never holds all scores at once."""
    query, key, value = (each.detach().requires_grad_() for each in given[:3])
    with torch.enable_grad():
        mask = bias.to(query.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return torch.autograd.grad(out, (query, key, value), given[3])


def _block(members: Sequence[tuple[int, int, int]], spans: Sequence[Span], size: int, prefix: int) -> PrefixBlock:
    """Return the block of ``members`` (span, start, length), padded to ``size``, with the prompts of their spans."""
    rows, starts, lengths = (torch.tensor(column) for column in zip(*members, strict=True))
    firsts, prompts = (torch.tensor(of)[rows, None] for of in zip(*((s.first, s.prompt) for s in spans), strict=True))
    steps, before = torch.arange(size), torch.arange(prefix)
    is_query = steps < lengths[:, None]
    queries = torch.where(is_query, starts[:, None] + steps, 0)
    is_prompt = before < prompts
    of_prompt = torch.where(is_prompt, firsts + before, 0)
    own = is_query[:, :, None] & is_query[:, None, :] & (steps <= steps[:, None])
    # A padding query sees only its own position, so no row of scores is empty, and no output depends on it.
    own |= ~is_query[:, :, None] & torch.eye(size, dtype=torch.bool)
    sees = torch.cat([is_prompt[:, None, :] & is_query[:, :, None], own], -1)
    bias = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)[:, None]
    return PrefixBlock(queries, torch.cat([of_prompt, queries], 1), is_query, bias, rows, prefix)
