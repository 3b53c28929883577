"""From ratio and advantage to loss and slope of one response, by sections 0 to 9 and 12, and the table of presets.

A push gives for each trained token its loss, and the slope of the *sum* of the response's token losses in the token's
log-probability. With c as in section 0.4 the slope is -c.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gnomon.analysis.dissect.reference.advantages import (
    Credit,
    accepted,
    added,
    batch_mean,
    by_state,
    fixed,
    gae,
    group_mean,
    lead_over_second,
    leave_one_out,
    length_adaptive,
    length_sigmoid,
    length_weighted,
    of_least_variance,
    over_batch,
    over_mean,
    over_optimum,
    per_reward,
    returns,
    teacher_gap,
    tracked,
    whitened,
)
from gnomon.analysis.dissect.reference.arrays import (
    Flags,
    ReferenceAnswer,
    Response,
    Step,
    Vector,
    is_free,
    known,
    ratio,
)


@dataclass(frozen=True)
class Push:
    """Loss and slope of each token, the tokens that a bound changed (strictly), and the tokens outside the bound."""

    loss: Vector
    slope: Vector
    is_clipped: Flags | Literal[False] = False
    is_out: Flags | Literal[False] = False


@dataclass(frozen=True)
class WholeStep:
    """What a push may read of the other responses of its step.

    Attributes:
        behavior: Effective size of current / behavior.
        proximal: Effective size of current / proximal.
    """

    behavior: float
    proximal: float
    responses: Sequence[Response] = ()
    advantages: Sequence[Vector] = ()


Pusher = Callable[[Response, Vector, WholeStep], Push]
Factors = Callable[[Sequence[Response], list[Vector]], list[Vector]]
"""Responses and their advantages to a constant for each token, by which its loss is multiplied."""


def clip(low: float, high: float, cap: float | None = None, dual: float = np.inf) -> Pusher:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), c = r A unless the clipped branch wins (sections 2.1, 2.4).

    With ``cap``, everything is multiplied by min(proximal / behavior, cap): decoupled PPO (section 9; D25). Where
    A < 0 the loss is at most -A dual.
    """

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        shift = response.current - response.proximal
        r = ratio(shift)
        # The clipped branch wins where the ratio has left the band on the side to which the advantage pushes.
        stopped = ((advantage > 0) & (r > 1 + high)) | ((advantage < 0) & (r < 1 - low))
        bounded = np.where(advantage > 0, np.minimum(r, 1 + high), np.clip(r, 1 - low, dual))
        weight = np.ones(len(r))
        if cap is not None:
            weight = np.minimum(ratio(response.proximal - response.behavior), cap)
        is_beyond = (advantage < 0) & (r > dual)
        # d(r A) / d log current = r A. It is 0 where a bound holds the value constant.
        slope = np.where(stopped | is_beyond | ~is_free(shift), 0.0, -r * advantage)
        return Push(-advantage * bounded * weight, slope * weight, stopped, (r > 1 + high) | (r < 1 - low))

    return push


def sequence_clip(low: float, high: float) -> Pusher:
    """The same on s = exp(mean log-ratio): each token's slope is -s A, or 0 in a clipped response (section 3)."""

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        mean = np.full(len(response), np.mean(response.current - response.proximal) if len(response) else 0.0)
        s = ratio(mean)
        stopped = ((advantage > 0) & (s > 1 + high)) | ((advantage < 0) & (s < 1 - low))
        bounded = np.where(advantage > 0, np.minimum(s, 1 + high), np.maximum(s, 1 - low))
        # Each token moves the mean by 1 / L, and the sum over L equal token losses undoes it: the slope is -s A.
        slope = np.where(stopped | ~is_free(mean), 0.0, -s * advantage)
        return Push(-advantage * bounded, slope, stopped, (s > 1 + high) | (s < 1 - low))

    return push


def capped(cap: float) -> Pusher:
    """-sg[min(r, cap)] A log current, c = min(r, cap) A; cap inf is the plain policy gradient (section 4)."""
    return _score(lambda response: response.current - response.proximal, lambda whole: cap)


def from_behavior(response: Response) -> Vector:
    """Log current - log behavior, for losses whose ratio is to what sampled."""
    return response.current - response.behavior


def policy_gradient(cap: float = np.inf) -> Pusher:
    """-sg[min(rho, cap)] A log current, rho = current / behavior; without a cap, c = rho A (IPO, DPPO)."""
    return _score(from_behavior, lambda whole: cap)


def bounded_cap(both: bool = False) -> Pusher:
    """-sg[min(rho, e)] A log current, rho = current / behavior, e the step's effective size (section 5.1).

    With ``both``, e is the smaller of the effective sizes of current / behavior and current / proximal (section 5.9).
    """

    def bound(whole: WholeStep) -> float:
        return min(whole.behavior, whole.proximal) if both else whole.behavior

    return _score(from_behavior, bound)


def soft_gate(positive: float, negative: float) -> Pusher:
    """-(4 / tau) s A, s = sigmoid(tau (r - 1)); c = 4 s (1 - s) r A (section 12.1)."""

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        shift = response.current - response.proximal
        r, tau = ratio(shift), np.where(advantage > 0, positive, negative)
        # 1 - s has its own formula, because for a large ratio s rounds to 1.
        # d/d log current of (4 / tau) s A = 4 s (1 - s) r A.
        s, rest = _sigmoid(tau * (r - 1)), _sigmoid(-tau * (r - 1))
        slope = np.where(is_free(shift), -4 * s * rest * r * advantage, 0.0)
        return Push(-4 / tau * s * advantage, slope)

    return push


def gamma_kernel(positive: tuple[float, float], negative: tuple[float, float]) -> Pusher:
    """-sg[phi] A log current, phi = W^k exp(lam (1 - W)), W the product of current / behavior of all tokens (VESPO).

    Args:
        positive: k and lam for A >= 0.
        negative: k and lam for A < 0.
    """

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        w = np.ones(len(response)) * ratio(np.sum(from_behavior(response), keepdims=True))
        k, lam = (np.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
        phi = np.exp(lam - lam * w + k * np.log(w))
        changed = np.abs(phi - w) > 1e-6 * np.minimum(phi, w)
        return Push(-phi * advantage * response.current, -phi * advantage, changed, changed)

    return push


def quadratic_penalty(epsilon: float) -> Pusher:
    """-A r + |A| (r - 1)^2 / (2 epsilon); c = r (A - |A| (r - 1) / epsilon) (CFPO)."""

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        shift = response.current - response.proximal
        r, size = ratio(shift), np.abs(advantage)
        slope = np.where(is_free(shift), r * (size * (r - 1) / epsilon - advantage), 0.0)
        loss = size * (r - 1) ** 2 / (2 * epsilon) - advantage * r
        return Push(loss, slope, is_out=np.abs(r - 1) > epsilon)

    return push


def geometric_clip(epsilon: float) -> Pusher:
    """-A exp(mean of d), d at most epsilon for A > 0, at least -epsilon for A < 0, before the mean (section 12.2)."""

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        shift = response.current - response.proximal
        above, below = (advantage > 0) & (shift > epsilon), (advantage < 0) & (shift < -epsilon)
        d = np.where(above, epsilon, np.where(below, -epsilon, np.clip(shift, -20, 20)))
        # Clipped before the mean: one extreme token cannot drag the whole response (GMPO).
        mean = np.exp(np.mean(d)) if len(d) else 1.0
        slope = np.where(above | below | ~is_free(shift), 0.0, -advantage * mean)
        return Push(-advantage * mean, slope, above | below, np.abs(shift) > epsilon)

    return push


def regression(beta: float) -> Pusher:
    """(beta sum log(current / reference) - A)^2 a response; every token's slope is 2 beta (...) (section 8.4).

    Each token carries the response's loss, so that the mean over its tokens is the response's loss.
    """

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        miss = beta * float(np.sum(response.current - known(response.reference, "the reference"))) - advantage
        # The response's loss stands at each of its L tokens, so a token's log-probability moves all L of them.
        return Push(miss**2, 2 * beta * miss * len(response))

    return push


def shaped_if_given(of: Pusher, gamma: float) -> Pusher:
    """-A p / (p + gamma) with c = A gamma p / (p + gamma)^2 in given responses (LUFFY), ``of`` in others."""

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        if not response.is_given:
            return of(response, advantage, whole)
        p = np.exp(response.current)
        return Push(-advantage * p / (p + gamma), -advantage * gamma * p / (p + gamma) ** 2)

    return push


def over_reference(response: Response) -> float:
    """The sum of log current - log reference over a response's tokens."""
    return math.fsum(response.current - known(response.reference, "the reference"))


def pairwise(loss: Callable[[float], tuple[float, float]]) -> Pusher:
    """The loss of m, the log-ratio to the reference of the pair's better response less that of the other (DPO, IPO).

    Each token carries the pair's loss, and its slope is that of all tokens that do. ``loss``: value and slope in m.
    """

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        # (side, log-ratio) of the chosen and the rejected response: +1 and -1.
        both = [
            (float(np.sign(a[0])), over_reference(r))
            for r, a in zip(whole.responses, whole.advantages, strict=True)
            if r.group == response.group and len(r)
        ]
        value, slope = loss(math.fsum(side * gain for side, gain in both))
        # dm / d log current is +1 or -1 by the side; the value stands at L tokens of each of both responses.
        return Push(value * np.ones(len(response)), slope * np.sign(advantage) * len(both) * len(response))

    return push


def logistic(beta: float) -> Callable[[float], tuple[float, float]]:
    """-log sigmoid(beta m), slope -beta sigmoid(-beta m) (DPO, eq. 7)."""
    return lambda m: (float(np.logaddexp(0, -beta * m)), -beta * float(_sigmoid(np.array(-beta * m))))


def squared(beta: float) -> Callable[[float], tuple[float, float]]:
    """(m - 1 / (2 beta))^2 and its slope (IPO, eq. 17)."""
    return lambda m: ((m - 1 / (2 * beta)) ** 2, 2 * (m - 1 / (2 * beta)))


def prospect(beta: float) -> Pusher:
    """1 - sigmoid(+-beta (d - z)) of a labelled response, d its log-ratio to the reference (KTO, eq. 8).

    z = max(0, mean d of responses without a label), a constant. The mean is over labelled responses alone.
    """

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        there = [r for r in whole.responses if len(r)]
        others = [over_reference(r) for r in there if not r.is_graded]
        z = max(0.0, math.fsum(others) / max(len(others), 1))
        # The sequence mean divides by all responses, and the loss is a mean over the labelled ones.
        share = response.is_graded * len(there) / max(len(there) - len(others), 1)
        x = np.sign(advantage) * beta * (over_reference(response) - z)
        slope = -share * np.sign(advantage) * beta * _sigmoid(x) * _sigmoid(-x) * len(response)
        return Push(share * _sigmoid(-x), slope)

    return push


def by_token(factor: Callable[[Response, Vector], Vector]) -> Factors:
    """Return the factors where a response's depend on it and its advantages alone."""
    return lambda responses, advantages: [factor(r, a) for r, a in zip(responses, advantages, strict=True)]


def within(low: float, high: float) -> Factors:
    """Return w = proximal / behavior where low <= w <= high, else 0 (IcePop)."""

    def factor(response: Response, advantage: Vector) -> Vector:
        w = ratio(response.proximal - response.behavior)
        return np.where((w >= low) & (w <= high), w, 0.0)

    return by_token(factor)


def close_in_tv(delta: float, outward: bool = False) -> Factors:
    """1 where |q - p| <= delta, p and q the probabilities under behavior and current, else 0 (IPO).

    With ``outward`` also 1 where the advantage pulls q back towards p (DPPO).
    """

    def factor(response: Response, advantage: Vector) -> Vector:
        gap = np.exp(response.current) - np.exp(response.behavior)
        far = np.where(advantage > 0, gap > delta, gap < -delta) if outward else np.abs(gap) > delta
        return np.where(far, 0.0, 1.0)

    return by_token(factor)


def close_in_kl(delta: float, mean: bool = False) -> Factors:
    """1 where p log(p / q) + (1 - p) log((1 - p) / (1 - q)) <= delta or q is pulled back, else 0 (DPPO).

    With ``mean``, 1 for a whole response whose mean is at most delta, on either side (FlashREINFORCE).
    """

    def factor(response: Response, advantage: Vector) -> Vector:
        # A probability of 1 would make log(1 - p) infinite on both sides.
        p, q = (np.minimum(policy, -1e-12) for policy in (response.behavior, response.current))
        rest = np.log(-np.expm1(p)) - np.log(-np.expm1(q))
        divergence = np.exp(p) * (p - q) - np.expm1(p) * rest
        moved = response.current - response.behavior
        is_back = np.where(advantage > 0, moved <= 0, moved >= 0)
        near = (divergence <= delta) | is_back
        if mean:
            near = np.full(len(response), len(response) == 0 or np.mean(divergence) <= delta)
        return np.where(near, 1.0, 0.0)

    return by_token(factor)


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
        # Everything that is larger than the largest shift that may stay is left out.
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

    def factor(response: Response, advantage: Vector) -> Vector:
        shift = np.clip(response.current - response.proximal, -20, 20)
        kept = np.where(shift > math.log(outlier), 0.0, shift)
        sums = [math.fsum(2 ** (-k / half_life) * x for k, x in enumerate(kept[t:])) for t in range(len(response))]
        return np.asarray(np.clip(np.exp(np.clip(sums, -50, 50)), low, high))

    return by_token(factor)


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

    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        a = np.concatenate([np.zeros(0), *whole.advantages])
        r = np.concatenate([np.zeros(0), *(ratio(one.current - one.proximal) for one in whole.responses)])
        bottom, top = low[0], high[0]
        while bottom < low[1] or top < high[1]:
            gain = np.sum((a * np.minimum(r, top))[a > 0])
            loss = -np.sum((a * np.maximum(r, bottom))[a < 0])
            # The lower bound is raised first, to its limit, and then the upper one.
            if gain >= share * (gain + loss):
                break
            if bottom < low[1]:
                bottom = min(bottom + step, low[1])
            else:
                top = min(top + step, high[1])
        return clip(1 - bottom, top - 1)(response, advantage, whole)

    return push


def _score(shift: Callable[[Response], Vector], bound: Callable[[WholeStep], float]) -> Pusher:
    def push(response: Response, advantage: Vector, whole: WholeStep) -> Push:
        r = ratio(shift(response))
        weight = np.minimum(r, bound(whole))
        changed = r > bound(whole) * (1 + 1e-6)  # a smaller change is float32's rounding of log-probabilities
        return Push(-weight * advantage * response.current, -weight * advantage, changed, changed)

    return push


def _sigmoid(x: Vector) -> Vector:
    """Return 1 / (1 + exp(-x)) without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + small), small / (1 + small)))


# Means over tokens, and terms added to the policy loss, by sections 0.2, 0.3, 5 and 7.3: value and slope.

Weights = Callable[[Sequence[Response]], list[float]]
Added = tuple[float, list[Vector]]
Term = Callable[[Sequence[Response], list[float], WholeStep], Added]


def token_mean(responses: Sequence[Response]) -> list[float]:
    """1 / N for each token, N all trained tokens."""
    return [1 / max(sum(len(r) for r in responses), 1)] * len(responses)


def prompt_mean(responses: Sequence[Response]) -> list[float]:
    """1 / (P N_p), P prompts with a trained token, N_p the trained tokens of a prompt's responses (ScaleRL)."""
    tokens: dict[int, int] = {}
    for r in responses:
        tokens[r.group] = tokens.get(r.group, 0) + len(r)
    count = max(sum(n > 0 for n in tokens.values()), 1)
    return [1 / (count * max(tokens[r.group], 1)) for r in responses]


def sequence_mean(responses: Sequence[Response]) -> list[float]:
    """1 / (B L), B responses with a trained token, L the response's own."""
    count = max(sum(len(r) > 0 for r in responses), 1)
    return [1 / (count * max(len(r), 1)) for r in responses]


def sequence_sum(responses: Sequence[Response]) -> list[float]:
    """1 / B for each token."""
    return [1 / max(sum(len(r) > 0 for r in responses), 1)] * len(responses)


def constant_length(length: int) -> Weights:
    """1 / (B length)."""
    return lambda responses: [1 / (max(sum(len(r) > 0 for r in responses), 1) * length)] * len(responses)


def reference_k2(coefficient: float) -> Term:
    """coefficient d^2 / 2, slope coefficient d, d = log current - log reference."""

    def term(responses: Sequence[Response], weights: list[float], whole: WholeStep) -> Added:
        gaps = [r.current - known(r.reference, "the reference") for r in responses]
        return _added([coefficient * d**2 / 2 for d in gaps], [coefficient * d for d in gaps], weights)

    return term


def leash(is_mixture: bool = False, is_k3: bool = False) -> Term:
    """(1 - e) (rho d - rho + 1), slope (1 - e) rho d, for d against behavior; on policy 0 (section 0.3, D11).

    Args:
        is_mixture: Measure d against the mean of behavior and proximal, each weighted by 1 - its own effective size,
            with e the smaller of both; the value is then (1 - e) rho (exp(-d) - 1 + d) (section 5.9).
        is_k3: Use the reference code's estimator, (1 - e) (exp(-d) - 1 + d), slope (1 - e) (1 - exp(-d)).
    """

    def term(responses: Sequence[Response], weights: list[float], whole: WholeStep) -> Added:
        e = min(whole.behavior, whole.proximal) if is_mixture else whole.behavior
        values, slopes = [], []
        for response in responses:
            anchor = _mixture(response, whole) if is_mixture else response.behavior
            rho, d = ratio(response.current - response.behavior), response.current - anchor
            values.append((1 - e) * (1.0 if is_k3 else rho) * (ratio(-d) - 1 + d))
            slopes.append((1 - e) * (1 - ratio(-d) if is_k3 else rho * d))
        return _added(values, slopes, weights)

    return term


def covariance_kl(coefficient: float, share: float) -> Term:
    """coefficient |d|, d = log(current / proximal), of the share of all tokens with the highest covariance (KL-Cov)."""

    def term(responses: Sequence[Response], weights: list[float], whole: WholeStep) -> Added:
        found = covariances(responses, list(whole.advantages))
        _, edge = highest(share, found)
        gaps = [np.where(c > edge, r.current - r.proximal, 0.0) for c, r in zip(found, responses, strict=True)]
        bounded = [np.clip(d, -20, 20) for d in gaps]
        slopes = [coefficient * np.sign(d) * is_free(d) for d in gaps]
        return _added([coefficient * np.abs(d) for d in bounded], slopes, weights)

    return term


def positive_nll(coefficient: float) -> Term:
    """-coefficient log current over the tokens of responses with a reward above 0, divided by their number."""

    def term(responses: Sequence[Response], weights: list[float], whole: WholeStep) -> Added:
        is_positive = [r.is_graded and r.reward > 0 for r in responses]
        count = max(sum(len(r) for r, yes in zip(responses, is_positive, strict=True) if yes), 1)
        own = [yes / count for yes in is_positive]
        values = [-coefficient * r.current for r in responses]
        return _added(values, [np.full(len(r), -coefficient) for r in responses], own)

    return term


def given_nll(coefficient: float) -> Term:
    """-coefficient sg[exp(-H)] log current over given tokens, divided by their number (SRFT).

    H is -log current, as a batch has no distribution, so the weight is the probability.
    """

    def term(responses: Sequence[Response], weights: list[float], whole: WholeStep) -> Added:
        own = [r.is_given / max(sum(len(g) for g in responses if g.is_given), 1) for r in responses]
        slopes = [-coefficient * np.exp(r.current) for r in responses]
        return _added([s * r.current for s, r in zip(slopes, responses, strict=True)], slopes, own)

    return term


def _mixture(response: Response, whole: WholeStep) -> Vector:
    """Return log((w_b behavior + w_p proximal) / (w_b + w_p)), w = 1 - effective size; behavior when both are 0."""
    of_behavior, of_proximal = max(1 - whole.behavior, 0.0), max(1 - whole.proximal, 0.0)
    total = of_behavior + of_proximal
    if total == 0:
        return response.behavior
    # Factor out the larger of both, so that tiny probabilities do not underflow.
    top = np.maximum(response.behavior, response.proximal)
    shares = of_behavior * np.exp(response.behavior - top) + of_proximal * np.exp(response.proximal - top)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(shares / total))


def _added(values: list[Vector], slopes: list[Vector], weights: list[float]) -> Added:
    total = math.fsum(w * float(x) for w, vector in zip(weights, values, strict=True) for x in vector)
    return total, [w * slope for w, slope in zip(weights, slopes, strict=True)]


# The formulas of each preset (section 16.2), and their combination to a loss.


@dataclass(frozen=True)
class Oracle:
    """An algorithm as formulas.

    Attributes:
        credit: Rewards to advantages.
        push: Ratios to losses and slopes.
        mean: Weights of tokens.
        terms: Added terms.
        value_lambda: Lambda of a critic's targets; the value loss is the token mean of (V - target)^2 / 2.
        factors: What a correction multiplies losses by.
    """

    credit: Credit
    push: Pusher
    mean: Weights
    terms: tuple[Term, ...] = ()
    value_lambda: float | None = None
    factors: Factors | None = None

    def __call__(self, step: Step) -> ReferenceAnswer:
        """Compute one optimizer step."""
        responses = step.responses()
        advantages, weights = self.credit(responses), self.mean(responses)
        # Demonstrations were sampled by no policy of ours, so they say nothing about the mismatch of policies.
        sampled = [r for r in responses if len(r) and not r.is_given] or responses
        whole = WholeStep(
            _effective_size([r.current - r.behavior for r in sampled]),
            _effective_size([r.current - r.proximal for r in sampled]),
            responses,
            advantages,
        )
        pushes = [self.push(r, a, whole) for r, a in zip(responses, advantages, strict=True)]
        ones = [np.ones(len(r)) for r in responses]
        factors = ones if self.factors is None else self.factors(responses, advantages)
        # Corrections multiply the policy loss alone; the terms below keep the plain weights.
        scaled = [w * f for w, f in zip(weights, factors, strict=True)]
        policy = math.fsum(float(x) for s, p in zip(scaled, pushes, strict=True) for x in s * p.loss)
        gradient = [s * p.slope for s, p in zip(scaled, pushes, strict=True)]
        loss = policy
        for term in self.terms:
            value, slopes = term(responses, weights, whole)
            # A term is added with its own slopes; its value does not enter the policy loss.
            loss += value
            gradient = [g + s for g, s in zip(gradient, slopes, strict=True)]
        tokens = max(sum(len(r) for r in responses), 1)
        return ReferenceAnswer(
            advantages=step.scatter(advantages),
            loss=loss,
            policy_loss=policy,
            value_loss=None if self.value_lambda is None else _value_loss(responses, self.value_lambda),
            gradient=step.scatter(gradient),
            clipped_fraction=sum(int(np.sum(p.is_clipped)) for p in pushes) / tokens,
            out_of_band_fraction=sum(int(np.sum(p.is_out)) for p in pushes) / tokens,
            ess_fraction=whole.behavior,
        )


def _effective_size(log_ratios: Sequence[Vector]) -> float:
    """Return (sum rho)^2 / (n sum rho^2) over all tokens (section 5.1); 1 of none."""
    rho = np.exp(np.concatenate([np.zeros(0), *log_ratios]))
    return float(np.sum(rho) ** 2 / (len(rho) * np.sum(rho**2))) if len(rho) else 1.0


def _value_loss(responses: Sequence[Response], value_lambda: float) -> float:
    # target - V is the advantage with the target's lambda (section 7.1).
    errors = [float(x) for vector in gae(fixed(value_lambda))(responses) for x in vector]
    return math.fsum(x**2 for x in errors) / 2 / max(len(errors), 1)


_group = group_mean("group")
_centered = group_mean("none")
_narrow, _higher = clip(0.2, 0.2), clip(0.2, 0.28)

ORACLES: Mapping[str, Oracle] = {
    "reinforce": Oracle(returns(), capped(math.inf), token_mean),
    "rloo": Oracle(leave_one_out(kl=0.05), _narrow, sequence_mean),
    "reinforce-pp": Oracle(whitened(returns(kl=0.01)), _narrow, token_mean),
    "reinforce-pp-baseline": Oracle(
        whitened(_centered, skip_degenerate=True), _narrow, token_mean, (reference_k2(0.01),)
    ),
    "opo": Oracle(length_weighted, capped(math.inf), token_mean),
    "rae": Oracle(over_optimum, _narrow, token_mean),
    "a-star-po": Oracle(over_optimum, regression(beta=1e-3), sequence_mean),
    "ppo": Oracle(whitened(gae(fixed(0.95))), _narrow, token_mean, value_lambda=0.95),
    "vc-ppo": Oracle(gae(fixed(0.95)), _narrow, sequence_mean, value_lambda=1.0),
    "grpo": Oracle(_group, _narrow, sequence_mean),
    "dr-grpo": Oracle(_centered, _narrow, constant_length(3000)),
    "dapo": Oracle(_group, _higher, token_mean),
    "lite-ppo": Oracle(group_mean("batch"), _narrow, token_mean),
    "otb": Oracle(of_least_variance, _narrow, token_mean),
    "gdpo": Oracle(over_batch(per_reward(_group)), _narrow, sequence_mean),
    "gigpo": Oracle(added(_group, by_state(0.95), 1.0), _narrow, token_mean),
    "gspo": Oracle(_group, sequence_clip(3e-4, 4e-4), sequence_mean),
    "gspo-token": Oracle(_group, sequence_clip(3e-4, 4e-4), sequence_mean),
    "gmpo": Oracle(_group, geometric_clip(0.4), sequence_mean),
    "sapo": Oracle(_group, soft_gate(1.0, 1.05), sequence_mean),
    "cispo": Oracle(_group, capped(5.0), token_mean),
    "p3o": Oracle(_group, bounded_cap(), token_mean, (leash(),)),
    "p3o-two-anchor": Oracle(_group, bounded_cap(both=True), token_mean, (leash(is_mixture=True),)),
    "spo": Oracle(tracked(), _higher, token_mean),
    "vapo": Oracle(gae(length_adaptive(0.05)), _higher, token_mean, (positive_nll(0.1),), value_lambda=1.0),
    "vapo-review": Oracle(gae(length_sigmoid(0.3, 0.95)), _higher, token_mean, value_lambda=1.0),
    "decoupled-ppo": Oracle(_group, clip(0.2, 0.2, cap=5.0), token_mean),
    "opd": Oracle(teacher_gap, capped(math.inf), token_mean),
    "ipo": Oracle(_centered, policy_gradient(), token_mean, factors=close_in_tv(0.3)),
    "dppo": Oracle(_centered, policy_gradient(), constant_length(8192), factors=close_in_tv(0.15, outward=True)),
    "dppo-kl": Oracle(_centered, policy_gradient(), constant_length(8192), factors=close_in_kl(0.05)),
    "icepop": Oracle(_group, _narrow, sequence_mean, factors=within(0.5, 5.0)),
    "flash-reinforce": Oracle(batch_mean, policy_gradient(), sequence_mean, factors=close_in_kl(5e-3, mean=True)),
    "maxrl": Oracle(over_mean, _narrow, token_mean),
    "luspo": Oracle(_group, sequence_clip(2e-3, 2.5e-3), sequence_sum),
    "vespo": Oracle(_group, gamma_kernel((2.0, 3.0), (3.0, 2.0)), token_mean),
    "pass-at-k": Oracle(lead_over_second, _narrow, sequence_mean),
    "high-entropy": Oracle(_group, _higher, token_mean, factors=most_undecided(0.2)),
    "clip-cov": Oracle(_group, clip(1.0, 1.0), token_mean, factors=without_covariant(2e-4, 1.0, 5.0)),
    "kl-cov": Oracle(_group, capped(math.inf), token_mean, (covariance_kl(1.0, 2e-3),)),
    "m2po": Oracle(_group, policy_gradient(), token_mean, factors=small_second_moment(0.04)),
    "bapo": Oracle(_group, balanced_clip(0.5, (0.6, 0.9), (1.2, 3.0), 0.05), token_mean),
    "fipo": Oracle(_group, clip(0.2, 0.28, dual=10.0), token_mean, factors=future_influence(32.0, 1.0, 1.2, 10.0)),
    "cfpo": Oracle(_group, quadratic_penalty(0.2), sequence_mean),
    "scalerl": Oracle(over_batch(_centered), policy_gradient(5.0), prompt_mean),
    "sft": Oracle(returns(), capped(math.inf), token_mean),
    "expert-iteration": Oracle(accepted(), capped(math.inf), token_mean),
    "raft": Oracle(accepted(best=True), capped(math.inf), token_mean),
    "luffy": Oracle(_centered, shaped_if_given(_narrow, 0.1), token_mean),
    "srft": Oracle(_group, shaped_if_given(_narrow, 0.1), token_mean, (given_nll(0.5),)),
    "dpo": Oracle(_centered, pairwise(logistic(0.1)), sequence_mean),
    "ipo-preference": Oracle(_centered, pairwise(squared(0.1)), sequence_mean),
    "kto": Oracle(returns(), prospect(0.1), sequence_mean),
}
"""A preset's name to its formulas, with the numbers of the papers (or of the register, section 17)."""
