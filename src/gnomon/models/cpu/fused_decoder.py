"""Decoding on a CPU without the model's own code, in as few operations as its weights allow.

A third of a small model's step on a CPU is spent between operations and in many small ones. The common architecture
(Llama, Mistral, Qwen2, Qwen3: norm, attention with rotary positions, norm, gated feed-forward) is written out here.
Linear layers with one input become one product, the residual is added inside a product, values that all layers share
are computed once per step, and the operations between products are one C function each if the `kernels` exist.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from gnomon.models.cpu.kernels import Kernels, kernels_of
from gnomon.models.cpu.packed_linear import Product
from gnomon.models.decoder import AlignedDecoder
from gnomon.models.kv_cache import AlignedCache, AlignedLayer, Prefix
from gnomon.models.llama_like import has_inner_norms, is_silu

# A KV cache of rows that share prompts, in blocks: the prompt once, then one column per row and step.
#
# A block holds up to ``width`` rows of one prompt that joined together:
#
#     p p p p a b c d a b c d a b c d    (a, b, c, d: the columns of four lanes)
#
# To a cache of aligned rows a block is one row that grows by ``width`` columns per step. Native attention, which knows
# where a row's columns are, reads only these. Masked attention reads a prompt once per block and multiplies ``width``
# times as many query rows at once; each lane's mask excludes the columns of the others. Columns of rows that have left
# are then still read. When they cost a quarter of the attention, the remaining rows move into fewer or narrower blocks.

# Lanes of a block at most; the share of lanes in use from which a width pays; and the share of the cost that moving
# rows into other blocks must reach.
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
            and the row's lane.
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
        # Behind the prompt, column k of a block belongs to lane k modulo the width.
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
        # A group of 10 rows at width 4 becomes blocks of 4, 4 and 2.
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
        # A step writes one column for each lane.
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
        # One block of each family: prompt and grown columns are equal in all of them.
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
        # Columns of a block: its prompt, and one column for each lane and step so far.
        lengths = [block.prompt + block.grown * width for block in firsts]
        self._cache.reserve(0, 0, max(lengths))
        end = self._cache.frame.end
        rows = torch.empty(len(pieces), max(lengths), dtype=torch.long)
        columns = torch.zeros_like(rows)
        self._blocks = []
        for piece, first in zip(pieces, firsts, strict=True):
            made = CacheBlock(len(self._blocks), first.family, first.prompt, len(piece), first.grown)
            self._blocks.append(made)
            # Where the grown columns begin, in the buffer as it is and in the columns to come.
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


_ROWS_STEP = 4


class FusedDecoder(AlignedDecoder):
    """`AlignedDecoder` for a model that `is_standard`; prompts go through the model itself.

    Roundings are the model's own with three exceptions: both residuals and their addends round once and not twice,
    and so do the two halves of a rotation. Rows are computed in multiples of 4, because each new shape costs the
    CPU's kernels milliseconds once and 0.1 MiB of memory that is never freed.

    Copies of the weights are made at the first step after `invalidate` and take as much memory as the weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model
        self._kernels = kernels_of(next(model.parameters()))
        self._grouped = self._cache = GroupedKVCache(
            len(DynamicCache(config=model.config).layers), thins=not self._kernels
        )
        self._network: _Network | None = None

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token per row and return the next logits."""
        if self._network is None:
            self._network = _Network(self._model, self._kernels)
        count, rows = len(tokens), round_rows(len(tokens))
        layout = self._grouped.before_step(room, rows)
        ids = torch.tensor([*tokens, *[0] * (rows - count)])
        logits = self._network(ids, layout, self._grouped.layers)[:count]
        self._forward.calls += 1
        self._forward.tokens += count
        self._grouped.after_step()
        # Only dense models come here, which choose no experts.
        self._trace.extend(None)
        return logits

    def invalidate(self) -> None:
        """Drop the kept prompts, and the copies of the weights."""
        super().invalidate()
        self._network = None

    def release(self) -> None:
        """Free the copies of the weights, and the cache."""
        super().release()
        self._network = None


class _Network:
    """A standard model's current weights, and one position of R rows through them."""

    def __init__(self, model: Any, kernels: Kernels | None) -> None:
        body = model.model
        self._kernels = kernels
        self._embedding = body.embed_tokens.weight.detach()
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer, kernels) for layer in body.layers]
        self._norm = _Norm([body.norm], kernels)
        self._head = Product([model.lm_head])

    def __call__(self, ids: Tensor, layout: PrefixGroups, cache: Sequence[AlignedLayer]) -> Tensor:
        """Return the logits Float[R V] after ``ids`` Int[R]."""
        # (rows, d); one position a row.
        states = functional.embedding(ids, self._embedding)
        turn = self._rotary(states, layout.positions)
        look: _Look = (
            _Masked(layout, turn, self._layers[0].group)
            if self._kernels is None
            else _Native(self._kernels, layout, turn)
        )
        for layer, kept in zip(self._layers, cache, strict=True):
            states = layer(states, look, kept)
        return self._head(self._norm(states))


class _Layer:
    """One layer."""

    def __init__(self, layer: Any, kernels: Kernels | None) -> None:
        attention, feed = layer.self_attn, layer.mlp
        self._size = size = int(attention.head_dim)
        self._heads, self._shared = (p.out_features // size for p in (attention.q_proj, attention.k_proj))
        self.group = self._heads // self._shared
        self._scale = float(attention.scaling)
        self._before = _Norm([layer.input_layernorm], kernels)
        self._between = _Norm([layer.post_attention_layernorm], kernels)
        norms = (
            [attention.q_norm] * self._heads + [attention.k_norm] * self._shared if has_inner_norms(attention) else []
        )
        self._inside = _Norm(norms, kernels) if norms else None
        # The four products of a layer; each joins the weights that multiply one input.
        self._attend = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._join = Product([attention.o_proj])
        self._open = Product([feed.gate_proj, feed.up_proj])
        self._activation: Callable[[Tensor], Tensor] = feed.act_fn
        self._gate = kernels.gate if kernels is not None and is_silu(feed.act_fn) else self._gated
        self._close = Product([feed.down_proj])

    def __call__(self, states: Tensor, look: "_Look", kept: AlignedLayer) -> Tensor:
        """Return the layer's output for ``states`` Float[R W]."""
        # (rows, H + 2 K, D)
        made = self._attend(self._before(states)).view(states.shape[0], -1, self._size)
        if self._inside is not None:
            self._inside.heads_(made)
        mixed = look(made, self._shared, self._scale, kept)
        states = self._join.plus(mixed, states)
        return self._close.plus(self._gate(self._open(self._between(states))), states)

    def _gated(self, opened: Tensor) -> Tensor:
        gate, up = opened.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


class _Look(Protocol):
    """How a step's queries read the cache."""

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write keys and values of ``made`` Float[R H + 2K D], K heads each, and return the output Float[R H * D]."""


class _Native:
    """Each row reads only its own columns."""

    def __init__(self, kernels: Kernels, layout: PrefixGroups, turn: tuple[Tensor, Tensor]) -> None:
        self._kernels, self._layout = kernels, layout
        self._angles = (turn[0].flatten(0, -2).contiguous(), turn[1].flatten(0, -2).contiguous())

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write and look; see `_Look`."""
        like = made[:1, :shared].transpose(0, 1)[None]
        buffers = kept.buffers(like, like)
        return self._kernels.attend(made, self._angles, self._layout.rows, buffers, self._layout.width, scale)


class _Masked:
    """Blocks read all columns, and a mask excludes the columns of other rows."""

    def __init__(self, layout: PrefixGroups, turn: tuple[Tensor, Tensor], group: int) -> None:
        cos, sin = turn
        self._layout, self._cos = layout, cos
        # The first half is negated here once a step, and not in every layer.
        self._sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
        mask = torch.zeros(layout.hidden.shape, dtype=cos.dtype).masked_fill_(layout.hidden, -torch.inf)
        self._mask = mask.repeat_interleave(group, dim=1)[:, None]

    def __call__(self, made: Tensor, shared: int, scale: float, kept: AlignedLayer) -> Tensor:
        """Write and look; see `_Look`."""
        layout, heads = self._layout, made.shape[1] - 2 * shared
        turned, values = rotated(made[:, : heads + shared], self._cos, self._sin), made[:, heads + shared :]
        if layout.order is not None:
            turned, values = turned.index_select(0, layout.order), values.index_select(0, layout.order)
        queries, keys = turned.view(layout.blocks, -1, heads + shared, made.shape[2]).split([heads, shared], dim=2)
        keys, values = keys.transpose(1, 2), values.unflatten(0, (layout.blocks, -1)).transpose(1, 2)
        key_buffer, value_buffer = kept.buffers(keys, values)
        key_buffer[: layout.blocks, :, layout.written] = keys
        value_buffer[: layout.blocks, :, layout.written] = values
        mixed = functional.scaled_dot_product_attention(
            # (blocks, K, width * group, D): all lanes and query heads of one key read it together.
            queries.unflatten(2, (shared, -1)).transpose(1, 2).flatten(2, 3),
            key_buffer[: layout.blocks, :, layout.columns],
            value_buffer[: layout.blocks, :, layout.columns],
            attn_mask=self._mask,
            scale=scale,
        )
        by_lane = mixed.unflatten(2, (-1, heads // shared)).permute(0, 2, 1, 3, 4)
        found: Tensor = by_lane.reshape(-1, heads * made.shape[2])
        return found if layout.lane_order is None else found.index_select(0, layout.lane_order)


class _Norm:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + epsilon) * weight.

    Statistics are float32 and rounded as the model rounds them: after normalizing and after weighting. Several modules
    normalize one head each, the first heads of a row.
    """

    def __init__(self, modules: Sequence[Any], kernels: Kernels | None) -> None:
        weights = [module.weight.detach() for module in modules]
        self._weight = weights[0] if len(weights) == 1 else torch.stack(weights)
        self._share = 1 / weights[0].shape[-1]
        self._epsilon = float(modules[0].variance_epsilon)
        self._added = torch.tensor(self._epsilon, dtype=torch.float32)
        self._kernels = kernels

    def __call__(self, states: Tensor) -> Tensor:
        """Return ``states`` Float[R W] normalized."""
        return (
            self._plain(states) if self._kernels is None else self._kernels.norm(states, self._weight, self._epsilon)[0]
        )

    def heads_(self, made: Tensor) -> None:
        """Normalize the first heads of ``made`` Float[R M D], one per module, in place."""
        if self._kernels is not None:
            self._kernels.norm_heads_(made, self._weight, self._epsilon)
        else:
            turned = made[:, : len(self._weight)]
            turned.copy_(self._plain(turned))

    def _plain(self, states: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        # epsilon + size^2 / width, in one operation.
        factor = torch.addcmul(self._added, size, size, value=self._share).rsqrt_()
        return torch.mul(states, factor, out=torch.empty_like(states)).mul_(self._weight)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``states`` Float[R H D] rotated: the halves (x, y) become (x cos - y sin, y cos + x sin).

    cos Float[R 1 D]; sin Float[R 1 D] with its first half negated.
    """
    half = states.shape[-1] // 2
    swapped = torch.cat((states[..., half:], states[..., :half]), dim=-1)
    return (states * cos).addcmul_(swapped, sin)


def round_rows(rows: int) -> int:
    """Return the rows that a step of ``rows`` computes.

    >>> [round_rows(n) for n in (1, 16, 17)]
    [4, 16, 20]
    """
    return -(-rows // _ROWS_STEP) * _ROWS_STEP
