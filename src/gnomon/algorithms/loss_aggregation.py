"""What the loss is divided by: a mask of the whole minibatch to a weight for each token.

Weights are computed once, before the minibatch is cut, so that every cut of it adds up to the same loss.
Counts are never below 1, and a response without trained tokens is no response.
"""

from dataclasses import dataclass
from typing import Literal

from gnomon.core.errors import bounded
from gnomon.core.optional import Tensor, torch

__all__ = ["ConstantLength", "SequenceMean", "SequenceSum", "TokenMean"]


@dataclass(frozen=True)
class TokenMean:
    """Every token counts the same: 1 / N, with N the trained tokens. Long responses count for more.

    Attributes:
        scope: "step" counts over the whole minibatch (libraries); "group" over one prompt's responses, and then every
            prompt counts the same (the formula that DAPO prints).

    Source: DAPO, arXiv 2503.14476.

    >>> TokenMean()(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1])).tolist()
    [[0.3333333333333333, 0.3333333333333333], [0.3333333333333333, 0.0]]
    """

    scope: Literal["step", "group"] = "step"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return weights Float64[B T]."""
        if self.scope == "step":
            return mask.double() / max(int(mask.sum()), 1)
        # Group ids of a minibatch may have gaps, since rows were drawn from the whole batch.
        index = torch.unique(group, return_inverse=True)[1]
        lengths = mask.sum(1).double()
        count = int(index.max()) + 1 if len(index) else 0
        tokens = torch.zeros(count, dtype=torch.float64, device=mask.device).index_add(0, index, lengths)
        groups = max(int((tokens > 0).sum()), 1)
        # Groups without a trained token are no groups; the clamp keeps their unused quotient finite.
        return mask.double() / (groups * tokens.clamp(min=1)[index])[:, None]


@dataclass(frozen=True)
class SequenceMean:
    """Every response counts the same: 1 / (B L), with L its own trained tokens.

    Source: GRPO, arXiv 2402.03300.

    >>> SequenceMean()(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return weights Float64[B T]."""
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return mask.double() / (_sequences(mask) * lengths)


@dataclass(frozen=True)
class SequenceSum:
    """Every response's sum over tokens counts: 1 / B, the policy gradient as it is derived."""

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return weights Float64[B T]."""
        return mask.double() / _sequences(mask)


@dataclass(frozen=True)
@bounded(length="at least 1 token")
class ConstantLength:
    """Every token counts 1 / (B length), a constant: a response's length does not change its push.

    Attributes:
        length: > 0, tokens; the completion budget. A constant by name, for a width taken from the batch changes with
            padding.

    Source: Dr. GRPO, arXiv 2503.20783 (budget 3000).
    """

    length: int = 3000

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """Return weights Float64[B T]."""
        return mask.double() / (_sequences(mask) * self.length)


def _sequences(mask: Tensor) -> int:
    return max(int(mask.any(1).sum()), 1)
