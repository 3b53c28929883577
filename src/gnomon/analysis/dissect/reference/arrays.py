"""Inputs and outputs of an oracle: numpy arrays, and the responses cut out of them."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

CLAMP = 20.0
"""Largest absolute log-ratio before exp; beyond this bound the ratio is constant (section 0.1)."""


@dataclass(frozen=True)
class Step:
    """One optimizer step as plain arrays: rows are sequences, columns are positions of the response, padded right.

    Attributes:
        rewards, group, graded, truncated, baseline: [B]. A response with ``graded`` false has no trained token, unless
            labels are learned: then its tokens measure the KL.
        given: [B], responses that nobody sampled; None: all were sampled.
        rollout: [B]; rows of one number are the segments of one response, in order. None: each row is one.
        components: [B, C], each reward by itself, with ``component_weights``.
        turn, state, steps: [B, T], the answer that a token belongs to, its state, and the reward earned there.
        mask, current, behavior, proximal, sharpened, reference, values: [B, T], natural logarithms for policies. Masked
            positions may hold anything, also nan.
    """

    rewards: Vector
    mask: Flags
    group: npt.NDArray[np.int64]
    graded: Flags
    truncated: Flags
    current: Vector
    behavior: Vector
    proximal: Vector
    sharpened: Vector | None = None
    reference: Vector | None = None
    values: Vector | None = None
    baseline: Vector | None = None
    rollout: npt.NDArray[np.int64] | None = None
    components: Vector | None = None
    component_weights: tuple[float, ...] = ()
    turn: npt.NDArray[np.int64] | None = None
    state: npt.NDArray[np.int64] | None = None
    steps: Vector | None = None
    given: Flags | None = None

    def responses(self) -> list["Response"]:
        """Return each rollout's trained tokens in order, through all of its rows."""
        return [self._response(rows) for rows in self._rows()]

    def scatter(self, responses: list[Vector]) -> Vector:
        """Return [B, T] with each response's numbers at its trained positions, 0 elsewhere."""
        whole = np.zeros(self.mask.shape)
        for rows, numbers in zip(self._rows(), responses, strict=True):
            # The response's numbers run through its rows in order: each row takes as many as it has trained tokens.
            for row in rows:
                whole[row, self.mask[row]], numbers = np.split(numbers, [int(self.mask[row].sum())])
        return whole

    def _rows(self) -> list[list[int]]:
        """Return the rows of each rollout."""
        numbers = range(len(self.rewards)) if self.rollout is None else self.rollout.tolist()
        found: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            found.setdefault(number, []).append(row)
        return list(found.values())

    def _response(self, rows: list[int]) -> "Response":
        row = rows[0]

        # Only trained tokens are kept, [L]; what is masked cannot enter any formula after this line.
        matrices = {name: matrix for name in _OF_TOKENS if (matrix := getattr(self, name)) is not None}
        cut: dict[str, Any] = {n: np.concatenate([m[i][self.mask[i]] for i in rows]) for n, m in matrices.items()}
        return Response(
            reward=float(self.rewards[row]),
            group=int(self.group[row]),
            is_graded=bool(self.graded[row]),
            is_given=self.given is not None and bool(self.given[row]),
            baseline=None if self.baseline is None else float(self.baseline[row]),
            components=None if self.components is None else self.components[row],
            component_weights=self.component_weights,
            **cut,
        )


_OF_TOKENS = ("current", "behavior", "proximal", "sharpened", "reference", "values", "turn", "state", "steps")


@dataclass(frozen=True)
class Response:
    """One response: its reward, and the log-probabilities of its trained tokens under four policies, [L] each."""

    reward: float
    group: int
    is_graded: bool
    current: Vector
    behavior: Vector
    proximal: Vector
    sharpened: Vector | None = None
    reference: Vector | None = None
    values: Vector | None = None
    baseline: float | None = None
    components: Vector | None = None
    component_weights: tuple[float, ...] = ()
    turn: npt.NDArray[np.int64] | None = None
    state: npt.NDArray[np.int64] | None = None
    steps: Vector | None = None
    is_given: bool = False

    @property
    def earned(self) -> Vector:
        """The reward of each token; all of it on the last one where nothing else is known."""
        if self.steps is not None:
            return self.steps
        # [L]; a response without trained tokens has nowhere to earn it.
        return np.append(np.zeros(max(len(self) - 1, 0)), self.reward)[: len(self)]

    def answers(self) -> list[Any]:
        """Return the positions of the tokens of each answer; all of them where no turns are known."""
        if self.turn is None:
            return [np.arange(len(self))] if len(self) else []
        return [np.flatnonzero(self.turn == number) for number in dict.fromkeys(self.turn.tolist())]

    def __len__(self) -> int:
        return len(self.current)

    @property
    def penalty(self) -> Vector:
        """Log proximal - log reference of each token (k1, as it enters a reward)."""
        return self.proximal - known(self.reference, "the reference")


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


def known(found: T | None, what: str) -> T:
    """Return what an oracle reads of a batch, which has to hold it."""
    assert found is not None, f"this oracle needs {what}"
    return found


def ratio(log_ratio: Vector) -> Vector:
    """Return exp of the log-ratio, bounded to [exp(-20), exp(20)]."""
    return np.asarray(np.exp(np.clip(log_ratio, -CLAMP, CLAMP)))


def is_free(log_ratio: Vector) -> Flags:
    """Return where the bound of `ratio` does not act; elsewhere the ratio is constant and has slope 0."""
    return np.asarray(np.abs(log_ratio) <= CLAMP)
