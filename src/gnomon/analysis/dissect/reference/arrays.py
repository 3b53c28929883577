"""Inputs and outputs of an oracle: numpy arrays, and the responses cut out of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

CLAMP = 20.0
"""Largest absolute log-ratio before exp; beyond this bound the ratio is constant (section 0.1)."""


@dataclass(frozen=True)
class Step:
    """One optimizer step as plain arrays: rows are sequences, columns are positions of the response, padded right.

    Attributes:
        rewards, group, graded, truncated, baseline: [B]. A response with ``graded`` false has no trained token.
        mask, current, behavior, proximal, reference, values: [B, T], natural logarithms for policies. Masked positions
            may
            hold anything, also nan.
    """

    rewards: Vector
    mask: Flags
    group: npt.NDArray[np.int64]
    graded: Flags
    truncated: Flags
    current: Vector
    behavior: Vector
    proximal: Vector
    reference: Vector | None = None
    values: Vector | None = None
    baseline: Vector | None = None

    def responses(self) -> list["Response"]:
        """Return each row's trained tokens in order."""
        return [self._response(row) for row in range(len(self.rewards))]

    def scatter(self, rows: list[Vector]) -> Vector:
        """Return [B, T] with each response's numbers at its trained positions, 0 elsewhere."""
        whole = np.zeros(self.mask.shape)
        for row, numbers in enumerate(rows):
            whole[row, self.mask[row]] = numbers
        return whole

    def _response(self, row: int) -> "Response":
        def cut(matrix: Any) -> Vector:
            return np.asarray(matrix[row][self.mask[row]], dtype=np.float64)

        return Response(
            reward=float(self.rewards[row]),
            group=int(self.group[row]),
            is_graded=bool(self.graded[row]),
            current=cut(self.current),
            behavior=cut(self.behavior),
            proximal=cut(self.proximal),
            reference=None if self.reference is None else cut(self.reference),
            values=None if self.values is None else cut(self.values),
            baseline=None if self.baseline is None else float(self.baseline[row]),
        )


@dataclass(frozen=True)
class Response:
    """One response: its reward, and the log-probabilities of its trained tokens under four policies, [L] each."""

    reward: float
    group: int
    is_graded: bool
    current: Vector
    behavior: Vector
    proximal: Vector
    reference: Vector | None
    values: Vector | None
    baseline: float | None

    def __len__(self) -> int:
        return len(self.current)

    @property
    def penalty(self) -> Vector:
        """Log proximal - log reference of each token (k1, as it enters a reward)."""
        assert self.reference is not None, "this oracle needs the reference"
        return self.proximal - self.reference


@dataclass(frozen=True)
class ReferenceAnswer:
    """An oracle's result for a step.

    Attributes:
        advantages: [B, T], 0 where masked.
        loss: With regularizers, without the value loss.
        value_loss: None without a critic.
        gradient: d loss / d current [B, T], 0 where masked.
        clipped_fraction: Of the trained tokens.
        out_of_band_fraction: Of the trained tokens.
        ess_fraction: Effective sample size of current / behavior.
    """

    advantages: Vector
    loss: float
    policy_loss: float
    value_loss: float | None
    gradient: Vector
    clipped_fraction: float
    out_of_band_fraction: float
    ess_fraction: float


def ratio(log_ratio: Vector) -> Vector:
    """Return exp of the log-ratio, bounded to [exp(-20), exp(20)]."""
    return np.asarray(np.exp(np.clip(log_ratio, -CLAMP, CLAMP)))


def is_free(log_ratio: Vector) -> Flags:
    """Return where the bound of `ratio` does not act; elsewhere the ratio is constant and has slope 0."""
    return np.asarray(np.abs(log_ratio) <= CLAMP)
