"""The noise that importance weights add to a policy gradient, response by response, in the space of the parameters.

One response's part of the gradient is g(u) = A / L sum_t u_t grad log pi(token t). With u = 1 it is the plain score.
GRPO has u_t = w_t, the token's ratio; GSPO u_t = s, the geometric mean of the response's; importance sampling as it is
meant (GSPO's eq. 4) the product of all w. What a weight adds is |g(u) - g(1)|^2, here in shares of |g(1)|^2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from gnomon.models.logprobs import TokenScorer
from gnomon.records.reading import RunRecord
from gnomon.studies.rescored import Answers, weights_after

BINS = ((1, 8), (9, 14), (15, 99))
"""Lengths in tokens, first and last."""
MOST = 60
"""Responses of each range that are looked at."""


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


@lru_cache(maxsize=64)
def noise_by_length(run: Path, step: int) -> tuple[Noise, ...]:
    """Return the noise for each of ``BINS``: the policy after ``step`` steps, on answers of the policy before them.

    The answers are those of step number ``step`` + 1 of a run that answers one step ahead: of these, the ones that were
    whole before the weights changed. They are of the same weights as those that were trained on, and were not trained
    on themselves. Responses whose group has equal rewards have no gradient and are left out.
    Raises: NotMeasured for a run without them.
    """
    record = RunRecord(run)
    answers = Answers.recorded(record, step + 1)
    with torch.no_grad():
        before = answers.scored(TokenScorer(weights_after(record, step - 1))).logprobs
    scorer = TokenScorer(weights_after(record, step))
    sizes: list[list[Tensor]] = [[] for _ in BINS]
    spreads: list[list[Tensor]] = [[] for _ in BINS]
    for index, advantage in _with_gradient(answers, step - 1):
        place = next(n for n, (_, last) in enumerate(BINS) if int(answers.mask[index].sum()) <= last)
        if len(sizes[place]) == MOST:
            continue
        found, change = weights_add(scorer, answers.row(index), before[index], advantage)
        sizes[place].append(found)
        spreads[place].append(change)
    return tuple(_noise(own, changes) for own, changes in zip(sizes, spreads, strict=True))


def _with_gradient(answers: Answers, version: int) -> Iterator[tuple[int, float]]:
    """Yield each response of these weights that its group says something about, with its advantage."""
    for number in answers.group.unique().tolist():
        rows = (answers.group == number).nonzero()[:, 0]
        rewards = answers.rewards[rows]
        if len(rows) > 1 and float(rewards.max()) > float(rewards.min()):
            centered = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            pairs = zip(rows.tolist(), centered.tolist(), strict=True)
            yield from ((row, advantage) for row, advantage in pairs if int(answers.version[row]) == version)


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
