"""Log-probabilities of responses from a padded micro-batch: the only place that shifts tokens.

The model sees whole sequences, padded on the right, **without an attention mask**. In a causal model no position sees a
later one, so padding there changes nothing that is read. Without a mask the attention kernel is told "causal" and skips
the upper triangle. Position p - 1 predicts the token at position p; the shift is made here and nowhere else.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnomon.core.errors import ConfigError
from gnomon.core.types import TopLogprobs
from gnomon.models.attention import rotary_edge
from gnomon.models.backbone import Backbone, own_states
from gnomon.models.forward import accepted, body_of, checked_arguments
from gnomon.models.head import chunk_for, divergence, likeliest, scored
from gnomon.models.prefix import Packed
from gnomon.models.routing import Routing, pad_experts, routed
from gnomon.models.slow import warn_slow
from gnomon.models.token_strings import parsed


@dataclass(frozen=True)
class TokenScores:
    """Scores of chosen tokens; ``logprobs`` and ``entropy`` Float32[B T] are exact zeros elsewhere.

    Both are of the tempered policy, in nats.

    Attributes:
        entropy: All zeros if not requested.
        computed: Positions that went through the model, padding included.
        experts: Int16[B S L K], the experts that a mixture's routers would choose freely, -1 at positions that were not
            computed; None if dense or not requested.
        anchor_kl: KL(this policy || another), Float32[B T], of a scorer `against` the other's likeliest tokens.
        top: This policy's likeliest tokens Int32[B T K] and log-probabilities Float32[B T K], of a scorer `keeping` K.
    """

    logprobs: Tensor
    entropy: Tensor
    computed: int = 0
    experts: Tensor | None = None
    anchor_kl: Tensor | None = None
    top: TopLogprobs | None = None


@dataclass(frozen=True)
class _Rows:
    """The rows to score: the first three arguments of a `TokenScorer`, and what it is against."""

    tokens: Tensor
    prompt_lengths: Tensor
    mask: Tensor
    top: TopLogprobs | None = None

    @property
    def lengths(self) -> Tensor:
        """Prompt and response Int[B], each response up to its last wanted token."""
        steps = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        return self.prompt_lengths + (self.mask * steps).amax(1)

    def cut(self, at: Tensor, width: int) -> "_Rows":
        """Return the rows ``at`` Int[N], their tokens up to ``width``."""
        top = None if self.top is None else TopLogprobs(*(part[at] for part in self.top))
        return _Rows(self.tokens[at, :width], self.prompt_lengths[at], self.mask[at], top)


@dataclass(frozen=True)
class _Hidden:
    """``states`` Float[N L d]; ``index`` of each wanted one in their flattened rows; ``experts`` of `TokenScores`."""

    states: Tensor
    index: Tensor
    experts: Tensor | None


class TokenScorer:
    """Scores responses under a causal language model.

    Only hidden states that predict a wanted token reach the head, ``chunk_tokens`` at a time, so logits of shape [B, T,
    V] never exist, neither forward nor backward.

    This needs a model whose logits are its head's linear output, times a number (Cohere, Granite) or bounded (Gemma 2).
    No flag says so, so the constructor tries the model on two tokens: it replaces the head's output by a ramp, and
    checks that the ramp comes out so and that the head's input is the backbone's output. Otherwise ``is_split`` is
    false, and the whole model is run row by row, with each row's logits recomputed in the backward pass: exact for any
    causal model, [1, T, V] at a time, and slower.

    Rows with one prompt share its computation if the model allows it (`prefix`); ``shares_prompts`` says whether it
    does.

    Args:
        model: A causal language model of transformers in eval mode (dropout would make every ratio noise).
        chunk_tokens: Tokens whose logits exist at one time, >= 1; 256 tokens with a vocabulary of 50,000 are 50 MB in
            float32. None chooses by the device (`chunk_for`).

    Raises:
        ConfigError: If ``chunk_tokens`` is not positive.
    """

    def __init__(self, model: nn.Module, chunk_tokens: int | None = None) -> None:
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self.model: Any = model
        config: Any = model.config
        first = next(model.parameters())
        self._backbone = Backbone(model)
        self.chunk_tokens = chunk_tokens or chunk_for(first.device, config.get_text_config().vocab_size, first.itemsize)
        self._end = _end_of(self.model)
        self.is_split = self._end is not None
        if not self.is_split:
            warn_slow("row by row", type(model).__name__)
        self.shares_prompts = self.is_split and self._backbone.can_share()
        self._names = accepted(model)
        self._edge = rotary_edge(model.config)
        self._keeps = "logits_to_keep" in self._names
        self._top: TopLogprobs | None = None
        self._kept: tuple[int, int] | None = None

    def against(self, top: TopLogprobs) -> "TokenScorer":
        """Return a scorer with the same model that also gives the KL to another policy.

        Args:
            top: The other's likeliest tokens Int[B T K] and their log-probabilities Float[B T K], for the rows that it
                will be called with.
        """
        found = copy.copy(self)
        found._top = top
        return found

    def keeping(self, count: int, among: int) -> "TokenScorer":
        """Return a scorer with the same model that also gives the likeliest tokens, without a gradient.

        Args:
            count: How many.
            among: Of how many of the first ids; a model may have more logits than tokens.
        """
        found = copy.copy(self)
        found._kept = (count, among)
        return found

    def __call__(
        self,
        tokens: Tensor,
        prompt_lengths: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = True,
        routing: Routing | None = None,
    ) -> TokenScores:
        """Return the scores of the response tokens where ``mask`` is true.

        Args:
            tokens: Int[B S], padded right with any valid id.
            prompt_lengths: Int[B], >= 1.
            mask: Bool[B T]; column t is the token at position prompt_length + t.
            temperature: Above 0; divides the logits.
            with_entropy: Whether to compute entropies.
            routing: Experts to use, and that the free choice is returned; None leaves routers alone.

        Raises:
            ConfigError: If a prompt is empty, since nothing predicts its first response token; or as
                `routing.replaying` does.
        """
        asked = _Rows(tokens, prompt_lengths, mask, self._top)
        if self._edge is None or tokens.shape[1] <= self._edge:
            return self._scored(asked, temperature, with_entropy, routing, self.shares_prompts)
        return self._by_table(asked, temperature, with_entropy, routing)

    def _by_table(self, asked: _Rows, temperature: float, with_entropy: bool, routing: Routing | None) -> TokenScores:
        """Score rows up to the rotary edge without padding beyond it, and longer rows separately, unpacked."""
        edge = self._edge or 0
        is_short = asked.lengths <= edge
        shape, device = asked.mask.shape, asked.mask.device
        logprobs, entropy, kl = (torch.zeros(shape, device=device) for _ in range(3))
        computed, top = 0, self._blank_top(asked.mask)
        experts: Tensor | None = None
        for which, width, shares in ((is_short, edge, self.shares_prompts), (~is_short, asked.tokens.shape[1], False)):
            at = which.nonzero()[:, 0]
            if not len(at):
                continue
            # Rows up to the edge are cut there, or padding beyond it would give them the long rows' rotary table.
            part = asked.cut(at, width)
            own = None if routing is None else routing.of_rows(at, width)
            found = self._scored(part, temperature, with_entropy, own, shares)
            logprobs, entropy = logprobs.index_put((at,), found.logprobs), entropy.index_put((at,), found.entropy)
            kl = kl if found.anchor_kl is None else kl.index_put((at,), found.anchor_kl)
            top = _put(top, (at,), found.top)
            computed += found.computed
            if found.experts is not None:
                made = found.experts.new_full((*asked.tokens.shape, *found.experts.shape[2:]), -1)
                experts = made if experts is None else experts
                experts[at.cpu(), : found.experts.shape[1]] = found.experts
        return TokenScores(logprobs, entropy, computed, experts, None if asked.top is None else kl, top)

    def _blank_top(self, mask: Tensor) -> TopLogprobs | None:
        if not self._kept:
            return None
        blank = torch.zeros(*mask.shape, self._kept[0], device=mask.device)
        return TopLogprobs(blank.int(), blank)

    def _scored(
        self, asked: _Rows, temperature: float, with_entropy: bool, routing: Routing | None, shares: bool
    ) -> TokenScores:
        tokens, prompt_lengths, mask = asked.tokens, asked.prompt_lengths, asked.mask
        rows, columns = mask.nonzero(as_tuple=True)
        positions = prompt_lengths[rows] + columns
        if rows.numel() == 0:
            empty = torch.zeros(mask.shape, device=mask.device)
            return TokenScores(empty, empty, anchor_kl=None if asked.top is None else empty, top=self._blank_top(mask))
        if int(positions.min()) < 1:
            raise ConfigError("a prompt has no token, so nothing predicts its first response token; begin it with one")
        targets = tokens[rows, positions]
        predicting = (rows, positions - 1)
        top = None if asked.top is None else TopLogprobs(*(part[rows, columns] for part in asked.top))
        if self.is_split and self._end is not None:
            scale, bound = self._end
            # A model that multiplies its logits by s is one that divides them by 1 / s: one divisor does both.
            warmth = temperature / scale
            hidden = self._hidden(asked, predicting, routing, shares)
            computed, experts = hidden.states.shape[0] * hidden.states.shape[1], hidden.experts
            # One flat index: its backward is an index_add, much cheaper than that of hidden[rows, predicting].
            wanted = hidden.states.flatten(0, 1).index_select(0, hidden.index)
            head = self.model.get_output_embeddings()
            found = scored(wanted, head, targets, (warmth, self.chunk_tokens, with_entropy), top, bound)
            own = likeliest(wanted, head, warmth, self.chunk_tokens, self._kept, bound) if self._kept else None
        else:
            computed = tokens.numel()
            how = (temperature, with_entropy, top)
            found, experts, own = self._whole(tokens, predicting, targets, how, routing)
        # Scattered back into (B, T): exact zeros where the mask is false.
        blank = torch.zeros(mask.shape, dtype=found[0].dtype, device=mask.device)
        logprobs, entropy, kl = (blank.index_put((rows, columns), values) for values in found)
        kept = _put(self._blank_top(mask), (rows, columns), own)
        return TokenScores(logprobs, entropy, computed, experts, None if top is None else kl, kept)

    def is_row_packed(self, longest: int) -> bool:
        """Whether rows of at most ``longest`` tokens with shared prompts form one row."""
        return self._backbone.is_row_packed(longest)

    def shares_beginnings(self) -> bool:
        """Whether what all prompts of such a row begin with is computed once."""
        return self._backbone.shares_beginnings()

    def _hidden(self, asked: _Rows, where: tuple[Tensor, Tensor], routing: Routing | None, shares: bool) -> _Hidden:
        rows, predicting = where
        tokens = asked.tokens
        replayed = None if routing is None else routing.experts
        packed = self._packed(tokens, asked.prompt_lengths, where) if shares else None
        # Rows with one prompt may have been routed differently there; then the prompt has no single hidden state to
        # share.
        placed = None if packed is None or replayed is None else packed.place(replayed)
        if packed is None or (replayed is not None and placed is None):
            with routed(self.model, routing) as recorder:
                hidden = self._backbone.plain(tokens) if routing is None else own_states(self.model, tokens)
            experts = None if recorder is None else recorder.experts(*tokens.shape)
            return _Hidden(hidden, rows * hidden.shape[1] + predicting, experts)
        with routed(self.model, None if routing is None else Routing(placed)) as recorder:
            hidden = self._backbone.packed(packed, tokens.device)
        experts = None if recorder is None else recorder.experts(*packed.tokens.shape)
        index = packed.index(rows, predicting)
        return _Hidden(hidden, index, None if experts is None else packed.take(experts))

    def _packed(self, tokens: Tensor, prompt_lengths: Tensor, where: tuple[Tensor, Tensor]) -> Packed | None:
        rows, predicting = where
        ends = prompt_lengths.scatter_reduce(0, rows, predicting + 1, "amax")
        return self._backbone.pack(tokens, prompt_lengths, ends)

    def _whole(
        self,
        tokens: Tensor,
        where: tuple[Tensor, Tensor],
        targets: Tensor,
        how: tuple[float, bool, TopLogprobs | None],
        routing: Routing | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, TopLogprobs | None]:
        rows, predicting = where
        temperature, entropy, top = how
        parts, chosen = [], {}
        for row in sorted(set(rows.tolist())):
            mine = rows == row
            # Positions after the last wanted one cannot affect a causal model.
            end = int(predicting[mine].max()) + 1
            is_beyond = self._edge is not None and tokens.shape[1] > self._edge
            sequence = tokens[row : row + 1, : max(end, self._edge + 1) if self._edge and is_beyond else end]
            own = routing and routing.of(row, sequence.shape[1])
            known = None if top is None else TopLogprobs(*(part[mine] for part in top))
            arguments = (sequence, predicting[mine], targets[mine], (temperature, entropy, known), own)
            # The logits [1, T, V] of one row exist at a time: the backward pass computes them again.
            if torch.is_grad_enabled():
                scores = checkpoint(self._one_row, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                scores = self._one_row(*arguments)
            parts.append((*scores[:3], *scores[4:]))
            chosen[row] = scores[3]
        # Rows come in order, and so do their wanted tokens.
        logprobs, entropies, divergences, *kept = (torch.cat(part) for part in zip(*parts, strict=True))
        likely = TopLogprobs(*kept) if kept else None
        return (logprobs, entropies, divergences), pad_experts(chosen, *tokens.shape), likely

    def _one_row(
        self,
        sequence: Tensor,
        predicting: Tensor,
        targets: Tensor,
        how: tuple[float, bool, TopLogprobs | None],
        routing: Routing | None,
    ) -> tuple[Any, ...]:
        temperature, entropy, top = how
        # Logits of the prompt are not asked for: nothing is trained there.
        first = int(predicting.min())
        wanted = {"logits_to_keep": sequence.shape[1] - first, "use_cache": False}
        with routed(self.model, routing) as recorder:
            known = checked_arguments(self.model, self._names, wanted)
            logits = self.model(input_ids=sequence, **known).logits[0]
        experts = None if recorder is None else recorder.experts(sequence.shape[1])
        # A model that cannot keep only the last logits returns those of all positions.
        offset = first if self._keeps else 0
        log_policy = (logits[predicting - offset].float() / temperature).log_softmax(-1)
        chosen = log_policy.gather(1, targets[:, None])[:, 0]
        entropies = -(log_policy.exp() * log_policy).sum(-1) if entropy else torch.zeros_like(chosen)
        if self._kept:
            values, ids = log_policy[:, : self._kept[1]].topk(self._kept[0], -1)
            return chosen, entropies, torch.zeros_like(chosen), experts, ids.int(), values
        if top is None:
            return chosen, entropies, torch.zeros_like(chosen), experts
        own = log_policy.gather(1, top.tokens.long())
        kl = divergence(own, top.logprobs, own.shape[1] >= log_policy.shape[1])[0]
        return chosen, entropies, kl, experts


def _put(into: TopLogprobs | None, where: tuple[Tensor, ...], values: TopLogprobs | None) -> TopLogprobs | None:
    if into is None or values is None:
        return into
    return TopLogprobs(*(whole.index_put(where, part) for whole, part in zip(into, values, strict=True)))


def _end_of(model: Any) -> tuple[float, float | None] | None:
    """Return what the logits are: (1, None) the head's own linear output z, (s, None) s z, (1, b) b tanh(z / b).

    None where they are anything else, or where the head's input is not the backbone's output.
    """
    head, body = model.get_output_embeddings(), body_of(model)
    if type(head) is not nn.Linear or body is model:
        return None
    # A ramp shows scaling and bounding at once: a product keeps it straight, a tanh bends it at its ends.
    ramp = torch.linspace(-100.0, 100.0, head.out_features).to(head.weight)
    given: list[Tensor] = []

    def replace_output(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given.append(arguments[0])
        return ramp.expand_as(output).clone()

    tokens = torch.tensor([[0, 1]], device=head.weight.device)
    with torch.no_grad(), parsed(f"model '{model.config.name_or_path}' cannot be run as its config.json has it"):
        hook = head.register_forward_hook(replace_output)
        try:
            known = checked_arguments(model, accepted(model), {"use_cache": False})
            logits = model(input_ids=tokens, **known).logits
        finally:
            hook.remove()
        hidden = own_states(model, tokens)
    # The head is called once, on the backbone's output itself, and every logit is one of its outputs.
    if len(given) != 1 or not torch.equal(given[0], hidden) or logits.shape[-1] != ramp.numel():
        return None
    found, exact = logits.float(), ramp.float()
    stated = vars(model.config.get_text_config()).items()
    bounds = [v for name, v in stated if "softcap" in name.replace("_", "") and type(v) in (int, float) and v > 0]
    scale = float(found[0, 0, -1] / exact[-1])
    # Rounded once in the head's precision.
    near = 4 * torch.finfo(head.weight.dtype).eps
    for bound in bounds:
        if torch.allclose(found, ((ramp / bound).tanh() * bound).float().expand_as(found), near, 0.0):
            return 1.0, float(bound)
    is_scaled = scale > 0 and torch.allclose(found, (exact * scale).expand_as(found), near, 0.0)
    return (scale, None) if is_scaled else None
