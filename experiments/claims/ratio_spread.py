"""How far something moves tokens, and how far whole responses: the spread of their log-ratios.

GSPO reads the mean of a response's log-ratios where GRPO reads each. If tokens move independently that mean is
narrower than a token by the square root of the length; if a response moves as one it is as wide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import torch
from experiments.claims.estimates import NotMeasured
from experiments.claims.rescoring import Answers, weights_after
from torch import Tensor

from gnomon.models.logprobs import TokenScorer
from gnomon.records.reading import RunRecord


@dataclass(frozen=True)
class Spread:
    """Of log-ratios around 0, in nats.

    token: root mean square of a token's. response: of the mean over a response. together: the response's in units of a
    token's divided by the square root of the length, which is 1 where tokens move independently, and the root of the
    length where all of a response move alike.
    """

    token: float
    response: float
    together: float


def spread(changes: Tensor, mask: Tensor) -> Spread:
    """Return the spread of log-ratios Float[B T] where ``mask`` Bool[B T] is true; empty responses do not count.

    together is the root of sum_i L_i m_i^2 / sum_i q_i, with m_i the mean and q_i the mean square of response i: both
    sums are equal on average where tokens are independent, however much responses differ in how far they move.
    Raises: NotMeasured where nothing changed.

    >>> spread(torch.tensor([[0.5, 0.5, 0.5, 0.5]]), torch.ones(1, 4, dtype=torch.bool)).together
    2.0
    """
    rows = mask.any(1)
    counts = mask[rows].sum(1)
    moved = torch.where(mask, changes.double(), 0.0)[rows]
    squares, means = moved.square().sum(1), moved.sum(1) / counts
    if not bool(moved.any()):
        raise NotMeasured("nothing changed")
    together = (means.square() * counts).sum() / (squares / counts).sum()
    token = squares.sum() / counts.sum()
    return Spread(*(float(found.sqrt()) for found in (token, means.square().mean(), together)))


@lru_cache(maxsize=128)
def step_spread(run: Path, step: int) -> Spread:
    """Return how far training step number ``step`` moved the answers of the step after it.

    They are answers that the step was not trained on, as those of a step's last minibatch are. Raises: NotMeasured for
    a run that lacks them, or the weights before and after.
    """
    record = RunRecord(run)
    models = [weights_after(record, number) for number in (step - 1, step)]
    answers = Answers.recorded(record, step + 1)
    with torch.no_grad():
        before, later = (answers.scored(TokenScorer(model)).logprobs for model in models)
    return spread(later - before, answers.mask)


def step_spreads(part: Callable[[Spread], float], steps: Sequence[int]) -> Callable[[RunRecord], float]:
    """Return what reads a part of `Spread`, mean over these steps."""
    return lambda record: fmean(part(step_spread(record.path, step)) for step in steps)
