"""The noise that importance weights add to a policy gradient, response by response, in the space of the parameters.

One response's part of the gradient is g(u) = A / L sum_t u_t grad log pi(token t). With u = 1 it is the plain score.
GRPO has u_t = w_t, the token's ratio; GSPO u_t = s, the geometric mean of the response's; importance sampling as it is
meant (GSPO's eq. 4) the product of all w. What a weight adds is |g(u) - g(1)|^2, here in shares of |g(1)|^2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.claims.estimates import NotMeasured
from experiments.claims.rescoring import Answers, weights_after
from torch import Tensor

from gnomon.models.logprobs import TokenScorer
from gnomon.records.reading import RunRecord

BINS = ((1, 8), (9, 14), (15, 99))
"""Lengths in tokens, first and last."""


@dataclass(frozen=True)
class Noise:
    """What each kind of weight adds to the gradient of responses of some length, in shares of its squared size.

    token, sequence, product: the weights w_t, s and prod w. clipped: w_t with GRPO's clip (0.2, 0.27), which
    takes tokens out. spread: standard deviation of a token's log-ratio. count: responses.
    """

    token: float
    clipped: float
    sequence: float
    product: float
    spread: float
    count: int


def noise_by_length(asked: RunRecord, trained: RunRecord, most: int) -> tuple[Noise, ...]:
    """Return the noise for each of ``BINS``: the policy after the first step of ``trained``, on answers of the one
    before it.

    asked: a run of the same model whose weights do not change. Its answers from step 2 on are looked at: they are of
    the weights that ``trained`` began with, and other ones than it was trained on. So nothing here depends on when
    anything happened. Responses whose group has equal rewards have no gradient and are left out.
    most: responses of each range that are looked at, the first ones.
    Raises: NotMeasured for runs without them, or whose models differ.
    """
    if asked.experiment()["model"] != trained.experiment()["model"]:
        raise NotMeasured(f"{asked.path.name} and {trained.path.name} begin with different models")
    first, later = TokenScorer(weights_after(asked, 0)), TokenScorer(weights_after(trained, 1))
    sizes: list[list[Tensor]] = [[] for _ in BINS]
    spreads: list[list[Tensor]] = [[] for _ in BINS]
    steps = [step for step in asked.rollout_steps() if step > 1]
    if not steps:
        raise NotMeasured(f"{asked.path.name} has no answers after its first step")
    for step in steps:
        answers = Answers.recorded(asked, step)
        chosen = dict(_with_gradient(answers))
        places = {index: _place(int(answers.mask[index].sum())) for index in chosen}
        if all(len(own) == most for own in sizes):
            break
        with torch.no_grad():
            before = answers.scored(first).logprobs
        for index, place in places.items():
            if len(sizes[place]) == most:
                continue
            found, change = weights_add(later, answers.row(index), before[index], chosen[index])
            sizes[place].append(found)
            spreads[place].append(change)
    return tuple(_noise(own, changes) for own, changes in zip(sizes, spreads, strict=True))


def _place(length: int) -> int:
    return next(n for n, (_, last) in enumerate(BINS) if length <= last)


def _with_gradient(answers: Answers) -> Iterator[tuple[int, float]]:
    """Yield each response that its group says something about, with its advantage."""
    for number in answers.group.unique().tolist():
        rows = (answers.group == number).nonzero()[:, 0]
        rewards = answers.rewards[rows]
        if len(rows) > 1 and float(rewards.max()) > float(rewards.min()):
            centered = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            yield from zip(rows.tolist(), centered.tolist(), strict=True)


def weights_add(scorer: TokenScorer, answer: Answers, before: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """Return |g(1)|^2 and |g(u) - g(1)|^2 for tokens, clipped tokens, the sequence and the product; and log-ratios.

    answer: one. before Float[T]: log-probabilities of what sampled it. advantage: of the response.
    """
    mask = answer.mask[0]
    current = answer.scored(scorer).logprobs[0][mask]
    change = (current.detach() - before[: len(mask)][mask]).double()
    ratio = change.exp()
    is_free = (ratio <= 1.27) if advantage > 0 else (ratio >= 0.8)
    weights = (ratio, ratio * is_free, change.mean().exp().expand_as(ratio), change.sum().exp().expand_as(ratio))
    plain = torch.ones_like(ratio)
    pushes = [plain, *(weight - plain for weight in weights)]
    parameters = [p for p in scorer.model.parameters() if p.requires_grad]
    squares = []
    for number, push in enumerate(pushes):
        total = (push.to(current.dtype) * current).sum() * advantage / len(current)
        slopes = torch.autograd.grad(total, parameters, retain_graph=number + 1 < len(pushes), allow_unused=True)
        squares.append(sum(float(slope.double().square().sum()) for slope in slopes if slope is not None))
    return torch.tensor(squares, dtype=torch.float64), change


def _noise(sizes: list[Tensor], changes: list[Tensor]) -> Noise:
    if not sizes:
        return Noise(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    total = torch.stack(sizes).sum(0)
    token, clipped, sequence, product = (total[1:] / total[0]).tolist()
    return Noise(token, clipped, sequence, product, float(torch.cat(changes).std()), len(sizes))
