"""Attention over packed rows, where responses branch off a prompt: each looks at its prompt and at itself.

A dense mask over the packed row multiplies every response with every other and throws the product away; SDPA's backward
pass on a processor, at these sizes, runs at a tenth of a matrix product's speed. Here each response's queries meet the
keys of its prompt and its own, laid out side by side:

    keys of a response:  p p p p | r r r        queries: r r r

Where there is a `native` function, it takes a prompt and its responses one after another. Elsewhere responses of about
one length go together, padded to it, and the backward pass is a few matrix products. Scores are float32 in both
directions, as in SDPA.
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

from gnomon.models.cpu.kernels import Kernels, kernels_of

_LEAST = 32
_MOST_SCORES = 1 << 23
"""Scores that exist at one time in a backward pass (32 MiB of float32); one response alone may have twice as many."""


_Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, and the gradient of what they attend to."""


@dataclass(frozen=True)
class Span:
    """A prompt with its responses: where it begins among all positions, its length, and where each response begins
    among them and how long it is.
    """

    first: int
    prompt: int
    responses: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class PrefixBlock:
    """Prompts, or responses of about one length.

    queries Int[G n], keys Int[G prefix + n]: positions in the flattened packed rows; the last n keys are the queries'
    own, those before them the prompt's. is_query Bool[G n]: false for padding. bias Float32[G 1 n K]: 0 where a query
    may look, -inf elsewhere. rows Int[G]: the span of each.
    """

    queries: Tensor
    keys: Tensor
    is_query: Tensor
    bias: Tensor
    rows: Tensor
    prefix: int


@dataclass(frozen=True)
class PrefixLayout:
    """How ``positions`` of packed rows attend; those in no span are padding."""

    spans: Sequence[Span]
    positions: int
    _known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """Spans Int64[N 4]: first position, prompt, first response, how many; responses Int64[M 2]: start, length."""
        counts = [len(span.responses) for span in self.spans]
        firsts = [0, *accumulate(counts)]
        rows = [(s.first, s.prompt, at, n) for s, at, n in zip(self.spans, firsts, counts, strict=False)]
        responses = [response for span in self.spans for response in span.responses]
        return torch.tensor(rows).view(-1, 4), torch.tensor(responses, dtype=torch.long).view(-1, 2)

    @cached_property
    def blocks(self) -> tuple[PrefixBlock, ...]:
        """The prompts, a row each, then responses of about one length."""
        spans = self.spans
        prompts = [(row, span.first, span.prompt) for row, span in enumerate(spans)]
        grouped: dict[int, list[tuple[int, int, int]]] = {}
        for row, span in enumerate(spans):
            for start, length in span.responses:
                if length > 0:
                    grouped.setdefault(rounded(length), []).append((row, start, length))
        prefix = rounded(max(span.prompt for span in spans))
        blocks = [_block(prompts, [replace(span, prompt=0) for span in spans], prefix, 0)]
        blocks += [_block(members, spans, size, prefix) for size, members in sorted(grouped.items())]
        return tuple(blocks)

    def bias(self, number: int, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of a block for ``repeats`` query heads that share a key, [G 1 repeats * n K]."""
        return self._once((number, repeats, dtype), lambda: self.blocks[number].bias.to(dtype).repeat(1, 1, repeats, 1))

    def taking(self, number: int, columns: "Columns", heads: "Heads") -> Tensor:
        """Return, for rows [P * total, d], which to take so that a block's [G n d] of these heads come out."""
        block = self.blocks[number]
        where = block.keys if columns.is_key else block.queries
        own = torch.arange(columns.first, columns.first + columns.count)[:, None]
        return self._once((number, columns, heads), lambda: (where[:, None] * heads.total + own).flatten())

    def homes(self, parts: "Sequence[Columns]", total: int) -> Tensor:
        """Return the inverse: where in all blocks' rows [G * n, d], ``parts`` of one block after another, each
        position's own row of each of ``total`` heads is, Int[P * total]; behind the last one for padding.
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
                homes[block.queries[block.is_query], part.first : part.first + part.count] = found
                first += places.numel()
        return torch.where(homes < 0, first, homes).flatten()

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        found: Tensor = self._known[key]
        return found


def rounded(length: int) -> int:
    """Return the padded length: few different ones, so that responses go together in few blocks.

    Each new shape of a low-precision product costs milliseconds, and memory that is never given back.

    >>> [rounded(n) for n in (1, 32, 33, 50, 65, 100, 300, 1000)]
    [32, 32, 64, 64, 96, 128, 384, 1024]
    """
    size = _LEAST
    while size < length:
        # 32, 64, 96, 128, 192, 256, 384, ...
        size = 2 * size if size == _LEAST else size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def branched_attention(made: Tensor, heads: int, branches: PrefixLayout, scale: float) -> Tensor:
    """Return what each position of packed rows attends to, Float[P H d].

    made Float[P (H + 2 K) d]: the queries of H heads, then keys and values of K heads that H / K query heads share, of
    all P positions of the packed rows. scale: of the scores. Padding gets zeros. Same sums as SDPA with a dense mask,
    in another order: equal up to rounding.
    """
    kernels = kernels_of(made)
    if kernels is not None:
        result: Tensor = _Native.apply(made, heads, branches, scale, kernels)  # type: ignore[no-untyped-call]
    else:
        result = _Branched.apply(made, heads, branches, scale)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class Columns:
    """``count`` heads from ``first`` on, of queries or (``is_key``) of keys or values."""

    first: int
    count: int
    is_key: bool


@dataclass(frozen=True)
class Heads:
    """Which heads of a position are what: ``queries`` of them, then as many keys as values."""

    total: int
    queries: int

    @property
    def shared(self) -> int:
        """Heads of keys, and of values."""
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
    def forward(ctx: Any, made: Tensor, queries: int, branches: PrefixLayout, scale: float) -> Tensor:
        heads = Heads(made.shape[1], queries)
        found = []
        for number in range(len(branches.blocks)):
            bias = branches.bias(number, queries // heads.shared, made.dtype)
            given = _block_of(made, number, branches, heads)
            found.append(functional.scaled_dot_product_attention(*given, attn_mask=bias, scale=scale).flatten(0, 2))
        ctx.save_for_backward(made)
        ctx.heads, ctx.branches, ctx.scale = heads, branches, scale
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
            # A query of padding sees its own place alone, so whatever comes back to it reaches nobody.
            out = to_out.index_select(0, branches.taking(number, heads.parts[0], alone)).view(*given[0].shape[:3], -1)
            bias = branches.bias(number, heads.queries // heads.shared, torch.float32)
            d_query, *d_keys = _gradients((*given, out), bias, ctx.scale)
            if number == 0:
                of_prompts = [d_key.float() for d_key in d_keys]
            else:
                for of_prompt, d_key in zip(of_prompts, d_keys, strict=True):
                    of_prompt.index_add_(0, block.rows, d_key[:, :, : block.prefix].float())
            found += [each.flatten(0, 2) for each in (d_query, *d_keys)]
        found[1:3] = [of_prompt.to(made.dtype).flatten(0, 2) for of_prompt in of_prompts]
        return _brought_home(found, branches.homes(heads.parts, heads.total)).view_as(made), None, None, None


def _block_of(made: Tensor, number: int, branches: PrefixLayout, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's queries Float[G K r * n d], query heads of a key one after another, keys and values."""
    rows, items = made.view(-1, made.shape[-1]), len(branches.blocks[number].queries)
    query, key, value = (
        rows.index_select(0, branches.taking(number, part, heads)).view(items, heads.shared, -1, rows.shape[-1])
        for part in heads.parts
    )
    return query, key, value


def _brought_home(parts: Sequence[Tensor], homes: Tensor) -> Tensor:
    """Return rows of ``parts`` where ``homes`` says; zeros behind the last one."""
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
    """The same for long responses, by SDPA, which never has all scores at once."""
    query, key, value = (each.detach().requires_grad_() for each in given[:3])
    with torch.enable_grad():
        mask = bias.to(query.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return torch.autograd.grad(out, (query, key, value), given[3])


def _block(members: Sequence[tuple[int, int, int]], spans: Sequence[Span], size: int, prefix: int) -> PrefixBlock:
    """Return the block of ``members`` (span, start, length), padded to ``size``, behind the prompts of their spans."""
    rows, starts, lengths = (torch.tensor(column) for column in zip(*members, strict=True))
    firsts, prompts = (torch.tensor(of)[rows, None] for of in zip(*((s.first, s.prompt) for s in spans), strict=True))
    steps, before = torch.arange(size), torch.arange(prefix)
    is_query = steps < lengths[:, None]
    queries = torch.where(is_query, starts[:, None] + steps, 0)
    is_prompt = before < prompts
    of_prompt = torch.where(is_prompt, firsts + before, 0)
    own = is_query[:, :, None] & is_query[:, None, :] & (steps <= steps[:, None])
    # A query of padding looks at its own place only: no row of scores is empty, and it reaches nobody.
    own |= ~is_query[:, :, None] & torch.eye(size, dtype=torch.bool)
    sees = torch.cat([is_prompt[:, None, :] & is_query[:, :, None], own], -1)
    bias = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)[:, None]
    return PrefixBlock(queries, torch.cat([of_prompt, queries], 1), is_query, bias, rows, prefix)
