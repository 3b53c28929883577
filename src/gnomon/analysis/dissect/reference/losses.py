"""From ratio and advantage to loss and slope of one response, by sections 2 to 5, 8, 9 and 12.

A push gives for each trained token its loss, and the slope of the *sum* of the response's token losses in the token's
log-probability. With c as in section 0.4 the slope is -c.
"""

import math
from collections.abc import Callable, Sequence
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
    """What is known of the whole step: effective sizes of current / behavior and current / proximal, and all of it."""

    behavior: float
    proximal: float
    responses: Sequence[Response] = ()
    advantages: Sequence[Vector] = ()


Pusher = Callable[[Response, Vector, BoundedRatio], Push]
Factors = Callable[[Sequence[Response], list[Vector]], list[Vector]]
"""Responses and their advantages to a constant for each token, by which its loss is multiplied."""


def clip(low: float, high: float, cap: float | None = None, dual: float = np.inf) -> Pusher:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), c = r A unless the clipped branch wins (sections 2.1, 2.4).

    With ``cap``, everything is multiplied by min(proximal / behavior, cap): decoupled PPO (section 9; D25). Where
    A < 0 the loss is at most -A dual.
    """

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        shift = response.current - response.proximal
        r = ratio(shift)
        stopped = ((advantage > 0) & (r > 1 + high)) | ((advantage < 0) & (r < 1 - low))
        bounded = np.where(advantage > 0, np.minimum(r, 1 + high), np.clip(r, 1 - low, dual))
        weight = np.ones(len(r))
        if cap is not None:
            weight = np.minimum(ratio(response.proximal - response.behavior), cap)
        is_beyond = (advantage < 0) & (r > dual)
        slope = np.where(stopped | is_beyond | ~is_free(shift), 0.0, -r * advantage)
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


def from_behavior(response: Response) -> Vector:
    """Log current - log behavior, for losses whose ratio is to what sampled."""
    return response.current - response.behavior


def policy_gradient(cap: float = np.inf) -> Pusher:
    """-sg[min(rho, cap)] A log current, rho = current / behavior; without a cap, c = rho A (IPO, DPPO)."""
    return _score(from_behavior, lambda trusted: cap)


def bounded_cap(both: bool = False) -> Pusher:
    """-sg[min(rho, e)] A log current, rho = current / behavior, e the step's effective size (section 5.1).

    With ``both``, e is the smaller of the effective sizes of current / behavior and current / proximal (section 5.9).
    """

    def bound(trusted: BoundedRatio) -> float:
        return min(trusted.behavior, trusted.proximal) if both else trusted.behavior

    return _score(from_behavior, bound)


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


def gamma_kernel(positive: tuple[float, float], negative: tuple[float, float]) -> Pusher:
    """-sg[phi] A log current, phi = W^k exp(lam (1 - W)), W the product of current / behavior of all tokens (VESPO).

    Args:
        positive: k and lam for A >= 0.
        negative: k and lam for A < 0.
    """

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        w = np.ones(len(response)) * ratio(np.sum(from_behavior(response), keepdims=True))
        k, lam = (np.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
        phi = np.exp(lam - lam * w + k * np.log(w))
        changed = np.abs(phi - w) > 1e-6 * np.minimum(phi, w)
        return Push(-phi * advantage * response.current, -phi * advantage, changed, changed)

    return push


def quadratic_penalty(epsilon: float) -> Pusher:
    """-A r + |A| (r - 1)^2 / (2 epsilon); c = r (A - |A| (r - 1) / epsilon) (CFPO)."""

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        shift = response.current - response.proximal
        r, size = ratio(shift), np.abs(advantage)
        slope = np.where(is_free(shift), r * (size * (r - 1) / epsilon - advantage), 0.0)
        never = np.zeros(len(r), dtype=bool)
        return Push(size * (r - 1) ** 2 / (2 * epsilon) - advantage * r, slope, never, np.abs(r - 1) > epsilon)

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


def within(low: float, high: float) -> Factors:
    """Return w = proximal / behavior where low <= w <= high, else 0 (IcePop)."""

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        weights = [ratio(r.proximal - r.behavior) for r in responses]
        return [np.where((w >= low) & (w <= high), w, 0.0) for w in weights]

    return factors


def close_in_tv(delta: float, outward: bool = False) -> Factors:
    """1 where |q - p| <= delta, p and q the probabilities under behavior and current, else 0 (IPO).

    With ``outward`` also 1 where the advantage pulls q back towards p (DPPO).
    """

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        kept = []
        for response, advantage in zip(responses, advantages, strict=True):
            gap = np.exp(response.current) - np.exp(response.behavior)
            far = np.where(advantage > 0, gap > delta, gap < -delta) if outward else np.abs(gap) > delta
            kept.append(np.where(far, 0.0, 1.0))
        return kept

    return factors


def close_in_kl(delta: float, mean: bool = False) -> Factors:
    """1 where p log(p / q) + (1 - p) log((1 - p) / (1 - q)) <= delta or q is pulled back, else 0 (DPPO).

    With ``mean``, 1 for a whole response whose mean is at most delta, on either side (FlashREINFORCE).
    """

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        kept = []
        for response, advantage in zip(responses, advantages, strict=True):
            p, q = (np.minimum(policy, -1e-12) for policy in (response.behavior, response.current))
            rest = np.log(-np.expm1(p)) - np.log(-np.expm1(q))
            divergence = np.exp(p) * (p - q) - np.expm1(p) * rest
            moved = response.current - response.behavior
            is_back = np.where(advantage > 0, moved <= 0, moved >= 0)
            near = (divergence <= delta) | is_back
            if mean:
                near = np.full(len(response), len(response) == 0 or np.mean(divergence) <= delta)
            kept.append(np.where(near, 1.0, 0.0))
        return kept

    return factors


def highest(share: float, rows: list[Vector]) -> tuple[float, float]:
    """The smallest of the ``share`` of highest numbers, at least one of them, and the largest of the others."""
    ordered = np.sort(np.concatenate([np.zeros(0), *rows]))[::-1]
    count = max(int(share * len(ordered)), 1)
    smallest = float(ordered[count - 1]) if len(ordered) else math.inf
    return smallest, float(ordered[count]) if count < len(ordered) else -math.inf


def most_undecided(share: float) -> Factors:
    """1 for the share of all tokens with the highest -log current, else 0 (80/20; a batch has no distribution)."""

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        smallest, _ = highest(share, [-r.current for r in responses])
        return [np.where(-r.current >= smallest, 1.0, 0.0) for r in responses]

    return factors


def small_second_moment(budget: float) -> Factors:
    """0 for the largest d^2 of tokens with A d > 0, d = log(current / behavior), until the rest's mean is small."""

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        shifts = [from_behavior(r) for r in responses]
        outward = [np.where(a * d > 0, d**2, -1.0) for a, d in zip(advantages, shifts, strict=True)]
        left = sorted(float(x) for row in outward for x in row if x >= 0)
        while left and sum(left) / len(left) > budget:
            left.pop()
        edge = left[-1] if left else 0.0
        return [np.where(row > edge, 0.0, 1.0) for row in outward]

    return factors


def without_covariant(share: float, low: float, high: float) -> Factors:
    """0 for the share of all tokens with the smallest `hashed` among covariances in between (Clip-Cov)."""

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        inside = [(c > low) & (c < high) for c in covariances(responses, advantages)]
        draws = [hashed(r.behavior) for r in responses]
        drawn = sorted(float(x) for row, i in zip(draws, inside, strict=True) for x in row[i])
        count = max(int(share * sum(map(len, draws))), 1)
        edge = drawn[min(count, len(drawn)) - 1] if drawn else -1.0
        return [np.where(i & (row <= edge), 0.0, 1.0) for row, i in zip(draws, inside, strict=True)]

    return factors


def future_influence(half_life: float, low: float, high: float, outlier: float) -> Factors:
    """exp(sum over k >= t of 2^(-(k - t) / half_life) d_k) within [low, high]; d is 0 above log outlier (FIPO)."""

    def factors(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
        found = []
        for response in responses:
            shift = np.clip(response.current - response.proximal, -20, 20)
            kept = np.where(shift > math.log(outlier), 0.0, shift)
            sums = [math.fsum(2 ** (-k / half_life) * x for k, x in enumerate(kept[t:])) for t in range(len(response))]
            found.append(np.clip(np.exp(np.clip(sums, -50, 50)), low, high))
        return found

    return factors


def covariances(responses: Sequence[Response], advantages: list[Vector]) -> list[Vector]:
    """(A - mean A) (log current - mean log current), means over all tokens."""
    tokens = max(sum(map(len, responses)), 1)
    mean_a = math.fsum(float(x) for a in advantages for x in a) / tokens
    mean_logprob = math.fsum(float(x) for r in responses for x in r.current) / tokens
    return [(a - mean_a) * (r.current - mean_logprob) for a, r in zip(advantages, responses, strict=True)]


def hashed(logprobs: Vector) -> Vector:
    """A number in [0, 1) of each token, by splitmix64 of the bits of its log-probability and its place, from 1."""
    with np.errstate(over="ignore"):
        place = np.arange(1, len(logprobs) + 1, dtype=np.uint64)
        x = np.ascontiguousarray(logprobs).view(np.uint64) + place * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.asarray((x >> np.uint64(11)).astype(np.float64) / 2.0**53)


def balanced_clip(share: float, low: tuple[float, float], high: tuple[float, float], step: float) -> Pusher:
    """Clip with the first band, low and then high raised by ``step``, that gives positive tokens their share."""

    def push(response: Response, advantage: Vector, trusted: BoundedRatio) -> Push:
        a = np.concatenate([np.zeros(0), *trusted.advantages])
        r = np.concatenate([np.zeros(0), *(ratio(one.current - one.proximal) for one in trusted.responses)])
        bottom, top = low[0], high[0]
        while bottom < low[1] or top < high[1]:
            gain = np.sum((a * np.minimum(r, top))[a > 0])
            loss = -np.sum((a * np.maximum(r, bottom))[a < 0])
            if gain >= share * (gain + loss):
                break
            if bottom < low[1]:
                bottom = min(bottom + step, low[1])
            else:
                top = min(top + step, high[1])
        return clip(1 - bottom, top - 1)(response, advantage, trusted)

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
