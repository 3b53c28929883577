"""Importance ratios of the current policy, in logarithms."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gnomon.core.errors import ConfigError, bounded, unknown
from gnomon.core.metrics import EffectiveSize, Mean
from gnomon.core.optional import Tensor, torch


def fraction(condition: Tensor, mask: Tensor) -> Mean:
    """Return the fraction of trained tokens for which ``condition`` Bool[B T] holds."""
    return Mean(float((condition & mask).sum()), float(mask.sum()))


def average(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of ``values`` Float[B T] over trained tokens."""
    return Mean(float(masked(values.detach(), mask).sum()), float(mask.sum()))


@dataclass(frozen=True)
class Statistics:
    """Effective sizes of the current policy's ratios, and numbers of pieces' own, over all trained tokens of a step.

    Sizes are kept as sums and terms token by token, so that those of cuts and ranks add up: whatever is made of them is
    the same however the step is cut.

    Attributes:
        behavior: Effective size of current / behavior.
        proximal: Effective size of current / proximal.
        terms: What pieces ask for by name (`SummedTerms`): name and Float64[N], in one order of tokens for all names.
    """

    behavior: EffectiveSize = EffectiveSize()
    proximal: EffectiveSize = EffectiveSize()
    terms: tuple[tuple[str, Tensor], ...] = field(default=(), compare=False)

    def __add__(self, other: "Statistics") -> "Statistics":
        mine, theirs = dict(self.terms), dict(other.terms)
        # A cut in which a piece had no tokens contributes nothing to its term.
        nothing = torch.zeros(0, dtype=torch.float64)
        both = {n: torch.cat([mine.get(n, nothing), theirs.get(n, nothing)]) for n in {**mine, **theirs}}
        return Statistics(self.behavior + other.behavior, self.proximal + other.proximal, tuple(both.items()))

    def values(self, name: str) -> Tensor:
        """Return a term of each trained token of the algorithm's scope, Float64[N], in one order for all names.

        Raises:
            ConfigError: No piece asks for a term of that name.
        """
        terms = dict(self.terms)
        if name not in terms:
            raise ConfigError(unknown("term", name, terms) + "; a piece asks for it by `terms`")
        return terms[name]

    def total(self, name: str) -> float:
        """Return the sum of a term over these tokens.

        Raises:
            ConfigError: As `values`.
        """
        return float(self.values(name).sum())

    def mean(self, name: str) -> float:
        """Return the mean of a term over these tokens, 0 where there are none.

        Raises:
            ConfigError: As `values`.
        """
        return self.total(name) / max(len(self.values(name)), 1)


def threshold(values: Tensor, count: int) -> float:
    """Return a number that the ``count`` smallest of ``values`` Float[N] are below: halfway to the next one.

    Halfway, so that rounding does not decide: a micro-batch computes its numbers in another order of operations than
    the pass that found the threshold. Of equal numbers there none is above it. -inf for no number, inf for all.

    >>> threshold(torch.tensor([3.0, 1.0, 2.0]), 2), threshold(torch.tensor([3.0, 1.0, 2.0]), 3)
    (2.5, inf)
    """
    if count <= 0 or count >= len(values):
        return -math.inf if count <= 0 else math.inf
    ordered = values.double().sort().values
    return float((ordered[count - 1] + ordered[count]) / 2)


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` with exact zeros where ``mask`` is false, whatever stood there (inf, nan)."""
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype))


@dataclass(frozen=True)
@bounded(clamp="> 0")
class Ratio:
    """The logarithm of current over anchor, per token or per sequence.

    Attributes:
        anchor: "proximal" (the learner when the step began), "behavior" (what sampled) or "reference" (frozen).
        level: "token"; "sequence", the geometric mean over the trained tokens, the same for each of them, with its
            gradient (GSPO, arXiv 2507.18071, eq. 7); "sequence_token", that value but with the token's own gradient
            (GSPO-token, eq. 14); "sequence_product", the sum over tokens (RLOO's sequence objective).
        clamp: Bound on the absolute log-ratio that is exponentiated; beyond it there is no gradient.
    """

    anchor: Literal["proximal", "behavior", "reference"] = "proximal"
    level: Literal["token", "sequence", "sequence_token", "sequence_product"] = "token"
    clamp: float = 20.0

    def __call__(self, current: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        """Return Float[B T], 0 where masked."""
        token = masked(current - anchor, mask)
        if self.level == "token":
            return token.clamp(-self.clamp, self.clamp)
        # (rows, 1): one number a response.
        total = token.sum(1, keepdim=True)
        if self.level != "sequence_product":
            total = total / mask.sum(1, keepdim=True).clamp(min=1)
        # Beyond the clamp a response has no gradient, in any of the three forms.
        is_free = total.detach().abs() <= self.clamp
        total = total.clamp(-self.clamp, self.clamp)
        if self.level == "sequence_token":
            own = masked(current, mask & is_free)
            # The response's value with each token's own gradient (GSPO-token, eq. 14).
            total = total.detach() + own - own.detach()
        return masked(total.expand_as(token), mask)
