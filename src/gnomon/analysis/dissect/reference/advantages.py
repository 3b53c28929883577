"""From rewards to advantages, by sections 1, 6, 7 and 8 of the specification: one vector per response."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from gnomon.analysis.dissect.reference.arrays import Response, Vector, known

Credit = Callable[[Sequence[Response]], list[Vector]]
Lambdas = Callable[[Sequence[Response]], list[float]]


def by_response(number: Callable[[Response, Sequence[Response]], float]) -> Credit:
    """Return the advantages where a response has one number for all its tokens, worked out from it and the others."""
    return lambda responses: _everywhere([number(response, responses) for response in responses], responses)


def group_mean(scale: Literal["group", "batch", "none"], epsilon: float = 1e-6) -> Credit:
    """(x - mean of the group) / (sample deviation + epsilon); 0 in a group of one and of equal rewards (D3, D4, D5)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        # Rewards of the whole step, for the deviation over the batch (Lite PPO).
        everything = [r.reward for r in responses if r.is_graded]

        def number(response: Response, responses: Sequence[Response]) -> float:
            members = _siblings(response, responses)
            centered = response.reward - math.fsum(members) / max(len(members), 1)
            # Equal rewards give exactly 0: their mean may differ from each of them by rounding.
            if not response.is_graded or max(members) == min(members):
                centered = 0.0
            spread = {"group": members, "batch": everything, "none": []}[scale]
            return centered / (_deviation(spread) + epsilon) if scale != "none" else centered

        return by_response(number)(responses)

    return credit


@by_response
def over_mean(response: Response, responses: Sequence[Response]) -> float:
    """(r - mean of the group) / (mean + 1e-6) (MaxRL); 0 where the mean is not positive and in equal groups."""
    members = _siblings(response, responses)
    mean = math.fsum(members) / len(members)
    counts = response.is_graded and mean > 0 and max(members) > min(members)
    return (response.reward - mean) / (mean + 1e-6) if counts else 0.0


@by_response
def lead_over_second(response: Response, responses: Sequence[Response]) -> float:
    """The best reward of the group minus the best of the others, for the best answer; 0 in a group of one (pass@k)."""
    others = [r.reward for r in responses if r is not response and r.is_graded and r.group == response.group]
    return max(response.reward - max(others), 0.0) if others and response.is_graded else 0.0


def accepted(best: bool = False) -> Credit:
    """All trained tokens over those of accepted responses, and 0 for others (ReST-EM); accepted is a reward above 0.

    With ``best``, of each group the first of its best responses alone (RAFT).
    """

    def credit(responses: Sequence[Response]) -> list[Vector]:
        good = [i for i, r in enumerate(responses) if r.is_graded and r.reward > 0]
        if best:
            leaders: dict[int, int] = {}
            # Of equally good responses the first, as the piece breaks ties.
            for i in sorted(good, key=lambda i: (-responses[i].reward, i)):
                leaders.setdefault(responses[i].group, i)
            good = list(leaders.values())
        # The token mean divides by all trained tokens, and this factor turns it into the mean over the accepted ones.
        scale = sum(map(len, responses)) / max(sum(len(responses[i]) for i in good), 1)
        return _everywhere([scale * (i in good) for i in range(len(responses))], responses)

    return credit


def batch_mean(responses: Sequence[Response]) -> list[Vector]:
    """r - mean of all graded rewards (FlashREINFORCE)."""
    graded = [r.reward for r in responses if r.is_graded]
    mean = math.fsum(graded) / max(len(graded), 1)
    return _everywhere([(r.reward - mean) * r.is_graded for r in responses], responses)


def leave_one_out(kl: float) -> Credit:
    """x - mean of the others, x = r - kl sum_t log(proximal / reference) (section 8.2)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        # The penalty enters the reward, so the baseline of the others carries it as well.
        shaped = [replace(r, reward=r.reward - kl * float(np.sum(r.penalty))) for r in responses]
        return over_others(shaped)

    return credit


@by_response
def over_others(response: Response, responses: Sequence[Response]) -> float:
    """x - mean of the others of the group; 0 in a group of one."""
    others = [r.reward for r in responses if r is not response and r.is_graded and r.group == response.group]
    return response.reward - math.fsum(others) / len(others) if others and response.is_graded else 0.0


@by_response
def length_weighted(response: Response, responses: Sequence[Response]) -> float:
    """x - sum l x / sum l over the group, l the trained tokens (section 8.3); 0 for equal rewards."""
    group = [r for r in responses if r.is_graded and r.group == response.group]
    tokens = sum(len(r) for r in group)
    differs = len({r.reward for r in group}) > 1
    baseline = math.fsum(len(r) * r.reward for r in group) / max(tokens, 1)
    return response.reward - baseline if differs and response.is_graded else 0.0


def of_least_variance(responses: Sequence[Response]) -> list[Vector]:
    """G_t - sum G_t W_t / sum W_t over the group's responses with a t-th token, W_t = sum_{s <= t} |e_y - p_s|^2 (OTB).

    The squared distance is 1 - 2 p + sum p^2, with sum p^2 = p^2 / p', p' the probability at half the temperature.
    The last response that goes on keeps G_t; equal returns give 0.
    """
    # G_t: what is earned from token t on.
    gains = [np.array([math.fsum(r.earned[t:]) for t in range(len(r))]) for r in responses]
    weights = []
    for r in responses:
        sharpened = known(r.sharpened, "log-probabilities at half the temperature")
        # sum p^2 - p^2 = p^2 / p' - p^2 = p^2 (1 - p') / p': written with expm1, because p' near 1 cancels.
        others = np.exp(2 * r.proximal - sharpened) * -np.expm1(sharpened)
        weights.append(np.cumsum(np.expm1(r.proximal) ** 2 + others))
    found = []
    for i, response in enumerate(responses):
        row = gains[i].copy()
        for t in range(len(response)):
            # Responses that are shorter have no t-th token and no say in its baseline.
            there = [j for j, r in enumerate(responses) if r.group == response.group and len(r) > t]
            reached, weight = [float(gains[j][t]) for j in there], [float(weights[j][t]) for j in there]
            if len(there) > 1:
                # Tokens of probability 1 have no gradient and weight 0; then the plain mean is as good as any.
                weight = weight if sum(weight) > 0 else [1.0] * len(there)
                gaps = [(float(gains[i][t]) - gain) * w for gain, w in zip(reached, weight, strict=True)]
                row[t] = math.fsum(gaps) / math.fsum(weight)
        found.append(row)
    return found


def returns(kl: float = 0.0) -> Credit:
    """G_t = sum from t on of x_s, x = r at the last trained token - kl log(proximal / reference) (section 8.1)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        found = []
        for response in responses:
            # Without a coefficient the reference is not read, as many batches have none.
            penalties = kl * response.penalty if kl else np.zeros(len(response))
            gains = response.earned - penalties
            found.append(np.array([math.fsum(gains[t:]) for t in range(len(response))]))
        return found

    return credit


def teacher_gap(responses: Sequence[Response]) -> list[Vector]:
    """log reference - log proximal of each token, whatever the reward (on-policy distillation)."""
    return [-response.penalty for response in responses]


def tracked(epsilon: float = 1e-8) -> Credit:
    """r - v, then less the mean and over (sample deviation + epsilon) of all responses (section 6.2)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        raw = [response.reward - known(response.baseline, "the prompt's baseline") for response in responses]
        graded = [a for a, response in zip(raw, responses, strict=True) if response.is_graded]
        if len(graded) > 1:
            mean, deviation = math.fsum(graded) / len(graded), _deviation(graded)
            # The sample deviation of equal advantages is 0 up to rounding, which would be divided by epsilon.
            is_flat = max(graded) == min(graded)
            raw = [0.0 if is_flat else (a - mean) / (deviation + epsilon) for a in raw]
        return _everywhere(raw, responses)

    return credit


@by_response
def over_optimum(response: Response, responses: Sequence[Response]) -> float:
    """r - V*, with V* of the prompt in ``baseline`` (section 8.4)."""
    return response.reward - known(response.baseline, "the prompt's baseline")


def whitened(inner: Credit, skip_degenerate: bool = False, epsilon: float = 1e-8) -> Credit:
    """(A - mean) / sqrt(population variance + epsilon) over all trained tokens (section 8.1; D23).

    Args:
        skip_degenerate: Groups whose rewards are all equal, also those of one, count for nothing and stay at 0 (D30).
    """

    def credit(responses: Sequence[Response]) -> list[Vector]:
        raw = inner(responses)
        # A group of equal rewards has advantage 0 for every token, and many such zeros would shrink the variance.
        counts = [not skip_degenerate or len(set(_siblings(r, responses))) > 1 for r in responses]
        tokens = [float(a) for vector, counted in zip(raw, counts, strict=True) if counted for a in vector]
        if not tokens or max(tokens) == min(tokens):
            return [np.zeros(len(r)) for r in responses]
        mean = math.fsum(tokens) / len(tokens)
        scale = math.sqrt(math.fsum((a - mean) ** 2 for a in tokens) / len(tokens) + epsilon)
        return [
            (vector - mean) / scale if counted else np.zeros(len(vector))
            for vector, counted in zip(raw, counts, strict=True)
        ]

    return credit


def added(first: Credit, second: Credit, omega: float) -> Credit:
    """The first plus omega times the second."""
    return lambda responses: [a + omega * b for a, b in zip(first(responses), second(responses), strict=True)]


def by_state(gamma: float, epsilon: float = 1e-6) -> Credit:
    """(R - mean) / (sample deviation + epsilon) over the group's answers in the same state, R discounted by answers.

    0 for a state that is alone and for equal returns (GiGPO, eq. 6 and 7).
    """

    def credit(responses: Sequence[Response]) -> list[Vector]:
        found: list[tuple[int, Any, tuple[int, int], float]] = []
        for i, response in enumerate(responses):
            places = response.answers()
            gains = [math.fsum(response.earned[place]) for place in places]
            for k, place in enumerate(places):
                # Every token of an answer has the state in which it was asked, so its first token tells.
                state = 0 if response.state is None else int(response.state[place[0]])
                # Discounted by answers and not by tokens: a long answer is one action.
                worth = math.fsum(gamma ** (j - k) * gains[j] for j in range(k, len(gains)))
                found.append((i, place, (response.group, state), worth))
        result = [np.zeros(len(r)) for r in responses]
        for i, place, key, worth in found:
            same = [other for _, _, theirs, other in found if theirs == key]
            if max(same) > min(same):
                result[i][place] = (worth - math.fsum(same) / len(same)) / (_deviation(same) + epsilon)
        return result

    return credit


def per_reward(inner: Credit) -> Credit:
    """sum_c weight_c A(r_c): the advantages of each reward by itself, weighed (GDPO, eq. 4 and 5)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        total = [np.zeros(len(r)) for r in responses]
        for c, weight in enumerate(responses[0].component_weights):
            parts = [known(r.components, "each reward by itself")[c] if r.is_graded else 0.0 for r in responses]
            # The inner rule sees one reward at a time, as if it were the only one.
            alone = [replace(r, reward=float(part)) for r, part in zip(responses, parts, strict=True)]
            total = [sum_so_far + weight * each for sum_so_far, each in zip(total, inner(alone), strict=True)]
        return total

    return credit


def over_batch(inner: Credit, epsilon: float = 1e-6) -> Credit:
    """(A - mean) / (sample deviation + epsilon) over responses with a trained token, each with one A (GDPO, eq. 6)."""

    def credit(responses: Sequence[Response]) -> list[Vector]:
        raw = inner(responses)
        # Each response has one advantage, so it counts once however long it is.
        numbers = [float(vector[0]) for vector in raw if len(vector)]
        if not numbers or max(numbers) == min(numbers):
            return [np.zeros(len(r)) for r in responses]
        mean, scale = math.fsum(numbers) / len(numbers), _deviation(numbers) + epsilon
        return [(vector - mean) / scale for vector in raw]

    return credit


def fixed(value: float) -> Lambdas:
    """One lambda for all."""
    return lambda responses: [value] * len(responses)


def length_adaptive(alpha: float) -> Lambdas:
    """1 - 1 / (alpha l), at least 0 (section 7.3; D18)."""
    return lambda responses: [max(0.0, 1 - 1 / (alpha * max(len(r), 1))) for r in responses]


def length_sigmoid(low: float, high: float) -> Lambdas:
    """low + (high - low) / (1 + exp(-(l - mean) / max(sample deviation, 1))) (section 7.4)."""

    def lambdas(responses: Sequence[Response]) -> list[float]:
        lengths = [float(len(r)) for r in responses if len(r)]
        mean = math.fsum(lengths) / max(len(lengths), 1)
        deviation = max(_deviation(lengths), 1.0)
        return [low + (high - low) / (1 + math.exp(-(len(r) - mean) / deviation)) for r in responses]

    return lambdas


def gae(lambdas: Lambdas) -> Credit:
    """A_t = sum over k of lambda^k delta_(t+k), delta_t = x_t + V_(t+1) - V_t, V = 0 after the end (section 7.1).

    The explicit sum, not the recursion; every end is terminal (D22) and gamma is 1.
    """

    def credit(responses: Sequence[Response]) -> list[Vector]:
        return [_gae(r, decay) for r, decay in zip(responses, lambdas(responses), strict=True)]

    return credit


def _gae(response: Response, decay: float) -> Vector:
    values, length = known(response.values, "values"), len(response)
    # V_(t+1), and 0 after the last token: every end is terminal.
    after = np.append(values[1:], 0.0) if length else np.zeros(0)
    errors = response.earned + after - values
    return np.array([math.fsum(decay**k * errors[t + k] for k in range(length - t)) for t in range(length)])


def _siblings(response: Response, responses: Sequence[Response]) -> list[float]:
    found = [r.reward for r in responses if r.is_graded and r.group == response.group]
    return found or [0.0]


def _deviation(numbers: Sequence[float]) -> float:
    """Return the sample deviation (Bessel); 0 of fewer than two numbers."""
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def _everywhere(numbers: Sequence[float], responses: Sequence[Response]) -> list[Vector]:
    return [np.full(len(r), number) for number, r in zip(numbers, responses, strict=True)]
