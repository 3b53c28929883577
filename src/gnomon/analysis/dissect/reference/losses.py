"""From ratio and advantage to loss and slope of one response, by sections 2 to 5, 8, 9 and 12.

A push gives for each trained token its loss, and the slope of the *sum* of the response's token losses in the token's
log-probability. With c as in section 0.4 the slope is -c.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gnomon.analysis.dissect.reference.arrays import Flags, Response, Vector, is_free, ratio


@dataclass(frozen=True)
class Push:
    """Loss and slope of each token, the tokens that a bound changed (strictly), and the tokens outside the bound."""

    loss: Vector
    slope: Vector
    is_clipped: Flags
    is_out: Flags


@dataclass(frozen=True)
class BoundedRatio:
    """Effective sample sizes of the whole step: of current / behavior, and of current / proximal."""

    behavior: float
    proximal: float


Pusher = Callable[[Response, Vector, BoundedRatio], Push]


def clip(low: float, high: float, cap: float | None = None) -> Pusher:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), c = r A unless the clipped branch wins (sections 2.1, 2.4).

    With ``cap``, everything is multiplied by min(proximal / behavior, cap): decoupled PPO (section 9; D25).
    """

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        shift = response.current - response.proximal
        r = ratio(shift)
        stopped = ((advantage > 0) & (r > 1 + high)) | ((advantage < 0) & (r < 1 - low))
        bounded = np.where(advantage > 0, np.minimum(r, 1 + high), np.maximum(r, 1 - low))
        weight = np.ones(len(r))
        if cap is not None:
            weight = np.minimum(ratio(response.proximal - response.behavior), cap)
        slope = np.where(stopped | ~is_free(shift), 0.0, -r * advantage)
        return Push(-advantage * bounded * weight, slope * weight, stopped, (r > 1 + high) | (r < 1 - low))

    return push


def sequence_clip(low: float, high: float) -> Pusher:
    """The same on s = exp(mean log-ratio): each token's slope is -s A, or 0 in a clipped response (section 3)."""

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        mean = np.full(len(response), np.mean(response.current - response.proximal) if len(response) else 0.0)
        s = ratio(mean)
        stopped = ((advantage > 0) & (s > 1 + high)) | ((advantage < 0) & (s < 1 - low))
        bounded = np.where(advantage > 0, np.minimum(s, 1 + high), np.maximum(s, 1 - low))
        slope = np.where(stopped | ~is_free(mean), 0.0, -s * advantage)
        return Push(-advantage * bounded, slope, stopped, (s > 1 + high) | (s < 1 - low))

    return push


def capped(cap: float) -> Pusher:
    """-sg[min(r, cap)] A log current, c = min(r, cap) A; cap inf is the plain policy gradient (section 4)."""
    return _score(lambda response: response.current - response.proximal, lambda trusted: cap)


def bounded_cap(both: bool = False) -> Pusher:
    """-sg[min(rho, e)] A log current, rho = current / behavior, e the step's effective size (section 5.1).

    With ``both``, e is the smaller of the effective sizes of current / behavior and current / proximal (section 5.9).
    """

    def bound(trusted: BoundedRatio) -> float:
        return min(trusted.behavior, trusted.proximal) if both else trusted.behavior

    return _score(lambda response: response.current - response.behavior, bound)


def soft_gate(positive: float, negative: float) -> Pusher:
    """-(4 / tau) s A, s = sigmoid(tau (r - 1)); c = 4 s (1 - s) r A (section 12.1)."""

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        shift = response.current - response.proximal
        r, tau = ratio(shift), np.where(advantage > 0, positive, negative)
        # 1 - s has its own formula, because for a large ratio s rounds to 1.
        s, rest = _sigmoid(tau * (r - 1)), _sigmoid(-tau * (r - 1))
        slope = np.where(is_free(shift), -4 * s * rest * r * advantage, 0.0)
        never = np.zeros(len(r), dtype=bool)
        return Push(-4 / tau * s * advantage, slope, never, never)

    return push


def geometric_clip(epsilon: float) -> Pusher:
    """-A exp(mean of d), d at most epsilon for A > 0, at least -epsilon for A < 0, before the mean (section 12.2)."""

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        shift = response.current - response.proximal
        above, below = (advantage > 0) & (shift > epsilon), (advantage < 0) & (shift < -epsilon)
        d = np.where(above, epsilon, np.where(below, -epsilon, np.clip(shift, -20, 20)))
        mean = np.exp(np.mean(d)) if len(d) else 1.0
        slope = np.where(above | below | ~is_free(shift), 0.0, -advantage * mean)
        return Push(-advantage * mean, slope, above | below, np.abs(shift) > epsilon)

    return push


def regression(beta: float) -> Pusher:
    """(beta sum log(current / reference) - A)^2 a response; every token's slope is 2 beta (...) (section 8.4).

    Each token carries the response's loss, so that the mean over its tokens is the response's loss.
    """

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        assert response.reference is not None, "this oracle needs the reference"
        miss = beta * float(np.sum(response.current - response.reference)) - advantage
        never = np.zeros(len(response), dtype=bool)
        return Push(miss**2, 2 * beta * miss * len(response), never, never)

    return push


def _score(shift: Callable[[Response], Vector], bound: Callable[[BoundedRatio], float]) -> Pusher:
    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        r = ratio(shift(response))
        weight = np.minimum(r, bound(trusted))
        changed = r > bound(trusted) * (1 + 1e-6)  # a smaller change is float32's rounding of log-probabilities
        return Push(-weight * advantage * response.current, -weight * advantage, changed, changed)

    return push


def _sigmoid(x: Vector) -> Vector:
    """Return 1 / (1 + exp(-x)) without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + small), small / (1 + small)))
