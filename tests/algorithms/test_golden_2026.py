"""Losses and gradients of the algorithms of 2026, worked out by hand on two responses of two tokens.

Unless a test says otherwise the tokens have probabilities 0.5, 0.2 and 0.5, 0.4 under behavior and proximal, and 0.55,
0.6 and 0.45, 0.15 under current: ratios 1.1, 3 and 0.9, 0.375. The first response earns 1, the second 0, so that their
advantages are 0.5 and -0.5, or over the sample deviation a = 0.5 / (sqrt(0.5) + 1e-6) and -a. Every token weighs 1/4.
"""

from itertools import combinations
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import BAPO, GroupRelative, MarginalBest, resolve
from gnomon.core.types import Batch, TopLogprobs
from gnomon.models.head import scored
from gnomon.testing import loss_and_gradient, make_batch

approx = pytest.approx
BEFORE = [[log(0.5), log(0.2)], [log(0.5), log(0.4)]]
NOW = [[log(0.55), log(0.6)], [log(0.45), log(0.15)]]
A = 0.5 / (sqrt(0.5) + 1e-6)
L = log(2)


def pair(rewards: list[float], **more: Any) -> Batch:
    """Return two responses of two tokens to one prompt."""
    return make_batch(rewards, [[1, 1], [1, 1]], **{"behavior": BEFORE, "proximal": BEFORE, **more})


def of(spec: str | dict[str, Any], batch: Batch, current: Any = NOW) -> tuple[float, list[float]]:
    """Return the loss and the gradients of the trained tokens, row by row."""
    algorithm = resolve(spec)
    now = torch.tensor(current, dtype=torch.float64)
    loss, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), now)
    return loss, gradient[batch.mask].tolist()


def value(slopes: list[float], current: Any = NOW) -> float:
    """Return the loss of a policy gradient with detached weights: its slopes times the log-probabilities."""
    flat: Tensor = torch.tensor(current, dtype=torch.float64).flatten()
    return float((torch.tensor(slopes, dtype=torch.float64) * flat).sum())


@pytest.mark.parametrize(
    ("spec", "rewards", "slopes"),
    [
        ("ipo", [1.0, 0.0], [-0.1375, 0.0, 0.1125, 0.046875]),
        ({"preset": "dppo", "aggregate.length": 2}, [1.0, 0.0], [-0.1375, 0.0, 0.1125, 0.0]),
        ({"preset": "dppo", "aggregate.length": 2}, [0.0, 1.0], [0.1375, 0.375, -0.1125, -0.046875]),
        ({"preset": "dppo-kl", "aggregate.length": 2}, [1.0, 0.0], [-0.1375, 0.0, 0.1125, 0.0]),
        ({"preset": "dppo-kl", "aggregate.length": 2}, [0.0, 1.0], [0.1375, 0.375, -0.1125, -0.046875]),
        ({"preset": "flash-reinforce", "correction.threshold": 0.1}, [1.0, 0.0], [0.0, 0.0, 0.1125, 0.046875]),
    ],
)
def test_divergence_masks(spec: Any, rewards: list[float], slopes: list[float]):
    """Each kept token has the slope -ratio advantage / 4, each dropped one 0.

    |p - q| is 0.05, 0.4, 0.05, 0.25: IPO drops what exceeds 0.3, DPPO 0.15 if it is pushed on, and nothing when the
    rewards are exchanged, as all tokens are then pulled back. KL(p || q) of two outcomes is 0.005025, 0.334801,
    0.005025, 0.183341, so 0.05 drops the same; the means are 0.1699 and 0.0942, of which 0.1 keeps the second.
    """
    loss, found = of(spec, pair(rewards))

    assert found == approx(slopes, abs=1e-15)
    assert loss == approx(value(slopes))


def test_flash_reinforce_drops_whole_responses():
    """Its own 0.005 keeps neither response; where nothing moved both are kept, with r - 0.5 at weight 1/4."""
    assert of("flash-reinforce", pair([1.0, 0.0]))[1] == [0.0] * 4
    assert of("flash-reinforce", pair([1.0, 0.0]), BEFORE)[1] == approx([-0.125, -0.125, 0.125, 0.125])


def test_icepop():
    """Proximal / behavior is 0.4, 1, 2, 6, so factors are 0, 1, 2, 0, on losses -1.2 a of a clipped token and 0.9 a.

    Loss: (-1.2 a + 2 0.9 a) / 4 = 0.15 a; the clipped token has no slope, the other 2 0.9 a / 4.
    """
    weights = [[0.4, 1.0], [2.0, 6.0]]
    behavior = [[p - log(w) for p, w in zip(*rows, strict=True)] for rows in zip(BEFORE, weights, strict=True)]
    loss, slopes = of("icepop", pair([1.0, 0.0], behavior=behavior))

    assert loss == approx(0.15 * A)
    assert slopes == approx([0.0, 0.0, 0.45 * A, 0.0])


def test_maxrl():
    """One right answer of four is worth 3 and a wrong one -1, of three of four 1/3 and -1; none right is worth 0.

    On the pair A = 0.5 / (0.5 + 1e-6); losses -1.1 A, -1.2 A (clipped), 0.9 A, 0.8 A (clipped).
    """
    groups = make_batch([1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [[1]] * 10, [0] * 4 + [1] * 4 + [2] * 2)
    advantages, _ = GroupRelative(scale="mean")(groups)
    loss, slopes = of("maxrl", pair([1.0, 0.0]))
    worth = 0.5 / (0.5 + 1e-6)

    assert advantages.flatten().tolist() == approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0], rel=1e-5)
    assert loss == approx(-0.15 * worth)
    assert slopes == approx([-0.275 * worth, 0.0, 0.225 * worth, 0.0])


def test_luspo():
    """Two tokens with mean log-ratio 0.0015 and one with -0.001: loss -(2 a e^0.0015 - a e^-0.001) / 2."""
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], proximal=[[-1.0, -1.0], [-1.0]])
    loss, slopes = of("luspo", batch, [[-0.999, -0.998], [-1.001, 0.0]])

    assert loss == approx(-A * exp(0.0015) + A * exp(-0.001) / 2)
    assert slopes == approx([-A * exp(0.0015) / 2] * 2 + [A * exp(-0.001) / 2])


def test_cfpo():
    """Losses -1.1 a + 0.025 a, -3 a + 10 a, 0.9 a + 0.025 a, 0.375 a + 0.9765625 a; each a quarter.

    Slopes r (|A| (r - 1) / 0.2 - A) / 4: the token at ratio 3 is pulled back, where a clip would leave it alone.
    """
    loss, slopes = of("cfpo", pair([1.0, 0.0]))

    assert loss == approx(8.2015625 * A / 4)
    assert slopes == approx([-0.55 * A / 4, 27 * A / 4, 0.45 * A / 4, -0.796875 * A / 4])


def test_vespo():
    """Products of ratios are W = 3.3 and 0.3375: weights 3.3^2 e^(3 (1 - 3.3)) and 0.3375^3 e^(2 (1 - 0.3375))."""
    loss, slopes = of("vespo", pair([1.0, 0.0]))
    up, down = 3.3**2 * exp(-6.9), 0.3375**3 * exp(1.325)

    assert slopes == approx([-up * A / 4] * 2 + [down * A / 4] * 2)
    assert loss == approx(value(slopes))


def test_pass_at_k():
    """Of rewards 0.2, 0.9, 0.5 the best leads by 0.4; of 1, 1, 0 nobody; alone nobody. Over sets: by enumeration."""
    batch = make_batch([0.2, 0.9, 0.5, 1, 1, 0, 1], [[1]] * 7, [0] * 3 + [1] * 3 + [2])
    rewards = [0.2, 0.9, 0.5, 0.9, 0.1]
    for k in (2, 3, 4, 5):
        found, _ = MarginalBest(k)(make_batch(rewards, [[1]] * 5))
        expected = []
        for i, reward in enumerate(rewards):
            sets = list(combinations([r for j, r in enumerate(rewards) if j != i], k - 1))
            expected.append(sum(max(reward - max(s), 0.0) for s in sets) / len(sets))
        assert found.flatten().tolist() == approx(expected, abs=1e-15), k

    assert MarginalBest()(batch)[0].flatten().tolist() == approx([0, 0.4, 0, 0, 0, 0, 0])
    assert of("pass-at-k", pair([1.0, 0.0]))[1] == approx([-0.275, 0.0, 0.0, 0.0])


def test_m2po():
    """Pushed outward are 0.0091, 1.2069 and 0.0111, 0.9620, squares of log-ratios; the two small ones are kept.

    Their mean is 0.0101; with 0.9620 it would be 0.3274, far above 0.04. When the rewards are exchanged every token is
    pulled back, and all are kept.
    """
    assert of("m2po", pair([1.0, 0.0]))[1] == approx([-1.1 * A / 4, 0.0, 0.9 * A / 4, 0.0])
    assert of("m2po", pair([0.0, 1.0]))[1] == approx([1.1 * A / 4, 3 * A / 4, -0.9 * A / 4, -0.375 * A / 4])


def test_high_entropy():
    """Entropies here are -log current / 2; of four tokens half are those of probability 0.15 and 0.45."""
    spec = {"preset": "high-entropy", "correction.share": 0.5, "keep": "none", "overlong": "none"}

    assert of(spec, pair([1.0, 0.0]))[1] == approx([0.0, 0.0, 0.9 * A / 4, 0.0])
    assert of({**spec, "correction.share": 1.0}, pair([1.0, 0.0]))[1] == approx([-1.1 * A / 4, 0.0, 0.9 * A / 4, 0.0])


def test_covariances():
    """c is a (log q - m) and -a (log q - m) with m = -0.9510: 0.2497, 0.3112 and -0.1079, 0.6689.

    The last is the highest: KL-Cov adds |log 0.375| / 4 to it, with slope -1 / 4 beside 0.375 a / 4. Clip-Cov draws
    among those between 0.2 and 0.5, the first two, and leaves one out.
    """
    plain = [-1.1 * A / 4, -3 * A / 4, 0.9 * A / 4, 0.375 * A / 4]
    loss, slopes = of("kl-cov", pair([1.0, 0.0]))
    spec = {"preset": "clip-cov", "surrogate.trust": {"low": 9.0, "high": 9.0}}
    _, drawn = of({**spec, "correction": {"low": 0.2, "high": 0.5}}, pair([1.0, 0.0]))
    _, far = of(spec, pair([1.0, 0.0]))

    assert slopes == approx([*plain[:3], plain[3] - 0.25])
    assert loss == approx(value(plain) - log(0.375) / 4)
    assert far == approx(plain)
    assert sorted(map(bool, drawn[:2])) == [False, True]
    assert drawn[2:] == approx(plain[2:])


def test_bapo():
    """The band widens, low first, until the tokens of positive advantage have half of the loss.

    A = 1 at ratios 0.5 and 0.5 and -1 at 1 and 0.5: P = 1 and N = 1 + max(0.5, low) is 1.6 to 1.9, never balanced.
    Without the ratio of 1, N is 0.6 and the first band holds. A = 1 at 2 and -1 at 1.38: P = min(2, high) ends at 1.4.
    """

    def band(advantages: list[float], ratios: list[float]) -> tuple[float, float]:
        batch = make_batch([0.0] * len(ratios), [[1]] * len(ratios), advantages=[[a] for a in advantages])
        batch = batch.with_fields(proximal=batch.behavior)
        shift = torch.tensor(ratios, dtype=torch.float64).log()[:, None]
        return BAPO.surrogate.band(BAPO.statistics(batch.behavior + shift, BAPO.weigh(batch)))

    assert band([1, 1, -1, -1], [0.5, 0.5, 1.0, 0.5]) == approx((0.9, 3.0))
    assert band([1, 1, -1], [0.5, 0.5, 0.5]) == (0.6, 1.2)
    assert band([1, -1], [2.0, 1.38]) == approx((0.9, 1.4))
    loss, slopes = of({"preset": "bapo", "updates": {}}, pair([1.0, 0.0]))

    assert slopes == approx([-1.1 * A / 4, 0.0, 0.9 * A / 4, 0.0])
    assert loss == approx((-1.1 - 1.2 + 0.9 + 0.6) * A / 4)


def test_fipo():
    """With half-life 1 the first sums are log 1.1 + log 3 / 2 = 0.6446 and log 0.9 + log 0.375 / 2 = -0.5958.

    Bounded to [1, 1.2] the weights are 1.2, 1.2 and 1, 1; below [0.5, 3] e^0.6446, 3, e^-0.5958 and 0.5.
    """
    spec = {"preset": "fipo", "keep": "none", "overlong": "none", "correction.half_life": 1.0}
    open_spec = {**spec, "correction.low": 0.5, "correction.high": 3.0}

    assert of(spec, pair([1.0, 0.0]))[1] == approx([-1.1 * 1.2 * A / 4, 0.0, 0.9 * A / 4, 0.0])
    found = of(open_spec, pair([1.0, 0.0]))[1]
    assert found == approx([-1.1 * 1.1 * sqrt(3) * A / 4, 0.0, 0.9 * 0.9 * sqrt(0.375) * A / 4, 0.0])


def test_vc_ppo():
    """Lambda 0.95 for the policy, the mean of each answer, a clip of 0.2; three tokens earn 1, one earns 0.

    Values 1/2, 1/4, 3/4 give errors -1/4, 1/2, 1/4, so the advantages are -1/4 + 0.95 * 0.7375 = 0.450625,
    1/2 + 0.95 / 4 = 0.7375 and 1/4; that of the other answer is -1/2. Ratios 1.1, 3, 0.9 and 0.375: the second and the
    last are cut.
    """
    before = [[log(0.5), log(0.2), log(0.5)], [log(0.4), 0.0, 0.0]]
    now = [[log(0.55), log(0.6), log(0.45)], [log(0.15), 0.0, 0.0]]
    values = [[0.5, 0.25, 0.75], [0.5, 0.0, 0.0]]
    batch = make_batch([1.0, 0.0], [[1, 1, 1], [1, 0, 0]], behavior=before, proximal=before, values=values)
    loss, found = of("vc-ppo", batch, now)

    assert found == approx([-1.1 * 0.450625 / 6, 0.0, -0.9 * 0.25 / 6, 0.0], abs=1e-15)
    assert loss == approx(0.2 - 1.6056875 / 6)


@pytest.mark.parametrize("name", ["m2po", "high-entropy", "clip-cov", "kl-cov", "bapo"])
def test_a_choice_of_tokens_survives_rounding(name: str):
    """In float32, with micro-batches whose numbers are a rounding off those of the pass before, no token changes."""
    generator = torch.Generator().manual_seed(3)
    behavior = -2 + torch.randn(16, 40, generator=generator).clamp(max=1.5)
    current = (behavior + 0.5 * torch.randn(16, 40, generator=generator)).clamp(max=-0.01)
    rewards = [float(n % 3 == 0) for n in range(16)]
    algorithm = resolve({"preset": name, "updates": {}, **({"keep": "none"} if name == "high-entropy" else {})})
    batch = make_batch(rewards, [[1] * 40] * 16, [n // 4 for n in range(16)], torch.float32, behavior=behavior.tolist())
    batch = algorithm.weigh(algorithm.prepare(batch.with_fields(proximal=behavior)))
    statistics = algorithm.statistics(current, batch, -current)

    def slopes(now: Tensor) -> Tensor:
        leaf = now.clone().requires_grad_()
        total = algorithm.loss(leaf, -leaf.detach(), batch, statistics).total
        return torch.autograd.grad(total, leaf)[0]

    for sign in (-1, 1):
        moved = torch.nextafter(current, torch.full_like(current, sign * torch.inf))
        torch.testing.assert_close(slopes(moved), slopes(current), rtol=1e-4, atol=1e-9)


def test_scalerl():
    """Ratios 1.1, 3 (capped at 2), 0.9, 0.375 times a, a quarter each: the deviation is that of all four advantages.

    A second prompt whose answers have one token each: the advantages are 0.5 and -0.5 twice, of deviation 1 / sqrt(3),
    and a token of the first prompt weighs 1 / (2 * 4), one of the second 1 / (2 * 2).
    """
    loss, slopes = of({"preset": "scalerl", "surrogate.trust.cap": 2.0}, pair([1.0, 0.0]))
    two = make_batch([1, 0, 1, 0], [[1, 1], [1, 1], [1], [1]], [0, 0, 1, 1], behavior=[*BEFORE, [-1.0], [-1.0]])
    _, wide = of("scalerl", two, [*NOW, [-1.0, 0.0], [-1.0, 0.0]])
    a = 0.5 / (1 / sqrt(3) + 1e-6)

    assert slopes == approx([-1.1 * A / 4, -2 * A / 4, 0.9 * A / 4, 0.375 * A / 4])
    assert loss == approx(value(slopes))
    assert wide == approx([-1.1 * a / 8, -3 * a / 8, 0.9 * a / 8, 0.375 * a / 8, -a / 4, a / 4])


def test_the_optimal_token_baseline_weighs_returns_by_what_was_undecided():
    """Answers of three tokens and two whose squares add up to 0.5, 0.4, 0.6 and 0.5, 0.42.

    1 - 2 p + sum p^2 is 0.5, 1 and 0.5, 0.62. W = 0.5, 1.5 against 0.5, 1.12 of an answer that earns nothing: baselines
    0.5 / 1 and 1.5 / 2.62. The third token of the longer answer has none, or nothing with singleton = "zero". A reward
    that the first token earns is the return of that token alone. A token weighs 1/5, and all ratios are 1.
    """
    policies = [[log(0.5), log(0.2), log(0.3)], [log(0.5), log(0.4)]]
    colder = [[log(0.25 / 0.5), log(0.04 / 0.4), log(0.09 / 0.6)], [log(0.25 / 0.5), log(0.16 / 0.42)]]
    known = {"behavior": policies, "proximal": policies, "sharpened": colder}
    now = [[*policies[0]], [*policies[1], -1.0]]
    baseline = 1.5 / 2.62
    batch = make_batch([1.0, 0.0], [[1, 1, 1], [1, 1]], **known)

    loss, slopes = of("otb", batch, now)

    advantages = [0.5, 1 - baseline, 1.0, -0.5, -baseline]
    assert slopes == approx([-a / 5 for a in advantages], rel=1e-12)
    assert loss == approx(-sum(advantages) / 5, rel=1e-12)
    zero = of({"preset": "otb", "advantage.singleton": "zero"}, batch, now)[1]
    assert zero == approx([-a / 5 for a in (*advantages[:2], 0.0, *advantages[3:])], rel=1e-12)
    early = make_batch([1.0, 0.0], [[1, 1, 1], [1, 1]], step_rewards=[[1.0, 0, 0], [0.0, 0]], **known)
    assert of("otb", early, now)[1] == approx([-0.1, 0, 0, 0.1, 0], abs=1e-15)
    same = make_batch([1.0, 1.0], [[1, 1, 1], [1, 1]], **known)
    assert of("otb", same, now)[1] == approx([0, 0, -0.2, 0, 0], abs=1e-15)


@pytest.mark.parametrize(
    ("spec", "rewards", "more", "slopes", "loss"),
    [
        ("sft", [1.0, 1.0], {"proximal": NOW}, [-0.25] * 4, -log(0.55 * 0.6 * 0.45 * 0.15) / 4),
        ("expert-iteration", [1.0, 0.25], {"proximal": NOW}, [-0.25] * 4, -log(0.55 * 0.6 * 0.45 * 0.15) / 4),
        ("expert-iteration", [1.0, 0.0], {"proximal": NOW}, [-0.5, -0.5, 0, 0], -log(0.55 * 0.6) / 2),
        ("raft", [1.0, 0.25], {"proximal": NOW}, [-0.5, -0.5, 0, 0], -log(0.55 * 0.6) / 2),
        (
            "opd",
            [1.0, 0.0],
            {"reference": [[log(0.25), log(0.4)], [log(0.5), log(0.8)]]},
            [1.1 * L / 4, -3 * L / 4, 0, -0.375 * L / 4],
            L * (1.1 * log(0.55) - 3 * log(0.6) - 0.375 * log(0.15)) / 4,
        ),
        (
            "rae",
            [1.0, 0.25],
            {"baseline": [0.5, 0.1]},
            [-1.1 * 0.5 / 4, 0, -0.9 * 0.15 / 4, -0.375 * 0.15 / 4],
            -(1.1 * 0.5 + 1.2 * 0.5 + 0.9 * 0.15 + 0.375 * 0.15) / 4,
        ),
        ("lite-ppo", [1.0, 0.0], {}, [-1.1 * A / 4, 0, 0.9 * A / 4, 0], (-1.1 - 1.2 + 0.9 + 0.8) * A / 4),
    ],
)
def test_given_answers_teachers_and_roles(
    spec: str, rewards: list[float], more: dict[str, Any], slopes: list[float], loss: float
):
    """Given or accepted answers have their mean negative log-likelihood: A = 1, or 4 tokens over 2 accepted ones.

    Under a teacher of 0.25, 0.4 and 0.5, 0.8, A is its log-ratio to proximal, -log 2, log 2, 0 and log 2. Of roles that
    usually earn 0.5 and 0.1, A is 0.5 and 0.15, and the clip to 0.8..1.2 stops the ratio of 3. Over the batch's
    deviation A is a and -a, and it stops that of 0.375 as well.
    """
    found, gradient = of(spec, pair(rewards, **more))

    assert gradient == approx(slopes, rel=1e-12, abs=1e-15)
    assert found == approx(loss, rel=1e-12)


STUDENTS = [[0.6, 0.2, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]
TEACHERS = [[0.5, 0.3, 0.1, 0.1], [0.1, 0.5, 0.2, 0.2], [0.4, 0.1, 0.3, 0.2]]
TOLD_APART = [[0, 1], [1, 2], [0, 2]]
DISTANCES = [0.02829991245473989933, 0.08512282595722164401, 0.09233151537307279663]
SLOPES = [
    [0.09241298660352883612, -0.0867530041125808562, -0.0028299912454739899, -0.0028299912454739899],
    [-0.0490587934065386025, 0.17594458746479390054, -0.0778270006517166953, -0.0490587934065386025],
    [-0.1405837861547020875, 0.10462352709822947164, -0.0686632680417568557, 0.10462352709822947164],
]


@pytest.mark.parametrize(("name", "taught"), [("sdft", [True, True]), ("sdpo", [True, True]), ("sdpo", [False, True])])
def test_self_distillation(name: str, taught: list[bool]):
    """KL of three tokens over two told apart and a lump, and the slope p (f - KL) of each logit, over 3 tokens.

    The first token: 0.6 ln(0.6 / 0.5) + 0.2 ln(0.2 / 0.3) + 0.2 ln(0.2 / 0.2); those of the other tokens likewise, in
    arithmetic of 50 digits. f of a token of the lump is that of the lump. An answer of the first response's group for
    which there is no other that succeeded counts in the mean and has no slope.
    """
    algorithm = resolve({"preset": name, "surrogate.top_k": 2})
    logits = torch.tensor(STUDENTS).log().requires_grad_()
    others = torch.tensor(TEACHERS).log().gather(1, torch.tensor(TOLD_APART))
    head = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(head.weight)
    top = TopLogprobs(torch.tensor(TOLD_APART), others)
    logprobs, _, kl = scored(logits, head, torch.tensor([0, 1, 3]), (1.0, 256, False), top)
    places = (torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    current = torch.zeros(2, 2).index_put(places, logprobs)
    batch = make_batch([1.0, 0.0], [[1, 1], [1]], [0, 0], behavior=current.tolist())
    batch = algorithm.weigh(algorithm.prepare(batch.with_fields(hint_lengths=torch.tensor(taught).long() * 3)))
    statistics = algorithm.statistics(current, batch, current)
    loss = algorithm.loss(current, torch.zeros(2, 2), batch, statistics, torch.zeros(2, 2).index_put(places, kl))
    loss.total.backward()

    factors = [float(taught[0]), float(taught[0]), float(taught[1])]
    assert kl.tolist() == approx(DISTANCES, abs=2e-7)
    assert float(loss.total.detach()) == approx(
        sum(f * d for f, d in zip(factors, DISTANCES, strict=True)) / 3, abs=2e-7
    )
    expected = torch.tensor([[f * s / 3 for s in row] for f, row in zip(factors, SLOPES, strict=True)])
    torch.testing.assert_close(logits.grad, expected, atol=2e-7, rtol=0)
