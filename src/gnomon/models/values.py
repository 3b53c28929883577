"""Values of the states before each token of the responses, from a padded micro-batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import ConfigError
from gnomon.models.backbone import Backbone


class ValueHead(nn.Linear):
    """A linear map from a hidden state to a number: V = w h, float32, without bias, initially zero.

    Args:
        width: Of the hidden states.

    >>> ValueHead(4)(torch.ones(1, 4)).item()
    0.0
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.weight)


@dataclass(frozen=True)
class Values:
    """A critic's values.

    Attributes:
        values: Float32[B T], of the state *before* each unmasked token, exact zeros elsewhere.
        bootstrap: Float32[B], of the state after a sequence's last token; 0 for a row without unmasked tokens.
        computed: Positions that went through the backbone, padding included.
    """

    values: Tensor
    bootstrap: Tensor
    computed: int


class ValueScorer:
    """Reads a value at the hidden state that predicts a token, before the token is chosen.

    This is position p - 1 for the token at p, the same shift as for log-probabilities. A value read at p would know the
    token, and the advantage would then compare the token with itself. Rows with one prompt share its computation if the
    backbone allows it (`prefix`).

    Args:
        trunk: A causal model of transformers in eval mode, whose own head is unused.
        head: Hidden state to one number, applied in float32 for every precision of the backbone.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear) -> None:
        self.trunk: Any = trunk
        self.head = head
        self._body = Backbone(trunk)
        self.shares_prompts = self._body.can_share()

    def __call__(
        self, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, mask: Tensor, is_trunk_frozen: bool = False
    ) -> Values:
        """Return the values of the response tokens where ``mask`` is true, with a gradient if torch records one.

        Args:
            tokens: Int[B S], padded right with any valid id.
            prompt_lengths: Int[B], >= 1.
            lengths: Int[B], where responses end.
            mask: Bool[B T]; column t is the token at position prompt_length + t.
            is_trunk_frozen: End the gradient at the head.

        Raises:
            ConfigError: If a prompt is empty, since there is no state before its first response token.
        """
        rows, columns = mask.nonzero(as_tuple=True)
        live = mask.any(1).nonzero()[:, 0]
        before = prompt_lengths[rows] + columns - 1
        if rows.numel() == 0:
            nothing = torch.zeros(mask.shape, device=mask.device)
            return Values(nothing, nothing.sum(1), 0)
        if int(before.min()) < 0:
            raise ConfigError("a prompt has no token, so there is no state before its first response token")
        wanted = (torch.cat([rows, live]), torch.cat([before, lengths[live] - 1]))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_trunk_frozen):
            hidden, index = self._hidden(tokens, prompt_lengths, lengths, wanted)
        states = hidden.flatten(0, 1).index_select(0, index).float()
        found = nn.functional.linear(states, self.head.weight, self.head.bias)[:, 0]
        of_tokens, of_ends = found.split([len(rows), len(live)])
        return Values(
            values=torch.zeros(mask.shape, device=mask.device).index_put((rows, columns), of_tokens),
            bootstrap=torch.zeros(len(mask), device=mask.device).index_put((live,), of_ends),
            computed=hidden.shape[0] * hidden.shape[1],
        )

    def lies_in_line(self, longest: int) -> bool:
        """Whether rows of at most ``longest`` tokens that share prompts are computed one behind another."""
        return self._body.lies_in_line(longest)

    def shares_beginnings(self) -> bool:
        """Whether what all prompts of such a row begin with is computed once."""
        return self._body.shares_beginnings()

    def _hidden(
        self, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, wanted: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states Float[N L d], and where in their flattened rows each wanted one is."""
        packed = self._body.pack(tokens, prompt_lengths, lengths) if self.shares_prompts else None
        if packed is None:
            hidden, (rows, positions) = self._body.plain(tokens), wanted
            return hidden, rows * hidden.shape[1] + positions
        return self._body.packed(packed, tokens.device), packed.index(*wanted)
