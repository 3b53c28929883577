"""Decoding: one more token for many rows, over any causal language model of transformers.

Four ways; the first that reproduces a plain forward pass on the model is used:

- `AlignedDecoder`: rows join and leave at any step and share their prompt's KV cache. Any attention-only model.
- `HybridDecoder`: the same where layers carry a state (state space, linear attention, convolutions).
- `SameLengthDecoder`: the model's own cache; rows of one prompt length start together and no row joins later.
- `RecomputeDecoder`: no cache; every step is a full forward pass.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from gnomon.core.errors import ModelError
from gnomon.models.attention import rotary_edge
from gnomon.models.contexts import Trace
from gnomon.models.cpu.packed_linear import PackedLinears
from gnomon.models.forward import Forward
from gnomon.models.fused_layers import use_own_layers
from gnomon.models.kv_cache import AlignedCache, HybridCache, LayerState, Prefix, Rows
from gnomon.models.prefix import Known, PrefixTree, begun_cache, common_beginning
from gnomon.models.slow import is_attention_only
from gnomon.models.tokenizer import context_of

Prompt = tuple[int, ...]
# Padded tokens of one prefill, which bound the memory of its activations.
_PREFILL_TOKENS = 4096
_CONTINUED_TOKENS = 2 * _PREFILL_TOKENS
_LEAST_SAVED, _LEAST_SAVED_GPU = 128, 4096
"""Tokens for which one more pass is worth its time."""
# Tokens times weights of a trial that takes about a second on a CPU.
_TRIED_COST = 10**9
_GAP_PER_LAYER, _LARGEST_GAP = 1e-5, 1e-3


class Decoder(Protocol):
    """Rows in slots 0 .. R - 1, each a sequence that grows by one token per step.

    A row's last token has not been through the model: `step` feeds the token and returns the next logits.
    """

    joins: bool
    keeps: bool
    """Whether `keep` saves a prompt that begins with a former row from being computed again."""

    @property
    def passes(self) -> int:
        """Number of forward passes so far, a sign of life also during a long prefill."""

    @property
    def computed(self) -> int:
        """Number of tokens that went through the model so far, without padding."""

    def admit(self, prompts: Sequence[Prompt], room: int, expected: Set[Prompt]) -> None:
        """Append one row per prompt; equal prompts are computed once.

        Args:
            prompts: Token ids. With ``joins`` false they have one length, and there are no rows yet.
            room: Most further tokens of a row.
            expected: Prompts that later calls will repeat.
        """

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed each row's latest token and return the next logits Float[R V]."""

    def keep(self, slot: int, tokens: Prompt, most: int) -> None:
        """Keep what was computed of a row, which has these ``tokens``, for prompts that begin with them.

        Args:
            most: Bytes of all that is kept; what was used longest ago is dropped.
        """

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""

    def invalidate(self) -> None:
        """Drop everything computed with former weights; rows stay."""

    def release(self) -> None:
        """Free memory that is cheap to fill again, because no row waits for a token."""

    def record(self, is_wanted: bool) -> None:
        """Start or stop recording the expert choices of rows that are admitted from now on."""

    def experts(self, slot: int) -> Tensor | None:
        """Return the experts Int16[n L K] of a row's n computed positions.

        None for a dense model, or if recording was off at any of them.
        """


class _TracedDecoder:
    """What decoders share: the count of their forward passes and a row's experts. Nothing of a row outlives the row."""

    keeps = False

    def __init__(self, model: nn.Module) -> None:
        self._forward = Forward(model)
        self._trace = Trace()

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._forward.calls

    @property
    def computed(self) -> int:
        """Tokens computed so far."""
        return self._forward.tokens

    def keep(self, slot: int, tokens: Prompt, most: int) -> None:
        """Do nothing, because nothing outlives the rows."""

    def invalidate(self) -> None:
        """Do nothing, because nothing outlives the rows."""

    def release(self) -> None:
        """Do nothing, because nothing outlives the rows."""

    def record(self, is_wanted: bool) -> None:
        """Start or stop recording experts."""
        self._forward.records = is_wanted

    def experts(self, slot: int) -> Tensor | None:
        """Return the experts of a row's positions."""
        return self._trace.of(slot)


class AlignedDecoder(_TracedDecoder):
    """Continuous batching: all rows end at one column of the cache, so a step is one forward pass of R rows by 1."""

    joins = keeps = True

    def __init__(self, model: Any) -> None:
        use_own_layers(model)
        super().__init__(model)
        self._packed = PackedLinears(model)
        self._aligned = AlignedCache(len(DynamicCache(config=model.config).layers))
        self._cache: Rows = self._aligned
        self._prefixes: dict[Prompt, Prefix | None] = {}
        self._prefix_experts: dict[Prompt, Tensor | None] = {}
        self._kept = PrefixTree()

    def admit(self, prompts: Sequence[Prompt], room: int, expected: Set[Prompt]) -> None:
        """Append rows; each distinct prompt is computed once and kept while it is expected again."""
        absent = [p for p in dict.fromkeys(prompts) if p not in self._prefixes]
        # A prompt of one token has nothing to compute before the first step, which feeds that token.
        self._prefixes.update(dict.fromkeys((p for p in absent if len(p) == 1), None))
        # The last token is left out everywhere here: the first step feeds it, and its logits draw the first new token.
        known = {p: self._kept.find(p[:-1]) for p in absent if len(p) > 1}
        known |= self._begun([p for p, found in known.items() if not found.length])
        whole = {p: found for p, found in known.items() if found.length == len(p) - 1}
        self._prefixes.update({p: found.states for p, found in whole.items()})
        self._prefix_experts.update({p: found.chosen() for p, found in whole.items()})
        for chunk in _chunks([p for p, found in known.items() if not found.length], _PREFILL_TOKENS):
            self._prefill(chunk)
        begun = [p for p, found in known.items() if found.length and p not in whole]
        for chunk in _chunks(begun, _CONTINUED_TOKENS):
            self._continue(chunk, [known[p] for p in chunk])
        # Neighbors with one prompt join together, so that a grouped cache can hold their prompt once.
        runs = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
        self._cache.join([self._prefixes[p] for p, _ in runs], [count for _, count in runs], room)
        for prompt in prompts:
            self._trace.join(1)
            if len(prompt) > 1:
                self._trace.extend([self._prefix_experts[prompt]], first=-1)
        # A prompt that no later call repeats would only hold memory.
        self._prefixes = {p: prefix for p, prefix in self._prefixes.items() if p in expected}
        self._prefix_experts = {p: experts for p, experts in self._prefix_experts.items() if p in expected}

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token a row and return the next logits."""
        positions, mask = self._aligned.before_step(room)
        # Packed weights for this step alone: a prefill has many rows, and a learner may use the module between
        # steps.
        with self._packed:
            logits: Tensor = self._forward(
                torch.tensor(tokens)[:, None],
                attention_mask=mask,
                cache=self._aligned,
                use_cache=True,
                **self._at(positions),
            ).logits[:, -1]
        self._check_written(self._aligned)
        self._forward.tokens += len(tokens)
        self._aligned.after_step()
        self._trace.extend(self._forward.experts)
        return logits

    def keep(self, slot: int, tokens: Prompt, most: int) -> None:
        """Keep what was computed of a row; common beginnings are kept once."""
        # Rows that begin with it may ask for all experts.
        if self._trace.is_partial(slot):
            return

        def read(first: int) -> tuple[Prefix, Tensor | None]:
            experts = self._trace.of(slot)
            return self._cache.read(slot, first), None if experts is None else experts[first:]

        # `read` is called only if the tree lacks something, for its positions alone.
        self._kept.keep(tokens, read, most)

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        self._cache.leave(slot)
        self._trace.leave(slot)

    def invalidate(self) -> None:
        """Drop all that is kept, and the packed weights."""
        self._prefixes, self._prefix_experts = {}, {}
        self._kept.clear()
        self._packed.invalidate()

    def release(self) -> None:
        """Free the packed weights, which are as large as the model's, and the cache."""
        self._packed.invalidate()
        self._cache.release()

    def record(self, is_wanted: bool) -> None:
        """Start or stop recording experts; kept prompts without experts are computed again."""
        if is_wanted and not self._forward.records:
            self.invalidate()
        self._forward.records = is_wanted

    def _at(self, positions: Tensor) -> dict[str, Tensor]:
        """Return positions as an argument; empty for a model (Bloom, MPT) that derives positions from the mask."""
        return {"position_ids": positions} if "position_ids" in self._forward.names else {}

    def _check_written(self, cache: AlignedCache) -> None:
        """Raise ModelError if a step wrote nothing into the cache, because the model uses another cache."""
        if all(layer.keys is None for layer in cache.aligned):
            raise ModelError(f"{type(self._forward.model).__name__} left nothing in the cache that it was given")

    def _prefill(self, prompts: Sequence[Prompt]) -> None:
        # All but the last token, which the first step feeds. No logits are needed here, and no mask, because earlier
        # positions never see the padding on the right.
        lengths = [len(p) - 1 for p in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt[:-1])
        cache: Any = DynamicCache()
        self._forward(ids, keep=torch.empty(0, dtype=torch.long), cache=cache, use_cache=True)
        self._forward.tokens += sum(lengths)
        experts = self._forward.experts
        for row, prompt in enumerate(prompts):
            self._prefix_experts[prompt] = None if experts is None else experts[row, : lengths[row]]
            # Views of the batch's cache: the memory is freed when the last of these prompts is no longer expected.
            self._prefixes[prompt] = [
                (layer.keys[row, :, : lengths[row]], layer.values[row, :, : lengths[row]]) for layer in cache.layers
            ]

    def _begun(self, prompts: Sequence[Prompt]) -> dict[Prompt, Known]:
        """Return what all prompts begin with, such as a system message, computed once; empty where it saves little."""
        shared = min(common_beginning(prompts), min(map(len, prompts), default=0) - 2)
        least = _LEAST_SAVED if self._forward.device.type == "cpu" else _LEAST_SAVED_GPU
        if not self.keeps or shared * (len(prompts) - 1) < least:
            return {}
        first = prompts[0][: shared + 1]  # all but the last token of a prompt is computed
        self._prefill([first])
        found = Known(shared, [self._prefixes[first] or ()], [self._prefix_experts[first]])
        return dict.fromkeys(prompts, found)

    def _continue(self, prompts: Sequence[Prompt], known: Sequence[Known]) -> None:
        """Compute what is not known of prompts; all rows end at one column, so padding comes before the new tokens."""
        # Positions of each prompt that are not known, without its last token.
        news = [len(p) - 1 - found.length for p, found in zip(prompts, known, strict=True)]
        ids, positions = torch.zeros(2, len(prompts), max(news), dtype=torch.long)
        for row, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
            ids[row, -new:] = torch.tensor(prompt[-new - 1 : -1])
            positions[row, -new:] = torch.arange(len(prompt) - 1 - new, len(prompt) - 1)
        cache: Any
        cache, mask = begun_cache(known, news, len(self._aligned.aligned))
        none = torch.empty(0, dtype=torch.long)
        self._forward(ids, none, cache, attention_mask=mask, use_cache=True, **self._at(positions))
        self._forward.tokens += sum(news)
        experts = self._forward.experts
        for row, (prompt, found, new) in enumerate(zip(prompts, known, news, strict=True)):
            # The row's own columns are the last ones: one for each token but the last.
            own = slice(1 - len(prompt), None)
            self._prefixes[prompt] = [(layer.keys[row, :, own], layer.values[row, :, own]) for layer in cache.layers]
            self._prefix_experts[prompt] = found.chosen(None if experts is None else experts[row, -new:])


class HybridDecoder(AlignedDecoder):
    """Continuous batching of a model in which layers carry a state: each row has its own, so steps need no padding.

    Prompts of one length are computed together, since a state would see padding.
    """

    keeps = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._aligned = self._hybrid = HybridCache(DynamicCache(config=model.config).layers)
        self._cache = self._aligned
        self._states: dict[Prompt, Sequence[LayerState]] = {}
        self._begin: Sequence[LayerState] | None = None

    def admit(self, prompts: Sequence[Prompt], room: int, expected: Set[Prompt]) -> None:
        """Append rows; see `AlignedDecoder.admit`."""
        super().admit(prompts, room, expected)
        if self._begin is None:
            self._advance([(0, 0)])  # to learn the shapes of states
        runs = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
        begin = self._begin or ()
        self._hybrid.join_states([self._states.get(p, begin) for p, _ in runs], [count for _, count in runs])
        self._states = {p: states for p, states in self._states.items() if p in expected}

    def invalidate(self) -> None:
        """Drop all that is kept, and the packed weights."""
        super().invalidate()
        self._states = {}

    def _prefill(self, prompts: Sequence[Prompt]) -> None:
        for _, same in itertools.groupby(prompts, len):
            rows = list(same)
            cache = self._advance(rows)
            experts = self._forward.experts
            for row, prompt in enumerate(rows):
                self._prefix_experts[prompt] = None if experts is None else experts[row]
                attention: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
                self._prefixes[prompt] = [(layer.keys[row], layer.values[row]) for layer in attention]
                self._states[prompt] = self._hybrid.read_states(cache, row)

    def _advance(self, prompts: Sequence[Prompt]) -> Any:
        """Compute all but the last token of prompts of one length; return the cache."""
        cache: Any = self._hybrid.blank()
        ids = torch.tensor([p[:-1] for p in prompts])
        self._forward(ids, keep=torch.empty(0, dtype=torch.long), cache=cache, use_cache=True)
        self._forward.tokens += ids.numel()
        if self._begin is None:
            first = self._hybrid.read_states(cache, 0)
            self._begin = [[None if part is None else torch.zeros_like(part) for part in layer] for layer in first]
        return cache

    def _check_written(self, cache: AlignedCache) -> None:
        """Raise ModelError if a step wrote nothing into the cache, because the model uses another cache."""
        if cache.aligned:
            super()._check_written(cache)


class SameLengthDecoder(_TracedDecoder):
    """The model's own cache: rows of one prompt length that start together; a row that left is still computed."""

    joins = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._cache: Any = None
        self._live: list[int] = []
        self._rows = 0

    def admit(self, prompts: Sequence[Prompt], room: int, expected: Set[Prompt]) -> None:
        """Start rows of one length."""
        self._rows = len(prompts)
        self._live = list(range(self._rows))
        self._cache = None
        self._trace.join(self._rows)
        if len(prompts[0]) > 1:
            self._advance(torch.tensor([p[:-1] for p in prompts]))
            self._trace.extend(self._forward.experts)

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token a row and return the next logits."""
        ids = torch.zeros(self._rows, 1, dtype=torch.long)
        # Rows that left are fed token 0: their place in the cache's batch cannot be freed.
        ids[self._live, 0] = torch.tensor(tokens)
        logits = self._advance(ids)[self._live]
        experts = self._forward.experts
        self._trace.extend(None if experts is None else experts[self._live])
        return logits

    def leave(self, slot: int) -> None:
        """Remove a row from the answers; it is computed until all rows have ended."""
        self._live[slot] = self._live[-1]
        self._live.pop()
        self._trace.leave(slot)

    def _advance(self, ids: Tensor) -> Tensor:
        output = self._forward(ids, use_cache=True, cache=self._cache)
        self._forward.tokens += ids.numel()
        self._cache = self._forward.cache_of(output)
        logits: Tensor = output.logits[:, -1]
        return logits


class RecomputeDecoder(_TracedDecoder):
    """No cache: the fallback, and the definition of correct logits."""

    joins = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._rows: list[list[int]] = []

    def admit(self, prompts: Sequence[Prompt], room: int, expected: Set[Prompt]) -> None:
        """Append rows."""
        self._rows += [list(p[:-1]) for p in prompts]
        self._trace.join(len(prompts))

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token a row and return the next logits."""
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        lengths = [len(row) for row in self._rows]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for i, row in enumerate(self._rows):
            ids[i, : lengths[i]] = torch.tensor(row)
        # Rows end at different positions; logits of all positions where any row ends are asked for, and each row takes
        # its own.
        wanted = sorted(set(lengths))
        logits: Tensor = self._forward(ids, keep=torch.tensor(wanted) - 1, use_cache=False).logits
        self._forward.tokens += sum(lengths)
        has_all = logits.shape[1] != len(wanted)
        places = [n - 1 if has_all else wanted.index(n) for n in lengths]
        experts = self._forward.experts
        firsts = [0 if self._trace.is_new(slot) else n - 1 for slot, n in enumerate(lengths)]
        self._trace.extend(
            None if experts is None else [experts[i, a:b] for i, (a, b) in enumerate(zip(firsts, lengths, strict=True))]
        )
        return logits[list(range(len(lengths))), places]

    def leave(self, slot: int) -> None:
        """Remove a row; the last row takes its slot."""
        self._rows[slot] = self._rows[-1]
        self._rows.pop()
        self._trace.leave(slot)


@torch.no_grad()
def choose_decoder(model: nn.Module, first: Sequence[Callable[[nn.Module], Decoder]] = ()) -> Decoder:
    """Return the fastest decoder that gives the model's own logits.

    Caches differ between architectures, so each candidate is tried: a short ragged batch in which a row leaves and
    another joins must give the logits of a plain forward pass.

    Args:
        model: A causal language model.
        first: Faster decoders, tried first.
    """
    makers: list[Callable[[nn.Module], Decoder]] = [AlignedDecoder] if is_attention_only(model) else []
    if carries_states(model):
        makers = [HybridDecoder]
    # Only rows that start together at one length have their positions as columns.
    if scales_by_column(model):
        first, makers = (), []
    for make in (*first, *makers, SameLengthDecoder):
        if agrees(make, model):
            return make(model)
    return RecomputeDecoder(model)


def agrees(make: Callable[[nn.Module], Decoder], model: nn.Module, in_turns: bool = False) -> bool:
    """Whether a decoder gives the model's own logits on short ragged batches and across its attention windows.

    Args:
        make: Makes the decoder.
        model: A causal language model.
        in_turns: Whether rows are tried that begin with what was kept of others, instead of rows that join and leave.
    """
    script, tolerance = _later_turns if in_turns else _joins_and_leaves, _tolerance(model)
    lengths = (0, *tried_lengths(model))
    return all(_agrees(make(model), RecomputeDecoder(model), tolerance, script, n) for n in lengths)


def tried_lengths(model: Any) -> list[int]:
    """Return the lengths at which the config says that something changes, if they are cheap to try.

    These are windows, chunks and rotary tables, without lengths whose trial takes more than about a second on a CPU.
    """
    text = model.config.get_text_config()
    stated = [vars(text).get(name) for name in ("sliding_window", "attention_chunk_size")]
    lengths = sorted({n for n in (*stated, rotary_edge(model.config)) if isinstance(n, int) and n > 6})
    # A trial of n tokens costs about n times the weights in multiplications.
    cost, longest = sum(p.numel() for p in model.parameters()), context_length(model)
    return [n for n in lengths if n * cost <= _TRIED_COST and (longest is None or n + 8 <= longest)]


def carries_states(model: Any) -> bool:
    """Whether layers carry a state, in a cache of transformers' own kinds."""
    return any(isinstance(e, LinearAttentionCacheLayerMixin) for e in DynamicCache(config=model.config).layers)


def scales_by_column(model: Any) -> bool:
    """Whether queries are scaled by their column of the cache, and not of their row, at a length that a row may reach.

    Llama 4's layers without rotary positions do so from ``floor_scale`` tokens on: a row beside a longer one would get
    the longer one's scale. No trial is as long (8,192 tokens).
    """
    text = vars(model.config.get_text_config())
    edge, longest = text.get("floor_scale"), context_length(model)
    return bool(text.get("attn_temperature_tuning")) and edge is not None and (longest is None or longest >= edge)


def context_length(model: Any) -> int | None:
    """Return the number of tokens that the model's positions allow; None without a limit."""
    return context_of(model.config)


def vocabulary_size(model: Any) -> int:
    """Return the width of the logits."""
    return int(model.config.get_text_config().vocab_size)


def _agrees(
    decoder: Decoder,
    plain: Decoder,
    tolerance: float,
    script: Callable[[Decoder, Sequence[Prompt], bool], Iterator[Tensor]],
    length: int,
) -> bool:
    """Whether both decoders give the same logits, relative to their spread, on a script.

    One row begins shorter than ``length`` and grows beyond it.
    """
    # Different lengths, so that a wrong mask or position changes logits.
    ragged: list[Prompt] = [(3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9)]
    if length:
        ragged[0] = tuple((3 * at + at * at) % 11 for at in range(length - 2))
    errors = []
    try:
        ours, theirs = (script(each, ragged, decoder.joins) for each in (decoder, plain))
        errors = [_separate(one, other) for one, other in zip(ours, theirs, strict=True)]
    except (ModelError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError):
        return False
    return all(error < tolerance for error in errors)


def _joins_and_leaves(decoder: Decoder, ragged: Sequence[Prompt], joins: bool) -> Iterator[Tensor]:
    """Yield the logits of steps between which a row leaves and another joins, if it can."""
    decoder.admit(ragged[:2] if joins else [ragged[0], ragged[0][::-1]], 8, frozenset())
    tokens = [5, 2]
    for turn in range(4):
        yield decoder.step(tokens, 8).float()
        tokens = [(2 * t + 1) % 7 for t in tokens]
        if turn == 1:
            decoder.leave(0)
            if joins:
                decoder.admit(ragged[2:], 8, frozenset())
            tokens = [4, 7] if joins else [4]


def _later_turns(decoder: Decoder, ragged: Sequence[Prompt], joins: bool) -> Iterator[Tensor]:
    """Yield the logits of two turns: the second one's prompts begin with rows of the first, or with a part of one."""
    said = [(*ragged[0][:-1], 5, 3), (*ragged[2][:-1], 2, 1)]
    decoder.admit([ragged[0], ragged[2]], 8, frozenset())
    for tokens in zip(*(row[-2:] for row in said), strict=True):
        yield decoder.step(tokens, 8).float()
    for slot in (1, 0):
        decoder.keep(slot, said[slot], 2**62)
        decoder.leave(slot)
    decoder.admit([(*said[0], 7, 3, 8, 2), (*said[1][:4], 6, 2), (*said[1], 4), ragged[1]], 8, frozenset())
    for token in (1, 8):
        yield decoder.step([token] * 4, 8).float()


def _tolerance(model: Any) -> float:
    """Return the allowed difference of logits, relative to their spread: in float32 1e-5 per layer, more than rounding.

    SmolLM2's 30 layers, decoded from a cache in float32, differ by 3e-5 to 1e-4 from a plain forward pass.
    """
    if next(model.parameters()).dtype in (torch.bfloat16, torch.float16):
        return 0.1
    return min(_LARGEST_GAP, _GAP_PER_LAYER * int(model.config.get_text_config().num_hidden_layers))


def _separate(found: Tensor, exact: Tensor) -> float:
    # A constant added to all logits changes no probability.
    spread = exact - exact.mean(dim=-1, keepdim=True)
    return float((found - exact).norm() / spread.norm())


def _chunks(prompts: Sequence[Prompt], most: int) -> list[list[Prompt]]:
    """Cut prompts, longest first, into batches of at most ``most`` padded tokens (or one prompt)."""
    chunks: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda p: -len(p)):
        if not chunks or (len(chunks[-1]) + 1) * len(chunks[-1][0]) > most:
            chunks.append([])
        chunks[-1].append(prompt)
    return chunks
