"""Means over tokens and terms added to the policy loss, by sections 0.2, 0.3, 5 and 7.3: value and slope."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from gnomon.analysis.dissect.reference.arrays import Response, Vector, is_free, ratio
from gnomon.analysis.dissect.reference.losses import BoundedRatio, covariances, highest

Weights = Callable[[Sequence[Response]], list[float]]
Added = tuple[float, list[Vector]]
Term = Callable[[Sequence[Response], list[float], BoundedRatio], Added]


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

    def term(responses: Sequence[Response], weights: list[float], trusted: BoundedRatio) -> Added:
        gaps = [r.current - _known(r.reference) for r in responses]
        return _added([coefficient * d**2 / 2 for d in gaps], [coefficient * d for d in gaps], weights)

    return term


def leash(is_mixture: bool = False, is_k3: bool = False) -> Term:
    """(1 - e) (rho d - rho + 1), slope (1 - e) rho d, for d against behavior; on policy 0 (section 0.3, D11).

    Args:
        is_mixture: Measure d against the mean of behavior and proximal, each weighted by 1 - its own effective size,
            with e
            the smaller of both; the value is then (1 - e) rho (exp(-d) - 1 + d) (section 5.9).
        is_k3: Use the reference code's estimator, (1 - e) (exp(-d) - 1 + d), slope (1 - e) (1 - exp(-d)).
    """

    def term(responses: Sequence[Response], weights: list[float], trusted: BoundedRatio) -> Added:
        e = min(trusted.behavior, trusted.proximal) if is_mixture else trusted.behavior
        values, slopes = [], []
        for response in responses:
            anchor = _mixture(response, trusted) if is_mixture else response.behavior
            rho, d = ratio(response.current - response.behavior), response.current - anchor
            values.append((1 - e) * (1.0 if is_k3 else rho) * (ratio(-d) - 1 + d))
            slopes.append((1 - e) * (1 - ratio(-d) if is_k3 else rho * d))
        return _added(values, slopes, weights)

    return term


def covariance_kl(coefficient: float, share: float) -> Term:
    """coefficient |d|, d = log(current / proximal), of the share of all tokens with the highest covariance (KL-Cov)."""

    def term(responses: Sequence[Response], weights: list[float], trusted: BoundedRatio) -> Added:
        found = covariances(responses, list(trusted.advantages))
        _, edge = highest(share, found)
        gaps = [np.where(c > edge, r.current - r.proximal, 0.0) for c, r in zip(found, responses, strict=True)]
        bounded = [np.clip(d, -20, 20) for d in gaps]
        slopes = [coefficient * np.sign(d) * is_free(d) for d in gaps]
        return _added([coefficient * np.abs(d) for d in bounded], slopes, weights)

    return term


def positive_nll(coefficient: float) -> Term:
    """-coefficient log current over the tokens of responses with a reward above 0, divided by their number."""

    def term(responses: Sequence[Response], weights: list[float], trusted: BoundedRatio) -> Added:
        is_positive = [r.is_graded and r.reward > 0 for r in responses]
        count = max(sum(len(r) for r, yes in zip(responses, is_positive, strict=True) if yes), 1)
        own = [yes / count for yes in is_positive]
        values = [-coefficient * r.current for r in responses]
        return _added(values, [np.full(len(r), -coefficient) for r in responses], own)

    return term


def _mixture(response: Response, trusted: BoundedRatio) -> Vector:
    """Return log((w_b behavior + w_p proximal) / (w_b + w_p)), w = 1 - effective size; behavior when both are 0."""
    of_behavior, of_proximal = max(1 - trusted.behavior, 0.0), max(1 - trusted.proximal, 0.0)
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


def _known(reference: Vector | None) -> Vector:
    assert reference is not None, "this oracle needs the reference"
    return reference
