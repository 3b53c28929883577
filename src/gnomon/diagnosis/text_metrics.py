"""Metrics of a step's responses for the diagnosis: repetition, copies, forms, and what the reward correlates with."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.core.metrics import Last, Mean, Measure, Metrics
from gnomon.core.types import Group, Rollout

Floats = NDArray[np.float64]
NGRAM = 4
_FORM = re.compile(
    r"</\s*[A-Za-z][\w.-]{0,39}\s*>|\[/[A-Z_]{2,40}\]|<\|(channel|answer|end_of_(thought|solution|answer))\|>"
    r"|\\f?box(ed)?\s*\{|^[ \t]*#### *\S|^[ \t]*(```|~~~)|(?i:\banswer\W{0,4}(is\b|:))",
    re.MULTILINE,
)
"""Marks of an answer: ends of tags of any name and of thoughts, boxes, GSM8K's line, fences, "the answer is"."""


def measure_answers(groups: Sequence[Group]) -> Metrics:
    """Return the metrics that the diagnosis needs beside the metrics of a step.

    A metric without a value is absent, such as a correlation of equal numbers. The result depends only on the
    responses, so that a resumed run writes the same numbers. Responses that were given are no part of it.
    """
    groups = [group.sampled for group in groups]
    judged = _Judged.of(groups)
    return Metrics.of(
        {
            **_repetition(groups),
            **_copies(groups),
            **_lengths(judged),
            **_cut_off(groups),
            **_formed(groups),
            **_parts(judged),
            **_expected(groups),
        }
    )


def repetition(rollout: Rollout) -> float | None:
    """Return the share of a response's n-grams (n = `NGRAM`) that occurred before in the response.

    Only tokens of the policy count. None for fewer than ``2 * NGRAM`` tokens.
    """
    tokens = [token for token, chosen in zip(rollout.response, rollout.mask, strict=True) if chosen]
    if len(tokens) < 2 * NGRAM:
        return None
    # All successive groups of NGRAM tokens.
    runs = list(zip(*(tokens[place:] for place in range(NGRAM)), strict=False))
    return 1 - len(set(runs)) / len(runs)


def _repetition(groups: Sequence[Group]) -> dict[str, Measure]:
    shares = [share for r in _rollouts(groups) if (share := repetition(r)) is not None]
    return {"rollout/repetition_fraction": Mean(sum(shares), len(shares))} if shares else {}


def _copies(groups: Sequence[Group]) -> dict[str, Measure]:
    """Return the share of identical pairs of responses to one prompt, and the share expected by chance.

    Two independent draws are equal with probability sum_y p(y)^2 = E[p(y)], y drawn from p. The mean of
    exp(sum of log-probabilities) of the responses estimates this without bias.
    """
    pairs, same, expected = 0.0, 0.0, 0.0
    for group in groups:
        count = len(group.rollouts)
        if count < 2:
            continue
        # Pairs within the group.
        of_group = count * (count - 1) / 2
        # A sum of log-probabilities above 0 is rounding.
        chance = sum(math.exp(min(0.0, sum(r.logprobs))) for r in group.rollouts) / count
        pairs += of_group
        same += sum(n * (n - 1) / 2 for n in Counter(r.response for r in group.rollouts).values())
        expected += of_group * (chance if math.isfinite(chance) else 1.0)
    if not pairs:
        return {}
    return {
        "rollout/duplicate_pair_fraction": Mean(same, pairs),
        "rollout/duplicate_pair_expected_fraction": Mean(expected, pairs),
    }


def _lengths(judged: "_Judged") -> dict[str, Measure]:
    """Return the rank correlation of length and reward, each minus its mean over the responses to the prompt.

    With one response per prompt the correlation is over all responses. Then it also reflects the prompts, because a
    hard prompt has long responses and low rewards.
    """
    found = rank_correlation(judged.centered(judged.lengths), judged.centered(judged.rewards))
    return {} if found is None else {"rollout/length_reward_correlation": Last(found)}


def _formed(groups: Sequence[Group]) -> dict[str, Measure]:
    """Return the share of marked responses and the rewards of different marked responses; empty without any."""
    graded = [(r.text, r.grade.reward) for r in _rollouts(groups) if r.grade.reward is not None]
    marked = [(text, reward) for text, reward in graded if _FORM.search(text)]
    if len({text for text, _ in marked}) < 2:
        return {}
    rewards = np.array([reward for _, reward in marked], dtype=np.float64)
    return {
        "rollout/marked_fraction": Mean(len(marked), len(graded)),
        "rollout/marked_reward_mean": Last(float(rewards.mean())),
        "rollout/marked_reward_std": Last(float(rewards.std())),
    }


def _cut_off(groups: Sequence[Group]) -> dict[str, Measure]:
    measures: dict[str, Measure] = {}
    for name, is_cut in (("truncated", True), ("complete", False)):
        rewards = [r.grade.reward for r in _rollouts(groups) if r.grade.reward is not None and r.is_truncated == is_cut]
        if rewards:
            measures[f"rollout/{name}_reward_mean"] = Mean(sum(rewards), len(rewards))
    return measures


def _parts(judged: "_Judged") -> dict[str, Measure]:
    """Return each component's deviation, and its share of the reward's variance at weight 1.

    leverage = Cov(component, reward) / Var(reward), both minus their means over the responses to a prompt, which is
    what advantages depend on. Weight times leverage adds up to 1 over the components of a weighted sum.
    """
    names = sorted({name for parts in judged.parts for name in parts})
    paid = judged.centered(judged.rewards)
    spread = float((paid**2).sum())
    measures: dict[str, Measure] = {}
    for name in names if len(names) > 1 else ():
        # A part that did not apply gave nothing, and is in no deviation of its own.
        own = np.array([parts.get(name, 0.0) for parts in judged.parts])
        known = np.array([name in parts for parts in judged.parts])
        measures[f"reward/{name}_std"] = Last(float(own[known].std()))
        if spread > 1e-12:
            measures[f"reward/{name}_leverage"] = Last(float((judged.centered(own) * paid).sum()) / spread)
    return measures


def _expected(groups: Sequence[Group]) -> dict[str, Measure]:
    """Return the expected shares of groups that are all right and all wrong, for rewards of 0 and 1."""
    counts = [(int(sum(g.rewards)), len(g.rewards)) for g in groups if g.rewards]
    are_binary = all(reward in (0.0, 1.0) for group in groups for reward in group.rewards)
    if not are_binary or not any(n > 1 for _, n in counts):
        return {}
    right, wrong = expected_degenerate(counts)
    return {
        "rollout/all_right_expected_fraction": Last(right),
        "rollout/all_wrong_expected_fraction": Last(wrong),
    }


def expected_degenerate(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the expected shares of all-right and all-wrong groups at the success rates that the groups show.

    A prompt with success rate p gives an all-right group with probability p^G and an all-wrong one with (1 - p)^G.
    Rates differ between prompts, and one group is too small to estimate one rate. But the mean of p over prompts is the
    mean over all responses, and the mean of p^2 is that of pairs within groups that are both right. The Beta
    distribution with these two moments gives

        E[p^G] = prod_{i<G} (a + i) / (a + b + i),   E[(1 - p)^G] the same with b for a.

    More degenerate groups mean that the responses of a group depend on each other.

    Args:
        counts: Right responses and all responses of each group.

    References:
        p^G + (1 - p)^G, SPO, arXiv 2509.13232; the distribution over prompts is ours.

    >>> [round(share, 4) for share in expected_degenerate([(2, 4), (2, 4), (1, 4), (3, 4)])]
    [0.0625, 0.0625]
    """
    first = sum(k / n for k, n in counts) / len(counts)
    pairs = [k * (k - 1) / (n * (n - 1)) for k, n in counts if n > 1]
    sizes = [n for _, n in counts if n > 1]
    # Var(p) = E[p^2] - E[p]^2, where pairs within groups estimate E[p^2] without bias.
    variance = sum(pairs) / len(pairs) - first * first
    most = first * (1 - first)
    size = round(sum(sizes) / len(sizes))
    if variance <= 1e-6 or most <= 0:
        return first**size, (1 - first) ** size
    # a + b of the Beta distribution with this mean and variance; at least 1e-3, since a noisy variance may exceed p (1
    # - p).
    strength = max(most / variance - 1, 1e-3)
    return _all(first * strength, strength, size), _all((1 - first) * strength, strength, size)


def _all(a: float, strength: float, size: int) -> float:
    return math.prod((a + i) / (strength + i) for i in range(size))


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's correlation with mean ranks for ties; None if all values are equal.

    >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([0.0, 5.0, 6.0]))
    1.0
    """
    if len(first) == 0:
        return None
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return round(float((a * b).sum()) / spread, 12) if spread > 0 else None


def _ranks(numbers: Floats) -> Floats:
    # Rounded, so that numbers that differ by rounding are ties.
    _, place, counts = np.unique(np.round(numbers, 9), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place], dtype=np.float64)


@dataclass(frozen=True)
class _Judged:
    """The graded responses of a step as arrays; ``prompt`` is the index of each response's group."""

    prompt: NDArray[np.int64]
    rewards: Floats
    lengths: Floats
    parts: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "_Judged":
        """Return the answers of groups; where each has one, all are compared with each other."""
        graded = [
            (n, r, r.grade.reward) for n, g in enumerate(groups) for r in g.rollouts if r.grade.reward is not None
        ]
        numbers = [n for n, _, _ in graded]
        # With one answer a prompt a mean over the prompt would leave only zeros.
        prompt = np.array(numbers if len(set(numbers)) < len(numbers) else [0] * len(numbers), dtype=np.int64)
        lengths = np.array([len(r.response) for _, r, _ in graded], dtype=np.float64)
        rewards = np.array([reward for _, _, reward in graded], dtype=np.float64)
        return cls(prompt, rewards, lengths, [r.grade.parts for _, r, _ in graded])

    def centered(self, numbers: Floats) -> Floats:
        """Return numbers, one an answer, less their mean over the answers of its prompt."""
        if len(numbers) == 0:
            return numbers
        means = np.bincount(self.prompt, numbers) / np.maximum(np.bincount(self.prompt), 1)
        return np.asarray(numbers - means[self.prompt], dtype=np.float64)


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [r for g in groups for r in g.rollouts]
