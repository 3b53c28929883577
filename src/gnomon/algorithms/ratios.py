"""Importance ratios of the current policy, in logarithms."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnomon.core.errors import ConfigError, check_bounds, unknown
from gnomon.core.metrics import EffectiveSize, Mean


def fraction(condition: Tensor, mask: Tensor) -> Mean:
    """Return the fraction of trained tokens for which ``condition`` Bool[B T] holds."""
    return Mean(float((condition & mask).sum()), float(mask.sum()))


def average(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of ``values`` Float[B T] over trained tokens."""
    return Mean(float(masked(values.detach(), mask).sum()), float(mask.sum()))


@dataclass(frozen=True)
class Statistics:
    """Effective sizes of the current policy's ratios, over all trained tokens of an optimizer step.

    Both are kept as sums, so the sizes of cuts and ranks add up.

    Attributes:
        behavior: Effective size of current / behavior.
        proximal: Effective size of current / proximal.
        sums: Sums over trained tokens of the terms that pieces ask for by name (`SummedTerms`), name and sum.
    """

    behavior: EffectiveSize = EffectiveSize()
    proximal: EffectiveSize = EffectiveSize()
    sums: tuple[tuple[str, float], ...] = ()

    def __add__(self, other: "Statistics") -> "Statistics":
        mine, theirs = dict(self.sums), dict(other.sums)
        both = {name: mine.get(name, 0.0) + theirs.get(name, 0.0) for name in {**mine, **theirs}}
        return Statistics(self.behavior + other.behavior, self.proximal + other.proximal, tuple(both.items()))

    def total(self, name: str) -> float:
        """Return the sum of a term over the trained tokens of the algorithm's scope.

        Raises:
            ConfigError: No piece asks for a term of that name.
        """
        sums = dict(self.sums)
        if name not in sums:
            raise ConfigError(unknown("sum", name, sums) + "; a piece asks for it by `terms`")
        return sums[name]

    def mean(self, name: str) -> float:
        """Return the mean of a term over these tokens, 0 where there are none.

        Raises:
            ConfigError: As `total`.
        """
        return self.total(name) / self.behavior.count if self.behavior.count else 0.0


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` with exact zeros where ``mask`` is false, whatever stood there (inf, nan)."""
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype))


@dataclass(frozen=True)
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

    def __post_init__(self) -> None:
        check_bounds("Ratio", self, clamp=(self.clamp > 0, "> 0"))

    def __call__(self, current: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        """Return Float[B T], 0 where masked."""
        token = masked(current - anchor, mask)
        if self.level == "token":
            return token.clamp(-self.clamp, self.clamp)
        total = token.sum(1, keepdim=True)
        if self.level != "sequence_product":
            total = total / mask.sum(1, keepdim=True).clamp(min=1)
        is_free = total.detach().abs() <= self.clamp
        total = total.clamp(-self.clamp, self.clamp)
        if self.level == "sequence_token":
            own = masked(current, mask & is_free)
            total = total.detach() + own - own.detach()
        return masked(total.expand_as(token), mask)
